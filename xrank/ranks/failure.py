"""The failure record that a failing rank leaves for all others, so that each can name it."""

from __future__ import annotations

import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from xrank.errors import RankFailedError, RankTimeoutError, XrankError, marked

MAX_NBYTES = 3072
"""Largest size of a record as JSON; a longer cause is cut."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
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
        """Return the record of an exception on this rank; of the other rank's failure if the exception names one.

        It is made of any exception, also of one whose own methods raise.
        """
        failure_id, is_at_large = failure_of(error)
        if isinstance(error, RankFailedError) and error.rank is not None:
            cause, host, pid = marked(error.cause or str(error)), error.host or "unknown", error.pid or 0
            return cls(error.rank, host, pid, cause, call, number, failure_id, is_at_large)
        cause = f"{type(error).__name__}: {_text_of(error)}"
        if isinstance(error, XrankError):
            parts = (("got", error.got), ("want", error.want))
            cause += "".join(f"; {word} {marked(part)}" for word, part in parts if part)
        absent = error.waiting_for if isinstance(error, RankTimeoutError) else ()
        return cls(rank, socket.gethostname(), os.getpid(), cause, call, number, failure_id, is_at_large, absent)

    def anew(self) -> FailureRecord:
        """Return the record as that of another failure, which follows from this one."""
        return replace(self, id=_new_id(), is_at_large=False)

    def to_bytes(self) -> bytes:
        """Return the record as JSON of at most `MAX_NBYTES`."""
        text = json.dumps(asdict(self)).encode()
        if len(text) > MAX_NBYTES:
            # Escapes make a character up to 12 bytes long, so a cause of this length always fits.
            short = {**asdict(self), "cause": self.cause[:100] + " ...", "call": self.call[:50], "absent": ()}
            text = json.dumps(short).encode()
        return text

    @classmethod
    def from_bytes(cls, content: bytes) -> FailureRecord:
        """Return the record that `to_bytes` wrote."""
        fields = json.loads(content)
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
    known = getattr(error, "_xrank_failure", None)
    if known is None:
        known = (_new_id(), False)
        mark_failure(error, known[0])
    failure_id, is_at_large = known
    return failure_id, is_at_large


def _new_id() -> str:
    return secrets.token_hex(8)


def _text_of(error: BaseException) -> str:
    """Return an exception's text; if its ``__str__`` raises, a text that says so."""
    try:
        return marked(str(error))
    except Exception as failure:  # the user's class: the others must still learn that this rank failed
        return f"(its text is unknown: str() of it raised {type(failure).__name__})"
