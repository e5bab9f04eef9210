"""Sessions: the gathers of one list of ranks over one group's store.

The first gather makes a meeting, and so does the next after a failure, since the other ranks' state is unknown then.
Every rank counts meetings alike, also those that a failed call would have made: they agree on a name that was never
used. A failure fails one call of each rank. A rank that finds it again, in another circle or at the next meeting, goes
on to the meeting after that, where the others go.

A session chooses the medium of tensors together with the rendezvous: a directory or a store if the caller gave one;
else memory, or sockets where ranks find that they share none. A further one needs a key in `Session.exchanges`, a word
for `Meeting.way`, and an argument of `get_tensors_parallel`, `get_configs_parallel` and the shared team.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from xrank.errors import RankFailedError, XrankError
from xrank.gather.exchange import Call, GatherExchange
from xrank.ranks.circle import Circle
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.ranks.long_wait import Awaits, LongWait, Wait, name_of_ranks
from xrank.ranks.meeting import CALL, Meeting
from xrank.ranks.membership import Membership
from xrank.ranks.rendezvous import RanksApartError, meet
from xrank.ranks.store import Store
from xrank.ranks.store_rendezvous import meet_across_hosts
from xrank.stores.url import is_url
from xrank.workspace.base import MessageWorkspace
from xrank.workspace.directory_messages import DirectoryMessages
from xrank.workspace.memory_messages import MemoryMessages
from xrank.workspace.socket_messages import SocketMessages


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts that all sessions of a group share."""

    rank: int
    store: Store
    group: str
    """The group's name."""
    membership: Membership
    check_around: Callable[[bool], None]
    """Raises if a gather around the present one failed; called with whether the present one has begun."""
    owes: Callable[[Wait], bool]
    """Returns whether this rank still owes another rank's wait its event."""
    find_addresses: Callable[[], Sequence[str]]
    """Returns the addresses at which ranks of other hosts reach this one."""


class Session:
    """The gathers of one list of ranks."""

    def __init__(self, ranks: tuple[int, ...], around: Surroundings) -> None:
        self.ranks, self._around = ranks, around
        self._name = name_of_ranks(ranks)
        self.exchanges: dict[str | None, GatherExchange] = {}
        """Exchanges by directory or URL; None is memory or sockets."""
        self.pending: FailureRecord | None = None
        """A failure of another thread, which fails the next call."""
        self._num_meetings = 0
        self._is_meeting = False
        """Whether the present call is in a meeting, or has failed there and is not reported yet."""
        self._waits_in: str | None = None
        """The medium of the meeting in which this rank waits for the others."""
        self._turn = threading.RLock()
        """Held while a call goes from one state to the next: none, in a meeting, met. A failure of another thread then
        fails that state, on all ranks; if it failed two, the ranks would count their calls differently."""

    def exchange(self, path: str | None, deadline: Deadline, describe: Callable[[], str]) -> GatherExchange:
        """Return the exchange through a directory, memory or sockets; the first call for it makes a meeting.

        Args:
            path: the directory; None for memory or sockets.
            deadline: of the call.
            describe: returns the call, for people.
        """
        if self.pending is not None:
            raise self.pending.to_error()
        while True:
            try:
                if (exchange := self.exchanges.get(path)) is None:
                    exchange = self._meet(path, deadline, describe())
                else:
                    exchange.circle.check(exchange.num_calls + 1)
            except RankFailedError as error:
                self._around.check_around(False)  # a gather around this one that failed fails it, too
                if exchange is None:
                    if not self.is_settled(error):
                        raise
                elif exchange.is_open or not self.is_settled(error):
                    return exchange  # the call fails as soon as it has begun
                else:
                    self.close(path, exchange)
                continue
            return exchange

    def is_settled(self, error: BaseException) -> bool:
        """Return whether a failure is that of another call than the present one, which has to be made anew."""
        if not isinstance(error, RankFailedError):
            return False
        return self._around.membership.is_settled(error, self.ranks, self._name)

    def _meet(self, path: str | None, deadline: Deadline, text: str) -> GatherExchange:
        way = _way_of(path)
        with self._turn:
            self._is_meeting = False
            self._around.check_around(False)
            meeting = self._next_meeting(way, deadline, text)
            number = self._num_meetings
            self._waits_in = way
            self._is_meeting = True
        try:
            circle = _meet_through(path, meeting)
            with self._turn:
                self._is_meeting = False
                messages = _make_messages(path, circle, self._around.find_addresses)
                exchange = self.exchanges[path] = GatherExchange(circle, messages, number)
                if self.pending is not None:  # it came after the last look
                    exchange.fail_next(self.pending)
                    self.pending = None
        except RankFailedError:
            # Ranks may have waited for each other, and another of them may have noticed it first.
            meeting.raise_if_confirmed()
            raise
        finally:
            self._waits_in = None
            meeting.leave()
        circle.check_around = partial(self._around.check_around, True)
        circle.begin_long_wait = lambda call, awaits: self._begin_wait(
            number, call, way, exchange.describe(call), awaits
        )
        return exchange

    def _next_meeting(self, way: str, deadline: Deadline, text: str = "") -> Meeting:
        around = self._around
        self._num_meetings += 1
        number = self._num_meetings
        return Meeting(
            self.ranks,
            around.rank,
            around.store,
            f"meeting/{self._name}/{number}",
            deadline,
            way,
            partial(around.check_around, False),
            lambda awaits: self._begin_wait(number, 0, way, text, awaits),
            threading.current_thread().name,
            around.membership.num_at_large,
            lambda ranks: around.membership.find_at_large(ranks, self._name),
        )

    def _begin_wait(self, meeting: int, number: int, way: str, text: str, awaits: Awaits) -> LongWait:
        around = self._around
        thread = threading.current_thread().name
        description = Wait("", around.rank, self.ranks, meeting, number, way, text, awaits, (), around.group, thread)
        return LongWait(description, around.membership.store, around.membership, around.owes)

    def owes(self, wait: Wait, open_calls: list[tuple[GatherExchange, Call]]) -> bool:
        """Return whether this rank still owes a rank's wait for it in a call of these ranks.

        Args:
            wait: the other rank's wait.
            open_calls: the gathers that this rank is in, the innermost last.
        """
        if wait.number == 0:  # in a meeting
            if self._num_meetings == wait.meeting and self._waits_in is not None:
                return wait.awaits == Awaits.FIRST or self._waits_in != wait.way
            return self._num_meetings < wait.meeting
        exchange = next((one for one in self.exchanges.values() if one.meeting == wait.meeting), None)
        if exchange is None:  # closed after a failure, of which the other rank learns
            return False
        if exchange.num_calls < wait.number:
            return True
        is_open = any(one is exchange and call.number == wait.number for one, call in open_calls)
        if wait.awaits == Awaits.BODY_END:
            is_innermost = open_calls[-1:] and open_calls[-1][0] is exchange and open_calls[-1][1].number == wait.number
            return is_open and not (is_innermost and exchange.is_leaving)
        return is_open and wait.awaits == Awaits.FIRST

    # ---- failures

    def fail(self, error: BaseException, call: str) -> None:
        """Fail the present call, which has not begun, whichever way the others are in it: a meeting, or an exchange.

        Args:
            error: the reason.
            call: the call, for people.
        """
        with self._turn:
            self.pending = None
            self.fail_next(FailureRecord.from_error(error, self._around.rank, call))
            if not self._is_meeting:  # else the others are in that meeting, which has failed
                self.refuse(error)
            self._is_meeting = False

    def refuse(self, error: BaseException, *, is_counted: bool = True) -> None:
        """Fail the next meeting: the other ranks are there, or will come there.

        The others have left meetings that ended with a failure which has failed a call of this rank elsewhere.
        """
        num_counted = 1
        meeting = self._next_meeting("", Deadline(1.0))
        with suppress(XrankError):  # the store may be gone
            while (end := meeting.find_end()) is not None and self.is_settled(end.to_error()):
                meeting = self._next_meeting("", Deadline(1.0))
                num_counted += 1
            meeting.refuse(error)
        if not is_counted:
            self._num_meetings -= num_counted  # not set: the thread that uses the session may count meanwhile

    def skip_meeting(self, number: int) -> None:
        """Count a meeting in which this rank does not take part, and which ends with a failure that it knows."""
        self._num_meetings = max(self._num_meetings, number)

    def fail_next(self, record: FailureRecord) -> None:
        """Fail the next call of every exchange, and close those that this rank is not in."""
        for path, exchange in list(self.exchanges.items()):
            exchange.fail_next(record)
            if not exchange.is_open:
                self.close(path, exchange)

    def fail_from_thread(self, record: FailureRecord) -> None:
        """Fail the present or next call from another thread than the one that uses the session."""
        with self._turn:
            for exchange in self.exchanges.values():
                exchange.fail_next(record)
            if not self.exchanges:
                self.pending = record
                if not self._is_meeting:  # else the call ends its meeting
                    self.refuse(record.to_error(), is_counted=False)

    def close(self, path: str | None, exchange: GatherExchange) -> None:
        """Close an exchange and forget it: the next gather makes a meeting."""
        exchange.close()
        # After a failure inside the body, a gather there may have made a new exchange.
        if self.exchanges.get(path) is exchange:
            del self.exchanges[path]


def _way_of(path: str | None) -> str:
    if path is None:
        return "memory or sockets"
    return "a store" if is_url(path) else "a directory"


def _meet_through(path: str | None, meeting: Meeting) -> Circle:
    if path is not None:
        return meet_across_hosts(meeting)
    try:
        return meet(meeting)
    except RanksApartError:
        return meet_across_hosts(meeting)


def _make_messages(path: str | None, circle: Circle, find_addresses: Callable[[], Sequence[str]]) -> MessageWorkspace:
    if path is not None:
        return _open_messages(path, circle)
    if circle.wire.shares_memory:
        return MemoryMessages()
    across_hosts = not circle.is_one_network
    return SocketMessages(circle.look_now, secret=circle.secret, across_hosts=across_hosts, addresses=find_addresses)


def _open_messages(path: str, circle: Circle) -> MessageWorkspace:
    try:
        if is_url(path):
            from xrank.workspace.object_messages import ObjectMessages  # directories do not need this module

            return ObjectMessages(path, circle.rank)
        return DirectoryMessages(path, circle.rank)
    except BaseException as error:
        # The others have met this rank, and wait in their first gather.
        circle.fail(FailureRecord.from_error(error, circle.rank, CALL))
        circle.close()
        raise
