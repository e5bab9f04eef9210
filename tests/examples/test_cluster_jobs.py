"""The examples for clusters: the batch script under a stand-in of SLURM, and the task under one of Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xrank
from tests.free_port import free_port
from xrank import NFSWorkspace
from xrank.layout import DeviceMesh, LayoutMap

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

EXAMPLES = Path(__file__).parents[2] / "examples"

SRUN = f"""#!{sys.executable}
import os, subprocess, sys

command = sys.argv[2:]
assert sys.argv[1] == "--kill-on-bad-exit=0"
ranks = [
    subprocess.Popen(
        [sys.executable, "-m", *command],
        env=os.environ | {{"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}},
    )
    for rank in range(2)
]
sys.exit(max(rank.wait() for rank in ranks))
"""

RAY = """
def remote(**options):
    assert options["num_cpus"] == 2
    def decorate(function):
        function.remote = function
        return function
    return decorate

def init(**options):
    pass

def get(value):
    return value
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    layouts["w"] = "[h/tp]"
    for rank in range(2):
        workspace = NFSWorkspace(tmp_path / "run", rank=rank, world_size=2, run_id="a")
        workspace.write_configs_and_weights({"model_type": "mlp"}, {"w": torch.arange(64.0)}, layouts=layouts, step=1)
    return tmp_path / "run"


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_the_batch_script(tmp_path: Path, checkpoint: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    write_program(programs / "srun", SRUN)
    write_program(programs / "scontrol", "#!/bin/sh\necho 127.0.0.1\necho 127.0.0.2\n")
    write_program(programs / "xrank", f'#!/bin/sh\nexec {sys.executable} -m xrank "$@"\n')
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]"}
    environ["SLURM_JOB_ID"] = str(free_port() - 20000)
    script = [EXAMPLES / "gather.sbatch", checkpoint, tmp_path / "out"]
    done = subprocess.run(script, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "ok  1 tensor" in done.stdout, done.stdout + done.stderr
    assert xrank.verify_model(tmp_path / "out").ok
    script = [EXAMPLES / "gather.sbatch", checkpoint / "none", tmp_path / "other"]
    done = subprocess.run(script, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and not (tmp_path / "other").exists()


def test_the_task(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "stand-in").mkdir()
    (tmp_path / "stand-in" / "ray.py").write_text(RAY)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "stand-in")}
    command = [sys.executable, EXAMPLES / "ray_gather.py", checkpoint, tmp_path / "out"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "512 bytes of tensors" in done.stdout, done.stderr
