"""Names the factor by which gradients are too large or too small: lengths of axes, and all gradients that share it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import prod

from xrank.gradients.checking.findings import GradientFinding
from xrank.gradients.mesh_places import EXPERT_DATA_AXES, MeshPlace
from xrank.gradients.plan import GradientPlan, PlannedParameter

_TOLERANCE = 0.02
"""Allowed difference of a ratio from a product of lengths, relative to the product."""


def find_factors(
    ratio: float, plan: GradientPlan, planned: PlannedParameter, tolerance: float = _TOLERANCE
) -> tuple[str, ...]:
    """Return the products and quotients of lengths of axes that equal a ratio or its inverse, with the fewest axes.

    Products come before quotients, and those of the parameter's own mesh before all others. A quotient is written so
    that it equals the ratio: ``dp/edp``.

    Args:
        ratio: gradient divided by reference.
        plan: this rank's plan.
        planned: the parameter.
        tolerance: allowed difference of the ratio from a product, relative to the product.
    """
    own = _list_lengths(plan, planned, is_own=True)
    every = _list_lengths(plan, planned, is_own=False)
    for lengths in (own, every):
        for count in range(1, len(lengths) + 1):
            # A missing division and a division too many have inverse ratios and the same axis.
            factor = max(ratio, 1 / ratio)
            found = tuple(
                " x ".join(chosen)
                for chosen in combinations(lengths, count)
                if abs(factor / prod(lengths[axis] for axis in chosen) - 1) <= tolerance
            )
            if not found and lengths is every:
                found = _find_quotients(ratio, lengths, count, tolerance)
            if found:
                return found
    return ()


def describe_factor(ratio: float, plan: GradientPlan, planned: PlannedParameter) -> str:
    """Return a sentence on a gradient that is a multiple of its reference."""
    axes = find_factors(ratio, plan, planned)
    times = f"{ratio:.4g} times" if ratio > 1 else f"1/{1 / ratio:.4g} of"
    start = f"it is {times} that of one process"
    if not axes:
        return f"{start}, which is not a length of an axis: see numbers of micro-batches and of tokens"
    alternatives = " or ".join(axes)
    if any("/" in one for one in axes):
        return f"{start}, which is {alternatives}: it was divided by one of them, and the other is right"
    if ratio > 1:
        return f"{start}, as many as ranks along {alternatives}: a division by it is missing, or a sum was made twice"
    return f"{start}, as many as ranks along {alternatives}: it was divided once too often, or not summed"


def summarize_factors(
    findings: Sequence[GradientFinding], plan: GradientPlan, judged: Sequence[str]
) -> list[GradientFinding]:
    """Replace findings of one factor by one finding where it is that of all gradients of a kind.

    Args:
        findings: findings of this rank.
        plan: this rank's plan.
        judged: names of gradients whose reference is not zero, so that a factor would show.
    """
    left = list(findings)
    for title, members in _list_kinds(plan, judged):
        scaled = {one.name: one for one in left if one.kind == "scale" and one.name in members}
        factors = [one.factor for one in scaled.values() if one.factor is not None]
        if len(members) < 2 or len(factors) < len(members) or max(factors) > min(factors) * (1 + _TOLERANCE):
            continue
        # The median has the smallest error of rounding.
        factor = sorted(factors)[len(factors) // 2]
        first = scaled[members[0]]
        summary = replace(
            first,
            name=title,
            message=describe_factor(factor, plan, plan[first.name]),
            difference=max(one.difference or 0.0 for one in scaled.values()),
            factor=factor,
        )
        left = [summary, *(one for one in left if one.name not in scaled or one.kind != "scale")]
    return left


def _list_kinds(plan: GradientPlan, judged: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the kinds of gradients that one mistake scales alike, the largest first."""
    yield "all gradients", list(judged)
    for title, is_expert in (("all gradients of experts", True), ("all gradients of dense weights", False)):
        yield title, [name for name in judged if plan.buffers[plan[name].buffer].is_expert == is_expert]
    for kind, title in (("tensor", "all copies along tp"), ("conditional", "all copies along pp")):
        yield title, [name for name in judged if any(later.kind == kind for later in plan[name].later)]


def _list_lengths(plan: GradientPlan, planned: PlannedParameter, *, is_own: bool) -> dict[str, int]:
    """Return the lengths of axes longer than 1, those along which the parameter is exchanged first.

    Args:
        plan: this rank's plan.
        planned: the parameter.
        is_own: only the axes of the parameter's own mesh.
    """
    is_expert = plan.buffers[planned.buffer].is_expert
    place = MeshPlace(plan.views, plan.rank)
    lengths: dict[str, int] = {}
    others = () if is_own else (place.mesh(False), *(mesh for _, mesh in plan.views.others))
    for mesh in (place.mesh(is_expert), *others):
        for axis in mesh.axis_names:
            if mesh.axis_length(axis) > 1:
                lengths.setdefault(axis, mesh.axis_length(axis))
    exchanged = dict.fromkeys([*planned.axes, *(axis for later in planned.later for axis in later.axes)])
    first = {axis: lengths[axis] for axis in exchanged if axis in lengths}
    return {**first, **{axis: length for axis, length in lengths.items() if axis not in first}}


def _find_quotients(ratio: float, lengths: Mapping[str, int], count: int, tolerance: float) -> tuple[str, ...]:
    found = []
    for chosen in combinations(lengths, count):
        for is_above in product((True, False), repeat=count):
            above = [axis for axis, above in zip(chosen, is_above, strict=True) if above]
            below = [axis for axis in chosen if axis not in above]
            quotient = prod(lengths[axis] for axis in above) / prod(lengths[axis] for axis in below)
            if above and below and abs(ratio / quotient - 1) <= tolerance:
                text = " x ".join(below)
                found.append((chosen, f"{' x '.join(above)}/{text if len(below) == 1 else f'({text})'}"))
    # Experts have other replicas than dense weights: to divide by the one number for the other is the usual mistake.
    usual = tuple(text for chosen, text in found if all(axis in EXPERT_DATA_AXES for axis in chosen))
    return usual or tuple(text for _, text in found)
