"""Check JSON piece by piece: Python's objects of a text take up to 40 times its bytes, a tokenizer's 150 MB."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

from xrank.errors import CorruptError
from xrank.formats.regular_file import RegularFile, open_regular, quote

_PIECE_NBYTES = 1 << 20
# The grammar of RFC 8259, and the numbers beyond it that Python's json module writes and reads.
_SPACE = r"[ \t\n\r]*+"
_TEXT = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4}))*+"'
_PLAIN = r"(?:-?(?:(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|Infinity)|true|false|null|NaN)(?![\w.+-])"
_TOKEN = re.compile(rf"{_SPACE}(?:({_TEXT})|([{{}}\[\],:])|({_PLAIN})|\Z)", re.ASCII)
# Vocabularies and merges are long runs of these, which one match passes over.
_RUNS = {
    "key": re.compile(rf"(?:{_SPACE}{_TEXT}{_SPACE}:{_SPACE}(?:{_TEXT}|{_PLAIN}){_SPACE},)++", re.ASCII),
    "item": re.compile(rf"(?:{_SPACE}(?:{_TEXT}|{_PLAIN}){_SPACE},)++", re.ASCII),
}
_CLOSED_BY = {"{": "}", "[": "]"}


class _Grammar:
    """The state of a parser that keeps no values."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.wanted = "{"

    def follow(self, mark: str) -> bool:
        """Move on by one token, and return whether it may stand here; texts and numbers are ``"`` and ``0``."""
        may_end = self.wanted in ("first key", "first item", "comma") and bool(self.open)
        if may_end and mark == _CLOSED_BY[self.open[-1]]:
            self.open.pop()
            self.wanted = "comma" if self.open else "end"
        elif self.wanted in ("value", "item", "first item", "{") and mark in ("{" if self.wanted == "{" else "{["):
            self.open.append(mark)
            self.wanted = "first key" if mark == "{" else "first item"
        elif self.wanted in ("value", "item", "first item") and mark in ('"', "0"):
            self.wanted = "comma"
        elif self.wanted in ("key", "first key") and mark == '"':
            self.wanted = "colon"
        elif self.wanted == "colon" and mark == ":":
            self.wanted = "value"
        elif self.wanted == "comma" and mark == ",":
            self.wanted = "key" if self.open[-1] == "{" else "item"
        else:
            return False
        return True


def check_json_object(path: str) -> None:
    """Check that a file contains one JSON object in UTF-8; memory is bounded by its longest text.

    Raises:
        CorruptError: it does not, or it is not a regular file.
        IncompleteError, UsageError: the file is missing, or the user may not read it.
    """
    grammar = _Grammar()
    rest, offset = "", 0
    with open_regular(path) as file:
        for piece, is_last in _pieces(file):
            text, place = rest + piece, 0
            while (match := _TOKEN.match(text, place)) is not None and (is_last or match.end() < len(text)):
                run = _RUNS[grammar.wanted].match(text, place) if grammar.wanted in _RUNS else None
                if run is not None:
                    place = run.end()
                    continue
                place = match.end()
                if match.lastindex is None:  # the end of the file
                    break
                mark = match[2] or ('"' if match[1] is not None else "0")
                if not grammar.follow(mark):
                    raise _broken(file, f"{quote(match[0].strip()[:40])} after {offset + match.start():,} characters")
            if is_last and place < len(text):
                raise _broken(file, f"{quote(text[place:].strip()[:40])} after {offset + place:,} characters")
            rest, offset = text[place:], offset + place
        if grammar.wanted != "end":
            raise _broken(file, f"an end after {offset:,} characters")


def _broken(file: RegularFile, got: str) -> CorruptError:
    return file.origin.corrupt("is not a whole JSON object", got=got, want="one object, from { to }")


def _pieces(file: RegularFile) -> Iterator[tuple[str, bool]]:
    """Yield the text of a file in pieces, each with whether it is the last."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    while True:
        part = file.read(offset, min(_PIECE_NBYTES, file.nbytes - offset))
        offset += len(part)
        is_last = offset == file.nbytes
        try:
            yield decoder.decode(part, final=is_last), is_last
        except UnicodeDecodeError as error:
            raise _broken(file, f"bytes that are not UTF-8, near byte {offset - len(part) + error.start:,}") from None
        if is_last:
            return
