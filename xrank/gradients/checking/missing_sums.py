"""Finds the exchange that a wrong gradient lacks: its sum or its mean over some ranks is that of one process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from xrank.gradients.checking.findings import GradientFinding
from xrank.gradients.mesh_places import MeshPlace
from xrank.gradients.plan import GradientPlan
from xrank.gradients.wire import GradientWire
from xrank.words import join_words

_MAX_SUMMED = 64
"""Gradients of one set of ranks that are added up; further findings have no explanation."""

Comparable = tuple[torch.Tensor, torch.Tensor, float]
"""The flat elements of a gradient and of its reference that this rank compares, and the largest allowed difference."""


def explain_missing_sums(
    findings: Sequence[GradientFinding],
    compared: Mapping[str, Comparable],
    plan: GradientPlan,
    wire: GradientWire,
) -> list[GradientFinding]:
    """Return the findings, with the missing exchange where one explains a difference; on all ranks together.

    Args:
        findings: this rank's.
        compared: by name, gradients that were compared with a reference on this rank.
        plan: this rank's plan.
        wire: collectives between the ranks of the plan.
    """
    wrong = {one.name for one in findings if one.kind == "reference" and one.name in compared}
    hints: dict[str, str] = {}
    for ranks, axes, names in _list_sets(plan):
        own = {name: [compared[name][0].numel(), name in wrong] for name in names if name in compared}
        # Ranks along tp may hold other parameters, so only those that all of them compare are added up.
        texts = wire.exchange(json.dumps(own if wrong & own.keys() else None), ranks)
        if all(text == "null" for text in texts.values()):
            continue
        tables = [json.loads(text) for text in wire.exchange(json.dumps(own), ranks).values()]
        shared = [name for name in tables[0] if len({table.get(name, [-1])[0] for table in tables}) == 1]
        chosen = [name for name in shared if any(table[name][1] for table in tables)]
        for name in sorted(chosen)[:_MAX_SUMMED]:
            gradient, wanted, bound = compared[name]
            total = gradient.to(wire.device, torch.float64, copy=True)
            wire.all_reduce(total, ranks, "sum").wait()
            total, along = total.to(wanted.device), join_words(axes)
            if name not in wrong or not total.numel():
                continue
            if float((total - wanted).abs().max()) <= len(ranks) * bound:
                hints[name] = f"; its sum along {along} is right: that sum is missing"
            elif float((total / len(ranks) - wanted).abs().max()) <= bound:
                hints[name] = f"; its mean along {along} is right: that mean is missing"
    return [
        replace(one, message=one.message + hints[one.name]) if one.kind == "reference" and one.name in hints else one
        for one in findings
    ]


def _list_sets(plan: GradientPlan) -> Iterator[tuple[tuple[int, ...], tuple[str, ...], list[str]]]:
    """Yield sets of ranks with their axes and the parameters of which they should hold the same, in one order."""
    place = MeshPlace(plan.views, plan.rank)
    sets: dict[tuple[tuple[int, ...], tuple[str, ...]], list[str]] = {}
    for planned in plan.parameters:
        if len(planned.tensor_ranks) > 1 and planned.is_cut_over_tp is not True:
            axis = place.tensor_axis(plan.buffers[planned.buffer].is_expert)
            sets.setdefault((planned.tensor_ranks, (axis,)), []).append(planned.name)
        if len(planned.ranks) > 1 and not plan.config.use_distributed_optimizer:
            sets.setdefault((planned.ranks, planned.axes), []).append(planned.name)
    for (ranks, axes), names in sorted(sets.items()):
        yield ranks, axes, names
