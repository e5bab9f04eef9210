"""Whether files are of one moment of one run: as far as DeepSpeed leaves evidence."""

from __future__ import annotations

from collections.abc import Mapping

from xrank.errors import ContradictionError
from xrank.formats.regular_file import Origin

__all__ = ["Agreement"]


class Agreement:
    """Compares each file's facts with those of the first that had them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, Origin]] = {}

    def add(self, facts: Mapping[str, object], origin: Origin) -> None:
        """Take in a file's facts.

        Raises:
            ContradictionError: an earlier file says otherwise.
        """
        for path, value in facts.items():
            known, other = self._known.setdefault(path, (value, origin))
            # Types count, and a NaN equals itself.
            if repr(known) != repr(value):
                raise ContradictionError(
                    origin.named(f"is not of the same moment as {other.path}: {path} differs"),
                    rank=origin.rank,
                    file=origin.path,
                    got=ascii(value)[:200],
                    want=f"{ascii(known)[:200]}, as in {other.path}",
                    next_step="all files must come from one save of one run; copy them again",
                )
