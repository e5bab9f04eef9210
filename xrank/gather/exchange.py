"""One gather: the messages of its ranks, their leaving together, and the failure that ends it for all.

Calls are counted from 1 for each list of ranks. In a call, every writer sends one message to the first rank, with small
values in it and large values published in the workspace. The first rank fetches them and runs its body. When all bodies
have ended well it releases the ranks, and all leave.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from xrank.errors import ContradictionError, IncompleteError
from xrank.gather.class_instances import is_data_class
from xrank.gather.tree import make_tensors, unpack
from xrank.gather.writer_message import WriterMessage, encode_message, inline_tensors, is_small, split_value
from xrank.ranks.circle import Circle
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.workspace.base import MessageWorkspace
from xrank.workspace.free_space import explain_size_limit

if TYPE_CHECKING:
    import torch


class Call(NamedTuple):
    """One gather: its number, the user's call, and the deadline for the other ranks."""

    number: int
    """Number among the calls of the circle; 0 before it is counted."""
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
    """The gathers of one circle; one thread at a time uses it.

    Args:
        circle: the ranks.
        messages: workspace of this exchange alone, for values that are too large for the circle's wire.
        meeting: number of the meeting that made the circle.
    """

    def __init__(self, circle: Circle, messages: MessageWorkspace, meeting: int = 0) -> None:
        self.circle = circle
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
        self.circle.begin(call.number)
        return call

    @property
    def is_open(self) -> bool:
        """Whether this rank is in a call."""
        return bool(self._calls)

    def describe(self, number: int) -> str:
        """Return a call that this rank is in, for people."""
        return str(self._calls.get(number, f"gather number {number}"))

    def check(self, call: Call) -> None:
        """Raise if a rank is known to have failed. This asks no other process; every wait does.

        Raises:
            RankFailedError: possibly in an earlier call, which this rank had left early.
        """
        self._raise_failure()
        self.circle.check(call.number)

    def look(self, call: Call) -> None:
        """Look for ranks that ended meanwhile, then raise as `check` does."""
        self._raise_failure()
        self.circle.look(call.number)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.to_error()

    # ---- the writers' side

    def send(self, call: Call, value: object) -> None:
        """Publish a value where the first rank can read it, and notify the first rank.

        Raises:
            UsageError: the value has a part that cannot be sent.
            NoSpaceError: the space for it does not suffice.
        """
        header, tensors = split_value(value)
        max_nbytes = self.circle.wire.max_payload_nbytes
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
        self.circle.send(self.circle.first, message, call.number)
        self.circle.arrive(call.number)

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
        for rank in self.circle.others:
            if (rank, call.number) in self._early:
                values[rank] = self._value(call, rank, self._early.pop((rank, call.number)))
        pending = set(self.circle.others) - values.keys()
        while pending:
            rank, message = self.circle.receive(pending, call.number, call.deadline)
            received = WriterMessage.from_message(message, rank)
            # A writer with early_exit may be one call ahead: keep its message until its turn.
            if received.call > call.number:
                self._early[rank, received.call] = received
                continue
            values[rank] = self._value(call, rank, received)
            pending.discard(rank)
        self.circle.arrive(call.number)
        parts = [own, *(values[rank] for rank in self.circle.others)]
        if call.key is None:
            self._check_classes(call, parts)
        return parts

    def _check_classes(self, call: Call, parts: Sequence[Any]) -> None:
        """Check that configs without a key are of one class: with several classes, a rank may be a layer behind."""
        if len({type(part) for part in parts}) == 1:
            return
        ranks = zip(self.circle.ranks, parts, strict=True)
        classes = {type(part): rank for rank, part in ranks if is_data_class(type(part))}
        if len(classes) > 1:
            (one, rank), (other, other_rank) = list(classes.items())[:2]
            raise ContradictionError(
                f"rank {other_rank} seems to be at another gather than rank {rank}: they sent different classes",
                rank=other_rank,
                got=f"a {other.__qualname__} of rank {other_rank}",
                want=f"a {one.__qualname__}, as of rank {rank}, in {call}",
                next_step="make the same gathers on all ranks; if these belong together, give both the same key=",
            )

    def _value(self, call: Call, rank: int, received: WriterMessage) -> Any:
        function, key, place, tree, rows = received.description
        if received.call != call.number or function != call.function or key != call.key:
            raise ContradictionError(
                f"rank {rank} is at another gather than rank {self.circle.rank}",
                rank=rank,
                got=str(Call(received.call, function, key, place, call.deadline)),
                want=str(call),
                next_step="all ranks in `ranks` must make the same gathers in the same order",
            )
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
        if not self.circle.await_sight(is_seen, call.number, patience):
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
        self.circle.end_body()
        self.is_leaving = True
        if self.circle.rank == self.circle.first:
            if self.circle.find_open_bodies():
                # Bodies get the timeout anew: they may take as long as the ranks' arrival may.
                self.circle.await_bodies(call.number, Deadline(call.deadline.timeout_seconds))
            self.circle.release()
        elif early_exit:
            self.circle.await_arrival(self.circle.first, call.number, call.deadline)
        else:
            self.circle.await_bodies(call.number, call.deadline)
        # Not earlier: the first rank arrives, and ends its body, only after it has fetched all values.
        if (receipt := self._receipts.pop(call.number, None)) is not None:
            self._messages.retire(receipt)
        self.is_leaving = False
        self._calls.pop(call.number, None)
        self.circle.leave(call.number)

    def fail(self, call: Call, error: BaseException) -> bool:
        """Send the other ranks the reason why this rank ends the call. A rank that follows a failure names that one.

        Return whether the others make this call elsewhere: they failed in an earlier one, which this rank left early.
        """
        is_behind = self._failure is None and self.circle.has_failed_before()
        self.is_leaving = False
        self._calls.pop(call.number, None)
        self.fail_next(FailureRecord.from_error(error, self.circle.rank, str(call), call.number))
        return is_behind

    def fail_next(self, record: FailureRecord) -> None:
        """Send the other ranks a failure of this one; the first stays. The calls that this rank is in fail as well."""
        if self._failure is None:
            self.circle.fail(record)
            self._failure = record

    def __del__(self) -> None:
        self.close()  # its process group is gone

    def close(self) -> None:
        """Close the circle and the workspace."""
        self.circle.close()
        self._messages.close()
