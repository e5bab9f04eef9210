"""Infer the global shape of a tensor from the local shapes on ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

from xrank.errors import IncompleteError, LayoutError
from xrank.layout.binding import (
    check_shape,
    check_sizes,
    collect_known_names,
    count_names_of_dim,
    find_least,
    global_size,
    names_of_dim,
    solve_dims,
    unknown_size_error,
)
from xrank.layout.dim_part import cut_bounds, evaluate_count
from xrank.layout.local_part import holds, local_part, places_of
from xrank.layout.mesh import DeviceMesh
from xrank.layout.notation import Flat, Node, Pad, Parts, Product, Size, Split, axes_of, children, render_dim, walk
from xrank.layout.tensor_layout import TensorLayout, axis_lengths

_Place = tuple[int, ...]


def infer_shape(
    layout: TensorLayout,
    mesh: DeviceMesh,
    local_shapes: Mapping[int, Sequence[int]],
    *,
    sizes: Mapping[str, int] | None = None,
) -> tuple[int, ...]:
    """Return the global shape of a tensor from the local shapes on ranks.

    There must be a rank for each place along the axes that cut the tensor; other axes do not matter.

    Args:
        layout: the tensor's layout.
        mesh: the mesh of the ranks.
        local_shapes: rank -> its local shape, pads included.
        sizes: sizes by name, for names that local shapes do not determine: in a pad, or several in one dim.

    Raises:
        IncompleteError: there is no rank for a place.
        LayoutError: ranks at the same place disagree, the layout does not give these shapes, or several global shapes
            would give them.
    """
    shapes = {rank: check_shape(shape) for rank, shape in local_shapes.items()}
    at = {rank: _places_by_axis(layout, mesh, rank) for rank in shapes}
    for rank, shape in shapes.items():
        if len(shape) != len(layout.dims):
            raise LayoutError(
                f"rank {rank}'s local shape {shape} does not have the dims of the layout {layout}",
                rank=rank,
                got=f"{len(shape)} dims",
                want=f"{len(layout.dims)} dims",
            )
        if at[rank] is None:
            raise LayoutError(
                f"rank {rank} has a part, but holds none by the layout {layout}",
                rank=rank,
                got=str(shape),
                want="no part",
                next_step="correct the layout's \"where\", or the mesh's order of ranks",
            )
    if not shapes:
        raise IncompleteError(
            f"no rank's local shape is given for the layout {layout}",
            want="one rank or more",
            next_step="give the local shapes of all ranks",
        )
    holders = {rank: places for rank, places in at.items() if places is not None}
    inferred = _Inference(layout, mesh, shapes, holders, check_sizes(sizes)).shape()
    for rank, shape in shapes.items():
        # The sizes came from sums over ranks and loose rules, which a wrong layout may also satisfy.
        expected = local_part(layout, mesh, mesh.coordinate(rank), inferred, sizes=sizes)
        if expected is not None and shape != expected.shape:
            raise LayoutError(
                f"rank {rank}'s local shape is not the one that the layout {layout} gives for {inferred}",
                rank=rank,
                got=str(shape),
                want=str(expected.shape),
                next_step="correct the layout, or the mesh's order of ranks",
            )
    return inferred


def _places_by_axis(layout: TensorLayout, mesh: DeviceMesh, rank: int) -> dict[str, int] | None:
    """Return a rank's places along the layout's axes; None for a rank that holds nothing."""
    coordinate = mesh.coordinate(rank)
    if not holds(layout, mesh, coordinate):
        return None
    return {axis: place for axis, _, place in places_of(layout, mesh, coordinate)[1]}


class _Inference:
    """The local shapes of one tensor, and the sizes that they determine."""

    def __init__(
        self,
        layout: TensorLayout,
        mesh: DeviceMesh,
        shapes: Mapping[int, tuple[int, ...]],
        holders: Mapping[int, Mapping[str, int]],
        sizes: Mapping[str, int],
    ) -> None:
        self._layout, self._mesh = layout, mesh
        self._shapes, self._holders = shapes, holders
        self._lengths = axis_lengths(mesh, layout.view_mesh)
        self._bound = collect_known_names(layout.tree, self._lengths, sizes)

    def shape(self) -> tuple[int, ...]:
        dims = self._layout.dims
        observed = [self._local_sizes(i) for i in range(len(dims))]
        # If the parts at all places partition the dim, its size is their sum, and its names are not needed.
        found = {i: sum(observed[i].values()) for i, dim in enumerate(dims) if _is_partition(dim)}
        solve_dims(self._layout.tree, found, self._bound)
        waiting = [i for i in range(len(dims)) if i not in found]
        # Dims with fewer unknown names first: they may determine names of other dims.
        waiting.sort(key=lambda i: len(self._unknown(dims[i])))
        for i in waiting:
            unknown = self._unknown(dims[i])
            if len(unknown) > 1:
                raise unknown_size_error(self._layout.tree, unknown[0])
            for name in count_names_of_dim(dims[i]):
                if name not in self._bound:
                    raise unknown_size_error(self._layout.tree, name)
            for name in unknown:
                self._bound[name] = self._solve_name(i, name, observed[i])
            found[i] = global_size(dims[i], self._bound)
        return tuple(found[i] for i in range(len(dims)))

    def _unknown(self, dim: Node) -> list[str]:
        return [name for name in names_of_dim(dim) if name not in self._bound]

    def _local_sizes(self, dim: int) -> dict[_Place, int]:
        """Return a dim's local size at each place along the axes that cut it."""
        axes = self._layout.cut_axes[dim]
        first_at: dict[_Place, int] = {}
        for rank, shape in self._shapes.items():
            place = tuple(self._holders[rank][axis] for axis in axes)
            first = first_at.setdefault(place, rank)
            if self._shapes[first][dim] != shape[dim]:
                raise LayoutError(
                    f"ranks {first} and {rank} hold the same part of dim {dim} of the layout {self._layout}, "
                    "with different sizes",
                    rank=rank,
                    got=f"rank {first}: {self._shapes[first]}, rank {rank}: {shape}",
                    want="equal sizes of that dim",
                    next_step="correct the layout, or the mesh's order of ranks",
                )
        for place in self._places(axes):
            if place not in first_at:
                where = ", ".join(f"{axis}={at}" for axis, at in zip(axes, place, strict=True))
                raise IncompleteError(
                    f"no rank's local shape is given at {where}, which dim {dim} of the layout {self._layout} needs",
                    got=f"ranks {sorted(self._shapes)[:16]}",
                    want=f"a rank at {where}",
                    next_step="give the local shapes of all ranks",
                )
        return {place: self._shapes[rank][dim] for place, rank in first_at.items()}

    def _places(self, axes: Sequence[str]) -> Iterator[_Place]:
        """Yield the places of the mesh along these axes."""
        if self._layout.view_mesh is None:
            yield from product(*(range(self._lengths[axis]) for axis in axes))
            return
        # Axes of the mesh and of its view depend on each other, so only the ranks' coordinates are places.
        for rank in self._mesh.ranks:
            at = _places_by_axis(self._layout, self._mesh, rank)
            if at is not None:
                yield tuple(at[axis] for axis in axes)

    def _solve_name(self, i: int, name: str, observed: Mapping[_Place, int]) -> int:
        """Return the only size of a name that gives a dim the local sizes on ranks."""
        dim, axes = self._layout.dims[i], self._layout.cut_axes[i]
        target = sum(observed.values())

        def total(value: int) -> int:
            # Strict rules would raise at candidates that do not divide, and a binary search needs a value for each.
            sizes = {**self._bound, name: value}
            return sum(
                _loose_size(dim, sizes, self._lengths, dict(zip(axes, place, strict=True))) for place in observed
            )

        # Each position of the dim is on some rank, so no size exceeds the sum of the local sizes.
        least = find_least(total, target, target)
        if least is None or total(least) != target:
            raise LayoutError(
                f"no size {name!r} gives the ranks dim {i} of the layout {self._layout}, {render_dim(dim)}",
                got=f"local sizes {sorted(set(observed.values()))[:8]}",
                want="sizes that the layout gives",
                next_step="correct the layout, or the mesh's order of ranks",
            )
        # A pad rounds several sizes up to the same one; guessing among them would add or lose elements.
        over = find_least(total, target + 1, 2 * target + 1)
        most = target if over is None else over - 1
        if most > least:
            raise LayoutError(
                f"the local shapes do not determine the size {name!r} of the layout {self._layout}",
                got=f"any size from {least} to {most} would give them",
                want=f"the number that {name!r} stands for",
                next_step=f"give it in sizes={{{name!r}: ...}}, in the [sizes] table of a layout file, or as a shape",
            )
        return least


def _is_partition(node: Node) -> bool:
    """Return whether local sizes at all places add up to the global size: no pads, all parts cut by the same axes."""
    for below in walk(node):
        if isinstance(below, Pad) or (isinstance(below, Flat) and below.multiple is not None):
            return False
        if isinstance(below, Parts) and len({frozenset(axes_of(child)) for child in children(below)}) > 1:
            return False
        if isinstance(below, Flat):
            axes = {frozenset(axis for dim in member.dims for axis in axes_of(dim)) for member in below.members}
            if len(axes) > 1:
                return False
    return True


def _loose_size(node: Node, sizes: Mapping[str, int], lengths: Mapping[str, int], at: Mapping[str, int]) -> int:
    """Return a dim's local size by non-decreasing rules: even cuts are ceil chunks, and lists are truncated."""
    match node:
        case Size():
            return global_size(node, sizes)
        case Product(factors):
            return prod(_loose_size(factor, sizes, lengths, at) for factor in factors)
        case Parts(parts):
            return sum(_loose_size(part.of, sizes, lengths, at) for part in parts)
        case Pad(of, multiple):
            step = evaluate_count(multiple, sizes)
            return -(-_loose_size(of, sizes, lengths, at) // step) * step
        case Flat(members, multiple):
            size = sum(prod(_loose_size(dim, sizes, lengths, at) for dim in member.dims) for member in members)
            step = 1 if multiple is None else evaluate_count(multiple, sizes)
            return -(-size // step) * step
        case Split(of, axis):
            size = _loose_size(of, sizes, lengths, at)
            if node.sizes is not None:
                listed = [evaluate_count(count, sizes, least=0) for count in node.sizes][: at[axis] + 1]
                low = sum(listed[: at[axis]])
                return max(0, min(sum(listed), size) - min(low, size))
            kind = "/~" if node.kind == "/" else node.kind
            low, high = cut_bounds(Split(of, axis, kind, node.unit), size, lengths[axis], at[axis], sizes)
            return high - low
