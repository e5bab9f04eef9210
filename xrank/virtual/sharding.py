"""Meshes given by their lengths alone, groups of devices, and shardings: which mesh axes cut which dims of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from numbers import Integral
from typing import SupportsIndex, TypeAlias

from xrank.errors import LayoutError, UsageError
from xrank.layout.local_part import cut_bounds
from xrank.layout.mesh import DeviceMesh
from xrank.layout.notation import LayoutTree, Size, Split, SplitKind
from xrank.layout.tensor_layout import TensorLayout, free_size_names

AXES = ("x", "y", "z", "w")
"""Axis names of a mesh given by lengths, outermost first."""


@dataclass(frozen=True, slots=True, init=False)
class MeshIndex:
    """A place in a mesh: ``MeshIndex(1, 3)``, ``x`` 1 and ``y`` 3."""

    places: tuple[int, ...]

    def __init__(self, *places: int) -> None:
        object.__setattr__(self, "places", places)

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    @property
    def x(self) -> int:
        """The place along the first axis."""
        return self.places[0]

    @property
    def y(self) -> int:
        """The place along the second axis; 0 if the mesh has no such axis (as for `z` and `w`)."""
        return self._get_place(1)

    @property
    def z(self) -> int:
        """The place along the third axis."""
        return self._get_place(2)

    @property
    def w(self) -> int:
        """The place along the fourth axis."""
        return self._get_place(3)

    def _get_place(self, number: int) -> int:
        return self.places[number] if number < len(self.places) else 0


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """A grid of one to four axes, x outermost: ``Mesh(2, 4)`` has eight devices; y varies fastest.

    Iteration yields every `MeshIndex` in device order.

    Raises:
        UsageError: the number of axes is not 1 to 4.
        LayoutError: a length is not an integer of at least 1.

    >>> Mesh(2, 4).flat(MeshIndex(1, 3))
    7
    """

    lengths: tuple[int, ...]

    def __init__(self, *lengths: int) -> None:
        if not 1 <= len(lengths) <= len(AXES):
            raise UsageError(
                f"a mesh given by lengths has 1 to {len(AXES)} axes",
                got=f"{len(lengths)} lengths",
                want=f"lengths of {', '.join(AXES)}",
                next_step="give a DeviceMesh, which names its axes: DeviceMesh(shape, axis_names)",
            )
        object.__setattr__(self, "lengths", DeviceMesh(lengths, AXES[: len(lengths)]).shape)

    def __len__(self) -> int:
        return prod(self.lengths)

    def __iter__(self) -> Iterator[MeshIndex]:
        return (MeshIndex(*places) for places in product(*map(range, self.lengths)))

    def flat(self, index: MeshIndex) -> int:
        """Return the number of the device at a place.

        Raises:
            LayoutError: the mesh has no such place.
        """
        if len(index.places) != len(self.lengths):
            raise LayoutError(
                f"{index!r} is not a place in {self!r}",
                got=f"{len(index.places)} numbers",
                want=f"{len(self.lengths)}, one for each axis",
                next_step="give one number for each axis of the mesh",
            )
        return self.device_mesh.rank_at(dict(zip(AXES, index.places, strict=False)))

    def index(self, device: int) -> MeshIndex:
        """Return the place of a device."""
        return MeshIndex(*self.device_mesh.coordinate(device).values())

    @property
    def x_dim(self) -> int:
        """The length of the first axis."""
        return self.lengths[0]

    @property
    def y_dim(self) -> int:
        """The length of the second axis; 1 if the mesh has one axis."""
        return self.lengths[1] if len(self.lengths) > 1 else 1

    @property
    def device_mesh(self) -> DeviceMesh:
        """The same mesh with axis names."""
        return DeviceMesh(self.lengths, AXES[: len(self.lengths)])


MeshLike: TypeAlias = DeviceMesh | Mesh | Sequence[int] | int


def as_device_mesh(mesh: MeshLike) -> DeviceMesh:
    """Convert a mesh to one with axis names; the axes of lengths alone are ``x, y, z, w``."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    if isinstance(mesh, Mesh):
        return mesh.device_mesh
    given: object = mesh
    if isinstance(given, str) or not isinstance(given, Sequence | Integral):
        raise UsageError(
            f"{mesh!r} is not a mesh",
            got=type(mesh).__qualname__,
            want="a number of devices, a tuple of lengths, or a DeviceMesh",
            next_step="name the axes so: DeviceMesh((2, 4), ('dp', 'tp'))",
        )
    return Mesh(*(mesh if isinstance(mesh, Sequence) else (mesh,))).device_mesh


Axes: TypeAlias = str | Sequence[str] | None
Group: TypeAlias = Sequence[int] | None


def group_of(mesh: DeviceMesh, device: int, axes: Axes = None, group: Group = None) -> tuple[int, ...]:
    """Return the group in which a device calls a collective: along mesh axes, in mesh order, or as it is given."""
    if group is None:
        if axes is not None and not isinstance(axes, Iterable):
            raise UsageError(
                f"axes must be names, not {axes!r}", got=repr(axes), want="the name of an axis, or several names"
            )
        names = mesh.axis_names if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        mesh.check_axes(names)
        # Cached for all devices: `DeviceMesh.groups` goes over the whole mesh, and every collective asks.
        return _groups(mesh, names)[device]
    if not isinstance(group, Iterable):
        raise UsageError(
            f"device {device} calls a collective over no group", rank=device, got=repr(group), want="several devices"
        )
    members = tuple(group)

    def refusal(problem: str, want: str, got: str | None = None) -> UsageError:
        return UsageError(
            f"device {device} calls a collective over the group {list(members)}{problem}",
            rank=device,
            got=got,
            want=want,
            next_step="give the same list of distinct devices on each of them, and call only on these",
        )

    if axes is not None:
        raise refusal(" and over axes", "either", f"axes={axes!r}")
    for member in members:
        if not isinstance(member, SupportsIndex) or member not in mesh:
            first = f"{list(mesh.ranks[:16])}{' ...' if mesh.size > 16 else ''}"
            raise refusal(f", but the mesh {mesh.grid!r} has no device {member!r}", f"devices of {first}", repr(member))
        if members.count(member) > 1:
            raise refusal(f", which contains {member} twice", "each once")
    if device not in members:
        raise refusal(", which lacks the device itself", f"{device} among them")
    return members


@lru_cache(maxsize=256)
def _groups(mesh: DeviceMesh, axes: tuple[str, ...]) -> dict[int, tuple[int, ...]]:
    return {device: group for group in mesh.groups(*axes) for device in group}


def _names(names: str | Iterable[str]) -> tuple[str, ...]:
    found = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else (names,)
    for name in found:
        if not isinstance(name, str):
            raise LayoutError("a mesh axis must be a name", got=repr(name), want='such as "x"')
    return found


@dataclass(frozen=True, slots=True)
class DimSharding:
    """How one dim is split: by no axis (the dim is full), by one axis, or by several nested axes.

    Args:
        axes: the axes that split the dim, major first; a single name is one axis.
        kind: the rule for sizes that do not divide evenly: ``/=`` cuts as `numpy.array_split` (7 over 4 is 2, 2, 2, 1),
            ``/~`` as `torch.chunk`, with empty shards at the end (6 over 4 is 2, 2, 2, 0), ``/`` raises an error.

    Raises:
        LayoutError: an axis occurs twice, or is not a string.
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
        """Whether no axis splits the dim."""
        return not self.axes

    @property
    def axis(self) -> str | None:
        """The axis that splits the dim; None without axes or with several."""
        return self.axes[0] if len(self.axes) == 1 else None

    def num_shards(self, mesh: DeviceMesh) -> int:
        """Return the number of shards on a mesh."""
        return prod(mesh.axis_length(axis) for axis in self.axes)

    def upto(self, count: int) -> DimSharding:
        """Return the split by only the first `count` axes."""
        return DimSharding(self.axes[:count], self.kind)


FULL = DimSharding()
"""A dim that every device has completely."""


@dataclass(frozen=True, slots=True, init=False)
class TensorSharding:
    """The cut of a tensor over a mesh.

    Args:
        dims: one entry per dim: a `DimSharding`, an axis name, several names, or None for a full dim.
        sums: axes along which each device has an addend; the tensor is the sum of the addends.

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
        made = (
            FULL if dim is None else dim if isinstance(dim, DimSharding) else DimSharding(_names(dim)) for dim in dims
        )
        object.__setattr__(self, "dims", tuple(made))
        object.__setattr__(self, "sums", _names(sums))
        roles: dict[str, str] = {}
        named = [(axis, f"dim {place}") for place, dim in enumerate(self.dims) for axis in dim.axes]
        for axis, role in (*named, *((axis, "sum") for axis in self.sums)):
            if axis in roles:
                raise LayoutError(
                    f"the axis {axis!r} has two roles in the sharding {self}: {roles[axis]} and {role}",
                    got=str(self),
                    want="each axis in one dim, or in the sum",
                    next_step="use a different axis of the mesh for one of them",
                )
            roles[axis] = role

    def __getitem__(self, dim: int) -> DimSharding:
        return self.dims[dim]

    def __str__(self) -> str:
        dims = (f"d{i}" + "".join(f"{dim.kind}{axis}" for axis in dim.axes) for i, dim in enumerate(self.dims))
        return f"[{', '.join(dims)}]" + "".join(f" sum({axis})" for axis in self.sums)

    @classmethod
    def replicated(cls, num_dims: int) -> TensorSharding:
        """Return the sharding of a tensor that every device has completely."""
        return cls((FULL,) * num_dims)

    @classmethod
    def from_layout(cls, layout: TensorLayout | str) -> TensorSharding:
        """Convert a layout, or its text such as ``"[m/x, k/~y]"``, to a sharding.

        Raises:
            LayoutError: the layout contains more than cuts of dims by axes.
        """
        layout = TensorLayout.parse(layout) if isinstance(layout, str) else layout
        if layout.tree.view is not None or layout.tree.where:
            raise _make_error(layout, "a view" if layout.tree.view is not None else '"where"')
        dims = []
        for position, node in enumerate(layout.dims):
            axes: list[str] = []
            kinds: dict[SplitKind, None] = {}
            while isinstance(node, Split) and node.unit is None and node.sizes is None:
                axes.insert(0, node.axis)
                kinds[node.kind] = None
                node = node.of
            if not isinstance(node, Size) or len(kinds) > 1:
                raise _make_error(
                    layout, f"cuts of several kinds in dim {position}" if len(kinds) > 1 else f"dim {position}"
                )
            dims.append(DimSharding(tuple(axes), *kinds) if axes else FULL)
        return cls(tuple(dims), layout.tree.sums)

    def to_layout(self, mesh: DeviceMesh | None = None) -> TensorLayout:
        """Convert the sharding to a layout."""
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
        """Whether every device has the whole tensor."""
        return not self.axes

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that cut a dim or sum."""
        return (*(axis for dim in self.dims for axis in dim.axes), *self.sums)

    def sharded_at(self, dim: int) -> bool:
        """Return whether this dim is the only one that is cut."""
        return not self.dims[dim].full and len(self.axes) == len(self.dims[dim].axes)

    def axes_sharded_at(self, places: Mapping[str, int]) -> bool:
        """Return whether each of these axes alone cuts its dim and nothing else is cut: ``{"x": 0, "y": 1}``."""
        return len(self.axes) == len(places) and all(self.dims[dim].axis == axis for axis, dim in places.items())

    def without_sums(self) -> TensorSharding:
        """Return the sharding of the summed tensor."""
        return TensorSharding(self.dims)

    def slices(
        self, mesh: DeviceMesh, coordinate: Mapping[str, int], shape: Sequence[int]
    ) -> tuple[tuple[int, int], ...]:
        """Return the (start, stop) of each dim on the device at a coordinate.

        Raises:
            LayoutError: the number of dims differs, the mesh lacks an axis, or a cut by ``/`` does not divide evenly.
        """
        self.check(mesh, shape)
        return tuple(bounds_of(dim, size, mesh, coordinate) for dim, size in zip(self.dims, shape, strict=True))

    def check(self, mesh: DeviceMesh, shape: Sequence[int]) -> None:
        """Check that a tensor has the right number of dims and that the mesh has all axes."""
        mesh.check_axes(self.axes)
        if len(shape) != len(self.dims):
            raise LayoutError(
                f"the sharding {self} is not of a tensor of shape {tuple(shape)}",
                got=f"{len(shape)} dims",
                want=f"{len(self.dims)} dims",
            )


ShardingLike: TypeAlias = TensorSharding | TensorLayout | str
"""A sharding, or an equivalent layout or layout text."""


def as_sharding(sharding: ShardingLike) -> TensorSharding:
    """Convert a layout or its text to a sharding."""
    return sharding if isinstance(sharding, TensorSharding) else TensorSharding.from_layout(sharding)


def bounds_of(dim: DimSharding, size: int, mesh: DeviceMesh, coordinate: Mapping[str, int]) -> tuple[int, int]:
    """Return the (start, stop) of a dim on the device at a coordinate."""
    low, high = 0, size
    node: Size | Split = Size(size)
    for axis in dim.axes:
        node = Split(node, axis, dim.kind)
        # Each axis cuts the range that the axes before it have left.
        first, last = cut_bounds(node, high - low, mesh.axis_length(axis), coordinate[axis], {})
        low, high = low + first, low + last
    return low, high


def canonical(dim: DimSharding, size: int, mesh: DeviceMesh) -> DimSharding:
    """Return the normal form of a dim's cut: without axes of length 1, and with ``/`` if the size divides evenly."""
    axes = tuple(axis for axis in dim.axes if mesh.axis_length(axis) > 1)
    if not axes:
        return FULL
    # All rules cut alike where the size divides evenly, so shardings by different rules are then equal.
    return DimSharding(axes, "/" if size % prod(map(mesh.axis_length, axes)) == 0 else dim.kind)


def _make_error(layout: TensorLayout, what: str) -> LayoutError:
    return LayoutError(
        f"the virtual cluster cannot use the layout {layout} because of {what}",
        got=str(layout),
        want='dims cut by axes, such as "[m/x/y, k]", and "sum"',
        next_step="write each dim as a size and the axes that cut it, all by / or all by /~ or all by /=",
    )
