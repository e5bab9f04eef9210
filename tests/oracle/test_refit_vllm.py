"""A real vLLM takes a trainer's weights after each step, and its layout is recorded without an engine.

vLLM asks for a torch of its own, so ``VLLM_PYTHON`` names an interpreter with it; without one the tests are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.oracle.refit_trainer import KINDS, QUANTIZATIONS, TRAINERS, save_model
from xrank import NFSWorkspace
from xrank.commands.reshard import reshard_checkpoint
from xrank.layout import LayoutMap

PYTHON = os.environ.get("VLLM_PYTHON")
ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(PYTHON is None, reason="VLLM_PYTHON names no interpreter with vLLM"),
]
STEPS = 10
CASES = [
    (kind, trainer)
    for kind, trainer in product(KINDS, TRAINERS)
    if trainer.endswith("-4") or kind not in ("int8", *QUANTIZATIONS)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Models of all steps and what vLLM generates from them, which the cases share."""
    path: Path = tmp_path_factory.mktemp("refit")
    return path


def run(*arguments: str, module: str = "tests.oracle.refit_vllm") -> str:
    """Run a module by the interpreter with vLLM, and return its last line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(PYTHON), "-m", module, *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1150)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    print(ended.stdout.splitlines()[-1], file=sys.stderr)
    return ended.stdout


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kind", "trainer"), CASES)
def test_tokens_and_tensors_after_each_step_are_those_of_its_folder(
    folder: Path, kind: str, trainer: str, ranks: int
) -> None:
    line = run(kind, trainer, str(ranks), str(STEPS), str(folder)).splitlines()[-1]
    assert f"{kind} {trainer} -> {ranks}: {STEPS} steps" in line and "moved/held 1.000, whole []" in line


def test_a_server_takes_steps_over_http(folder: Path) -> None:
    assert "a server took 3 steps over HTTP" in run(str(folder), module="tests.oracle.refit_http")


@pytest.mark.parametrize("project", ["trl", "verl"])
def test_loaders_of_other_projects_workers_fill_the_same_parameters(project: str) -> None:
    found = subprocess.run([str(PYTHON), "-c", f"import {project}"], capture_output=True)
    if found.returncode:
        pytest.skip(f"VLLM_PYTHON has no {project}")
    assert "parameters equal" in run(project, module="tests.oracle.refit_workers")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, options) for kind in KINDS for options in ("--tp 2", "--tp 4", "--tp 2 --pp 2")),
        ("moe", "--tp 2 --ep"),
    ],
)
def test_a_recorded_layout_cuts_a_model_for_an_engine(tmp_path: Path, kind: str, options: str) -> None:
    save_model(kind, 0, tmp_path)
    model = tmp_path / kind / "0"
    file = tmp_path / "engine.toml"
    run("layout", "record", "--engine", "vllm", "--model", str(model), "--toml", str(file), *options.split(),
        module="xrank")  # fmt: skip
    report = reshard_checkpoint(model, file, tmp_path / "parts")
    whole, layouts = load_file(model / "model.safetensors"), LayoutMap.read(file)
    num_ranks = layouts.device_mesh.size
    assert report.output["world_size"] == num_ranks
    held = 0
    for rank in range(num_ranks):
        workspace = NFSWorkspace(tmp_path / "parts", rank=0, world_size=num_ranks, run_id=report.output["run_id"])
        _, parts = workspace.read_configs_and_weights_from_rank(rank)
        for name, part in parts.items():
            held += part.nbytes
            rows = whole[name].view(torch.uint8).reshape(-1, whole[name].shape[-1] * whole[name].element_size())
            # A column or row of each part is somewhere in the whole tensor.
            if part.numel() and part.ndim == 2 and part.shape[1] == whole[name].shape[-1]:
                assert (rows == part[:1].contiguous().view(torch.uint8)).all(1).any(), name
    nbytes = sum(tensor.nbytes for tensor in whole.values())
    assert nbytes <= held < num_ranks * nbytes


@pytest.mark.parametrize(("kind", "trainer"), [("llama", "fsdp-4"), ("moe", "megatron-4")])
def test_a_vllm_follows_a_folder_of_versions(folder: Path, kind: str, trainer: str) -> None:
    found = run(kind, trainer, "1", "20", str(folder), module="tests.oracle.deltas_vllm")
    assert "20 steps equal" in found
