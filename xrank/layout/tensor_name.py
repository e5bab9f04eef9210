"""Tensors' names with dims in them: `layers.{6/pp}.mlp.experts.{e/ep}.w1`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product

from msgspec import Struct

from xrank.errors import LayoutError
from xrank.layout.local_part import (
    check_sizes,
    collect_known_names,
    compile_dim,
    global_size,
    holds,
    places_of,
    unknown_size_error,
)
from xrank.layout.mesh import DeviceMesh
from xrank.layout.nests import addresses
from xrank.layout.notation import (
    LayoutTree,
    Node,
    TextParser,
    axes_of,
    count_names_of,
    render_dim,
    size_names_of,
    with_sizes,
)
from xrank.layout.tensor_layout import TensorLayout, check_sound


def compile_pattern(text: str) -> re.Pattern[str]:
    """Compile a text; ValueError if it is not a regular expression, nests too deeply, or repeats too often."""
    try:
        return re.compile(text)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from error


MAX_NAMES = 1 << 20
"""Largest number of names of one name with dims."""

_QUANTIFIER = re.compile(r"\{\d*(,\d*)?\}")


class TensorName(Struct, frozen=True):
    """A name with dims."""

    texts: tuple[str, ...]
    """The texts around the dims, one more than dims; without dims the plain name."""
    dims: tuple[Node, ...] = ()
    """The dim of each group."""

    def __str__(self) -> str:
        groups = ("{" + render_dim(dim) + "}" for dim in self.dims)
        return self.texts[0] + "".join(group + text for group, text in zip(groups, self.texts[1:], strict=True))

    def with_sizes(self, sizes: Mapping[str, int]) -> TensorName:
        """Return this name with these sizes replaced by numbers."""
        return TensorName(self.texts, with_sizes(LayoutTree(self.dims), sizes).dims)

    def with_indices(self, *indices: int) -> str:
        """Return the name of the tensor with this index in each group."""
        return self.texts[0] + "".join(f"{i}{text}" for i, text in zip(indices, self.texts[1:], strict=True))

    @property
    def expression(self) -> str:
        """A regular expression for all names of this kind; each group captures its index."""
        # No leading zeros, so a tensor has only one name; few digits, so int() is cheap.
        return "(0|[1-9][0-9]{0,17})".join(map(re.escape, self.texts))

    def indices(self, name: str) -> tuple[int, ...] | None:
        """Return the index in each group of a tensor's name; None for another name."""
        match = re.fullmatch(self.expression, name)
        return None if match is None else tuple(map(int, match.groups()))


def parse_name(text: str) -> TensorName:
    """Parse a name with or without dims; LayoutError if a group is not closed or has no dim, or two are adjacent."""
    reader = TextParser(text, "a tensor's name")
    name = TensorName(*reader.naming())
    reader.end()
    return name


def has_groups(pattern: str) -> bool:
    """Return whether a layout map's key is a name with dims: it has a brace that is not of a regular expression.

    An escaped brace, and a quantifier such as ``{2}`` or ``{1,3}``, belong to a regular expression.
    """
    position = pattern.find("{")
    while position >= 0:
        slashes = position - len(pattern[:position].rstrip("\\"))
        # An even number of backslashes escapes backslashes only, not the brace.
        if slashes % 2 == 0 and _QUANTIFIER.match(pattern, position) is None:
            return True
        position = pattern.find("{", position + 1)
    return False


class NameTable(Struct, frozen=True):
    """The tensors that one rank holds under a name with dims."""

    name: TensorName
    local_sizes: tuple[int, ...]
    """Number of local indices of each group, pads included."""
    global_sizes: tuple[int, ...]
    places: tuple[Mapping[int, int], ...]
    """Per group, local index -> global index, without indices of padding."""

    def global_name(self, local_name: str) -> str | None:
        """Return the global name of a tensor with this local name; None for another form, or an index of padding.

        LayoutError if an index is too large for this rank.
        """
        return self._translate(local_name, self.places, self.local_sizes, "on this rank")

    def local_name(self, global_name: str) -> str | None:
        """Return the rank's own name of a tensor; None if it does not hold the tensor, or for another form of name.

        LayoutError if an index is beyond the dim's size.
        """
        back = tuple({y: x for x, y in places.items()} for places in self.places)
        return self._translate(global_name, back, self.global_sizes, "in all")

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (local name, global name) of all tensors that the rank holds, by rising local index."""
        for chosen in product(*(sorted(places.items()) for places in self.places)):
            yield self.name.with_indices(*(x for x, _ in chosen)), self.name.with_indices(*(y for _, y in chosen))

    def _translate(
        self, name: str, turn: tuple[Mapping[int, int], ...], sizes: tuple[int, ...], whose: str
    ) -> str | None:
        indices = self.name.indices(name)
        if indices is None:
            return None
        for dim, i, size in zip(self.name.dims, indices, sizes, strict=True):
            if i >= size:
                what = f"{name}: the index {i} is beyond {{{render_dim(dim)}}}, of which there are {size} {whose}"
                raise LayoutError(what, tensor=name, got=str(i), want=f"0 to {size - 1}" if size else "no such tensor")
        found = [places.get(i) for places, i in zip(turn, indices, strict=True)]
        present = [i for i in found if i is not None]
        return self.name.with_indices(*present) if len(present) == len(found) else None


def name_table(
    name: TensorName,
    layout: TensorLayout,
    mesh: DeviceMesh,
    coordinate: Mapping[str, int],
    *,
    sizes: Mapping[str, int] | None = None,
) -> NameTable | None:
    """Return the tensors that the rank at a coordinate holds under a name with dims; None if the layout excludes it.

    The layout is that of these tensors; its view and its "where" also apply to the name. Other arguments are as in
    `local_part`. LayoutError if a size is unknown, a cut does not fit, an axis is used in both the name and the layout,
    or there are more than `MAX_NAMES` names.
    """
    if not holds(layout, mesh, coordinate):
        return None
    # Treat the name's dims as a layout of their own.
    tree = LayoutTree(name.dims, layout.tree.view)
    leading = TensorLayout.from_tree(tree, layout.device_mesh, layout.view_mesh)
    lengths, places = places_of(leading, mesh, coordinate)
    check_sound(layout.tree, lengths, name.dims)
    bound = collect_known_names(tree, lengths, check_sizes(sizes))
    parts = []
    total = 1
    for dim in name.dims:
        names = (*size_names_of(dim), *count_names_of(dim))
        for size in names:
            if size not in bound:
                raise unknown_size_error(f"the name {name}", size, has_shape=False)
        total *= global_size(dim, bound)
        # Before compiling: the table has an entry for each index, and a mistyped size could fill the memory.
        if total > MAX_NAMES:
            what = f"the name {name} stands for too many tensors"
            next_step = f"correct the sizes of the dims in {name}"
            raise LayoutError(what, got=f"{total:,} or more", want=f"at most {MAX_NAMES:,}", next_step=next_step)
        axes = axes_of(dim)
        own = tuple(place for place in places if place[0] in axes)
        parts.append(compile_dim(dim, tuple((size, bound[size]) for size in names), own))
    return NameTable(
        name,
        tuple(part.local_size for part in parts),
        tuple(part.global_size for part in parts),
        tuple({x: y for nest in part.nests for x, y in addresses(nest)} for part in parts),
    )
