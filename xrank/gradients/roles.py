"""The role of a parameter: from a mark, from Megatron's attributes, from DTensor placements, or from its name.

The first source that gives an answer decides, in that order. Names decide last, and only by `QK_NAMES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from xrank.errors import UsageError
from xrank.gradients.config import GradientConfig
from xrank.gradients.faults import At
from xrank.gradients.mesh_places import AXIS_ALIASES, MeshPlace, ranks_along
from xrank.layout import DeviceMesh
from xrank.layout.terms.tensors import describe_mesh

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ParameterCuts:
    """Axes of a parameter's placements; empty for a plain tensor."""

    sharded: tuple[str, ...] = ()
    """Axes along which ranks hold different parts."""
    partial: tuple[str, ...] = ()
    """Axes along which values and gradients are partial sums."""
    is_known: bool = False
    """Whether placements along tp or etp exist: a plain copy there is then certain."""
    axes: tuple[tuple[str, ...], ...] = ()
    """Axes of the plan that each placement is along: several where the parameter's mesh has merged them."""


def local_of(parameter: Any) -> Any:
    """Return this rank's part of a parameter: the local tensor of a DTensor, else the parameter itself."""
    # Not to_local(): it returns another object, whose .data can't be moved into a buffer for the parameter.
    return parameter._local_tensor if hasattr(parameter, "device_mesh") else parameter


def cuts_of(name: str, parameter: Any, place: MeshPlace) -> ParameterCuts:
    """Return the axes that cut a parameter."""
    if not hasattr(parameter, "device_mesh"):
        return ParameterCuts()
    mesh = describe_mesh(parameter.device_mesh)
    sharded: list[str] = []
    partial: list[str] = []
    along = tuple(_find_axes(name, mesh, axis, place) for axis in mesh.axis_names)
    for axis, placement, axes in zip(mesh.axis_names, parameter.placements, along, strict=True):
        if placement.is_partial():
            if any(one not in ("tp", "etp") for one in axes):
                raise At(name, place.rank).layout_error(
                    f"its values are partial sums along {axis!r}, along which parameters are copies or cut",
                    f"use Replicate or Shard in place of {placement!r}",
                )
            partial += axes
        elif not placement.is_replicate():
            sharded += axes
    is_known = any(axis in ("tp", "etp") for axes in along for axis in axes)
    return ParameterCuts(tuple(sharded), tuple(partial), is_known, along)


def _find_axes(name: str, mesh: DeviceMesh, axis: str, place: MeshPlace) -> tuple[str, ...]:
    """Return the axes of the plan's mesh that have the ranks of an axis of a parameter's mesh.

    The ranks decide, because torch's meshes have names of their own, none at all, or one name for several axes
    (``_flatten``). An axis that has a name of the plan must have its ranks too.
    """
    if mesh.axis_length(axis) == 1:
        return ()
    plans = [known for known in (place.dense, place.expert) if known is not None]
    named = [known for known in plans if axis in known.axis_names]
    if place.rank not in mesh:
        # This rank holds no part of the parameter, and has no ranks to compare.
        alias = AXIS_ALIASES.get(axis, axis)
        return (axis,) if named else (alias,) if any(alias in known.axis_names for known in plans) else ()
    along = {*ranks_along(mesh, place.rank, [axis])}
    for known in named or plans:
        longer = [one for one in known.axis_names if known.axis_length(one) > 1]
        inside = [one for one in longer if along.issuperset(ranks_along(known, place.rank, [one]))]
        axes = (axis,) if named else tuple(inside)
        if {*ranks_along(known, place.rank, axes)} == along:
            return axes
    if named:
        raise At(name, place.rank).layout_error(
            f"its mesh has ranks {sorted(along)} along {axis!r}, and the plan's mesh "
            f"{list(ranks_along(named[0], place.rank, [axis]))}",
            "make both meshes of the same ranks in the same order",
        )
    raise At(name, place.rank).layout_error(
        f"its placements are along {axis!r}, and no axes of the plan's mesh have the same ranks",
        "make the plan with the mesh of the parameters",
        f"ranks {sorted(along)} of the mesh {mesh.grid!r}",
        f"ranks along axes of {' or of '.join(repr(known.grid) for known in plans)}",
    )


OverTP: TypeAlias = Literal["sum", "average", "own"]
Tied: TypeAlias = Literal["word", "position"]
Aspect: TypeAlias = Literal["expert", "tp", "pp", "tied"]

QK_NAMES = ("q_layernorm", "k_layernorm", "q_norm", "k_norm")
"""Modules that norm queries and keys: a part of the name equals one of these, or ends in one after ``_``. Megatron
uses the first two, as any part of the text; transformers uses the others."""

_ATTRIBUTE = "xrank_mark"


@dataclass(frozen=True, slots=True)
class ParameterMark:
    """The arguments of `mark`; None where an argument was omitted."""

    expert: bool | None = None
    over_tp: OverTP | None = None
    over_pp: bool | None = None
    tied: Tied | None = None
    stages: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ParameterRole:
    """The role of a parameter on one rank, with reasons."""

    is_expert: bool = False
    """Whether it belongs to an expert: ranks along ep hold other experts."""
    over_tp: Literal["sum", "average"] | None = None
    """How its gradients along tp combine, after those of replicas were added; None if they do not."""
    over_pp: bool = False
    """Whether every stage holds it, and has a part of its gradient."""
    tied: Tied | None = None
    """The table that it is, where several stages hold one."""
    stages: tuple[int, ...] | None = None
    """Stages that hold the table; None means the first and the last one."""
    sharded: tuple[str, ...] = ()
    """Axes along which each rank holds a different part."""
    is_cut_over_tp: bool | None = None
    """Whether ranks along tp hold different parts, or copies; None if no source defines it."""
    placement_axes: tuple[tuple[str, ...], ...] = ()
    """Axes of the plan that each placement of the parameter is along; empty for a plain tensor."""
    reasons: Mapping[Aspect, str] = field(default_factory=dict)
    """Source of each aspect, as words that follow "because"; aspects without a source are absent."""


def mark(
    parameter: torch.Tensor,
    *,
    expert: bool | None = None,
    over_tp: OverTP | None = None,
    over_pp: bool | None = None,
    tied: Tied | None = None,
    stages: Sequence[int] | None = None,
) -> None:
    """Set the role of a parameter. Omitted aspects come from the other sources; a second mark replaces the first.

    Mark the parameters of the module that is wrapped: ``copy.deepcopy`` and ``parallelize_module`` copy parameters, and
    the copies lose marks and Megatron's attributes.

    Args:
        parameter: the parameter.
        expert: whether it belongs to an expert: its replicas are along edp, not along dp and cp.
        over_tp: ``"sum"`` if every rank along tp holds a copy, and its gradient is a part; ``"average"`` if each
            gradient is one of several; ``"own"`` if a rank holds a part, or already has the whole gradient.
        over_pp: whether every stage holds a copy, so that the gradients of the stages are summed.
        tied: ``"word"`` or ``"position"`` for a table that several stages hold, so that their gradients are summed.
        stages: stages that hold the table, if not the first and the last one.

    Raises:
        UsageError: a value is not one of those above.

    Example:
        >>> import torch
        >>> from xrank.gradients import mark
        >>> norm = torch.nn.LayerNorm(4)
        >>> mark(norm.weight, over_tp="sum")
    """
    if over_tp not in (None, "sum", "average", "own"):
        raise UsageError("over_tp is not a known value", got=repr(over_tp), want='"sum", "average" or "own"')
    if tied not in (None, "word", "position"):
        raise UsageError("tied is not a known value", got=repr(tied), want='"word" or "position"')
    if stages is not None and (tied is None or len(set(stages)) != len(stages) or len(stages) < 2 or min(stages) < 0):
        raise UsageError(
            "stages are those that hold a tied table", got=f"stages={stages!r}, tied={tied!r}", want="two or more"
        )
    ordered = None if stages is None else tuple(sorted(stages))
    setattr(parameter, _ATTRIBUTE, ParameterMark(expert, over_tp, over_pp, tied, ordered))


def role_of(name: str, parameter: torch.Tensor, place: MeshPlace, config: GradientConfig) -> ParameterRole:
    """Return the role of a parameter on the rank at a place."""
    marked: ParameterMark = getattr(parameter, _ATTRIBUTE, None) or ParameterMark()
    cuts = cuts_of(name, parameter, place)
    reasons: dict[Aspect, str] = {}

    is_expert = marked.expert
    if is_expert is not None:
        reasons["expert"] = f"it is marked expert={is_expert}"
    elif not getattr(parameter, "allreduce", True):
        is_expert = True
        reasons["expert"] = "its attribute allreduce is False, as Megatron marks experts"
    elif "ep" in cuts.sharded:
        is_expert = True
        reasons["expert"] = "its placement cuts it along ep"

    tensor_axis = place.tensor_axis(bool(is_expert))
    sharded = cuts.sharded
    # Megatron sets it on the parts of its column- and row-parallel layers.
    if getattr(parameter, "tensor_model_parallel", False) and tensor_axis not in sharded:
        sharded = (*sharded, tensor_axis)
    over_tp, reason = _resolve_over_tp(name, parameter, marked, cuts, config)
    num_parts = len(place.ranks([tensor_axis], bool(is_expert)))
    if over_tp == "unknown" and num_parts > 1 and tensor_axis not in sharded:
        raise At(name, place.rank).usage_error(
            f"it is unknown whether its gradients along {tensor_axis} are parts of one: by its name it norms queries "
            f"or keys, often of one rank's heads, and there are {num_parts} ranks",
            'set GradientConfig(qk_layernorm=True) if heads are cut along it, else mark(parameter, over_tp="own")',
        )
    if over_tp in ("sum", "average") and num_parts > 1 and tensor_axis in sharded and reason is not _BY_NAME:
        raise At(name, place.rank).usage_error(
            f"it is cut along {tensor_axis}, and {reason}, so gradients of different elements would be added up",
            'correct the mark, or mark(parameter, over_tp="own")',
        )
    # A norm of queries or keys that is cut along tp holds its own part: its name alone asks for no sum.
    is_reduced = over_tp in ("sum", "average") and tensor_axis not in sharded
    if is_reduced or over_tp == "own":
        reasons["tp"] = reason

    over_pp, tied = _find_stage_roles(parameter, marked, reasons)
    return ParameterRole(
        is_expert=bool(is_expert),
        over_tp=over_tp if is_reduced else None,  # type: ignore[arg-type]  # "own" and "unknown" are not reduced
        over_pp=bool(over_pp),
        tied=tied,
        stages=marked.stages,
        sharded=sharded,
        is_cut_over_tp=tensor_axis in sharded if tensor_axis in sharded or is_reduced or cuts.is_known else None,
        placement_axes=cuts.axes,
        reasons=reasons,
    )


_BY_NAME = "its name is that of a norm of queries or keys, and qk_layernorm is set"


def _find_stage_roles(
    parameter: torch.Tensor, marked: ParameterMark, reasons: dict[Aspect, str]
) -> tuple[bool | None, Tied | None]:
    """Return `over_pp` and `tied`, and add their reasons."""
    over_pp = marked.over_pp
    if over_pp is not None:
        reasons["pp"] = f"it is marked over_pp={over_pp}"
    elif getattr(parameter, "pipeline_parallel", False):
        over_pp = True
        reasons["pp"] = "its attribute pipeline_parallel is True"
    tied = marked.tied
    if tied is not None:
        reasons["tied"] = f'it is marked tied="{tied}"'
    elif getattr(parameter, "shared_embedding", False):
        tied = "word"
        reasons["tied"] = "its attribute shared_embedding is True"
    return over_pp, tied


def _resolve_over_tp(
    name: str, parameter: torch.Tensor, marked: ParameterMark, cuts: ParameterCuts, config: GradientConfig
) -> tuple[OverTP | Literal["unknown"] | None, str]:
    """Return how gradients along tp combine, with the reason."""
    if marked.over_tp is not None:
        return marked.over_tp, f'it is marked over_tp="{marked.over_tp}"'
    if {"tp", "etp"} & set(cuts.partial):
        return "sum", "its placement is Partial along tp"
    # Averages first, as Megatron: megatron/core/distributed/finalize_model_grads.py.
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        return "average", "its attribute average_gradients_across_tp_domain is True"
    if getattr(parameter, "sequence_parallel", False) and config.sequence_parallel:
        return "sum", "its attribute sequence_parallel is True"
    if cuts.is_known:
        return None, ""
    is_named = any(part == known or part.endswith(f"_{known}") for part in name.split(".") for known in QK_NAMES)
    if is_named and config.qk_layernorm is not False:
        return ("sum", _BY_NAME) if config.qk_layernorm else ("unknown", "")
    return None, ""
