"""Companions: tensors whose dims are those of a base tensor, divided by blocks.

A scale has one element per block of a weight; a packed weight holds several elements in one.

    companion = "scale(" base "," integer { "x" integer } ")"          a block's length in each dim of the base
              | "packed(" base "," "dim" "=" integer "," integer ")"   elements of that dim in one element
    base      = layout | '"' rule '"'                                  a rule of the same layout map, as written there
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from xrank.errors import LayoutError
from xrank.layout.local_part import check_shape
from xrank.layout.notation import LayoutTree, TextParser, render

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
    for i, (size, block) in enumerate(zip(sizes, blocks, strict=True)):
        if not companion.blocks and size % block:
            raise LayoutError(
                f"{companion}: dim {i} of {size} is not a multiple of {block}",
                got=str(size),
                want=f"a multiple of {block}",
            )
    return tuple(-(-size // block) for size, block in zip(sizes, blocks, strict=True))


def blocks_of(companion: Companion, num_dims: int) -> tuple[int, ...]:
    """Return for each dim of the base how many positions become one of the companion's.

    Raises:
        LayoutError: the companion does not fit this number of dims.
    """
    if companion.blocks:
        if len(companion.blocks) != num_dims:
            raise LayoutError(
                f"{companion} has blocks of {len(companion.blocks)} dims for a tensor of {num_dims}",
                got=f"{len(companion.blocks)} dims",
                want=f"{num_dims} dims",
            )
        return companion.blocks
    if companion.dim >= num_dims:
        raise LayoutError(
            f"{companion} packs a dim that the tensor lacks",
            got=str(companion.dim),
            want=f"0 to {num_dims - 1}",
        )
    return tuple(companion.factor if i == companion.dim else 1 for i in range(num_dims))
