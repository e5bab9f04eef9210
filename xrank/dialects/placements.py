"""DTensor placements: one per mesh axis, in the mesh's order, whereas a layout lists the cuts of each dim.

Reading them does not import torch: placements and meshes are recognised by their methods and attributes
(torch/distributed/tensor/placement_types.py), so those of other torch versions and stand-ins are accepted, too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

from xrank.dialects.cuts import Cuts, chain_cuts, cuts_of, is_even_split, resolve_mesh
from xrank.errors import LayoutError
from xrank.layout.local_part import local_part
from xrank.layout.mesh import DeviceMesh
from xrank.layout.notation import LayoutTree, Node, Product, Size
from xrank.layout.tensor_layout import TensorLayout, free_size_names


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
        raise LayoutError(
            "the placements are not one for each axis of the mesh",
            got=f"{len(placements)} placements {list(placements)}",
            want=f"{len(mesh.shape)}, for the mesh {mesh.grid!r}",
        )
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
            cuts[dim].insert(_cuts_before(placement, cuts[dim], packed, mesh, axis), axis)
            strided.add(dim)
        elif placement.is_shard():
            dim = _dim(placement, ndim, axis)
            if pieces.setdefault(dim, 1) != 1:
                raise _factor_error(placement, 1, cuts[dim], pieces[dim], mesh, axis)
            cuts[dim].insert(0, axis)
        elif placement.is_partial():
            _check_sum(placement, axis)
            sums.insert(0, axis)
        elif not placement.is_replicate():
            raise LayoutError(
                f"a layout cannot express the placement along {axis!r}",
                got=repr(placement),
                want="Shard, Replicate, _StridedShard or Partial",
            )
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
    if shape is not None:
        _check_parts(layout.with_mesh(mesh), mesh, {axis for cuts in every for axis in cuts.axes}, shape)
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


def _check_parts(layout: TensorLayout, mesh: DeviceMesh, axes: set[str], shape: Sequence[int]) -> None:
    """Refuse a shape that the layout does not fit on some rank; ranks of equal places hold equal parts."""
    seen = set()
    for rank in mesh.ranks:
        coordinate = mesh.coordinate(rank)
        place = tuple(coordinate[axis] for axis in mesh.axis_names if axis in axes)
        if place not in seen:
            seen.add(place)
            local_part(layout, mesh, coordinate, shape)


def _check_cut(cuts: Cuts, dim: int, layout: TensorLayout, mesh: DeviceMesh, shape: Sequence[int] | None) -> None:
    """Refuse a dim cut in another order than the mesh's if torch's own cut may give ranks other elements."""
    if shape is None:
        if any(kind == "/~" for _, kind in cuts.splits):
            raise LayoutError(
                f"whether placements can express dim {dim} of the layout {layout} depends on its size",
                got=f"ceil chunks by {list(cuts.axes)}, which is not the order of the mesh {mesh.grid!r}",
                want='even splits, "/", or the mesh\'s order of cuts',
                next_step="also give the tensor's shape",
            )
    elif not is_even_split(cuts, shape[dim], mesh) and not _cut_alike(cuts, shape[dim], mesh):
        raise LayoutError(
            f"placements cannot express dim {dim} of the layout {layout}: it is uneven, cut in another order than the "
            "mesh's, and torch's own cut gives the ranks other elements",
            got=f"{shape[dim]} positions, cut by {list(cuts.axes)} of the mesh {mesh.grid!r}",
            want="a size that divides, or the mesh's order of cuts",
        )


def _check_sum(placement: Any, axis: str) -> None:
    """Refuse partial results other than plain sums; embeddings' masked ones must be masked before the sum."""
    operation = getattr(placement, "reduce_op", None)
    if type(placement).__name__ != "Partial" or operation != "sum":
        raise LayoutError(
            f"the ranks along {axis!r} hold partial results that are not addends of a sum",
            got=repr(placement),
            want='Partial("sum"), Shard or Replicate',
            next_step="reduce the tensor before: redistribute it to Replicate or Shard",
        )


def _several_cuts_error(dim: int, axes: Sequence[str], where: str, pieces: int) -> LayoutError:
    """Return the error that several axes cut a packed dim.

    The same placements have several meanings with equal shapes. FSDP2 over a packed dim cuts the local tensor into
    chunks (_fsdp_param.py:_init_sharding_spec_tp calls this ``_StridedShard(dim, tp)``). transformers, when it loads
    into such parameters, and `distribute_tensor` cut the whole dim from the first mesh axis on
    (transformers/distributed/sharding_utils.py:shard_tensor). torch 2.13's `full_tensor` joins both wrongly.
    """
    over = f"({pieces} d{dim}/~{axes[-1]})/~{axes[0]}"
    return LayoutError(
        f"dim {dim} of {where} has {pieces} pieces and is cut by several axes, which torch and transformers cut in one "
        "way or another, and gather in a third",
        got=f"cuts by {list(axes)}",
        want="one axis that cuts the pieces",
        next_step=f"keep the local tensors, with a layout of their cuts: {over!r} where FSDP2 cut them, then load "
        "nothing into them by transformers",
    )


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
            raise LayoutError(
                f"the ranks along {axis!r} do not rise, and torch does not define which of them holds which part",
                got=f"ranks {list(mesh.ranks)} on the mesh {mesh.grid!r}",
                want=f"rising ranks along {axis!r}, as init_device_mesh makes them",
                next_step="make the mesh with init_device_mesh, or gather the tensor with full_tensor() first",
            )


def _dim(placement: Any, ndim: int, axis: str) -> int:
    dim = operator.index(placement.dim)
    if not -ndim <= dim < ndim:
        raise LayoutError(
            f"the placement along {axis!r} cuts a dim that the tensor does not have",
            got=repr(placement),
            want=f"a dim of {ndim}",
        )
    return dim % ndim


def _cuts_before(placement: Any, axes: Sequence[str], packed: int, mesh: DeviceMesh, axis: str) -> int:
    """Return how many of the known cuts, from the first on, make the parts that a strided shard's factor counts."""
    factor = int(placement.split_factor)
    parts = packed
    for count, later in enumerate((*axes, None)):
        if parts == factor:
            return count
        if later is not None:
            parts *= mesh.axis_length(later)
    raise _factor_error(placement, factor, axes, packed, mesh, axis)


def _factor_error(
    placement: Any, factor: int, axes: Sequence[str], packed: int, mesh: DeviceMesh, axis: str
) -> LayoutError:
    of_pieces = "" if packed == 1 else f", each of its {packed} pieces by itself"
    return LayoutError(
        f"the shard along {axis!r} counts {factor} parts, which no cuts of that dim make",
        got=f"{placement!r} on the mesh {mesh.grid!r}, where {list(axes) or 'no axes'} cut the dim too{of_pieces}",
        want="the product of the lengths of the axes that cut the dim before it, times its pieces",
    )
