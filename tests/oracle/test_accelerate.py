"""What the real accelerate saves rank by rank: gathered where neither accelerate nor torch can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.oracle.save_accelerate import CASES, built

# Importing accelerate and starting ranks takes most of it.
pytestmark = pytest.mark.timeout(200)

GATHER = """
import sys
from importlib.abc import MetaPathFinder
class Absent(MetaPathFinder):
    def find_spec(self, full, path=None, target=None):
        if full.partition(".")[0] in ("accelerate", "torch"):
            raise ImportError(f"{full} must not be needed")
sys.meta_path.insert(0, Absent())
from xrank.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accelerate")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    ended = subprocess.run(
        [*launch, "-m", "tests.oracle.save_accelerate", str(folder), *CASES],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


@pytest.mark.parametrize("case", CASES)
def test_what_it_saves_without_dcp(saved: Path, tmp_path: Path, case: str) -> None:
    wanted = built().state_dict()
    save_file({name: torch.zeros_like(t) for name, t in wanted.items()}, tmp_path / "base.safetensors")
    (tmp_path / "base").mkdir()
    os.rename(tmp_path / "base.safetensors", tmp_path / "base" / "model.safetensors")
    # FSDP1's local state keeps names, and no shapes.
    more = ["--base-model", str(tmp_path / "base")] if case == "local" else []
    command = [sys.executable, "-c", GATHER, "gather", str(saved / case), "--out", str(tmp_path / "out"), *more]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
