"""One gather between ranks of one host: who sends what, how all leave together, how a failure ends it for all.

Messages of a call, which are counted from 1 for each list of ranks: every writer sends ``data`` to the first rank and
waits for ``done``; the first rank copies what came, runs its body, and sends ``done``. A writer's arena is free again
when the ``done`` of its call has come.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xrank.errors import ContradictionError, RankFailedError
from xrank.gather.tree import pack, unpack
from xrank.ranks.circle import Circle
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.workspace.arena import ALIGNMENT, Arena, AttachedArena

if TYPE_CHECKING:
    import torch

__all__ = ["Call", "Exchange"]

_INLINE_NBYTES = 32768
_MAX_LEASED = 4
"""Arenas that calls left early may hold before the next call waits for one of them."""


@dataclass(frozen=True, slots=True)
class Call:
    """One gather: its number, what the user called, and until when the others may come."""

    number: int
    function: str
    key: str | None
    place: str
    """File and line of the user's call; for errors alone."""
    deadline: Deadline

    def __str__(self) -> str:
        key = f" for {self.key!r}" if self.key is not None else ""
        return f"{self.function} number {self.number}{key}, called at {self.place}"


class Exchange:
    """The gathers of one circle; one thread at a time uses it."""

    def __init__(self, circle: Circle) -> None:
        self.circle = circle
        self._calls = 0
        self._arenas: dict[int, Arena] = {}
        self._leased: dict[int, int | None] = {}  # call that is not done -> arena its message lies in
        self._attached: dict[tuple[int, int], AttachedArena] = {}
        self._failure: FailureRecord | None = None
        self._early: dict[tuple[int, int], dict[str, Any]] = {}  # (rank, call) -> message that came before its turn

    def begin(self, function: str, key: str | None, place: str, deadline: Deadline) -> Call:
        """Count a call."""
        self._calls += 1
        self.circle.begin(self._calls)
        return Call(self._calls, function, key, place, deadline)

    def check(self, call: Call) -> None:
        """Raise if another rank has failed.

        Raises:
            RankFailedError: it may have been in an earlier call, which this rank had left early.
        """
        self.circle.check(call.number)

    # ---- the writers' side

    def send(self, call: Call, value: object) -> None:
        """Put a value where the first rank can read it, and tell the first rank.

        Raises:
            UsageError: it holds what can't be sent.
            NoSpaceError: there is no memory for it.
        """
        tree, tensors = pack(value)
        table, nbytes = _table(tensors)
        content = json.dumps([tree, table]).encode()
        inline = len(content) <= _INLINE_NBYTES
        number, descriptors = self._lease(call, nbytes + (0 if inline else len(content)))
        if number is not None:
            for tensor, (_, _, offset) in zip(tensors, table, strict=True):
                self._arenas[number].write(offset, tensor)
            if not inline:
                self._arenas[number].write_bytes(nbytes, content)
        message = {
            "kind": "data",
            "call": call.number,
            "function": call.function,
            "key": call.key,
            "place": call.place,
            "arena": number,
            "arenas": list(self._arenas),
            "content": [tree, table] if inline else [nbytes, len(content)],
            "inline": inline,
        }
        self.circle.send(self.circle.first, message, call.number, descriptors)
        self.circle.arrive(call.number)

    def _lease(self, call: Call, nbytes: int) -> tuple[int | None, tuple[int, ...]]:
        """Return the number of a free arena that is large enough, and its descriptor if the first rank lacks it."""
        while self.circle.has_message(self.circle.first) or len(self._leased) >= _MAX_LEASED:
            self._take_done(call)
        self._leased[call.number] = None
        if nbytes == 0:
            return None, ()
        busy = set(self._leased.values())
        free = [number for number in self._arenas if number not in busy]
        fitting = [number for number in free if self._arenas[number].capacity >= nbytes]
        if fitting:
            number = min(fitting, key=lambda n: self._arenas[n].capacity)
        else:
            for small in free:
                self._arenas.pop(small).close()
            number = call.number
            self._arenas[number] = Arena(nbytes)
        self._leased[call.number] = number
        return number, () if fitting else (self._arenas[number].fd,)

    def _take_done(self, call: Call) -> None:
        _, message, _ = self.circle.receive({self.circle.first}, call.number, call.deadline)
        self._leased.pop(message["call"], None)

    # ---- the first rank's side

    def collect(self, call: Call) -> dict[int, Any]:
        """Return the value of every other rank; all of it is copied and the caller's.

        Raises:
            ContradictionError: a rank is at another gather.
            RankFailedError, RankTimeoutError: a rank failed, or did not come.
        """
        values: dict[int, Any] = {}
        pending = set(self.circle.ranks[1:])
        for rank in sorted(pending):
            if (rank, call.number) in self._early:
                values[rank] = self._value(call, rank, self._early.pop((rank, call.number)))
                pending.discard(rank)
        while pending:
            rank, message, descriptors = self.circle.receive(pending, call.number, call.deadline)
            self._attach(rank, message, descriptors)
            if message["call"] > call.number:
                self._early[rank, message["call"]] = message
                continue
            values[rank] = self._value(call, rank, message)
            pending.discard(rank)
        self.circle.arrive(call.number)
        return values

    def _attach(self, rank: int, message: dict[str, Any], descriptors: Sequence[int]) -> None:
        for number in [n for r, n in self._attached if r == rank and n not in message["arenas"]]:
            del self._attached[rank, number]
        for fd in descriptors:
            self._attached[rank, message["arena"]] = AttachedArena(fd)
            os.close(fd)

    def _value(self, call: Call, rank: int, message: dict[str, Any]) -> Any:
        if (message["call"], message["function"], message["key"]) != (call.number, call.function, call.key):
            theirs = Call(message["call"], message["function"], message["key"], message["place"], call.deadline)
            raise ContradictionError(
                f"rank {rank} is at another gather than rank {self.circle.rank}",
                rank=rank,
                got=str(theirs),
                want=str(call),
                next_step="all ranks in `ranks` must make the same gathers in the same order",
            )
        arena = self._attached.get((rank, message["arena"]))
        if message["inline"]:
            tree, table = message["content"]
        else:
            assert arena is not None
            tree, table = json.loads(arena.read_bytes(*message["content"]))
        return unpack(tree, [_copied(arena, dtype, tuple(shape), offset) for dtype, shape, offset in table])

    # ---- both

    def finish(self, call: Call, *, early_exit: bool) -> None:
        """Leave a call together with all others; a writer may leave at once.

        Raises:
            RankFailedError: another rank failed meanwhile, or a gather inside this one's body.
        """
        if self._failure is not None:
            raise self._failure.to_error()
        if self.circle.rank == self.circle.first:
            self.circle.check(call.number)
            for rank in self.circle.ranks[1:]:
                with suppress(BrokenPipeError, ConnectionResetError):  # it may have left early, and ended
                    self.circle.links[rank].send({"kind": "done", "call": call.number})
        elif not early_exit:
            while call.number in self._leased:
                self._take_done(call)
        self.circle.leave(call.number)

    def fail(self, call: Call, error: BaseException) -> None:
        """Let all others know why this rank ends the call; one that only follows another names that one."""
        record = FailureRecord.of(error, self.circle.rank, str(call))
        if isinstance(error, RankFailedError) and error.rank in self.circle.peers:
            peer = self.circle.peers[error.rank]
            record = FailureRecord(peer.rank, peer.host, peer.pid, error.cause or str(error), str(call))
        if self._failure is None:
            self._failure = record
            self.circle.fail(record)

    def __del__(self) -> None:
        self.close()  # the process group that it belonged to is gone

    def close(self) -> None:
        """Let go of everything."""
        self.circle.close()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self._attached.clear()


def _table(tensors: Sequence[torch.Tensor]) -> tuple[list[tuple[str, list[int], int]], int]:
    """Return (dtype, shape, offset) of each tensor laid out one after another, and the bytes of all."""
    rows = []
    offset = 0
    for tensor in tensors:
        rows.append((str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset))
        offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return rows, offset


def _copied(arena: AttachedArena | None, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    if arena is not None:
        return arena.copy(offset, dtype, shape)
    import torch  # nothing but empty tensors was sent

    return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
