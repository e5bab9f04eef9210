"""Tensors' names with dims in them: `layers.{6/pp}.mlp.experts.{e/ep}.w1`.

A group in a name is a leading dim of the tensor whose index is written into the name instead: the global index in the
global name, the local index in the name that a rank knows the tensor by.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from xrank.errors import LayoutError
from xrank.layout.binding import checked_sizes, global_size, known_names
from xrank.layout.dim_part import compile_dim
from xrank.layout.local_part import holds, places_of
from xrank.layout.mesh import DeviceMesh
from xrank.layout.nests import addresses
from xrank.layout.notation import LayoutTree, Node, axes_of, count_names_of, render_dim, size_names_of, with_sizes
from xrank.layout.parser import Reader
from xrank.layout.soundness import check_sound
from xrank.layout.tensor_layout import TensorLayout

__all__ = ["MAX_NAMES", "NameTable", "TensorName", "has_groups", "name_table", "parse_name"]

MAX_NAMES = 1 << 20
"""Names that one name with dims may stand for."""

_QUANTIFIER = re.compile(r"\{\d*(,\d*)?\}")


@dataclass(frozen=True, slots=True)
class TensorName:
    """A name with dims in it.

    Args:
        texts: what stands around the dims, one more than there are dims; without a dim the plain name.
        dims: the dim of each group.
    """

    texts: tuple[str, ...]
    dims: tuple[Node, ...] = ()

    def __str__(self) -> str:
        groups = ("{" + render_dim(dim) + "}" for dim in self.dims)
        return self.texts[0] + "".join(group + text for group, text in zip(groups, self.texts[1:], strict=True))

    def with_sizes(self, sizes: Mapping[str, int]) -> TensorName:
        """Return this name with numbers in the place of these sizes' names."""
        return TensorName(self.texts, with_sizes(LayoutTree(self.dims), sizes).dims)

    def at(self, *indices: int) -> str:
        """Return the name of one tensor, by its index in each group."""
        return self.texts[0] + "".join(f"{i}{text}" for i, text in zip(indices, self.texts[1:], strict=True))

    @property
    def expression(self) -> str:
        """A regular expression for all names that this one stands for; each group catches its index."""
        # Without leading zeros, so that one tensor has one name; of a length that is an int at no cost.
        return "(0|[1-9][0-9]{0,17})".join(map(re.escape, self.texts))

    def indices(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's index in each group, by its name; None for another name."""
        match = re.fullmatch(self.expression, name)
        return None if match is None else tuple(map(int, match.groups()))


def parse_name(text: str) -> TensorName:
    """Read a name with dims in it, or a plain one.

    Raises:
        LayoutError: a group is not closed or holds no dim, or two groups stand side by side.
    """
    reader = Reader(text, "a tensor's name")
    name = TensorName(*reader.naming())
    reader.end()
    return name


def has_groups(pattern: str) -> bool:
    """Say whether a layout map's key is a name with dims: it holds a brace that is no part of a regular expression.

    An escaped brace, and a quantifier such as ``{2}`` or ``{1,3}``, belong to a regular expression.
    """
    position = pattern.find("{")
    while position >= 0:
        slashes = position - len(pattern[:position].rstrip("\\"))
        if slashes % 2 == 0 and _QUANTIFIER.match(pattern, position) is None:
            return True
        position = pattern.find("{", position + 1)
    return False


@dataclass(frozen=True, slots=True)
class NameTable:
    """The tensors that one rank holds under a name with dims.

    Args:
        name: the name with dims.
        local_sizes: how far the local index of each group counts, pads included.
        global_sizes: how far the global index of each group counts.
        places: per group, local index -> global index; an index of padding is not there.
    """

    name: TensorName
    local_sizes: tuple[int, ...]
    global_sizes: tuple[int, ...]
    places: tuple[Mapping[int, int], ...]

    def global_name(self, local_name: str) -> str | None:
        """Return the global name of a tensor that the rank knows by a local one.

        None if the name is not of this kind, or if its index is padding.

        Raises:
            LayoutError: an index is beyond what the rank holds.
        """
        return self._turned(local_name, self.places, self.local_sizes, "on this rank")

    def local_name(self, global_name: str) -> str | None:
        """Return the name by which the rank knows a tensor; None if it does not hold it, or for another kind of name.

        Raises:
            LayoutError: an index is beyond the dim's size.
        """
        back = tuple({y: x for x, y in places.items()} for places in self.places)
        return self._turned(global_name, back, self.global_sizes, "in all")

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (local name, global name) of every tensor that the rank holds, by rising local index."""
        for chosen in product(*(sorted(places.items()) for places in self.places)):
            yield self.name.at(*(x for x, _ in chosen)), self.name.at(*(y for _, y in chosen))

    def _turned(self, name: str, turn: tuple[Mapping[int, int], ...], sizes: tuple[int, ...], whose: str) -> str | None:
        indices = self.name.indices(name)
        if indices is None:
            return None
        for dim, i, size in zip(self.name.dims, indices, sizes, strict=True):
            if i >= size:
                raise LayoutError(
                    f"{name}: the index {i} is beyond {{{render_dim(dim)}}}, of which there are {size} {whose}",
                    tensor=name,
                    got=str(i),
                    want=f"0 to {size - 1}" if size else "no such tensor",
                )
        found = [places.get(i) for places, i in zip(turn, indices, strict=True)]
        present = [i for i in found if i is not None]
        return self.name.at(*present) if len(present) == len(found) else None


def name_table(
    name: TensorName,
    layout: TensorLayout,
    mesh: DeviceMesh,
    coordinate: Mapping[str, int],
    *,
    sizes: Mapping[str, int] | None = None,
) -> NameTable | None:
    """Return what the rank at a coordinate holds under a name with dims; None if the layout leaves the rank out.

    Args:
        name: the name.
        layout: the layout of the tensors of that name; its view and its "where" count for the name, too.
        mesh: the mesh that gives the axes their lengths.
        coordinate: the rank's place along the mesh's axes.
        sizes: sizes by name.

    Raises:
        LayoutError: a size is not known, a cut does not fit, an axis is used in the name and the layout both, or there
            would be more than `MAX_NAMES` names.
    """
    if not holds(layout, mesh, coordinate):
        return None
    # The name's dims are dims as any other: they meet the mesh as a layout of their own.
    tree = LayoutTree(name.dims, layout.tree.view)
    leading = TensorLayout.from_tree(tree, layout.device_mesh) if layout.view_mesh is None else None
    if leading is None:
        assert layout.tree.view is not None and layout.device_mesh is not None and layout.view_mesh is not None
        leading = TensorLayout.from_tree(tree).with_mesh(layout.device_mesh, {layout.tree.view: layout.view_mesh})
    lengths, places = places_of(leading, mesh, coordinate)
    check_sound(layout.tree, lengths, name.dims)
    bound = known_names(tree, lengths, checked_sizes(sizes))
    parts = []
    total = 1
    for dim in name.dims:
        names = (*size_names_of(dim), *count_names_of(dim))
        for size in names:
            if size not in bound:
                raise LayoutError(
                    f"the size {size!r} of the name {name} is not known",
                    got=f"no size {size!r}",
                    want=f"the number that {size!r} stands for",
                    next_step=f"give it in sizes={{{size!r}: ...}}, or in the [sizes] table of a layout file",
                )
        total *= global_size(dim, bound)
        if total > MAX_NAMES:
            raise LayoutError(
                f"the name {name} stands for too many tensors", got=f"{total:,} or more", want=f"at most {MAX_NAMES:,}"
            )
        axes = axes_of(dim)
        own = tuple(place for place in places if place[0] in axes)
        parts.append(compile_dim(dim, tuple((size, bound[size]) for size in names), own))
    return NameTable(
        name,
        tuple(part.local_size for part in parts),
        tuple(part.global_size for part in parts),
        tuple({x: y for nest in part.nests for x, y in addresses(nest)} for part in parts),
    )
