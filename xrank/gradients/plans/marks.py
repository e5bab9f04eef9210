"""The role of a parameter: from a mark, from Megatron's attributes, from DTensor placements, or from its name.

The first source that gives an answer decides, in that order. Names decide last, and only by `QK_NAMES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from xrank.errors import UsageError
from xrank.gradients.config import GradientConfig
from xrank.gradients.mesh_places import MeshPlace
from xrank.gradients.plans.placed_parameters import ParameterCuts, cuts_of

if TYPE_CHECKING:
    import torch

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
    """Return the role of a parameter on the rank at a place.

    Args:
        name: its name, the last source that is used.
        parameter: the parameter; a DTensor's mesh has axes of the plan's mesh.
        place: place of the rank.
        config: contains whether sequence parallelism and norms of queries and keys need a sum.

    Raises:
        UsageError: sources contradict each other, or a necessary aspect has no source.
        LayoutError: as `cuts_of`.
    """
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
        raise UsageError(
            f"{name}: it is unknown whether its gradients along {tensor_axis} are parts of one",
            tensor=name,
            rank=place.rank,
            got=f"the name of a norm of queries or keys, which often covers one rank's heads, on {num_parts} ranks",
            want="qk_layernorm=True or False, or a mark",
            next_step="set GradientConfig(qk_layernorm=True) if heads are cut along it, else "
            'mark(parameter, over_tp="own")',
        )
    if over_tp in ("sum", "average") and num_parts > 1 and tensor_axis in sharded and reason is not _BY_NAME:
        raise UsageError(
            f"{name}: it is cut along {tensor_axis}, so gradients of different elements would be added up",
            tensor=name,
            rank=place.rank,
            got=f"cut along {tensor_axis}, and {reason}",
            want="one of the two",
            next_step='correct the mark, or mark(parameter, over_tp="own")',
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
