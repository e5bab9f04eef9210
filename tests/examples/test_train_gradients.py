"""The example of gradients: it checks each against one process, and leaves them where a gather finds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from xrank.commands.gather import gather_checkpoint

SCRIPT = str(Path(__file__).parents[2] / "examples" / "train_gradients.py")


def printed(*options: str) -> list[str]:
    command = [sys.executable, "-W", "error", SCRIPT, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(180)  # eight processes import torch
def test_eight_ranks_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    lines = printed("--workspace", str(tmp_path / "eight"))
    assert lines[0] == "mesh      pp=2 dp=2 tp=2; rank 0 has 13 parameters in these buckets"
    reduced = [line.split()[1] for line in lines if line.startswith("reduced")]
    assert reduced == ["data", "data", "data", "tensor", "word"]
    assert sum(line.endswith("; 13 gradients of rank 0 are right") for line in lines) == 3
    assert lines[-1].startswith("after 3 steps no parameter of any rank differs")

    alone = printed("--dp", "1", "--tp", "1", "--pp", "1", "--workspace", str(tmp_path / "one"))
    assert not any(line.startswith("reduced") for line in alone)
    for name in ("eight", "one"):
        gather_checkpoint(tmp_path / name, tmp_path / f"{name}-model", recipe="none")
    found, expected = (load_file(tmp_path / f"{name}-model" / "model.safetensors") for name in ("eight", "one"))
    assert len(expected) == 25 and found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--pp", "3"], capture_output=True, text=True, timeout=150)
    assert done.returncode == 2 and "--pp 3: want a divisor of 4" in done.stderr
