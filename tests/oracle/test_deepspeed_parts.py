"""Pipelines and models with experts of the real DeepSpeed: gathered where it can't be imported, equal to the ranks'.

Four ranks train; they put their weights together themselves and leave them beside the checkpoint. Pipelines and
experts have a run each, because a pipeline's process groups stay for all that follows it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.oracle.test_deepspeed import assert_same, gathered, launched
from tests.oracle.train_deepspeed_parts import EXPERTS, PIPELINES
from xrank.commands.inspect import inspect_source

pytestmark = pytest.mark.timeout(300)
TAG = "global_step2"


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory) -> Path:
    return launched("train_deepspeed_parts.py", tmp_path_factory.mktemp("pipelines"), 4, list(PIPELINES))


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return launched("train_deepspeed_parts.py", tmp_path_factory.mktemp("experts"), 4, list(EXPERTS))


def expected(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "expected.pt")


@pytest.mark.parametrize("case", PIPELINES)
def test_the_weights_of_pipelines_are_those_of_the_ranks(pipelines, tmp_path, case):
    want, options = expected(pipelines / case), ()
    if case == "zero0-fp32":
        options = ("--format", "deepspeed")  # expected.pt has other names, and would be another model
        # Nothing records the key of a tied layer without buffers: its files have its layers' numbers.
        for name in ("weight", "bias"):
            want |= dict.fromkeys((f"4.{name}", f"7.{name}"), want.pop(f"tied_modules.norm.{name}"))
    assert_same(gathered(pipelines / case, tmp_path / "model", *options), want)
    if PIPELINES[case]["kind"] is not None:
        assert want["1.up.weight"].dtype == torch.float32 and want["3.up.weight"].dtype != torch.float32
        assert not torch.equal(want["1.up.weight"], want["1.up.weight"].bfloat16().float())


@pytest.mark.parametrize("case", EXPERTS)
def test_the_weights_of_experts_are_those_of_the_ranks(experts, tmp_path, case):
    want = expected(experts / case)
    if EXPERTS[case]["stage"] or EXPERTS[case]["kind"] == "bf16":
        del want["head.weight"]  # ZeRO records the tie; without it the file holds two tensors
    assert_same(gathered(experts / case, tmp_path / "model"), want)
    ups = [tensor for name, tensor in want.items() if re.fullmatch(r"first\..*experts\.\d+\.up\.weight", name)]
    assert len(ups) == 4 and not any(torch.equal(ups[0], other) for other in ups[1:])


def test_inspect_counts_stages_and_experts(pipelines, experts):
    source = inspect_source(pipelines / "zero1-bf16")
    assert (source.source["world_size"], source.source["step"]) == (4, 2)
    assert (source.details["format"]["pipeline stages"], source.details["format"]["layers"]) == (2, 7)
    assert inspect_source(experts / "ep2-zero2-bf16").details["format"]["expert files"] == 8


def refused(source: Path, tmp_path: Path, exit_code: int, *words: str) -> None:
    command = [sys.executable, "-m", "xrank", "gather", str(source), "--out", str(tmp_path / "model")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == exit_code and not (tmp_path / "model").exists(), ended.stderr
    for word in words:
        assert word in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("layer_05-model_states.pt", "where 5."),
        ("layer_00-model_states.pt", "tied_modules.embed.scale"),
        ("mp_rank_01_model_states.pt", "stage 1"),
        ("bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt", "bf16_zero_pp_rank_1_mp_rank_01"),
    ],
)
def test_a_pipelines_missing_file(pipelines, tmp_path, name, word):
    shutil.copytree(pipelines / "zero1-bf16", tmp_path / "run")
    (tmp_path / "run" / TAG / name).unlink()
    refused(tmp_path / "run", tmp_path, 3, word)


@pytest.mark.parametrize("has_name", [True, False])
def test_exchanged_layers_are_seen(pipelines, tmp_path, has_name):
    """By the name in the archive; without one by the weights, which are the fp32 ones rounded."""
    shutil.copytree(pipelines / "zero1-bf16", tmp_path / "run")
    one, two = (tmp_path / "run" / TAG / f"layer_0{number}-model_states.pt" for number in (1, 5))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second if has_name else second.replace(b"layer_05", b"layer_01"))
    two.write_bytes(first if has_name else first.replace(b"layer_01", b"layer_05"))
    refused(
        tmp_path / "run",
        tmp_path,
        4,
        "renamed or copied" if has_name else "a different save, layer or expert than the fp32 weights",
    )


def test_another_stages_partition_is_seen(pipelines, tmp_path):
    shutil.copytree(pipelines / "zero1-bf16", tmp_path / "run")
    names = [f"zero_pp_rank_0_mp_rank_0{stage}" for stage in (0, 1)]
    one, two = (tmp_path / "run" / TAG / f"bf16_{name}_optim_states.pt" for name in names)
    two.write_bytes(one.read_bytes().replace(names[0].encode(), names[1].encode()))
    refused(tmp_path / "run", tmp_path, 4, "mp_rank_01")


def test_a_missing_expert(experts, tmp_path):
    shutil.copytree(experts / "ep2-zero2-bf16", tmp_path / "run")
    name = "layer_1_expert_2_mp_rank_00_model_states.pt"
    (tmp_path / "run" / TAG / name).unlink()
    refused(tmp_path / "run", tmp_path, 3, name)
    for file in (tmp_path / "run" / TAG).glob("*expert*"):
        file.unlink()
    refused(tmp_path / "run", tmp_path, 3, "layer_0_expert_0")


@pytest.mark.parametrize("has_name", [True, False])
def test_exchanged_experts_are_seen(experts, tmp_path, has_name):
    shutil.copytree(experts / "ep2-zero2-bf16", tmp_path / "run")
    names = [f"layer_0_expert_{number}" for number in (1, 3)]
    one, two = (tmp_path / "run" / TAG / f"{name}_mp_rank_00_model_states.pt" for name in names)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second if has_name else second.replace(names[1].encode(), names[0].encode()))
    two.write_bytes(first if has_name else first.replace(names[0].encode(), names[1].encode()))
    refused(tmp_path / "run", tmp_path, 4, "renamed or copied" if has_name else "does not belong to expert")
