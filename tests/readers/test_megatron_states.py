"""Training states in Megatron's distributed checkpoints: both optimizers' keys, groups, and what is refused."""

from __future__ import annotations

import json
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from tests.readers.stored_tensors import read_moments, read_tensors
from xrank.errors import ContradictionError, IncompleteError, UsageError, XrankError
from xrank.readers.training_states import read_training_state

MODEL = {
    "embedding.word_embeddings.weight": torch.rand(8, 4).bfloat16(),
    "decoder.layers.mlp.linear_fc1.weight": torch.rand(2, 6, 4).bfloat16(),
    "decoder.layers.mlp.linear_fc1.bias": torch.rand(2, 6).bfloat16(),
    "decoder.layers.self_attention.q_layernorm.weight": torch.rand(2, 4).bfloat16(),
    "decoder.final_layernorm.weight": torch.rand(4).bfloat16(),
}
DECAYED = {"embedding.word_embeddings.weight", "decoder.layers.mlp.linear_fc1.weight"}
OPTIONS = {
    "lr": 0.01,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "lr_mult": 1.0,
    "decoupled_weight_decay": True,
    "amsgrad": False,
}


def states(master: str = "param") -> dict[str, torch.Tensor]:
    """Return the optimizer's tensors by their keys."""
    kinds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        master: torch.Tensor.float, "exp_avg": lambda t: t.float() * 0.1, "exp_avg_sq": lambda t: t.float() ** 2
    }  # fmt: skip
    return {f"optimizer.state.{kind}.{n}": make(t) for kind, make in kinds.items() for n, t in MODEL.items()}


def write(folder: Path, tensors: dict[str, Any], groups: list[dict[str, Any]], **common: Any) -> Path:
    """Write a checkpoint of iteration 3."""
    place = folder / "iter_0000003"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**MODEL, **tensors}, storage_writer=FileSystemWriter(place), no_dist=True)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (place / "metadata.json").write_text(json.dumps(config))
    inner = {"param_groups": groups, **common.pop("inner", {})}
    args = Namespace(num_layers=2, **common.pop("args", {}))
    torch.save({"optimizer": {"optimizer": inner}, "iteration": 3, "args": args, **common}, place / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def two_groups(**more: Any) -> list[dict[str, Any]]:
    return [{**OPTIONS, "wd_mult": mult, "weight_decay": 0.1 * mult, "step": 3, **more} for mult in (1.0, 0.0)]


def test_a_distributed_optimizer(tmp_path: Path) -> None:
    scheduler = {"num_steps": 12, "max_lr": 0.01}
    write(tmp_path, states(), two_groups(), opt_param_scheduler=scheduler, rng_state=Path("a"))
    state = read_training_state(str(tmp_path))
    moments = read_moments(state)
    assert set(moments) == set(MODEL)
    for name, tensor in MODEL.items():
        assert torch.equal(moments[name]["fp32_param"], tensor.float())
        assert torch.equal(moments[name]["exp_avg"], tensor.float() * 0.1)
        assert torch.equal(moments[name]["exp_avg_sq"], tensor.float() ** 2)
    assert all(torch.equal(tensor, MODEL[name]) for name, tensor in read_tensors(state.stored, MODEL).items())
    assert state.steps == dict.fromkeys(MODEL, 3)
    assert [set(group.parameters) for group in state.groups] == [DECAYED, set(MODEL) - DECAYED]
    assert state.groups[0].options["weight_decay"] == 0.1 and "step" not in state.groups[0].options
    assert "assumed-groups" in dict(state.stored.notes)
    assert state.values == {"opt_param_scheduler": scheduler, "iteration": 3}
    assert [each.name for each in state.left_out] == ["rng_state"]
    assert state.optimizer == "AdamW"


def test_an_optimizer_that_counts_once(tmp_path: Path) -> None:
    inner = {"state": {"common_step": torch.tensor(3.0)}}
    group = {**OPTIONS, "wd_mult": 1.0, "weight_decay": 0.1}
    state = read_training_state(str(write(tmp_path, states("fp32_param"), [group], inner=inner)))
    assert state.steps == dict.fromkeys(MODEL, 3)
    assert set(state.groups[0].parameters) == set(MODEL)
    assert "assumed-groups" not in dict(state.stored.notes)
    assert set(state.states["decoder.final_layernorm.weight"]) == {"fp32_param", "exp_avg", "exp_avg_sq"}


def test_norms_that_decay(tmp_path: Path) -> None:
    write(tmp_path, states(), two_groups(), args={"apply_wd_to_qk_layernorm": True})
    state = read_training_state(str(tmp_path))
    assert "decoder.layers.self_attention.q_layernorm.weight" in state.groups[0].parameters


def test_skipped_iterations_of_a_loss_scaler(tmp_path: Path) -> None:
    write(tmp_path, states(), two_groups(step=2))
    with pytest.raises(ContradictionError, match="a different step than the optimizer"):
        read_training_state(str(tmp_path))
    optimizer = {"optimizer": {"param_groups": two_groups(step=2)}, "grad_scaler": {"scale": 4.0}}
    write(tmp_path, states(), two_groups(), optimizer=optimizer)
    assert read_training_state(str(tmp_path)).steps == dict.fromkeys(MODEL, 2)


BUCKETS = {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg": torch.rand(40)}
FAULTS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], type[XrankError], str]] = {
    "buckets": (BUCKETS, two_groups(), UsageError, "holds buckets of moments"),
    "two optimizers": (
        {f"chained_0.{name}": tensor for name, tensor in states().items()}, two_groups(), UsageError, "several opti"
    ),
    "muon": (
        {**states(), "optimizer.state.momentum_buffer.decoder.final_layernorm.weight": torch.rand(4)},
        two_groups(), UsageError, "SGD or Muon",
    ),
    "ahead": (states(), two_groups(step=4), ContradictionError, "a different step than the optimizer"),
    "no step": (states(), [{**OPTIONS, "wd_mult": 1.0}], IncompleteError, "lacks step"),
    "no groups": (states(), [], UsageError, "which group"),
    "groups of another kind": (
        states(), [{**group, "lr_mult": 1.0 + n} for n, group in enumerate(two_groups())], UsageError, "which group"
    ),
    "a moment of a part": (
        {n: t[:1] if n.endswith("exp_avg.decoder.layers.mlp.linear_fc1.bias") else t for n, t in states().items()},
        two_groups(), ContradictionError, "does not have the parameter's shape",
    ),
    "one moment": (
        {n: t for n, t in states().items() if "exp_avg_sq.embedding" not in n},
        two_groups(), IncompleteError, "lacks exp_avg_sq",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_refused(tmp_path: Path, fault: str) -> None:
    tensors, groups, kind, message = FAULTS[fault]
    with pytest.raises(kind, match=message) as raised:
        read_training_state(str(write(tmp_path, tensors, groups)))
    assert raised.value.next_step
