"""The gathers of each process group: sessions by list of ranks, the thread that uses the group, and failures at large.

One thread uses a group: calls of two threads come in another order on each rank, and would mix their values.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

from xrank import environment
from xrank.errors import ContradictionError, RankFailedError, UsageError
from xrank.gather.exchange import Call, GatherExchange
from xrank.gather.sessions import Session, Surroundings
from xrank.ranks.appointment import has_joined
from xrank.ranks.failure import FailureRecord, failure_of
from xrank.ranks.group_connections import GroupConnections
from xrank.ranks.launched_siblings import LaunchedSiblings, launch_of
from xrank.ranks.long_wait import START_SECONDS, Awaits, LongWait, Wait, name_of_ranks, parties_of
from xrank.ranks.membership import Membership
from xrank.ranks.store import LaunchedRanks, find_store
from xrank.sockets.host_addresses import used_addresses
from xrank.system import after_fork_in_child


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

    The check raises RankFailedError if one of them has failed: a value that is awaited inside may then never come.
    """
    gathers = tuple(_open.gathers)

    def check() -> None:
        for exchange, call in gathers:
            exchange.look(call)

    return check


class World:
    """All ranks, of which a group's are a part.

    Args:
        owner: torch's process group of all ranks, `LaunchedRanks`, or None.
        rank: this rank.
        size: number of ranks.
    """

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
            environ = environment.environ()
            launch = launch_of(environ)
            siblings = LaunchedSiblings(self.rank, self.size, environ)
            signs = [siblings.find_end]
            if not isinstance(self.owner, LaunchedRanks | None):
                signs += [GroupConnections(self.owner, environ).find_closed]
            # Only torchrun proves that all ranks are on one host.
            is_one_host = (
                launch is not None
                and launch.launcher == "torchrun"
                and launch.local_world_size == launch.world_size == self.size
            )
            store = find_store(self.owner, environ)
            membership = Membership(store, self.rank, signs, beats=not is_one_host)
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
        """Check that this thread may gather in the group.

        Args:
            ranks: of the gather.
            describe: returns the call, for people.

        Raises:
            UsageError: another thread does, and still runs. Its present or next gather fails as well, on all ranks: on
                another rank, this thread's gather may be the one that came first.
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
            want="one thread for each process group",
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

        Args:
            session: that of the present gather.
            is_begun: whether the present gather is in the list: its own waits check it.
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
    """Looks for reasons why other ranks do not come to a piece of work, in place of a gather's meeting.

    Args:
        group: as of `find_store`.
        call: the call that begins the work, for people.
    """

    def __init__(self, group: Any, call: str) -> None:
        self._world, self._group, self._call = find_world(group), group, call
        self._begins_at = monotonic() + START_SECONDS
        self._check = failure_check()
        self._name: str | None = None
        self._wait: LongWait | None = None

    def look(self, ranks: Sequence[int], name: str, absent: Sequence[int]) -> None:
        """Look; this does nothing if the last look was a moment ago.

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
        """Return whether a failure has failed an earlier call of this rank.

        Raises:
            RankFailedError: a gather around this call has failed.
        """
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
    """Publish the failure of a call whose ranks are not known, as they were the error, or its group was.

    Raises:
        RankFailedError: the store of the world is gone.
    """
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
