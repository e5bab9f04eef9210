"""The grammar of the notation, and its parser.

Blanks are allowed between tokens:

    layout  = ( "[" [ dim { "," dim } ] "]" | flat ) { clause }        [] is a 0-d tensor
    dim     = term { term }                                            a product, major first
    term    = atom { split }                                           a split binds tighter than a product
    atom    = size | "(" dim { "+" dim } ")" | "<" part { "|" part } ">" | "pad(" dim "," count ")"
                                                                       a sum lies end to end, as parts without names
    part    = name ":" dim                                             parts lie end to end
    split   = ( "/" | "/~" | "/=" ) axis [ "%" count ] [ "{" count { "," count } "}" ]
    size    = integer | name                                           bound by a shape
    count   = factor { "*" factor }                                    only in pad, % and {}
    factor  = integer | name                                           a size, or an axis for its length
    clause  = "in" view | "where" axis "=" place { "," axis "=" place } | "sum(" axis ")"
    place   = integer | integer ".." integer | "last"                  a range includes both ends
    flat    = "flat(" member { "," member } [ "," "pad" count ] ")" { split }
    member  = title "[" [ dim { "," dim } ] "]"                        may stand in quotes: q "[64, 64]"
    axis    = name ; view = name
    name    = a letter or "_", then letters, digits, "_" and "."       the name of a size is not pad
    title   = letters, digits, "_", "-" and "."                        a tensor's name
    naming  = { text | "{" dim "}" }                                   a tensor's name: a dim's index in each group

`/` cuts evenly and must divide; `/~` cuts like torch.chunk (the last ranks hold less, or nothing), `/=` like
numpy.array_split. A list in braces gives the sizes (only after `/`); `%b` cuts only at multiples of b.
"""

from __future__ import annotations

import re
from typing import cast

from xrank.layout.notation import (
    MAX_DEPTH,
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
from xrank.layout.scanner import Scanner


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
