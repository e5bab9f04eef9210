"""A user's project under ``mypy --strict`` or pyright sees the parameters of public calls: xrank ships py.typed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import xrank

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # mypy reads torch's types first, which takes a minute

PACKAGE = Path(xrank.__file__).parent

CALLS = {
    "get_tensors_parallel": ("get_tensors_parallel(tensor, [0], timeout_seconds=5, key='up')", "timeout_seconds"),
    "get_configs_parallel": ("get_configs_parallel({'a': tensor}, [0], None, early_exit=True)", "early_exit"),
    "export_model": ("export_model(module, 'out', dtype=torch.bfloat16, progress=print_progress)", "progress"),
    "iter_model": ("iter_model({'up': tensor}, layouts=layouts, ranks='all')", "layouts"),
    "load_model": ("load_model(module, Path('model'), layouts=layouts)", "layouts"),
    "gather_checkpoint": ("gather_checkpoint('run', 'out', layouts='tp2.toml', replicas='pick')", "layouts"),
    "open_checkpoint": ("open_checkpoint('run', dtype='bf16', max_memory='1GB')", "max_memory"),
    "reshard_checkpoint": ("reshard_checkpoint('run', layouts, 'out', overwrite=True)", "overwrite"),
    "verify_model": ("verify_model('model', against='run', workers=2)", "against"),
    "check_layouts": ("check_layouts(layouts, {'up': (8, 4)}, dtypes={'up': 'BF16'})", "dtypes"),
    "NFSWorkspace": ("NFSWorkspace('run', rank=0, world_size=2)", "world_size"),
    "write_configs_and_weights": ("workspace.write_configs_and_weights({}, {'up': tensor}, step=3)", "step"),
}
"""For each public call a right use, and the parameter that the wrong use misspells."""

HEAD = """
from pathlib import Path

import torch
from xrank import NFSWorkspace, export_model, gather_checkpoint, get_configs_parallel, get_tensors_parallel
from xrank import iter_model, load_model, open_checkpoint, reshard_checkpoint, verify_model
from xrank.commands import check_layouts
from xrank.layout import DeviceMesh, LayoutMap


def print_progress(done: int, total: int) -> None:
    print(done, total)


tensor = torch.ones(8, 4)
module = torch.nn.Linear(4, 8)
layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
workspace = NFSWorkspace("run", rank=0, world_size=2)
"""

# Strict mode refuses to return Any where a type was promised, so these show that results have types, too.
RESULTS = """

def count_tensors() -> int:
    return export_model(module, "out").num_tensors


def count_later() -> int:
    return export_model(module, "out", background=True).result(60).num_tensors


def read_whole(name: str) -> torch.Tensor:
    return open_checkpoint("run")[name]


def read_first() -> torch.Tensor:
    return next(iter(iter_model(module)))[1]
"""


def misspell(call: str, parameter: str) -> str:
    """Return a call with its parameter's last letter doubled."""
    return call.replace(f"{parameter}=", f"{parameter}{parameter[-1]}=")


def check_project(folder: Path, site: Path, program: str) -> list[str]:
    """Return what mypy reports of a program that finds xrank in `site`, as it finds installed packages."""
    folder.mkdir()
    (folder / "train.py").write_text(program)
    environ = {**os.environ, "PYTHONPATH": str(site)}
    environ.pop("MYPYPATH", None)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", "cache", "train.py"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Return mypy's errors by line, of a program with every right call, then every wrong one."""
    lines = [call for call, _ in CALLS.values()] + [misspell(*case) for case in CALLS.values()]
    folder = tmp_path_factory.mktemp("user") / "project"
    reported = check_project(folder, PACKAGE.parent, "\n".join([*lines_of_head(), *lines, RESULTS]))
    found = (re.fullmatch(r"train\.py:(\d+): error: (.*)", line) for line in reported)
    return {int(match[1]) - len(lines_of_head()): match[2] for match in found if match}


def lines_of_head() -> list[str]:
    return HEAD.splitlines()


def test_right_calls_pass(errors: dict[int, str]):
    assert {line: text for line, text in errors.items() if not len(CALLS) < line <= 2 * len(CALLS)} == {}


@pytest.mark.parametrize("name", CALLS)
def test_misspelt_argument_is_an_error(name: str, errors: dict[int, str]):
    call, parameter = CALLS[name]
    error = errors[len(CALLS) + list(CALLS).index(name) + 1]
    unexpected = f'Unexpected keyword argument "{parameter}{parameter[-1]}" for "{name}"'
    # A function of two forms has an error about both.
    assert unexpected in error or f'No overload variant of "{name}" matches' in error, misspell(call, parameter)


def test_pyright_finds_the_same(tmp_path: Path):
    """Pyright in strict mode, where it is installed: pip install 'pyright[nodejs]'."""
    pytest.importorskip("pyright")
    lines = [*lines_of_head(), *(call for call, _ in CALLS.values()), *RESULTS.splitlines()]
    wrong = [misspell(*case) for case in CALLS.values()]
    (tmp_path / "train.py").write_text("\n".join([*lines, *wrong]))
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(PACKAGE.parent)], "reportUnusedExpression": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"include": ["train.py"], **settings}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = json.loads(done.stdout)["generalDiagnostics"]
    assert {error["range"]["start"]["line"] for error in errors} == set(range(len(lines), len(lines) + len(wrong)))
