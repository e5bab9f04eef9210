"""The state of a rank in its own memory, which the ranks of the other job read."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from zlib import crc32

from xrank.lending.peer_memory import memory_at

_FIELDS = Struct("<qqqqqqqH")
STATUS_NBYTES = 512
"""Bytes of a status: a checksum, the fields, and the cause as text."""
_TEXT_NBYTES = STATUS_NBYTES - 4 - _FIELDS.size


class Phase(IntEnum):
    """The state of a rank."""

    CLOSED = 0
    """Trainer: the weights may change. Engine: the rank is outside `update`."""
    WAITING = 8
    """Engine: the rank waits for a step."""
    OPEN = 1
    """Trainer: the weights are those of the step, and the rank counts its checks of them."""
    STEADY = 2
    """Trainer: a snapshot has the weights of the step; it needs no checks."""
    READING = 3
    """Engine: the rank writes to its tensors."""
    COPIED = 10
    """Engine: the rank has copied all bytes of a step, and waits until each trainer rank confirms them."""
    DONE = 4
    """Engine: the rank has all weights of the step."""
    LATE = 5
    """Engine: no new step came in time, and the rank raised. The trainer waits for its next call."""
    MEASURED = 9
    """Trainer: the other ranks may read the values of the step that this rank has measured, to prepare their own."""
    FAILED = 6
    """The rank raised; the cause is known."""
    ENDED = 7
    """The rank has closed its offer or its weights."""


_PHASES = frozenset(Phase)


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a rank at one moment."""

    phase: Phase = Phase.CLOSED
    step: int = -1
    """Trainer: the step that is open, or was last. Engine: the last step that the rank has taken."""
    generation: int = 0
    """Trainer: the number of changes of the phase. Engine: the number of times that the rank began to write to its
    tensors. Weights read between two equal ones are of one step."""
    checks: int = 0
    """Trainer: the number of checks, since the step is open, that no tensor changed."""
    round: int = 0
    """Engine: the number of the call of `update` that the rank is in or has left; ranks in one call have the same."""
    offer: int = 0
    """Engine: the number of the offer that `step` belongs to."""
    committed: int = 0
    """Trainer: the last step whose outcome this rank knows. Engine: the last round in which this rank saw all ranks
    with one step."""
    cause: str = ""
    """The reason of a failure."""

    def to_bytes(self) -> bytes:
        """Return the status as `STATUS_NBYTES` bytes."""
        text = self.cause.encode()[:_TEXT_NBYTES]
        numbers = (self.phase, self.step, self.generation, self.checks, self.round, self.offer, self.committed)
        body = _FIELDS.pack(*numbers, len(text)) + text
        return crc32(body).to_bytes(4, "little") + body.ljust(STATUS_NBYTES - 4, b"\0")

    @classmethod
    def from_bytes(cls, content: bytes) -> Status | None:
        """Return the status; None if the bytes are none, as while their owner writes them."""
        body = content[4:]
        *fields, length = _FIELDS.unpack_from(body)
        end = _FIELDS.size + length
        if end > len(body) or crc32(body[:end]) != int.from_bytes(content[:4], "little") or fields[0] not in _PHASES:
            return None
        phase, step, generation, checks, round_, offer, committed = fields
        text = body[_FIELDS.size : end].decode(errors="replace")
        return cls(Phase(phase), step, generation, checks, round_, offer, committed, text)


class StatusBlock:
    """This rank's status in memory, lent as any other bytes; one thread writes it.

    Args:
        status: the first one.
    """

    def __init__(self, status: Status = Status()) -> None:  # it is immutable
        self.nbytes = STATUS_NBYTES
        self._memory = (ctypes.c_ubyte * STATUS_NBYTES)()
        self.address: int | None = ctypes.addressof(self._memory)
        self.value = status
        self.write(status)

    def write(self, status: Status) -> None:
        """Replace the status. A reader that sees a part of it reads again."""
        self.value = status
        ctypes.memmove(self._memory, status.to_bytes(), STATUS_NBYTES)

    def find_row(self, start: int, nbytes: int) -> memoryview | None:
        """Return the bytes from `start` on in place."""
        return memory_at(ctypes.addressof(self._memory) + start, nbytes)

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""
        into[:] = memory_at(ctypes.addressof(self._memory) + start, len(into))


def is_past(status: Status, step: int) -> bool:
    """Return whether a trainer rank will not show a step any more."""
    return status.step > step or (status.step == step and status.phase is Phase.CLOSED)
