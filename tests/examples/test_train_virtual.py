"""The example of a training on virtual devices: it compares itself with its plan and with one process."""

import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(__file__).parents[2] / "examples" / "train_virtual.py")


def printed(*options):
    command = [sys.executable, "-W", "error", SCRIPT, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_eight_processes_train_as_one():
    lines = printed()
    assert lines[:3] == [
        "mesh      pp=2 dp=2 tp=2: 8 devices, 2 stages",
        "schedule  1f1b: 10 cycles, 20.0% of them idle",
        "live      2 1 activations, by stage",
    ]
    losses = [float(line.split()[-1]) for line in lines[3:8]]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    assert [line.split()[-1] for line in lines[8:-2]] == ["all_gather", "all_reduce", "reduce_scatter", "send"]
    assert lines[-2].endswith("a step, as planned")
    assert lines[-1] == "after 5 steps no weight differs by more than 1e-12 from a training in one process"


def test_another_mesh_and_schedule_train_alike():
    chosen = ("--mesh", "pp=2 tp=3", "--schedule", "interleaved", "--chunks", "2", "--runs", "5")
    lines = printed(*chosen, "--engine", "in-process")
    assert lines[1] == "schedule  interleaved: 22 cycles, 9.1% of them idle"
    assert lines[7].split()[:3] == ["step", "5", "loss"]
    assert lines[-1] == "after 5 steps no weight differs by more than 1e-12 from a training in one process"
