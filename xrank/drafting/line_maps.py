"""Which line of one matrix equals which line of another, and the loops that such a map consists of."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from xrank.drafting.line_samples import Array

Loops: TypeAlias = tuple[tuple[int, int], ...]
"""(count, stride) of each loop over the lines of a part, the outermost first; strides count lines of the whole."""

_LEAST_SIMILARITY = 0.9
"""Mean cosine from which lines count as trained further from each other; unrelated lines of 64 elements have 0.1."""
_MOST_PRODUCTS = 1 << 37


@dataclass(frozen=True, slots=True)
class LineMap:
    """Lines of a part in a whole.

    Args:
        start: the line of the whole that is the part's first.
        loops: how the others follow.
        is_exact: whether all sampled elements are equal; else the lines are similar.
    """

    start: int
    loops: Loops
    is_exact: bool

    @property
    def count(self) -> int:
        """The number of lines of the part."""
        return prod(count for count, _ in self.loops)

    def places(self) -> npt.NDArray[np.int64]:
        """Return the line of the whole for each line of the part."""
        made = np.full(1, self.start, np.int64)
        for count, stride in self.loops:
            made = (made[:, None] + np.arange(count) * stride).ravel()
        return made


class Lines:
    """The sampled lines of a matrix, with what a search in them needs."""

    def __init__(self, values: Array) -> None:
        self.values = values
        self._places: dict[str, dict[bytes, list[int]]] = {}
        self._normal: npt.NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def places(self, dtype: np.dtype[np.generic]) -> dict[bytes, list[int]]:
        """Return bytes of a line, as that dtype -> the lines with these bytes."""
        if dtype.name not in self._places:
            found: dict[bytes, list[int]] = {}
            for number, key in enumerate(_keys(self.values, dtype)):
                found.setdefault(key, []).append(number)
            self._places[dtype.name] = found
        return self._places[dtype.name]

    @property
    def normal(self) -> npt.NDArray[np.float32]:
        """The lines with mean 0 and length 1; a constant line is 0."""
        if self._normal is None:
            plain = np.nan_to_num(self.values.astype(np.float32))
            plain = plain - plain.mean(axis=1, keepdims=True)
            length = np.linalg.norm(plain, axis=1, keepdims=True)
            self._normal = np.divide(plain, length, out=np.zeros_like(plain), where=length > 1e-12)
        return self._normal


def find_map(part: Lines, whole: Lines) -> LineMap | None:
    """Return where the lines of a part are in a whole; None if some are not, or in no regular order."""
    if not len(part) or len(part) > len(whole) or part.values.shape[1] != whole.values.shape[1]:
        return None
    places = _exact_places(part, whole)
    is_exact = places is not None
    if places is None:
        places = _similar_places(part, whole)
    if places is None or len(set(places)) < len(places):
        return None
    loops = decode_loops(places)
    return None if loops is None else LineMap(places[0], loops, is_exact)


def are_alike(a: Lines, b: Lines) -> bool | None:
    """Return True if all lines are equal to those of the same number, False if they are similar; None otherwise."""
    dtype = min(a.values.dtype, b.values.dtype, key=lambda one: one.itemsize)
    if _keys(a.values, dtype) == _keys(b.values, dtype):
        return True
    return False if float((a.normal * b.normal).sum(axis=1).mean()) >= _LEAST_SIMILARITY else None


def _keys(values: Array, dtype: np.dtype[np.generic]) -> list[bytes]:
    cast = np.ascontiguousarray(values.astype(dtype))
    return [line.tobytes() for line in cast]


def _exact_places(part: Lines, whole: Lines) -> list[int] | None:
    # fp32 masters of bf16 weights are equal after the cast that a gather makes.
    dtype = min(part.values.dtype, whole.values.dtype, key=lambda one: one.itemsize)
    known = whole.places(dtype)
    keys = _keys(part.values, dtype)
    ends = {0, 1 % len(keys), len(keys) // 2, len(keys) - 1}
    if any(keys[i] not in known for i in ends):
        return None
    found: list[int] = []
    taken: set[int] = set()
    for key in keys:
        choices = [place for place in known.get(key, ()) if place not in taken]
        if not choices:
            return None
        # Equal lines, such as words that were never trained, follow on the line before them.
        wanted = found[-1] + 1 if found else 0
        place = wanted if wanted in choices else choices[0]
        found.append(place)
        taken.add(place)
    return found


def _similar_places(part: Lines, whole: Lines) -> list[int] | None:
    a, b = part.normal, whole.normal
    ends = sorted({0, 1 % len(a), len(a) // 2, len(a) - 1})
    if (a[ends] @ b.T).max(axis=1).mean() < _LEAST_SIMILARITY or len(a) * len(b) * a.shape[1] > _MOST_PRODUCTS:
        return None
    found: list[int] = []
    similarities: list[float] = []
    step = max(1, (1 << 24) // len(b))
    for low in range(0, len(a), step):
        products = a[low : low + step] @ b.T
        found += products.argmax(axis=1).tolist()
        similarities += products.max(axis=1).tolist()
    return found if np.mean(similarities) >= _LEAST_SIMILARITY else None


def decode_loops(places: list[int]) -> Loops | None:
    """Return the loops that give these places from their first on; None if they are not a nest of loops.

    Example:
        >>> decode_loops([0, 1, 4, 5, 8, 9])
        ((3, 4), (2, 1))
    """
    loops: list[tuple[int, int]] = []
    row = places
    while len(row) > 1:
        step = row[1] - row[0]
        count = 2
        while count < len(row) and row[count] - row[count - 1] == step:
            count += 1
        if len(row) % count or step < 1:
            return None
        loops.insert(0, (count, step))
        row = row[::count]
    return tuple(loops) if LineMap(places[0], tuple(loops), True).places().tolist() == places else None
