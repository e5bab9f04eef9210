"""The outcome of a step: the first rank of the trainer decides it, and the other ranks take it over."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from struct import Struct
from typing import Any
from zlib import crc32

from xrank.errors import ContradictionError, RankFailedError, RankTimeoutError, XrankError
from xrank.lending.peer_memory import address_of

OUTCOME_HEAD = Struct("<II")
"""Before an outcome in memory: checksum and length of its text."""
_NBYTES = 4 << 20
"""Most bytes of an outcome: 4,000 engine ranks that all failed take 2.5 MB."""
_KINDS = {kind.__name__: kind for kind in (RankFailedError, RankTimeoutError, ContradictionError)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a step, the same on all ranks of the trainer."""

    step: int
    takers: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    """Engine ranks that failed, and why."""
    error: XrankError | None = None
    """Raised by all ranks."""
    is_over: bool = False
    """Whether a trainer rank has failed, so that no engine may take the step."""

    def to_json(self) -> bytes:
        """Return the outcome as text for other ranks."""
        error = None if self.error is None else describe_error(self.error)
        return json.dumps([self.step, self.takers, dict(self.failed), error, self.is_over]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Outcome:
        """Return the outcome of such a text."""
        step, takers, failed, error, is_over = json.loads(text)
        return cls(step, tuple(takers), failed, None if error is None else make_described_error(error), is_over)


class OutcomeBlock:
    """This rank's last outcome in memory, lent as any other bytes."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, _NBYTES))  # no page until used
        self.nbytes = _NBYTES
        self.address: int | None = address_of(self._memory)

    def write(self, outcome: Outcome) -> None:
        """Replace the outcome; the status then shows its step."""
        text = outcome.to_json()
        end = OUTCOME_HEAD.size + len(text)
        self._memory[:end] = OUTCOME_HEAD.pack(crc32(text), len(text)) + text

    def find_row(self, start: int, nbytes: int) -> memoryview | None:
        """Return the bytes from `start` on in place."""
        return self._memory[start : start + nbytes]

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""
        into[:] = self._memory[start : start + len(into)]


def describe_error(error: XrankError) -> dict[str, Any]:
    """Return an error of another rank as JSON."""
    kind = type(error).__name__
    parts: dict[str, Any] = {name: getattr(error, name) for name in ("rank", "host", "got", "want", "next_step")}
    if isinstance(error, RankFailedError):
        parts |= {"pid": error.pid, "cause": error.cause}
        parts["failures"] = [describe_error(one) for one in error.failures if one is not error]
    elif isinstance(error, RankTimeoutError):
        parts["waiting_for"] = error.waiting_for
    return {"kind": kind, "message": error.message, **parts}


def make_described_error(described: Mapping[str, Any]) -> XrankError:
    """Return the error of a description."""
    parts = dict(described)
    kind, message = _KINDS[parts.pop("kind")], parts.pop("message")
    if kind is RankTimeoutError:
        return RankTimeoutError(message, **{**parts, "waiting_for": tuple(parts["waiting_for"])})
    failures = tuple(make_described_error(one) for one in parts.pop("failures", ()))
    error = kind(message, **parts)
    if isinstance(error, RankFailedError) and failures:
        error.failures = (error, *failures)
    return error
