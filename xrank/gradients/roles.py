"""A rank's place in the mesh, and the role of a parameter there.

Roles come from a mark, from Megatron's attributes, from DTensor placements, or from the name. The first source that
gives an answer decides, in that order. Names decide last, and only by `QK_NAMES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from xrank.errors import UsageError
from xrank.gradients.config import GradientConfig
from xrank.gradients.faults import At
from xrank.layout import DeviceMesh, MeshViews
from xrank.layout.terms.tensors import describe_mesh

if TYPE_CHECKING:
    import torch


_HYBRID_AXES = ("dp_replicate", "dp_shard")
"""The two axes that hybrid-sharded data parallelism has instead of dp, as torchtitan and accelerate name them."""
DENSE_DATA_AXES = ("dp", *_HYBRID_AXES, "cp", "edp", "ep")
"""Axes along which ranks hold the same dense weights and read different data. A mesh may have ep next to dp, or edp and
ep instead of dp; dense weights then have replicas along these too."""
EXPERT_DATA_AXES = ("dp", *_HYBRID_AXES, "edp", "cp")
"""The same axes for experts, in the mesh that has ep."""

AXIS_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("data", "data_parallel", "ddp", "batch"), "dp"),
    **dict.fromkeys(("replicate", "replica"), "dp_replicate"),
    **dict.fromkeys(("shard", "fsdp", "dp_sharded"), "dp_shard"),
    **dict.fromkeys(("context", "context_parallel", "sp", "sequence_parallel"), "cp"),
    **dict.fromkeys(("tensor", "tensor_parallel", "model", "mp"), "tp"),
    **dict.fromkeys(("pipe", "pipeline", "pipeline_parallel", "stage"), "pp"),
    **dict.fromkeys(("expert", "expert_parallel"), "ep"),
    "efsdp": "edp",
}
"""Names of axes in frameworks' own meshes -> the name here: DeepSpeed, Lightning, torchtitan, Keras, torch's guides.
Ranks along sequence_parallel (Ulysses) hold copies of the weights, as along cp."""

_DENSE_AXES = {"pp", "tp", *DENSE_DATA_AXES}
_EXPERT_AXES = {"pp", "ep", "etp", "tp", *EXPERT_DATA_AXES}
_SEE_VIEWS = "see xrank.layout.mesh.megatron_views for Megatron's meshes"
_UNNAMED = ("a0",)
"""Names that `describe_mesh` gives a torch mesh of one axis without a name, such as FSDP2's own."""


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """The place of a rank in the meshes of dense weights and of experts."""

    views: MeshViews
    rank: int
    _found: dict[tuple[bool, tuple[str, ...]], tuple[int, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        _check_axes(self.dense, _DENSE_AXES)
        if self.expert is not None:
            _check_axes(self.expert, _EXPERT_AXES)
        self.dense.coordinate(self.rank)

    @property
    def dense(self) -> DeviceMesh:
        """The mesh of dense weights."""
        return self.views.main

    @property
    def expert(self) -> DeviceMesh | None:
        """The mesh of experts: the view with ep, edp or etp; None if no mesh has one of them."""
        meshes = [mesh for _, mesh in self.views.others] + [self.views.main]
        return next((mesh for mesh in meshes if {"ep", "edp", "etp"} & set(mesh.axis_names)), None)

    def mesh(self, is_expert: bool) -> DeviceMesh:
        """Return the mesh of dense or expert weights. Experts without a view of their own use the dense mesh."""
        return (self.expert or self.dense) if is_expert else self.dense

    def data_axes(self, is_expert: bool) -> tuple[str, ...]:
        """Return the axes longer than 1 along which ranks hold the same weights and read different data, in order."""
        names = EXPERT_DATA_AXES if is_expert else DENSE_DATA_AXES
        mesh = self.mesh(is_expert)
        return tuple(axis for axis in mesh.axis_names if axis in names and mesh.axis_length(axis) > 1)

    def tensor_axis(self, is_expert: bool) -> str:
        """Return the axis that cuts weights: etp for experts if the mesh has it, else tp."""
        return "etp" if is_expert and "etp" in self.mesh(is_expert).axis_names else "tp"

    def stage(self) -> int:
        """Return the index of the rank along pp."""
        return self.dense.coordinate(self.rank).get("pp", 0)

    def ranks(self, axes: Iterable[str], is_expert: bool = False) -> tuple[int, ...]:
        """Return this rank and the ranks that differ from it along the axes, ascending; absent axes are ignored."""
        key = is_expert, tuple(axes)
        if key not in self._found:
            self._found[key] = tuple(sorted(ranks_along(self.mesh(is_expert), self.rank, axes)))
        return self._found[key]


def ranks_along(mesh: DeviceMesh, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
    """Return the group of `DeviceMesh.groups` that contains a rank, in the mesh's order, without making the others."""
    free = set(axes)
    places = mesh.coordinate(rank)
    # Row-major strides of the mesh: the position of a rank is the sum of its coordinates times these.
    strides = [*accumulate(reversed(mesh.shape[1:]), lambda stride, length: stride * length, initial=1)][::-1]
    first = sum(
        place * stride for (name, place), stride in zip(places.items(), strides, strict=True) if name not in free
    )
    # Start from the position with all free axes at 0, and expand one free axis after another, outermost first.
    positions = [first]
    for name, length, stride in zip(mesh.axis_names, mesh.shape, strides, strict=True):
        if name in free:
            positions = [position + step for position in positions for step in range(0, length * stride, stride)]
    return tuple(mesh.ranks[position] for position in positions)


@lru_cache(maxsize=16)
def check_shard_order(views: MeshViews) -> None:
    """Check that shards of replicas can be in the order of the mesh: process groups order their ranks ascending.

    Ranks along tp and pp, which reduce some shards later, own the same ones only if replicas ascend in the mesh too.
    """
    for mesh in (views.main, *(mesh for _, mesh in views.others)):
        if all(a < b for a, b in pairwise(mesh.ranks)):
            continue
        axes = [axis for axis in mesh.axis_names if axis in {*DENSE_DATA_AXES, *EXPERT_DATA_AXES}]
        for group in mesh.groups(*axes):
            if any(a > b for a, b in pairwise(group)):
                raise At().layout_error(
                    f"the ranks of the mesh {mesh.grid!r} descend along {', '.join(axes)}, but process groups must "
                    f"ascend",
                    "order the mesh so that ranks ascend along these axes, or set use_distributed_optimizer=False",
                    f"ranks {list(group)}",
                )


def as_mesh_views(mesh: Any, axes: Mapping[str, str] | None = None) -> MeshViews:
    """Return a mesh of xrank or torch, or both factorings, as `MeshViews` with the names of axes here."""
    if isinstance(mesh, MeshViews):
        views = mesh
    elif isinstance(mesh, DeviceMesh):
        views = MeshViews(mesh)
    elif hasattr(mesh, "mesh_dim_names"):
        views = MeshViews(describe_mesh(mesh))
    else:
        raise At().layout_error(
            f"the mesh is a {type(mesh).__name__}, not a DeviceMesh of xrank or torch, or MeshViews",
            _SEE_VIEWS,
        )
    aliases = {**AXIS_ALIASES, **(axes or {})}
    if views.main.axis_names == _UNNAMED:
        aliases.setdefault(_UNNAMED[0], "dp")
    return MeshViews(
        _rename_axes(views.main, aliases), tuple((name, _rename_axes(one, aliases)) for name, one in views.others)
    )


def _rename_axes(mesh: DeviceMesh, aliases: Mapping[str, str]) -> DeviceMesh:
    # A name that is known here keeps its meaning, unless the caller maps it.
    names = [aliases.get(name, name) for name in mesh.axis_names]
    if tuple(names) == mesh.axis_names:
        return mesh
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        both = [axis for axis, name in zip(mesh.axis_names, names, strict=True) if name == twice]
        raise At().layout_error(
            f"two axes of the mesh {mesh.grid!r} would be {twice!r}: {' and '.join(map(repr, both))}",
            f"map one of them to a different name, such as axes={{{both[1]!r}: 'dp_shard'}}",
        )
    return DeviceMesh(mesh.shape, names, mesh.ranks)


def _check_axes(mesh: DeviceMesh, known: set[str]) -> None:
    names = set(mesh.axis_names)
    for axis in mesh.axis_names:
        if axis not in known:
            raise At().layout_error(
                f"the mesh {mesh.grid!r} has the axis {axis!r}, but it is unknown how gradients are reduced along it",
                f"map it to its kind of parallelism: axes={{{axis!r}: 'dp'}}; dp is for replicas",
                want=f"axes among {', '.join(sorted(known))}",
            )
    for one, other in (("dp", "edp"), ("tp", "etp")):
        if {one, other} <= names:
            raise At().layout_error(
                f"the mesh {mesh.grid!r} has both {one!r} and {other!r}: two factorizations of the ranks need two "
                f"meshes",
                _SEE_VIEWS,
            )


def local_of(parameter: Any) -> Any:
    """Return this rank's part of a parameter: the local tensor of a DTensor, else the parameter itself."""
    # Not to_local(): it returns another object, whose .data can't be moved into a buffer for the parameter.
    return parameter._local_tensor if hasattr(parameter, "device_mesh") else parameter


def _find_axes(name: str, mesh: DeviceMesh, axis: str, place: MeshPlace) -> tuple[str, ...]:
    """Return the axes of the plan's mesh that have the ranks of an axis of a parameter's mesh.

    The ranks decide: torch's meshes have other names, none, or one name for several axes (``_flatten``). An axis that
    has a name of the plan must have its ranks too.
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
    # Axes of its placements: those along which ranks hold different parts, and those along which values and gradients
    # are partial sums. A plain tensor has none.
    sharded: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    along: tuple[tuple[str, ...], ...] = ()
    if hasattr(parameter, "device_mesh"):
        mesh = describe_mesh(parameter.device_mesh)
        along = tuple(_find_axes(name, mesh, axis, place) for axis in mesh.axis_names)
        for axis, placement, axes in zip(mesh.axis_names, parameter.placements, along, strict=True):  # type: ignore[attr-defined]
            if placement.is_partial():
                if any(one not in ("tp", "etp") for one in axes):
                    raise At(name, place.rank).layout_error(
                        f"its values are partial sums along {axis!r}, but parameters must be replicated or sharded",
                        f"use Replicate or Shard instead of {placement!r}",
                    )
                partial += axes
            elif not placement.is_replicate():
                sharded += axes
    # With placements along tp or etp, a plain copy there is certain.
    is_known = any(axis in ("tp", "etp") for axes in along for axis in axes)
    reasons: dict[Aspect, str] = {}

    is_expert = bool(marked.expert)
    if marked.expert is not None:
        reasons["expert"] = f"it is marked expert={is_expert}"
    elif not getattr(parameter, "allreduce", True):
        is_expert, reasons["expert"] = True, "its attribute allreduce is False, as Megatron marks experts"
    elif "ep" in sharded:
        is_expert, reasons["expert"] = True, "its placement splits it along ep"

    tensor_axis = place.tensor_axis(is_expert)
    # Megatron sets it on the parts of its column- and row-parallel layers.
    if getattr(parameter, "tensor_model_parallel", False) and tensor_axis not in sharded:
        sharded = (*sharded, tensor_axis)
    over_tp, reason = _resolve_over_tp(name, parameter, marked, partial, is_known, config)
    num_parts = len(place.ranks([tensor_axis], is_expert))
    if over_tp == "unknown" and num_parts > 1 and tensor_axis not in sharded:
        raise At(name, place.rank).usage_error(
            f"it is unknown whether its gradients along {tensor_axis} are parts: its name suggests that it normalizes "
            f"queries or keys",
            'set GradientConfig(qk_layernorm=True) if heads are sharded along it, else mark(parameter, over_tp="own")',
            f"{num_parts} ranks along {tensor_axis}",
        )
    if over_tp in ("sum", "average") and num_parts > 1 and tensor_axis in sharded and reason is not _BY_NAME:
        raise At(name, place.rank).usage_error(
            f"it is split along {tensor_axis}, and {reason}, so gradients of different elements would be added up",
            'correct the mark, or mark(parameter, over_tp="own")',
        )
    # A norm of queries or keys that is cut along tp holds its own part: its name alone asks for no sum.
    is_reduced = over_tp in ("sum", "average") and tensor_axis not in sharded
    if is_reduced or over_tp == "own":
        reasons["tp"] = reason

    over_pp, tied = marked.over_pp, marked.tied
    if over_pp is not None:
        reasons["pp"] = f"it is marked over_pp={over_pp}"
    elif getattr(parameter, "pipeline_parallel", False):
        over_pp, reasons["pp"] = True, "its attribute pipeline_parallel is True"
    if tied is not None:
        reasons["tied"] = f'it is marked tied="{tied}"'
    elif getattr(parameter, "shared_embedding", False):
        tied, reasons["tied"] = "word", "its attribute shared_embedding is True"
    return ParameterRole(
        is_expert=is_expert,
        over_tp=over_tp if is_reduced else None,  # type: ignore[arg-type]  # "own" and "unknown" are not reduced
        over_pp=bool(over_pp),
        tied=tied,
        stages=marked.stages,
        sharded=sharded,
        is_cut_over_tp=tensor_axis in sharded if tensor_axis in sharded or is_reduced or is_known else None,
        placement_axes=along,
        reasons=reasons,
    )


_BY_NAME = "its name is that of a norm of queries or keys, and qk_layernorm is set"


def _resolve_over_tp(
    name: str,
    parameter: torch.Tensor,
    marked: ParameterMark,
    partial: tuple[str, ...],
    is_known: bool,
    config: GradientConfig,
) -> tuple[OverTP | Literal["unknown"] | None, str]:
    """Return how gradients along tp combine, with the reason."""
    if marked.over_tp is not None:
        return marked.over_tp, f'it is marked over_tp="{marked.over_tp}"'
    if {"tp", "etp"} & set(partial):
        return "sum", "its placement is Partial along tp"
    # Averages first, as Megatron: megatron/core/distributed/finalize_model_grads.py.
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        return "average", "its attribute average_gradients_across_tp_domain is True"
    if getattr(parameter, "sequence_parallel", False) and config.sequence_parallel:
        return "sum", "its attribute sequence_parallel is True"
    if is_known:
        return None, ""
    is_named = any(part == known or part.endswith(f"_{known}") for part in name.split(".") for known in QK_NAMES)
    if is_named and config.qk_layernorm is not False:
        return ("sum", _BY_NAME) if config.qk_layernorm else ("unknown", "")
    return None, ""
