"""Tensor-parallel plans of Hugging Face models: a style for each module or parameter, such as ``"rowwise"``.

A style says how the parameters are cut and what the module's forward does; a layout says the first alone. Read from
transformers 5.23: distributed/tensor_parallel.py and distributed/expert_parallel.py register the styles and say how
each cuts (``shard_param``), distributed/parallel_utils.py says which rule is a parameter's (``_get_parameter_plan``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from xrank.dialects.cuts import cuts_of
from xrank.errors import LayoutError
from xrank.layout.layout_map import LayoutMap
from xrank.layout.mesh import DeviceMesh
from xrank.layout.tensor_layout import TensorLayout, free_size_names

__all__ = ["STYLES", "from_tp_plan", "to_tp_plan"]


@dataclass(frozen=True, slots=True)
class Cut:
    """The one dim of a parameter that a style cuts, by ceil chunks."""

    dim: int
    is_packed: bool = False
    """Each half of the dim is cut by itself, and a rank holds its part of both."""


Style: TypeAlias = Callable[[str, int], Cut | None]
"""A parameter's own name and its number of dims -> how it is cut; None for a whole one."""


def _columns(parameter: str, ndim: int) -> Cut | None:
    """Cut the dim before the last: `Shard(meta.ndim - 2)`, which is -1 and so the only dim of a bias."""
    return Cut(max(ndim - 2, 0))


def _rows(parameter: str, ndim: int) -> Cut | None:
    """Cut the last dim; what is called bias is added after the sum over ranks, and whole."""
    return None if parameter == "bias" else Cut(ndim - 1)


def _packed_columns(parameter: str, ndim: int) -> Cut | None:
    """Cut the halves of the dim before the last; a bias is cut as if it had no halves (`Shard`, not strided)."""
    return Cut(0) if ndim == 1 else Cut(ndim - 2, is_packed=True)


def _packed_rows(parameter: str, ndim: int) -> Cut | None:
    return None if ndim == 1 else Cut(ndim - 1, is_packed=True)


def _dim_0(parameter: str, ndim: int) -> Cut | None:
    return Cut(0)


def _dim_1(parameter: str, ndim: int) -> Cut | None:
    return Cut(1)


def _whole(parameter: str, ndim: int) -> Cut | None:
    return None


STYLES: Mapping[str, Style] = {
    "colwise": _columns,
    "colwise_gather_output": _columns,
    "colwise_rep": _columns,
    "rowwise": _rows,
    "rowwise_rep": _rows,
    "rowwise_split_input": _rows,
    "packed_colwise": _packed_columns,
    "packed_rowwise": _packed_rows,
    "embedding_rowwise": _dim_0,
    "embedding_colwise": _dim_1,
    "grouped_gemm": _dim_0,
    "all_reduce": _whole,
    "ep_dispatch_experts": _whole,
    "local_params": _whole,
    "mla_kv_a_proj": _whole,
    "moe_identity_expert": _whole,
    "moe_tp_experts": _whole,
    "replicate": _whole,
    "replicated_with_grad_allreduce": _whole,
    "sequence_parallel": _whole,
}
"""The styles of transformers 5.23 that are known. What is not here may cut in any way, and is refused."""

_SAYABLE = ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "grouped_gemm")
"""The styles that `to_tp_plan` chooses from, the first that fits; the others cut as one of these, or nothing."""


def from_tp_plan(
    plan: Mapping[str, str],
    mesh: DeviceMesh,
    shapes: Mapping[str, Sequence[int]],
    *,
    axis: str = "tp",
    strict: bool = True,
) -> LayoutMap:
    """Return the layouts of a model's parameters under a plan.

    A rule is a parameter's if it is its name, or else its module's, with ``*`` for the numbers of layers; parameters
    without a rule are whole on every rank, as transformers leaves them. The map has one key for all layers alike.

    Args:
        plan: ``model.tp_plan``, or ``model.ep_plan`` with the axis of the experts; its names must be the model's own
            (a base model's plan lacks the prefix that the whole model's names have).
        mesh: the mesh of the ranks.
        shapes: every parameter's name and global shape.
        axis: the axis that cuts.
        strict: refuse rules that no parameter has. transformers warns of them only.

    Raises:
        LayoutError: a style that is not known, a rule of no parameter, halves of an odd size, a parameter with fewer
            dims than its style cuts, an axis that the mesh has not.
    """
    mesh.axis_length(axis)  # refuses an unknown axis also where nothing is cut
    for rule, style in plan.items():
        if style not in STYLES:
            raise LayoutError(
                f"the style {style!r} of {rule!r} is not known, so how it cuts is not either",
                tensor=rule,
                got=repr(style),
                want=f"one of {sorted(STYLES)}",
            )
    used = {rule for name in shapes for rule in plan if f"{_generic(name)}.".startswith(f"{rule}.")}
    unused = [rule for rule in plan if rule not in used]
    if unused and strict:
        raise LayoutError(
            f"{len(unused)} of {len(plan)} rules of the plan match no parameter, {unused[0]!r} first",
            tensor=unused[0],
            got=str(unused[:8]),
            want=f"names as those of the parameters, such as {next(map(_generic, shapes), None)!r}",
            next_step="correct the names' prefix, or give strict=False to pass such rules over",
        )
    layouts: dict[str, dict[str, TensorLayout]] = {}
    for name, shape in shapes.items():
        module, _, parameter = _generic(name).rpartition(".")
        style = plan.get(_generic(name), plan.get(module, "replicate") if module else "replicate")
        cut = STYLES[style](parameter, len(shape))
        layouts.setdefault(_generic(name), {})[name] = _layout(cut, tuple(shape), mesh, axis, f"{name}, {style}")
    result = LayoutMap(mesh)
    for generic, of_layers in layouts.items():
        # Layers whose parameter has the same dims share one key; others are named one by one.
        if len(set(of_layers.values())) == 1:
            result[_pattern(generic)] = next(iter(of_layers.values()))
        else:
            for name, layout in of_layers.items():
                result[name] = layout
    return result


def to_tp_plan(layouts: LayoutMap, shapes: Mapping[str, Sequence[int]], *, axis: str = "tp") -> dict[str, str]:
    """Return a plan under which transformers cuts the parameters as the layouts say.

    Several styles cut alike and differ in what the module's forward does, which no layout says: the plan has the plain
    ones (``colwise``, ``rowwise``, ``packed_colwise``, ``packed_rowwise``, ``grouped_gemm``), whoever runs the model
    changes those of modules that gather their output or are embeddings. Whole parameters have no rule.

    Args:
        layouts: a layout for every parameter.
        shapes: every parameter's name and global shape.
        axis: the axis that the plan is for.

    Raises:
        LayoutError: a parameter without a layout, cut by another axis, in two dims, in one that no style cuts, or
            otherwise than in other layers.
    """
    modules: dict[str, dict[str, tuple[int, Cut | None]]] = {}
    for name, shape in shapes.items():
        layout = layouts[name]
        if layout is None:
            raise LayoutError(f"{name} has no layout", tensor=name, want="a rule of the LayoutMap for it")
        said = (len(shape), _cut_of(layout, len(shape), axis, name))
        module, _, parameter = _generic(name).rpartition(".")
        known = modules.setdefault(module, {}).setdefault(parameter, said)
        if known != said:
            raise LayoutError(
                f"{name} is cut otherwise than in the layers before, and a plan has one rule for all layers",
                tensor=name,
                got=str(layout),
                want="the same dims and cuts in every layer",
            )
    plan: dict[str, str] = {}
    for module, parameters in modules.items():
        if all(cut is None for _, cut in parameters.values()):
            continue
        # A rule of a module is one for its forward too, which modules with other parameters do not have.
        style = _style_of(parameters) if module and parameters.keys() <= {"weight", "bias"} else None
        if style is not None:
            plan[module] = style
            continue
        for parameter, said in parameters.items():
            if said[1] is None:
                continue
            own = _style_of({parameter: said})
            name = f"{module}.{parameter}" if module else parameter
            if own is None:
                raise LayoutError(
                    f"no style of a plan cuts {name} so",
                    tensor=name,
                    got=f"dim {said[1].dim} of {said[0]}" + (", packed" if said[1].is_packed else ""),
                    want="a cut of the last dim, the one before, or the first",
                )
            plan[name] = own
    return plan


def _generic(name: str) -> str:
    """Return a name with ``*`` for the numbers between dots (parallel_utils.py:replace_layer_number_by_wildcard).

    As there, of two numbers that follow each other only the first one is replaced.
    """
    return re.sub(r"\.\d+(?P<end>\.|$)", r".*\g<end>", name)


def _pattern(generic: str) -> str:
    """Return the LayoutMap's key for a name with wildcards; the name itself where it has none."""
    if "*" not in generic:
        return generic
    return r"\.".join(r"\d+" if word == "*" else re.escape(word) for word in generic.split("."))


def _layout(cut: Cut | None, shape: tuple[int, ...], mesh: DeviceMesh, axis: str, who: str) -> TensorLayout:
    names = free_size_names(len(shape), mesh.axis_names)
    if cut is not None and not 0 <= cut.dim < len(shape):
        raise LayoutError(f"{who}: the style cuts a dim that the parameter has not", got=f"shape {shape}")
    dims = list(names)
    if cut is not None and not cut.is_packed:
        dims[cut.dim] = f"{names[cut.dim]}/~{axis}"
    elif cut is not None:
        if shape[cut.dim] % 2:
            raise LayoutError(
                f"{who}: dim {cut.dim} has no two equal halves", got=f"shape {shape}", want="an even size of that dim"
            )
        half = f"{names[cut.dim]}/~{axis}"
        dims[cut.dim] = f"<gate: {half} | up: {half}>"
    return TensorLayout.parse("[" + ", ".join(dims) + "]", mesh)


def _cut_of(layout: TensorLayout, ndim: int, axis: str, name: str) -> Cut | None:
    cut: Cut | None = None
    if len(layout.dims) != ndim:
        raise LayoutError(f"{name}: the layout {layout} is not one of {ndim} dims", tensor=name)
    for dim, cuts in enumerate(cuts_of(layout, "tensor-parallel plans", packed=True)):
        if not cuts.axes:
            continue
        if cuts.axes != (axis,):
            raise LayoutError(
                f"{name}: dim {dim} of the layout {layout} is cut by more than {axis!r}, the axis of the plan",
                tensor=name,
                got=str(list(cuts.axes)),
                want=f"{axis!r} alone",
            )
        if cuts.pieces > 2:
            raise LayoutError(
                f"{name}: dim {dim} of the layout {layout} has {cuts.pieces} pieces, and styles pack two",
                tensor=name,
                got=f"{cuts.pieces} pieces",
                want="halves",
            )
        cut = Cut(dim, is_packed=cuts.pieces == 2)
    return cut


def _style_of(parameters: Mapping[str, tuple[int, Cut | None]]) -> str | None:
    for style in _SAYABLE:
        if all(STYLES[style](parameter, ndim) == cut for parameter, (ndim, cut) in parameters.items()):
            return style
    return None
