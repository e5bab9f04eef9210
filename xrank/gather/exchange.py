"""One gather: who sends what, how all leave together, how a failure ends it for all.

Messages of a call, which are counted from 1 for each list of ranks: every writer sends one to the first rank, small
values in it, large ones published in the workspace; the first rank fetches what came and runs its body; when all bodies
have ended well it says so, and all leave.

A merge makes thousands of gathers that are much alike, and eight ranks may share two processors: what is said in the
same words as before is neither written nor parsed again.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from itertools import groupby, islice
from math import prod
from typing import TYPE_CHECKING, Any

from xrank.errors import ContradictionError, CorruptError, IncompleteError
from xrank.gather.garbage import no_search
from xrank.gather.tree import check_sendable, is_plain, pack, unpack
from xrank.ranks.circle import Circle
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.ranks.wire import Message
from xrank.workspace.arena import is_as_in_memory
from xrank.workspace.base import MessageWorkspace

if TYPE_CHECKING:
    import torch

__all__ = ["Call", "Exchange"]

_INLINE_NBYTES = 32768
"""Of a header; a larger one goes through the workspace."""
_HEAD = struct.Struct("<qII")
"""Of a message's payload: the call's number, the bytes of what is said of it, and of the receipt."""
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_ALIGNMENT = 16
"""Of a tensor's bytes in a message's payload: the largest element's."""


@dataclass(frozen=True, slots=True)
class Call:
    """One gather: its number, what the user called, and until when the others may come."""

    number: int
    function: str
    key: str | None
    place: tuple[str, int]
    """File and line of the user's call, or a name and 0; for errors alone."""
    deadline: Deadline

    def __str__(self) -> str:
        key = f" for {self.key!r}" if self.key is not None else ""
        file, line = self.place
        return f"{self.function} number {self.number}{key}, called at {file}{f':{line}' if line else ''}"


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
        self._early: dict[tuple[int, int], _Told] = {}  # (rank, call) -> what came before its turn

    def begin(self, function: str, key: str | None, place: tuple[str, int], deadline: Deadline) -> Call:
        """Count a call."""
        self._calls += 1
        self.circle.begin(self._calls)
        return Call(self._calls, function, key, place, deadline)

    def check(self, call: Call) -> None:
        """Raise if a rank has failed, as far as is known without asking; every wait looks closer.

        Raises:
            RankFailedError: it may have been in an earlier call, which this rank had left early.
        """
        self._raise_failure()
        self.circle.check(call.number)

    def look(self, call: Call) -> None:
        """Raise as `check` does, after a look at who has ended meanwhile."""
        self._raise_failure()
        self.circle.look(call.number)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.to_error()

    # ---- the writers' side

    def send(self, call: Call, value: object) -> None:
        """Put a value where the first rank can read it, and tell the first rank.

        Raises:
            UsageError: it holds what can't be sent.
            NoSpaceError: there is no space for it.
        """
        header, tensors = _packed(value)
        nbytes = sum([tensor.nbytes + _ALIGNMENT for tensor in tensors])
        is_inline = len(header) <= _INLINE_NBYTES and nbytes <= self.circle.wire.max_payload_nbytes
        receipt = b"" if is_inline else self._messages.publish(header, tensors).encode()
        if receipt:
            self._receipts[call.number] = receipt.decode()
        said = _said(call.function, call.key, call.place, header if is_inline else "")
        parts = [_HEAD.pack(call.number, len(said), len(receipt)), said, receipt]
        if self.circle.wire.max_payload_nbytes:
            if is_inline:
                parts += [_padded_bytes(tensor) for tensor in tensors]
            message = Message({}, b"".join(parts))
        else:
            message = Message({"told": b"".join(parts).decode("latin-1")})
        self.circle.send(self.circle.first, message, call.number)
        self.circle.arrive(call.number)

    # ---- the first rank's side

    def collect(self, call: Call, own: Any) -> list[Any]:
        """Return the values of all ranks, this one's `own` first; those of the others are new, and the caller's.

        Raises:
            ContradictionError: a rank is at another gather, by what it says or by what it sends.
            RankFailedError, RankTimeoutError: a rank failed, or did not come.
        """
        values: dict[int, Any] = {}
        for rank in self.circle.others:
            if (rank, call.number) in self._early:
                values[rank] = self._value(call, rank, self._early.pop((rank, call.number)))
        pending = set(self.circle.others) - values.keys()
        while pending:
            rank, message = self.circle.receive(pending, call.number, call.deadline)
            told = _Told.of(message, rank)
            if told.call > call.number:
                self._early[rank, told.call] = told
                continue
            values[rank] = self._value(call, rank, told)
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

    def _value(self, call: Call, rank: int, told: _Told) -> Any:
        function, key, place, tree, rows = told.said
        if told.call != call.number or function != call.function or key != call.key:
            raise ContradictionError(
                f"rank {rank} is at another gather than rank {self.circle.rank}",
                rank=rank,
                got=str(Call(told.call, function, key, place, call.deadline)),
                want=str(call),
                next_step="all ranks in `ranks` must make the same gathers in the same order",
            )
        if not told.receipt:
            return unpack(tree, _inline_tensors(rows, told.content))
        header, buffers = self._fetched(call, rank, told.receipt)
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
        self._raise_failure()
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

    def fail(self, call: Call, error: BaseException) -> bool:
        """Let all others know why this rank ends the call; one that only follows another names that one.

        Return whether the others make this call elsewhere: they failed in an earlier one, which this rank left early.
        """
        is_behind = self._failure is None and self.circle.has_failed_before()
        if self._failure is None:
            self._failure = FailureRecord.from_error(error, self.circle.rank, str(call), call.number)
            self.circle.fail(self._failure)
        return is_behind

    def __del__(self) -> None:
        self.close()  # the process group that it belonged to is gone

    def close(self) -> None:
        """Let go of everything."""
        self.circle.close()
        self._messages.close()


@dataclass(frozen=True, slots=True)
class _Told:
    """One writer's message, as the first rank reads it."""

    call: int
    said: tuple[str, str | None, tuple[str, int], Any, Any]
    """Function, key, place, tree and rows."""
    receipt: str
    content: bytearray
    """The tensors' bytes, where they came in the message itself."""

    @classmethod
    def of(cls, message: Message, rank: int) -> _Told:
        """Return what a message says.

        Raises:
            CorruptError: it is none of a gather.
        """
        payload = message.payload or message.content.get("told", "").encode("latin-1")
        try:
            call, num_said, num_receipt = _HEAD.unpack_from(payload)
            receipt_at = _HEAD.size + num_said
            content_at = receipt_at + num_receipt
            said = _parsed(payload[_HEAD.size : receipt_at])
            return cls(call, said, payload[receipt_at:content_at].decode(), bytearray(payload[content_at:]))
        except (ValueError, TypeError, struct.error) as error:
            raise CorruptError(
                f"the message of rank {rank} is none of a gather's", rank=rank, got=str(error)[:200]
            ) from None


@lru_cache(maxsize=64)
def _said(function: str, key: str | None, place: tuple[str, int], header: str) -> bytes:
    """Return what a message says of its call, and of its tensors where they come with it."""
    return f"[{_to_json([function, key, place])},{header or 'null'}]".encode()


@lru_cache(maxsize=64)
def _parsed(said: bytes) -> tuple[str, str | None, tuple[str, int], Any, Any]:
    """Return what `_said` was given, which is not to be changed."""
    (function, key, (file, line)), header = json.loads(said)
    tree, rows = header or (None, None)
    return function, key, (file, line), tree, rows


def _packed(value: object) -> tuple[str, list[torch.Tensor]]:
    """Return the header and the tensors of a value."""
    if is_plain(value):
        check_sendable(value)
        return _header_of_one(value.dtype, value.shape), [value.detach()]
    tree, tensors = pack(value)
    kinds = groupby([(tensor.dtype, tensor.shape) for tensor in tensors])
    return _to_json([tree, [_row(dtype, shape, len(list(alike))) for (dtype, shape), alike in kinds]]), tensors


def _row(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> list[Any]:
    """Return how a header tells of `count` tensors, one after another, that are of one kind."""
    return [str(dtype).removeprefix("torch."), list(shape), count]


@lru_cache(maxsize=64)
def _header_of_one(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Return the header of a tensor that is the whole value, as `pack` would have it."""
    return _to_json([["t", 0], [_row(dtype, shape, 1)]])


def _padded_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements, row-major, and so many bytes more that the next one is aligned."""
    if not is_as_in_memory(tensor):
        tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) + bytes(-tensor.nbytes % _ALIGNMENT)


def _inline_tensors(rows: Sequence[Any], content: bytearray) -> list[torch.Tensor]:
    """Return the tensors whose bytes came in the message itself."""
    import torch

    memory, buffers, start = memoryview(content), [], 0
    for dtype, shape, count in rows:
        nbytes = prod(shape) * getattr(torch, dtype).itemsize
        for _ in range(count):
            buffers.append(memory[start : start + nbytes])
            start += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return _tensors(rows, buffers)


def _tensors(rows: Sequence[Any], buffers: Sequence[memoryview]) -> list[torch.Tensor]:
    """Return tensors that hold these buffers."""
    import torch

    tensors, remaining = [], iter(buffers)
    for name, shape, count in rows:
        dtype = getattr(torch, name)
        if not prod(shape):
            tensors += [torch.empty(shape, dtype=dtype, device="cpu") for _ in islice(remaining, count)]
            continue
        if count == 1:
            flat = [torch.frombuffer(next(remaining), dtype=dtype)]
        else:
            with no_search():
                flat = [torch.frombuffer(buffer, dtype=dtype) for buffer in islice(remaining, count)]
        tensors += flat if len(shape) == 1 else [tensor.view(shape) for tensor in flat]
    return tensors
