"""Texts taken apart into tokens, and the errors that say where a text is not what was wanted."""

from __future__ import annotations

import re
from typing import NamedTuple

from xrank.errors import LayoutError
from xrank.layout.notation import MAX_CHARACTERS, MAX_SIZE

__all__ = ["Scanner", "Token"]


class Token(NamedTuple):
    """A piece of a text, and where it begins."""

    kind: str  # "name", "integer", "end", "other" (no token at all), or the text itself
    text: str
    position: int


_TOKEN = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_.]*)|(?P<integer>[0-9]+)"
    r"|(?P<mark>/~|/=|\.\.|[\[\],/(){}<>|:*%=\"])|(?P<other>.)",
    re.DOTALL,
)
_BLANKS = re.compile(r"[ \t\r\n]*")
_LITERAL = re.compile(r"[^\s{}\[]*")


class Scanner:
    """Passes over a text one way; at its end the next token is "end" for ever.

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
        self.next = self._token(0)
        self._end = 0  # one past the token before the next one

    def end(self) -> None:
        """Refuse anything that still follows."""
        if self.next.kind != "end":
            raise self.refusal("the end of the text")

    def literal(self, start: int = 0) -> str:
        """Pass from a place on what can stand in a name around groups, blanks not passed, and return it."""
        match = _LITERAL.match(self.text, start)
        text = match[0] if match else ""
        self._end = start + len(text)
        self.next = self._token(self._end)
        return text

    def take(self, kind: str, want: str | None = None) -> str:
        """Pass a token of this kind and return its text."""
        token = self.next
        if token.kind != kind:
            raise self.refusal(want or f'"{kind}"')
        self._end = token.position + len(token.text)
        self.next = self._token(self._end)
        return token.text

    def raw(self, pattern: re.Pattern[str], want: str) -> str:
        """Pass what the pattern matches where the next token begins, and return it."""
        match = pattern.match(self.text, self.next.position)
        if match is None or match.end() == match.start():
            raise self.refusal(want)
        self._end = match.end()
        self.next = self._token(self._end)
        return match[0]

    def passed(self, kind: str) -> bool:
        """Pass the next token if it is of this kind, and say so."""
        if self.next.kind == kind:
            self.take(kind)
            return True
        return False

    def integer(self, want: str) -> int:
        """Read an integer up to `MAX_SIZE`."""
        token = self.next
        # A long run of digits is refused by its length: int() of thousands of digits is slow, and refused by Python.
        if token.kind == "integer" and (len(token.text) > 19 or int(token.text) > MAX_SIZE):
            raise self.refusal(f"an integer up to {MAX_SIZE}")
        value = int(self.take("integer", want))
        if self.next.kind == "name" and self.next.position == self._end:
            raise self.refusal(f'a blank or another mark after the integer "{token.text}"')
        return value

    def refusal(self, want: str, next_step: str | None = None) -> LayoutError:
        """Return the error that the next token is not what the grammar wants there."""
        token = self.next
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

    def _token(self, position: int) -> Token:
        blanks = _BLANKS.match(self.text, position)
        start = position if blanks is None else blanks.end()
        match = _TOKEN.match(self.text, start)
        if match is None:
            return Token("end", "", start)
        kind = match.lastgroup or "other"
        return Token(match[0] if kind == "mark" else kind, match[0], start)


def _shown(text: str) -> str:
    """Return the text with everything that a terminal would not print as it is written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
