"""Trains pipelines and models with experts with DeepSpeed on four ranks, and saves checkpoints: run by torchrun.

    torchrun --nproc-per-node 4 tests/oracle/train_deepspeed_parts.py FOLDER CASE...

Beside each checkpoint lies ``expected.pt``: the whole weights, as the ranks themselves put them together.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm.torch
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import groups, safe_get_full_fp32_param

PIPELINES: dict[str, dict[str, Any]] = {
    "zero1-bf16": {"num_stages": 2, "stage": 1, "kind": "bf16"},
    # BF16_Optimizer, which without ZeRO leaves partitions and no shapes.
    "zero0-bf16": {"num_stages": 2, "stage": 0, "kind": "bf16"},
    "zero1-fp16": {"num_stages": 2, "stage": 1, "kind": "fp16", "has_model_axis": True},
    "zero0-fp32": {"num_stages": 4, "stage": 0, "kind": None},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "ep2-zero2-bf16": {"ep_size": 2, "stage": 2, "kind": "bf16"},
    "ep2-zero1-last": {"ep_size": 2, "stage": 1, "kind": "bf16", "is_last": True, "is_frozen": True},
    "ep2-zero1-fp32-sums": {"ep_size": 2, "stage": 1, "kind": "bf16", "sums": "fp32"},
    "ep4-zero0-fp32": {"ep_size": 4, "stage": 0, "kind": None},
    "ep1-zero1-fp16": {"ep_size": 1, "stage": 1, "kind": "fp16"},
}


class Embed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(11, 6))
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, self.weight) * self.scale.to(self.weight.dtype)


class Block(torch.nn.Module):
    def __init__(self, is_frozen: bool = False) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 7)
        self.down = torch.nn.Linear(7, 6, bias=False)
        self.register_buffer("mean", torch.rand(3))
        for parameter in self.parameters():
            parameter.requires_grad_(not is_frozen)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Experts(torch.nn.Module):
    """Two layers of experts of different numbers, a tied head, a frozen layer and a buffer."""

    def __init__(self, ep_size: int, is_frozen: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.first = MoE(6, Block(), num_experts=4, ep_size=ep_size, min_capacity=8, use_residual=True)
        self.norm = torch.nn.LayerNorm(6)
        self.second = MoE(6, Block(is_frozen), num_experts=2 * ep_size, ep_size=ep_size, min_capacity=8)
        self.frozen = Block(is_frozen=True)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.rand(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.embed(tokens))[0]
        return self.head(self.frozen(self.second(self.norm(hidden))[0])).flatten(0, 1)


def loss_of(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.float().flatten(0, -2), tokens.flatten())


def train_pipeline(folder: Path, num_stages: int, stage: int, kind: str | None, has_model_axis: bool = False) -> None:
    """Train a pipeline of plain, tied and frozen layers and of functions, and save it."""
    num_replicas = dist.get_world_size() // num_stages
    topology = PipeModelDataParallelTopology(num_pp=num_stages, num_mp=1, num_dp=num_replicas)
    norm = TiedLayerSpec("norm", torch.nn.LayerNorm, 6, tied_weight_attr=["weight", "bias"])
    module = PipelineModule(
        [
            TiedLayerSpec("embed", Embed),
            LayerSpec(Block),
            lambda hidden: hidden * 1.0,
            LayerSpec(Block, is_frozen=True),
            norm,
            LayerSpec(Block),
            torch.nn.Tanh(),
            norm,
            TiedLayerSpec("embed", Embed, forward_fn=lambda embed, hidden: hidden @ embed.weight.t()),
        ],
        loss_fn=loss_of,
        seed_layers=True,
        partition_method="uniform",
        **({"topology": topology} if has_model_axis else {"num_stages": num_stages}),
    )
    engine = start(module, stage, kind)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in range(10):
            torch.manual_seed(10 * step + engine.grid.get_data_parallel_id())
            tokens = torch.randint(0, 11, (2, 3))
            yield tokens, tokens

    data = batches()
    for _ in range(2):
        engine.train_batch(data_iter=data)
    save(engine, folder, {name: name for name in engine.module.state_dict()})


def train_experts(
    folder: Path,
    ep_size: int,
    stage: int,
    kind: str | None,
    is_last: bool = False,
    is_frozen: bool = False,
    sums: str | None = None,
) -> None:
    """Train a model with experts, of which each rank has a share, and save it."""
    for name in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"):  # of the case before
        getattr(groups, name).clear()
        getattr(groups, f"{name}_RANKS").clear()
    torch.manual_seed(dist.get_rank())
    module = Experts(ep_size, is_frozen)
    engine = start(module, stage, kind, sums=sums, use_data_before_expert_parallelism=is_last)
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(0, 11, (2, 8))
        engine.backward(loss_of(engine(tokens), tokens))
        engine.step()
    place = groups._get_expert_parallel_rank(f"ep_size_{ep_size}")
    numbers = {
        name: place * layer.num_local_experts for name, layer in module.named_modules() if isinstance(layer, MoE)
    }

    def renumber(name: str) -> str:
        first = next((number for prefix, number in numbers.items() if name.startswith(f"{prefix}.")), 0)
        return re.sub(r"(?<=deepspeed_experts\.)\d+", lambda found: str(int(found[0]) + first), name)

    save(engine, folder, {name: renumber(name) for name in module.state_dict()})


def start(module: torch.nn.Module, stage: int, kind: str | None, sums: str | None = None, **options: Any) -> Any:
    """Return DeepSpeed's engine of a module."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if isinstance(module, Experts):
        params = split_params_into_different_moe_groups_for_optimizer({"params": trained, "name": "all"})
    else:
        params = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim < 2]}]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "data_types": {"grad_accum_dtype": sums},
        "zero_optimization": {"stage": stage},
        **options,
    }
    if kind is not None:
        config[kind] = {"enabled": True, **({"initial_scale_power": 4} if kind == "fp16" else {})}
    optimizer = torch.optim.AdamW([group for group in params if group["params"]], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def save(engine: Any, folder: Path, names: dict[str, str]) -> None:
    """Save a checkpoint, and the weights of all ranks under their names in the whole model."""
    engine.save_checkpoint(str(folder))
    own = {}
    parameters = dict(engine.module.named_parameters())
    for name, tensor in engine.module.state_dict().items():
        parameter = parameters.get(name)
        if hasattr(parameter, "_hp_mapping"):
            tensor = safe_get_full_fp32_param(parameter)
        own[names[name]] = tensor.detach().clone()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    if dist.get_rank() == 0:
        # The first rank that has a tensor counts, as its stage has a tied layer's.
        torch.save({name: tensor for part in reversed(every) for name, tensor in part.items()}, folder / "expected.pt")
    dist.barrier()


def main(folder: str, *cases: str) -> None:
    """Train every case in a folder of its own."""
    # As in train_deepspeed.py.
    deepspeed.comm.torch.build_shm_op = lambda: None
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for case in cases:
        if case in PIPELINES:
            train_pipeline(Path(folder) / case, **PIPELINES[case])
        else:
            train_experts(Path(folder) / case, **EXPERTS[case])


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # as in train_deepspeed.py
