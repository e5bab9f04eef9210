"""Checkpoints of the real Orbax with MaxText's names, gathered by a command that can import neither JAX nor torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("orbax.checkpoint")

from transformers import AutoModelForCausalLM

from tests.free_port import free_port

# Two programs that start JAX take most of it.
pytestmark = pytest.mark.timeout(400)

GATHER = """
import sys
from importlib.abc import MetaPathFinder
class Absent(MetaPathFinder):
    def find_spec(self, full, path=None, target=None):
        if full.partition(".")[0] in ("jax", "orbax", "flax", "torch"):
            raise ImportError(f"{full} must not be needed")
sys.meta_path.insert(0, Absent())
from xrank.cli.main import main
main()
"""
CASES = {
    "llama3.1": "maxtext-llama3.1",
    "llama3.1, numbered layers": "maxtext-llama3.1",
    "llama3.1, zarr3": "maxtext-llama3.1",
    "llama2, bf16": "maxtext-llama2",
    "llama2, folders": "maxtext-llama2",
    "mistral, zarr3 folders": None,
    "qwen3, tied": None,
}
"""Case -> recipe to name; None where names and config.json leave no choice."""


def _run(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.oracle.save_orbax", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orbax")
    program = _run(str(folder))
    output, _ = program.communicate(timeout=350)
    assert program.returncode == 0, output[-4000:]
    return folder


def gather(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", GATHER, "gather", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )


def check_logits(folder: Path, out: Path) -> None:
    """Compare transformers' logits with those that MaxText's conventions gave."""
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    found = np.load(folder / "logits.npz")
    with torch.no_grad():
        logits = model(torch.from_numpy(found["tokens"])[None]).logits[0].numpy()
    assert np.abs(found["logits"]).max() > 1
    return np.testing.assert_allclose(logits, found["logits"], atol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_the_same_logits(saved: Path, tmp_path: Path, name: str) -> None:
    folder, recipe = saved / name, CASES[name]
    ended = gather(str(folder / "run"), "--out", str(tmp_path / "m"), *(["--recipe", recipe] if recipe else []))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("source  orbax, step 7, written by 1 rank"), ended.stdout
    assert "left out: opt_state" in ended.stdout
    check_logits(folder, tmp_path / "m")


def test_two_conventions_of_llama_must_be_chosen(saved: Path, tmp_path: Path) -> None:
    """Names and shapes are the same for both rotary embeddings; the wrong one would load, and compute nonsense."""
    ended = gather(str(saved / "llama3.1" / "run"), "--out", str(tmp_path / "m"))
    assert ended.returncode == 2 and "--recipe maxtext-llama2 or --recipe maxtext-llama3.1" in ended.stderr, (
        ended.stderr
    )
    ended = gather(str(saved / "llama3.1" / "run"), "--out", str(tmp_path / "m"), "--recipe", "maxtext-llama2")
    assert ended.returncode == 0
    with pytest.raises(AssertionError):
        check_logits(saved / "llama3.1", tmp_path / "m")


def test_verify_against_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    """With names of its own, the output is the checkpoint bit for bit."""
    source = str(saved / "llama2, bf16" / "run")
    assert gather(source, "--out", str(tmp_path / "m"), "--recipe", "none").returncode == 0
    command = [sys.executable, "-m", "xrank", "verify", str(tmp_path / "m"), "--against", source]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_two_processes(tmp_path: Path) -> None:
    port = str(free_port())
    programs = [_run(str(tmp_path), str(process), port) for process in range(2)]
    for program in programs:
        output, _ = program.communicate(timeout=300)
        assert program.returncode == 0, output[-4000:]
    ended = gather(str(tmp_path / "run"), "--out", str(tmp_path / "m"), "--recipe", "maxtext-llama3.1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("source  orbax, step 7, written by 2 ranks"), ended.stdout
    check_logits(tmp_path, tmp_path / "m")
