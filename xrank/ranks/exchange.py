"""One gather: the messages of its ranks, their leaving together, and the failure that ends it for all."""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xrank.errors import ContradictionError, IncompleteError
from xrank.ranks.failure import Deadline, FailureRecord, damage_error
from xrank.ranks.group import RankGroup
from xrank.ranks.memory import explain_size_limit
from xrank.ranks.memory_messages import is_as_in_memory
from xrank.ranks.values import check_sendable, is_data_class, is_plain, make_tensors, pack, unpack
from xrank.ranks.wire import Message, MessageWorkspace

if TYPE_CHECKING:
    import torch


_INLINE_NBYTES = 32768
"""Bytes of a header; a larger one goes through the workspace."""
_HEAD = struct.Struct("<qII")
"""Head of a message's payload: number of the call, bytes of its description, bytes of the receipt."""
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_ALIGNMENT = 16
"""Alignment in bytes of a tensor in a message's payload: that of the largest element."""


class WriterMessage(NamedTuple):
    """One writer's message, parsed by the first rank."""

    call: int
    description: tuple[str, str | None, tuple[str, int], Any, Any]
    """Function, key, place, tree and rows."""
    receipt: str
    content: bytearray
    """Bytes of the tensors that came in the message itself."""

    @classmethod
    def from_message(cls, message: Message, rank: int) -> WriterMessage:
        """Return the parsed message of a rank; CorruptError if it is not a message of a gather."""
        payload = message.payload or message.content.get("told", "").encode("latin-1")
        try:
            call, num_described, num_receipt = _HEAD.unpack_from(payload)
            receipt_at = _HEAD.size + num_described
            content_at = receipt_at + num_receipt
            description = _parse_description(payload[_HEAD.size : receipt_at])
            return cls(call, description, payload[receipt_at:content_at].decode(), bytearray(payload[content_at:]))
        except (ValueError, TypeError, struct.error) as error:
            raise damage_error(
                f"the message of rank {rank} is not one of a gather", str(error)[:200], rank=rank
            ) from None


def is_small(header: str, tensors: Sequence[torch.Tensor], max_nbytes: int) -> bool:
    """Return whether a message of that payload has room for a value."""
    return len(header) <= _INLINE_NBYTES and sum([tensor.nbytes + _ALIGNMENT for tensor in tensors]) <= max_nbytes


def encode_message(
    number: int,
    call: tuple[str, str | None, tuple[str, int]],
    *,
    inline: tuple[str, Sequence[torch.Tensor]] | None,
    receipt: bytes,
    is_json: bool,
) -> Message:
    """Return the message of a writer.

    Args:
        number: that of the call.
        call: function, key and place of the call.
        inline: header and tensors of the value, if it is in the message.
        receipt: under which the value lies elsewhere; else empty.
        is_json: whether the wire carries JSON only.
    """
    header, tensors = inline or ("", ())
    description = _encode_description(*call, header)
    parts = [_HEAD.pack(number, len(description), len(receipt)), description, receipt, *map(_pad_bytes, tensors)]
    if is_json:
        return Message({"told": b"".join(parts).decode("latin-1")})
    return Message({}, b"".join(parts))


@lru_cache(maxsize=64)
def _encode_description(function: str, key: str | None, place: tuple[str, int], header: str) -> bytes:
    """Return the description of a call, with the header of its tensors if they are in the message."""
    return f"[{_to_json([function, key, place])},{header or 'null'}]".encode()


@lru_cache(maxsize=64)
def _parse_description(description: bytes) -> tuple[str, str | None, tuple[str, int], Any, Any]:
    """Return the arguments of `_encode_description`. They are cached: do not change them."""
    (function, key, (file, line)), header = json.loads(description)
    tree, rows = header or (None, None)
    return function, key, (file, line), tree, rows


def split_value(value: object) -> tuple[str, list[torch.Tensor]]:
    """Return the header and the tensors of a value."""
    if is_plain(value):
        check_sendable(value)
        return _header_of_one(value.dtype, value.shape), [value.detach() if value.requires_grad else value]
    tree, tensors = pack(value)
    kinds = groupby([(tensor.dtype, tensor.shape) for tensor in tensors])
    return _to_json([tree, [_row(dtype, shape, len(list(alike))) for (dtype, shape), alike in kinds]]), tensors


def _row(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> list[Any]:
    """Return the header's row for `count` consecutive tensors of one dtype and shape."""
    return [str(dtype).removeprefix("torch."), list(shape), count]


@lru_cache(maxsize=64)
def _header_of_one(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Return the header of a single tensor, as `pack` would make it."""
    return _to_json([["t", 0], [_row(dtype, shape, 1)]])


def _pad_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements, row-major, with padding that aligns the next tensor."""
    if not is_as_in_memory(tensor):
        tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) + bytes(-tensor.nbytes % _ALIGNMENT)


def inline_tensors(rows: Sequence[Any], content: bytearray) -> list[torch.Tensor]:
    """Return the tensors of a message's own content."""
    import torch

    if len(rows) == 1 and rows[0][2] == 1 and content:  # a single tensor, as most gathers have
        dtype, shape, _ = rows[0]
        flat = torch.frombuffer(content, dtype=getattr(torch, dtype), count=prod(shape))
        return [flat if len(shape) == 1 else flat.view(shape)]
    memory, buffers, start = memoryview(content), [], 0
    for dtype, shape, count in rows:
        nbytes = prod(shape) * getattr(torch, dtype).itemsize
        for _ in range(count):
            buffers.append(memory[start : start + nbytes])
            start += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return make_tensors(rows, buffers)


class Call(NamedTuple):
    """One gather: its number, the user's call, and the deadline for the other ranks."""

    number: int
    """Number among the calls of the group; 0 before it is counted."""
    function: str
    key: str | None
    place: tuple[str, int]
    """File and line of the user's call, or a name and 0; only for errors."""
    deadline: Deadline = Deadline(inf)

    def __str__(self) -> str:
        key = f" for {self.key!r}" if self.key is not None else ""
        number = f" number {self.number}" if self.number else ""
        file, line = self.place
        return f"{self.function}{number}{key}, called at {file}{f':{line}' if line else ''}"


class GatherExchange:
    """The gathers of one group of ranks; one thread at a time uses it.

    Args:
        group: the ranks.
        messages: workspace of this exchange alone, for values that are too large for the group's wire.
        meeting: number of the meeting that made the group.
    """

    def __init__(self, group: RankGroup, messages: MessageWorkspace, meeting: int = 0) -> None:
        self.group = group
        self.meeting = meeting
        self._messages = messages
        self.is_leaving = False
        """Whether this rank's innermost body has ended, and it waits for the others' bodies."""
        self.num_calls = 0
        self._calls: dict[int, Call] = {}  # begun and not left
        self._receipts: dict[int, str] = {}  # of unfinished calls
        self._failure: FailureRecord | None = None
        self._early: dict[tuple[int, int], WriterMessage] = {}  # (rank, call) -> message that came before its turn

    def begin(self, function: str, key: str | None, place: tuple[str, int], deadline: Deadline) -> Call:
        """Count a call, and begin it."""
        self.num_calls += 1
        call = self._calls[self.num_calls] = Call(self.num_calls, function, key, place, deadline)
        self.group.begin(call.number)
        return call

    @property
    def is_open(self) -> bool:
        """Whether this rank is in a call."""
        return bool(self._calls)

    def describe(self, number: int) -> str:
        """Return a call that this rank is in, for people."""
        return str(self._calls.get(number, f"gather number {number}"))

    def check(self, call: Call) -> None:
        """Raise if a rank is known to have failed, possibly in an earlier call. This asks no other process."""
        self._raise_failure()
        self.group.check(call.number)

    def look(self, call: Call) -> None:
        """Look for ranks that ended meanwhile, then raise as `check` does."""
        self._raise_failure()
        self.group.look(call.number)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.to_error()

    # ---- the writers' side

    def send(self, call: Call, value: object) -> None:
        """Publish a value where the first rank can read it, and notify the first rank."""
        header, tensors = split_value(value)
        max_nbytes = self.group.wire.max_payload_nbytes
        is_inline = is_small(header, tensors, max_nbytes)
        # Published before the message is sent: a receipt promises that the value can be read.
        receipt = b"" if is_inline else self._publish(header, tensors)
        if receipt:
            self._receipts[call.number] = receipt.decode()
        message = encode_message(
            call.number,
            (call.function, call.key, call.place),
            inline=(header, tensors) if is_inline else None,
            receipt=receipt,
            is_json=not max_nbytes,
        )
        self.group.send(self.group.first, message, call.number)
        self.group.arrive(call.number)

    def _publish(self, header: str, tensors: list[torch.Tensor]) -> bytes:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        with explain_size_limit("the value of this rank", nbytes):
            return self._messages.publish(header, tensors).encode()

    # ---- the first rank's side

    def collect(self, call: Call, own: Any) -> list[Any]:
        """Return the values of all ranks, `own` first. The caller owns the others' values.

        Raises:
            ContradictionError: a rank is at another gather, by its description or by its value.
            RankFailedError, RankTimeoutError: a rank failed, or did not arrive in time.
        """
        values: dict[int, Any] = {}
        for rank in self.group.others:
            if (rank, call.number) in self._early:
                values[rank] = self._value(call, rank, self._early.pop((rank, call.number)))
        pending = set(self.group.others) - values.keys()
        while pending:
            rank, message = self.group.receive(pending, call.number, call.deadline)
            received = WriterMessage.from_message(message, rank)
            # A writer with early_exit may be one call ahead: keep its message until its turn.
            if received.call > call.number:
                self._early[rank, received.call] = received
                continue
            values[rank] = self._value(call, rank, received)
            pending.discard(rank)
        self.group.arrive(call.number)
        parts = [own, *(values[rank] for rank in self.group.others)]
        if call.key is None:
            self._check_classes(call, parts)
        return parts

    def _check_classes(self, call: Call, parts: Sequence[Any]) -> None:
        """Check that configs without a key are of one class: with several classes, a rank may be a layer behind."""
        if len({type(part) for part in parts}) == 1:
            return
        ranks = zip(self.group.ranks, parts, strict=True)
        classes = {type(part): rank for rank, part in ranks if is_data_class(type(part))}
        if len(classes) > 1:
            (one, rank), (other, other_rank) = list(classes.items())[:2]
            raise ContradictionError(
                f"rank {other_rank} seems to be at another gather than rank {rank}: they sent different classes",
                rank=other_rank,
                got=f"a {other.__qualname__}",
                want=f"a {one.__qualname__}, as of rank {rank}, in {call}",
                next_step="make the same gathers on all ranks; if these belong together, give both the same key=",
            )

    def _value(self, call: Call, rank: int, received: WriterMessage) -> Any:
        function, key, place, tree, rows = received.description
        if received.call != call.number or function != call.function or key != call.key:
            made = str(Call(received.call, function, key, place, call.deadline))
            what = f"rank {rank} is at another gather than rank {self.group.rank}"
            next_step = "all ranks in `ranks` must make the same gathers in the same order"
            raise ContradictionError(what, rank=rank, got=made, want=str(call), next_step=next_step)
        if not received.receipt:
            return unpack(tree, inline_tensors(rows, received.content))
        header, buffers = self._fetch(call, rank, received.receipt)
        tree, rows = json.loads(header)
        return unpack(tree, make_tensors(rows, buffers))

    def _fetch(self, call: Call, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a published message. It may become visible on this host a little later than its receipt."""
        fetched: list[tuple[str, list[memoryview]]] = []
        unseen: list[IncompleteError] = []

        def is_seen() -> bool:
            try:
                fetched.append(self._messages.fetch(rank, receipt))
            except IncompleteError as error:
                unseen.append(error)
            return bool(fetched)

        # The summand keeps the deadline above 0, as none of the call's time may be left.
        patience = Deadline(min(self._messages.patience_seconds, call.deadline.remaining_seconds) + 0.001)
        if not self.group.await_sight(is_seen, call.number, patience):
            raise unseen[-1]
        return fetched[0]

    # ---- both

    def finish(self, call: Call, *, early_exit: bool) -> None:
        """Leave a call together with all other ranks; with `early_exit`, as soon as the first rank has the value.

        Raises:
            RankFailedError: another rank failed meanwhile, or a gather inside this one's body failed.
            RankTimeoutError: a body has not ended `timeout_seconds` after the first rank's body.
        """
        self._raise_failure()
        self.group.end_body()
        self.is_leaving = True
        if self.group.rank == self.group.first:
            if self.group.find_open_bodies():
                # Bodies get the timeout anew: they may take as long as the ranks' arrival may.
                self.group.await_bodies(call.number, Deadline(call.deadline.timeout_seconds))
            self.group.release()
        elif early_exit:
            self.group.await_arrival(self.group.first, call.number, call.deadline)
        else:
            self.group.await_bodies(call.number, call.deadline)
        # Not earlier: the first rank arrives, and ends its body, only after it has fetched all values.
        if (receipt := self._receipts.pop(call.number, None)) is not None:
            self._messages.retire(receipt)
        self.is_leaving = False
        self._calls.pop(call.number, None)
        self.group.leave(call.number)

    def fail(self, call: Call, error: BaseException) -> bool:
        """Send the other ranks the reason why this rank ends the call. A rank that follows a failure names that one.

        Return whether the others make this call elsewhere: they failed in an earlier one, which this rank left early.
        """
        is_behind = self._failure is None and self.group.has_failed_before()
        self.is_leaving = False
        self._calls.pop(call.number, None)
        self.fail_next(FailureRecord.from_error(error, self.group.rank, str(call), call.number))
        return is_behind

    def fail_next(self, record: FailureRecord) -> None:
        """Send the other ranks a failure of this one; the first stays. The calls that this rank is in fail as well."""
        if self._failure is None:
            self.group.fail(record)
            self._failure = record

    def __del__(self) -> None:
        self.close()  # its process group is gone

    def close(self) -> None:
        """Close the group and the workspace."""
        self.group.close()
        self._messages.close()
