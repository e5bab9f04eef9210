"""Checkpoints of the real torch_checkpointing, gathered by a command that cannot import it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("torch_checkpointing")

from tests.oracle.save_torch_checkpointing import CASES, CUTS, Net

# Starting ranks takes most of it.
pytestmark = pytest.mark.timeout(300)

GATHER = """
import sys
from importlib.abc import MetaPathFinder
class Absent(MetaPathFinder):
    def find_spec(self, full, path=None, target=None):
        if full.partition(".")[0] in ("torch_checkpointing", "torch"):
            raise ImportError(f"{full} must not be needed")
sys.meta_path.insert(0, Absent())
from xrank.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch_checkpointing")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    ended = subprocess.run(
        [*launch, "-m", "tests.oracle.save_torch_checkpointing", str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


def gather(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", GATHER, "gather", str(source), "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("case", [case for case in CASES if case != "without metadata"])
@pytest.mark.parametrize("cut", CUTS)
def test_every_layout_gives_the_model(saved: Path, tmp_path: Path, cut: str, case: str) -> None:
    ended = gather(saved / cut / case, tmp_path / "out")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("source  torch-checkpointing, step 7, written by 4 ranks")
    wanted, found = Net().state_dict(), load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_elements_without_their_places_are_refused(saved: Path, tmp_path: Path) -> None:
    ended = gather(saved / "fsdp2" / "without metadata", tmp_path / "out")
    assert ended.returncode == 2 and "no metadata.pkl records how they were split" in ended.stderr
    assert not (tmp_path / "out").exists()
