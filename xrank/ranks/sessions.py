"""The gathers of each process group: by list of ranks, the thread that uses the group, and failures at large."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

from xrank import environment
from xrank.errors import ContradictionError, RankFailedError, UsageError, XrankError
from xrank.ranks.byte_service import used_addresses
from xrank.ranks.directory_messages import DirectoryMessages
from xrank.ranks.exchange import Call, GatherExchange
from xrank.ranks.failure import Deadline, FailureRecord, failure_of
from xrank.ranks.group import RankGroup
from xrank.ranks.meeting import CALL, Meeting, RanksApartError, meet, meet_across_hosts
from xrank.ranks.memory_messages import MemoryMessages
from xrank.ranks.registration import has_joined
from xrank.ranks.socket_messages import SocketMessages
from xrank.ranks.store import LaunchedRanks, Store, find_store
from xrank.ranks.waits import START_SECONDS, Awaits, LongWait, Membership, Wait, name_of_ranks, parties_of
from xrank.ranks.wire import MessageWorkspace
from xrank.system import after_fork_in_child


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
        """Exchanges by directory; None is memory or sockets."""
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
        """Return the exchange through a directory, or memory or sockets if None; the first call makes a meeting."""
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
        way = "memory or sockets" if path is None else "a directory"
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
        """Return whether this rank still owes another rank's wait its event; `open_calls` has the innermost last."""
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
        """Fail the present call, which has not begun, whichever way the others are in it: a meeting, or an exchange."""
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


def _meet_through(path: str | None, meeting: Meeting) -> RankGroup:
    if path is not None:
        return meet_across_hosts(meeting)
    try:
        return meet(meeting)
    except RanksApartError:
        return meet_across_hosts(meeting)


def _make_messages(
    path: str | None, circle: RankGroup, find_addresses: Callable[[], Sequence[str]]
) -> MessageWorkspace:
    if path is not None:
        return _open_messages(path, circle)
    if circle.wire.shares_memory:
        return MemoryMessages()
    across_hosts = not circle.is_one_network
    return SocketMessages(circle.look_now, secret=circle.secret, across_hosts=across_hosts, addresses=find_addresses)


def _open_messages(path: str, circle: RankGroup) -> MessageWorkspace:
    try:
        return DirectoryMessages(path, circle.rank)
    except BaseException as error:
        # The others have met this rank, and wait in their first gather.
        circle.fail(FailureRecord.from_error(error, circle.rank, CALL))
        circle.close()
        raise


class _OpenGathers(threading.local):
    """The gathers whose bodies this thread is in, the outermost first."""

    def __init__(self) -> None:
        self.gathers: list[tuple[GatherExchange, Call]] = []


_open = _OpenGathers()


def open_gathers() -> list[tuple[GatherExchange, Call]]:
    """Return the gathers whose bodies this thread is in, the outermost first; callers may change the list."""
    return _open.gathers


def failure_check() -> Callable[[], None]:
    """Return a check of the gathers around this thread, for other threads to call, one at a time, while it waits.

    It raises RankFailedError if one of them has failed: a value that is awaited inside may then never come.
    """
    gathers = tuple(_open.gathers)

    def check() -> None:
        for exchange, call in gathers:
            exchange.look(call)

    return check


class World:
    """All ranks, of which a group's are a part; `owner` is torch's group of all ranks, `LaunchedRanks`, or None."""

    def __init__(self, owner: Any, rank: int, size: int) -> None:
        self.owner, self.rank, self.size = owner, rank, size

    def find_membership(self) -> Membership:
        """Return the ranks' processes; the first call publishes this one's."""
        owner = _NO_GROUP if self.owner is None else self.owner
        with _making.lock:
            return self._find_membership(owner)

    def _find_membership(self, owner: Any) -> Membership:
        known = _memberships.get(owner)
        if known is None or known[0] != os.getpid():
            environ, is_one_host = environment.environ(), False
            with suppress(UsageError):  # contradicting variables
                launch = environment.read_launch(environ)
                # Only torchrun proves that all ranks are on one host.
                is_one_host = (
                    launch is not None
                    and launch.launcher == "torchrun"
                    and launch.local_world_size == launch.world_size == self.size
                )
            membership = Membership(find_store(self.owner, environ), self.rank, beats=not is_one_host)
            _memberships[owner] = known = (os.getpid(), membership)
            _close_with(owner, membership.close)
        return known[1]


class GroupGathers:
    """The gathers of one process group; one thread at a time uses it."""

    def __init__(self, world: World, group: Any) -> None:
        self.pid = os.getpid()
        self.membership = world.find_membership()
        self.name = _name_of(world, group)
        self._rank = world.rank
        self._store = find_store(group, environment.environ())
        self._sessions: dict[tuple[int, ...], Session] = {}
        self._thread = threading.current_thread()

    def session(self, ranks: tuple[int, ...]) -> Session:
        """Return the session of a list of ranks."""
        if (session := self._sessions.get(ranks)) is None:
            around = Surroundings(
                self._rank,
                self._store,
                self.name,
                self.membership,
                lambda is_begun: self._check_around(self._sessions[ranks], is_begun),
                lambda wait: _owes(self.membership, wait),
                lambda: used_addresses(self._store.host, environment.environ()),
            )
            session = self._sessions[ranks] = Session(ranks, around)
        return session

    @property
    def is_of_this_thread(self) -> bool:
        """Whether this thread uses the group."""
        return threading.current_thread() is self._thread

    def claim(self, ranks: tuple[int, ...], describe: Callable[[], str]) -> None:
        """Raise UsageError if another thread gathers in the group, and still runs.

        Its present or next gather fails as well, on all ranks: on another rank, this thread's gather may be the one
        that came first.
        """
        if self.is_of_this_thread:
            return
        if not self._thread.is_alive():
            self._thread = threading.current_thread()
            return
        call = describe()
        error = UsageError(
            f"two threads gather in one process group: {self._thread.name!r} and {threading.current_thread().name!r}",
            rank=self._rank,
            got=call,
            next_step="make a group for each thread with torch.distributed.new_group, and give it as group=",
        )
        record = FailureRecord.from_error(error, self._rank, call)
        self.session(ranks)
        for session in list(self._sessions.values()):
            if session.exchanges or session.ranks == ranks:
                session.fail_from_thread(record)
        raise error

    def _check_around(self, session: Session, is_begun: bool) -> None:
        """Raise if a gather around the present one has failed, or another thread used the group.

        `is_begun`: whether the present gather, of `session`, is in the list: its own waits check it.
        """
        if not is_begun and session.pending is not None:
            raise session.pending.to_error()
        for exchange, call in _open.gathers[:-1] if is_begun else _open.gathers:
            exchange.look(call)

    def owes(self, wait: Wait) -> bool:
        """Return whether this thread still owes another rank's wait in this group its event."""
        if self._thread.is_alive() and not self.is_of_this_thread:
            return False
        session = self._sessions.get(wait.ranks)
        return session is None or session.owes(wait, _open.gathers)

    def note(self, error: BaseException, ranks: tuple[int, ...], call: str) -> None:
        """Note that an error has failed a call of these ranks; in other circles it then fails none."""
        _note(self.membership, error, name_of_ranks(ranks), call)

    def fail_party(self, wait: Wait, error: BaseException, call: str) -> None:
        """Fail a call of this group whose ranks waited for those of the present one, in which this rank is not."""
        if self._rank in wait.ranks and self.is_of_this_thread:
            session = self.session(wait.ranks)
            # Now, not when the other ranks have closed it: a call might begin there meanwhile.
            session.fail_next(FailureRecord.from_error(error, self._rank, call))
            if wait.number == 0:
                session.skip_meeting(wait.meeting)

    def fail_at_large(self, record: FailureRecord) -> None:
        """Fail the next call of every list of ranks that has met: one of them is the call that failed."""
        for session in self._sessions.values():
            session.fail_next(record)

    def close(self) -> None:
        """Leave all circles. A second call does nothing."""
        for session in self._sessions.values():
            for exchange in session.exchanges.values():
                exchange.close()
        self._sessions.clear()


_groups: WeakKeyDictionary[Any, GroupGathers] = WeakKeyDictionary()
"""Gathers by process group: they end when the group is destroyed."""
_memberships: WeakKeyDictionary[Any, tuple[int, Membership]] = WeakKeyDictionary()


class WorkWatch:
    """Looks for reasons why other ranks do not come to a piece of work, in place of a gather's meeting."""

    def __init__(self, group: Any, call: str) -> None:
        self._world, self._group, self._call = find_world(group), group, call
        self._begins_at = monotonic() + START_SECONDS
        self._check = failure_check()
        self._name: str | None = None
        self._wait: LongWait | None = None

    def look(self, ranks: Sequence[int], name: str, absent: Sequence[int]) -> None:
        """Raise if the work will not begin; this does nothing if the last look was a moment ago.

        Args:
            ranks: all ranks, the first rank first.
            name: of the work; empty while the first rank has not announced it.
            absent: ranks that have not come.

        Raises:
            RankFailedError: one of them has ended, or a gather around this call has failed.
            ContradictionError: this rank and others wait for each other in different calls.
        """
        self._check()
        if monotonic() < self._begins_at:
            return
        if self._wait is None or name != self._name:
            self.end()
            rank, group, thread = self._world.rank, _name_of(self._world, self._group), threading.current_thread().name
            awaits = Awaits.ARRIVAL if name else Awaits.FIRST
            wait = Wait("", rank, tuple(ranks), 0, 0, name, self._call, awaits, (), group, thread)
            membership = self._world.find_membership()

            def owes(other: Wait) -> bool:
                is_same = other.is_of_work and other.group == group
                return not is_same and _owes(membership, other)

            self._name, self._wait = name, LongWait(wait, membership.store, membership, owes)
        self._wait.look(absent, absent)

    def end(self, error: BaseException | None = None) -> None:
        """End the wait, with the error that has failed the call; it then fails no further one."""
        if error is not None and isinstance(error, RankFailedError | ContradictionError):
            _note(self._world.find_membership(), error, "work", self._call)
        if self._wait is not None:
            self._wait.end()

    def is_settled(self, error: RankFailedError) -> bool:
        """Return whether a failure has failed an earlier call of this rank; raise if an outer gather has failed."""
        self._check()
        return failure_of(error)[0] in self._world.find_membership().known_failures

    def raise_if_confirmed(self) -> None:
        """Raise if this rank and others were found to wait for each other; errors as in `look`."""
        if self._wait is not None:
            self._wait.raise_if_confirmed()


def _name_of(world: World, group: Any) -> str:
    """Return the name of a group, which is the same on all of its ranks."""
    return str(getattr(world.owner if group is None else group, "group_name", ""))


def _owes(membership: Membership, wait: Wait) -> bool:
    """Return whether this thread still owes another rank's wait its event.

    Calls of threads of one name belong together where nothing else shows it (docs/live-gathers.md, Threads).
    """
    is_of_this_thread = wait.thread == threading.current_thread().name
    if wait.is_of_work:
        return is_of_this_thread and not has_joined(wait.way)
    gathers = _find_named(membership, wait.group)
    return is_of_this_thread if gathers is None else gathers.owes(wait)


def _find_named(membership: Membership, name: str) -> GroupGathers | None:
    return next((one for one in list(_groups.values()) if one.membership is membership and one.name == name), None)


def _note(membership: Membership, error: BaseException, claim: str, call: str) -> None:
    """Note that an error has failed a call of this rank."""
    membership.note(error, claim)
    for wait in parties_of(error):
        if not wait.is_of_work and (gathers := _find_named(membership, wait.group)) is not None:
            gathers.fail_party(wait, error, call)


class _Making:
    """Held while a thread makes the first gathers of a group."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.lock = threading.RLock()


_making = _Making()
after_fork_in_child(_making.renew)  # another thread of the parent may have held it


class _NoGroup:
    """Stands for the world if torch.distributed is not initialised."""


_NO_GROUP = _NoGroup()
_last_place: list[Any] = [lambda: None, 0, 1]
"""Process group of all ranks that was used last, weakly; and this process's rank and their number, which stay."""


def find_world(group: Any) -> World:
    """Return the world of a group."""
    if isinstance(group, LaunchedRanks) and group.place is not None:
        return World(group, *group.place)  # torch's groups may end before its work does
    distributed = sys.modules.get("torch.distributed")
    owner = getattr(getattr(distributed, "group", None), "WORLD", None)
    if owner is not None:
        if _last_place[0]() is not owner:  # torch's methods take longer than this look
            _last_place[:] = ref(owner), owner.rank(), owner.size()
        return World(owner, *_last_place[1:])
    launch = environment.read_launch(environment.environ())
    owner = group if isinstance(group, LaunchedRanks) else None
    return World(owner, 0, 1) if launch is None else World(owner, launch.rank, launch.world_size)


def find_group(world: World, group: Any) -> GroupGathers:
    """Return the gathers of a process group; of the world if None."""
    owner = world.owner if group is None else group
    owner = _NO_GROUP if owner is None else owner
    found = _groups.get(owner)
    if found is None or found.pid != os.getpid():
        with _making.lock:  # two threads may begin together, and one of them is refused
            found = _groups.get(owner)
            if found is None or found.pid != os.getpid():
                # After a fork the links belong to the parent.
                found = _groups[owner] = GroupGathers(world, group)
                _close_with(owner, found.close)
    return found


def _close_with(owner: Any, close: Callable[[], None]) -> None:
    """Release resources as soon as a process group is gone, not when Python next collects garbage."""
    finalize(owner, close).atexit = False


def report_at_large(group: Any, error: BaseException, call: str) -> None:
    """Publish the failure of a call whose ranks are not known, as they were the error, or its group was."""
    world = find_world(group)
    if world.size == 1:
        return
    record = world.find_membership().report_at_large(error, call)
    owner = world.owner if group is None else group
    found: list[GroupGathers | None] = []
    with suppress(TypeError):  # a group that cannot be referenced weakly
        found = [_groups.get(_NO_GROUP if owner is None else owner)]
    # The ranks of a wrong group may wait in any other that this thread uses.
    for gathers in found if any(found) else list(_groups.values()):
        if gathers is not None and gathers.is_of_this_thread:
            gathers.fail_at_large(record)


def forget(group: Any) -> None:
    """Leave the circles of a group that will not be used again."""
    if (found := _groups.pop(group, None)) is not None:
        found.close()
