"""An attempt: what one rank has made of what all are to make, or why it could not, as it tells the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from xrank.errors import ContradictionError, XrankError
from xrank.ranks.failure import FailureRecord

__all__ = ["Attempt", "check_failures", "check_plans"]

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, eq=False)
class Attempt(Generic[Made]):
    """What came of it on this rank."""

    made: Made | None
    failure: XrankError | None
    """Why there is none."""

    @classmethod
    def of(cls, make: Callable[[], Made]) -> Attempt[Made]:
        """Make it; what goes on is an error of another kind, which nobody waits for to be told of."""
        try:
            return cls(make(), None)
        except XrankError as error:
            return cls(None, error)

    def told(self, rank: int) -> str | None:
        """Return the failure, if it is one, as this rank tells the others of it."""
        return None if self.failure is None else FailureRecord.of(self.failure, rank, "its plan").to_bytes().decode()

    def result(self) -> Made:
        """Return what was made.

        Raises:
            XrankError: the failure.
        """
        if self.failure is not None:
            raise self.failure
        return cast(Made, self.made)


def check_failures(told: Iterable[str | None]) -> None:
    """Check that no rank told of a failure.

    Raises:
        RankFailedError: it names the first that did.
    """
    for text in told:
        if text is not None:
            raise FailureRecord.from_bytes(text.encode()).to_error()


def check_plans(ranks: Sequence[int], digests: Sequence[str | None]) -> None:
    """Check that all ranks made the same plan.

    Raises:
        ContradictionError: it names the first whose plan is not the first rank's.
    """
    for rank, digest in zip(ranks, digests, strict=True):
        if digest != digests[0]:
            raise ContradictionError(
                f"rank {rank} plans another output than rank {ranks[0]}: it sees another source, or was told otherwise",
                rank=rank,
                got=f"plan {digest}",
                want=f"plan {digests[0]}, as on rank {ranks[0]}: the same names, sizes, times and options",
                next_step="give all ranks the same command, and one file system; where its clients keep what they "
                "saw for a while, wait a minute; then run the same command",
            )
