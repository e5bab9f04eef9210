"""Amounts, lists and ranks as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

_MAX_RUNS = 8
_MAX_COMPACT_RUNS = 4


def size_text(nbytes: float) -> str:
    """Return bytes in decimal units: ``16.1 GB``."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


def amount_text(amount: float, is_bytes: bool = True) -> str:
    """Return an amount of bytes, ``16.1 GB``, or of elements, ``4,096 elements``."""
    return size_text(amount) if is_bytes else f"{amount:,.0f} element{'' if amount == 1 else 's'}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 file``, ``1,024 files``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def list_text(items: Iterable[object], limit: int = 5, empty: str = "nothing") -> str:
    """Return items as a list, at most `limit` of them: ``a, b, c and 2 more``."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - limit:,} more" if len(texts) > limit else ""
    return (", ".join(texts[:limit]) or empty) + more


def likewise_text(items: Sequence[object], limit: int = 5) -> str:
    """Return the end of a sentence that applies to these items too: ``; likewise a and b``. Empty without items."""
    return f"; likewise {list_text(items, limit)}" if items else ""


def first_lines(lines: Sequence[str], limit: int) -> list[str]:
    """Return at most `limit` lines, and after them ``and 2 more`` if there are others."""
    return [*lines[:limit], *([f"and {len(lines) - limit:,} more"] if len(lines) > limit else [])]


def join_words(words: Iterable[str]) -> str:
    """Return all words as a sentence lists them: ``a, b and c``."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def ranks_text(ranks: Iterable[int], *, compact: bool = False) -> str:
    """Return ranks by rising number: ``rank 3``, ``ranks 0-2, 4``, ``ranks 0, 8, .., 1016 (128 ranks)``."""
    distinct = sorted(set(ranks))
    if not distinct:
        return "no rank"
    text = runs_text(_runs(distinct), compact=compact)
    # Of many ranks a reader needs the pattern and the number.
    count = f" ({len(distinct):,} ranks)" if ".." in text else ""
    return f"rank{'' if len(distinct) == 1 else 's'} {text}{count}"


def numbers_text(numbers: Iterable[int]) -> str:
    """Return all numbers by rising value: ``0-2, 4``."""
    return ", ".join(map(_run_text, _runs(sorted(set(numbers)))))


def _runs(rising: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in rising:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def runs_text(runs: Sequence[tuple[int, int]], *, compact: bool = False) -> str:
    """Return runs of numbers, both ends included: ``0-2, 4``. Of many at even distances, the first two and the last.

    If `compact`, without spaces, with fewer runs, and of many at uneven distances the first three.
    """
    words = [*map(_run_text, runs)]
    if len(runs) > (_MAX_COMPACT_RUNS if compact else _MAX_RUNS):
        is_even = len({(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(runs)}) == 1
        if is_even or compact:
            words = [*words[:2], "..", words[-1]] if is_even else [*words[:3], ".."]
    return ("," if compact else ", ").join(words)


def _run_text(run: tuple[int, int]) -> str:
    return str(run[0]) if run[0] == run[1] else f"{run[0]}-{run[1]}"


def one_line(text: str) -> str:
    """Return text with its control characters escaped, line ends too: a name found in a file stays one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def repr_text(value: object, limit: int = 200) -> str:
    """Return any value as Python shows it, in one line of at most `limit` characters."""
    try:
        text = repr(value)
    except Exception as error:  # Python prints no integer of more than 4,300 digits; a class of the user may raise
        text = f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return clip(one_line(text), limit)


def clip(text: str, width: int) -> str:
    """Return text of at most `width` characters; dots replace the end of a longer text."""
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."[: max(width, 0)]


def nearest_text(text: str, known: Iterable[str]) -> str | None:
    """Return the known text that is most like another, as a guess at what was meant; None where none is like it."""
    from difflib import get_close_matches  # only errors need it

    return next(iter(get_close_matches(text, list(known), n=1)), None)
