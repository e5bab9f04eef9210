"""The notation's grammar, and its parser.

Blanks are allowed between tokens:

    layout  = ( "[" [ dim { "," dim } ] "]" | flat ) { clause }        [] is a 0-d tensor
    dim     = term { term }                                            a product, major first
    term    = atom { split }                                           a split binds tighter than a product
    atom    = size | "(" dim ")" | "<" part { "|" part } ">" | "pad(" dim "," count ")"
    part    = name ":" dim                                             parts lie end to end
    split   = ( "/" | "/~" | "/=" ) axis [ "%" count ] [ "{" count { "," count } "}" ]
    size    = integer | name                                           bound when the layout meets a shape
    count   = factor { "*" factor }                                    only in pad, % and {}
    factor  = integer | name                                           a size, or an axis, meaning its length
    clause  = "in" view | "where" axis "=" place { "," axis "=" place } | "sum(" axis ")"
    place   = integer | integer ".." integer | "last"                  both ends of a range included
    flat    = "flat(" member { "," member } [ "," "pad" count ] ")" { split }
    member  = title "[" [ dim { "," dim } ] "]"                        may stand in quotes: q "[64, 64]"
    axis    = name ; view = name
    name    = a letter or "_", then letters, digits, "_" and "."       a size is not called pad
    title   = letters, digits, "_", "-" and "."                        a tensor's name
    naming  = { text | "{" dim "}" }                                   a tensor's name with dims in it

`/` cuts evenly and must divide, `/~` as torch.chunk does (the last ranks hold less, or nothing), `/=` as
numpy.array_split does; a list in braces gives the sizes themselves (after `/` only), `%b` cuts at multiples of b only.
"""

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

__all__ = ["Reader", "parse"]


def parse(text: str) -> LayoutTree:
    """Read a layout's text.

    Raises:
        LayoutError: the text is none; names the text, the place and what was expected there.
    """
    reader = Reader(text)
    tree = reader.layout()
    reader.end()
    return tree


class _Token(NamedTuple):
    kind: str  # "name", "integer", "end", "other" (no token at all), or the text itself
    text: str
    position: int


_TOKEN = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_.]*)|(?P<integer>[0-9]+)"
    r"|(?P<mark>/~|/=|\.\.|[\[\],/(){}<>|:*%=\"])|(?P<other>.)",
    re.DOTALL,
)
_BLANKS = re.compile(r"[ \t\r\n]*")
_TITLE = re.compile(r"[A-Za-z0-9_.\-]+")
_TERM_BEGINS = frozenset(("name", "integer", "(", "<"))
_SPLITS = frozenset(("/", "/~", "/="))
_A_SIZE = "a size, which is an integer or a name"


class Reader:
    """Reads tokens one way, one rule of the grammar a method; at the end of the text the next token is "end" for ever.

    Args:
        text: what is read.
        what: what the text is said to be in errors.
    """

    def __init__(self, text: str, what: str = "a layout") -> None:
        if not isinstance(text, str):
            raise LayoutError(f"{what} is not text", got=type(text).__name__, want='text such as "[f/tp, h]"')
        if len(text) > MAX_CHARACTERS:
            raise LayoutError(
                f"{what}'s text {_shown(text[:40])!r}... is too long",
                got=f"{len(text)} characters",
                want=f"at most {MAX_CHARACTERS}",
            )
        self.text = text
        self._what = what
        self._depth = 0  # open groups, parts and pads
        self._next = self._token(0)
        self._end = 0  # one past the token before the next one

    def layout(self) -> LayoutTree:
        """Read a layout with its clauses."""
        if self._next.text == "flat":
            return self._clauses((self._splits(self._flat()),))
        return self._clauses(self._dims('a layout, which begins with "[" or "flat("'))

    def end(self) -> None:
        """Refuse anything that still follows."""
        if self._next.kind != "end":
            raise self.refusal("the end of the text")

    def dim(self) -> Node:
        """Read one dim."""
        terms: list[Node] = []
        while not terms or self._next.kind in _TERM_BEGINS:
            term = self._splits(self._atom())
            # (a b) c and a b c are one product.
            terms += term.factors if isinstance(term, Product) else (term,)
        node = terms[0] if len(terms) == 1 else Product(tuple(terms))
        if _depth(node) > MAX_DEPTH:
            raise self.refusal(f"at most {MAX_DEPTH} levels in one dim")
        if self._next.kind not in (",", "]", ")", "|", ">", "}", "end"):
            raise self.refusal('a split, a term, "," or a closing mark')
        return node

    def take(self, kind: str, want: str | None = None) -> str:
        """Pass a token of this kind and return its text."""
        token = self._next
        if token.kind != kind:
            raise self.refusal(want or f'"{kind}"')
        self._end = token.position + len(token.text)
        self._next = self._token(self._end)
        return token.text

    def raw(self, pattern: re.Pattern[str], want: str) -> str:
        """Pass what the pattern matches where the next token begins, and return it."""
        match = pattern.match(self.text, self._next.position)
        if match is None or match.end() == match.start():
            raise self.refusal(want)
        self._end = match.end()
        self._next = self._token(self._end)
        return match[0]

    def passed(self, kind: str) -> bool:
        """Pass the next token if it is of this kind, and say so."""
        if self._next.kind == kind:
            self.take(kind)
            return True
        return False

    def integer(self, want: str) -> int:
        """Read an integer up to `MAX_SIZE`."""
        token = self._next
        # A long run of digits is refused by its length: int() of thousands of digits is slow, and refused by Python.
        if token.kind == "integer" and (len(token.text) > 19 or int(token.text) > MAX_SIZE):
            raise self.refusal(f"an integer up to {MAX_SIZE}")
        value = int(self.take("integer", want))
        if self._next.kind == "name" and self._next.position == self._end:
            raise self.refusal(f'a blank or another mark after the integer "{token.text}"')
        return value

    def refusal(self, want: str, next_step: str | None = None) -> LayoutError:
        """Return the error that the next token is not what the grammar wants there."""
        token = self._next
        before, after = self.text[: token.position], self.text[token.position :]
        found = "the text ends" if token.kind == "end" else f"{_shown(token.text[:40])!r} stands"
        # A long text is shown around the place only.
        shown = _shown(("..." if len(before) > 60 else "") + before[-60:] + ">>>" + after[:40])
        return LayoutError(
            f"{self._what} cannot be read: {found} at position {token.position} of '{shown}', not {want}",
            got=f"'{shown}', position {token.position}",
            want=want,
            next_step=next_step,
        )

    def _token(self, position: int) -> _Token:
        blanks = _BLANKS.match(self.text, position)
        start = position if blanks is None else blanks.end()
        match = _TOKEN.match(self.text, start)
        if match is None:
            return _Token("end", "", start)
        kind = match.lastgroup or "other"
        return _Token(match[0] if kind == "mark" else kind, match[0], start)

    def _dims(self, want: str) -> tuple[Node, ...]:
        self.take("[", want)
        dims: list[Node] = []
        if self._next.kind == "]":
            self.take("]")
            return ()
        while not dims or self.passed(","):
            dims.append(self.dim())
        self.take("]", 'a split, a term, "," or "]"')
        return tuple(dims)

    def _atom(self) -> Node:
        match self._next.kind:
            case "integer":
                return Size(self.integer(_A_SIZE))
            case "(":
                self._enter("(")
                node = self.dim()
                self._leave(")", 'a split, a term or ")"')
                return node
            case "<":
                return self._parts()
            case "name" if self._next.text == "pad":
                self.take("name")
                self._enter("(", '"(": pad is no name of a size')
                of = self.dim()
                self.take(",", 'a split, a term or ","')
                multiple = self.count()
                self._leave(")", '"*" or ")"')
                return Pad(of, multiple)
        return Size(self.take("name", _A_SIZE))

    def _parts(self) -> Parts:
        self._enter("<")
        parts: list[Part] = []
        while not parts or self.passed("|"):
            place = self._next
            name = self.take("name", "a part's name")
            if any(part.name == name for part in parts):
                self._next = place
                raise self.refusal("a name that no other part has")
            self.take(":")
            parts.append(Part(name, self.dim()))
        self._leave(">", 'a split, a term, "|" or ">"')
        return Parts(tuple(parts))

    def _splits(self, node: Node) -> Node:
        depth = _depth(node) if self._next.kind in _SPLITS else 0
        while self._next.kind in _SPLITS:
            depth += 1
            if depth > MAX_DEPTH:
                raise self.refusal(f"at most {MAX_DEPTH - 1} splits in one dim")
            kind = cast(SplitKind, self.take(self._next.kind))
            axis = self.take("name", "an axis")
            unit = self.count() if self.passed("%") else None
            sizes = None
            if self._next.kind == "{":
                if kind != "/":
                    raise self.refusal(f'no listed sizes after "{kind}"', 'list sizes after "/" only')
                sizes = self._listed()
            node = Split(node, axis, kind, unit, sizes)
        return node

    def _listed(self) -> tuple[Count, ...]:
        self.take("{")
        sizes: list[Count] = []
        while not sizes or self.passed(","):
            sizes.append(self.count())
        self.take("}", '"*", "," or "}"')
        return tuple(sizes)

    def count(self) -> Count:
        """Read a count."""
        factors: list[int | str] = []
        while not factors or self.passed("*"):
            want = "a count, which is an integer or a name"
            factors.append(self.take("name") if self._next.kind == "name" else self.integer(want))
        return tuple(factors)

    def _enter(self, mark: str, want: str | None = None) -> None:
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
        while not members or self.passed(","):
            place = self._next
            name = self.raw(_TITLE, "a tensor's name")
            if name == "pad" and members:
                multiple = self.count()
                break
            if any(member.name == name for member in members):
                self._next = place
                raise self.refusal("a name that no other member has")
            quoted = self.passed('"')
            members.append(Member(name, self._dims('"[": the layout of a member')))
            if quoted:
                self.take('"')
        self.take(")", '"," or ")"' if multiple is None else '"*" or ")"')
        return Flat(tuple(members), multiple)

    def _clauses(self, dims: tuple[Node, ...]) -> LayoutTree:
        view: str | None = None
        where: list[Where] = []
        sums: list[str] = []
        while self._next.kind == "name":
            word = self._next.text
            if word == "in" and view is None:
                self.take("name")
                view = self.take("name", "the name of a view")
            elif word == "where" and not where:
                self.take("name")
                while not where or self.passed(","):
                    where.append(self._where(where))
            elif word == "sum":
                self.take("name")
                self.take("(")
                if self._next.text in sums:
                    raise self.refusal("an axis that is summed once")
                sums.append(self.take("name", "an axis"))
                self.take(")")
            else:
                raise self.refusal('a clause: "in", "where" or "sum(", each but the last at most once')
        return LayoutTree(dims, view, tuple(where), tuple(sums))

    def _where(self, known: list[Where]) -> Where:
        if any(where.axis == self._next.text for where in known):
            raise self.refusal("an axis that has no place yet")
        axis = self.take("name", "an axis")
        self.take("=")
        if self._next.text == "last":
            self.take("name")
            return Where(axis, None, None)
        first = self.integer('a place: an integer, a range such as 0..3, or "last"')
        if not self.passed(".."):
            return Where(axis, first, first)
        if self._next.kind == "integer" and len(self._next.text) < 20 and int(self._next.text) < first:
            raise self.refusal(f"a place from {first} on")
        return Where(axis, first, self.integer("the last place of the range"))


def _depth(node: Node) -> int:
    return 1 + max(map(_depth, children(node)), default=0)


def _shown(text: str) -> str:
    """Return the text with everything that a terminal would not print as it is written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
