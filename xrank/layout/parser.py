"""The grammar of the notation, its tokens and its parser."""

from __future__ import annotations

import re
from typing import NamedTuple, cast

from xrank.errors import LayoutError
from xrank.layout.notation import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_SIZE,
    Count,
    Flat,
    LayoutTree,
    Member,
    Node,
    Pad,
    Part,
    Parts,
    Product,
    Size,
    Split,
    SplitKind,
    Where,
    children,
)


class Token(NamedTuple):
    """A token and its position in the text."""

    kind: str  # "name", "integer", "end", "other" (no token at all), or the text itself
    text: str
    position: int


_TOKEN = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_.]*)|(?P<integer>[0-9]+)"
    r"|(?P<mark>/~|/=|\.\.|[\[\],/(){}<>|:*%=+\"])|(?P<other>.)",
    re.DOTALL,
)
_BLANKS = re.compile(r"[ \t\r\n]*")
_LITERAL = re.compile(r"[^\s{}\[]*")


class Scanner:
    """Reads the tokens of a text in order; after the last one, the next token is always "end".

    Args:
        text: the text.
        label: what the text is, for errors.
    """

    def __init__(self, text: str, label: str = "a layout") -> None:
        if not isinstance(text, str):
            raise LayoutError(f"{label} is not text", got=type(text).__name__, want='text such as "[f/tp, h]"')
        if len(text) > MAX_CHARACTERS:
            raise LayoutError(
                f"{label}'s text {_escape(text[:40])!r}... is too long",
                got=f"{len(text)} characters",
                want=f"at most {MAX_CHARACTERS}",
            )
        self.text = text
        self._label = label
        self.next = self._token(0)
        self._end = 0  # the position after the previous token

    def end(self) -> None:
        """Refuse further tokens."""
        if self.next.kind != "end":
            raise self.refusal("the end of the text")

    def literal(self, start: int = 0) -> str:
        """Read the text of a name up to the next group or blank, from a position on."""
        match = _LITERAL.match(self.text, start)
        text = match[0] if match else ""
        self._end = start + len(text)
        self.next = self._token(self._end)
        return text

    def take(self, kind: str, want: str | None = None) -> str:
        """Consume a token of this kind and return its text."""
        token = self.next
        if token.kind != kind:
            raise self.refusal(want or f'"{kind}"')
        self._end = token.position + len(token.text)
        self.next = self._token(self._end)
        return token.text

    def raw(self, pattern: re.Pattern[str], want: str) -> str:
        """Consume the text that a pattern matches at the next token, and return it."""
        match = pattern.match(self.text, self.next.position)
        if match is None or match.end() == match.start():
            raise self.refusal(want)
        self._end = match.end()
        self.next = self._token(self._end)
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
            raise self.refusal(f'a blank or another mark after the integer "{token.text}"')
        return value

    def refusal(self, want: str, next_step: str | None = None) -> LayoutError:
        """Return the error for an unexpected next token."""
        token = self.next
        before, after = self.text[: token.position], self.text[token.position :]
        found = "the text ends" if token.kind == "end" else f"{_escape(token.text[:40])!r} stands"
        # Of a long text, show only the surroundings of the place.
        shown = _escape(("..." if len(before) > 60 else "") + before[-60:] + ">>>" + after[:40])
        return LayoutError(
            f"{self._label} cannot be read: {found} at position {token.position} of '{shown}', not {want}",
            got=f"'{shown}', position {token.position}",
            want=want,
            next_step=next_step,
        )

    def _token(self, position: int) -> Token:
        blanks = _BLANKS.match(self.text, position)
        start = position if blanks is None else blanks.end()
        match = _TOKEN.match(self.text, start)
        if match is None:
            return Token("end", "", start)
        kind = match.lastgroup or "other"
        return Token(match[0] if kind == "mark" else kind, match[0], start)


def _escape(text: str) -> str:
    """Return the text with escapes for all characters that are not printable."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def parse(text: str) -> LayoutTree:
    """Parse a layout's text.

    Raises:
        LayoutError: the text is malformed; the error names the text, the place and the expected token.
    """
    reader = TextParser(text)
    tree = reader.layout()
    reader.end()
    return tree


_TITLE = re.compile(r"[A-Za-z0-9_.\-]+")
_TERM_BEGINS = frozenset(("name", "integer", "(", "<"))
_SPLITS = frozenset(("/", "/~", "/="))
_A_SIZE = "a size, which is an integer or a name"


class TextParser(Scanner):
    """A recursive-descent parser with one method per rule of the grammar; arguments as in `Scanner`."""

    _depth = 0  # open groups, parts and pads

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
        if self.next.kind == "]":
            self.take("]")
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
            sizes = None
            if self.next.kind == "{":
                if kind != "/":
                    raise self.refusal(f'no listed sizes after "{kind}"', 'list sizes after "/" only')
                sizes = self._size_list()
            node = Split(node, axis, kind, unit, sizes)
        return node

    def _size_list(self) -> tuple[Count, ...]:
        self.take("{")
        sizes: list[Count] = []
        while not sizes or self.accept(","):
            sizes.append(self.count())
        self.take("}", '"*", "," or "}"')
        return tuple(sizes)

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
            raise self.refusal("an axis that has no place yet")
        axis = self.take("name", "an axis")
        self.take("=")
        if self.next.text == "last":
            self.take("name")
            return Where(axis, None, None)
        first = self.integer('a place: an integer, a range such as 0..3, or "last"')
        if not self.accept(".."):
            return Where(axis, first, first)
        if self.next.kind == "integer" and len(self.next.text) < 20 and int(self.next.text) < first:
            raise self.refusal(f"a place from {first} on")
        return Where(axis, first, self.integer("the last place of the range"))


def _depth(node: Node) -> int:
    return 1 + max(map(_depth, children(node)), default=0)
