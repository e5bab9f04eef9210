"""The failure record that a failing rank leaves for all others, so that each can name it."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass

from xrank.errors import RankFailedError, XrankError
from xrank.faces import marked

__all__ = ["MAX_NBYTES", "FailureRecord"]

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

    @classmethod
    def from_error(cls, error: BaseException, rank: int, call: str, number: int = 0) -> FailureRecord:
        """Return the record of an exception on this rank; of the other rank's failure if the exception names one."""
        if isinstance(error, RankFailedError) and error.rank is not None:
            return cls(
                error.rank, error.host or "unknown", error.pid or 0, marked(error.cause or str(error)), call, number
            )
        cause = f"{type(error).__name__}: {marked(str(error))}"
        if isinstance(error, XrankError):
            parts = (("got", error.got), ("want", error.want))
            cause += "".join(f"; {word} {marked(part)}" for word, part in parts if part)
        return cls(rank, socket.gethostname(), os.getpid(), cause, call, number)

    def to_bytes(self) -> bytes:
        """Return the record as JSON of at most `MAX_NBYTES`."""
        text = json.dumps(asdict(self)).encode()
        if len(text) > MAX_NBYTES:
            # Escapes make a character up to 12 bytes long, so a cause of this length always fits.
            short = {**asdict(self), "cause": self.cause[:100] + " ...", "call": self.call[:50]}
            text = json.dumps(short).encode()
        return text

    @classmethod
    def from_bytes(cls, content: bytes) -> FailureRecord:
        """Return the record that `to_bytes` wrote."""
        return cls(**json.loads(content))

    def to_error(self) -> RankFailedError:
        """Return the error that every other rank raises."""
        return RankFailedError(
            f"rank {self.rank} failed: {self.cause}",
            rank=self.rank,
            host=self.host,
            pid=self.pid,
            cause=self.cause,
            got=f"{self.cause}, in {self.call}, on host {self.host}, pid {self.pid}",
            next_step=f"look at rank {self.rank}'s own error first; the others only follow it",
        )
