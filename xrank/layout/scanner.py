"""Split a text into tokens, and make the errors for unexpected tokens."""

from __future__ import annotations

import re
from typing import NamedTuple

from xrank.errors import LayoutError
from xrank.layout.notation import MAX_CHARACTERS, MAX_SIZE


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
