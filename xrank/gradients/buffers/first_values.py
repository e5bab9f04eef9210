"""The values of replicas before the first step: if they differ, steps with equal gradients keep them different."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from xrank.gradients.plan import GradientPlan
from xrank.gradients.roles import local_of
from xrank.gradients.wire import GradientFault, GradientWire

_CHUNK = 1 << 20
"""Elements that are summed at once, to bound memory."""
_PRIME = 2_147_483_647


@torch.no_grad()
def compare_first_values(
    parameters: Mapping[str, torch.nn.Parameter], plan: GradientPlan, wire: GradientWire
) -> list[GradientFault]:
    """Return a fault for each parameter whose values differ between replicas; all ranks call this together."""
    faults = []
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for planned in plan.parameters:
        if len(planned.ranks) > 1:
            by_ranks.setdefault(planned.ranks, []).append(planned.name)
    for ranks, names in by_ranks.items():
        own = torch.tensor([_digest(local_of(parameters[name])) for name in names], dtype=torch.int64)
        bounds = torch.cat([own, ~own]).to(wire.device)  # the maximum of ~x is ~ of the minimum of x
        wire.all_reduce(bounds, ranks, "max").wait()
        for name, high, low in zip(names, bounds[: len(names)].tolist(), (~bounds[len(names) :]).tolist(), strict=True):
            if high != low:
                faults.append(
                    GradientFault(
                        f"{name}: replicas on ranks {list(ranks)} have different values before the first step",
                        plan.rank,
                        name,
                        got=f"digests {low} to {high}",
                        want="equal values, which equal gradients keep equal",
                        next_step="call broadcast_params() on all ranks after the module is wrapped",
                    )
                )
    return faults


def _digest(tensor: torch.Tensor) -> int:
    """Return a sum of the tensor's bytes, each with a weight of its place."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_meta:
        return 0
    flat = flat.view(torch.uint8) if flat.element_size() % 4 else flat.view(torch.int32)
    found = 0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + part.numel(), device=part.device) % 65_521 + 1
        found = (found * 31 + int((part % 65_537 * weights).sum())) % _PRIME
    return found
