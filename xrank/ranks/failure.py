"""Deadlines, and the failure record that a failing rank leaves for all others, so that each can name it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from xrank.errors import AGAIN, CorruptError, RankFailedError, RankTimeoutError, UsageError, XrankError, marked, option
from xrank.system import host_name
from xrank.words import ranks_text

MAX_NBYTES = 3072
"""Largest size of a record as JSON; a longer cause is cut."""


class Deadline:
    """The moment `timeout_seconds` (above 0) after construction, by a clock that never steps back."""

    __slots__ = ("_end", "clock", "timeout_seconds")  # every gather makes one

    def __init__(self, timeout_seconds: float, clock: Callable[[], float] = monotonic) -> None:
        if not timeout_seconds > 0:
            raise UsageError("a timeout must be positive", got=str(timeout_seconds), want="seconds above 0")
        self.timeout_seconds, self.clock = timeout_seconds, clock
        self._end = clock() + timeout_seconds

    @property
    def remaining_seconds(self) -> float:
        """Seconds left; 0 after the deadline."""
        return max(0.0, self._end - self.clock())

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self.clock() >= self._end


class FailureRecord(Struct, frozen=True):
    """The rank that failed, its process and the cause."""

    rank: int
    host: str
    pid: int
    cause: str
    """The exception's type and message, or a description of the rank's end."""
    call: str
    """The call in which it failed, with its place in the user's code."""
    number: int = 0
    """Number of the call in which the writer of this record learnt of the failure; 0 if calls are not counted."""
    id: str = ""
    """Id of the failure, which all records of it share: a failure fails one call of a rank, whichever way it comes."""
    is_at_large: bool = False
    """Whether the ranks of the failed call are not known: they were the error."""
    absent: tuple[int, ...] = ()
    """Ranks that did not come in time, if that is the failure."""

    @classmethod
    def from_error(cls, error: BaseException, rank: int, call: str, number: int = 0) -> FailureRecord:
        """Return the record of an exception on this rank; of the other rank's failure if the exception names one."""
        failure_id, is_at_large = failure_of(error)
        if isinstance(error, RankFailedError) and error.rank is not None:
            cause, host, pid = marked(error.cause or str(error)), error.host or "unknown", error.pid or 0
            return cls(error.rank, host, pid, cause, call, number, failure_id, is_at_large)
        try:
            cause = f"{type(error).__name__}: {marked(str(error))}"
        except Exception as failure:  # the user's class: the others must still learn that this rank failed
            cause = f"{type(error).__name__}: (its text is unknown: its str() raised {type(failure).__name__})"
        if isinstance(error, XrankError):
            cause += "".join(f"; {word} {marked(part)}" for word in ("got", "want") if (part := getattr(error, word)))
        absent = error.waiting_for if isinstance(error, RankTimeoutError) else ()
        return cls(rank, host_name(), os.getpid(), cause, call, number, failure_id, is_at_large, absent)

    def anew(self) -> FailureRecord:
        """Return the record as that of another failure, which follows from this one."""
        return replace(self, id=_new_id(), is_at_large=False)

    def to_text(self) -> str:
        """Return the record as ASCII JSON of at most `MAX_NBYTES`."""
        text = json.dumps(to_builtins(self))
        if len(text) > MAX_NBYTES:
            # Escapes make a character up to 12 bytes long, so a cause of this length always fits.
            short = {**to_builtins(self), "cause": self.cause[:100] + " ...", "call": self.call[:50], "absent": ()}
            text = json.dumps(short)
        return text

    @classmethod
    def from_text(cls, text: str | bytes) -> FailureRecord:
        """Return the record of a `to_text`."""
        fields = json.loads(text)
        return cls(**{**fields, "absent": tuple(fields["absent"])})

    def to_error(self) -> RankFailedError:
        """Return the error that every other rank raises."""
        error = RankFailedError(
            f"rank {self.rank} failed: {self.cause}",
            rank=self.rank,
            host=self.host,
            pid=self.pid,
            cause=self.cause,
            got=f"{self.cause}, in {self.call}, on host {self.host}, pid {self.pid}",
            next_step=f"look at rank {self.rank}'s own error first; the others only follow it",
        )
        mark_failure(error, self.id or _new_id(), is_at_large=self.is_at_large)
        return error


def mark_failure(error: BaseException, failure_id: str, *, is_at_large: bool = False) -> None:
    """Give an exception the id of its failure, so that all records that follow from it share the id."""
    with suppress(AttributeError, TypeError):  # a class of the user that keeps no attributes
        error._xrank_failure = (failure_id, is_at_large)  # type: ignore[attr-defined]


def failure_of(error: BaseException) -> tuple[str, bool]:
    """Return the id of an exception's failure, which it keeps, and whether the failure is at large."""
    known: tuple[str, bool] | None = getattr(error, "_xrank_failure", None)
    if known is None:
        known = (_new_id(), False)
        mark_failure(error, known[0])
    return known


def _new_id() -> str:
    return os.urandom(8).hex()


def damage_error(what: str, got: str, want: str | None = None, *, rank: int | None = None) -> CorruptError:
    """Return the error that another rank has sent what this version of xrank does not send."""
    return CorruptError(what, rank=rank, got=got, want=want, next_step="let all ranks use the same version of xrank")


def absence_error(absent: Sequence[int], ranks: Sequence[int], deadline: Deadline, where: str = "") -> RankTimeoutError:
    """Return the error that names ranks that did not come in time."""
    return RankTimeoutError(
        f"{ranks_text(absent)} did not arrive{where} within {deadline.timeout_seconds:g} s",
        rank=absent[0],
        waiting_for=tuple(absent),
        want=f"all of {ranks_text(ranks)}",
        next_step=f"let all of these ranks {AGAIN}; raise {option('timeout_seconds')} if they are slow",
    )
