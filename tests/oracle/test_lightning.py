"""Checkpoints of Lightning's Trainer, gathered as a user does, equal `save_pretrained` of the live model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("lightning")

# Importing Lightning, transformers and DeepSpeed on two ranks takes most of it.
pytestmark = pytest.mark.timeout(300)

TRAINER = Path(__file__).with_name("train_lightning.py")


def train(folder: Path, case: str) -> Path:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-W", "ignore", str(TRAINER), str(folder), case]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder / case


def gather(source: Path, out: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "xrank", "gather", str(source), "--out", str(out), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout + ended.stderr


def assert_same(out: Path, expected: Path) -> None:
    found, wanted = (load_file(folder / "model.safetensors") for folder in (out, expected))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", ["file", "tied", "fsdp", "fsdp2", "fsdp2-full", "deepspeed2", "deepspeed3"])
def test_the_model_without_the_module_around_it(tmp_path: Path, case: str) -> None:
    place = train(tmp_path, case)
    (checkpoint,) = (place / "checkpoints").iterdir()
    for source in (place / "checkpoints", checkpoint):
        code, text = gather(source, tmp_path / source.name, "--base-model", str(place / "expected"))
        assert code == 0, text
        assert_same(tmp_path / source.name, place / "expected")
    if case != "fsdp":  # the callback wrote the same at the same time
        (made,) = (place / "models").iterdir()
        assert_same(made, place / "expected")
    # With config.json alone the names are the model's, too.
    base = tmp_path / "config"
    base.mkdir()
    (base / "config.json").write_bytes((place / "expected" / "config.json").read_bytes())
    code, text = gather(checkpoint, tmp_path / "without", "--base-model", str(base))
    assert code == 0, text
    assert_same(tmp_path / "without", place / "expected")


def test_averaged_weights_are_a_part(tmp_path: Path) -> None:
    """WeightAveraging saves the averages as the state dict, and the weights in training beside it."""
    place = train(tmp_path, "averaged")
    code, text = gather(place / "checkpoints", tmp_path / "out")
    assert code == 2 and "state_dict (21 tensors), current_model_state (21 tensors)" in text
    code, text = gather(place / "checkpoints", tmp_path / "out", "--part", "current_model_state")
    assert code == 0, text
    assert_same(tmp_path / "out", place / "expected")
    code, text = gather(place / "checkpoints", tmp_path / "averages", "--part", "state_dict")
    assert code == 0, text
    assert (
        load_file(tmp_path / "averages" / "model.safetensors").keys()
        == load_file(tmp_path / "out" / "model.safetensors").keys()
    )
