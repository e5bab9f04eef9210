"""Companions: tensors whose dims are those of a base tensor, divided by blocks.

A scale has one element per block of a weight; a packed weight holds several elements in one.

    companion = "scale(" base "," integer { "x" integer } ")"          a block's length in each dim of the base
              | "packed(" base "," "dim" "=" integer "," integer ")"   elements of that dim in one element
    base      = layout | '"' rule '"'                                  a rule of the same layout map, as written there
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from xrank.errors import LayoutError
from xrank.layout.local_part import (
    DimPart,
    LocalPart,
    check_shape,
    check_sizes,
    dim_parts,
    holds,
    places_of,
    product_of,
)
from xrank.layout.mesh import DeviceMesh
from xrank.layout.nests import Nest, canonical, size
from xrank.layout.notation import LayoutTree, TextParser, render, render_dim
from xrank.layout.tensor_layout import TensorLayout

_BLOCKS = re.compile(r"[0-9]{1,18}(x[0-9]{1,18})*")
_RULE = re.compile(r'[^"]*')


class Companion(Struct, frozen=True):
    """The relation of a tensor to its base; exactly one of `of` and `base` is given.

    Args:
        of: the rule that gives the base's layout.
        base: the base's layout itself.
        blocks: a scale's block in each dim; empty for packed elements.
        dim: the dim that is packed.
        factor: number of elements in one packed element.
    """

    of: str | None
    base: LayoutTree | None
    blocks: tuple[int, ...] = ()
    dim: int = 0
    factor: int = 1

    def __str__(self) -> str:
        base = f'"{self.of}"' if self.base is None else render(self.base)
        if self.blocks:
            return f"scale({base}, {'x'.join(map(str, self.blocks))})"
        return f"packed({base}, dim={self.dim}, {self.factor})"


def inline_base(companion: Companion, base: LayoutTree) -> Companion:
    """Return the companion with its base's layout in its own text, which can be read without a map."""
    return replace(companion, of=None, base=base)


def is_companion(text: str) -> bool:
    """Return whether a rule's text is a companion's instead of a layout's."""
    return text.lstrip().startswith(("scale(", "packed("))


def parse_companion(text: str) -> Companion:
    """Parse a companion's text.

    Raises:
        LayoutError: the text is malformed; the error names the text, the place and the expected token.
    """
    reader = TextParser(text, "a companion")
    scale = is_companion(text) and text.lstrip().startswith("scale")
    reader.take("name", '"scale(" or "packed("')
    reader.take("(")
    of, base = None, None
    if reader.accept('"'):
        of = reader.raw(_RULE, "a rule")
        reader.take('"')
    else:
        base = reader.layout()
    reader.take(",")
    if scale:
        blocks = tuple(map(int, reader.raw(_BLOCKS, "blocks, such as 128x128").split("x")))
        companion = Companion(of, base, blocks)
    else:
        if reader.take("name", '"dim="') != "dim":
            raise reader.refusal('"dim=" before it')
        reader.take("=")
        dim = reader.integer("a dim's number")
        reader.take(",")
        companion = Companion(of, base, (), dim, reader.integer("how many elements one holds"))
    reader.take(")")
    reader.end()
    if min(companion.blocks, default=companion.factor) < 1:
        raise LayoutError(f"the companion {text.strip()[:200]!r} has a block of 0", want="blocks of 1 or more")
    return companion


def companion_shape(companion: Companion, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the global shape of a companion from its base's; the last block of a scale may be incomplete.

    Raises:
        LayoutError: the companion does not fit the base's dims, or the packed dim does not divide.
    """
    sizes = check_shape(shape)
    blocks = blocks_of(companion, len(sizes))
    for i, (length, block) in enumerate(zip(sizes, blocks, strict=True)):
        if not companion.blocks and length % block:
            problem, want = f"dim {i} of {length} is not a multiple of {block}", f"a multiple of {block}"
            raise LayoutError(f"{companion}: {problem}", got=str(length), want=want)
    return tuple(-(-length // block) for length, block in zip(sizes, blocks, strict=True))


def blocks_of(companion: Companion, num_dims: int) -> tuple[int, ...]:
    """Return for each dim of the base how many positions become one of the companion's.

    Raises:
        LayoutError: the companion does not fit this number of dims.
    """
    if companion.blocks:
        if (given := len(companion.blocks)) != num_dims:
            problem = f"has blocks of {given} dims for a tensor of {num_dims}"
            raise LayoutError(f"{companion} {problem}", got=f"{given} dims", want=f"{num_dims} dims")
        return companion.blocks
    if companion.dim >= num_dims:
        got, want = str(companion.dim), f"0 to {num_dims - 1}"
        raise LayoutError(f"{companion} packs a dim that the tensor lacks", got=got, want=want)
    return tuple(companion.factor if i == companion.dim else 1 for i in range(num_dims))


def companion_part(
    companion: Companion,
    layout: TensorLayout,
    mesh: DeviceMesh,
    coordinate: Mapping[str, int],
    shape: Sequence[int],
    *,
    sizes: Mapping[str, int] | None = None,
) -> LocalPart | None:
    """Return the part of a companion that the rank at a coordinate holds; None if it holds nothing of the base.

    Layout and global shape are the base's, in unpacked elements; other arguments are as in `local_part`.

    Raises:
        LayoutError: as `local_part`, or a rank's part of the base begins or ends within a block; the error has both
            numbers.
    """
    whole = companion_shape(companion, shape)
    if not holds(layout, mesh, coordinate):
        return None
    lengths, places = places_of(layout, mesh, coordinate)
    compiled = dim_parts(layout, shape, lengths, places, check_sizes(sizes))
    parts = [
        _divide(part, block, (companion, layout, i))
        for i, (part, block) in enumerate(zip(compiled, blocks_of(companion, len(whole)), strict=True))
    ]
    return LocalPart(tuple(part.local_size for part in parts), product_of(parts).nests, layout.tree.sums)


PlacedDim = tuple[Companion, TensorLayout, int]
"""A dim by its companion, the base's layout and its number, for errors."""


def _divide(part: DimPart, block: int, at: PlacedDim) -> DimPart:
    """Return a dim in blocks; every bound of the rank's part must be between two blocks, or at the dim's end."""
    if block == 1:
        return part
    if _is_whole(part):  # the blocks do not depend on how the nests cut the dim
        count = -(-part.global_size // block)
        return DimPart(count, count, (Nest(0, 0, ((count, 1, 1),)),) if count > 1 else (Nest(0, 0),))
    nests = tuple(divide_nest(nest, part.global_size, block, at) for nest in part.nests)
    return DimPart(-(-part.global_size // block), -(-part.local_size // block), nests)


def _is_whole(part: DimPart) -> bool:
    """Return whether a rank holds the whole dim, each element at its global place."""
    return part.local_size == part.global_size == sum(map(size, part.nests)) > 0 and all(
        nest.x == nest.y and all(xs == ys for _, xs, ys in nest.loops) for nest in part.nests
    )


def divide_nest(nest: Nest, global_size: int, block: int, at: PlacedDim) -> Nest:
    """Return a nest of a dim in blocks; refuse bounds within a block."""
    x, y, loops = nest
    # The last loop is the run of adjacent elements; without one, runs have a single element.
    *outer, (count, x_stride, y_stride) = loops or ((1, 1, 1),)
    if (x_stride, y_stride) != (1, 1):
        outer, count = list(loops), 1
    last_run = count
    if not outer and y + count == global_size:
        last_run = -(-count // block) * block  # the last block of a scale may be incomplete
    for number, name in (
        (last_run, "positions in a row"),
        (y, "the first position"),
        (x, "the first local position"),
        *((stride, "positions from one row to the next") for _, *strides in outer for stride in strides),
    ):
        if number % block:
            companion, layout, i = at
            what = f"{companion}: dim {i}, {render_dim(layout.dims[i])}: {number} is not a multiple of {block}, so "
            what += "ranks would share a block"
            got, next_step = f"{number}, {name} of a rank's part", f'cut at multiples only, as "/=axis%{block}" does'
            raise LayoutError(what, got=got, want=f"a multiple of {block}", next_step=next_step)
    inner = (last_run // block, 1, 1)
    return canonical(Nest(x // block, y // block, (*((n, xs // block, ys // block) for n, xs, ys in outer), inner)))
