"""Shardings: which axes of a mesh cut which dims of a tensor, and along which axes devices hold addends of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from xrank.errors import LayoutError
from xrank.layout.dim_part import cut_bounds
from xrank.layout.mesh import DeviceMesh
from xrank.layout.notation import LayoutTree, Size, Split, SplitKind
from xrank.layout.tensor_layout import TensorLayout, free_size_names

__all__ = ["FULL", "DimSharding", "ShardingLike", "TensorSharding", "as_sharding", "bounds_of", "canonical"]


def _names(names: str | Iterable[str]) -> tuple[str, ...]:
    told = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else (names,)
    for name in told:
        if not isinstance(name, str):
            raise LayoutError("a mesh axis is told by its name", got=repr(name), want='such as "x"')
    return told


@dataclass(frozen=True, slots=True)
class DimSharding:
    """How one dim is cut: by no axis (it is full), by one, or by several, one within the other.

    Args:
        axes: the axes that cut, major first; a name alone is one axis.
        kind: sizes that do not divide: ``/=`` as `numpy.array_split` (7 over 4 is 2, 2, 2, 1), ``/~`` as
            `torch.chunk`, with empty shards at the end where chunks run out (6 over 4 is 2, 2, 2, 0), ``/`` refused.

    Raises:
        LayoutError: an axis is named twice, or is no name.
    """

    axes: tuple[str, ...] = ()
    kind: SplitKind = "/="

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", _names(self.axes))
        if self.kind not in ("/", "/~", "/="):
            raise LayoutError(f"a dim cannot be cut by {self.kind!r}", got=repr(self.kind), want='"/", "/~" or "/="')
        for axis in self.axes:
            if self.axes.count(axis) > 1:
                raise LayoutError(
                    f"the axis {axis!r} cuts one dim twice", got=str(list(self.axes)), want="each axis once"
                )

    @property
    def full(self) -> bool:
        """Whether no axis cuts."""
        return not self.axes

    @property
    def axis(self) -> str | None:
        """The one axis that cuts; None where none or several do."""
        return self.axes[0] if len(self.axes) == 1 else None

    def num_shards(self, mesh: DeviceMesh) -> int:
        """Return the number of shards on a mesh."""
        return prod(mesh.axis_length(axis) for axis in self.axes)

    def upto(self, count: int) -> DimSharding:
        """Return the cut by the first so many axes alone."""
        return DimSharding(self.axes[:count], self.kind)


FULL = DimSharding()
"""A dim that every device holds whole."""


@dataclass(frozen=True, slots=True, init=False)
class TensorSharding:
    """How a tensor is cut over a mesh.

    Args:
        dims: one entry a dim: a `DimSharding`, an axis' name, several names, or None for a full dim.
        sums: axes along which the devices hold addends of the tensor, which is their sum.

    Raises:
        LayoutError: an axis has two roles: it cuts two dims, or cuts and sums.

    >>> sharding = TensorSharding(("x", None))
    >>> str(sharding)
    '[d0/=x, d1]'
    >>> sharding.slices(DeviceMesh((2,), ("x",)), {"x": 1}, (6, 4))
    ((3, 6), (0, 4))
    """

    dims: tuple[DimSharding, ...]
    sums: tuple[str, ...]

    def __init__(
        self, dims: Iterable[DimSharding | str | Iterable[str] | None], sums: str | Iterable[str] = ()
    ) -> None:
        object.__setattr__(self, "dims", tuple(map(_as_dim, dims)))
        object.__setattr__(self, "sums", _names(sums))
        roles: dict[str, str] = {}
        named = [(axis, f"dim {place}") for place, dim in enumerate(self.dims) for axis in dim.axes]
        for axis, role in (*named, *((axis, "sum") for axis in self.sums)):
            if axis in roles:
                raise LayoutError(
                    f"the axis {axis!r} has two roles in the sharding {self}: {roles[axis]} and {role}",
                    got=str(self),
                    want="each axis in one dim, or in the sum",
                    next_step="cut one of them by another axis of the mesh, or hold it full",
                )
            roles[axis] = role

    def __getitem__(self, dim: int) -> DimSharding:
        return self.dims[dim]

    def __str__(self) -> str:
        dims = (f"d{i}" + "".join(f"{dim.kind}{axis}" for axis in dim.axes) for i, dim in enumerate(self.dims))
        return f"[{', '.join(dims)}]" + "".join(f" sum({axis})" for axis in self.sums)

    @classmethod
    def replicated(cls, num_dims: int) -> TensorSharding:
        """Return the sharding of a tensor that every device holds whole."""
        return cls((FULL,) * num_dims)

    @classmethod
    def from_layout(cls, layout: TensorLayout | str) -> TensorSharding:
        """Return the sharding that a layout, or its text, says: ``"[m/x, k/~y]"``.

        Raises:
            LayoutError: the layout says more than which axes cut which dim.
        """
        layout = TensorLayout.parse(layout) if isinstance(layout, str) else layout
        if layout.tree.view is not None or layout.tree.where:
            raise _too_rich(layout, "a view" if layout.tree.view is not None else '"where"')
        dims = []
        for position, node in enumerate(layout.dims):
            axes: list[str] = []
            kinds: dict[SplitKind, None] = {}
            while isinstance(node, Split) and node.unit is None and node.sizes is None:
                axes.insert(0, node.axis)
                kinds[node.kind] = None
                node = node.of
            if not isinstance(node, Size) or len(kinds) > 1:
                raise _too_rich(
                    layout, f"cuts of several kinds in dim {position}" if len(kinds) > 1 else f"dim {position}"
                )
            dims.append(DimSharding(tuple(axes), *kinds) if axes else FULL)
        return cls(tuple(dims), layout.tree.sums)

    def to_layout(self, mesh: DeviceMesh | None = None) -> TensorLayout:
        """Return the layout that says the same."""
        names = free_size_names(len(self.dims), (*self.axes, *(mesh.axis_names if mesh else ())))
        nodes: list[Size | Split] = []
        for name, dim in zip(names, self.dims, strict=True):
            node: Size | Split = Size(name)
            for axis in dim.axes:
                node = Split(node, axis, dim.kind)
            nodes.append(node)
        return TensorLayout.from_tree(LayoutTree(tuple(nodes), sums=self.sums), mesh)

    @property
    def full(self) -> bool:
        """Whether every device holds the whole tensor."""
        return not self.axes

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that has a role."""
        return (*(axis for dim in self.dims for axis in dim.axes), *self.sums)

    def sharded_at(self, dim: int) -> bool:
        """Say whether this dim is cut and nothing else is."""
        return not self.dims[dim].full and len(self.axes) == len(self.dims[dim].axes)

    def axes_sharded_at(self, places: Mapping[str, int]) -> bool:
        """Say whether each of these axes alone cuts its dim, and nothing else is cut: ``{"x": 0, "y": 1}``."""
        return len(self.axes) == len(places) and all(self.dims[dim].axis == axis for axis, dim in places.items())

    def without_sums(self) -> TensorSharding:
        """Return the sharding of the summed tensor."""
        return TensorSharding(self.dims)

    def slices(
        self, mesh: DeviceMesh, coordinate: Mapping[str, int], shape: Sequence[int]
    ) -> tuple[tuple[int, int], ...]:
        """Return the range of each dim that the device at a coordinate holds.

        Raises:
            LayoutError: the tensor has another number of dims, an axis is none of the mesh, or a cut by ``/`` does not
                divide.
        """
        self.check(mesh, shape)
        return tuple(bounds_of(dim, size, mesh, coordinate) for dim, size in zip(self.dims, shape, strict=True))

    def check(self, mesh: DeviceMesh, shape: Sequence[int]) -> None:
        """Refuse a tensor of another number of dims, and axes that the mesh has not."""
        mesh.check_axes(self.axes)
        if len(shape) != len(self.dims):
            raise LayoutError(
                f"the sharding {self} is not of a tensor of shape {tuple(shape)}",
                got=f"{len(shape)} dims",
                want=f"{len(self.dims)} dims",
            )


ShardingLike: TypeAlias = TensorSharding | TensorLayout | str
"""A sharding, a layout that says one, or a layout's text."""


def as_sharding(sharding: ShardingLike) -> TensorSharding:
    """Return the sharding that is meant."""
    return sharding if isinstance(sharding, TensorSharding) else TensorSharding.from_layout(sharding)


def bounds_of(dim: DimSharding, size: int, mesh: DeviceMesh, coordinate: Mapping[str, int]) -> tuple[int, int]:
    """Return the range of a dim's positions that the device at a coordinate holds."""
    low, high = 0, size
    node: Size | Split = Size(size)
    for axis in dim.axes:
        node = Split(node, axis, dim.kind)
        first, last = cut_bounds(node, high - low, mesh.axis_length(axis), coordinate[axis], {})
        low, high = low + first, low + last
    return low, high


def canonical(dim: DimSharding, size: int, mesh: DeviceMesh) -> DimSharding:
    """Return the one sharding that cuts a dim of this size so: axes of one place left out, ``/`` where it divides."""
    axes = tuple(axis for axis in dim.axes if mesh.axis_length(axis) > 1)
    if not axes:
        return FULL
    return DimSharding(axes, "/" if size % prod(map(mesh.axis_length, axes)) == 0 else dim.kind)


def _as_dim(dim: DimSharding | str | Iterable[str] | None) -> DimSharding:
    if isinstance(dim, DimSharding):
        return dim
    return FULL if dim is None else DimSharding(_names(dim))


def _too_rich(layout: TensorLayout, what: str) -> LayoutError:
    return LayoutError(
        f"the layout {layout} is no sharding of the virtual cluster, because of {what}",
        got=str(layout),
        want='dims cut by axes, such as "[m/x/y, k]", and "sum"',
        next_step="write each dim as a size and the axes that cut it, all by / or all by /~ or all by /=",
    )
