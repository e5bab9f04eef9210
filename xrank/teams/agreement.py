"""Checks that ranks agree: on the arguments of a call, as each rank describes them, and on the resulting plan."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xrank.errors import AGAIN, ContradictionError, UsageError


def check_alike(ranks: Sequence[int]) -> Callable[[object, Sequence[Mapping[str, str | None]]], None]:
    """Return the decision for `Team.agree` that all ranks make the same call.

    A rank describes its call by argument -> value as text; "call" is the name of the function.

    Raises (from the decision):
        UsageError: it names the argument, two ranks and their values.
    """

    def check(_: object, calls: Sequence[Mapping[str, str | None]]) -> None:
        for rank, call in zip(ranks, calls, strict=True):
            _check_call(ranks[0], calls[0], rank, call)

    return check


def _check_call(first: int, wanted: Mapping[str, str | None], rank: int, call: Mapping[str, str | None]) -> None:
    for name, want in wanted.items():
        got = call.get(name)
        if got != want:
            verb = "calls" if name == "call" else f"has {name}"
            raise UsageError(
                f"rank {rank} {verb} {got}, rank {first} {want}",
                rank=rank,
                got=f"{name} {got} on rank {rank}",
                want=f"{name} {want}, as on rank {first}",
                next_step=f"let all ranks {AGAIN}, with the same options",
            )


def value_text(value: Any) -> str:
    """Return an argument as text that is the same on all ranks for the same value."""
    try:
        return json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    except (TypeError, ValueError):
        return str(value)


def nbytes_text(nbytes: int) -> str:
    """Return a size as text, the same for every spelling of the size."""
    return f"{nbytes:,} bytes"


def path_text(path: str | os.PathLike[str] | None) -> str | None:
    """Return a path or a name as text. Existing paths become absolute."""
    if path is None:
        return None
    text = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
    return os.path.abspath(text) if os.path.exists(text) else text


def check_plans(ranks: Sequence[int]) -> Callable[[object, Sequence[str]], None]:
    """Return the decision for `Team.agree` that all ranks made the same plan; descriptions are digests.

    Raises (from the decision):
        ContradictionError: it names the first rank whose plan differs from the first rank's.
    """

    def check(_: object, digests: Sequence[str]) -> None:
        for rank, digest in zip(ranks, digests, strict=True):
            if digest != digests[0]:
                raise ContradictionError(
                    f"rank {rank} plans another output than rank {ranks[0]}: its source or its arguments differ",
                    rank=rank,
                    got=f"plan {digest}",
                    want=f"plan {digests[0]}, as on rank {ranks[0]}: the same names, sizes, times and options",
                    next_step="give all ranks the same options and one file system; where its clients cache what they "
                    f"saw, wait a minute; then let all ranks {AGAIN}",
                )

    return check
