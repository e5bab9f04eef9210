"""Trains a small model with DeepSpeed, two steps in each configuration, and saves checkpoints: run by torchrun.

    torchrun --nproc-per-node 3 tests/oracle/train_deepspeed.py FOLDER CASE...

Beside each checkpoint lies ``expected.pt``: the whole weights, as the ranks themselves put them together, and
``moments.pt`` with the optimizer's moments and options, likewise.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm.torch
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

CASES: dict[str, dict[str, Any]] = {
    "zero1-bf16-optimizer": {"stage": 1, "kind": "bf16", "grad_accum_dtype": "fp32"},
    "zero1-bf16": {"stage": 1, "kind": "bf16"},
    "zero1-fp32": {"stage": 1, "kind": None},
    "zero2-bf16": {"stage": 2, "kind": "bf16"},
    "zero2-fp16": {"stage": 2, "kind": "fp16"},
    # Of one group, so that dealing the parameters to three ranks moves them.
    "zero2-round-robin": {"stage": 2, "kind": "bf16", "round_robin_gradients": True, "num_groups": 1},
    "zero2-aligned": {"stage": 2, "kind": "bf16", "parameter_alignment": True},
    "zero3-bf16": {"stage": 3, "kind": "bf16", "sub_group_size": 40},
    "zero3-fp16": {"stage": 3, "kind": "fp16", "sub_group_size": 1000},
    "zero3-persistent": {"stage": 3, "kind": "bf16", "sub_group_size": 60, "stage3_param_persistence_threshold": 20},
    "zero0": {"stage": 0, "kind": None},
}


class Model(torch.nn.Module):
    """A tied pair, a layer under two names, a frozen one, buffers, sizes that 2 and 3 do not divide, one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.up = torch.nn.Linear(6, 7)
        self.again = self.up
        self.frozen = torch.nn.Linear(7, 5)
        self.down = torch.nn.Linear(5, 6, bias=False)
        self.gain = torch.nn.Parameter(torch.tensor([1.25]))
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0) + 0.5)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("lost", torch.ones(2), persistent=False)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.up(self.embed(tokens)))
        return self.head(self.gain * self.down(hidden)).flatten(0, 1)


def train(folder: Path, stage: int, kind: str | None, num_groups: int = 2, **options: Any) -> None:
    """Train two steps and save, with this stage of ZeRO, precision and further options."""
    torch.manual_seed(0)
    model = Model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    given = [[*group["params"]] for group in groups] if num_groups == 2 else [trained]
    optimizer = torch.optim.AdamW(groups if num_groups == 2 else trained, lr=1e-2)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "data_types": {"grad_accum_dtype": options.pop("grad_accum_dtype", None)},
        "zero_optimization": {"stage": stage, **options},
    }
    if kind is not None:
        config[kind] = {"enabled": True, **({"initial_scale_power": 4} if kind == "fp16" else {})}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(0, 11, (2, 3))
        loss = torch.nn.functional.cross_entropy(engine(tokens).float(), tokens.flatten())
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(folder))
    expected = _dealt(engine) if options.get("round_robin_gradients") else {}
    for name, parameter in engine.module.named_parameters():
        if name in expected:
            continue
        if parameter.requires_grad and stage:
            expected[name] = safe_get_full_fp32_param(parameter).detach().clone()
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                expected[name] = parameter.detach().clone()
    moments = {} if options.get("round_robin_gradients") else _moments(engine, stage)
    expected |= {name: getattr(engine.module, name).clone() for name in ("table", "count")}
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")
        torch.save({"states": moments, "groups": named_groups(given, engine)}, folder / "moments.pt")
    dist.barrier()


def _moments(engine: Any, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the moments of each trained parameter, with its fp32 weights."""
    if stage in (1, 2):  # DeepSpeed links moments after the first group's step, before others have any
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad and stage]
    get = {"fp32_param": safe_get_full_fp32_param}
    for kind in ("exp_avg", "exp_avg_sq"):
        get[kind] = functools.partial(safe_get_full_optimizer_state, optim_state_key=kind)
    return {name: {kind: make(p).detach().clone() for kind, make in get.items()} for name, p in named}


def named_groups(groups: Sequence[Any], engine: Any) -> list[tuple[list[str], dict[str, Any]]]:
    """Return the parameters of each group, as they were given to the optimizer, and its options now."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    options = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    return [([names[id(p)] for p in own], each) for own, each in zip(groups, options, strict=True)]


def _dealt(engine: Any) -> dict[str, torch.Tensor]:
    """Return what was trained, where DeepSpeed deals parameters to ranks: `safe_get_full_fp32_param` is wrong there."""
    optimizer, found = engine.optimizer, {}
    for number, partition in enumerate(optimizer.single_partition_of_fp32_groups):
        parts = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, partition.detach())
        begin = 0
        for parameter in optimizer.round_robin_bit16_groups[number]:
            whole = torch.cat(parts)[begin : begin + parameter.numel()].view(parameter.shape).clone()
            begin += parameter.numel()
            assert torch.equal(whole.bfloat16(), parameter)
            found[optimizer.param_names[parameter]] = whole
    return found


def main(folder: str, *cases: str) -> None:
    """Train every case in a folder of its own."""
    # Without these, DeepSpeed compiles an operator (a minute, and a compiler), and refuses fp16 that torch can do.
    deepspeed.comm.torch.build_shm_op = lambda: None
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for case in cases:
        train(Path(folder) / case, **CASES[case])


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # DeepSpeed holds its groups: a gloo thread that drops its last tensor while Python closes aborts
