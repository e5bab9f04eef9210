"""A group of ranks that have met, and the waits of each for the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from time import monotonic

from xrank.errors import AGAIN, RankFailedError, RankTimeoutError, option
from xrank.ranks.failure import Deadline, FailureRecord
from xrank.ranks.waits import Awaits, LongWait, Peer, WaitMonitor, record_end
from xrank.ranks.wire import Message, Sleep, Status, Wire
from xrank.words import ranks_text

_NUM_LOOKS = 20
"""Looks at memory before a wait yields the processor between two looks."""
_LONG_YIELD_SECONDS = 300e-6
_BUSY_SECONDS = 0.05
_BUSY_SPIN_SECONDS = 50e-6
"""A yield longer than `_LONG_YIELD_SECONDS` means that the processor is busy with other work than waiting ranks. For
`_BUSY_SECONDS`, waits then spin for `_BUSY_SPIN_SECONDS` only and sleep: the kernel runs a woken sleeper before such
work has used up its time slice, but not a process that yielded."""
_LOOKS_PER_PUMP = 8
"""Looks at memory for each look at sockets and deaths, which takes a system call."""
_TICK_SECONDS = 0.1
"""Longest sleep of a wait between two checks for failures: the time until all ranks know of a failure."""
_FIRST_TICK_SECONDS = 200e-6
"""First sleep of a wait for an event that may come without a message; each further one is twice as long."""


class RankGroup:
    """Ranks that have met, as one of them sees the others; one thread at a time uses it.

    Every wait checks all other ranks for failures and deaths, so each waiting rank names the rank that raised, died,
    left or did not come. Waits raise RankFailedError then, and RankTimeoutError after a deadline.

    For `spin_seconds` a wait looks without sleeping: a sleep costs as much as the whole call. It is 0 if ranks share
    processors: the answering rank then needs this one's. Only these ranks know the `secret`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        wire: Wire,
        peers: Mapping[int, Peer],
        *,
        secret: bytes = b"",
        spin_seconds: float = 0.0,
    ) -> None:
        self.ranks, self.rank, self.wire, self.peers, self.secret = tuple(ranks), rank, wire, dict(peers), secret
        self._spin_seconds, self._busy_until = spin_seconds, 0.0
        self.first = self.ranks[0]
        """The rank that gathers."""
        self.others = tuple(r for r in self.ranks if r != rank)
        self.check_around: Callable[[], None] = lambda: None
        """Raises if a gather failed whose body contains those of this group; every wait calls it."""
        self.begin_long_wait: Callable[[int, Awaits], LongWait | None] = lambda call, awaits: None
        """Returns the look-out of a long wait in a call."""
        self._last = 0
        self._num_ended = 0
        self._open: set[int] = set()  # calls begun and not left; nested ones end before those around them

    @property
    def is_one_network(self) -> bool:
        """Whether all ranks reach each other's abstract sockets, so that none needs a port."""
        own = Peer.from_this_process(self.rank).network
        return all(peer.network == own for peer in self.peers.values())

    # ---- progress of the ranks

    def begin(self, call: int) -> None:
        """Take part in a call, until `leave`."""
        self._last = call
        self._open.add(call)

    def arrive(self, call: int) -> None:
        """Report this rank's part of a call as done: message sent or, on the first rank, all received."""
        self.wire.set_status(Status.ARRIVED, call)

    def end_body(self) -> None:
        """Report that this rank's body of its innermost call has ended without an error."""
        self._num_ended += 1
        if self.rank != self.first:
            self.wire.set_status(Status.ENDED, self._num_ended)
            self.wire.nudge((self.first,))

    def release(self) -> None:
        """On the first rank: report that all bodies have ended without an error, so that all ranks may leave."""
        self.wire.set_status(Status.ENDED, self._num_ended)
        self.wire.nudge(self.others)

    def leave(self, call: int) -> None:
        """Report that no rank needs this one any more for a call, and for all calls before it that it has left."""
        self._open.discard(call)
        self.wire.set_status(Status.LEFT, min(self._open, default=self._last + 1) - 1)

    def find_absent(self, call: int) -> tuple[int, ...]:
        """Return the other ranks that have not come to a call; the first, which comes last, only if it is alone."""
        absent = [r for r in self.others if self.wire.get_status(r, Status.ARRIVED) < call]
        return tuple(r for r in absent if r != self.first or len(absent) == 1)

    # ---- failures

    def fail(self, record: FailureRecord) -> None:
        """Report this rank's failure to all others."""
        self.wire.fail(record)

    def look(self, call: int) -> None:
        """Look for ranks that have ended meanwhile, then `check`."""
        self.wire.pump(0)
        self.check(call)

    def check(self, call: int) -> None:
        """Raise RankFailedError if another rank failed or died before it left the call; `failures` contains all."""
        # Ranks that fail because another failed repeat its record, so there is one record a failure. A rank that has
        # left this call may have failed in a later one, which is not this call's failure.
        found = self.wire.failures()
        if not found and not self.wire.ended:
            return
        records = {record.rank: record for rank, record in found.items() if not self._has_left(rank, call)}
        if not records and self.wire.ended:
            ended = (r for r in self.wire.ended if not self._has_left(r, call))
            records = {r: self._record_death(r) for r in sorted(ended, key=self.ranks.index)}
        if records:
            raise self._make_error(list(records.values()))

    def look_now(self) -> None:
        """Look as a wait does, in the call that was begun last."""
        self.check_around()
        self.look(self._last)

    def has_failed_before(self) -> bool:
        """Return whether a rank failed in a call that this rank has left and the first has not, which raises there."""
        first_open = min(self._open, default=self._last + 1)
        with suppress(RankFailedError):  # the store may be gone
            numbers = (record.number for record in self.wire.failures().values() if 0 < record.number < first_open)
            return self.rank != self.first and any(not self._has_left(self.first, number) for number in numbers)
        return False

    def _has_left(self, rank: int, call: int) -> bool:
        return self.wire.get_status(rank, Status.LEFT) >= call

    # ---- messages

    def send(self, rank: int, message: Message, call: int) -> None:
        """Send a message to a rank; while its buffers are full, wait as long as it lives."""
        with suppress(BlockingIOError, ConnectionError):  # if so, the wait below tries again, and raises
            self.wire.send(rank, message)
            return
        unsent = [message]

        def is_sent() -> bool:
            with suppress(BlockingIOError):
                self.wire.send(rank, unsent[0])
                unsent.clear()
            return not unsent

        try:
            self._wait(lambda: not unsent or is_sent(), [rank], call, None, next_tick=_FIRST_TICK_SECONDS)
        except ConnectionError:
            self.check(call)
            raise self._make_error([self._record_death(rank)]) from None

    def receive(self, sources: Iterable[int], call: int, deadline: Deadline) -> tuple[int, Message]:
        """Return the next message of any of these ranks, with its sender.

        The deadline counts until all ranks have come to the call. After that the wait lasts as long as they live, since
        the first rank's body may take any time.
        """
        inboxes = {source: self.wire.inboxes[source] for source in sources}
        contents = list(inboxes.values())
        if not any(contents):
            sleep = Sleep.UNTIL_ALL if self.rank == self.first else Sleep.LIGHT
            self._wait(lambda: any(contents), list(inboxes), call, deadline, sleep=sleep)
        source = next(source for source, inbox in inboxes.items() if inbox)
        return source, inboxes[source].popleft()

    def await_bodies(self, call: int, deadline: Deadline) -> None:
        """Wait until all bodies have ended: the first rank for all others, the others for its `release`.

        On the first rank the deadline counts until all have ended; on others as in `receive`.
        """
        late = self.find_open_bodies
        if self.rank == self.first:
            self._wait(lambda: not late(), self.others, call, deadline, late, sleep=Sleep.UNTIL_ALL)
        else:
            first, get_status, num_ended = self.first, self.wire.get_status, self._num_ended
            self._wait(
                # It has arrived, too: bodies are counted over all calls, and a rank may be in another call.
                lambda: get_status(first, Status.ENDED) >= num_ended and get_status(first, Status.ARRIVED) >= call,
                (first,),
                call,
                deadline,
            )

    def find_open_bodies(self) -> tuple[int, ...]:
        """Return the other ranks that are known to have ended fewer bodies than this one."""
        return tuple([r for r in self.others if self.wire.get_status(r, Status.ENDED) < self._num_ended])

    def await_arrival(self, rank: int, call: int, deadline: Deadline) -> None:
        """Wait until a rank has done its part of a call; errors as `receive`."""
        get_status = self.wire.get_status
        # An arrival sends no nudge, as most ranks do not wait for one.
        self._wait(
            lambda: get_status(rank, Status.ARRIVED) >= call, [rank], call, deadline, next_tick=_FIRST_TICK_SECONDS
        )

    def await_sight(self, is_over: Callable[[], bool], call: int, patience: Deadline) -> bool:
        """Wait until something that a rank announced becomes visible here; return False if `patience` ends first."""
        tick = _FIRST_TICK_SECONDS
        while not is_over():
            self.check_around()
            self.check(call)
            if patience.has_passed:
                self.look(call)  # this rank may have been stopped for as long, and the other be gone
                return False
            tick = min(2 * tick, _TICK_SECONDS)
            self.wire.pump(min(tick, patience.remaining_seconds))
        return True

    def _is_soon(self, is_over: Callable[[], bool]) -> bool:
        """Look at shared memory without sleeping, for a moment: most answers come at once."""
        self.wire.look()
        if is_over():
            return True
        num_looks, now = 0, monotonic()
        end = now + (self._spin_seconds if now >= self._busy_until else _BUSY_SPIN_SECONDS)
        while now < end:
            num_looks += 1
            if num_looks > _NUM_LOOKS and now >= self._busy_until:
                os.sched_yield()  # the answer may need this very core
                before, now = now, monotonic()
                if now - before > _LONG_YIELD_SECONDS:
                    self._busy_until = now + _BUSY_SECONDS
            if num_looks % _LOOKS_PER_PUMP:
                self.wire.look()
            else:
                self.wire.pump(0)
            if is_over():
                return True
            now = monotonic()
        return False

    def _wait(
        self,
        is_over: Callable[[], bool],
        sources: Sequence[int],
        call: int,
        deadline: Deadline | None,
        late: Callable[[], tuple[int, ...]] | None = None,
        next_tick: float = _TICK_SECONDS,
        sleep: Sleep = Sleep.LIGHT,
    ) -> None:
        """Wait; the deadline counts while there are `late` ranks: by default, ranks that have not come to the call."""
        if self._is_soon(is_over):
            return
        monitor = WaitMonitor(lambda awaits: self.begin_long_wait(call, awaits))
        try:
            while True:
                # Announce the sleep, then look once more: a rank that sets a status after the announcement sends a
                # nudge, and the look finds what was set before it. The other order could miss an update.
                self.wire.set_status(Status.SLEEPS, sleep)
                try:
                    self.wire.look()
                    if is_over():
                        return
                    self._check_all(sources, call)
                    if monitor.is_due:
                        # No process is watched by the monitor: the wire watches those of the ranks itself.
                        if self.rank != self.first:
                            monitor.look(Awaits.FIRST, (self.first,), ())
                        elif late is not None:
                            monitor.look(Awaits.BODY_END, late(), ())
                        else:
                            monitor.look(Awaits.ARRIVAL, self.find_absent(call), ())
                    # Messages and nudges end the sleep; events without either are looked for ever less often.
                    tick, next_tick = next_tick, min(_TICK_SECONDS, 2 * next_tick)
                    if deadline is not None and deadline.remaining_seconds < tick:
                        tick = self._last_tick(tick, call, deadline, late)
                    self.wire.pump(tick)
                except RankFailedError:
                    # The awaited event may have come before the failure, which then belongs to a later call.
                    self.wire.pump(0)
                    if is_over():
                        return
                    raise
                finally:
                    self.wire.set_status(Status.SLEEPS, Sleep.NOT)
                if is_over():
                    return
        except RankFailedError:
            # Ranks may have waited for each other, and another of them may have noticed it first.
            monitor.raise_if_confirmed()
            raise
        finally:
            monitor.end()

    def _last_tick(
        self, tick: float, call: int, deadline: Deadline, late: Callable[[], tuple[int, ...]] | None
    ) -> float:
        """Return the seconds of a sleep that ends near the deadline, which counts only while ranks are late."""
        if deadline.has_passed:
            self.look(call)  # a rank that has ended is a failure, not late
        waiting_for = late() if late else self.find_absent(call)
        if waiting_for and deadline.has_passed:
            raise self._make_timeout_error(waiting_for, deadline, "end the body of" if late else "come to")
        return deadline.remaining_seconds if waiting_for else tick

    def _check_all(self, sources: Sequence[int], call: int) -> None:
        """Raise if any rank failed, a source has closed its end, or an enclosing gather failed."""
        self.check_around()
        self.check(call)
        # A rank that has left the call owes it nothing: it may have failed in another call, or have ended.
        if silent := [r for r in sources if r in self.wire.silent and not self._has_left(r, call)]:
            raise self._make_error([self._record_death(r) for r in silent])

    def _record_death(self, rank: int) -> FailureRecord:
        return record_end(rank, self.peers[rank], "its process ended without a report", "a gather")

    def _make_error(self, records: Sequence[FailureRecord]) -> RankFailedError:
        errors = tuple(record.to_error() for record in records)
        errors[0].failures = errors
        return errors[0]

    def _make_timeout_error(self, absent: tuple[int, ...], deadline: Deadline, what: str) -> RankTimeoutError:
        names = ", ".join(f"rank {r} (host {self.peers[r].host}, pid {self.peers[r].pid})" for r in absent)
        return RankTimeoutError(
            f"{names} did not {what} the gather within {deadline.timeout_seconds:g} s",
            rank=absent[0],
            waiting_for=absent,
            got=f"{ranks_text(r for r in self.ranks if r not in absent)} did",
            want=f"all of {ranks_text(self.ranks)}",
            next_step=f"let all ranks {AGAIN}; raise {option('timeout_seconds')} if they are slow (py-spy dump --pid "
            "PID shows where they are)",
        )

    def close(self) -> None:
        """Release all resources; ranks that still wait see this rank as gone."""
        self.wire.close()
