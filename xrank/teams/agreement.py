"""Agreement: something made on every rank of a team that is of use only if all could make it, and alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from xrank.errors import XrankError
from xrank.teams.attempt import Attempt, check_failures

if TYPE_CHECKING:
    from xrank.teams.team import Team

__all__ = ["agreed"]

Made = TypeVar("Made")


def agreed(
    team: Team,
    key: str,
    make: Callable[[], Made],
    tell: Callable[[Made], Any],
    check: Callable[[Made, Sequence[Any]], None],
) -> Made:
    """Make something on every rank, and return it if all could and the first finds nothing wrong.

    Args:
        team: the ranks; each of them calls this.
        key: what is made, in a word that errors name.
        make: makes it.
        tell: says of it, in what JSON holds, what the first is to know.
        check: called on the first rank with what that made, and what all tell of theirs.

    Raises:
        XrankError: what `check` raised, on every rank; what `make` raised, on the rank where it did.
        RankFailedError: `make` raised elsewhere only.
    """
    attempt = Attempt.of(make)
    failure = attempt.told(team.rank)
    told = {"failure": failure, "told": tell(attempt.result()) if failure is None else None}

    def decide(parts: Sequence[dict[str, Any]]) -> None:
        check_failures(part["failure"] for part in parts)
        check(attempt.result(), [part["told"] for part in parts])

    try:
        team.decided(key, told, decide)
    except XrankError:
        # A fault that all ranks see is on each of them its own.
        if failure is None:
            raise
    return attempt.result()
