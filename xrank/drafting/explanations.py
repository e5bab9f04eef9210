"""Explain a kind of tensors by kinds of the other model: as one of them, or as several of them, fused.

One tensor of each kind is compared, that of a middle layer. Its lines (rows or columns) are searched among those of the
other kinds. A kind is explained if the lines of one or several others fill it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import prod

import numpy as np

from xrank.drafting.kinds import Kind
from xrank.drafting.line_maps import LineMap, Lines, find_map
from xrank.drafting.line_samples import Array, LineSamples

_MOST_ALIGNMENTS = 6


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which indices of two kinds are the same: (place, place) in names, or in leading dims.

    Args:
        indices: pairs of places in both names.
        whole_dims: place in the whole's name of each leading dim of the part.
        part_dims: place in the part's name of each leading dim of the whole.
    """

    indices: tuple[tuple[int, int], ...]
    whole_dims: tuple[int, ...]
    part_dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor without its leading dims, as a matrix.

    Args:
        rows: the dims that form its rows.
        columns: the dims that form its columns.
        by_column: whether the lines are the columns.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    by_column: bool

    @property
    def lines(self) -> tuple[int, ...]:
        """The dims of the lines' numbers."""
        return self.columns if self.by_column else self.rows

    @property
    def across(self) -> tuple[int, ...]:
        """The dims along a line."""
        return self.rows if self.by_column else self.columns


@dataclass(frozen=True, slots=True)
class Found:
    """A part in a whole."""

    kind: Kind
    alignment: Alignment
    matrix: Matrix
    map: LineMap


@dataclass(frozen=True, slots=True)
class Explanation:
    """A kind as a whole that consists of parts, in the order of their first lines."""

    whole: Kind
    matrix: Matrix
    parts: tuple[Found, ...]

    @property
    def is_exact(self) -> bool:
        """Whether all sampled elements were equal."""
        return all(part.map.is_exact for part in self.parts)


def align(whole: Kind, part: Kind) -> Iterator[Alignment]:
    """Yield the ways in which the indices of two kinds may be the same, the plainest first."""
    places = range(len(part.counts))
    for count in range(min(len(whole.counts), len(part.counts)), -1, -1):
        for of_whole in permutations(range(len(whole.counts)), count):
            for of_part in permutations(places, count):
                pairs = tuple(zip(of_whole, of_part, strict=True))
                if list(of_whole) != sorted(of_whole) or not _are_alike(whole, part, pairs):
                    continue
                whole_dims = tuple(i for i in range(len(whole.counts)) if i not in of_whole)
                part_dims = tuple(i for i in places if i not in of_part)
                if _are_dims(part, whole, whole_dims) and _are_dims(whole, part, part_dims):
                    found = Alignment(pairs, whole_dims, part_dims)
                    if next(members(whole, part, found), None) is not None:
                        yield found


def _are_alike(whole: Kind, part: Kind, pairs: Sequence[tuple[int, int]]) -> bool:
    # Two kinds of the source may share the layers of one kind of the base model.
    return all(whole.counts[a] == part.counts[b] and whole.values_at(a) <= part.values_at(b) for a, b in pairs)


def _are_dims(stacked: Kind, named: Kind, places: Sequence[int]) -> bool:
    """Return whether a kind has these indices of another one as its leading dims."""
    return len(stacked.shape) > len(places) and all(
        stacked.shape[dim] == named.counts[place] == len(named.values_at(place)) for dim, place in enumerate(places)
    )


class Looker:
    """Lines of one tensor of each kind of a model, of a middle layer.

    Args:
        samples: reads the model.
    """

    def __init__(self, samples: LineSamples) -> None:
        self._samples = samples
        self._lines: dict[object, Lines] = {}

    def lines(self, kind: Kind, name: str, at: tuple[int, ...], matrix: Matrix) -> Lines:
        """Return the lines of a kind's tensor at these indices of its leading dims."""
        key = (name, at, len(matrix.rows), matrix.by_column)
        if key not in self._lines:
            values = self._samples.lines(name, at, prod(matrix.rows), by_column=matrix.by_column)
            self._lines[key] = Lines(values)
        return self._lines[key]

    def few(self, name: str, at: tuple[int, ...], matrix: Matrix, numbers: Sequence[int]) -> Array:
        """Return some lines of a tensor, by their numbers."""
        return self._samples.few(name, at, prod(matrix.rows), numbers, by_column=matrix.by_column)

    def vector(self, name: str, at: tuple[int, ...]) -> Array:
        """Return the values of a tensor with one dim, at these indices of its leading dims."""
        return self._samples.vector(name, at)


def explain(whole: Kind, parts: Sequence[Kind], own: Looker, others: Looker) -> Explanation | None:
    """Return the explanation of a kind by some of the others; None if none or several of them fit.

    Args:
        whole: a kind with two dims or more, besides indices.
        parts: kinds of the other model that may be parts of it.
        own: looks into the whole's model.
        others: looks into the parts' model.
    """
    found: dict[tuple[object, Matrix], list[Found]] = {}
    for part in parts:
        for number, alignment in enumerate(align(whole, part)):
            if number == _MOST_ALIGNMENTS:
                break
            for matrix, one in _find_part(whole, part, alignment, own, others):
                found.setdefault((_whole_view(alignment), matrix), []).append(one)
    complete = [
        Explanation(whole, matrix, tuple(fitting))
        for (_, matrix), ones in found.items()
        if (fitting := _fill(ones, prod(matrix.lines)))
    ]
    # One tensor may be seen as rows and as columns; another set of parts would be another explanation.
    sets = {frozenset(part.kind for part in one.parts) for one in complete}
    if len(sets) != 1:
        return None
    return max(complete, key=lambda one: (one.is_exact, -len(one.matrix.lines), not one.matrix.by_column))


def _whole_view(alignment: Alignment) -> object:
    return len(alignment.part_dims), alignment.whole_dims


def _find_part(
    whole: Kind, part: Kind, alignment: Alignment, own: Looker, others: Looker
) -> Iterator[tuple[Matrix, Found]]:
    whole_name, whole_at, part_name, part_at = middle(whole, part, alignment)
    for a in _matrices(whole.shape[len(alignment.part_dims) :]):
        for b in _matrices(part.shape[len(alignment.whole_dims) :]):
            if prod(a.across) != prod(b.across) or prod(b.lines) > prod(a.lines):
                continue
            lines = own.lines(whole, whole_name, whole_at, a)
            place = find_map(others.lines(part, part_name, part_at, b), lines)
            if place is not None:
                yield a, Found(part, alignment, b, place)


def middle(whole: Kind, part: Kind, alignment: Alignment) -> tuple[str, tuple[int, ...], str, tuple[int, ...]]:
    """Return name and leading indices of the tensors of both kinds that are of the same middle layer."""
    # Not the first place of a stack: a wrong order of the stack would not show there.
    stacked = {place: whole.counts[place] - 1 for place in alignment.whole_dims}
    shared = sorted(part.members)
    if alignment.indices:
        places = {tuple(index[a] for a, _ in alignment.indices) for index in whole.members}
        shared = [index for index in shared if tuple(index[b] for _, b in alignment.indices) in places]
    index = shared[len(shared) // 2]
    own = {a: index[b] for a, b in alignment.indices} | stacked
    name = whole.members.get(tuple(own[place] for place in range(len(whole.counts))))
    return (
        next(iter(whole.members.values())) if name is None else name,
        tuple(index[place] for place in alignment.part_dims),
        part.members[index],
        tuple(own[place] for place in alignment.whole_dims),
    )


def members(
    whole: Kind, part: Kind, alignment: Alignment
) -> Iterator[tuple[str, tuple[int, ...], str, tuple[int, ...]]]:
    """Yield name and leading indices of the tensors of both kinds, for each pair of tensors of one layer or expert."""
    stacks = [range(whole.counts[place]) for place in alignment.whole_dims]
    for index, name in part.members.items():
        for stacked in product(*stacks):
            own = {a: index[b] for a, b in alignment.indices} | dict(zip(alignment.whole_dims, stacked, strict=True))
            whole_name = whole.members.get(tuple(own[place] for place in range(len(whole.counts))))
            if whole_name is not None:
                yield whole_name, tuple(index[place] for place in alignment.part_dims), name, stacked


def _matrices(core: tuple[int, ...]) -> Iterator[Matrix]:
    for cut in range(1, len(core)):
        for by_column in (False, True):
            yield Matrix(core[:cut], core[cut:], by_column)


def _fill(found: Sequence[Found], num_lines: int) -> list[Found]:
    """Return the parts that fill a whole, by their first lines; none if they leave lines out or overlap.

    A single part may leave out lines at the end, which are padding.
    """
    unique: dict[Kind, Found] = {}
    for one in found:
        if one.kind in unique and unique[one.kind].map != one.map:
            return []
        unique.setdefault(one.kind, one)
    ordered = sorted(unique.values(), key=lambda one: one.map.start)
    for choice in ([one for one in ordered if one.map.is_exact], ordered):
        places = np.concatenate([one.map.places() for one in choice]) if choice else np.zeros(0)
        if len(places) == num_lines and len(np.unique(places)) == num_lines:
            return choice
    is_padded = len(ordered) == 1 and ordered[0].map.start == 0 and all(s == 1 for _, s in ordered[0].map.loops)
    return ordered if is_padded else []
