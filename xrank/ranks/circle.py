"""A circle: ranks that have met, and how each waits for the others.

Each hears of all others' failures and deaths, so that whoever raises, dies, leaves or stays away is named by everybody
who waits. Nothing else in xrank waits for a rank that has been met.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from time import monotonic

from xrank.errors import RankFailedError, RankTimeoutError
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.ranks.peer import Peer
from xrank.ranks.wire import Message, Sleep, Wire, Word

__all__ = ["Circle"]

_TICK_SECONDS = 0.1
"""How long a wait sleeps before it looks whether anyone has failed: so soon is a failure known to all."""
_FIRST_TICK_SECONDS = 200e-6
"""The first sleep, where no message may announce what is waited for; each further one is twice as long."""
_NUM_LOOKS = 20
"""At memory, before a wait lets other processes have the processor between its looks."""
_LONG_YIELD_SECONDS = 300e-6
_BUSY_SECONDS = 0.05
_BUSY_SPIN_SECONDS = 50e-6
"""Other processes had the processor for so long: they have more to do than ranks that wait, and for a while waits only
look for a moment, and then sleep. Who sleeps is woken before such a process has had its turn; who yields is not."""
_LOOKS_PER_PUMP = 8
"""What comes through a socket, and deaths, are looked for less often: that takes a system call."""


class Circle:
    """This rank's view of the ranks that have met; one thread at a time uses it.

    Args:
        ranks: all, the first rank first.
        rank: this one.
        wire: to the others.
        peers: every other rank's process.
        spin_seconds: how long a wait looks without sleeping: most answers come at once, and a sleep costs as much as
            the whole call. 0 where ranks have to share processors: there the answer needs the one that would spin.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        wire: Wire,
        peers: Mapping[int, Peer],
        *,
        spin_seconds: float = 0.0,
    ) -> None:
        self.ranks, self.rank, self.wire, self.peers = tuple(ranks), rank, wire, dict(peers)
        self._spin_seconds = spin_seconds
        self.others = tuple(r for r in self.ranks if r != rank)
        self.check_around: Callable[[], None] = lambda: None
        """Raises if a gather failed in whose body those of this circle are; every wait asks it."""
        self._busy_until = 0.0
        self._last = 0
        self._num_ended = 0
        self._open: set[int] = set()  # calls begun and not left; nested ones end before those around them

    @property
    def first(self) -> int:
        """The rank that gathers."""
        return self.ranks[0]

    # ---- how far each rank is

    def begin(self, call: int) -> None:
        """Take part in a call, until `leave`."""
        self._last = call
        self._open.add(call)

    def arrive(self, call: int) -> None:
        """Say that this rank has done its part of a call: sent its message or, on the first rank, received all."""
        self.wire.say(Word.ARRIVED, call)

    def end_body(self) -> None:
        """Say that this rank's body of its innermost call has ended well."""
        self._num_ended += 1
        if self.rank != self.first:
            self.wire.say(Word.ENDED, self._num_ended)
            self.wire.nudge((self.first,))

    def release(self) -> None:
        """Say, as the first rank, that all bodies have ended well, and that all may leave."""
        self.wire.say(Word.ENDED, self._num_ended)
        self.wire.nudge(self.others)

    def leave(self, call: int) -> None:
        """Say that nobody needs this rank any more for a call, and for those before it that it has left too."""
        self._open.discard(call)
        self.wire.say(Word.LEFT, min(self._open, default=self._last + 1) - 1)

    def absent(self, call: int) -> tuple[int, ...]:
        """Return the other ranks that have not come to a call yet; the first, which follows them, only by itself."""
        absent = [r for r in self.others if self.wire.heard(r, Word.ARRIVED) < call]
        return tuple(r for r in absent if r != self.first or len(absent) == 1)

    # ---- failures

    def fail(self, record: FailureRecord) -> None:
        """Let all others know that this rank failed."""
        self.wire.fail(record)

    def look(self, call: int) -> None:
        """Raise as `check` does, after a look at who has ended meanwhile."""
        self.wire.pump(0)
        self.check(call)

    def check(self, call: int) -> None:
        """Raise if any other rank has failed, or died, before it left the call.

        Raises:
            RankFailedError: names the first, in rank order; all are in its `failures`.
        """
        # Those that only follow another repeat its record. Who has left this call may have failed in a later one.
        said = self.wire.failures()
        records = {record.rank: record for rank, record in said.items() if not self._has_left(rank, call)}
        if not records and self.wire.ended:
            ended = (r for r in self.wire.ended if not self._has_left(r, call))
            records = {r: self._death(r) for r in sorted(ended, key=self.ranks.index)}
        if records:
            raise self._error(list(records.values()))

    def failed_before(self) -> bool:
        """Say whether a rank failed in a call that this one had left, and the first had not: it raises there."""
        first_open = min(self._open, default=self._last + 1)
        with suppress(RankFailedError):  # what the others say through may be gone
            numbers = (record.number for record in self.wire.failures().values() if 0 < record.number < first_open)
            return self.rank != self.first and any(not self._has_left(self.first, number) for number in numbers)
        return False

    def _has_left(self, rank: int, call: int) -> bool:
        return self.wire.heard(rank, Word.LEFT) >= call

    # ---- messages

    def send(self, rank: int, message: Message, call: int) -> None:
        """Send a message to a rank; where it has too much to read already, as long as it lives wait for it.

        Raises:
            RankFailedError: that rank is gone, or any rank failed meanwhile.
        """
        unsent = [message]

        def is_sent() -> bool:
            with suppress(BlockingIOError):
                self.wire.send(rank, unsent[0])
                unsent.clear()
            return not unsent

        try:
            self._wait(lambda: not unsent or is_sent(), [rank], call, None, first_tick_seconds=_FIRST_TICK_SECONDS)
        except ConnectionError:
            self.check(call)
            raise self._error([self._death(rank)]) from None

    def receive(self, sources: Iterable[int], call: int, deadline: Deadline) -> tuple[int, Message]:
        """Return the next message of any of these ranks, and whose it is.

        The deadline counts until all ranks have come to the call; from then on their lives are what is waited on:
        the first rank's body may take any time.

        Raises:
            RankFailedError: a rank failed or died.
            RankTimeoutError: the deadline passed; `waiting_for` has the ranks that did not come.
        """
        inboxes = [(source, self.wire.inboxes[source]) for source in sources]
        for is_last_try in (False, True):
            for source, inbox in inboxes:
                if inbox:
                    return source, inbox.popleft()
            if not is_last_try:
                self._wait(
                    lambda: any(inbox for _, inbox in inboxes),
                    [s for s, _ in inboxes],
                    call,
                    deadline,
                    sleep=Sleep.UNTIL_ALL if self.rank == self.first else Sleep.LIGHT,
                )
        raise AssertionError(inboxes)

    def await_bodies(self, call: int, deadline: Deadline) -> None:
        """Wait until all bodies have ended: the first rank for all others, which wait for the first to `release` them.

        For the first rank the deadline counts until they have; for others as in `receive`.

        Raises:
            RankFailedError: a rank failed or died.
            RankTimeoutError: the deadline passed; `waiting_for` has the ranks that are waited for.
        """
        if self.rank == self.first:
            have_ended = lambda: not self._in_bodies()  # noqa: E731
            self._wait(have_ended, self.others, call, deadline, self._in_bodies, sleep=Sleep.UNTIL_ALL)
        else:
            is_released = lambda: self.wire.heard(self.first, Word.ENDED) >= self._num_ended  # noqa: E731
            self._wait(is_released, (self.first,), call, deadline)

    def _in_bodies(self) -> tuple[int, ...]:
        """Return which of the other ranks have ended fewer bodies than this one."""
        return tuple([r for r in self.others if self.wire.heard(r, Word.ENDED) < self._num_ended])

    def await_arrival(self, rank: int, call: int, deadline: Deadline) -> None:
        """Wait until a rank has done its part of a call; errors as `receive`."""
        # Nobody nudges for that: most ranks do not wait for it.
        has_arrived = lambda: self.wire.heard(rank, Word.ARRIVED) >= call  # noqa: E731
        self._wait(has_arrived, [rank], call, deadline, first_tick_seconds=_FIRST_TICK_SECONDS)

    def await_sight(self, is_over: Callable[[], bool], call: int, patience: Deadline) -> bool:
        """Wait until what a rank has told of becomes visible here, and say whether it did; looks ever less often.

        Raises:
            RankFailedError: a rank failed or died, which may be why it does not.
        """
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

    def _wait(
        self,
        is_over: Callable[[], bool],
        sources: Sequence[int],
        call: int,
        deadline: Deadline | None,
        late: Callable[[], tuple[int, ...]] | None = None,
        first_tick_seconds: float = _TICK_SECONDS,
        sleep: Sleep = Sleep.LIGHT,
    ) -> None:
        """Wait; the deadline counts as long as ranks are `late`: as a rule, have not come to the call."""
        if self._is_soon(is_over):
            return
        next_tick = first_tick_seconds
        while True:
            # Who says a word from now on knows that a nudge is needed; what was said before is looked for once more.
            self.wire.say(Word.SLEEPS, sleep)
            try:
                self.wire.look()  # what has come otherwise ends the sleep at once
                if is_over():
                    return
                self._check_all(sources, call)
                # Messages and nudges end the sleep; what comes without one is looked for ever less often.
                tick, next_tick = next_tick, min(_TICK_SECONDS, 2 * next_tick)
                if deadline is not None and deadline.remaining_seconds < tick:
                    tick = self._last_tick(tick, call, deadline, late)
                self.wire.pump(tick)
            except RankFailedError:
                # What it is waited for may have come before the failure, which was of a later call.
                self.wire.pump(0)
                if is_over():
                    return
                raise
            finally:
                self.wire.say(Word.SLEEPS, Sleep.NOT)
            if is_over():
                return

    def _last_tick(
        self, tick: float, call: int, deadline: Deadline, late: Callable[[], tuple[int, ...]] | None
    ) -> float:
        """Return how long a wait may sleep that the deadline is near for, if it counts for anyone.

        Raises:
            RankTimeoutError: it has passed, and it does.
        """
        if deadline.has_passed:
            self.look(call)  # who has ended is not late
        waiting_for = late() if late else self.absent(call)
        if waiting_for and deadline.has_passed:
            raise self._timeout(waiting_for, deadline, "end the body of" if late else "come to")
        return deadline.remaining_seconds if waiting_for else tick

    def _check_all(self, sources: Sequence[int], call: int) -> None:
        """Raise if any rank has failed, or one that is waited for will send no more, or a gather around failed."""
        self.check_around()
        self.check(call)
        # Who has left the call needs to say no more: it may have gone on to another one that failed, or have ended.
        if silent := [r for r in sources if r in self.wire.silent and not self._has_left(r, call)]:
            raise self._error([self._death(r) for r in silent])

    def _is_soon(self, is_over: Callable[[], bool]) -> bool:
        """Look for a moment without sleeping, and say whether the wait is over."""
        self.wire.look()
        if is_over() or not self._spin_seconds:
            return is_over()
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

    def _death(self, rank: int) -> FailureRecord:
        peer = self.peers[rank]
        return FailureRecord(rank, peer.host, peer.pid, "its process ended without a word", "a gather")

    def _error(self, records: Sequence[FailureRecord]) -> RankFailedError:
        errors = tuple(record.to_error() for record in records)
        errors[0].failures = errors
        return errors[0]

    def _timeout(self, absent: tuple[int, ...], deadline: Deadline, what: str) -> RankTimeoutError:
        names = ", ".join(f"rank {r} (host {self.peers[r].host}, pid {self.peers[r].pid})" for r in absent)
        return RankTimeoutError(
            f"{names} did not {what} the gather within {deadline.timeout_seconds:g} s",
            rank=absent[0],
            waiting_for=absent,
            got=f"ranks {[r for r in self.ranks if r not in absent]} did",
            want=f"all of ranks {list(self.ranks)}",
            next_step="find out where those ranks are (py-spy dump --pid PID); raise timeout_seconds if they are slow",
        )

    def close(self) -> None:
        """Let go of everything; ranks that still wait hear of it."""
        self.wire.close()
