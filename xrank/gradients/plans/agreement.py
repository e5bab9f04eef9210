"""Lines on which ranks must agree before they exchange gradients. Comparing line by line names the first difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xrank.errors import GradientError
from xrank.gradients.plans.plan import GradientPlan
from xrank.gradients.plans.plan_entries import PlannedBuffer, PlannedParameter, list_later


def buffer_lines(plan: GradientPlan, buffer: PlannedBuffer) -> list[str]:
    """Return the lines that must be equal on all replicas of a buffer, parameters first: a difference names one."""
    names = [name for bucket_id in buffer.buckets for name in plan.buckets[bucket_id].names]
    how = f"{buffer.operation}, divided by {buffer.divisor}, among ranks {list(buffer.ranks)}"
    lines = [f"{name} of shape {plan[name].shape}" for name in names]
    lines.append(f"a buffer of {buffer.numel} elements of {buffer.grad_dtype} for {buffer.dtype}: {how}")
    for bucket_id in buffer.buckets:
        bucket = plan.buckets[bucket_id]
        lines.append(f"a bucket of elements {bucket.start} to {bucket.stop}, {bucket.numel_unpadded} of them used")
        lines += (f"{name} at element {plan[name].offset}" for name in bucket.names)
    return lines


def agreement_lines(plan: GradientPlan) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Return the lines that must be equal among each set of ranks that this rank exchanges gradients with.

    The lines hold configs, buffers and the owned elements of each parameter that is reduced later, so that ranks along
    tp, or the stages that share a table, exchange equal parts. They omit a table's name: each stage has its own.
    """
    lines: dict[tuple[int, ...], list[str]] = {}
    for buffer in plan.buffers:
        # A buffer on one rank is not exchanged, so nothing has to agree.
        if len(buffer.ranks) > 1:
            lines.setdefault(buffer.ranks, [str(plan.config)]).extend(buffer_lines(plan, buffer))
    for parameter, later in list_later(plan.parameters):
        name = parameter.name if later.kind == "tensor" else f"a {later.kind} parameter"
        elements = _describe_elements(parameter)
        lines.setdefault(later.ranks, []).append(f"{name}, {later.operation} over {later.axes}: {elements}")
    return {ranks: tuple(found) for ranks, found in lines.items()}


def check_lines(lines: Mapping[int, Sequence[str]]) -> None:
    """Compare the lines of one set of ranks.

    Args:
        lines: by rank.

    Raises:
        GradientError: two ranks differ; it shows the first different line of both.
    """
    first, *others = sorted(lines)
    for other in others:
        mine, theirs = [*lines[first]], [*lines[other]]
        if mine == theirs:
            continue
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        # One is the beginning of the other: the first line that is missing is the difference.
        at = min(len(mine), len(theirs)) if at is None else at
        raise GradientError(
            f"ranks {first} and {other} do not lay out the same gradients",
            rank=other,
            got=f"on rank {other}: {theirs[at] if at < len(theirs) else 'nothing more'}",
            want=f"as on rank {first}: {mine[at] if at < len(mine) else 'nothing more'}",
            next_step="make the same module with the same marks and GradientConfig on all of them",
        )


def _describe_elements(parameter: PlannedParameter) -> str:
    start, stop = parameter.owned
    return f"elements {start} to {stop} of shape {parameter.shape} in {parameter.grad_dtype}"
