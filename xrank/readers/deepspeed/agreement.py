"""Checks that files belong to one save of one run, as far as DeepSpeed records it."""

from __future__ import annotations

from collections.abc import Mapping

from xrank.errors import ContradictionError
from xrank.formats.regular_file import Origin

__all__ = ["Agreement"]


class Agreement:
    """Compares each file's facts with those of the first file that has them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, Origin]] = {}

    def add(self, facts: Mapping[str, object], origin: Origin) -> None:
        """Add a file's facts.

        Raises:
            ContradictionError: an earlier file has another value.
        """
        for path, value in facts.items():
            known, other = self._known.setdefault(path, (value, origin))
            # repr compares types, too, and makes NaN equal NaN.
            if repr(known) != repr(value):
                raise ContradictionError(
                    origin.named(f"is not from the same save as {other.path}: {path} differs"),
                    rank=origin.rank,
                    file=origin.path,
                    got=ascii(value)[:200],
                    want=f"{ascii(known)[:200]}, as in {other.path}",
                    next_step="all files must come from one save of one run; copy them again",
                )
