"""Meshes: ranks laid out in a named grid. The words are Keras', the devices are ranks."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from xrank.errors import LayoutError

__all__ = ["MAX_RANKS", "NAME_RULE", "DeviceMesh", "is_name"]

MAX_RANKS = 1 << 22
"""Ranks that a mesh may hold: a mistyped grid must not take the machine's memory."""

NAME_RULE = 'a letter or "_", then letters, digits, "_" and "."'
"""What axes and sizes may be called, in words."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_GRID_AXIS = re.compile(r"(?P<name>[^\s=]+)=(?P<length>[0-9]{1,9})")


def is_name(text: object) -> bool:
    """Say whether the notation can write this text as the name of an axis or a size."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, init=False)
class DeviceMesh:
    """A grid of ranks, row-major: the first axis is outermost, the last one varies fastest.

    Args:
        shape: the length of each axis, each 1 or more.
        axis_names: the axes' names, outermost first.
        devices: the ranks, in any nesting or anything with ``tolist()``; read row-major. ``0 .. n-1`` when None.

    Raises:
        LayoutError: the parts do not fit each other, an axis or a rank is there twice.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    ranks: tuple[int, ...] = field(repr=False)
    _positions: Mapping[int, int] = field(repr=False, compare=False)

    def __init__(self, shape: Sequence[int], axis_names: Sequence[str], devices: Any = None) -> None:
        lengths, names = _checked_axes(shape, axis_names)
        size = prod(lengths)
        ranks = tuple(range(size)) if devices is None else tuple(_flattened(devices))
        if len(ranks) != size:
            raise LayoutError(
                f"Shape does not match the number of devices. Received: shape={lengths}; devices.shape=({len(ranks)},)",
                got=f"{len(ranks)} devices",
                want=f"{size} devices, the product of {lengths}",
            )
        positions = {rank: position for position, rank in enumerate(ranks)}
        if len(positions) != size:
            twice = next(rank for position, rank in enumerate(ranks) if positions[rank] != position)
            raise LayoutError(f"the mesh holds rank {twice} twice", rank=twice, want="each rank once")
        object.__setattr__(self, "shape", lengths)
        object.__setattr__(self, "axis_names", names)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "_positions", positions)

    def __contains__(self, rank: object) -> bool:
        return rank in self._positions

    def __reduce__(self) -> tuple[Any, ...]:
        return (DeviceMesh, (self.shape, self.axis_names, self.ranks))

    @classmethod
    def parse_grid(cls, text: str, ranks: Sequence[int] | None = None) -> DeviceMesh:
        """Read a grid such as ``"pp=2 dp=2 tp=2"``, outermost axis first; ``ranks`` as ``devices`` of the class."""
        axes: list[tuple[str, int]] = []
        for word in text.split():
            match = _GRID_AXIS.fullmatch(word)
            if match is None:
                raise LayoutError(
                    f"the grid {text[:200]!r} cannot be read",
                    got=repr(word[:80]),
                    want='axes as name=length between blanks, such as "dp=2 tp=4"',
                )
            axes.append((match["name"], int(match["length"])))
        return cls([length for _, length in axes], [name for name, _ in axes], ranks)

    @property
    def grid(self) -> str:
        """The text that `parse_grid` reads; the ranks are not part of it."""
        return " ".join(f"{name}={length}" for name, length in zip(self.axis_names, self.shape, strict=True))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def axis_length(self, name: str) -> int:
        """Return the number of coordinates along an axis."""
        try:
            return self.shape[self.axis_names.index(name)]
        except ValueError:
            raise LayoutError(
                f"the mesh {self.grid!r} has no axis {name!r}", got=repr(name), want=f"one of {list(self.axis_names)}"
            ) from None

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return a rank's place along every axis, outermost axis first."""
        position = self._positions.get(rank)
        if position is None:
            raise LayoutError(
                f"rank {rank} is not in the mesh {self.grid!r}",
                rank=rank,
                got=f"rank {rank}",
                want=f"one of its {self.size} ranks, {min(self.ranks)} to {max(self.ranks)}",
            )
        places: list[int] = []
        for length in reversed(self.shape):
            position, place = divmod(position, length)
            places.append(place)
        return dict(zip(self.axis_names, reversed(places), strict=True))

    def rank_at(self, coordinate: Mapping[str, int]) -> int:
        """Return the rank at a coordinate, which names every axis of the mesh and no other."""
        if coordinate.keys() != set(self.axis_names):
            raise LayoutError(
                f"a coordinate does not name the axes of the mesh {self.grid!r}",
                got=str(list(coordinate)),
                want=str(list(self.axis_names)),
            )
        position = 0
        for name, length in zip(self.axis_names, self.shape, strict=True):
            place = coordinate[name]
            if not 0 <= place < length:
                raise LayoutError(
                    f"the mesh {self.grid!r} has no place {place} along {name!r}",
                    got=f"{name}={place}",
                    want=f"0 to {length - 1}",
                )
            position = position * length + place
        return self.ranks[position]


def _checked_axes(shape: Sequence[int], axis_names: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return both as tuples; the order of the checks and their words are Keras' (keras/src/distribution)."""
    try:
        lengths, names = tuple(shape), tuple(axis_names)
    except TypeError:
        raise LayoutError(
            "Shape and axis_names are not sequences",
            got=f"shape={shape!r}, axis_names={axis_names!r}",
            want="shape=(2, 4), axis_names=('batch', 'model')",
        ) from None
    received = f"Received: shape={lengths}, axis_names={names}"
    if not lengths or not names:
        raise LayoutError(f"Shape and axis_names cannot be empty. {received}")
    if len(lengths) != len(names):
        raise LayoutError(f"Shape and axis_names should have same size. {received}")
    for name in names:
        if not is_name(name):
            raise LayoutError(
                f"no layout could write the axis name {name!r}. {received}", got=repr(name), want=NAME_RULE
            )
        if names.count(name) > 1:
            raise LayoutError(f"the mesh has the axis {name!r} twice. {received}", want="each axis name once")
    lengths = tuple(_whole(length, "the length of an axis") for length in lengths)
    if min(lengths) < 1:
        raise LayoutError(f"an axis has no place. {received}", got=str(min(lengths)), want="lengths of 1 or more")
    if prod(lengths) > MAX_RANKS:
        raise LayoutError(
            f"the mesh is too large. {received}", got=f"{prod(lengths)} ranks", want=f"at most {MAX_RANKS}"
        )
    return lengths, names


def _flattened(devices: Any) -> Iterator[int]:
    """Yield ranks row-major from nested sequences, arrays or tensors."""
    if hasattr(devices, "tolist"):
        devices = devices.tolist()
    if isinstance(devices, Sequence) and not isinstance(devices, str | bytes):
        for part in devices:
            yield from _flattened(part)
    else:
        rank = _whole(devices, "a device of a mesh")
        if rank < 0:
            raise LayoutError("a device of a mesh is no rank", got=str(rank), want="a rank, 0 or more")
        yield rank


def _whole(value: Any, what: str) -> int:
    """Return an integer of any integer type as an int."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise LayoutError(f"{what} is not an integer", got=repr(value), want="an integer")
