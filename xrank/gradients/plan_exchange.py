"""Whether all ranks lay out the same gradients, asked of all of them once, before any gradient travels."""

from __future__ import annotations

import json
from collections.abc import Mapping

from xxhash import xxh128_hexdigest

from xrank.errors import GradientError
from xrank.gradients.plans.agreement import check_lines
from xrank.gradients.plans.plan import GradientPlan
from xrank.gradients.wires.process_groups import make_groups
from xrank.gradients.wires.wire import TorchWire, Wire

__all__ = ["check_agreement", "torch_wire"]


def torch_wire(plan: GradientPlan) -> Wire:
    """Return what the ranks of a plan exchange on; on all ranks of the world, as `make_groups`.

    Raises:
        UsageError: there is no process group.
        GradientError: a rank has the plan of another, or ranks have other meshes; the same on all ranks.
    """
    wire = TorchWire(make_groups(plan.groups()))
    grids = " and ".join(mesh.grid for mesh in (plan.views.main, *(mesh for _, mesh in plan.views.others)))
    texts = wire.exchange(json.dumps([plan.rank, grids]), tuple(sorted(plan.views.main.ranks)))
    _check_places({rank: json.loads(text) for rank, text in texts.items()})
    return wire


def check_agreement(lines: Mapping[tuple[int, ...], tuple[str, ...]], wire: Wire, plan: GradientPlan) -> None:
    """Refuse plans that do not fit together; on all ranks of the mesh, with the same error.

    Args:
        lines: what must be alike, by the ranks among which; `agreement_lines` of the plan.
        wire: what ranks ask each other on.
        plan: of this rank.

    Raises:
        GradientError: it names the first difference, and two ranks that differ.
    """
    everyone = tuple(sorted(plan.views.main.ranks))
    mine = {_key(ranks): [*found, _order(plan, ranks)] for ranks, found in lines.items()}
    digests = {key: xxh128_hexdigest("\n".join(found).encode()) for key, found in mine.items()}
    told = {rank: json.loads(text) for rank, text in wire.exchange(json.dumps(digests), everyone).items()}
    wrong = _first_difference(told)
    if wrong is None:
        return
    # Texts are long: they travel only where there is a difference to name.
    texts = wire.exchange(json.dumps(mine.get(wrong, [])), everyone)
    among = [int(rank) for rank in wrong.split()]
    check_lines({rank: json.loads(texts[rank]) for rank in among})
    raise GradientError("ranks do not lay out the same gradients", got=f"among ranks {among}")


def _check_places(told: Mapping[int, tuple[int, str]]) -> None:
    """Refuse plans that are of other ranks than those that have them, or on several meshes.

    Args:
        told: by rank, whose plan it has, and its meshes.

    Raises:
        GradientError: shards of a rank would go to another, or no two ranks would mean the same by an axis.
    """
    first = min(told)
    for rank, (planned_rank, grids) in sorted(told.items()):
        if planned_rank != rank:
            raise GradientError(
                f"rank {rank} has the plan of rank {planned_rank}",
                rank=rank,
                got=f"a plan with rank={planned_rank}",
                want=f"rank={rank}: each rank owns other elements",
                next_step="let every rank make its own plan, GradientPlan.from_module without rank=",
            )
        if grids != told[first][1]:
            raise GradientError(
                f"ranks {first} and {rank} have other meshes",
                rank=rank,
                got=f"on rank {rank}: {grids}",
                want=f"as on rank {first}: {told[first][1]}",
                next_step="make the same mesh on all ranks",
            )


def _first_difference(told: Mapping[int, Mapping[str, str]]) -> str | None:
    for key in sorted({key for digests in told.values() for key in digests}):
        if len({told[int(rank)].get(key) for rank in key.split()}) > 1:
            return key
    return None


def _order(plan: GradientPlan, ranks: tuple[int, ...]) -> str:
    """Return in which order buckets travel among these ranks: ids count buckets of other sets too."""
    buffers = [buffer.id for buffer in plan.buffers if buffer.ranks == ranks]
    places = [
        f"{buffers.index(bucket.buffer)}.{plan.buffers[bucket.buffer].buckets.index(bucket.id)}"
        for bucket in plan.buckets
        if bucket.buffer in buffers
    ]
    return f"buckets leave in the order {' '.join(places)} (buffer.bucket)"


def _key(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks))
