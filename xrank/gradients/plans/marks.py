"""What a parameter is to the ranks: told by a mark, by Megatron's attributes, by DTensor placements, or by its name.

The first of these that says something decides, in that order. Names decide last and only by `QK_NAMES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from xrank.errors import UsageError
from xrank.gradients.config import GradientConfig
from xrank.gradients.plans.mesh_places import MeshPlace
from xrank.gradients.plans.placed_parameters import ParameterCuts, cuts_of

if TYPE_CHECKING:
    import torch

__all__ = ["QK_NAMES", "Aspect", "OverTP", "ParameterMark", "ParameterRole", "Tied", "mark", "role_of"]

OverTP: TypeAlias = Literal["sum", "average", "own"]
Tied: TypeAlias = Literal["word", "position"]
Aspect: TypeAlias = Literal["expert", "tp", "pp", "tied"]

QK_NAMES = ("q_layernorm", "k_layernorm", "q_norm", "k_norm")
"""Modules that norm queries and keys: a part of the name that is one of these, or ends in one after ``_``. Megatron
knows the first two, as any part of the text; transformers writes the others."""

_ATTRIBUTE = "xrank_mark"


@dataclass(frozen=True, slots=True)
class ParameterMark:
    """What `mark` was told; None where it was not."""

    expert: bool | None = None
    over_tp: OverTP | None = None
    over_pp: bool | None = None
    tied: Tied | None = None
    stages: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ParameterRole:
    """What a parameter is, and why."""

    is_expert: bool = False
    """One of the experts of this rank: ranks along ep hold others."""
    over_tp: Literal["sum", "average"] | None = None
    """What its gradients along tp are to each other, after those of replicas were added."""
    over_pp: bool = False
    """Every stage holds it, and has a part of its gradient."""
    tied: Tied | None = None
    """A table that several stages hold."""
    stages: tuple[int, ...] | None = None
    """These stages; the first and the last one when None."""
    sharded: tuple[str, ...] = ()
    """Axes along which this rank holds a part of its own."""
    reasons: Mapping[Aspect, str] = field(default_factory=dict)
    """What said so, in words that follow "because"; nothing of what nobody said."""


def mark(
    parameter: torch.Tensor,
    *,
    expert: bool | None = None,
    over_tp: OverTP | None = None,
    over_pp: bool | None = None,
    tied: Tied | None = None,
    stages: Sequence[int] | None = None,
) -> None:
    """Say what a parameter is; what is left out stays as other things tell it. A second mark replaces the first.

    Mark the parameters that are wrapped: the copies that ``copy.deepcopy`` and ``parallelize_module`` make of them lose
    marks and Megatron's attributes.

    Args:
        parameter: the parameter.
        expert: it is an expert's: its replicas are along edp, not along dp and cp.
        over_tp: every rank along tp holds a copy of it, and each gradient is a part to ``"sum"``, or one of several to
            ``"average"``; or it is a part of the rank's ``"own"``, or has the whole gradient already.
        over_pp: every stage holds a copy of it, and the gradients of the stages are summed.
        tied: a table that several stages hold, ``"word"`` or ``"position"``; their gradients are summed.
        stages: the stages that hold it, if not the first and the last one.

    Raises:
        UsageError: a value means nothing.
    """
    if over_tp not in (None, "sum", "average", "own"):
        raise UsageError("over_tp is none that is known", got=repr(over_tp), want='"sum", "average" or "own"')
    if tied not in (None, "word", "position"):
        raise UsageError("tied is none that is known", got=repr(tied), want='"word" or "position"')
    if stages is not None and (tied is None or len(set(stages)) != len(stages) or len(stages) < 2 or min(stages) < 0):
        raise UsageError(
            "stages are those that hold a tied table", got=f"stages={stages!r}, tied={tied!r}", want="two or more"
        )
    told = None if stages is None else tuple(sorted(stages))
    setattr(parameter, _ATTRIBUTE, ParameterMark(expert, over_tp, over_pp, tied, told))


def role_of(name: str, parameter: torch.Tensor, place: MeshPlace, config: GradientConfig) -> ParameterRole:
    """Return what a parameter is to the rank at a place.

    Args:
        name: its name; the last thing that is asked.
        parameter: the parameter, which may be a DTensor whose mesh has axes of ours.
        place: the rank.
        config: says whether sequence parallelism and norms of queries and keys need a sum.

    Raises:
        UsageError: it is said to be two things that exclude each other, or nothing says what must be known.
        LayoutError: as `cuts_of`.
    """
    told: ParameterMark = getattr(parameter, _ATTRIBUTE, None) or ParameterMark()
    cuts = cuts_of(name, parameter, place)
    reasons: dict[Aspect, str] = {}

    is_expert = told.expert
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
    if getattr(parameter, "tensor_model_parallel", False) and tensor_axis not in sharded:
        sharded = (*sharded, tensor_axis)
    over_tp, reason = _over_tp(name, parameter, told, cuts, config)
    num_parts = len(place.ranks([tensor_axis], bool(is_expert)))
    if over_tp == "unknown" and num_parts > 1 and tensor_axis not in sharded:
        raise UsageError(
            f"{name}: nothing says whether its gradients along {tensor_axis} are parts of one",
            tensor=name,
            rank=place.rank,
            got=f"the name of a norm of queries or keys, which often sees the heads of one rank alone, on {num_parts} "
            "ranks",
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
    is_reduced = over_tp in ("sum", "average") and tensor_axis not in sharded
    if is_reduced or over_tp == "own":
        reasons["tp"] = reason

    over_pp = told.over_pp
    if over_pp is not None:
        reasons["pp"] = f"it is marked over_pp={over_pp}"
    elif getattr(parameter, "pipeline_parallel", False):
        over_pp = True
        reasons["pp"] = "its attribute pipeline_parallel is True"
    tied = told.tied
    if tied is not None:
        reasons["tied"] = f'it is marked tied="{tied}"'
    elif getattr(parameter, "shared_embedding", False):
        tied = "word"
        reasons["tied"] = "its attribute shared_embedding is True"
    return ParameterRole(
        is_expert=bool(is_expert),
        over_tp=over_tp if is_reduced else None,  # type: ignore[arg-type]  # "own" and "unknown" are not reduced
        over_pp=bool(over_pp),
        tied=tied,
        stages=told.stages,
        sharded=sharded,
        reasons=reasons,
    )


_BY_NAME = "its name is that of a norm of queries or keys, and qk_layernorm is set"


def _over_tp(
    name: str, parameter: torch.Tensor, told: ParameterMark, cuts: ParameterCuts, config: GradientConfig
) -> tuple[OverTP | Literal["unknown"] | None, str]:
    """Return what gradients along tp are to each other, and what says so."""
    if told.over_tp is not None:
        return told.over_tp, f'it is marked over_tp="{told.over_tp}"'
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
