"""Ranks, sizes and names in few words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from xrank import dtypes
from xrank.words import size_text

__all__ = ["amount_text", "clipped", "one_line", "ranks_words", "runs_text", "width_of"]

_MAX_RUNS = 4


def one_line(text: str) -> str:
    """Return text with every control character escaped, line ends too: a name found in a file stays a name."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def clipped(text: str, width: int) -> str:
    """Return text of at most `width` characters, its end replaced by dots where it is longer."""
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."[: max(width, 0)]


def ranks_words(ranks: Sequence[int]) -> str:
    """Return rising ranks in few words: ``rank 3``, ``ranks 0,2,4-6``, ``ranks 0,8,..,1016 (128 ranks)``."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    # Many ranks in many runs: the reader wants the pattern and the number.
    text = runs_text(runs)
    if len(runs) > _MAX_RUNS:
        text += f" ({len(ranks):,} ranks)"
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def runs_text(runs: Sequence[tuple[int, int]]) -> str:
    """Return runs, both ends included; of many the first two and the last, or the first three where they are uneven."""
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    if len(runs) <= _MAX_RUNS:
        return ",".join(words)
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(runs)}
    return ",".join((*words[:2], "..", words[-1]) if len(steps) == 1 else (*words[:3], ".."))


def amount_text(nbytes: float, has_width: bool = True) -> str:
    """Return bytes in decimal units, ``16.1 GB``; elements where no element's width is known."""
    if not has_width:
        return f"{nbytes:,.0f} element{'' if nbytes == 1 else 's'}"
    return size_text(nbytes)


def width_of(all_dtypes: Iterable[str | None]) -> bool:
    """Say whether every element's width is known, so that sizes are bytes."""
    return all(dtype in dtypes.DTYPES for dtype in all_dtypes)
