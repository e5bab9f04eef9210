"""Biases of routers, which no gradient moves: an expert with fewer tokens than the mean is chosen a little more.

megatron/core/transformer/moe/moe_utils.py:get_updated_expert_bias; after arXiv 2408.15664.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xrank.gradients.distributed_data_parallel import DistributedDataParallel
from xrank.gradients.plans.mesh_places import MeshPlace
from xrank.gradients.reductions import Reduction
from xrank.gradients.wires.faults import Fault

__all__ = ["RouterBiases"]


@dataclass(frozen=True, slots=True)
class _Router:
    name: str
    module: torch.nn.Module
    rate: float | None
    is_frozen: bool


class RouterBiases:
    """The routers of one rank, once in a step.

    Args:
        chunks: the rank's.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._chunks = chunks
        self._routers = [
            _Router(f"{number}.{name}" if len(chunks) > 1 else name, module, _rate(module), _is_frozen(module))
            for number, chunk in enumerate(chunks)
            for name, module in chunk.module.named_modules()
            if _tensor(module, "expert_bias") is not None and _tensor(module, "local_tokens_per_expert") is not None
        ]
        rank = chunks[0].plan.rank
        self.faults = [
            Fault(
                f"{router.name}: nothing says by how much its expert_bias moves in a step",
                rank,
                f"{router.name}.expert_bias",
                got="no config.moe_router_bias_update_rate, and no expert_bias_update_rate",
                want="one of them, a number",
                next_step="set expert_bias_update_rate on the module; 1e-3 is Megatron's",
            )
            for router in self._routers
            if router.rate is None and not router.is_frozen
        ]

    def run(self) -> list[Reduction]:
        """Move the biases, and begin the counts of the next step; on all ranks alike."""
        done = self._move() if self._routers else []
        for router in self._routers:
            _counts(router.module).zero_()
        for chunk in self._chunks:
            for module in chunk.module.modules():
                reset = getattr(module, "reset_global_aux_loss_tracker", None)
                if callable(reset):
                    reset()
        return done

    def _move(self) -> list[Reduction]:
        first = self._chunks[0]
        place = MeshPlace(first.plan.views, first.plan.rank)
        axes = tuple(axis for axis in place.dense.axis_names if axis in {"tp", *place.data_axes(False)})
        ranks = first.plan.ranks_along(*axes)
        # Of frozen routers, too: which those are is not asked of other ranks.
        total = torch.cat([_counts(router.module).flatten().to(first.wire.device) for router in self._routers])
        done = []
        if len(ranks) > 1:
            first.wire.all_reduce(total, ranks, "sum").wait()
            axes = tuple(axis for axis in axes if place.dense.axis_length(axis) > 1)
            names = tuple(router.name for router in self._routers)
            done.append(Reduction("router", "sum", axes, ranks, names, total.numel()))
        sizes = [_counts(router.module).numel() for router in self._routers]
        for router, counts in zip(self._routers, torch.split(total, sizes), strict=True):
            bias = _tensor(router.module, "expert_bias")
            if router.is_frozen or router.rate is None or bias is None:
                continue
            counts = counts.view(bias.shape).to(bias.device)
            mean = counts.sum(-1, keepdim=True) / counts.shape[-1]
            bias.add_(torch.sign(mean - counts) * router.rate)
        return done


def _tensor(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    found = getattr(module, name, None)
    return found if isinstance(found, torch.Tensor) else None


def _counts(module: torch.nn.Module) -> torch.Tensor:
    counts = _tensor(module, "local_tokens_per_expert")
    assert counts is not None
    return counts


def _rate(module: torch.nn.Module) -> float | None:
    config = getattr(module, "config", None)
    told = getattr(config, "moe_router_bias_update_rate", getattr(module, "expert_bias_update_rate", None))
    return None if told is None else float(told)


def _is_frozen(module: torch.nn.Module) -> bool:
    """Say whether a router has parameters, and none that learns."""
    own = [*module.parameters()]
    return bool(own) and not any(parameter.requires_grad for parameter in own)
