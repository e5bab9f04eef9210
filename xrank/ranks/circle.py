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
from xrank.ranks.wire import Message, Wire, Word

__all__ = ["Circle"]

_TICK_SECONDS = 0.1
"""How long a wait sleeps before it looks whether anyone has failed: so soon is a failure known to all."""
_FIRST_TICK_SECONDS = 200e-6
"""The first sleep, where no message may announce what is waited for; each further one is twice as long."""


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
            self.wire.nudge(self.first)

    def release(self) -> None:
        """Say, as the first rank, that all bodies have ended well, and that all may leave."""
        self.wire.say(Word.ENDED, self._num_ended)
        for rank in self.others:
            self.wire.nudge(rank)

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
        """Raise if any other rank has failed, or died before it left the call.

        Raises:
            RankFailedError: names the first, in rank order; all are in its `failures`.
        """
        # Those that only follow another repeat its record.
        records = {record.rank: record for record in self.wire.failures()}
        if not records:
            ended = (r for r in self.wire.ended if self.wire.heard(r, Word.LEFT) < call)
            records = {r: self._death(r) for r in sorted(ended, key=self.ranks.index)}
        if records:
            raise self._error(list(records.values()))

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
        self._wait(lambda: any(inbox for _, inbox in inboxes), [s for s, _ in inboxes], call, deadline)
        return next((source, inbox.popleft()) for source, inbox in inboxes if inbox)

    def await_bodies(self, call: int, deadline: Deadline) -> None:
        """Wait until all bodies have ended: the first rank for all others, which wait for the first to `release` them.

        For the first rank the deadline counts until they have; for others as in `receive`.

        Raises:
            RankFailedError: a rank failed or died.
            RankTimeoutError: the deadline passed; `waiting_for` has the ranks that are waited for.
        """
        if self.rank == self.first:
            self._wait(lambda: not self._in_bodies(), self.others, call, deadline, self._in_bodies)
        else:
            self._wait(lambda: not self._in_bodies((self.first,)), (self.first,), call, deadline)

    def _in_bodies(self, ranks: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return which of these ranks, of all others as a rule, have ended fewer bodies than this one."""
        return tuple(r for r in ranks or self.others if self.wire.heard(r, Word.ENDED) < self._num_ended)

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
    ) -> None:
        """Wait; the deadline counts as long as ranks are `late`: as a rule, have not come to the call."""
        spin_end, next_tick = monotonic() + self._spin_seconds, first_tick_seconds
        while not is_over():
            self.wire.pump(0)
            if monotonic() < spin_end:
                os.sched_yield()  # the answer may need this very core
                continue
            try:
                self.check_around()
                self.check(call)
                if silent := [r for r in sources if r in self.wire.silent]:
                    raise self._error([self._death(r) for r in silent])
            except RankFailedError:
                # What it is waited for may have come before the failure, which was of a later call.
                self.wire.pump(0)
                if is_over():
                    return
                raise
            # Messages and nudges end the sleep; what comes without one is looked for ever less often.
            tick, next_tick = next_tick, min(_TICK_SECONDS, 2 * next_tick)
            if deadline is not None and (waiting_for := late() if late else self.absent(call)):
                if deadline.has_passed:
                    raise self._timeout(waiting_for, deadline, "end the body of" if late else "come to")
                tick = min(tick, deadline.remaining_seconds)
            self.wire.say(Word.SLEEPS, 1)
            # Who says a word from now on knows that a nudge is needed; what was said before is looked for once more.
            self.wire.pump(0)
            if is_over():
                tick = 0.0
            self.wire.pump(tick)
            self.wire.say(Word.SLEEPS, 0)

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
