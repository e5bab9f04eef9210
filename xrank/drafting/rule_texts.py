"""The two sides of a rule as texts of the notation, from an explanation: its loops become the sizes of dims."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from xrank.drafting.explanations import Explanation, Found, Matrix
from xrank.drafting.kinds import Kind
from xrank.drafting.size_names import Role, SizeNames


@dataclass(frozen=True, slots=True)
class RuleTexts:
    """A whole and its parts, as texts.

    Args:
        whole: the text of the whole.
        parts: part's key -> its text; the key is "" for a whole without parts.
        rows: the name of the rows that padding may follow, if there is any.
    """

    whole: str
    parts: dict[str, str]
    rows: str | None = None


@dataclass(slots=True, eq=False)
class _Atom:
    """A size that both sides of a rule have."""

    count: int
    role: Role
    text: str = ""


class _NotationError(Exception):
    """The notation has no text for an explanation."""


def write_rule(explanation: Explanation, sizes: SizeNames) -> RuleTexts | None:
    """Return the texts of a rule; None if the notation cannot express it."""
    try:
        return _Writer(explanation, sizes).write()
    except _NotationError:
        return None


class _Writer:
    def __init__(self, explanation: Explanation, sizes: SizeNames) -> None:
        self._sizes = sizes
        self._whole, self._matrix, self._parts = explanation.whole, explanation.matrix, explanation.parts
        # The lists share their atoms: an atom that a dim cuts is replaced in all of them.
        self._lists: list[list[_Atom]] = []
        self._across = self._list([_Atom(n, "whole") for n in self._matrix.across])
        self._outer: list[_Atom] = self._list([])
        self._inner: list[list[_Atom]] = []
        self._orders: list[list[_Atom]] = []
        self._trailing: list[_Atom] = self._list([])

    def _list(self, atoms: list[_Atom]) -> list[_Atom]:
        self._lists.append(atoms)
        return atoms

    def write(self) -> RuleTexts:
        """Return the texts; refuse what has none."""
        self._read_loops()
        index = self._index_atoms()
        keys = [""] if len(self._parts) == 1 else _part_keys([part.kind for part in self._parts])
        for _ in range(2):  # a dim of one side may cut an atom that is in a dim of another one already
            whole_dims = self._group_whole()
            across = _cut(self._lists, self._matrix.across, self._across)
            part_dims = [
                (_cut(self._lists, part.matrix.lines, order), _cut(self._lists, part.matrix.across, self._across))
                for part, order in zip(self._parts, self._orders, strict=True)
            ]
        whole_index, whole_leading = index[0]
        self._name([*whole_index, *whole_leading, *(atom for atoms in self._lists for atom in atoms)])
        sides = [self._whole_side(i, whole_dims, across, index[0]) for i in range(len(self._parts))]
        others = [
            self._part_side(part, dims, at) for part, dims, at in zip(self._parts, part_dims, index[1:], strict=True)
        ]
        self._tell_apart(sides, others)
        lines = [_lines_text(dim, keys) for dim in whole_dims]
        whole = _side_text(self._whole, whole_index, whole_leading, self._matrix, lines, [_text(g) for g in across])
        parts = {
            key: _side_text(part.kind, *at, part.matrix, *([_text(group) for group in groups] for groups in dims))
            for key, part, dims, at in zip(keys, self._parts, part_dims, index[1:], strict=True)
        }
        is_padded = len(self._parts) == 1 and self._parts[0].map.count < prod(self._matrix.lines)
        return RuleTexts(whole, parts, lines[0] if is_padded else None)

    def _index_atoms(self) -> list[tuple[list[_Atom], list[_Atom]]]:
        """Return the atoms in names and in leading dims, of the whole and of each part."""
        first = self._parts[0].alignment
        named = [_Atom(n, "index" if i else "layer") for i, n in enumerate(self._whole.counts)]
        counts = [self._parts[0].kind.counts[place] for place in first.part_dims]
        leading = [_Atom(n, "index" if named or i else "layer") for i, n in enumerate(counts)]
        found = [(named, leading)]
        for part in self._parts:
            at = part.alignment
            own: dict[int, _Atom] = {b: named[a] for a, b in at.indices}
            own.update(zip(at.part_dims, leading, strict=True))
            found.append(([own[i] for i in range(len(part.kind.counts))], [named[place] for place in at.whole_dims]))
        return found

    def _read_loops(self) -> None:
        """Turn the loops of the parts into atoms; find the loops outside of all parts."""
        total = prod(self._matrix.lines)
        loops = [[(_Atom(count, "inner"), stride) for count, stride in part.map.loops] for part in self._parts]
        self._orders = [self._list([atom for atom, _ in ones]) for ones in loops]
        falling = [sorted(ones, key=lambda one: -one[1]) for ones in loops]
        if len(self._parts) == 1:
            if not _is_dense(falling[0], 1):
                raise _NotationError
            self._outer.extend(atom for atom, _ in falling[0])
            if len(self._outer) == 1:
                self._outer[0].role = "whole"
            self._inner = [self._list([])]
            return
        strides = sorted({stride for ones in falling for _, stride in ones}, reverse=True)
        for step in (total, *strides):
            outer = [[one for one in ones if one[1] >= step] for ones in falling]
            inner = [[one for one in ones if one[1] < step] for ones in falling]
            if self._fits(total, step, outer, inner):
                self._outer.extend(atom for atom, _ in outer[0])
                for atom in self._outer:
                    atom.role = "outer"
                for ones in outer[1:]:
                    self._unify([atom for atom, _ in ones], self._outer)
                self._inner = [self._list([atom for atom, _ in ones]) for ones in inner]
                return
        raise _NotationError

    def _fits(
        self, total: int, step: int, outer: list[list[tuple[_Atom, int]]], inner: list[list[tuple[_Atom, int]]]
    ) -> bool:
        counts = {tuple(atom.count for atom, _ in ones) for ones in outer}
        if len(counts) > 1 or prod(next(iter(counts))) * step != total:
            return False
        at = 0
        for part, ones, own in zip(self._parts, outer, inner, strict=True):
            if part.map.start != at or not _is_dense(ones, step) or not _is_dense(own, 1):
                return False
            at += prod(atom.count for atom, _ in own)
        return at == step

    def _unify(self, atoms: Sequence[_Atom], known: Sequence[_Atom]) -> None:
        for old, new in zip(atoms, known, strict=True):
            for one in self._lists:
                one[:] = [new if atom is old else atom for atom in one]

    def _group_whole(self) -> list[_Dim]:
        """Return the dims of the whole's lines: atoms before the parts, the parts, atoms after them."""
        dims = self._matrix.lines
        if len(self._parts) == 1 or not dims:
            count = prod(dims)
            if self._parts[0].map.count < count:  # padding follows
                dims = (self._parts[0].map.count,)
            return [_Dim(group, None) for group in _cut(self._lists, dims, self._outer)]
        num_outer, place = prod(atom.count for atom in self._outer), 0
        while place < len(dims) - 1 and num_outer % prod(dims[: place + 1]) == 0:
            place += 1
        rest = num_outer // prod(dims[:place])
        *before, last = _cut(self._lists, (*dims[:place], rest), self._outer)
        after = dims[place + 1 :]
        if after and not self._trailing:
            for i, own in enumerate(self._inner):
                count = prod(atom.count for atom in own)
                if count % prod(after):
                    raise _NotationError
                head, *tail = _cut(self._lists, (count // prod(after), *after), own)
                ending = [atom for group in tail for atom in group]
                own[:] = head
                if not i:
                    self._trailing.extend(ending)
                elif [a.count for a in ending] != [a.count for a in self._trailing]:
                    raise _NotationError
                else:
                    self._unify(ending, self._trailing)
        tails = _cut(self._lists, after, self._trailing)
        inner = [[*own] for own in self._inner]
        return [
            *(_Dim(group, None) for group in before),
            _Dim(last, inner),
            *(_Dim(group, None) for group in tails),
        ]

    def _name(self, atoms: Sequence[_Atom]) -> None:
        for atom in atoms:
            if not atom.text:
                atom.text = self._sizes.name(atom.count, atom.role)

    def _whole_side(
        self, number: int, dims: Sequence[_Dim], across: Sequence[Sequence[_Atom]], at: tuple[list[_Atom], list[_Atom]]
    ) -> list[_Atom]:
        lines = [atom for dim in dims for atom in (*dim.before, *(dim.parts[number] if dim.parts else ()))]
        return _in_order(self._matrix, at, lines, [atom for group in across for atom in group])

    def _part_side(
        self, part: Found, dims: tuple[list[list[_Atom]], list[list[_Atom]]], at: tuple[list[_Atom], list[_Atom]]
    ) -> list[_Atom]:
        lines, across = ([atom for group in groups for atom in group] for groups in dims)
        return _in_order(part.matrix, at, lines, across)

    def _tell_apart(self, sides: Sequence[Sequence[_Atom]], others: Sequence[Sequence[_Atom]]) -> None:
        """Give other names to atoms of one name that do not come in one order on both sides."""
        renamed = True
        while renamed:
            renamed = False
            for one, other in zip(sides, others, strict=True):
                for name in {name for atom in one for name in _names(atom.text)}:
                    mine, theirs = ([a for a in side if name in _names(a.text)] for side in (one, other))
                    if [id(a) for a in mine] != [id(a) for a in theirs]:
                        mine[-1].text = self._sizes.alias(mine[-1].text)
                        renamed = True
                        break


@dataclass(frozen=True, slots=True)
class _Dim:
    before: list[_Atom]
    parts: list[list[_Atom]] | None


def _in_order(
    matrix: Matrix, at: tuple[list[_Atom], list[_Atom]], lines: Sequence[_Atom], across: Sequence[_Atom]
) -> list[_Atom]:
    first, second = (across, lines) if matrix.by_column else (lines, across)
    return [atom for atom in (*at[0], *at[1], *first, *second) if atom.text != "1"]


def _names(text: str) -> list[str]:
    return re.findall(r"\([^)]*\)|\w+", text)


def _is_dense(loops: Sequence[tuple[_Atom, int]], step: int) -> bool:
    """Return whether loops with falling strides fill a range in steps of this size."""
    for atom, stride in reversed(loops):
        if stride != step:
            return False
        step *= atom.count
    return True


def _cut(lists: Sequence[list[_Atom]], dims: Sequence[int], atoms: list[_Atom]) -> list[list[_Atom]]:
    """Return the atoms of each dim; an atom that two dims share is cut in two, in all lists."""
    groups: list[list[_Atom]] = []
    place = 0
    for length in dims:
        group: list[_Atom] = []
        left = length
        while left > 1:
            if place == len(atoms):
                raise _NotationError
            atom = atoms[place]
            if left % atom.count:
                if atom.count % left:
                    raise _NotationError
                pair = [_Atom(left, atom.role), _Atom(atom.count // left, atom.role)]
                for one in lists:
                    one[:] = [new for old in one for new in (pair if old is atom else (old,))]
                atom = atoms[place]
            group.append(atom)
            left //= atom.count
            place += 1
        groups.append(group)
    if place != len(atoms):
        raise _NotationError
    return groups


def _text(atoms: Sequence[_Atom]) -> str:
    return " ".join(atom.text for atom in atoms if atom.text != "1") or "1"


def _lines_text(dim: _Dim, keys: Sequence[str]) -> str:
    if dim.parts is None:
        return _text(dim.before)
    body = "<" + " | ".join(f"{key}: {_text(own)}" for key, own in zip(keys, dim.parts, strict=True)) + ">"
    return f"{_text(dim.before)} {body}" if dim.before else body


def _side_text(
    kind: Kind,
    index: Sequence[_Atom],
    leading: Sequence[_Atom],
    matrix: Matrix,
    lines: Sequence[str],
    across: Sequence[str],
) -> str:
    core = (*across, *lines) if matrix.by_column else (*lines, *across)
    name = kind.name_with([f"{{{atom.text}}}" for atom in index])
    return f"{name} [{', '.join((*(atom.text for atom in leading), *core))}]"


def _part_keys(kinds: Sequence[Kind]) -> list[str]:
    """Return a name for each part: a word that only its tensors' names have."""
    words = [re.split(r"[._\W]+", kind.name_with([""] * len(kind.counts))) for kind in kinds]
    return [next(_own_words(i, words), f"part{i}") for i in range(len(kinds))]


def _own_words(number: int, words: Sequence[Sequence[str]]) -> Iterator[str]:
    for word in words[number]:
        is_name = re.fullmatch(r"[A-Za-z]\w*", word) is not None and word != "pad"
        if is_name and sum(word in others for others in words) == 1:
            yield word
