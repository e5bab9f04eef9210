"""Collects each tensor's parts from the files of a legacy Megatron checkpoint, and places them in the whole.

Files count layers within their stage, and experts within their rank. Names alone determine how tensors are cut: by
Megatron's own table, or by the caller's layout file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from xrank.dialects.megatron.layouts import (
    LAYER,
    count_experts,
    expert_in,
    is_kept_whole,
    layout_of,
    layout_of_down_projection,
    layout_of_packed,
    projections,
    shape_of_grouped,
    stack_of,
    whole_name,
)
from xrank.errors import ContradictionError, LayoutError, XrankError, option
from xrank.formats.regular_file import quote
from xrank.formats.torch_archive import ArchivedTensor
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.local_part import infer_shape, local_part
from xrank.plan.source import StoredShard
from xrank.readers.base import Hints
from xrank.readers.held_tensor import HeldTensor, pieces_of
from xrank.readers.megatron.args import ParallelSizes
from xrank.readers.megatron.grid import Place
from xrank.readers.megatron.stages import Chunk
from xrank.readers.megatron.states import MegatronRankFile
from xrank.readers.records import Records
from xrank.words import likewise_text

_GATED = ("swiglu", "geglu", "quick_geglu", "gated_linear_unit")
# Rows of gate and up alternate (megatron/training/arguments.py); the table does not describe this layout.
_INTERLEAVED = "moe_mlp_glu_interleave_size"


@dataclass(slots=True)
class TensorParts:
    """The parts of one tensor in the files."""

    name: str
    has_expert: bool
    """Whether it belongs to one expert."""
    held: list[HeldTensor] = field(default_factory=list)
    tensors: list[ArchivedTensor] = field(default_factory=list)
    """The same parts as in their files."""
    places: list[Place] = field(default_factory=list)
    """Places of the files."""


def collect_parts(
    files: Mapping[Place, MegatronRankFile], sizes: ParallelSizes, starts: Mapping[Chunk, int], records: Records
) -> dict[str, TensorParts]:
    """Return each tensor's parts, by its name in the whole model, in the model's order."""
    found: dict[tuple[int, int], dict[str, TensorParts]] = {chunk: {} for chunk in sorted(starts)}
    by_name: dict[str, TensorParts] = {}
    for place, file in files.items():
        index = records.add_archive(file.archive)
        for number, chunk in enumerate(file.chunks):
            key = (number, place.pipeline)
            num_experts = _num_experts(chunk, file, sizes)
            for local_name, tensor in chunk.items():
                layer, expert = whole_name(local_name, starts[key], num_experts * place.expert)
                parts = by_name.get(layer)
                if parts is None:
                    parts = by_name[layer] = found[key][layer] = TensorParts(layer, expert)
                parts.held.append(_part_of(local_name, file, tensor, index(tensor.key), sizes))
                parts.tensors.append(tensor)
                parts.places.append(place)
    # Virtual chunks alternate over stages: chunk 0 of all stages, then chunk 1.
    whole = [item for chunk in found.values() for item in chunk.items()]
    return dict(sorted(whole, key=_model_order))


def _model_order(item: tuple[str, TensorParts]) -> tuple[int, int]:
    """Sort the embedding first, then layers by number, then the rest; names of one layer keep the files' order."""
    found = LAYER.fullmatch(item[0])
    return (1, int(found[1])) if found else (0 if item[0].startswith("embedding.") else 2, 0)


def _num_experts(chunk: Mapping[str, ArchivedTensor], file: MegatronRankFile, sizes: ParallelSizes) -> int:
    """Return the number of experts that a rank holds in each layer of a chunk, checked against the arguments."""
    for name in chunk:
        try:
            expert_in(name)
        except ValueError:
            raise LayoutError(
                f"{quote(name)[1:-1]}: it is unknown how Megatron cuts a tensor of this name",
                tensor=name,
                rank=file.origin.rank,
                file=file.origin.path,
                got="experts without a number in their name",
                want="an expert's number in the name, or all experts of a layer as GroupedMLP has them",
                next_step="save with --ckpt-format torch_dist, which records it",
            ) from None
    try:
        held = count_experts(chunk)
    except ValueError as error:
        raise file.origin.corrupt("has gaps in its experts, or layers with other experts", got=str(error)) from None
    total = file.args.get("num_experts")
    if held and type(total) is int and held * sizes.expert != total:
        # Old releases with Megatron's --moe-extended-tp put a part of every expert on every rank.
        raise ContradictionError(
            file.origin.locate("does not hold its share of the experts in its args"),
            rank=file.origin.rank,
            file=file.origin.path,
            got=f"{held} experts in a layer, on each of {sizes.expert} expert ranks",
            want=f"{total} in all, as in args.num_experts",
            next_step="check that the files come from one run; if experts are cut in another way, save as torch_dist",
        )
    return held


def _part_of(
    name: str, file: MegatronRankFile, tensor: ArchivedTensor, record: int, sizes: ParallelSizes
) -> HeldTensor:
    assert file.origin.rank is not None
    shape, strides = tensor.shape, tensor.strides
    number = file.args.get("num_experts")
    try:
        grouped = shape_of_grouped(name, shape, number // sizes.expert if type(number) is int else 0)
    except ValueError as error:
        raise file.origin.corrupt(f"{name} does not fit the experts in args", got=str(error)) from None
    if grouped is not None:
        if strides != (shape[1], 1):
            raise file.origin.corrupt(f"{name} is not a plain matrix", got=f"strides {list(strides)}")
        shape, strides = grouped, (grouped[1] * grouped[2], grouped[2], 1)
    held = HeldTensor.from_archive(tensor, rank=file.origin.rank, file=file.origin.path, record=record)
    return replace(held, shape=shape, strides=strides)


def find_gating(tensors: Mapping[str, TensorParts], first: MegatronRankFile) -> dict[str, bool]:
    """Return stack of layers -> whether its linear_fc1 is gate and up, by the arguments and the shapes.

    The arguments are those of the language model; shapes alone decide about a vision tower.

    Raises:
        ContradictionError: they disagree.
    """
    if first.args.get(_INTERLEAVED):
        raise first.origin.usage(
            "its experts have alternating gate and up rows, which are not supported",
            got=f"args.{_INTERLEAVED} {first.args[_INTERLEAVED]}",
            want="halves",
            next_step="save with --ckpt-format torch_dist",
        )
    recorded = [first.args[key] for key in _GATED if isinstance(first.args.get(key), bool)]
    found: dict[str, bool] = {}
    for name, rows, columns in projections({name: parts.held[0].shape for name, parts in tensors.items()}):
        # Without an argument the first projection of a stack decides, and all others must agree with it.
        is_recorded = bool(recorded) and "vision" not in stack_of(name)
        is_gated = found.setdefault(stack_of(name), any(recorded) if is_recorded else rows == 2 * columns)
        if rows != columns * (2 if is_gated else 1):
            held = tensors[name].held[0]
            raise held.contradiction(
                name,
                f"its shape is not that of {'gate and up halves' if is_gated else 'one projection'}, by args",
                got=f"{rows} rows, for {columns} columns of linear_fc2",
                want=f"{columns * (2 if is_gated else 1)} rows",
                next_step="check that args.swiglu is that of the run",
            )
    return {stack_of(name): any(recorded) for name in tensors} | found


def layouts_of(
    tensors: Mapping[str, TensorParts],
    sizes: ParallelSizes,
    hints: Hints,
    args: Mapping[str, Any],
    gating: Mapping[str, bool],
) -> dict[str, TensorLayout]:
    """Return how each tensor is cut: by the caller's layout file, else by Megatron's own table, or the arguments.

    Raises:
        LayoutError: none of them knows a name; the error lists all such names.
    """
    found, unknown = {}, []
    shapes = {name: parts.held[0].shape for name, parts in tensors.items()}
    for name, parts in tensors.items():
        layout = _find_given(name, hints) or layout_of(name, is_gated=gating[stack_of(name)])
        if layout is None:
            layout = layout_of_packed(name, shapes, sizes.tensor)
        if layout is None and parts.held[0].shape:
            layout = layout_of_down_projection(name, parts.held[0].shape[0], args, sizes.tensor)
        if layout is None and (is_kept_whole(name) or (sizes.tensor == 1 and not parts.has_expert)):
            # The tensor is whole on every rank, and its copies are compared.
            layout = _whole(len(parts.held[0].shape))
        if layout is None:
            unknown.append(name)
        else:
            found[name] = layout
    if unknown:
        held = tensors[unknown[0]].held[0]
        more = likewise_text([quote(name)[1:-1] for name in unknown[1:]])
        raise LayoutError(
            f"{quote(unknown[0])[1:-1]}: it is unknown how Megatron cuts a tensor of this name{more}",
            tensor=unknown[0],
            rank=held.rank,
            file=held.file,
            got=f"a part of shape {list(held.shape)}",
            want=f"a name in xrank's table, or a rule of {option('layouts')} on the axes tp and etp",
            next_step=f"give {option('layouts', metavar='FILE')} with its layout, or save with "
            "--ckpt-format torch_dist",
        )
    return found


def _find_given(name: str, hints: Hints) -> TensorLayout | None:
    if hints.layouts is None:
        return None
    layout = hints.layouts[name]
    return None if layout is None else TensorLayout.from_tree(layout.with_sizes(hints.layouts.sizes).tree)


@lru_cache(maxsize=16)
def _whole(num_dims: int) -> TensorLayout:
    return TensorLayout.parse("[" + ", ".join(f"d{i}" for i in range(num_dims)) + "]")


def find_own_tensors(
    tensors: Mapping[str, TensorParts], layouts: Mapping[str, TensorLayout]
) -> dict[Place, list[ArchivedTensor]]:
    """Return for each file the tensors of which no other file has the same part."""
    found: dict[Place, list[ArchivedTensor]] = {}
    for name, parts in tensors.items():
        is_cut = any(layouts[name].cut_axes)
        by_expert = any("ep" in axes for axes in layouts[name].cut_axes)
        keys = [(p.tensor if is_cut else 0, p.expert if by_expert else 0) for p in parts.places]
        counts = Counter(keys)
        for place, key, tensor in zip(parts.places, keys, parts.tensors, strict=True):
            if counts[key] == 1:
                found.setdefault(place, []).append(tensor)
    return found


def place_parts(parts: TensorParts, layout: TensorLayout, sizes: ParallelSizes, hints: Hints) -> StoredShard:
    """Return where a tensor's parts lie in the whole; copies of one part become replicas.

    Raises:
        ContradictionError: parts do not fit together.
        LayoutError: the layout does not fit them.
    """
    first = parts.held[0]
    for held in parts.held:
        if held.dtype != first.dtype:
            raise held.contradiction(
                parts.name,
                f"ranks {first.rank} and {held.rank} disagree about its dtype",
                got=held.dtype,
                want=first.dtype,
                next_step="all files must come from one save of one run; copy them again",
            )
    # Experts are cut by `etp`, whose ranks repeat along tp; other tensors by `tp`.
    lengths = {"tp": sizes.tensor, "ep": sizes.expert, "etp": sizes.expert_tensor}
    # A tensor that no axis cuts still needs a mesh: it is whole on each rank of tp.
    axes = tuple(axis for axis in lengths if any(axis in used for used in layout.cut_axes)) or ("tp",)
    mesh = _mesh(axes, tuple(lengths[axis] for axis in axes))
    try:
        places = [_coordinate(place, sizes, axes) for place in parts.places]
        # One part per place determines the shape; the others are copies and must have the same shape.
        shapes = {mesh.rank_at(at): held.shape for at, held in zip(places, parts.held, strict=True)}
        shape = infer_shape(layout, mesh, shapes)
        nests = []
        for at, held in zip(places, parts.held, strict=True):
            part = local_part(layout, mesh, at, shape)
            if part is None or part.sums or part.shape != held.shape:
                raise held.contradiction(
                    parts.name,
                    f"the part in {held.file} has another shape than its layout gives it",
                    got=str(list(held.shape)),
                    want=f"{None if part is None else list(part.shape)}, by {layout} of {list(shape)}",
                    next_step="all files must come from one save of one run; copy them again",
                )
            nests.append(part.nests)
    except LayoutError as error:
        raise _to_error(error, parts, is_given=_find_given(parts.name, hints) is not None) from None
    return pieces_of(parts.name, parts.held, shape, nests)


def _to_error(error: LayoutError, parts: TensorParts, *, is_given: bool) -> XrankError:
    message, first = f"{parts.name}: {error.message}", parts.held[0]
    facts: dict[str, Any] = {"tensor": parts.name, "rank": first.rank, "file": first.file}
    facts |= {"got": error.got, "want": error.want}
    if is_given:
        return LayoutError(message, **facts, next_step="correct the layout file; its axes are tp and etp")
    return ContradictionError(
        message, **facts, next_step="all files must come from one save of one run; copy them again"
    )  # fmt: skip


def _coordinate(place: Place, sizes: ParallelSizes, axes: Sequence[str]) -> dict[str, int]:
    at = {"tp": place.tensor, "ep": place.expert, "etp": place.tensor % sizes.expert_tensor}
    return {axis: at[axis] for axis in axes}


@lru_cache(maxsize=16)
def _mesh(axes: tuple[str, ...], lengths: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh(lengths, axes)
