"""Finds elements that no rank owns after the exchange: no optimizer would step them."""

from __future__ import annotations

import json

from xrank.gradients.checking.findings import GradientFinding
from xrank.gradients.plan import GradientPlan
from xrank.gradients.wire import GradientWire


def find_unowned(plan: GradientPlan, wire: GradientWire) -> list[GradientFinding]:
    """Return a finding for each parameter with elements that no rank owns; on all ranks together."""
    sets: dict[tuple[int, ...], list[str]] = {}
    for planned in plan.parameters:
        # Without the distributed optimizer each rank has to own whole parameters, and need not ask the others.
        ranks = plan.buffers[planned.buffer].shard_ranks if plan.config.use_distributed_optimizer else (plan.rank,)
        sets.setdefault(ranks, []).append(planned.name)
    findings = []
    for ranks, names in sorted(sets.items()):
        texts = wire.exchange(json.dumps([plan[name].owned for name in names]), ranks)
        for name, *slices in zip(names, *map(json.loads, texts.values()), strict=True):
            covered = 0
            for start, stop in sorted(slices):
                covered = max(covered, stop) if start <= covered else covered
            if covered < plan[name].numel:
                message = f"no rank has element {covered} after the exchange, so no optimizer steps it"
                findings.append(GradientFinding("missing", name, ranks, message))
    return findings
