"""The package as a whole: what it imports, what it shows, its errors, its layers."""

from __future__ import annotations

import ast
import builtins
import copy
import importlib
import io
import json
import os
import pickle
import pkgutil
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from pickle import UnpicklingError

import pytest
import safetensors
import torch

import xrank
from xrank import errors
from xrank.errors import XrankError
from xrank.layout import DeviceMesh, LayoutMap

PACKAGE = Path(xrank.__file__).parent
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(PACKAGE)], "xrank."))
SCRIPTS = Path(sys.executable).parent


def python(code: str, *arguments: str, cwd: Path | None = None) -> str:
    """Run code in a fresh interpreter, warnings being errors, and return what it printed."""
    command = [sys.executable, "-P", "-W", "error", "-c", code, *arguments]
    # The same xrank as in this process, wherever it was found.
    environ = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Imports


@pytest.mark.parametrize("module", ["xrank", "xrank.layout", "xrank.errors", "xrank.cli.main"])
def test_importing_is_cheap(module):
    heavy = "{'torch', 'numpy', 'ml_dtypes', 'safetensors', 'transformers', 'huggingface_hub', 'isal'}"
    assert python(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))") == "[]\n"


def test_a_plain_gather_imports_no_module_of_other_work(tmp_path):
    leave_states(tmp_path / "workspace")
    unused = [
        *("recipes.reshard_plan", "recipes.load_plan", "formats.signature", "layout.layout_diff"),
        *("readers.torch_save", "readers.hugging_face.folder", "commands.verify", "commands.export", "virtual"),
        *("layout.terms", "engine.holdings", "engine.transforms", "ranks.waits", "ranks.directory_messages"),
    ]
    writing = ["commands.folder_filling", "engine.file_writing", "engine.rounds", "storage.folder_stage"]
    code = "import sys, xrank; xrank.gather_checkpoint('workspace', 'out', dry_run=DRY); print(' '.join(sys.modules))"
    for dry_run in (True, False):
        imported = python(code.replace("DRY", str(dry_run)), cwd=tmp_path).split()
        assert "xrank.commands.gather" in imported
        assert [name for name in unused if f"xrank.{name}" in imported] == []
        assert [name for name in writing if f"xrank.{name}" in imported] == ([] if dry_run else writing)


COUNTS_COLLECTIONS = """
import atexit, gc
from xrank.__main__ import main

def count():
    return sum(generation["collections"] for generation in gc.get_stats())

before = count()
atexit.register(lambda: print(count() - before, gc.get_freeze_count() > 0))
main()
"""


def test_a_small_command_looks_for_no_garbage_even_at_its_end(tmp_path):
    leave_states(tmp_path / "workspace")
    words = ("gather", "workspace", "--out", "out", "--dry-run", "-q")
    assert python(COUNTS_COLLECTIONS, *words, cwd=tmp_path) == "out\n0 True\n"


def test_importing_xrank_imports_nothing_else_of_it():
    assert (
        python("import sys, xrank; print([name for name in sys.modules if name.startswith('xrank.')])")
        == "['xrank.deferred']\n"
    )


TORCH_IS_BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
try:
    import torch
except ImportError:
    pass
else:
    raise SystemExit("torch could be imported")
"""


TORCH_IS_MISSING = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def leave_states(workspace: Path) -> dict[str, torch.Tensor]:
    """Leave four ranks' states as a program with torch would, and return the whole tensors."""
    mesh, layouts = DeviceMesh((2, 2), ("dp", "tp")), LayoutMap(DeviceMesh((2, 2), ("dp", "tp")))
    whole = {
        "w": torch.arange(42, dtype=torch.float32).view(6, 7) / 3,
        "fp8": torch.arange(8, dtype=torch.float32).to(torch.float8_e4m3fn),
        "norm": torch.arange(5, dtype=torch.float32) + 0.1,
    }
    layouts["w"], layouts["fp8"], layouts["norm"] = "[6, n/~tp]", "[n/dp/tp]", "[n]"
    for rank in range(4):
        dp, tp = mesh.coordinate(rank).values()
        weights = {"w": whole["w"].chunk(2, 1)[tp], "fp8": whole["fp8"].chunk(4)[2 * dp + tp], "norm": whole["norm"]}
        xrank.NFSWorkspace(workspace, rank=rank, world_size=4, run_id="run").write_configs_and_weights(
            {"model_type": "made"}, weights, layouts=layouts
        )
    return whole


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def written(out: Path) -> dict[str, bytes]:
    return {name: bytes(t["data"]) for name, t in safetensors.deserialize((out / "model.safetensors").read_bytes())}


def test_a_gather_needs_no_torch(tmp_path):
    whole = leave_states(tmp_path / "workspace")
    printed = python(
        TORCH_IS_BLOCKED
        + """
import json
import xrank
from xrank.commands.inspect import inspect_source

report = inspect_source("workspace")
assert report.details["problems"] == [], report.details["problems"]
reports = [
    xrank.gather_checkpoint("workspace", "out"),
    xrank.gather_checkpoint("workspace", "cast", dtype="bf16", verify=True),
    xrank.verify_model("out"),
    xrank.verify_model("workspace"),
    xrank.verify_model("out", against="workspace"),
]
assert not any(name.partition(".")[0] == "torch" for name in sys.modules)
print(json.dumps([report.ok for report in reports]))
""",
        cwd=tmp_path,
    )
    assert json.loads(printed) == [True] * 5
    assert written(tmp_path / "out") == {name: bytes_of(tensor) for name, tensor in whole.items()}
    cast = {n: bytes_of(t if t.dtype.itemsize == 1 else t.to(torch.bfloat16)) for n, t in whole.items()}
    assert written(tmp_path / "cast") == cast


def test_the_commands_need_no_torch(tmp_path):
    whole = leave_states(tmp_path / "workspace")
    command = TORCH_IS_BLOCKED + "from xrank.cli.main import main; main()"
    assert "w" in python(command, "inspect", "workspace", "--tensors", cwd=tmp_path)
    python(command, "gather", "--workspace", "workspace", "--out", "out", cwd=tmp_path)
    python(command, "verify", "out", cwd=tmp_path)
    assert written(tmp_path / "out") == {name: bytes_of(tensor) for name, tensor in whole.items()}


NEED_TORCH = {
    "export_model": "xrank.export_model({}, 'out')",
    "iter_model": "list(xrank.iter_model({}))",
    "load_model": "xrank.load_model(None, 'out')",
    "save_model": "xrank.save_model({}, 'out')",
    "get_tensors_parallel": "xrank.get_tensors_parallel(None, [0])",
    "write_configs_and_weights": "workspace.write_configs_and_weights({}, {})",
    "read_configs_and_weights_from_rank": "workspace.read_configs_and_weights_from_rank(0)",
    "a tensor of open_checkpoint": "xrank.open_checkpoint('workspace')['w']",
    "a test on ranks": "xrank.testing.rank_pool.RankPool().run_by_name(1, 'm', None, 'f', (), {})",
}
"""Calls that need torch, by the name in the error."""


def test_calls_that_need_torch_name_the_extra_that_installs_it(tmp_path):
    leave_states(tmp_path / "workspace")
    code = """
import json
import xrank, xrank.testing.rank_pool
workspace = xrank.NFSWorkspace("own")
found = {}
for name, call in json.loads(sys.argv[1]).items():
    try:
        eval(call)
    except xrank.errors.UsageError as error:
        found[name] = [str(error), error.next_step]
for package in ("distribution", "gradients"):
    found[package] = []
    names = __import__(f"xrank.{package}", fromlist=["__all__"])
    for name in names.__all__:
        try:
            getattr(names, name)
        except ModuleNotFoundError as error:
            found[package].append(str(error))
print(json.dumps(found))
"""
    found = json.loads(python(TORCH_IS_MISSING + code, json.dumps(NEED_TORCH), cwd=tmp_path))
    for package, least in (("distribution", 8), ("gradients", 6)):
        texts = found.pop(package)
        assert len(texts) >= least and all("needs torch: run pip install 'torch>=2.10'" in text for text in texts)
    want = "run pip install 'torch>=2.10'"
    assert found == {name: [f"{name} needs torch, which is not installed", want] for name in NEED_TORCH}
    assert sorted(os.listdir(tmp_path)) == ["own", "workspace"] and os.listdir(tmp_path / "own") == []


def test_configs_without_tensors_are_gathered_without_torch(tmp_path):
    code = """
import xrank
with xrank.get_configs_parallel({"layers": {1}}, [0], None) as configs:
    print(configs)
"""
    assert python(TORCH_IS_MISSING + code, cwd=tmp_path) == "[{'layers': {1}}]\n"


# Names

PACKAGES_THAT_DEFER = [
    "xrank",
    "xrank.commands",
    "xrank.distribution",
    "xrank.gradients",
    "xrank.testing",
    "xrank.virtual",
    "xrank.workspace",
]


@pytest.mark.parametrize("package", PACKAGES_THAT_DEFER)
def test_all_is_what_can_be_had(package):
    found = importlib.import_module(package)
    for_type_checkers = {
        alias.name: node.module
        for branch in ast.parse(Path(found.__file__).read_text()).body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert for_type_checkers
    assert set(found.__all__) == {*for_type_checkers}
    for name, home in for_type_checkers.items():
        assert home.startswith(f"{package}.")
        assert getattr(found, name) is getattr(importlib.import_module(home), name)
        assert name in dir(found)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'merge'"):
        found.merge  # noqa: B018  the look-up is what raises


def test_what_one_builds_on_is_named_by_its_package():
    from xrank.readers import Hints, Reader, StoredModel, StoredShard
    from xrank.testing import MessageWorkspaceContract, ReaderContract, WorkspaceContract
    from xrank.workspace import MessageWorkspace, Workspace

    named = [Hints, Reader, StoredModel, StoredShard, MessageWorkspace, Workspace]
    assert all(isinstance(each, type) and each.__doc__ for each in named)
    assert all(hasattr(each, "__mro__") for each in (MessageWorkspaceContract, ReaderContract, WorkspaceContract))
    assert isinstance(xrank.NFSWorkspace(), Workspace)


@pytest.mark.parametrize("module", [name for name in MODULES if name != "xrank.__main__"])
def test_every_module_has_what_it_lists(module):
    if module == "xrank.integrations.lightning":
        pytest.importorskip("lightning")
    if module.startswith("xrank.integrations.vllm"):
        pytest.importorskip("vllm")
    found = importlib.import_module(module)
    names = getattr(found, "__all__", [])
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(found, name)] == []
    assert found.__doc__


def reads_environment(tree: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    return any(
        (isinstance(node, ast.Attribute) and node.attr in names and getattr(node.value, "id", None) == "os")
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names})
        for node in ast.walk(tree)
    )


def test_one_module_alone_reads_the_environment():
    readers = [p for p in PACKAGE.rglob("*.py") if reads_environment(ast.parse(p.read_text()))]
    assert [str(path.relative_to(PACKAGE)) for path in readers] == ["environment.py"]


# Errors

TREE = {
    # class: (exit code, parent, the built-in it doubles)
    "XrankError": (1, None, Exception),
    "UsageError": (2, "XrankError", ValueError),
    "UnknownFormatError": (2, "UsageError", ValueError),
    "OutputExistsError": (2, "UsageError", FileExistsError),
    "LayoutError": (2, "XrankError", ValueError),
    "IncompleteError": (3, "XrankError", FileNotFoundError),
    "ContradictionError": (4, "XrankError", ValueError),
    "CorruptError": (4, "XrankError", ValueError),
    "UnsafeError": (4, "XrankError", UnpicklingError),
    "RankFailedError": (1, "XrankError", RuntimeError),
    "RankTimeoutError": (1, "XrankError", TimeoutError),
    "NoSpaceError": (1, "XrankError", OSError),
    "GradientError": (1, "XrankError", RuntimeError),
}
PARTS = {
    "tensor": "layers.0.w",
    "rank": 3,
    "host": "node7",
    "file": "rank_3_state.pth",
    "index_range": "rows 1-2",
    "got": "this",
    "want": "that",
    "next_step": "do it again",
}
OWN_PARTS = {
    "RankFailedError": {"cause": "killed by SIGKILL", "failures": (errors.CorruptError("inner", rank=1),)},
    "RankTimeoutError": {"waiting_for": (1, 4)},
    "NoSpaceError": {"needed_nbytes": 10, "free_nbytes": 2},
}


def test_the_tree_is_all_there_is():
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, XrankError)
    }
    assert classes == set(TREE) == set(errors.__all__)


@pytest.mark.parametrize("name", TREE)
def test_an_errors_place_in_the_tree(name):
    exit_code, parent, double = TREE[name]
    kind = getattr(errors, name)
    assert kind.exit_code == exit_code
    assert parent is None or kind.__bases__[0] is getattr(errors, parent)
    assert issubclass(kind, double)
    with pytest.raises(double, match="what failed"):
        raise kind("what failed")
    # The drawing in the module's docstring names the class with its status, its own or its parent's.
    assert name in errors.__doc__
    assert getattr(builtins, double.__name__, UnpicklingError) is double


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", TREE)
def test_errors_survive_pickling_with_all_their_parts(name, protocol):
    error = getattr(errors, name)("what failed", **PARTS, **OWN_PARTS.get(name, {}))
    error.add_note("on rank 3: a traceback")
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == again.message == "what failed"
        assert again.args == error.args
        assert again.__notes__[-1] == "on rank 3: a traceback"
        for part, value in PARTS.items():
            assert getattr(again, part) == value
        for part, value in OWN_PARTS.get(name, {}).items():
            found = getattr(again, part)
            assert [str(e) for e in found] == ["inner"] if part == "failures" else found == value
        assert again.to_dict() == error.to_dict()


def test_a_traceback_says_what_was_got_and_wanted_and_what_to_do():
    error = errors.UsageError("what failed", got="this", next_step="do that")
    error.add_note("and more")
    told = "".join(traceback.format_exception(error))
    assert told == "xrank.errors.UsageError: what failed\n  got   this\n  try   do that\nand more\n"
    assert str(error) == "what failed" and errors.UsageError("what failed").__notes__ == []
    again = copy.copy(error)
    again.add_note("more of it")
    assert error.__notes__[-1] == "and more"


@pytest.mark.parametrize("name", TREE)
def test_absent_parts_are_none(name):
    error = getattr(errors, name)("what failed")
    shown = error.to_dict()
    assert (shown.pop("type"), shown.pop("message")) == (name, "what failed")
    # A layout's error has a next step of its own where its maker gives none.
    assert shown.pop("try") == (error.next_step if name == "LayoutError" else None)
    assert set(shown.values()) == {None}
    assert len(shown) == len(PARTS) - 1
    buffer = io.StringIO()
    print(error, file=buffer)
    assert buffer.getvalue() == "what failed\n"


def test_a_part_that_no_error_has_is_refused():
    with pytest.raises(TypeError):
        errors.CorruptError("what failed", tensr="w")


# Layers


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / "lint-imports"), "--no-cache"]
    environ = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=150)


@pytest.fixture
def package_copy(tmp_path):
    project = PACKAGE.parent / "pyproject.toml"
    if not project.exists() or not (SCRIPTS / "lint-imports").exists():
        pytest.skip("the layers are checked in a checkout with import-linter")
    shutil.copytree(PACKAGE, tmp_path / "xrank", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(project, tmp_path)
    return tmp_path


def test_the_layers_hold(package_copy):
    done = lint(package_copy)
    assert done.returncode == 0, done.stdout
    assert " kept, 0 broken." in done.stdout


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("layout/nests.py", "import xrank.cli", "layers"),
        ("layout/nests.py", "from xrank.engine import planner", "layers"),
        ("storage/tiles.py", "from xrank.formats.torch_archive import read_archive", "layers"),
        ("readers/placement.py", "from xrank.engine.planner import make_plan", "layers"),
        ("errors.py", "def late():\n    import xrank.environment", "layers"),
        ("commands/gather.py", "import xrank.virtual.cluster", "layers"),
        ("recipes/options.py", "def late():\n    import xrank.gradients", "layers"),
        ("utils.py", "", "layers"),
        ("engine/executor.py", "import xrank.testing", "the library never imports xrank.testing"),
        (
            "cli/gather.py",
            "def late():\n    from xrank.testing import rank_pool",
            "the library never imports xrank.testing",
        ),
    ],
)
def test_a_planted_import_breaks_the_layers(package_copy, file, line, contract):
    with open(package_copy / "xrank" / file, "a") as stream:
        stream.write(f"\n{line}\n")
    done = lint(package_copy)
    assert done.returncode != 0
    assert f"{contract} BROKEN" in done.stdout, done.stdout


# The command


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["gather", "--help"]], ids=" ".join)
def test_python_m_xrank_is_xrank(arguments):
    outputs = [
        subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=150)
        for command in ([sys.executable, "-m", "xrank"], [str(SCRIPTS / "xrank")])
    ]
    assert outputs[0].stdout == outputs[1].stdout
    assert [done.returncode for done in outputs] == [0, 0]
    assert ("Usage: xrank" in outputs[0].stdout) == ("--help" in arguments)
    assert [done.stderr for done in outputs] == ["", ""]
