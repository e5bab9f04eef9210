"""Checks that all ranks lay out the same gradients, once, before any gradient travels.

Ranks compare digests of lines of text. Comparing line by line names the first difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from xxhash import xxh128_hexdigest

from xrank.errors import GradientError
from xrank.gradients.plan import GradientPlan, PlannedBuffer, PlannedParameter, list_later
from xrank.gradients.wire import GradientWire, TorchWire, make_groups


def torch_wire(plan: GradientPlan) -> GradientWire:
    """Return the wire of a plan's ranks; on all ranks of the world, as `make_groups`.

    Raises:
        UsageError: torch.distributed is not initialised.
        GradientError: a rank has the plan of another rank, or ranks have other meshes; the same on all ranks.
    """
    wire = TorchWire(make_groups(plan.groups()))
    grids = " and ".join(mesh.grid for mesh in (plan.views.main, *(mesh for _, mesh in plan.views.others)))
    texts = wire.exchange(json.dumps([plan.rank, grids]), tuple(sorted(plan.views.main.ranks)))
    _check_places({rank: json.loads(text) for rank, text in texts.items()})
    return wire


def check_agreement(lines: Mapping[tuple[int, ...], tuple[str, ...]], wire: GradientWire, plan: GradientPlan) -> None:
    """Check that the plans of all ranks of the mesh fit together; all raise the same error.

    Args:
        lines: lines that must be equal, by the set of ranks: `agreement_lines` of the plan.
        wire: the plan's wire.
        plan: this rank's plan.

    Raises:
        GradientError: plans differ; it names the first difference, and two ranks.
    """
    everyone = tuple(sorted(plan.views.main.ranks))
    mine = {_key(ranks): [*found, _order(plan, ranks)] for ranks, found in lines.items()}
    digests = {key: xxh128_hexdigest("\n".join(found).encode()) for key, found in mine.items()}
    received = {rank: json.loads(text) for rank, text in wire.exchange(json.dumps(digests), everyone).items()}
    wrong = _find_difference(received)
    if wrong is None:
        return
    # Lines are long: ranks send them only to name a difference.
    texts = wire.exchange(json.dumps(mine.get(wrong, [])), everyone)
    among = [int(rank) for rank in wrong.split()]
    check_lines({rank: json.loads(texts[rank]) for rank in among})
    raise GradientError(
        "ranks do not lay out the same gradients",
        got=f"among ranks {among}",
        next_step="give all ranks the same module, plan and config",
    )


def _check_places(places: Mapping[int, tuple[int, str]]) -> None:
    """Check that each rank has its own plan, and that all plans are on one mesh.

    Args:
        places: by rank, the rank of its plan, and its meshes.

    Raises:
        GradientError: shards of a rank would go to another, or an axis has different meanings.
    """
    # All ranks compare with the lowest one, so that all name the same pair.
    first = min(places)
    for rank, (planned_rank, grids) in sorted(places.items()):
        if planned_rank != rank:
            raise GradientError(
                f"rank {rank} has the plan of rank {planned_rank}",
                rank=rank,
                got=f"a plan with rank={planned_rank}",
                want=f"rank={rank}: each rank owns other elements",
                next_step="let every rank make its own plan, GradientPlan.from_module without rank=",
            )
        if grids != places[first][1]:
            raise GradientError(
                f"ranks {first} and {rank} have other meshes",
                rank=rank,
                got=f"on rank {rank}: {grids}",
                want=f"as on rank {first}: {places[first][1]}",
                next_step="make the same mesh on all ranks",
            )


def _find_difference(digests_by_rank: Mapping[int, Mapping[str, str]]) -> str | None:
    for key in sorted({key for digests in digests_by_rank.values() for key in digests}):
        if len({digests_by_rank[int(rank)].get(key) for rank in key.split()}) > 1:
            return key
    return None


def _order(plan: GradientPlan, ranks: tuple[int, ...]) -> str:
    """Return the order in which buckets leave among these ranks. Ids would also count buckets of other sets."""
    buffers = [buffer.id for buffer in plan.buffers if buffer.ranks == ranks]
    places = [
        f"{buffers.index(bucket.buffer)}.{plan.buffers[bucket.buffer].buckets.index(bucket.id)}"
        for bucket in plan.buckets
        if bucket.buffer in buffers
    ]
    return f"buckets leave in the order {' '.join(places)} (buffer.bucket)"


def _key(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks))


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
