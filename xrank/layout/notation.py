"""The notation: its trees, the canonical text of each tree, and the parser of texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, cast

from msgspec import Struct
from msgspec.structs import replace

from xrank.errors import LayoutError

MAX_CHARACTERS = 10_000
"""The longest text that is parsed; layouts in use have fewer than a hundred characters."""

MAX_DEPTH = 32
"""Largest depth of a dim's tree, so functions over it can recurse."""

MAX_SIZE = (1 << 63) - 1
"""The largest integer that is parsed: element addresses are 64-bit numbers."""

SplitKind: TypeAlias = Literal["/", "/~", "/="]

Count: TypeAlias = tuple[int | str, ...]
"""A number of positions as factors: integers, sizes, or axes, which stand for their lengths."""


class Size(Struct, frozen=True):
    """A whole dim: an integer, or a name that a shape binds to an integer."""

    value: int | str


class Product(Struct, frozen=True):
    """Dims as digits of one dim, major first; the factors are not products."""

    factors: tuple[Node, ...]


class Part(Struct, frozen=True):
    """One dim of `Parts`; its name is empty in a sum."""

    name: str
    of: Node


class Parts(Struct, frozen=True):
    """Dims laid end to end, locally and globally: ``<q: a | k: b>``, or without names the sum ``(a + b)``."""

    parts: tuple[Part, ...]

    @property
    def is_sum(self) -> bool:
        """Whether the parts have no names, so that they count as one size."""
        return not self.parts[0].name


class Pad(Struct, frozen=True):
    """A dim whose local size is rounded up to a multiple; the added positions are padding."""

    of: Node
    multiple: Count


class Split(Struct, frozen=True):
    """A range of the local positions of a dim for each coordinate along an axis."""

    of: Node
    axis: str
    kind: SplitKind
    """``/`` equal ranges, ``/~`` ceil chunks, ``/=`` balanced ranges."""
    unit: Count | None = None
    """Cuts are only at multiples of it."""
    sizes: tuple[Count, ...] | None = None
    """The sizes of the ranges, if they are listed; then the kind is ``/``."""


class Member(Struct, frozen=True):
    """A tensor whose local elements are in a flat buffer, row-major."""

    name: str
    dims: tuple[Node, ...]


class Flat(Struct, frozen=True):
    """The local elements of tensors end to end in one dim, padded at the end; the only dim of its layout."""

    members: tuple[Member, ...]
    multiple: Count | None = None


Node: TypeAlias = Size | Product | Parts | Pad | Split | Flat


class Where(Struct, frozen=True):
    """The places along an axis whose ranks hold the tensor: first to last, inclusive; None is the last place."""

    axis: str
    first: int | None
    last: int | None


class LayoutTree(Struct, frozen=True, cache_hash=True):
    """A whole layout: dims and clauses. Caches look one up for each rank and tensor, so its hash is made once."""

    dims: tuple[Node, ...]
    view: str | None = None
    """The view of the mesh whose axes it may use in addition to the mesh's own."""
    where: tuple[Where, ...] = ()
    """The ranks that hold the tensor, with each axis at most once; empty: all ranks."""
    sums: tuple[str, ...] = ()
    """Axes along which the ranks hold addends."""


def render(tree: LayoutTree) -> str:
    """Return the canonical text of a layout; `parse` is the inverse."""
    dims = tree.dims
    node = dims[0] if len(dims) == 1 else None
    while isinstance(node, Split):
        node = node.of
    # A flat layout's dim has no brackets around it, only around its members' dims.
    text = render_dim(dims[0]) if isinstance(node, Flat) else _bracket(dims)
    if tree.view is not None:
        text += f" in {tree.view}"
    if tree.where:
        text += " where " + ", ".join(f"{where.axis}={_place(where)}" for where in tree.where)
    return text + "".join(f" sum({axis})" for axis in tree.sums)


def render_dim(node: Node) -> str:
    """Return the text of one dim."""
    match node:
        case Size(value):
            return str(value)
        case Product(factors):
            return " ".join(_term(factor) for factor in factors)
        case Parts(parts) if node.is_sum:
            return "(" + " + ".join(render_dim(part.of) for part in parts) + ")"
        case Parts(parts):
            return "<" + " | ".join(f"{part.name}: {render_dim(part.of)}" for part in parts) + ">"
        case Pad(of, multiple):
            return f"pad({render_dim(of)}, {render_count(multiple)})"
        case Split(of, axis, kind, unit, sizes):
            text = f"{_term(of)}{kind}{axis}"
            if unit is not None:
                text += f"%{render_count(unit)}"
            return text if sizes is None else text + "{" + ",".join(map(render_count, sizes)) + "}"
        case Flat(members, multiple):
            inner = [f"{member.name} {_bracket(member.dims)}" for member in members]
            return "flat(" + ", ".join(inner if multiple is None else [*inner, f"pad {render_count(multiple)}"]) + ")"


def render_count(count: Count) -> str:
    """Return the text of a count."""
    return "*".join(map(str, count))


def _term(node: Node) -> str:
    # A split binds tighter than a product, so a product as an operand or a factor needs parentheses.
    return f"({render_dim(node)})" if isinstance(node, Product) else render_dim(node)


def _bracket(dims: tuple[Node, ...]) -> str:
    return "[" + ", ".join(render_dim(dim) for dim in dims) + "]"


def _place(where: Where) -> str:
    if where.first is None:
        return "last"
    return str(where.first) if where.first == where.last else f"{where.first}..{where.last}"


def children(node: Node) -> tuple[Node, ...]:
    """Return the child nodes of a node, in the order of the text."""
    match node:
        case Size():
            return ()
        case Product(factors):
            return factors
        case Parts(parts):
            return tuple(part.of for part in parts)
        case Pad(of) | Split(of):
            return (of,)
        case Flat(members):
            return tuple(dim for member in members for dim in member.dims)


def walk(node: Node) -> Iterator[Node]:
    """Yield the nodes of a tree in post-order."""
    for child in children(node):
        yield from walk(child)
    yield node


@lru_cache(maxsize=4096)
def axes_of(node: Node) -> tuple[str, ...]:
    """Return the axes that cut a dim, each once, in the order of the cuts."""
    return tuple(dict.fromkeys(below.axis for below in walk(node) if isinstance(below, Split)))


@lru_cache(maxsize=4096)
def size_names_of(node: Node) -> tuple[str, ...]:
    """Return the names of sizes in a dim, each once, in the order of the text."""
    values = (below.value for below in walk(node) if isinstance(below, Size))
    return tuple(dict.fromkeys(value for value in values if isinstance(value, str)))


@lru_cache(maxsize=4096)
def count_names_of(node: Node) -> tuple[str, ...]:
    """Return the names in a dim's counts, each once: sizes, or axes, which stand for their lengths."""
    factors = (factor for below in walk(node) for count in _counts(below) for factor in count)
    return tuple(dict.fromkeys(factor for factor in factors if isinstance(factor, str)))


def _counts(node: Node) -> tuple[Count, ...]:
    match node:
        case Pad(_, multiple):
            return (multiple,)
        case Split(unit=unit, sizes=sizes):
            return (*(() if unit is None else (unit,)), *(sizes or ()))
        case Flat(multiple=multiple):
            return () if multiple is None else (multiple,)
    return ()


def with_sizes(tree: LayoutTree, sizes: Mapping[str, int]) -> LayoutTree:
    """Return the layout with these names replaced by numbers."""
    return replace(tree, dims=tuple(_with_sizes(dim, sizes) for dim in tree.dims))


def _with_sizes(node: Node, sizes: Mapping[str, int]) -> Node:
    def number(count: Count) -> Count:
        return tuple(sizes.get(factor, factor) if isinstance(factor, str) else factor for factor in count)

    match node:
        case Size(value):
            return Size(sizes.get(value, value)) if isinstance(value, str) else node
        case Product(factors):
            return Product(tuple(_with_sizes(factor, sizes) for factor in factors))
        case Parts(parts):
            return Parts(tuple(Part(part.name, _with_sizes(part.of, sizes)) for part in parts))
        case Pad(of, multiple):
            return Pad(_with_sizes(of, sizes), number(multiple))
        case Split(of, axis, kind, unit, listed):
            each = None if listed is None else tuple(map(number, listed))
            return Split(_with_sizes(of, sizes), axis, kind, None if unit is None else number(unit), each)
        case Flat(members, multiple):
            dims = (tuple(_with_sizes(dim, sizes) for dim in member.dims) for member in members)
            named = tuple(Member(member.name, own) for member, own in zip(members, dims, strict=True))
            return Flat(named, None if multiple is None else number(multiple))


class Token(NamedTuple):
    """A token and its position in the text."""

    kind: str  # "name", "integer", "end", "other" (no token at all), or the text itself
    text: str
    position: int


_TOKEN = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_.]*)|(?P<integer>[0-9]+)"
    r"|(?P<mark>/~|/=|\.\.|[\[\],/(){}<>|:*%=+\"])|(?P<other>[^ \t\r\n])"
)
_LITERAL = re.compile(r"[^\s{}\[]*")


def _escape(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def parse(text: str) -> LayoutTree:
    """Parse a layout's text; LayoutError, with the text, the place and the expected token, if it is malformed."""
    reader = TextParser(text)
    tree = reader.layout()
    reader.end()
    return tree


_TITLE = re.compile(r"[A-Za-z0-9_.\-]+")
_TERM_BEGINS = frozenset(("name", "integer", "(", "<"))
_SPLITS = frozenset(("/", "/~", "/="))
_A_SIZE = "a size, which is an integer or a name"


class TextParser:
    """A recursive-descent parser with one method per rule of the grammar; `label` is what the text is, for errors.

    After the last token of the text, the next one is always "end".
    """

    _depth = 0  # open groups, parts and pads

    def __init__(self, text: str, label: str = "a layout") -> None:
        if not isinstance(text, str):
            raise LayoutError(f"{label} is not text", got=type(text).__name__, want='text such as "[f/tp, h]"')
        if len(text) > MAX_CHARACTERS:
            what = f"{label}'s text {_escape(text[:40])!r}... is too long"
            raise LayoutError(what, got=f"{len(text)} characters", want=f"at most {MAX_CHARACTERS}")
        self.text, self._label = text, label
        self._go_to(0)

    def end(self) -> None:
        """Refuse further tokens."""
        if self.next.kind != "end":
            raise self.refusal("the end of the text")

    def literal(self, start: int = 0) -> str:
        """Read the text of a name up to the next group or blank, from a position on."""
        match = _LITERAL.match(self.text, start)
        text = match[0] if match else ""
        self._go_to(start + len(text))
        return text

    def take(self, kind: str, want: str | None = None) -> str:
        """Consume a token of this kind and return its text."""
        token = self.next
        if token.kind != kind:
            raise self.refusal(want or f'"{kind}"')
        self._go_to(token.position + len(token.text))
        return token.text

    def raw(self, pattern: re.Pattern[str], want: str) -> str:
        """Consume the text that a pattern matches at the next token, and return it."""
        match = pattern.match(self.text, self.next.position)
        if match is None or match.end() == match.start():
            raise self.refusal(want)
        self._go_to(match.end())
        return match[0]

    def accept(self, kind: str) -> bool:
        """Consume the next token if it has this kind; return whether it did."""
        if self.next.kind == kind:
            self.take(kind)
            return True
        return False

    def integer(self, want: str) -> int:
        """Consume an integer up to `MAX_SIZE`."""
        token = self.next
        # Check the length first: int() of thousands of digits is slow, and Python refuses it.
        if token.kind == "integer" and (len(token.text) > 19 or int(token.text) > MAX_SIZE):
            raise self.refusal(f"an integer up to {MAX_SIZE}")
        value = int(self.take("integer", want))
        # "4f" would be read as the product "4 f".
        if self.next.kind == "name" and self.next.position == self._end:
            raise self.refusal(f'a space or a symbol after the integer "{token.text}"')
        return value

    def refusal(self, want: str, next_step: str | None = None) -> LayoutError:
        """Return the error for an unexpected next token."""
        token = self.next
        before, after = self.text[: token.position], self.text[token.position :]
        found = "the text ends" if token.kind == "end" else f"{_escape(token.text[:40])!r} is"
        # Show only a part of a long text, around the place.
        shown = _escape(("..." if len(before) > 60 else "") + before[-60:] + ">>>" + after[:40])
        what = f"{self._label} cannot be read: {found} at position {token.position} of '{shown}', instead of {want}"
        return LayoutError(what, got=f"'{shown}', position {token.position}", want=want, next_step=next_step)

    def _go_to(self, position: int) -> None:
        """Make the next token the one that begins at a position, after blanks."""
        self._end = position  # of the previous token
        match = _TOKEN.search(self.text, position)
        if match is None:
            self.next = Token("end", "", len(self.text))
            return
        kind = match.lastgroup or "other"
        self.next = Token(match[0] if kind == "mark" else kind, match[0], match.start())

    def layout(self) -> LayoutTree:
        """Parse a layout with its clauses."""
        if self.next.text == "flat":
            return self._clauses((self._splits(self._flat()),))
        return self._clauses(self._dims('a layout, which begins with "[" or "flat("'))

    def naming(self) -> tuple[tuple[str, ...], tuple[Node, ...]]:
        """Parse a tensor's name with dims: the texts around the dims (one more than dims), and the dims."""
        texts, dims = [self.literal()], []
        while self.next.kind == "{":
            self.take("{")
            dims.append(self.dim())
            if self.next.kind != "}":
                raise self.refusal('a split, a term or "}"')
            # The name continues: read literal text, without tokens and without skipping blanks.
            texts.append(self.literal(self.next.position + 1))
            if self.next.kind == "{" and not texts[-1]:
                raise self.refusal("some text between two groups, or the end of the name")
        return tuple(texts), tuple(dims)

    def dim(self) -> Node:
        """Parse one dim."""
        terms: list[Node] = []
        while not terms or self.next.kind in _TERM_BEGINS:
            term = self._splits(self._atom())
            # (a b) c and a b c are the same product.
            terms += term.factors if isinstance(term, Product) else (term,)
        node = terms[0] if len(terms) == 1 else Product(tuple(terms))
        if _depth(node) > MAX_DEPTH:
            raise self.refusal(f"at most {MAX_DEPTH} levels in one dim")
        if self.next.kind == "+" and not self._depth:
            raise self.refusal('a split, a term or a closing mark: a sum stands in parentheses, such as "(a + b)"')
        if self.next.kind not in (",", "]", ")", "|", ">", "}", "+", "end"):
            raise self.refusal('a split, a term, "," or a closing mark')
        return node

    def _dims(self, want: str) -> tuple[Node, ...]:
        self.take("[", want)
        dims: list[Node] = []
        if self.accept("]"):
            return ()
        while not dims or self.accept(","):
            dims.append(self.dim())
        self.take("]", 'a split, a term, "," or "]"')
        return tuple(dims)

    def _atom(self) -> Node:
        match self.next.kind:
            case "integer":
                return Size(self.integer(_A_SIZE))
            case "(":
                return self._group()
            case "<":
                return self._parts()
            case "name" if self.next.text == "pad":
                self.take("name")
                self._enter("(", '"(": pad is not a name of a size')
                of = self.dim()
                self.take(",", 'a split, a term or ","')
                multiple = self.count()
                self._leave(")", '"*" or ")"')
                return Pad(of, multiple)
        return Size(self.take("name", _A_SIZE))

    def _group(self) -> Node:
        self._enter("(")
        addends = [self.dim()]
        while self.accept("+"):
            addends.append(self.dim())
        self._leave(")", 'a split, a term, "+" or ")"')
        return addends[0] if len(addends) == 1 else Parts(tuple(Part("", addend) for addend in addends))

    def _parts(self) -> Parts:
        self._enter("<")
        parts: list[Part] = []
        while not parts or self.accept("|"):
            place = self.next
            name = self.take("name", "a part's name")
            if any(part.name == name for part in parts):
                # The error points at the repeated name, not after it.
                self.next = place
                raise self.refusal("a name that no other part has")
            self.take(":")
            parts.append(Part(name, self.dim()))
        self._leave(">", 'a split, a term, "|" or ">"')
        return Parts(tuple(parts))

    def _splits(self, node: Node) -> Node:
        # Counted along: measuring the tree after each split would be quadratic.
        depth = _depth(node) if self.next.kind in _SPLITS else 0
        while self.next.kind in _SPLITS:
            depth += 1
            if depth > MAX_DEPTH:
                raise self.refusal(f"at most {MAX_DEPTH - 1} splits in one dim")
            kind = cast(SplitKind, self.take(self.next.kind))
            axis = self.take("name", "an axis")
            unit = self.count() if self.accept("%") else None
            sizes: tuple[Count, ...] | None = None
            if self.next.kind == "{":
                if kind != "/":
                    raise self.refusal(f'no listed sizes after "{kind}"', 'list sizes after "/" only')
                self.take("{")
                sizes = (self.count(),)
                while self.accept(","):
                    sizes += (self.count(),)
                self.take("}", '"*", "," or "}"')
            node = Split(node, axis, kind, unit, sizes)
        return node

    def count(self) -> Count:
        """Parse a count."""
        factors: list[int | str] = []
        while not factors or self.accept("*"):
            want = "a count, which is an integer or a name"
            factors.append(self.take("name") if self.next.kind == "name" else self.integer(want))
        return tuple(factors)

    def _enter(self, mark: str, want: str | None = None) -> None:
        # Checked on the way in: the parser itself recurses, so the finished tree would be too late.
        if self._depth >= MAX_DEPTH - 1:
            raise self.refusal(f"at most {MAX_DEPTH - 1} groups in each other")
        self.take(mark, want)
        self._depth += 1

    def _leave(self, mark: str, want: str) -> None:
        self.take(mark, want)
        self._depth -= 1

    def _flat(self) -> Flat:
        self.take("name")
        self.take("(", '"(" after flat')
        members: list[Member] = []
        multiple = None
        while not members or self.accept(","):
            place = self.next
            name = self.raw(_TITLE, "a tensor's name")
            if name == "pad" and members:
                multiple = self.count()
                break
            if any(member.name == name for member in members):
                self.next = place
                raise self.refusal("a name that no other member has")
            quoted = self.accept('"')
            members.append(Member(name, self._dims('"[": the layout of a member')))
            if quoted:
                self.take('"')
        self.take(")", '"," or ")"' if multiple is None else '"*" or ")"')
        return Flat(tuple(members), multiple)

    def _clauses(self, dims: tuple[Node, ...]) -> LayoutTree:
        view: str | None = None
        where: list[Where] = []
        sums: list[str] = []
        while self.next.kind == "name":
            word = self.next.text
            if word == "in" and view is None:
                self.take("name")
                view = self.take("name", "the name of a view")
            elif word == "where" and not where:
                self.take("name")
                while not where or self.accept(","):
                    where.append(self._place_along(where))
            elif word == "sum":
                self.take("name")
                self.take("(")
                if self.next.text in sums:
                    raise self.refusal("an axis that is summed once")
                sums.append(self.take("name", "an axis"))
                self.take(")")
            else:
                raise self.refusal('a clause: "in", "where" or "sum(", each but the last at most once')
        return LayoutTree(dims, view, tuple(where), tuple(sums))

    def _place_along(self, known: list[Where]) -> Where:
        if any(where.axis == self.next.text for where in known):
            raise self.refusal("an axis without an index")
        axis = self.take("name", "an axis")
        self.take("=")
        if self.next.text == "last":
            self.take("name")
            return Where(axis, None, None)
        first = self.integer('an index: an integer, a range such as 0..3, or "last"')
        if not self.accept(".."):
            return Where(axis, first, first)
        if self.next.kind == "integer" and len(self.next.text) < 20 and int(self.next.text) < first:
            raise self.refusal(f"an index of {first} or more")
        return Where(axis, first, self.integer("the last index of the range"))


def _depth(node: Node) -> int:
    return 1 + max(map(_depth, children(node)), default=0)
