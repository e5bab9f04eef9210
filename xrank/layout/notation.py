"""The notation: text to a tree of dims and back. What the trees mean stands in `xrank.layout.local_part`.

The grammar read so far, blanks between tokens allowed:

    layout  = "[" [ dim { "," dim } ] "]"                              [] is a 0-d tensor
    dim     = size { split }
    split   = ("/" | "/~") axis                                        even | ceil chunks, as torch.chunk cuts
    size    = integer | name                                           bound when the layout meets a shape
    axis    = name
    name    = a letter or "_", then letters, digits, "_" and "."

The full grammar also has products, parts, pad, flat, other splits and clauses. Their tokens are known here, so that
meeting one is told apart from a typing error. Adding a construct is one more node class, one more case in `children`
and `render`, and its rule in `_Reader`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from xrank.errors import LayoutError

__all__ = [
    "MAX_CHARACTERS",
    "MAX_DEPTH",
    "MAX_SIZE",
    "Node",
    "Size",
    "Split",
    "SplitKind",
    "axes_of",
    "parse",
    "render",
    "render_dim",
    "size_names_of",
]

MAX_CHARACTERS = 10_000
"""The longest text read; layouts in use have fewer than a hundred characters."""

MAX_DEPTH = 32
"""How deep a dim's tree may be, so that functions over it can recurse."""

MAX_SIZE = (1 << 63) - 1
"""The largest integer read: element addresses are 64-bit numbers."""

SplitKind: TypeAlias = Literal["/", "/~"]


@dataclass(frozen=True, slots=True)
class Size:
    """A whole dim: an integer, or a name that is bound to one when the layout meets a shape."""

    value: int | str


@dataclass(frozen=True, slots=True)
class Split:
    """A range of the local positions of what stands before it, one for each coordinate along an axis."""

    of: Node
    axis: str
    kind: SplitKind


Node: TypeAlias = Size | Split


def parse(text: str) -> tuple[Node, ...]:
    """Read a layout's text into one node a dim.

    Raises:
        LayoutError: the text is none; names the text, the place and what was expected there.
    """
    if not isinstance(text, str):
        raise LayoutError("a layout is not text", got=type(text).__name__, want='text such as "[f/tp, h]"')
    if len(text) > MAX_CHARACTERS:
        raise LayoutError(
            f"the layout {_shown(text[:40])!r}... is too long",
            got=f"{len(text)} characters",
            want=f"at most {MAX_CHARACTERS}",
        )
    return _Reader(text).layout()


def render(dims: tuple[Node, ...]) -> str:
    """Return the one text of these dims; `parse` gives them back."""
    return "[" + ", ".join(render_dim(dim) for dim in dims) + "]"


def render_dim(node: Node) -> str:
    """Return the text of one dim."""
    match node:
        case Size(value):
            return str(value)
        case Split(of, axis, kind):
            return f"{render_dim(of)}{kind}{axis}"


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes that stand right below a node, in the order of the text."""
    match node:
        case Size():
            return ()
        case Split(of):
            return (of,)


def axes_of(node: Node) -> tuple[str, ...]:
    """Return the axes that cut a dim, in the order of cutting; one that cuts twice is there twice."""
    below = tuple(axis for child in children(node) for axis in axes_of(child))
    return (*below, node.axis) if isinstance(node, Split) else below


def size_names_of(node: Node) -> tuple[str, ...]:
    """Return the sizes of a dim that are names, in the order of the text."""
    if isinstance(node, Size):
        return (node.value,) if isinstance(node.value, str) else ()
    return tuple(name for child in children(node) for name in size_names_of(child))


class _Token(NamedTuple):
    kind: str  # "name", "integer", "end", "other" (no token at all), or the text itself
    text: str
    position: int


_TOKEN = re.compile(
    r"(?P<blank>[ \t\r\n]+)|(?P<name>[A-Za-z_][A-Za-z0-9_.]*)|(?P<integer>[0-9]+)"
    r"|(?P<mark>/~|/=|[\[\],/(){}<>|:*%=+]|\.\.)|(?P<other>.)",
    re.DOTALL,
)

_LATER = {
    "(": "a group, pad(...) or flat(...)",
    "<": "parts",
    "|": "parts",
    ":": "parts",
    "/=": "a balanced split",
    "{": "listed sizes or a name's brace",
    "%": "a split at multiples",
    "*": "a count",
}
"""Marks of the full grammar that no rule here takes."""


def _tokens(text: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or "other"
        if kind != "blank":
            yield _Token(match[0] if kind == "mark" else kind, match[0], match.start())
    yield _Token("end", "", len(text))


class _Reader:
    """Reads tokens one way, one rule of the grammar a method; the last token is always "end" and never passed."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._index = 0

    @property
    def _next(self) -> _Token:
        return self._tokens[self._index]

    def layout(self) -> tuple[Node, ...]:
        self._take("[", 'a layout, which begins with "["')
        dims: list[Node] = []
        if self._next.kind != "]":
            dims.append(self._dim())
            while self._next.kind == ",":
                self._index += 1
                dims.append(self._dim())
        self._take("]", '"/", "/~", "," or "]"' if dims else 'a size or "]"')
        self._take("end", "the end of the text")
        return tuple(dims)

    def _dim(self) -> Node:
        node: Node = self._size()
        depth = 1
        while self._next.kind in ("/", "/~"):
            depth += 1
            if depth > MAX_DEPTH:
                raise self._refusal(f"at most {MAX_DEPTH - 1} splits in one dim")
            kind: SplitKind = "/" if self._next.kind == "/" else "/~"
            self._index += 1
            node = Split(node, self._take("name", "an axis").text, kind)
        return node

    def _size(self) -> Size:
        want = "a size, which is an integer or a name"
        if self._next.kind == "name":
            return Size(self._take("name", want).text)
        token = self._next
        # A long run of digits is refused by its length: int() of thousands of digits is slow, and refused by Python.
        if token.kind == "integer" and (len(token.text) > 19 or int(token.text) > MAX_SIZE):
            raise self._refusal(f"an integer up to {MAX_SIZE}")
        value = int(self._take("integer", want).text)
        following = self._next
        if following.kind == "name" and following.position == token.position + len(token.text):
            raise self._refusal(f'a blank or another mark after the integer "{token.text}"')
        return Size(value)

    def _take(self, kind: str, want: str) -> _Token:
        token = self._next
        if token.kind != kind:
            raise self._refusal(want)
        if kind != "end":
            self._index += 1
        return token

    def _refusal(self, want: str) -> LayoutError:
        """Return the error that the next token is not what the grammar wants there."""
        token = self._next
        before, after = self._text[: token.position], self._text[token.position :]
        found = "the text ends" if token.kind == "end" else f"{_shown(token.text[:40])!r} stands"
        # A long text is shown around the place only.
        shown = ("..." if len(before) > 60 else "") + before[-60:] + ">>>" + after[:40]
        return LayoutError(
            f"a layout cannot be read: {found} at position {token.position} of '{_shown(shown)}', not {want}",
            got=f"'{_shown(shown)}', position {token.position}",
            want=want,
            next_step=self._hint(token),
        )

    def _hint(self, token: _Token) -> str | None:
        before = self._tokens[self._index - 1].kind if self._index else ""
        later = _LATER.get(token.kind)
        if self._index and token.kind in ("name", "integer") and before in ("name", "integer"):
            later = "a product of sizes"
        elif before == "]" and token.kind == "name":
            later = "a clause"
        elif not self._index and token.text == "flat":
            later = "flat(...)"
        return None if later is None else f"write it otherwise: {later} cannot be used in a layout yet"


def _shown(text: str) -> str:
    """Return the text with everything that a terminal would not print as it is written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
