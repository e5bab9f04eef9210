"""What ranks must ask alike of one call, as each tells it; the first compares before anything is planned.

It is the first thing that the ranks of any live conversion do together: whatever call each of them makes, they meet
here, and an argument that is wrong on one of them is heard of by all others at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from xrank.errors import UsageError
from xrank.teams.agreement import agreed

if TYPE_CHECKING:
    from xrank.teams.team import Team

__all__ = ["agreed_call", "check_alike", "nbytes_text", "path_text", "value_text"]

Asked = TypeVar("Asked")


def agreed_call(
    team: Team | None, make: Callable[[], Asked], tell: Callable[[Asked], Mapping[str, str | None]]
) -> Asked:
    """Return what this rank asks for, if all ranks make the same call.

    Args:
        team: the ranks, together; None: this one alone.
        make: checks the arguments.
        tell: what all must ask alike, as `check_alike` takes it.

    Raises:
        UsageError: as `check_alike`, on every rank.
        XrankError: what `make` raised here; RankFailedError where it raised elsewhere only.
    """
    if team is None:
        return make()
    return agreed(team, "what is asked", make, tell, lambda _, told: check_alike(team.ranks, told))


def check_alike(ranks: Sequence[int], asked: Sequence[Mapping[str, str | None]]) -> None:
    """Refuse a call that ranks make differently.

    Args:
        ranks: their numbers.
        asked: what each asks for: option -> its value as text; "call" is the call itself.

    Raises:
        UsageError: it names the option, two ranks and their values.
    """
    for option, wanted in asked[0].items():
        for rank, one in zip(ranks, asked, strict=True):
            if one.get(option) == wanted:
                continue
            got = one.get(option)
            say = "calls" if option == "call" else f"has {option}"
            raise UsageError(
                f"rank {rank} {say} {got}, rank {ranks[0]} {wanted}",
                rank=rank,
                got=f"{option} {got} on rank {rank}",
                want=f"{option} {wanted}, as on rank {ranks[0]}",
                next_step="make the same call with the same arguments on all ranks",
            )


def value_text(value: Any) -> str:
    """Return an argument as text that is the same on all ranks for the same value."""
    try:
        return json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    except (TypeError, ValueError):
        return str(value)


def nbytes_text(nbytes: int) -> str:
    """Return a size as text, in whatever words it was given."""
    return f"{nbytes:,} bytes"


def path_text(path: str | os.PathLike[str] | None) -> str | None:
    """Return a path, or a name that is none, as text; of a path that is there, the absolute one."""
    if path is None:
        return None
    text = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
    return os.path.abspath(text) if os.path.exists(text) else text
