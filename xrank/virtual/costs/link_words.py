"""The text form of link speeds: ``bandwidth=25GB/s latency=5us tp.bandwidth=300GB/s``, in a line or a TOML file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from math import inf, isfinite
from typing import Literal, NamedTuple, TypeAlias

from xrank.errors import UsageError
from xrank.layout.layout_map import parse_toml

Kind: TypeAlias = Literal["seconds", "bandwidth", "flops"]
"""Kind of a name's value."""

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "Ki": 2.0**10, "Mi": 2.0**20,
             "Gi": 2.0**30, "Ti": 2.0**40}  # fmt: skip

_PARTS_OF_A_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}

_NUMBER = r"(?P<number>[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"

_UNITS = {
    "seconds": re.compile(_NUMBER + r"(?P<unit>s|ms|us|ns)"),
    "bandwidth": re.compile(_NUMBER + r"(?P<unit>[kKMGT]?i?)B/s"),
    "flops": re.compile(_NUMBER + r"(?P<unit>[kKMGTP]?)FLOP/s"),
}

_EXAMPLES = {"seconds": "5us", "bandwidth": "25GB/s", "flops": "10TFLOP/s"}

_LINK: Mapping[str, Kind] = {"latency": "seconds", "bandwidth": "bandwidth"}

_MAX_FILE_NBYTES = 1 << 20


class Words(NamedTuple):
    """Parsed values, in seconds and per second."""

    values: dict[str, float]
    """Values of the given names other than latency and bandwidth."""
    general: tuple[float, float]
    """(latency, bandwidth) of all links; defaults are 0 and no limit."""
    axes: dict[str, tuple[float, float]]
    """(latency, bandwidth) of links along an axis; omitted values are those of all links."""


def read_words(source: str | os.PathLike[str], kinds: Mapping[str, Kind]) -> Words:
    """Parse a line of words, or a TOML file with the same names.

    Args:
        source: words ``name=value`` separated by blanks; anything else is the path of a file, where a table ``[tp]``
            stands for names that begin with ``tp.``.
        kinds: kinds of the names other than ``latency`` and ``bandwidth``.

    Raises:
        UsageError: the file is missing, a name is unknown or occurs twice, or a value is invalid.
    """
    text = os.fspath(source)
    words = text.split()
    if not words:
        raise _unreadable(None, "nothing", "words name=value, or a file")
    # With a "=" and no such file, the text is words with a typo: a better message than a missing file.
    if "=" in words[0] or (len(words) > 1 and "=" in text and not os.path.exists(text)):
        for word in words:
            if "=" not in word:
                raise _unreadable(None, f"{word!r} has no value", "words name=value, with no blanks in them")
        pairs: Iterable[tuple[str, ...]] = (tuple(word.split("=", 1)) for word in words)
        return _links(_values(pairs, {**_LINK, **kinds}, None), kinds)
    return _links(_values(_pairs_of_file(text), {**_LINK, **kinds}, text), kinds)


def _links(values: dict[str, float], kinds: Mapping[str, Kind]) -> Words:
    general = (values.pop("latency", 0.0), values.pop("bandwidth", inf))
    others = {name: values.pop(name) for name in kinds if name in values}
    axes: dict[str, tuple[float, float]] = {}
    for name, value in values.items():
        axis, _, what = name.rpartition(".")
        if what not in _LINK:
            raise UsageError(
                f"the link has {name!r}, but only links have axes", got=repr(name), want=f"{what!r}, which has no axis"
            )
        latency, bandwidth = axes.get(axis, general)
        axes[axis] = (value, bandwidth) if what == "latency" else (latency, value)
    return Words(others, general, axes)


def _values(pairs: Iterable[tuple[str, ...]], kinds: Mapping[str, Kind], file: str | None) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, text in pairs:
        *axis, what = name.split(".")
        if what not in kinds or "" in axis:
            raise _unreadable(file, f"unknown name {name!r}", f"{', '.join(kinds)}; or latency, bandwidth of an axis")
        kind = kinds[what]
        if name in values:
            raise _unreadable(file, f"{name!r} occurs twice", "each name once")
        match = _UNITS[kind].fullmatch(text)
        factors = _PARTS_OF_A_SECOND if kind == "seconds" else _PREFIXES
        if match is None or match["unit"] not in factors:
            raise _unreadable(file, f"{name} = {text!r}", f"an amount such as {_EXAMPLES[kind]}")
        number, factor = float(match["number"]), factors[match["unit"]]
        # Divide by an integer, so that 5us equals 5e-6 exactly.
        value = number / factor if kind == "seconds" else number * factor
        if not isfinite(value) or (value == 0 and kind != "seconds"):
            raise _unreadable(file, f"{name} = {text!r}", "a finite amount above 0")
        values[name] = value
    return values


def _pairs_of_file(path: str) -> list[tuple[str, str]]:
    try:
        with open(path, "rb") as stream:
            tables = parse_toml(stream.read(_MAX_FILE_NBYTES).decode())
    except OSError as error:
        raise _unreadable(path, f"{error.strerror}", "words name=value, or a file") from error
    except ValueError as error:
        raise _unreadable(path, f"not TOML: {error}", "a TOML file") from error
    return list(_flatten(tables, "", path))


def _flatten(table: dict[str, object], prefix: str, path: str) -> Iterable[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.", path)
        elif isinstance(value, str):
            yield prefix + name, value
        else:
            raise _unreadable(path, f"{prefix}{name} = {value!r}", 'a text with a unit, such as "25GB/s"')


def _unreadable(file: str | None, got: str, want: str) -> UsageError:
    return UsageError(
        f"the link {'given' if file is None else f'file {file}'} cannot be read: {got}", file=file, got=got, want=want
    )
