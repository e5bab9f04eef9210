"""Plain data that another program wrote: reads that state the type they want, and checks that a JSON file is whole."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from msgspec import Raw
from msgspec.json import decode as json_decode

from xrank.errors import CorruptError, UsageError, XrankError
from xrank.storage.regular_file import RegularFile, open_regular, quote
from xrank.words import repr_text

_MAX_VALUES = 2_000_000
"""The objects of as many values take less than 300 MB; an index of a million tensors has one million."""


def parse_json(content: bytes | str, *, is_bounded: bool = True) -> Any:
    """Return the value of a JSON text; where `is_bounded`, as for texts not of the user's own ranks, of limited size.

    ValueError if it is no JSON, or describes more than two million values; RecursionError if it is too deep.
    """
    # Each value but the first follows one of these; those within texts only make the count too high.
    marks: Any = ",[{" if isinstance(content, str) else b",[{"
    num_values = sum(content.count(mark) for mark in marks)
    if is_bounded and num_values > _MAX_VALUES:
        raise ValueError(f"describes up to {num_values:,} values; xrank parses at most {_MAX_VALUES:,}")
    return json.loads(content)


class Entry:
    """A value in a tree of dicts, lists, tuples, texts, numbers, booleans and None, with its place in it.

    If it is not of the kind that a method returns, `fail` makes the error, from a text with the place.
    """

    __slots__ = ("_above", "_fail", "_key", "value")

    def __init__(
        self, value: Any, fail: Callable[[str], XrankError], *, above: Entry | None = None, key: object = None
    ) -> None:
        self.value = value
        self._fail, self._above, self._key = fail, above, key

    @classmethod
    def parse(cls, content: bytes | str, fail: Callable[[str], XrankError], *, is_bounded: bool = True) -> Entry:
        """Return the value of a JSON text; errors, which `fail` makes, as `parse_json`."""
        try:
            return cls(parse_json(content, is_bounded=is_bounded), fail)
        except (ValueError, RecursionError) as error:
            problem = "it nests too deep" if isinstance(error, RecursionError) else f"no JSON: {_show(str(error))}"
        raise fail(problem)

    def __getitem__(self, key: str) -> Entry:
        """Return the value of a key, which must be there."""
        if not isinstance(self.value, dict) or key not in self.value:
            self.refuse(f"an object with {key}")
        return self.at(key)

    def at(self, key: object) -> Entry:
        """Return the value of a key of any kind, which is known to be there."""
        return Entry(self.value[key], self._fail, above=self, key=key)

    def get(self, key: str) -> Entry | None:
        """Return the value of a key; None if it is absent or null."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        value = self.value.get(key)
        return None if value is None else Entry(value, self._fail, above=self, key=key)

    def table(self) -> dict[str, Any]:
        """Return an object as it is; its keys must be texts."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        for key in self.value:
            if not (isinstance(key, str) and key.isascii()):
                Entry(key, self._fail, above=self, key="a key").text()
        return self.value

    def items(self) -> list[tuple[str, Entry]]:
        """Return the keys, which must be texts, and their values."""
        return [(key, self.at(key)) for key in self.table()]

    def entries(self, *, length: int | None = None) -> list[Entry]:
        """Return the values of a list or tuple, of that length if one is given."""
        if not isinstance(self.value, (list, tuple)):
            self.refuse("a list")
        if length is not None and len(self.value) != length:
            self.refuse(f"a list of {length}")
        return [Entry(one, self._fail, above=self, key=number) for number, one in enumerate(self.value)]

    def text(self) -> str:
        """Return a text, which must be possible in UTF-8."""
        value = self.value
        if not isinstance(value, str):
            self.refuse("a text")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                self.refuse("a text in UTF-8")
        return value

    def json(self) -> Entry:
        """Return the value of a text that is itself JSON."""
        return Entry.parse(self.text(), lambda fault: self._fail(f"in {self._place()}: {fault}"))

    def texts(self) -> tuple[str, ...]:
        """Return a list of texts."""
        return tuple(one.text() for one in self.entries())

    def count(self, *, low: int = 0, below: int = 1 << 63) -> int:
        """Return an integer in [low, below)."""
        value = self.value
        if type(value) is not int or not low <= value < below:
            self.refuse(f"an integer from {low} to {below - 1}")
        return value

    def counts(self, *, low: int = 0, below: int = 1 << 63) -> tuple[int, ...]:
        """Return a list of integers in [low, below)."""
        value = self.value
        if isinstance(value, (list, tuple)) and all(type(one) is int and low <= one < below for one in value):
            return tuple(value)
        return tuple(one.count(low=low, below=below) for one in self.entries())

    def flag(self) -> bool:
        """Return a boolean."""
        if not isinstance(self.value, bool):
            self.refuse("true or false")
        return self.value

    def digest(self) -> bytes:
        """Return the bytes of a text of hexadecimal digits."""
        try:
            return bytes.fromhex(self.text())
        except ValueError:
            self.refuse("a text of hexadecimal digits")

    def refuse(self, want: str) -> NoReturn:
        """Raise the error for a value of another kind than is wanted."""
        raise self._fail(f"{self._place()} is {_show(self.value)}, not {want}")

    def _place(self) -> str:
        place, entry = "", self
        while entry._above is not None:
            key = entry._key
            place = (f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{_show(key)}]") + place
            entry = entry._above
        return place.removeprefix(".") or "it"


def _show(value: object) -> str:
    """Return a value of plain data as a short text in ASCII."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length():,} bits"
    text = ascii(value[:60] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= 80 else f"{text[:80]}..."


_PIECE_NBYTES = 1 << 20


def check_json_object(path: str) -> None:
    """Check that a file contains one JSON object in UTF-8, as Python's json module judges it; errors as `open_regular`.

    CorruptError if it does not.
    """
    with open_regular(path) as file:
        content = file.read(0, file.nbytes)
        with suppress(ValueError, RecursionError):
            # msgspec looks at the values without making them; it does not decode texts.
            pieces = (content[start : start + _PIECE_NBYTES] for start in range(0, len(content), _PIECE_NBYTES))
            for _ in codecs.iterdecode(pieces, "utf-8"):
                pass
            json_decode(content, type=dict[str, Raw])
            return
        # Python's parser takes some numbers and texts that msgspec does not, and knows the place of a fault.
        try:
            text = content.decode()
            if isinstance(json.loads(text), dict):
                return
            place, rest = 0, text.strip()
        except UnicodeDecodeError as error:
            raise _broken(file, f"bytes that are not UTF-8, near byte {error.start:,}") from None
        except json.JSONDecodeError as error:
            place, rest = len(text[: error.pos].rstrip()), text[error.pos :].strip()
        except (ValueError, RecursionError) as error:  # too many digits, or too deep
            raise _broken(file, str(error)) from None
        raise _broken(file, f"{quote(rest[:40]) if rest else 'an end'} after {place:,} characters")


def _broken(file: RegularFile, got: str) -> CorruptError:
    return file.origin.corrupt("is not a whole JSON object", got=got, want="one object, from { to }")


def plain_config(config: object, what: str = "config") -> dict[str, Any]:
    """Return a config as JSON would give it back: a copy of plain dicts, lists, texts and numbers.

    UsageError names the place of a part that JSON cannot represent; `what` is the config's name in it.
    """
    if not isinstance(config, Mapping):
        raise _unfit(f"the {what}", config, "a dict, such as config.to_dict()")
    try:
        plain: dict[str, Any] = _plain_value(dict(config), what)
    except RecursionError:
        shape = "contains itself, or is nested too deep for JSON"
        raise UsageError(f"the {what} {shape}", want=f"a {what} that is a tree, with less nesting") from None
    return plain


def _unfit(where: str, value: object, want: str) -> UsageError:
    what = f"{where} is a {type(value).__name__}, which JSON cannot represent"
    return UsageError(what, got=type(value).__name__, want=want)


def _plain_value(value: object, where: str) -> Any:
    # Subclasses (a text Enum, numpy's float64) would be pickled as classes that strict readers refuse.
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        _check_integer(value, where)
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list | tuple):
        return [_plain_value(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        plain: dict[str, Any] = {}
        for key, item in value.items():
            text = _key_text(key, where)
            if text in plain:
                fault = f"{where} has two keys that JSON writes as {repr_text(text)}"
                raise UsageError(fault, next_step=f"rename one of the two keys {repr_text(text)}")
            plain[text] = _plain_value(item, f"{where}[{repr_text(key)}]")
        return plain
    raise _unfit(where, value, "dict, list, str, int, float, bool or None, and tensors among the weights")


def _key_text(key: object, where: str) -> str:
    """Return a key as `json.dumps` writes it: transformers' ``config.to_dict()`` has numbers for keys (id2label)."""
    if isinstance(key, str):
        return str.__str__(key)
    if key is None or isinstance(key, bool | int | float):
        if isinstance(key, int):
            _check_integer(key, f"a key of {where}")
        return json.dumps(key)
    what = f"{where} has the key {repr_text(key)}, a {type(key).__name__}"
    raise UsageError(what, want="texts, numbers, booleans or None for keys")


def _check_integer(value: int, where: str) -> None:
    if value.bit_length() >= 8 * MAX_INTEGER_NBYTES:
        want = f"fewer than {8 * MAX_INTEGER_NBYTES:,} bits, or a string of its digits, for all readers of JSON"
        raise UsageError(f"{where} is an integer of {value.bit_length():,} bits", want=want)


MAX_INTEGER_NBYTES = 256
"""Larger integers could not be printed (``sys.int_info.default_max_str_digits``)."""
