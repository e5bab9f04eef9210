"""One gather: who sends what, how all leave together, how a failure ends it for all.

Messages of a call, which are counted from 1 for each list of ranks: every writer sends ``data`` to the first rank,
small values in it, large ones published in the workspace; the first rank fetches what came and runs its body; when all
bodies have ended well it says so, and all leave.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from xrank.errors import ContradictionError, IncompleteError
from xrank.gather.tree import pack, unpack
from xrank.ranks.circle import Circle
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.ranks.wire import Message
from xrank.workspace.base import MessageWorkspace

if TYPE_CHECKING:
    import torch

__all__ = ["Call", "Exchange"]

_INLINE_NBYTES = 32768
"""Of a header; a larger one goes through the workspace."""
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_ALIGNMENT = 16
"""Of a tensor's bytes in a message's payload: the largest element's."""


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
    """The gathers of one circle; one thread at a time uses it.

    Args:
        circle: the ranks.
        messages: carries what is too large for the circle's wire; this exchange's own.
    """

    def __init__(self, circle: Circle, messages: MessageWorkspace) -> None:
        self.circle = circle
        self._messages = messages
        self._calls = 0
        self._receipts: dict[int, str] = {}  # of calls that are not done
        self._failure: FailureRecord | None = None
        self._early: dict[tuple[int, int], Message] = {}  # (rank, call) -> message that came before its turn

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
        self.circle.look(call.number)

    # ---- the writers' side

    def send(self, call: Call, value: object) -> None:
        """Put a value where the first rank can read it, and tell the first rank.

        Raises:
            UsageError: it holds what can't be sent.
            NoSpaceError: there is no space for it.
        """
        tree, tensors = pack(value)
        rows = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        header = _to_json([tree, rows])
        message = {"call": call.number, "function": call.function, "key": call.key, "place": call.place}
        payload = b""
        nbytes = sum(tensor.nbytes + _ALIGNMENT for tensor in tensors)
        if len(header) <= _INLINE_NBYTES and nbytes <= self.circle.wire.max_payload_nbytes:
            message["header"] = header
            payload = b"".join(map(_padded_bytes, tensors))
        else:
            message["receipt"] = self._receipts[call.number] = self._messages.publish(header, tensors)
        self.circle.send(self.circle.first, Message(message, payload), call.number)
        self.circle.arrive(call.number)

    # ---- the first rank's side

    def collect(self, call: Call, own: Any) -> list[Any]:
        """Return the values of all ranks, this one's `own` first; those of the others are new, and the caller's.

        Raises:
            ContradictionError: a rank is at another gather, by what it says or by what it sends.
            RankFailedError, RankTimeoutError: a rank failed, or did not come.
        """
        values: dict[int, Any] = {}
        pending = set(self.circle.others)
        for rank in self.circle.others:
            if (rank, call.number) in self._early:
                values[rank] = self._value(call, rank, self._early.pop((rank, call.number)))
                pending.discard(rank)
        while pending:
            rank, message = self.circle.receive(pending, call.number, call.deadline)
            if message.content["call"] > call.number:
                self._early[rank, message.content["call"]] = message
                continue
            values[rank] = self._value(call, rank, message)
            pending.discard(rank)
        self.circle.arrive(call.number)
        parts = [own, *(values[rank] for rank in self.circle.others)]
        if call.key is None:
            self._check_classes(call, parts)
        return parts

    def _check_classes(self, call: Call, parts: Sequence[Any]) -> None:
        """Refuse configs of several classes that no key says belong together: one rank may be a layer behind."""
        classes = {type(part): rank for rank, part in zip(self.circle.ranks, parts, strict=True) if is_dataclass(part)}
        if len(classes) > 1:
            (one, rank), (other, other_rank) = list(classes.items())[:2]
            raise ContradictionError(
                f"rank {other_rank} is at another gather than rank {rank}, as it seems: they sent different classes",
                rank=other_rank,
                got=f"a {other.__qualname__} of rank {other_rank}",
                want=f"a {one.__qualname__}, as of rank {rank}, in {call}",
                next_step="make the same gathers on all ranks; if these belong together, give both the same key=",
            )

    def _value(self, call: Call, rank: int, message: Message) -> Any:
        told = message.content
        if (told["call"], told["function"], told["key"]) != (call.number, call.function, call.key):
            theirs = Call(told["call"], told["function"], told["key"], told["place"], call.deadline)
            raise ContradictionError(
                f"rank {rank} is at another gather than rank {self.circle.rank}",
                rank=rank,
                got=str(theirs),
                want=str(call),
                next_step="all ranks in `ranks` must make the same gathers in the same order",
            )
        if "header" in told:
            tree, rows = _parsed(told["header"])
            return unpack(tree, _inline_tensors(rows, message.payload))
        header, buffers = self._fetched(call, rank, told["receipt"])
        tree, rows = json.loads(header)
        return unpack(tree, _tensors(rows, buffers))

    def _fetched(self, call: Call, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a published message, which may become visible here a little later than its receipt."""
        fetched: list[tuple[str, list[memoryview]]] = []
        unseen: list[IncompleteError] = []

        def is_seen() -> bool:
            try:
                fetched.append(self._messages.fetch(rank, receipt))
            except IncompleteError as error:
                unseen.append(error)
            return bool(fetched)

        patience = Deadline(min(self._messages.patience_seconds, call.deadline.remaining_seconds) + 0.001)
        if not self.circle.await_sight(is_seen, call.number, patience):
            raise unseen[-1]
        return fetched[0]

    # ---- both

    def finish(self, call: Call, *, early_exit: bool) -> None:
        """Leave a call together with all others; a writer may leave as soon as the first rank has its value.

        Raises:
            RankFailedError: another rank failed meanwhile, or a gather inside this one's body.
            RankTimeoutError: another's body has not ended, `timeout_seconds` after the first rank's has.
        """
        if self._failure is not None:
            raise self._failure.to_error()
        self.circle.end_body()
        if self.circle.rank == self.circle.first:
            # Their bodies may take as long as they might have taken to come.
            self.circle.await_bodies(call.number, Deadline(call.deadline.timeout_seconds))
            self.circle.release()
        elif early_exit:
            self.circle.await_arrival(self.circle.first, call.number, call.deadline)
        else:
            self.circle.await_bodies(call.number, call.deadline)
        if (receipt := self._receipts.pop(call.number, None)) is not None:
            self._messages.retire(receipt)
        self.circle.leave(call.number)

    def fail(self, call: Call, error: BaseException) -> None:
        """Let all others know why this rank ends the call; one that only follows another names that one."""
        record = FailureRecord.of(error, self.circle.rank, str(call))
        if self._failure is None:
            self._failure = record
            self.circle.fail(record)

    def __del__(self) -> None:
        self.close()  # the process group that it belonged to is gone

    def close(self) -> None:
        """Let go of everything."""
        self.circle.close()
        self._messages.close()


@lru_cache(maxsize=16)
def _parsed(header: str) -> Any:
    """Return what an inline header says, which is not to be changed; those of a merge are much alike."""
    return json.loads(header)


def _padded_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements, row-major, and so many bytes more that the next one is aligned."""
    import torch

    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().tobytes() + bytes(-len(flat) % _ALIGNMENT)


def _inline_tensors(rows: Sequence[Any], payload: bytes) -> list[torch.Tensor]:
    """Return the tensors whose bytes came in the message itself."""
    import torch

    memory, buffers, start = memoryview(bytearray(payload)), [], 0
    for dtype, shape in rows:
        end = start + prod(shape) * getattr(torch, dtype).itemsize
        buffers.append(memory[start:end])
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
    return _tensors(rows, buffers)


def _tensors(rows: Sequence[Any], buffers: Sequence[memoryview]) -> list[torch.Tensor]:
    """Return tensors that hold these buffers."""
    import torch

    tensors = []
    for (name, shape), buffer in zip(rows, buffers, strict=True):
        dtype = getattr(torch, name)
        if buffer:
            tensors.append(torch.frombuffer(buffer, dtype=dtype).view(shape))
        else:
            tensors.append(torch.empty(shape, dtype=dtype, device="cpu"))
    return tensors
