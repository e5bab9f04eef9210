"""Tensor-parallel plans of Hugging Face models: a style for each module or parameter, such as ``"rowwise"``.

A style defines how the parameters are cut and what the module's forward does; a layout has only the cuts. Sources in
transformers 5.23: distributed/tensor_parallel.py and distributed/expert_parallel.py register the styles and their cuts
(``shard_param``), distributed/parallel_utils.py chooses the rule of a parameter (``_get_parameter_plan``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from xrank.errors import LayoutError
from xrank.layout.layout_map import LayoutMap
from xrank.layout.mesh import DeviceMesh
from xrank.layout.tensor_layout import TensorLayout, free_size_names
from xrank.layout.terms.tensors import cuts_of


class Cut(Struct, frozen=True):
    """The dim of a parameter that a style cuts into ceil chunks."""

    dim: int
    is_packed: bool = False
    """Whether each half of the dim is cut by itself, so that a rank holds its part of both."""


Style: TypeAlias = Callable[[str, int], Cut | None]
"""(A parameter's own name, its number of dims) -> its cut; None if it stays whole."""


_KEPT_WHOLE = (
    *("all_reduce", "ep_dispatch_experts", "local_params", "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts"),
    *("replicate", "replicated_with_grad_allreduce", "sequence_parallel"),
)
STYLES: Mapping[str, Style] = {
    # The dim before the last: `Shard(meta.ndim - 2)`, which is -1, the only dim, for a bias.
    **dict.fromkeys(("colwise", "colwise_gather_output", "colwise_rep"), lambda name, ndim: Cut(max(ndim - 2, 0))),
    # The last dim; a bias stays whole, because it is added after the sum over ranks.
    **dict.fromkeys(
        ("rowwise", "rowwise_rep", "rowwise_split_input"),
        lambda name, ndim: None if name == "bias" else Cut(ndim - 1),
    ),
    # Both halves of the dim before the last; a bias is cut without halves (`Shard`, not strided).
    "packed_colwise": lambda name, ndim: Cut(0) if ndim == 1 else Cut(ndim - 2, is_packed=True),
    "packed_rowwise": lambda name, ndim: None if ndim == 1 else Cut(ndim - 1, is_packed=True),
    "embedding_rowwise": lambda name, ndim: Cut(0),
    "embedding_colwise": lambda name, ndim: Cut(1),
    "grouped_gemm": lambda name, ndim: Cut(0),
    **dict.fromkeys(_KEPT_WHOLE, lambda name, ndim: None),
}
"""The styles of transformers 5.23. Other styles may cut in any way, so they are refused."""

_CHOICES = ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "grouped_gemm")
"""The styles that `to_tp_plan` uses, the first that fits; every other style cuts like one of these, or not at all."""


def from_tp_plan(
    plan: Mapping[str, str],
    mesh: DeviceMesh,
    shapes: Mapping[str, Sequence[int]],
    *,
    axis: str = "tp",
    strict: bool = True,
) -> LayoutMap:
    """Return the layouts of a model's parameters under a plan.

    The rule of a parameter has its name, or else its module's, with ``*`` for the numbers of layers. Parameters without
    a rule are whole on every rank, as in transformers. The map has one key for all equal layers.

    Args:
        plan: ``model.tp_plan``, or ``model.ep_plan`` with the axis of the experts. Its names must be those of the whole
            model; the plan of a base model lacks their prefix.
        mesh: the mesh of the ranks.
        shapes: every parameter's name and global shape.
        axis: the axis that cuts.
        strict: whether to refuse rules that match no parameter; transformers only warns.

    Raises:
        LayoutError: an unknown style, a rule that matches no parameter, halves of an odd size, a parameter with fewer
            dims than its style needs, an axis that the mesh lacks.

    Example:
        >>> mesh = DeviceMesh((2,), ("tp",))
        >>> layouts = from_tp_plan({"layers.*.up": "colwise"}, mesh, {"layers.0.up.weight": (4, 3), "norm": (3,)})
        >>> str(layouts["layers.0.up.weight"]), str(layouts["norm"])
        ('[d0/~tp, d1]', '[d0]')
    """
    mesh.axis_length(axis)  # refuses an unknown axis also where nothing is cut
    for rule, style in plan.items():
        if style not in STYLES:
            what = f"the style {style!r} of {rule!r} is unknown, so its layout is unknown"
            raise LayoutError(what, tensor=rule, got=repr(style), want=f"one of {sorted(STYLES)}")
    used = {rule for name in shapes for rule in plan if f"{_generic(name)}.".startswith(f"{rule}.")}
    unused = [rule for rule in plan if rule not in used]
    if unused and strict:
        what = f"{len(unused)} of {len(plan)} rules of the plan match no parameter, {unused[0]!r} first"
        want = f"names as those of the parameters, such as {next(map(_generic, shapes), None)!r}"
        next_step = "correct the prefix of the names, or give strict=False to ignore such rules"
        raise LayoutError(what, tensor=unused[0], got=str(unused[:8]), want=want, next_step=next_step)
    layouts: dict[str, dict[str, TensorLayout]] = {}
    for name, shape in shapes.items():
        module, _, parameter = _generic(name).rpartition(".")
        style = plan.get(_generic(name), plan.get(module, "replicate") if module else "replicate")
        cut = STYLES[style](parameter, len(shape))
        layouts.setdefault(_generic(name), {})[name] = _layout(cut, tuple(shape), mesh, axis, name, style)
    result = LayoutMap(mesh)
    for generic, of_layers in layouts.items():
        # Layers whose parameter has equal layouts share one key; otherwise each name is a key.
        if len(set(of_layers.values())) == 1:
            words = (r"\d+" if word == "*" else re.escape(word) for word in generic.split("."))
            result[r"\.".join(words) if "*" in generic else generic] = next(iter(of_layers.values()))
        else:
            for name, layout in of_layers.items():
                result[name] = layout
    return result


def to_tp_plan(layouts: LayoutMap, shapes: Mapping[str, Sequence[int]], *, axis: str = "tp") -> dict[str, str]:
    """Return a plan under which transformers cuts the parameters by these layouts.

    Several styles have the same cut and differ in the module's forward, which layouts do not describe. The plan has the
    plain styles (``colwise``, ``rowwise``, ``packed_colwise``, ``packed_rowwise``, ``grouped_gemm``); to run the model,
    change the styles of embeddings and of modules that gather their output. Whole parameters have no rule.

    Args:
        layouts: a layout for every parameter.
        shapes: every parameter's name and global shape.
        axis: the axis of the plan.

    Raises:
        LayoutError: a parameter has no layout, or is cut by another axis, in two dims, in a dim that no style cuts, or
            differently in some layers.

    Example:
        >>> layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
        >>> layouts["up.weight"] = TensorLayout.parse("[f/~tp, h]")
        >>> to_tp_plan(layouts, {"up.weight": (4, 3)})
        {'up': 'colwise'}
    """
    modules: dict[str, dict[str, tuple[int, Cut | None]]] = {}
    for name, shape in shapes.items():
        layout = layouts[name]
        if layout is None:
            raise LayoutError(f"{name} has no layout", tensor=name, want="a rule of the LayoutMap for it")
        cut = (len(shape), _cut_of(layout, len(shape), axis, name))
        module, _, parameter = _generic(name).rpartition(".")
        known = modules.setdefault(module, {}).setdefault(parameter, cut)
        if known != cut:
            what = f"{name} is cut differently than in earlier layers, and a plan has one rule for all layers"
            raise LayoutError(what, tensor=name, got=str(layout), want="the same dims and cuts in every layer")
    plan: dict[str, str] = {}
    for module, parameters in modules.items():
        if all(cut is None for _, cut in parameters.values()):
            continue
        # The rule of a module also changes its forward, so it is only for modules with no other parameters.
        style = _style_of(parameters) if module and parameters.keys() <= {"weight", "bias"} else None
        if style is not None:
            plan[module] = style
            continue
        for parameter, (ndim, cut_dim) in parameters.items():
            if cut_dim is None:
                continue
            own = _style_of({parameter: (ndim, cut_dim)})
            name = f"{module}.{parameter}" if module else parameter
            if own is None:
                got = f"dim {cut_dim.dim} of {ndim}" + (", packed" if cut_dim.is_packed else "")
                want = "a cut of the last dim, the one before, or the first"
                raise LayoutError(f"no style of a plan cuts {name} this way", tensor=name, got=got, want=want)
            plan[name] = own
    return plan


def _generic(name: str) -> str:
    """Return a name with ``*`` for the numbers between dots (parallel_utils.py:replace_layer_number_by_wildcard).

    As there, only the first of two adjacent numbers is replaced.
    """
    return re.sub(r"\.\d+(?P<end>\.|$)", r".*\g<end>", name)


def _layout(cut: Cut | None, shape: tuple[int, ...], mesh: DeviceMesh, axis: str, *rule: str) -> TensorLayout:
    dims = list(free_size_names(len(shape), mesh.axis_names))
    if cut is not None:
        if not 0 <= cut.dim < len(shape):
            raise LayoutError(f"{', '.join(rule)}: the style cuts a dim that the parameter lacks", got=f"shape {shape}")
        if cut.is_packed and shape[cut.dim] % 2:
            what = f"{', '.join(rule)}: dim {cut.dim} does not have two equal halves"
            raise LayoutError(what, got=f"shape {shape}", want="an even size of that dim")
        piece = f"{dims[cut.dim]}/~{axis}"
        dims[cut.dim] = f"<gate: {piece} | up: {piece}>" if cut.is_packed else piece
    return TensorLayout.parse("[" + ", ".join(dims) + "]", mesh)


def _cut_of(layout: TensorLayout, ndim: int, axis: str, name: str) -> Cut | None:
    cut: Cut | None = None
    if len(layout.dims) != ndim:
        raise LayoutError(f"{name}: the layout {layout} does not have {ndim} dims", tensor=name)
    for dim, cuts in enumerate(cuts_of(layout, "tensor-parallel plans", packed=True)):
        if not cuts.axes:
            continue
        if cuts.axes != (axis,):
            what = f"{name}: dim {dim} of the layout {layout} is cut by more than {axis!r}, the axis of the plan"
            raise LayoutError(what, tensor=name, got=str(list(cuts.axes)), want=f"{axis!r} alone")
        if cuts.pieces > 2:
            what = f"{name}: dim {dim} of the layout {layout} has {cuts.pieces} pieces, and styles pack two"
            raise LayoutError(what, tensor=name, got=f"{cuts.pieces} pieces", want="halves")
        cut = Cut(dim, is_packed=cuts.pieces == 2)
    return cut


def _style_of(parameters: Mapping[str, tuple[int, Cut | None]]) -> str | None:
    for style in _CHOICES:
        if all(STYLES[style](parameter, ndim) == cut for parameter, (ndim, cut) in parameters.items()):
            return style
    return None
