"""Meshes: ranks in a named grid. The API is Keras', with ranks as devices."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from xrank.errors import LayoutError
from xrank.words import plural

if TYPE_CHECKING:
    import numpy as np


MAX_RANKS = 1 << 22
"""Largest number of ranks in a mesh, so a mistyped grid cannot use up the memory."""

NAME_RULE = 'a letter or "_", then letters, digits, "_" and "."'
"""The rule for names of axes and sizes, for errors."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
# Nine digits are more than MAX_RANKS needs, and no text can stand for a huge number.
_GRID_AXIS = re.compile(r"(?P<name>[^\s=]+)=(?P<length>[0-9]{1,9})")
_DEVICE = re.compile(r"(?P<kind>[A-Za-z]+)(:(?P<rank>[0-9]{1,9}))?")


def is_name(text: object) -> bool:
    """Return whether this text is a valid name of an axis or a size in the notation."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, init=False, repr=False)
class DeviceMesh:
    """A grid of ranks in row-major order: the first axis is outermost, the last one varies fastest.

    Args:
        shape: the length of each axis, 1 or more.
        axis_names: the names of the axes, outermost first.
        devices: the ranks in row-major order: nested sequences, or an object with ``tolist()``. None: ``0 .. n-1``.
            Keras' texts are accepted: ``"cuda:3"`` is rank 3.

    Raises:
        LayoutError: the arguments do not fit each other, or an axis or a rank occurs twice.

    Example:
        >>> mesh = DeviceMesh((2, 2), ("dp", "tp"))
        >>> mesh.coordinate(2), mesh.groups("tp")
        ({'dp': 1, 'tp': 0}, ((0, 1), (2, 3)))
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    ranks: tuple[int, ...] = dataclass_field(repr=False)
    device_kind: str | None = dataclass_field(repr=False, compare=False)
    """The kind in the devices' texts (``"cuda"``); None if the devices are numbers."""
    _positions: Mapping[int, int] = dataclass_field(repr=False, compare=False)
    _hash: int = dataclass_field(repr=False, compare=False)
    """Computed once: thousands of tensors are looked up by their mesh, which may have thousands of ranks."""

    def __init__(self, shape: Sequence[int], axis_names: Sequence[str], devices: Any = None) -> None:
        # Before any list of ranks: a mistyped shape would fill the memory.
        lengths, names = _check_axes(shape, axis_names)
        size = prod(lengths)
        ranks, kind = (tuple(range(size)), None) if devices is None else _ranks_and_kind(devices)
        if len(ranks) != size:
            received = tuple(getattr(devices, "shape", (len(ranks),)))
            what = f"Shape does not match the number of devices. Received: shape={lengths}; devices.shape={received}"
            raise LayoutError(
                what,
                got=plural(len(ranks), "device"),
                want=f"{size} devices, the product of {lengths}",
                # Names of devices, as list_devices() has them, one for each process.
                next_step=f"start {size} processes and call initialize() first, or change the shape" if kind else None,
            )
        # A dict, because to search `ranks` for every rank of a large mesh would be quadratic.
        positions = {rank: position for position, rank in enumerate(ranks)}
        if len(positions) != size:
            twice = next(rank for position, rank in enumerate(ranks) if positions[rank] != position)
            raise LayoutError(f"the mesh holds rank {twice} twice", rank=twice, want="each rank once")
        values = (lengths, names, ranks, kind, positions, hash((lengths, names, ranks)))
        for name, value in zip(DeviceMesh.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return self._hash

    def __contains__(self, rank: object) -> bool:
        return rank in self._positions

    def __reduce__(self) -> tuple[Any, ...]:
        # The constructor makes `_positions` again, so it does not travel along.
        return (DeviceMesh, (self.shape, self.axis_names, self._devices_of()))

    def __repr__(self) -> str:
        return f"<DeviceMesh shape={self.shape}, axis_names={self.axis_names}>"

    @classmethod
    def parse_grid(cls, text: str, ranks: Sequence[int] | None = None) -> DeviceMesh:
        """Parse a grid such as ``"pp=2 dp=2 tp=2"``, outermost axis first; ``ranks`` as ``devices`` of the class."""
        axes: list[tuple[str, int]] = []
        for word in text.split():
            match = _GRID_AXIS.fullmatch(word)
            if match is None:
                want = 'axes as name=length, separated by spaces, such as "dp=2 tp=4"'
                raise LayoutError(f"the grid {text[:200]!r} cannot be read", got=repr(word[:80]), want=want)
            axes.append((match["name"], int(match["length"])))
        return cls([length for _, length in axes], [name for name, _ in axes], ranks)

    @property
    def grid(self) -> str:
        """The grid as a text for `parse_grid`, without the ranks."""
        return " ".join(f"{name}={length}" for name, length in zip(self.axis_names, self.shape, strict=True))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def devices(self) -> np.ndarray[Any, Any]:
        """The devices as given, ranks or texts, in an array of the mesh's shape."""
        import numpy as np

        return np.reshape(np.array(self._devices_of()), self.shape)

    def axis_length(self, name: str) -> int:
        """Return the number of coordinates along an axis."""
        try:
            return self.shape[self.axis_names.index(name)]
        except ValueError:
            what = f"the mesh {self.grid!r} has no axis {name!r}"
            raise LayoutError(what, got=repr(name), want=f"one of {list(self.axis_names)}") from None

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return a rank's place along each axis, outermost axis first."""
        position = self._positions.get(rank)
        if position is None:
            what = f"rank {rank} is not in"
            want = f"one of its {self.size} ranks, {min(self.ranks)} to {max(self.ranks)}"
            raise LayoutError(f"{what} the mesh {self.grid!r}", rank=rank, got=f"rank {rank}", want=want)
        places: list[int] = []
        for length in reversed(self.shape):
            position, place = divmod(position, length)
            places.append(place)
        return dict(zip(self.axis_names, reversed(places), strict=True))

    def rank_at(self, coordinate: Mapping[str, int]) -> int:
        """Return the rank at a coordinate, which must name exactly the axes of the mesh."""
        if coordinate.keys() != set(self.axis_names):
            what = f"a coordinate does not name the axes of the mesh {self.grid!r}"
            raise LayoutError(what, got=str(list(coordinate)), want=str(list(self.axis_names)))
        position = 0
        for name, length in zip(self.axis_names, self.shape, strict=True):
            place = coordinate[name]
            self.check_place(name, place, length)
            position = position * length + place
        return self.ranks[position]

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return groups of ranks that differ only along these axes; each rank is in one group.

        Groups, and ranks in a group, are in the order of the mesh; the order of the axes does not matter.
        """
        self.check_axes(axes)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, places in zip(self.ranks, product(*map(range, self.shape)), strict=True):
            others = tuple(place for name, place in zip(self.axis_names, places, strict=True) if name not in axes)
            found.setdefault(others, []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())

    def submesh(self, **places: int) -> DeviceMesh:
        """Return the part of the mesh at these places, without their axes: ``mesh.submesh(pp=0)``."""
        self.check_axes(places)
        kept = [name for name in self.axis_names if name not in places]
        lengths = [self.axis_length(name) for name in kept]
        ranks = [self.rank_at({**places, **dict(zip(kept, at, strict=True))}) for at in product(*map(range, lengths))]
        return DeviceMesh(lengths, kept, self._devices_of(ranks))

    def transpose(self, *axes: str) -> DeviceMesh:
        """Return the mesh with its axes in a different order; every rank keeps its coordinate."""
        self.check_axes(axes)
        if len(axes) != len(self.axis_names):
            what = f"an order of the mesh {self.grid!r} names all of its axes"
            raise LayoutError(what, got=str(list(axes)), want=str(list(self.axis_names)))
        lengths = [self.axis_length(name) for name in axes]
        ranks = [self.rank_at(dict(zip(axes, at, strict=True))) for at in product(*map(range, lengths))]
        return DeviceMesh(lengths, axes, self._devices_of(ranks))

    def view(self, grid: str) -> DeviceMesh:
        """Return a second factorization of the same ranks, in the same order: ``mesh.view("pp=2 edp=1 ep=4")``."""
        return DeviceMesh.parse_grid(grid, self._devices_of())

    def check_place(self, axis: str, place: int, length: int) -> None:
        """Raise an error for a place outside an axis of this length, of the mesh or of its view."""
        if not 0 <= place < length:
            what = f"the mesh {self.grid!r} has no index {place} along {axis!r}"
            raise LayoutError(what, got=f"{axis}={place}", want=f"0 to {length - 1}")

    def check_axes(self, axes: Iterable[str]) -> None:
        """Raise an error for names that are not axes of the mesh, or that occur twice."""
        seen: set[str] = set()
        for axis in axes:
            self.axis_length(axis)
            if axis in seen:
                raise LayoutError(f"the axis {axis!r} is named twice", got=repr(axis), want="each axis once")
            seen.add(axis)

    def _devices_of(self, ranks: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Return ranks in the form of the given devices; None: all ranks of the mesh."""
        ranks = self.ranks if ranks is None else ranks
        return tuple(ranks) if self.device_kind is None else tuple(f"{self.device_kind}:{rank}" for rank in ranks)


def _check_axes(shape: Sequence[int], axis_names: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return both as tuples; checks and messages are Keras' (keras/src/distribution)."""
    try:
        lengths, names = tuple(shape), tuple(axis_names)
    except TypeError:
        got = f"shape={shape!r}, axis_names={axis_names!r}"
        want = "shape=(2, 4), axis_names=('batch', 'model')"
        raise LayoutError("Shape and axis_names are not sequences", got=got, want=want) from None

    def refusal(problem: str, got: str | None = None, want: str | None = None) -> LayoutError:
        return LayoutError(f"{problem}. Received: shape={lengths}, axis_names={names}", got=got, want=want)

    if not lengths or not names:
        raise refusal("Shape and axis_names cannot be empty")
    if len(lengths) != len(names):
        raise refusal("Shape and axis_names should have same size")
    for name in names:
        if not is_name(name):
            raise refusal(f"no layout could write the axis name {name!r}", repr(name), NAME_RULE)
        if names.count(name) > 1:
            raise refusal(f"the mesh has the axis {name!r} twice", want="each axis name once")
    lengths = tuple(_as_int(length, "the length of an axis") for length in lengths)
    if min(lengths) < 1:
        raise refusal("an axis has no place", str(min(lengths)), "lengths of 1 or more")
    if prod(lengths) > MAX_RANKS:
        raise refusal("the mesh is too large", f"{prod(lengths)} ranks", f"at most {MAX_RANKS}")
    return lengths, names


def _flatten(devices: Any) -> Iterator[int | str]:
    """Yield devices row-major from nested sequences, arrays or tensors."""
    if hasattr(devices, "tolist"):
        # At once: the elements of a tensor, taken one by one, would be tensors.
        devices = devices.tolist()
    if isinstance(devices, str):
        yield devices
    elif isinstance(devices, Sequence) and not isinstance(devices, bytes):
        for part in devices:
            yield from _flatten(part)
    else:
        rank = _as_int(devices, "a device of a mesh")
        if rank < 0:
            raise LayoutError("a mesh contains a device that is not a rank", got=str(rank), want="a rank, 0 or more")
        yield rank


def _ranks_and_kind(devices: Any) -> tuple[tuple[int, ...], str | None]:
    """Return the ranks of devices, and the kind in their texts."""
    ranks: list[int] = []
    kinds: dict[str | None, None] = {}
    for device in _flatten(devices):
        match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
        if isinstance(device, str) and match is None:
            want = 'a rank, or a text such as "cuda:3"'
            raise LayoutError("a mesh contains a device that is not a rank", got=repr(device)[:80], want=want)
        ranks.append(int(device) if match is None else int(match["rank"] or 0))
        kinds[None if match is None else match["kind"].lower()] = None
    if len(kinds) > 1:
        what = "the devices of a mesh are of several kinds"
        raise LayoutError(what, got=str(list(kinds)), want="all ranks, or one kind")
    return tuple(ranks), next(iter(kinds), None)


def _as_int(value: Any, label: str) -> int:
    try:
        # operator.index takes True for 1.
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise LayoutError(f"{label} is not an integer", got=repr(value), want="an integer")


class MeshIndex(Struct, frozen=True):
    """One place of a mesh; ``index["tp"]`` is the place along an axis.

    Args:
        mesh: the mesh.
        places: the place along each axis, outermost first.

    Raises:
        LayoutError: the mesh does not have this place.

    Example:
        >>> index = MeshIndex(DeviceMesh((2, 2), ("dp", "tp")), (1, 0))
        >>> index["dp"], index.rank, index.shift("tp").rank
        (1, 2, 3)
    """

    mesh: DeviceMesh
    places: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.places) != len(self.mesh.shape):
            what = f"the coordinate {self.places} is not in the mesh {self.mesh.grid!r}"
            raise LayoutError(what, got=f"{len(self.places)} axes", want=f"{len(self.mesh.shape)} axes")
        self.mesh.rank_at(self.coordinate)

    def __getitem__(self, axis: str) -> int:
        self.mesh.axis_length(axis)
        return self.coordinate[axis]

    @classmethod
    def from_rank(cls, mesh: DeviceMesh, rank: int) -> MeshIndex:
        """Return a rank's place in a mesh."""
        return cls(mesh, tuple(mesh.coordinate(rank).values()))

    @classmethod
    def list_all(cls, mesh: DeviceMesh) -> tuple[MeshIndex, ...]:
        """Return all places of a mesh, the last axis fastest."""
        return tuple(cls(mesh, places) for places in product(*map(range, mesh.shape)))

    @property
    def coordinate(self) -> dict[str, int]:
        """Axis -> place."""
        return dict(zip(self.mesh.axis_names, self.places, strict=True))

    @property
    def rank(self) -> int:
        """The rank at this place."""
        return self.mesh.rank_at(self.coordinate)

    def with_places(self, **places: int) -> MeshIndex:
        """Return the index with different places along some axes."""
        self.mesh.check_axes(places)
        return MeshIndex(self.mesh, tuple({**self.coordinate, **places}.values()))

    def shift(self, axis: str, by: int = 1) -> MeshIndex:
        """Return the index `by` places further along an axis, cyclically."""
        return self.with_places(**{axis: (self[axis] + by) % self.mesh.axis_length(axis)})

    def neighbors(self, *axes: str) -> tuple[MeshIndex, ...]:
        """Return the indices one place before and after along these axes, each once; without axes along all."""
        self.mesh.check_axes(axes)
        near = (self.shift(axis, by) for axis in axes or self.mesh.axis_names for by in (-1, 1))
        return tuple(index for index in dict.fromkeys(near) if index != self)


MEGATRON_ORDER = "tp-cp-ep-dp-pp"
"""Megatron's default: tensor-parallel ranks are adjacent (megatron/core/parallel_state.py: RankGenerator)."""


class MeshViews(Struct, frozen=True):
    """One world of ranks with several factorizations; a layout belongs to one of them.

    Args:
        main: the main factorization.
        others: (name, mesh) of each view, with the same ranks in the same order.

    Raises:
        LayoutError: a view has different ranks, or a name occurs twice.

    Example:
        >>> mesh = DeviceMesh((2, 2), ("dp", "tp"))
        >>> MeshViews(mesh, (("expert", mesh.view("ep=4")),)).view("expert").grid
        'ep=4'
    """

    main: DeviceMesh
    others: tuple[tuple[str, DeviceMesh], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.others]
        for name, mesh in self.others:
            if names.count(name) > 1:
                raise LayoutError(f"the view {name!r} occurs twice", want="each name once")
            if mesh.ranks != self.main.ranks:
                what = f"the view {name!r} does not have the same ranks as the mesh {self.main.grid!r}"
                want = f"its {self.main.size} ranks, in their order"
                raise LayoutError(what, got=f"{mesh.grid!r}, {mesh.size} ranks", want=want)

    def view(self, name: str) -> DeviceMesh:
        """Return the view with this name."""
        for known, mesh in self.others:
            if known == name:
                return mesh
        want = f"one of {[known for known, _ in self.others]}"
        raise LayoutError(f"there is no view {name!r}", got=repr(name), want=want)

    def having(self, *axes: str) -> DeviceMesh:
        """Return the mesh with all of these axes: the main mesh, or else the only view that has them.

        Raises:
            LayoutError: no mesh or several views have them.
        """
        wanted = set(axes)
        if wanted <= set(self.main.axis_names):
            return self.main
        found = [(name, mesh) for name, mesh in self.others if wanted <= set(mesh.axis_names)]
        if len(found) != 1:
            what = f"{'several views have' if found else 'no view has'} the axes {sorted(wanted)}"
            grids = [self.main.grid, *(mesh.grid for _, mesh in self.others)]
            got = str([name for name, _ in found] or grids)
            raise LayoutError(what, got=got, want="one view with all of them")
        return found[0][1]


def mesh_from_order(order: str, lengths: Mapping[str, int], ranks: Sequence[int] | None = None) -> DeviceMesh:
    """Return the mesh of an order such as ``"tp-dp-pp"``: the first name varies fastest, as in Megatron.

    Axes of length 1 that the order omits are outermost. LayoutError if it names an axis twice or an unknown one, or
    omits one that is longer than 1.
    """
    names = order.lower().split("-")
    for name in names:
        if name not in lengths or names.count(name) > 1:
            what = f"the order {order!r} names {name!r} {'twice' if name in lengths else ', which has no length'}"
            raise LayoutError(what, got=repr(name), want=f"each of {list(lengths)} once")
    for name, length in lengths.items():
        if name not in names:
            if length != 1:
                what = f"the order {order!r} leaves out {name!r}, which has {length} places"
                raise LayoutError(what, got=f"{name}={length}", want=f"{name!r} in the order")
            names.append(name)
    # In an order the first name varies fastest, in a mesh the last one.
    names.reverse()
    return DeviceMesh([lengths[name] for name in names], names, ranks)


def megatron_views(
    world_size: int,
    *,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    pp: int = 1,
    etp: int | None = None,
    order: str = MEGATRON_ORDER,
    ranks: Sequence[int] | None = None,
) -> MeshViews:
    """Return Megatron's two factorings of a world: the main one for dense weights, the view "expert" for experts.

    The main mesh has the axes tp, cp, dp, pp; the view has etp, ep, edp, pp at the corresponding places in the order
    (parallel_state.py: initialize_model_parallel, decoder_rank_generator and expert_decoder_rank_generator). The
    data-parallel lengths follow from the size of the world.

    Args:
        world_size: the number of ranks.
        tp: tensor parallel ranks of dense weights.
        cp: context parallel ranks.
        ep: expert parallel ranks.
        pp: pipeline stages.
        etp: tensor parallel ranks inside an expert; None: as tp.
        order: the axes, fastest first.
        ranks: the ranks, if not 0, 1, 2, ...

    Raises:
        LayoutError: the lengths do not divide the world, or the two factorings have different pipeline stages.
    """
    etp = tp if etp is None else etp
    names = order.lower().split("-")
    # Both factorings divide the same ranks: dense weights ignore ep, experts ignore cp.
    dp = _remaining(world_size, {"tp": tp, "cp": cp, "pp": pp})
    edp = _remaining(world_size, {"etp": etp, "ep": ep, "pp": pp})
    own = "-".join(name for name in names if name != "ep")
    main = mesh_from_order(own, {"tp": tp, "cp": cp, "dp": dp, "pp": pp}, ranks)
    renamed = {"tp": "etp", "dp": "edp"}
    own = "-".join(renamed.get(name, name) for name in names if name != "cp")
    expert = mesh_from_order(own, {"etp": etp, "ep": ep, "edp": edp, "pp": pp}, ranks)
    if ep > 1 and "ep" not in names:
        raise LayoutError(f"the order {order!r} leaves out 'ep', which has {ep} places", want="'ep' in the order")
    # Experts of a layer are on the stage of its dense weights, so both meshes must agree on the stages.
    if set(map(frozenset, main.groups("pp"))) != set(map(frozenset, expert.groups("pp"))):
        what = f"in the order {order!r} dense weights and experts have different pipeline stages"
        got = f"ranks {list(main.groups('pp')[0])} and {list(expert.groups('pp')[0])}"
        raise LayoutError(what, got=got, want="the same groups along 'pp'", next_step="put pp last in the order")
    return MeshViews(main, (("expert", expert),))


def _remaining(world_size: int, lengths: Mapping[str, int]) -> int:
    taken = prod(lengths.values())
    if min(lengths.values()) < 1 or world_size < 1 or world_size % taken:
        product = " ".join(f"{name}={length}" for name, length in lengths.items())
        want = f"a multiple of {taken}" if taken > 0 else "lengths of 1 or more"
        raise LayoutError(f"{world_size} ranks are not divisible by {product}", got=f"{world_size} ranks", want=want)
    return world_size // taken
