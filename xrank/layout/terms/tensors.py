"""The terms of DTensor, JAX and Keras, and boxes.

Placements list one cut per mesh axis; a layout, and the terms of JAX and Keras, list the cuts of each dim.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from math import prod
from typing import Any, TypeAlias

from msgspec import Struct

from xrank.errors import LayoutError
from xrank.layout.local_part import local_part
from xrank.layout.mesh import DeviceMesh
from xrank.layout.nests import Loop, Nest, canonical
from xrank.layout.notation import (
    Count,
    LayoutTree,
    Node,
    Parts,
    Product,
    Size,
    Split,
    SplitKind,
    Where,
    render,
    render_dim,
)
from xrank.layout.tensor_layout import TensorLayout, free_size_names


class Cuts(Struct, frozen=True):
    """One dim: its size, and the axes that cut it, the first cut first: evenly ("/") or into ceil chunks ("/~")."""

    size: int | str
    """The size of one piece."""
    splits: tuple[tuple[str, SplitKind], ...]
    pieces: int = 1
    """Number of equal pieces of the dim, end to end, each cut by itself, such as packed gate and up."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut the dim, in the order of the cuts."""
        return tuple(axis for axis, _ in self.splits)


def chain_cuts(size: int | str, axes: Sequence[str], kind: SplitKind) -> Node:
    """Return a dim that these axes cut one after another, with the same kind of split."""
    node: Node = Size(size)
    for axis in axes:
        node = Split(node, axis, kind)
    return node


def cuts_of(
    layout: TensorLayout, dialect: str, *, packed: bool = False, where: bool = False, sums: bool = False
) -> tuple[Cuts, ...]:
    """Return a layout as one chain of cuts per dim.

    Errors name the dialect, in the plural. Where `packed`, a dim may have several equal pieces: ``2 f/tp``,
    ``<gate: f/tp | up: f/tp>``. Where `where` and `sums`, the layout may have such clauses, which the caller converts.
    """
    tree = layout.tree
    beyond = _clauses(LayoutTree((), tree.view, () if where else tree.where, () if sums else tree.sums))
    if beyond:
        raise beyond_dialect(dialect, f"{beyond!r} of the layout {layout}", beyond, "a layout without it")
    passed = _clauses(LayoutTree((), None, tree.where, tree.sums))
    text = "[" + ", ".join(render_dim(dim) for dim in layout.dims) + "]" + (passed and f" {passed}")
    if str(layout) != text:
        what = f"the layout {layout}: it has clauses besides its dims"
        raise beyond_dialect(dialect, what, str(layout), f"only dims, such as {text}")
    pieces = [_pieces_of(dim) if packed else (1, dim) for dim in layout.dims]
    return tuple(_cuts_of_dim(piece, i, layout, dialect, count) for i, (count, piece) in enumerate(pieces))


def beyond_dialect(dialect: str, what: str, got: str, want: str, next_step: str | None = None) -> LayoutError:
    """Return the error for a part of a layout that a dialect (in the plural) cannot express."""
    return LayoutError(f"{dialect} cannot express {what}", got=got, want=want, next_step=next_step)


def _clauses(tree: LayoutTree) -> str:
    return render(tree).removeprefix("[]").strip()


def _pieces_of(dim: Node) -> tuple[int, Node]:
    """Return the number of equal pieces of a dim, and one of them; (1, the dim) for a dim without pieces."""
    match dim:
        case Product((Size(int(pieces)), piece)) if pieces > 0:
            return pieces, piece
        # Parts with equal texts have equal sizes: a name has one value in the whole layout.
        case Parts(parts) if len({part.of for part in parts}) == 1:
            return len(parts), parts[0].of
    return 1, dim


def _cuts_of_dim(node: Node, number: int, layout: TensorLayout, dialect: str, pieces: int) -> Cuts:
    of = f"dim {number} of the layout {layout}"
    splits: list[tuple[str, SplitKind]] = []
    while isinstance(node, Split) and isinstance(node.of, Split | Size):
        before = render_dim(node.of)
        # Compare the text, too: a later notation may give splits more fields, which must not be lost.
        if node.kind not in ("/", "/~") or render_dim(node) != f"{before}{node.kind}{node.axis}":
            what, got = f"{of}: {dialect} have no such split", render_dim(node).removeprefix(before)
            raise beyond_dialect(dialect, what, got, '"/", an even split, or "/~", ceil chunks')
        splits.append((node.axis, node.kind))
        node = node.of
    if not isinstance(node, Size):
        what = f"{of}: {render_dim(node)} is not a single size, split by axes"
        raise beyond_dialect(dialect, what, f"{type(node).__name__} {render_dim(node)}", "a single size, split by axes")
    return Cuts(node.value, tuple(reversed(splits)), pieces)


def resolve_mesh(layout: TensorLayout, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh of a layout: its own or the given one, which must be equal if both exist."""
    if mesh is None and layout.device_mesh is None:
        raise LayoutError(f"the layout {layout} has no mesh", want="a layout with a mesh, or also a mesh")
    if mesh is not None:
        layout.with_mesh(mesh)  # raises for another mesh, and for axes that the mesh lacks
        return mesh
    assert layout.device_mesh is not None
    return layout.device_mesh


def is_even_split(cuts: Cuts, size: int, mesh: DeviceMesh) -> bool:
    """Return whether the cuts give all ranks equal parts of a dim of that size."""
    return size % (cuts.pieces * prod(mesh.axis_length(axis) for axis in cuts.axes)) == 0


def even_axes_of(
    layout: TensorLayout, dialect: str, mesh: DeviceMesh | None, shape: Sequence[int] | None
) -> tuple[tuple[str, ...], ...]:
    """Return per dim the axes that cut it evenly, for dialects without uneven parts.

    Ceil chunks are even only for some sizes, so a dim cut so needs the tensor's shape and a mesh.
    """
    every = cuts_of(layout, dialect)
    if shape is not None and len(shape) != len(every):
        raise LayoutError(f"the layout {layout} does not fit the shape {tuple(shape)}", want=f"{len(every)} dims")
    for i, cuts in enumerate(every):
        what = f"dim {i} of the layout {layout}: {dialect} can only split evenly"
        if shape is not None and cuts.splits:
            lengths = resolve_mesh(layout, mesh)
            if not is_even_split(cuts, shape[i], lengths):
                got = f"{shape[i]} positions over {prod(lengths.axis_length(axis) for axis in cuts.axes)} parts"
                raise beyond_dialect(dialect, what, got, "a size that divides")
        elif any(kind == "/~" for _, kind in cuts.splits):
            next_step = "also give the tensor's shape: if the parts divide it, ceil chunks are even"
            raise beyond_dialect(dialect, what, render_dim(layout.dims[i]), 'even splits, "/"', next_step)
    return tuple(cuts.axes for cuts in every)


Box: TypeAlias = tuple[tuple[int, int], ...]
"""Per dim of the global tensor: the first position, and the position after the last."""


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(high - low for low, high in box)


def box_text(box: Box) -> str:
    """Return a box as a Python slice, such as ``[0:2, 0:4]``."""
    return "[" + ", ".join(f"{low}:{high}" for low, high in box) + "]"


def boxes_overlap(a: Box, b: Box) -> bool:
    """Return whether two non-empty boxes share an element."""
    return all(low < other[1] and other[0] < high for (low, high), other in zip(a, b, strict=True))


def box_nests(box: Box, shape: Sequence[int]) -> tuple[Nest, ...]:
    """Return the nest that fills a local tensor of the box's size; an empty box has no nest."""
    if not volume(box):
        return ()
    loops: list[Loop] = []
    start, local_stride, global_stride = 0, 1, 1
    for (low, high), size in zip(reversed(box), reversed(shape), strict=True):
        loops.insert(0, (high - low, local_stride, global_stride))
        start += low * global_stride
        local_stride *= high - low
        global_stride *= size
    return (canonical(Nest(0, start, tuple(loops))),)


def range_of(axes: Sequence[str], size: int, mesh: DeviceMesh, at: Mapping[str, int]) -> tuple[int, int]:
    """Return the range at a place after cuts by these axes in turn, each into ceil chunks."""
    low, high = 0, size
    for axis in axes:
        chunk = -(-(high - low) // mesh.axis_length(axis))
        low, high = min(low + at[axis] * chunk, high), min(low + (at[axis] + 1) * chunk, high)
    return low, high


def layout_of_boxes(boxes: Mapping[int, Box | None], mesh: DeviceMesh, shape: Sequence[int]) -> TensorLayout | None:
    """Return the layout under which every rank holds its box; None if no cuts by axes give these boxes."""
    # A rank without a box is past the end of one dim, but of which one is unknown: try each, the same for all ranks.
    for empty_dim in range(len(shape)) if None in boxes.values() else (-1,):
        layout = _search_layout(boxes, mesh, shape, empty_dim)
        if layout is None:
            continue
        # The search went dim by dim and ignored empty ranges, so its result must be proven for every rank.
        wanted = {rank: () if box is None else box_nests(box, shape) for rank, box in boxes.items()}
        parts = ((local_part(layout, mesh, mesh.coordinate(rank), shape), nests) for rank, nests in wanted.items())
        if all(part is not None and part.nests == nests for part, nests in parts):
            return layout
    return None


def _search_layout(
    boxes: Mapping[int, Box | None], mesh: DeviceMesh, shape: Sequence[int], empty_dim: int
) -> TensorLayout | None:
    names = free_size_names(len(shape), mesh.axis_names)
    dims: list[Node] = []
    used = set[str]()
    for dim, size in enumerate(shape):
        # An empty range may begin anywhere.
        known = {rank: box[dim] for rank, box in boxes.items() if box is not None}
        ranges = {rank: (low, high) if high > low else (0, 0) for rank, (low, high) in known.items()}
        if dim == empty_dim:
            ranges |= {rank: (0, 0) for rank, box in boxes.items() if box is None}
        axes, sizes = _axes_of_dim(ranges, size, mesh), None
        if axes is None and (listed := _list_cut(ranges, size, mesh)) is not None:
            axes, sizes = (listed[0],), listed[1]
        if axes is None or used & set(axes):
            return None
        used |= set(axes)
        is_even = is_even_split(Cuts(names[dim], tuple((axis, "/") for axis in axes)), size, mesh)
        cut = chain_cuts(names[dim], axes, "/" if is_even else "/~")
        dims.append(cut if sizes is None else Split(Size(names[dim]), axes[0], "/", sizes=sizes))
    return TensorLayout.from_dims(dims, mesh)


def _list_cut(
    ranges: Mapping[int, tuple[int, int]], size: int, mesh: DeviceMesh
) -> tuple[str, tuple[Count, ...]] | None:
    """Return the one axis that cuts a dim into these ranges, and their sizes; None if none does so."""
    for axis in mesh.axis_names:
        found: dict[int, tuple[int, int]] = {}
        if any(found.setdefault(mesh.coordinate(rank)[axis], each) != each for rank, each in ranges.items()):
            continue
        sizes = [found[at][1] - found[at][0] if at in found else 0 for at in range(mesh.axis_length(axis))]
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        if sum(sizes) == size and all(not sizes[at] or low == starts[at] for at, (low, _) in found.items()):
            return axis, tuple((each,) for each in sizes)
    return None


def _axes_of_dim(ranges: Mapping[int, tuple[int, int]], size: int, mesh: DeviceMesh) -> tuple[str, ...] | None:
    """Return the axes that cut a dim into these ranges, in the order of the cuts; None if no order does so."""
    places = {rank: mesh.coordinate(rank) for rank in ranges}

    def is_met(axes: Sequence[str]) -> bool:
        found = ((range_of(axes, size, mesh, places[rank]), wanted) for rank, wanted in ranges.items())
        return all(each == wanted or (each[0] >= each[1] and wanted[0] >= wanted[1]) for each, wanted in found)

    # An axis matters if ranks that differ only along it hold different ranges.
    matter = []
    for axis in mesh.axis_names:
        seen: dict[tuple[int, ...], tuple[int, int]] = {}
        for rank, found in ranges.items():
            others = tuple(place for name, place in places[rank].items() if name != axis)
            if seen.setdefault(others, found) != found:
                matter.append(axis)
                break
    # Two or three axes cut a dim at most, so all orders can be tried.
    return next((axes for axes in permutations(matter) if is_met(axes)), None)


Shards: TypeAlias = Mapping[int, Sequence[Box]]
"""Rank -> the boxes of its shards; empty for a rank without a shard."""


def place_bounds(ranks: Iterable[int], mesh: DeviceMesh) -> dict[str, tuple[int, int]]:
    """Return for each axis of a mesh the first and the last place of these ranks."""
    places = [mesh.coordinate(rank) for rank in ranks]
    return {axis: (min(at[axis] for at in places), max(at[axis] for at in places)) for axis in mesh.axis_names}


def layout_of_shards(
    shards: Shards, mesh: DeviceMesh, shape: tuple[int, ...], num_prepended: int
) -> TensorLayout | None:
    """Return the layout under which every rank of a mesh holds its shards; None if the search fails.

    A "where" clause excludes ranks without a shard, or they hold empty parts; at least one rank has a shard. The shape
    begins with the prepended dims, along which each index has a shard of its own.
    """
    if set(shards) != set(mesh.ranks):
        return None
    held = [rank for rank in mesh.ranks if shards[rank]]
    found = None
    # Without prepended axes, a rank with an empty part has a shard without elements.
    if len(held) == len(shards) or num_prepended:
        found = _find_cuts(shards, mesh, shape, num_prepended)
    bounds = place_bounds(held, mesh)
    partly = {axis for axis, (first, last) in bounds.items() if last - first + 1 < mesh.axis_length(axis)}
    if found is not None or not partly or prod(last - first + 1 for first, last in bounds.values()) != len(held):
        return found
    # Along axes of the "where" all ranks hold the same, so one place along each axis shows the cuts.
    alike = {rank: mesh.coordinate(rank) | {axis: bounds[axis][0] for axis in partly} for rank in held}
    shown = {rank: mesh.rank_at(at) for rank, at in alike.items()}
    if any(list(shards[rank]) != list(shards[shown[rank]]) for rank in held):
        return None
    lengths = [1 if axis in partly else mesh.axis_length(axis) for axis in mesh.axis_names]
    ranks = [rank for rank in mesh.ranks if shown.get(rank) == rank]
    thin = DeviceMesh(lengths, mesh.axis_names, ranks)
    cut = _find_cuts({rank: shards[rank] for rank in ranks}, thin, shape, num_prepended)
    if cut is None:
        return None
    where = tuple(Where(axis, *bounds[axis]) for axis in mesh.axis_names if axis in partly)
    return TensorLayout.from_tree(LayoutTree(cut.dims, where=where), mesh)


def _find_cuts(shards: Shards, mesh: DeviceMesh, shape: tuple[int, ...], num_prepended: int) -> TensorLayout | None:
    """Return a layout of cuts and packed pieces, without a "where"; None if the search fails."""
    some = next(boxes for boxes in shards.values() if boxes)
    counts = {dim: len({box[dim] for box in some}) for dim in range(num_prepended, len(shape))}
    # The first dim with several equal pieces on a rank.
    dim = next((dim for dim, pieces in counts.items() if pieces > 1 and shape[dim] % pieces == 0), None)
    if dim is not None:
        pieces, step = counts[dim], shape[dim] // counts[dim]
        first = {rank: tuple(box for box in boxes if box[dim][0] < step) for rank, boxes in shards.items()}
        for rank, boxes in shards.items():
            moved = {
                (*box[:dim], (box[dim][0] + i * step, box[dim][1] + i * step), *box[dim + 1 :])
                for box in first[rank]
                for i in range(pieces)
            }
            if moved != set(boxes) or any(box[dim][1] > step for box in first[rank]):
                return None
        piece = _find_cuts(first, mesh, (*shape[:dim], step, *shape[dim + 1 :]), num_prepended)
        if piece is None:
            return None
        dims = [Product((Size(pieces), node)) if i == dim else node for i, node in enumerate(piece.dims)]
        return TensorLayout.from_dims(dims, mesh)
    stacked = {rank: _stack_boxes(boxes, num_prepended) if boxes else None for rank, boxes in shards.items()}
    if any(boxes and stacked[rank] is None for rank, boxes in shards.items()):
        return None
    return layout_of_boxes(stacked, mesh, shape)


def _stack_boxes(boxes: Sequence[Box], num_prepended: int) -> Box | None:
    """Return the box of a rank's shards, stacked along their prepended axes; None if they do not fill a box."""
    hull = tuple((min(low for low, _ in dim), max(high for _, high in dim)) for dim in zip(*boxes, strict=True))
    if {box[num_prepended:] for box in boxes} != {hull[num_prepended:]} or len(set(boxes)) != len(boxes):
        return None
    return hull if prod(high - low for low, high in hull[:num_prepended]) == len(boxes) else None


def describe_mesh(device_mesh: Any) -> DeviceMesh:
    """Convert a torch ``DeviceMesh``; axes without names are called a0, a1, ...

    Example:
        >>> import torch
        >>> from types import SimpleNamespace  # stands for torch's mesh, which needs a process group
        >>> describe_mesh(SimpleNamespace(mesh=torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp")))
        <DeviceMesh shape=(2, 2), axis_names=('dp', 'tp')>
    """
    ranks = device_mesh.mesh
    names = device_mesh.mesh_dim_names or tuple(f"a{i}" for i in range(len(ranks.shape)))
    return DeviceMesh(tuple(ranks.shape), tuple(names), ranks.tolist())


def from_placements(
    mesh: DeviceMesh, placements: Sequence[Any], ndim: int, shard_order: Sequence[Any] | None = None
) -> TensorLayout:
    """Return the layout of DTensor placements.

    torch cuts from the first mesh axis to the last, into ceil chunks. A ``_StridedShard`` is a cut that was made
    *after* the cuts of some later axes; its split factor is the number of parts that those had made
    (placement_types.py:_StridedShard). So this function goes from the last axis to the first: a plain shard was cut
    before all later axes, a strided one after the first of them whose lengths multiply to its split factor.

    A strided cut over one plain cut is FSDP2 over TP: `torch.chunk` cut the local tensor again, possibly unevenly.
    (DTensor's own redistribution cuts uneven strided dims differently; then the local shapes differ, too.) Over several
    cuts, uneven chunks of equal sizes may hold different elements, depending on the code that cut them. The layout
    requires such dims to be even, so an uneven dim is refused when its size is known.

    A strided shard that is the last cut of a dim counts equal pieces instead: the dim has that many pieces, packed end
    to end, and each rank holds its part of each piece (transformers' ``packed_colwise``), ``[2 d0/~tp, d1]``.

    A ``Partial`` sum becomes a "sum" clause: the ranks along its axis hold addends, not values.

    Args:
        mesh: the mesh, with one axis per placement.
        placements: torch's ``Shard``, ``Replicate``, ``_StridedShard``, ``Partial("sum")``.
        ndim: the tensor's number of dims.
        shard_order: the entries of a ``DTensorSpec`` (tensor_dim, mesh_dims in the order of the cuts), if any
            (_dtensor_spec.py:ShardOrder); placements do not show an order other than the mesh's.

    Raises:
        LayoutError: a partial result other than a sum, a split factor that no cuts make, pieces cut by several axes
            (such as FSDP2 over packed tensor parallelism), a dim that the tensor lacks, another placement, a cut along
            an axis whose ranks do not rise.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> str(from_placements(DeviceMesh((2, 2), ("dp", "tp")), [Replicate(), Shard(0)], ndim=2))
        '[d0/~tp, d1]'
    """
    if len(placements) != len(mesh.shape):
        got = f"{len(placements)} placements {list(placements)}"
        want = f"{len(mesh.shape)}, for the mesh {mesh.grid!r}"
        raise LayoutError("the placements are not one for each axis of the mesh", got=got, want=want)
    cuts: list[list[str]] = [[] for _ in range(ndim)]
    pieces: dict[int, int] = {}
    strided: set[int] = set()
    sums: list[str] = []
    for axis, placement in reversed(list(zip(mesh.axis_names, placements, strict=True))):
        # By name, and before is_shard: in torch before 2.13 it was a subclass of Shard.
        if type(placement).__name__ == "_StridedShard":
            dim = _dim(placement, ndim, axis)
            # If no later axis cuts the dim, the factor counts pieces of the dim instead of parts of ranks.
            packed = pieces.setdefault(dim, int(placement.split_factor))
            if packed > 1 and cuts[dim]:
                raise _several_cuts_error(dim, [axis, *cuts[dim]], f"the placements {list(placements)}", packed)
            factor, parts, before = int(placement.split_factor), packed, 0
            # The known cuts, from the first on, that make the parts which the factor counts.
            while parts != factor:
                if before == len(cuts[dim]):
                    raise _factor_error(placement, factor, cuts[dim], packed, mesh, axis)
                parts *= mesh.axis_length(cuts[dim][before])
                before += 1
            cuts[dim].insert(before, axis)
            strided.add(dim)
        elif placement.is_shard():
            dim = _dim(placement, ndim, axis)
            if pieces.setdefault(dim, 1) != 1:
                raise _factor_error(placement, 1, cuts[dim], pieces[dim], mesh, axis)
            cuts[dim].insert(0, axis)
        elif placement.is_partial():
            # Other partial results are refused; embeddings' masked ones must be masked before the sum.
            if type(placement).__name__ != "Partial" or getattr(placement, "reduce_op", None) != "sum":
                what = f"the ranks along {axis!r} hold partial results that are not partial sums"
                want = 'Partial("sum"), Shard or Replicate'
                next_step = "reduce the tensor first: redistribute it to Replicate or Shard"
                raise LayoutError(what, got=repr(placement), want=want, next_step=next_step)
            sums.insert(0, axis)
        elif not placement.is_replicate():
            want = "Shard, Replicate, _StridedShard or Partial"
            raise beyond_dialect("a layout", f"the placement along {axis!r}", repr(placement), want)
    for entry in shard_order or ():
        # The factors of a strided dim's placements have shown its order already.
        if entry.tensor_dim not in strided:
            cuts[entry.tensor_dim] = [mesh.axis_names[mesh_dim] for mesh_dim in entry.mesh_dims]
    for axis in {axis for axes in cuts for axis in axes}:
        _check_rising(mesh, axis)
    names = free_size_names(ndim, mesh.axis_names)
    dims: list[Node] = []
    for dim, (name, axes) in enumerate(zip(names, cuts, strict=True)):
        cutting = sum(mesh.axis_length(axis) > 1 for axis in axes)
        # Uneven chunks over several cuts hold other elements by the code that cut them, so "/" refuses them.
        node = chain_cuts(name, axes, "/" if dim in strided and cutting > 2 else "/~")
        packed = pieces.get(dim, 1)
        dims.append(node if packed == 1 else Product((Size(packed), node)))
    return TensorLayout.from_tree(LayoutTree(tuple(dims), sums=tuple(sums)), mesh)


def to_placements(layout: TensorLayout, mesh: DeviceMesh, shape: Sequence[int] | None = None) -> tuple[Any, ...]:
    """Return torch's placements for a layout, one for each axis of the mesh; imports torch.

    torch cuts from the first mesh axis to the last. An axis that cuts a dim after later axes becomes a
    ``_StridedShard``, which counts the parts that those had made (placement_types.py:_StridedShard). If they are even,
    torch's own cut for such placements (_StridedShard._split_tensor) gives the same parts. An uneven dim is refused if
    it does not, although FSDP2 over TP uses the same placements for its chunks of chunks.

    Args:
        layout: a layout whose dims are cut by axes, or are equal pieces that one axis cuts. Sums become
            ``Partial("sum")``; other clauses are refused.
        mesh: the mesh of the placements; the layout's own mesh must be equal.
        shape: the tensor's global shape. It shows whether ceil chunks ("/~") are even, as a ``_StridedShard`` needs;
            without it such dims are refused.

    Raises:
        LayoutError: a part that placements cannot express, which the error names; a cut along an axis whose ranks do
            not rise; a shape that does not fit the layout.

    Example:
        >>> to_placements(TensorLayout.parse("[h/~tp, f]"), DeviceMesh((2, 2), ("dp", "tp")))
        (Replicate(), Shard(dim=0))
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    resolve_mesh(layout, mesh)
    every = cuts_of(layout, "placements", packed=True, sums=True)
    cutting, with_mesh = {axis for cuts in every for axis in cuts.axes}, layout.with_mesh(mesh)
    places: dict[tuple[int, ...], dict[str, int]] = {}  # ranks of equal places hold equal parts
    for at in map(mesh.coordinate, mesh.ranks if shape is not None else ()):
        places.setdefault(tuple(place for axis, place in at.items() if axis in cutting), at)
    for at in places.values():
        local_part(with_mesh, mesh, at, shape or ())  # raises for a shape that the layout does not fit on some rank
    placements: dict[str, Any] = {axis: Partial() for axis in layout.tree.sums}
    for dim, cuts in enumerate(every):
        is_reordered = False
        for count, axis in enumerate(cuts.axes):
            _check_rising(mesh, axis)
            later = mesh.axis_names[mesh.axis_names.index(axis) + 1 :]
            parts = prod(mesh.axis_length(before) for before in cuts.axes[:count] if before in later)
            factor = parts * cuts.pieces
            placements[axis] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
            is_reordered = is_reordered or (parts > 1 and mesh.axis_length(axis) > 1)
        if cuts.pieces > 1 and len(cuts.axes) > 1:
            raise _several_cuts_error(dim, cuts.axes, f"the layout {layout}", cuts.pieces)
        if is_reordered:
            _check_cut(cuts, dim, layout, mesh, shape)
    return tuple(placements.get(axis, Replicate()) for axis in mesh.axis_names)


def _check_cut(cuts: Cuts, dim: int, layout: TensorLayout, mesh: DeviceMesh, shape: Sequence[int] | None) -> None:
    """Refuse a dim cut in another order than the mesh's if torch's own cut may give ranks other elements."""
    if shape is None:
        if any(kind == "/~" for _, kind in cuts.splits):
            what = f"whether placements can express dim {dim} of the layout {layout} depends on its size"
            got = f"ceil chunks by {list(cuts.axes)}, which is not the order of the mesh {mesh.grid!r}"
            want = 'even splits, "/", or the mesh\'s order of cuts'
            raise LayoutError(what, got=got, want=want, next_step="also give the tensor's shape")
    elif not is_even_split(cuts, shape[dim], mesh) and not _cut_alike(cuts, shape[dim], mesh):
        what = f"dim {dim} of the layout {layout}: it is uneven, split in a different order than the mesh's, "
        got = f"{shape[dim]} positions, cut by {list(cuts.axes)} of the mesh {mesh.grid!r}"
        what, want = f"{what}and torch's own split gives the ranks different elements", "a size that divides"
        raise beyond_dialect("placements", what, got, f"{want}, or the mesh's order of cuts")


def _several_cuts_error(dim: int, axes: Sequence[str], where: str, pieces: int) -> LayoutError:
    """Return the error that several axes cut a packed dim.

    The same placements have several meanings with equal shapes. FSDP2 over a packed dim cuts the local tensor into
    chunks (_fsdp_param.py:_init_sharding_spec_tp calls this ``_StridedShard(dim, tp)``). transformers, when it loads
    into such parameters, and `distribute_tensor` cut the whole dim from the first mesh axis on
    (transformers/distributed/sharding_utils.py:shard_tensor). torch 2.13's `full_tensor` joins both wrongly.
    """
    over = f"({pieces} d{dim}/~{axes[-1]})/~{axes[0]}"
    what = f"dim {dim} of {where} has {pieces} pieces and is split by several axes: torch and transformers split it "
    what += "in different ways, and gather it in a third way"
    next_step = f"keep the local tensors and give their layout, {over!r} if FSDP2 split them; then do "
    next_step += "not load into them with transformers"
    return LayoutError(what, got=f"cuts by {list(axes)}", want="one axis that cuts the pieces", next_step=next_step)


def _cut_alike(cuts: Cuts, size: int, mesh: DeviceMesh) -> bool:
    """Return whether torch's placements for a dim and its chain of ceil chunks give every place the same positions."""
    chain: dict[tuple[int, ...], list[int]] = {(): list(range(size))}
    for axis in cuts.axes:
        chain = {
            (*place, i): piece
            for place, positions in chain.items()
            for i, piece in enumerate(_chunks(positions, mesh.axis_length(axis)))
        }
    # torch follows the mesh's order, and cuts each part that later axes had made (_split_tensor).
    in_order = sorted(cuts.axes, key=mesh.axis_names.index)
    torchs: dict[tuple[int, ...], list[int]] = {(): list(range(size))}
    for at, axis in enumerate(in_order):
        before = cuts.axes[: cuts.axes.index(axis)]
        factor = prod(mesh.axis_length(name) for name in before if name in in_order[at:])
        cut: dict[tuple[int, ...], list[int]] = {}
        for place, positions in torchs.items():
            parts = [_chunks(part, mesh.axis_length(axis)) for part in _chunks(positions, factor)]
            cut |= {(*place, i): [x for part in parts for x in part[i]] for i in range(mesh.axis_length(axis))}
        torchs = cut
    order = [cuts.axes.index(axis) for axis in in_order]
    return all(torchs[tuple(place[i] for i in order)] == positions for place, positions in chain.items())


def _chunks(positions: list[int], count: int) -> list[list[int]]:
    """Return ceil chunks as `torch.chunk` does, padded with empty ones to the count."""
    length = -(-len(positions) // count)
    return [positions[i * length : (i + 1) * length] for i in range(count)]


def _check_rising(mesh: DeviceMesh, axis: str) -> None:
    """Refuse a cut along an axis whose ranks do not rise, because torch contradicts itself there.

    Offsets follow the coordinate in the mesh. Collectives, also `full_tensor`, follow the rank in the axis' process
    group, which torch sorts (distributed_c10d.py: new_group). So the part of each rank is unknown.
    """
    for rank in mesh.ranks:
        coordinate = mesh.coordinate(rank)
        if coordinate[axis] and mesh.rank_at({**coordinate, axis: coordinate[axis] - 1}) > rank:
            what = (
                f"the ranks along {axis!r} are not ascending, and torch does not define which of them holds which part"
            )
            got = f"ranks {list(mesh.ranks)} on the mesh {mesh.grid!r}"
            want = f"ascending ranks along {axis!r}, as init_device_mesh makes them"
            next_step = "make the mesh with init_device_mesh, or gather the tensor with full_tensor() first"
            raise LayoutError(what, got=got, want=want, next_step=next_step)


def _dim(placement: Any, ndim: int, axis: str) -> int:
    dim = operator.index(placement.dim)
    if not -ndim <= dim < ndim:
        what = f"the placement along {axis!r} cuts a dim that the tensor does not have"
        raise LayoutError(what, got=repr(placement), want=f"a dim of {ndim}")
    return dim % ndim


def _factor_error(
    placement: Any, factor: int, axes: Sequence[str], packed: int, mesh: DeviceMesh, axis: str
) -> LayoutError:
    of_pieces = "" if packed == 1 else f", each of its {packed} pieces by itself"
    what = f"the shard along {axis!r} counts {factor} parts, which no cuts of that dim make"
    got = f"{placement!r} on the mesh {mesh.grid!r}, where {list(axes) or 'no axes'} cut the dim too{of_pieces}"
    want = "the product of the lengths of the axes that cut the dim before it, times its pieces"
    return LayoutError(what, got=got, want=want)


SpecEntry: TypeAlias = str | tuple[str, ...] | None
"""The entry of one dim in a PartitionSpec."""


def from_partition_spec(spec: Sequence[Any], mesh: DeviceMesh, ndim: int | None = None) -> TensorLayout:
    """Return the layout of a PartitionSpec on a mesh.

    The first axis of a tuple cuts first, the next axis cuts each piece again (jax/_src/named_sharding.py: the first
    axis of a tuple is the major one), as in the notation. ``unreduced`` axes hold addends: they become "sum" clauses.

    Args:
        spec: a ``PartitionSpec``, or a tuple of the same entries.
        mesh: the mesh of the sharding; axes that the spec does not name hold replicas.
        ndim: the tensor's number of dims; dims after the spec's end are whole. None: the spec's length.

    Raises:
        LayoutError: the spec has more entries than the tensor dims, an entry leaves the dim to the compiler
            (``UNCONSTRAINED``) or is not an entry, axes are ``reduced`` (a property of gradients), an axis is unknown
            or occurs twice.

    Example:
        >>> str(from_partition_spec((None, ("dp", "tp")), DeviceMesh((2, 2), ("dp", "tp"))))
        '[d0, d1/dp/tp]'
    """
    if isinstance(spec, str):
        raise LayoutError(f"the PartitionSpec {spec!r} is one text", want="a tuple, such as (None, 'model')")
    reduced = getattr(spec, "reduced", None)
    if reduced:
        what = f"a PartitionSpec has gradients unreduced along {sorted(reduced)}, which a layout cannot express"
        raise LayoutError(what, got=repr(spec), want="only axes that split dims or hold partial sums")
    unreduced = getattr(spec, "unreduced", None) or ()
    entries = tuple(spec)
    filled = _fill(entries, ndim, f"the PartitionSpec {entries!r} has more entries than the tensor has dims", "entries")
    cuts = [_axes_of(entry, entries) for entry in filled]
    names = free_size_names(len(filled), mesh.axis_names)
    dims = tuple(chain_cuts(name, axes, "/") for name, axes in zip(names, cuts, strict=True))
    # A set has no order, so use the mesh's; axes that the mesh lacks come last and are refused.
    sums = sorted(unreduced, key=(*mesh.axis_names, *sorted(unreduced)).index)
    return TensorLayout.from_tree(LayoutTree(dims, sums=tuple(sums)), mesh)


def to_partition_spec(
    layout: TensorLayout, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> tuple[SpecEntry, ...]:
    """Return a layout as the entries of a PartitionSpec, one per dim: ``PartitionSpec(*entries)``.

    Args:
        layout: a layout whose dims are only cut by axes. Entries cannot express sums, so a layout with sums is
            refused: its PartitionSpec takes the entries of its dims, and ``unreduced``.
        mesh: the mesh, if the layout has none; needed with a shape.
        shape: the tensor's global shape. It shows that ceil chunks ("/~") are even; without it they are refused.

    Raises:
        LayoutError: a part that PartitionSpecs cannot express; the error names it.

    Example:
        >>> to_partition_spec(TensorLayout.parse("[h, f/dp/tp]"))
        (None, ('dp', 'tp'))
    """
    if layout.tree.sums:
        got = " ".join(f"sum({axis})" for axis in layout.tree.sums)
        next_step = "PartitionSpec(*entries, unreduced={...}) has them: take the entries of "
        next_step += "TensorLayout.from_dims(layout.dims), and add layout.tree.sums"
        what = f"the sums of the layout {layout}"
        raise beyond_dialect("the entries of a PartitionSpec", what, got, "a layout without sums", next_step)
    axes = even_axes_of(layout, "PartitionSpecs", mesh, shape)
    return tuple(None if not dim else dim[0] if len(dim) == 1 else dim for dim in axes)


def _fill(entries: tuple[Any, ...], ndim: int | None, what: str, unit: str) -> tuple[Any, ...]:
    """Return one entry per dim; those that are not given are None."""
    count = len(entries) if ndim is None else ndim
    if len(entries) > count:
        raise LayoutError(what, got=f"{len(entries)} {unit}", want=f"at most {count}")
    return entries + (None,) * (count - len(entries))


def _axes_of(entry: Any, entries: tuple[Any, ...]) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple | list) and all(isinstance(axis, str) for axis in entry):
        return tuple(entry)
    is_free = "UNCONSTRAINED" in repr(entry).upper()
    next_step = "take the spec of the array's own sharding, where the compiler has chosen" if is_free else None
    what, want = f"an entry of the PartitionSpec {entries!r}", "None, an axis, or a tuple of axes"
    raise beyond_dialect("a layout", what, repr(entry), want, next_step)


def describe_keras_mesh(device_mesh: Any) -> DeviceMesh:
    """Convert a Keras ``DeviceMesh``; the rank of the device ``"gpu:3"`` is 3.

    Keras numbers devices over all processes (distribution_lib.py:list_devices), which equals the ranks if each process
    has one device.

    Raises:
        LayoutError: as `DeviceMesh`, and for devices that are not such texts.

    Example:
        >>> from types import SimpleNamespace
        >>> describe_keras_mesh(SimpleNamespace(shape=(2,), axis_names=["model"], devices=["cpu:0", "cpu:1"]))
        <DeviceMesh shape=(2,), axis_names=('model',)>
    """
    return DeviceMesh(device_mesh.shape, device_mesh.axis_names, device_mesh.devices)


def from_keras_axes(axes: Any, mesh: DeviceMesh, ndim: int | None = None) -> TensorLayout:
    """Return the layout of Keras' axes on a mesh.

    Args:
        axes: per dim an axis or None, or a Keras ``TensorLayout`` with ``axes``.
        mesh: the mesh; axes that are not named hold replicas.
        ndim: the tensor's number of dims; dims after the last entry are whole, as in Keras. None: the number of axes.

    Raises:
        LayoutError: there are more axes than dims, a dim has several axes (Keras refuses them too, with a mesh), an
            axis is unknown or occurs twice.

    Example:
        >>> str(from_keras_axes((None, "model"), DeviceMesh((2, 2), ("batch", "model"))))
        '[d0, d1/model]'
    """
    entries = getattr(axes, "axes", axes)
    if isinstance(entries, str):
        raise LayoutError(f"the axes {entries!r} are one text", want="one entry a dim, such as (None, 'model')")
    entries = tuple(entries)
    return TensorLayout(_fill(entries, ndim, f"the axes {entries!r} are more than the tensor's dims", "axes"), mesh)


def to_keras_axes(
    layout: TensorLayout, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> tuple[str | None, ...]:
    """Return a layout as the axes of a Keras ``TensorLayout``, one entry per dim.

    Args:
        layout: a layout whose dims are cut by at most one axis each.
        mesh: the mesh, if the layout has none; needed with a shape.
        shape: the tensor's global shape. It shows that ceil chunks ("/~") are even; without it they are refused.

    Raises:
        LayoutError: a part that Keras cannot express; the error names it.

    Example:
        >>> to_keras_axes(TensorLayout.parse("[h, f/model]"))
        (None, 'model')
    """
    every = even_axes_of(layout, "Keras' axes", mesh, shape)
    for i, axes in enumerate(every):
        if len(axes) > 1:
            what, next_step = "they have one axis per dim", "replace these axes of the mesh by one of that length"
            what = f"dim {i} of the layout {layout}: {what}"
            raise beyond_dialect("Keras' axes", what, str(list(axes)), "one axis", next_step)
    return tuple(axes[0] if axes else None for axes in every)
