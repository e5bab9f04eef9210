"""Deltas of live models: any sharding makes the version that plain lines turn into the folder of the whole model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xrank
from tests.commands.applied_deltas import apply_version, as_bytes, read_index, read_model
from tests.commands.exported import llama, qwen3_moe, shard
from tests.commands.test_quantize import CONFIG, cut, make_state
from tests.sampled import sampled
from xrank.errors import UsageError

pytestmark = pytest.mark.timeout(300)


def train(model: Any) -> None:
    """Change a few values of some tensors, wherever they are."""
    with torch.no_grad():
        for number, tensor in enumerate(model.parameters()):
            local = getattr(tensor, "to_local", lambda tensor=tensor: tensor)()
            if number % 3 and local.numel():
                local.view(-1)[:: 50 + number] *= 1.01


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", sampled(["fsdp tp", "hsdp", "tp"], 3))
@pytest.mark.parametrize("made", [llama, qwen3_moe], ids=["llama", "qwen3_moe"])
def test_a_sharded_model_is_what_its_folder_becomes(rank, world_size, tmp_path: Path, kind: str, made) -> None:
    if made is qwen3_moe and "tp" in kind:
        kind = "fsdp"
    model = shard(made(tie_word_embeddings=True) if made is llama else made(), kind, world_size)
    base, out, done = tmp_path / "weight_v000000", tmp_path / "weight_v000001", []
    xrank.export_model(model, base, dtype="bf16")
    train(model)
    report = xrank.export_model(
        model, out, dtype="bf16", delta_from=base, progress=lambda *figures: done.append(figures)
    )
    xrank.export_model(model, tmp_path / "whole", dtype="bf16")
    reports = [None] * world_size
    dist.all_gather_object(reports, report)
    assert reports == [report] * world_size
    if rank == 0:
        assert apply_version(out, read_model(base)) == read_model(tmp_path / "whole")
        assert 0 < report.details.num_changed < report.details.num_compared == len(read_model(base))
        assert done[-1][0] <= done[-1][1] == sum(len(data) for _, _, data in read_model(base).values())
        alone = xrank.make_delta(base, tmp_path / "whole", tmp_path / "alone" / "weight_v000001")
        assert alone.details.state == report.details.state
        ours, theirs = (read_index(path) for path in (out, tmp_path / "alone" / "weight_v000001"))
        assert ours == theirs
    dist.barrier()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("scheme", sampled(["FP8_BLOCK", "NVFP4A16"], 2))
def test_quantized_models(rank, tmp_path: Path, scheme: str) -> None:
    options = {"quantize": scheme, "config_overrides": CONFIG}
    state = make_state()
    xrank.export_model(cut(state), tmp_path / "weight_v000000", **options)
    state["model.layers.1.mlp.up_proj.weight"][3] *= 2
    state["lm_head.weight"][7] *= 2
    model = cut(state)
    xrank.export_model(model, tmp_path / "weight_v000001", delta_from=tmp_path / "weight_v000000", **options)
    xrank.export_model(model, tmp_path / "whole", **options)
    if rank == 0:
        made = apply_version(tmp_path / "weight_v000001", read_model(tmp_path / "weight_v000000"))
        assert made == read_model(tmp_path / "whole")
        changed = read_index(tmp_path / "weight_v000001")["weight_map"]
        # The scale of gate_proj and up_proj is one.
        modules = {name.rpartition(".")[0] for name in changed} - {"model.layers.1.mlp.gate_proj"}
        assert modules == {"model.layers.1.mlp.up_proj", "lm_head"}
    dist.barrier()


def test_a_function_makes_the_new_tensors(tmp_path: Path) -> None:
    def double(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: tensor} if tensor.ndim < 2 else {name: tensor * 2, f"{name}_sum": tensor.sum(0)}

    state = {"a.weight": torch.randn(5, 3), "b.weight": torch.randn(9, 3), "norm.weight": torch.ones(3)}
    xrank.export_model(state, tmp_path / "base", transform=double)
    state["b.weight"][4] += 1
    xrank.export_model(state, tmp_path / "weight_v000001", transform=double, delta_from=tmp_path / "base")
    made = apply_version(tmp_path / "weight_v000001", read_model(tmp_path / "base"))
    assert made["b.weight"][2] == as_bytes(state["b.weight"] * 2)
    assert made["b.weight_sum"][2] == as_bytes(state["b.weight"].sum(0))
    assert sorted(read_index(tmp_path / "weight_v000001")["weight_map"]) == ["b.weight", "b.weight_sum"]


@pytest.mark.ranks(2)
def test_in_the_background(rank, tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(50, 3, generator=torch.Generator().manual_seed(1))}
    xrank.export_model(state, tmp_path / "base")
    state["a.weight"][4] += 1
    want = as_bytes(state["a.weight"])
    future = xrank.export_model(state, tmp_path / "weight_v000001", delta_from=tmp_path / "base", background=True)
    state["a.weight"] += 1
    assert future.result().details.num_changed == 1
    if rank == 0:
        made = apply_version(tmp_path / "weight_v000001", read_model(tmp_path / "base"))
        assert made["a.weight"][2] == want
    dist.barrier()


@pytest.mark.ranks(2)
def test_what_a_delta_cannot_contain_is_refused_on_every_rank(rank, tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(5, 3), "b.weight": torch.ones(3)}
    xrank.export_model(state, tmp_path / "base")
    for change, text, step in (
        ({"b.weight": torch.ones(4)}, "b.weight: a delta only has", "whole"),
        ({"c.weight": torch.ones(4)}, "c.weight: a delta only has", "whole"),
        ({"b.weight": torch.ones(3).half()}, "b.weight: a delta only has", 'dtype="fp32"'),
    ):
        with pytest.raises(UsageError, match=text) as caught:
            xrank.export_model({**state, **change}, tmp_path / "weight_v000001", delta_from=tmp_path / "base")
        assert step in caught.value.next_step
    with pytest.raises(UsageError, match="is not the folder of a version"):
        xrank.export_model(state, tmp_path / "step-1", delta_from=tmp_path / "base")
    with pytest.raises(UsageError, match="delta_from"):
        path = tmp_path / "base" if rank else None
        xrank.export_model(state, tmp_path / "weight_v000001", delta_from=path, timeout_seconds=20)
    dist.barrier()
    if rank == 0:
        assert [path.name for path in tmp_path.iterdir()] == ["base"]
        shutil.rmtree(tmp_path / "base")
    dist.barrier()
