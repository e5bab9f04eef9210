"""Biases of routers, which gradients do not move: the router then picks experts with few tokens more often.

megatron/core/transformer/moe/moe_utils.py:get_updated_expert_bias; after arXiv 2408.15664.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xrank.gradients.distributed_data_parallel import DistributedDataParallel
from xrank.gradients.mesh_places import MeshPlace
from xrank.gradients.reductions import Reduction
from xrank.gradients.wire import GradientFault


@dataclass(frozen=True, slots=True)
class _Router:
    name: str
    module: torch.nn.Module
    rate: float | None
    is_frozen: bool


class RouterBiases:
    """The routers of one rank in one step.

    Args:
        chunks: the rank's wrapped models.
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
            GradientFault(
                f"{router.name}: the rate at which its expert_bias moves is unknown",
                rank,
                f"{router.name}.expert_bias",
                got="neither config.moe_router_bias_update_rate nor expert_bias_update_rate",
                want="one of them, a number",
                next_step="set expert_bias_update_rate on the module; 1e-3 is Megatron's",
            )
            for router in self._routers
            if router.rate is None and not router.is_frozen
        ]

    def run(self) -> list[Reduction]:
        """Move the biases, and reset the counts for the next step; on all ranks alike."""
        done = self._move() if self._routers else []
        for router in self._routers:
            _counts(router.module).zero_()
        for chunk in self._chunks:
            for module in chunk.module.modules():
                # Megatron resets this beside the counts, at the end of a step (finalize_model_grads.py).
                reset = getattr(module, "reset_global_aux_loss_tracker", None)
                if callable(reset):
                    reset()
        return done

    def _move(self) -> list[Reduction]:
        first = self._chunks[0]
        place = MeshPlace(first.plan.views, first.plan.rank)
        axes = tuple(axis for axis in place.dense.axis_names if axis in {"tp", *place.data_axes(False)})
        ranks = first.plan.ranks_along(*axes)
        # Counts of frozen routers travel too: this rank does not know the frozen routers of other ranks.
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
            # Only the sign of the difference counts, so that the step does not depend on the number of tokens.
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
    rate = getattr(config, "moe_router_bias_update_rate", getattr(module, "expert_bias_update_rate", None))
    return None if rate is None else float(rate)


def _is_frozen(module: torch.nn.Module) -> bool:
    """Return whether a router has parameters, all of them frozen."""
    own = [*module.parameters()]
    return bool(own) and not any(parameter.requires_grad for parameter in own)
