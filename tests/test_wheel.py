"""The wheel and the source archive: what they contain, and what works where only the wheel is installed.

`make package` runs these, and the checkers of uploads; `make matrix` runs them for each Python. They need uv and the
package index.
"""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from tests.test_package import leave_states
from xrank import environment

ROOT = Path(__file__).parent.parent
UV = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
PYTHON = environment.environ().get("XRANK_MATRIX_PYTHON", sys.executable)
"""The interpreter of the environment that gets only the wheel."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(UV is None, reason="uv is not installed: pip install uv"),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the version comes from git"),
]

INSTALLED_MEGABYTES = 90
"""Aim of an installation without torch."""


def run(*command: object, cwd: Path | None = None, status: int = 0, **variables: str) -> str:
    environ = {**os.environ, **variables}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environ, capture_output=True, text=True, timeout=550)
    assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Build the source archive, and the wheel from it, as for an upload."""
    folder = tmp_path_factory.mktemp("dist")
    run(UV, "build", "--quiet", "--out-dir", folder, ROOT, SOURCE_DATE_EPOCH="1700000000")
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("xrank-*-py3-none-any.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory) -> Path:
    """Return the programs' folder of an environment that contains the wheel and what it asks for."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    run(UV, "venv", "--quiet", "--python", PYTHON, venv)
    run(UV, "pip", "install", "--quiet", "--python", venv, wheel)
    return venv / "bin"


def test_a_second_build_in_another_place_and_year_is_the_same(dist: Path, wheel: Path, tmp_path: Path):
    copy = tmp_path / "elsewhere"
    run("git", "clone", "--quiet", ROOT, copy)
    files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")[:-1]
    for file in files:  # with what is not committed yet
        if (ROOT / file).is_file():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, copy / file)
            os.utime(copy / file, (1, 1))
    run(UV, "build", "--quiet", "--out-dir", tmp_path / "again", copy, SOURCE_DATE_EPOCH="1700000000", TZ="Asia/Tokyo")
    (again,) = (tmp_path / "again").glob("*.whl")
    assert again.name == wheel.name and again.read_bytes() == wheel.read_bytes()
    (archive,) = dist.glob("*.tar.gz")
    assert (tmp_path / "again" / archive.name).read_bytes() == archive.read_bytes()


def test_the_contents_of_the_wheel(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info, data = sorted({name.split("/")[0] for name in names} - {"xrank"}, reverse=True)
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        page = archive.read(f"{data}/data/share/man/man1/xrank-gather.1").decode()
    assert info.endswith(".dist-info")
    assert "\n\\fB\\-o,\\fP \\-\\-out DIR\n" in page and ".B xrank gather checkpoint-2000 -o model" in page
    assert f"{data}/data/share/man/man1/xrank-layout-show.1" in names
    of_package = {name for name in names if name.startswith("xrank/")}
    tracked = set(run("git", "ls-files", "xrank", "--cached", "--others", "--exclude-standard", cwd=ROOT).split())
    assert of_package == tracked and "xrank/py.typed" in of_package and "xrank/recipes/megatron-llama.toml" in tracked
    assert f"{info}/licenses/LICENSE" in names
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    always = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {line.split(">")[0] for line in always} == {
        "click",
        "isal",
        "ml-dtypes",
        "msgspec",
        "numpy",
        "xxhash",
    }
    assert {"torch", "pytest", "examples"} <= set(metadata.get_all("Provides-Extra"))
    assert "xrank = xrank.__main__:main" in entry_points
    assert "[pytest11]\nxrank.testing.plugin = xrank.testing.plugin" in entry_points


def test_the_contents_of_the_source_archive(dist: Path):
    (file,) = dist.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "CONTRIBUTING.md", "Makefile"):
        assert name in names
    for folder in ("examples", "docs", "tests", "benchmarks", "xrank"):
        tracked = run("git", "ls-files", folder, cwd=ROOT).split()
        assert tracked and set(tracked) <= names


def test_the_installation_is_small_and_has_no_torch(installed: Path):
    # Links and shared blocks count in full: this is what a copy into an image would take.
    nbytes = sum(path.stat().st_size for path in installed.parent.rglob("*") if path.is_file())
    assert nbytes <= INSTALLED_MEGABYTES * 1e6
    assert run(installed / "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))") == "None\n"


def test_the_commands_work_without_torch(installed: Path, tmp_path: Path):
    whole = leave_states(tmp_path / "workspace")
    xrank = installed / "xrank"
    assert run(xrank, "--version").startswith("xrank, version ")
    source = json.loads(run(xrank, "inspect", "workspace", "--json", cwd=tmp_path))
    assert source["status"] == "ok" and source["problems"] == []
    run(xrank, "gather", "workspace", "--out", "model", cwd=tmp_path)
    run(xrank, "verify", "model", "--against", "workspace", cwd=tmp_path)
    assert "dp" in run(xrank, "layout", "show", "workspace", cwd=tmp_path)
    layouts = run(xrank, "layout", "show", "workspace", "--toml", cwd=tmp_path)
    (tmp_path / "layouts.toml").write_text(layouts)
    run(xrank, "reshard", "model", "--layout", "layouts.toml", "--out", "again", cwd=tmp_path)
    run(xrank, "gather", "again", "--out", "model2", cwd=tmp_path)
    assert json.loads(run(xrank, "simulate", "workspace", "--json", cwd=tmp_path))["status"] == "ok"
    from safetensors.torch import load_file

    for model in ("model", "model2"):
        loaded = load_file(tmp_path / model / "model.safetensors")
        assert loaded.keys() == whole.keys()
        assert all(torch.equal(loaded[n].view(torch.uint8), whole[n].view(torch.uint8)) for n in whole)


def test_calls_that_need_torch_name_the_extra(installed: Path, tmp_path: Path):
    code = """
import xrank
for call in (
    lambda: xrank.export_model(None, "x"),
    lambda: xrank.NFSWorkspace("w").write_configs_and_weights({}, {}),
):
    try:
        call()
    except xrank.errors.UsageError as error:
        print(error.next_step)
"""
    assert run(installed / "python", "-c", code, cwd=tmp_path) == "run pip install 'torch>=2.10'\n" * 2


def test_uvx_runs_it(wheel: Path):
    assert run(UV, "tool", "run", "--from", wheel, "xrank", "--version").startswith("xrank, version ")


def test_the_pytest_plugin_works_without_a_line_of_configuration(wheel: Path, tmp_path: Path):
    run(UV, "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "packages", wheel)
    project = tmp_path / "project"
    project.mkdir()
    (project / "test_sum.py").write_text(
        "import pytest\n"
        "import torch\n"
        "@pytest.mark.ranks(2)\n"
        "def test_sum(rank, world_size):\n"
        "    total = torch.ones(1)\n"
        "    torch.distributed.all_reduce(total)\n"
        "    assert total == world_size == 2 and rank in (0, 1)\n"
    )
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers"]
    assert "1 passed" in run(*command, cwd=project, PYTHONPATH=str(tmp_path / "packages"))
    # The line that was needed before does no harm.
    (project / "conftest.py").write_text('pytest_plugins = ["xrank.testing.plugin"]\n')
    assert "1 passed" in run(*command, cwd=project, PYTHONPATH=str(tmp_path / "packages"))
