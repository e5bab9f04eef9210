"""Reductions after the sum over replicas: along tp, over all stages, or over the stages that share a table."""

from __future__ import annotations

from collections.abc import Iterator

from xrank.errors import UsageError
from xrank.gradients.mesh_places import MeshPlace, ranks_along
from xrank.gradients.plan import LaterReduction
from xrank.gradients.roles import ParameterRole
from xrank.words import join_words


def plan_later_reductions(name: str, role: ParameterRole, place: MeshPlace) -> Iterator[LaterReduction]:
    """Yield the reductions of a parameter's gradient after the sum over replicas, first to last.

    Args:
        name: name of the parameter.
        role: role of the parameter.
        place: place of this rank.

    Raises:
        UsageError: the parameter is a table that this rank's stage does not hold.
    """
    stages = ranks_along(place.dense, place.rank, ("pp",)) if role.over_pp or role.tied else ()
    if role.over_pp and len(stages) > 1:
        why = f"every stage has a part of its gradient: {role.reasons['pp']}"
        yield LaterReduction("conditional", ("pp",), tuple(sorted(stages)), "sum", why)
    axis = place.tensor_axis(role.is_expert)
    along = place.ranks((axis,), role.is_expert)
    if role.over_tp is not None and len(along) > 1:
        part = "a part of its gradient" if role.over_tp == "sum" else "a gradient of its own"
        yield LaterReduction("tensor", (axis,), along, role.over_tp, f"each has {part}: {role.reasons['tp']}")
    if role.tied is None or len(stages) < 2:
        return
    # Megatron ties the first stage's embedding with the last stage's output layer.
    holding = role.stages or (0, len(stages) - 1)
    if place.stage() not in holding or max(holding) >= len(stages):
        raise UsageError(
            f"{name}: this stage is not one of those that hold the {role.tied} table",
            tensor=name,
            rank=place.rank,
            got=f"stage {place.stage()} of {len(stages)}, and stages {list(holding)} that hold it",
            want="this stage among them",
            next_step=f'name the stages that hold it: mark(parameter, tied="{role.tied}", stages=(0, ...))',
        )
    ranks = tuple(sorted(stages[stage] for stage in holding))
    why = f"stages {join_words(map(str, holding))} hold the same {role.tied} table: {role.reasons['tied']}"
    yield LaterReduction(role.tied, ("pp",), ranks, "sum", why)
