"""Parse TOML that people write: what nests beyond reason is refused at once, by its line."""

from __future__ import annotations

import re
import tomllib
from typing import Any

_MAX_PARTS = 64
_MAX_BRACKETS = 200
_MANY_PARTS = re.compile(rf"(?<![\w-])(?:[\w-]++\s*\.\s*){{{_MAX_PARTS}}}")
_TEXT = re.compile(r"\"(?:[^\"\\]|\\.)*+\"|'[^']*+'")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises:
        ValueError: it is no TOML, or nests too deeply. The message ends with ``(at line N)``, where it is known.

    Example:
        >>> parse_toml("a.b = 1")
        {'a': {'b': 1}}
    """
    for number, line in enumerate(text.splitlines(), 1):
        # tomllib would take minutes for names of thousands of parts, and end in the depth of its recursion.
        if _count_brackets(line) > _MAX_BRACKETS or (line.count(".") >= _MAX_PARTS and _MANY_PARTS.search(line)):
            raise ValueError(f"it nests deeper than {_MAX_PARTS} tables (at line {number})")
    try:
        tables = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error
    except ValueError as error:
        if "int_max_str_digits" not in str(error):
            raise
        digits = re.search(r"\d{1000,}", text)
        place = f" (at line {text.count(chr(10), 0, digits.start()) + 1})" if digits else ""
        raise ValueError(f"an integer has too many digits{place}") from error
    _check_depth(tables)
    return tables


def _check_depth(tables: dict[str, Any]) -> None:
    """Refuse values that nest so deeply that code which follows them would end in the depth of its recursion."""
    level: list[Any] = [tables]
    for _ in range(_MAX_PARTS):
        inner = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return
    raise ValueError(f"it nests deeper than {_MAX_PARTS} tables")


def _count_brackets(line: str) -> int:
    """Return how many brackets a line opens; those within texts do not count."""
    count = line.count("[") + line.count("{")
    if count > _MAX_BRACKETS:
        line = _TEXT.sub("", line)
        count = line.count("[") + line.count("{")
    return count
