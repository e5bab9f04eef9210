"""The example of Keras' distribution API: it compares itself with one process, and says so."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[2] / "examples" / "model_parallel.py")


@pytest.mark.slow
def test_four_ranks_train_as_one_process():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert lines[3].split()[0] == "dense_1.weight" and "(128, 32)" in lines[3] and "(64, 32)" in lines[3]
    assert lines[-1].startswith("after 3 steps no parameter differs")


def test_a_mesh_of_other_ranks_is_refused():
    done = subprocess.run([sys.executable, SCRIPT, "--shape", "3", "2"], capture_output=True, text=True, timeout=150)
    assert done.returncode == 2 and "a mesh of 3 x 2 has not 4 ranks" in done.stderr
