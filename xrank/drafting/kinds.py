"""Kinds of tensors: names that differ only in the numbers of layers, experts and the like."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_Shape = tuple[int, ...]
_Index = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Tensors of one shape whose names differ only in their indices.

    Args:
        texts: the texts of the name around the indices, one more than indices.
        counts: number of values of each index, over all kinds that share the text before it.
        shape: the global shape of each tensor.
        members: indices -> name.
    """

    texts: tuple[str, ...]
    counts: tuple[int, ...]
    shape: _Shape
    members: Mapping[_Index, str]

    def __str__(self) -> str:
        return f"{self.name_with('*' * len(self.counts))} {list(self.shape)}"

    def name_with(self, indices: Sequence[str]) -> str:
        """Return the name with these texts as its indices."""
        return self.texts[0] + "".join(index + text for index, text in zip(indices, self.texts[1:], strict=True))

    def values_at(self, place: int) -> frozenset[int]:
        """Return the values of an index."""
        return frozenset(index[place] for index in self.members)


def find_kinds(shapes: Mapping[str, _Shape]) -> list[Kind]:
    """Return the kinds of a model's tensors, in the order of their first tensors.

    A number in a name is an index if its values, over all names with the same text before it, count from 0, and
    tensors that differ in it alone have one shape. Other numbers belong to the name, as in ``w1`` and ``mlp.2``.

    Example:
        >>> kinds = find_kinds({"l.0.w1": (2, 3), "l.1.w1": (2, 3), "l.0.w2": (3,), "l.1.w2": (3,)})
        >>> [str(kind) for kind in kinds]
        ['l.*.w1 [2, 3]', 'l.*.w2 [3]']
    """
    pieces = {name: re.split(r"([0-9]+)", name) for name in shapes}
    prefixes = {name: parts[0] for name, parts in pieces.items()}
    marks: dict[str, list[int | None]] = {name: [] for name in shapes}  # number of values, or None: not an index
    for place in range(1, max(map(len, pieces.values()), default=1), 2):
        groups: dict[str, list[str]] = {}
        for name, parts in pieces.items():
            if place < len(parts):
                groups.setdefault(prefixes[name], []).append(name)
        for prefix, names in groups.items():
            count = _count_indices(prefix, {name: pieces[name][place:] for name in names}, shapes)
            for name in names:
                number, text = pieces[name][place : place + 2]
                marks[name].append(count)
                prefixes[name] += ("{}" if count else number) + text
    found: dict[tuple[tuple[str, ...], tuple[int, ...], _Shape], dict[_Index, str]] = {}
    for name, parts in pieces.items():
        texts, counts, index = [parts[0]], [], []
        for count, number, text in zip(marks[name], parts[1::2], parts[2::2], strict=True):
            if count is None:
                texts[-1] += number + text
            else:
                texts.append(text)
                counts.append(count)
                index.append(int(number))
        found.setdefault((tuple(texts), tuple(counts), shapes[name]), {})[tuple(index)] = name
    return [Kind(texts, counts, shape, members) for (texts, counts, shape), members in found.items()]


def split_kinds(kinds: Sequence[Kind], others: Sequence[Kind]) -> list[Kind]:
    """Return the kinds without indices of a count that the other model has nowhere: they belong to the name.

    So ``norm.0`` and ``norm.1`` are two tensors of a layer, if nothing else counts to two.
    """
    known = {count for kind in others for count in (*kind.counts, *kind.shape[:2])}
    found: list[Kind] = []
    for kind in kinds:
        places = [i for i, count in enumerate(kind.counts) if count in known]
        if len(places) == len(kind.counts):
            found.append(kind)
            continue
        parts: dict[tuple[str, ...], dict[_Index, str]] = {}
        for index, name in kind.members.items():
            texts = [kind.texts[0]]
            for i, (number, text) in enumerate(zip(index, kind.texts[1:], strict=True)):
                if i in places:
                    texts.append(text)
                else:
                    texts[-1] += f"{number}{text}"
            parts.setdefault(tuple(texts), {})[tuple(index[i] for i in places)] = name
        counts = tuple(kind.counts[i] for i in places)
        found += [Kind(texts, counts, kind.shape, members) for texts, members in parts.items()]
    return found


def _count_indices(prefix: str, rests: Mapping[str, Sequence[str]], shapes: Mapping[str, _Shape]) -> int | None:
    """Return the number of values of a number in names, if it is an index; else None.

    Args:
        prefix: the text before the number.
        rests: name -> the number, the text after it, further numbers and texts.
        shapes: name -> shape.
    """
    values = {rest[0] for rest in rests.values()}
    count = len(values)
    if count < 2 or values != {str(i) for i in range(count)}:
        return None
    alike: dict[str, dict[str, _Shape]] = {}
    for name, (number, *rest) in rests.items():
        if not rest[0].startswith(".") and rest[0]:
            return None
        alike.setdefault("0".join(rest[::2]) + str(len(rest)), {})[number] = shapes[name]
    several = [set(found.values()) for found in alike.values() if len(found) > 1]
    if not several:
        return None
    is_component = not prefix or prefix.endswith(".")
    # Two numbers, or numbers at the end of a word, are layers only if nothing speaks against it.
    is_doubtful = count == 2 or not is_component
    if is_doubtful and any(len(found) > 1 for found in several):
        return None
    if not is_component and any(len(found) < count for found in alike.values()):
        return None
    return count
