"""Checks that all ranks lay out the same gradients, once, before any gradient travels.

Ranks compare digests of lines of text. Comparing line by line names the first difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from xxhash import xxh128_hexdigest

from xrank.gradients.faults import At
from xrank.gradients.plan import GradientPlan, PlannedBuffer, list_later
from xrank.gradients.wire import GradientWire, make_wire


def connect_ranks(plan: GradientPlan, wire: GradientWire | None) -> GradientWire:
    """Return the wire of a plan's ranks, torch's if None, after a check that the plans of all ranks fit together.

    All ranks of the world call this together, as `make_wire`, and raise the same errors: a rank has the plan of another
    rank, ranks have different meshes, or plans differ.
    """
    everyone = tuple(sorted(plan.views.main.ranks))
    if wire is None:
        wire = make_wire(plan.groups())
        grids = " and ".join(mesh.grid for mesh in (plan.views.main, *(mesh for _, mesh in plan.views.others)))
        texts = wire.exchange(json.dumps([plan.rank, grids]), everyone)
        _check_places({rank: json.loads(text) for rank, text in texts.items()})
    _check_lines_of_all(plan, wire)
    return wire


def _check_lines_of_all(plan: GradientPlan, wire: GradientWire) -> None:
    everyone = tuple(sorted(plan.views.main.ranks))
    lines = agreement_lines(plan)
    mine = {" ".join(map(str, ranks)): [*found, _describe_order(plan, ranks)] for ranks, found in lines.items()}
    digests = {key: xxh128_hexdigest("\n".join(found).encode()) for key, found in mine.items()}
    received = {rank: json.loads(text) for rank, text in wire.exchange(json.dumps(digests), everyone).items()}
    for key in sorted({key for digests in received.values() for key in digests}):
        among = [int(rank) for rank in key.split()]
        if len({received[rank].get(key) for rank in among}) == 1:
            continue
        # Lines are long: ranks send them only to name a difference.
        texts = wire.exchange(json.dumps(mine.get(key, [])), everyone)
        check_lines({rank: json.loads(texts[rank]) for rank in among})
        raise At().error(
            f"ranks {among} do not lay out the same gradients", "give all ranks the same module, plan and config"
        )


def _check_places(places: Mapping[int, tuple[int, str]]) -> None:
    """Check that each rank has its own plan, and that all plans are on one mesh.

    Else shards of a rank would go to another rank, or an axis would have two meanings.
    """
    # All ranks compare with the lowest one, so that all name the same pair.
    first = min(places)
    for rank, (planned_rank, grids) in sorted(places.items()):
        if planned_rank != rank:
            raise At(rank=rank).error(
                f"rank {rank} has the plan of rank {planned_rank}, which owns other elements",
                "let every rank make its own plan, GradientPlan.from_module without rank=",
            )
        if grids != places[first][1]:
            raise At(rank=rank).error(
                f"ranks {first} and {rank} have different meshes",
                "make the same mesh on all ranks",
                f"on rank {rank}: {grids}",
                f"as on rank {first}: {places[first][1]}",
            )


def _describe_order(plan: GradientPlan, ranks: tuple[int, ...]) -> str:
    """Return the order in which buckets leave among these ranks. Ids would also count buckets of other sets."""
    buffers = [buffer.id for buffer in plan.buffers if buffer.ranks == ranks]
    places = [
        f"{buffers.index(bucket.buffer)}.{plan.buffers[bucket.buffer].buckets.index(bucket.id)}"
        for bucket in plan.buckets
        if bucket.buffer in buffers
    ]
    return f"buckets leave in the order {' '.join(places)} (buffer.bucket)"


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
        start, stop = parameter.owned
        elements = f"elements {start} to {stop} of shape {parameter.shape} in {parameter.grad_dtype}"
        lines.setdefault(later.ranks, []).append(f"{name}, {later.operation} over {later.axes}: {elements}")
    return {ranks: tuple(found) for ranks, found in lines.items()}


def check_lines(lines: Mapping[int, Sequence[str]]) -> None:
    """Compare the lines of one set of ranks, by rank; raise the first difference between two."""
    first, *others = sorted(lines)
    for other in others:
        mine, theirs = [*lines[first]], [*lines[other]]
        if mine == theirs:
            continue
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        # One is the beginning of the other: the first line that is missing is the difference.
        at = min(len(mine), len(theirs)) if at is None else at
        raise At(rank=other).error(
            f"ranks {first} and {other} do not lay out the same gradients",
            "make the same module with the same marks and GradientConfig on all of them",
            f"on rank {other}: {theirs[at] if at < len(theirs) else 'nothing more'}",
            f"as on rank {first}: {mine[at] if at < len(mine) else 'nothing more'}",
        )
