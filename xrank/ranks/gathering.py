"""The gathers of each process group, and the context manager of one gather on one rank."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from operator import index
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, finalize, ref

from xrank import environment
from xrank.errors import ContradictionError, RankFailedError, UsageError, XrankError, require_linux
from xrank.ranks.byte_service import SocketMessages, used_addresses
from xrank.ranks.directory_messages import DirectoryMessages
from xrank.ranks.exchange import Call, GatherExchange, pack, unpack
from xrank.ranks.failure import Deadline, FailureRecord, failure_of
from xrank.ranks.group import RankGroup
from xrank.ranks.meeting import CALL, Meeting, RanksApartError, meet, meet_across_hosts
from xrank.ranks.memory import check_dense
from xrank.ranks.memory_messages import MemoryMessages
from xrank.ranks.store import LaunchedRanks, find_store, read_launch
from xrank.ranks.waits import Awaits, LongWait, Membership, Wait, WaitMonitor, name_of_ranks, parties_of
from xrank.ranks.wire import MessageWorkspace
from xrank.storage.url import clean_path, is_url
from xrank.system import after_fork_in_child
from xrank.words import repr_text


class Session:
    """The gathers of one list of ranks."""

    def __init__(self, ranks: tuple[int, ...], gathers: GroupGathers) -> None:
        self.ranks, self._gathers = ranks, gathers
        self._name = name_of_ranks(ranks)
        self.exchanges: dict[str | None, GatherExchange] = {}
        """Exchanges by directory; None is memory or sockets."""
        self.pending: FailureRecord | None = None
        """A failure of another thread, which fails the next call."""
        self.num_meetings = 0
        self._is_meeting = False
        """Whether the present call is in a meeting, or has failed there and is not reported yet."""
        self._waits_in: str | None = None
        """The medium of the meeting in which this rank waits for the others."""
        self._turn = threading.RLock()
        """Held while a call goes from one state to the next: no call, meeting, met. A failure of another thread then
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
                    exchange.group.check(exchange.num_calls + 1)
            except RankFailedError as error:
                self._gathers.check_around(self)  # a gather around this one that failed fails it, too
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
        return self._gathers.membership.is_settled(error, self.ranks, self._name)

    def _meet(self, path: str | None, deadline: Deadline, text: str) -> GatherExchange:
        way = "memory or sockets" if path is None else "a directory"
        with self._turn:
            self._is_meeting = False
            self._gathers.check_around(self)
            meeting = self._next_meeting(way, deadline, text)
            number = self.num_meetings
            self._waits_in = way
            self._is_meeting = True
        try:
            group = None
            if path is None:
                with suppress(RanksApartError):
                    group = meet(meeting)
            group = group or meet_across_hosts(meeting)
            with self._turn:
                self._is_meeting = False
                messages = self._make_messages(path, group)
                exchange = self.exchanges[path] = GatherExchange(group, messages, number)
                if self.pending is not None:  # it came after the last look
                    exchange.fail_next(self.pending)
                    self.pending = None
        except RankFailedError:
            # Ranks may have waited for each other, and another of them may have noticed it first.
            meeting.monitor.raise_if_confirmed()
            raise
        finally:
            self._waits_in = None
            meeting.monitor.end()
        group.check_around = self._gathers.check_around
        group.begin_long_wait = lambda call, awaits: self._begin_wait(
            number, call, way, exchange.describe(call), awaits
        )
        return exchange

    def _next_meeting(self, way: str, deadline: Deadline, text: str = "") -> Meeting:
        self.num_meetings += 1
        number, gathers = self.num_meetings, self._gathers
        return Meeting(
            self.ranks,
            gathers.rank,
            gathers.store,
            f"meeting/{self._name}/{number}",
            deadline,
            way,
            lambda: gathers.check_around(self),
            lambda awaits: self._begin_wait(number, 0, way, text, awaits),
            threading.current_thread().name,
            len(gathers.membership.at_large),
            lambda ranks: gathers.membership.find_at_large(ranks, self._name),
        )

    def _begin_wait(self, meeting: int, number: int, way: str, text: str, awaits: Awaits) -> LongWait:
        gathers, thread = self._gathers, threading.current_thread().name
        description = Wait("", gathers.rank, self.ranks, meeting, number, way, text, awaits, (), gathers.name, thread)
        return LongWait(description, gathers.membership, lambda wait: _owes(gathers.membership, wait))

    def _make_messages(self, path: str | None, group: RankGroup) -> MessageWorkspace:
        if path is None and group.wire.shares_memory:
            return MemoryMessages()
        if path is None:
            return SocketMessages(
                group.look_now,
                secret=group.secret,
                across_hosts=not group.is_one_network,
                addresses=lambda: used_addresses(self._gathers.store.host, environment.environ()),
            )
        try:
            return DirectoryMessages(path, group.rank)
        except BaseException as error:
            # The others have met this rank, and wait in their first gather.
            group.fail(FailureRecord.from_error(error, group.rank, CALL))
            group.close()
            raise

    def owes(self, wait: Wait, open_calls: list[tuple[GatherExchange, Call]]) -> bool:
        """Return whether this rank still owes another rank's wait its event; `open_calls` has the innermost last."""
        if wait.number == 0:  # in a meeting
            if self.num_meetings == wait.meeting and self._waits_in is not None:
                return wait.awaits == Awaits.FIRST or self._waits_in != wait.way
            return self.num_meetings < wait.meeting
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
            self.fail_next(FailureRecord.from_error(error, self._gathers.rank, call))
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
            self.num_meetings -= num_counted  # not set: the thread that uses the session may count meanwhile

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


class _OpenGathers(threading.local):
    """The gathers whose bodies this thread is in, the outermost first."""

    def __init__(self) -> None:
        self.gathers: list[tuple[GatherExchange, Call]] = []


_open = _OpenGathers()


def failure_check() -> Callable[[], None]:
    """Return a check of the gathers around this thread, for other threads to call, one at a time, while it waits.

    It raises RankFailedError if one of them has failed: a value that is awaited inside may then never come.
    """
    return partial(_look, tuple(_open.gathers))


def _look(gathers: Sequence[tuple[GatherExchange, Call]]) -> None:
    for exchange, call in gathers:
        exchange.look(call)


class World(NamedTuple):
    """All ranks, of which a group's are a part."""

    owner: Any
    """Torch's group of all ranks, `LaunchedRanks`, or None."""
    rank: int
    size: int

    def find_membership(self) -> Membership:
        """Return the ranks' processes; the first call publishes this one's."""
        owner = _NO_GROUP if self.owner is None else self.owner
        with _making.lock:
            known = _memberships.get(owner)
            if known is None or known.pid != os.getpid():
                environ, is_one_host = environment.environ(), False
                with suppress(UsageError):  # contradicting variables
                    launch = read_launch(environ)
                    is_one_host = launch is not None and launch.is_one_host and launch.world_size == self.size
                known = _memberships[owner] = Membership(
                    find_store(self.owner, environ), self.rank, beats=not is_one_host
                )
                _close_with(owner, known.close)
            return known


class GroupGathers:
    """The gathers of one process group; one thread at a time uses it."""

    def __init__(self, world: World, group: Any) -> None:
        self.pid = os.getpid()
        self.membership = world.find_membership()
        self.name = _name_of(world, group)
        self.rank = world.rank
        self.store = find_store(group, environment.environ())
        self.sessions: dict[tuple[int, ...], Session] = {}
        self._thread = threading.current_thread()

    def session(self, ranks: tuple[int, ...]) -> Session:
        """Return the session of a list of ranks."""
        if (session := self.sessions.get(ranks)) is None:
            session = self.sessions[ranks] = Session(ranks, self)
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
            rank=self.rank,
            got=call,
            next_step="make a group for each thread with torch.distributed.new_group, and give it as group=",
        )
        record = FailureRecord.from_error(error, self.rank, call)
        self.session(ranks)
        for session in list(self.sessions.values()):
            if session.exchanges or session.ranks == ranks:
                session.fail_from_thread(record)
        raise error

    def check_around(self, beginning: Session | None = None) -> None:
        """Raise if a gather around the present one has failed, or another thread used the group.

        The present one is in the list of gathers, whose own waits check it, unless its session gives itself.
        """
        if beginning is not None and beginning.pending is not None:
            raise beginning.pending.to_error()
        _look(_open.gathers[:-1] if beginning is None else _open.gathers)

    def owes(self, wait: Wait) -> bool:
        """Return whether this thread still owes another rank's wait in this group its event."""
        if self._thread.is_alive() and not self.is_of_this_thread:
            return False
        session = self.sessions.get(wait.ranks)
        return session is None or session.owes(wait, _open.gathers)

    def close(self) -> None:
        """Leave all groups. A second call does nothing."""
        for session in self.sessions.values():
            for exchange in session.exchanges.values():
                exchange.close()
        self.sessions.clear()


_groups: WeakKeyDictionary[Any, GroupGathers] = WeakKeyDictionary()
"""Gathers by process group: they end when the group is destroyed."""
_memberships: WeakKeyDictionary[Any, Membership] = WeakKeyDictionary()
joined_work: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Process group -> name of the last piece of work that this rank joined (`xrank.ranks.registration`)."""


class WorkWatch:
    """Looks for reasons why other ranks do not come to a piece of work, in place of a gather's meeting."""

    def __init__(self, group: Any, call: str) -> None:
        self._world, self._call = find_world(group), call
        self._group = _name_of(self._world, group)
        self._check = failure_check()
        self._work: tuple[tuple[int, ...], str] = (), ""
        self._monitor = WaitMonitor(self._begin)

    def look(self, ranks: Sequence[int], name: str, absent: Sequence[int]) -> None:
        """Raise if the work will not begin; its `name` is empty while the first rank has not announced it."""
        self._check()
        if self._monitor.is_due:
            if self._work[1] != name:
                self._monitor.end()
                self._monitor = WaitMonitor(self._begin)
            self._work = tuple(ranks), name
            self._monitor.look(Awaits.ARRIVAL if name else Awaits.FIRST, absent, absent)

    def _begin(self, awaits: Awaits) -> LongWait:
        ranks, name = self._work
        thread, membership = threading.current_thread().name, self._world.find_membership()
        wait = Wait("", self._world.rank, ranks, 0, 0, name, self._call, awaits, (), self._group, thread)

        def owes(other: Wait) -> bool:
            is_same = other.is_of_work and other.group == self._group
            return not is_same and _owes(membership, other)

        return LongWait(wait, membership, owes)

    def end(self, error: BaseException | None = None) -> None:
        """End the wait, with the error that has failed the call; it then fails no further one."""
        if error is not None and isinstance(error, RankFailedError | ContradictionError):
            _note(self._world.find_membership(), error, "work", self._call)
        self._monitor.end()

    def is_settled(self, error: RankFailedError) -> bool:
        """Return whether a failure has failed an earlier call of this rank; raise if an outer gather has failed."""
        self._check()
        return failure_of(error)[0] in self._world.find_membership().known_failures

    def raise_if_confirmed(self) -> None:
        """Raise if this rank and others were found to wait for each other."""
        self._monitor.raise_if_confirmed()


def _name_of(world: World, group: Any) -> str:
    """Return the name of a group, which is the same on all of its ranks."""
    return str(getattr(world.owner if group is None else group, "group_name", ""))


def _owes(membership: Membership, wait: Wait) -> bool:
    """Return whether this thread still owes another rank's wait its event.

    Calls of threads of one name belong together where nothing else shows it (docs/live-gathers.md, Threads).
    """
    is_of_this_thread = wait.thread == threading.current_thread().name
    if wait.is_of_work:
        return is_of_this_thread and not (wait.way and wait.way in joined_work.values())
    gathers = _find_named(membership, wait.group)
    return is_of_this_thread if gathers is None else gathers.owes(wait)


def _find_named(membership: Membership, name: str) -> GroupGathers | None:
    return next((one for one in list(_groups.values()) if one.membership is membership and one.name == name), None)


def _note(membership: Membership, error: BaseException, claim: str, call: str) -> None:
    """Note that an error has failed a call of this rank; in other groups it then fails none."""
    membership.note(error, claim)
    for wait in parties_of(error):
        gathers = None if wait.is_of_work else _find_named(membership, wait.group)
        # A call whose ranks waited for those of the present one, in which this rank is not.
        if gathers is not None and gathers.rank in wait.ranks and gathers.is_of_this_thread:
            session = gathers.session(wait.ranks)
            # Now, not when the other ranks have closed it: a call might begin there meanwhile.
            session.fail_next(FailureRecord.from_error(error, gathers.rank, call))
            if wait.number == 0:  # a meeting that ends with this failure, in which this rank does not take part
                session.num_meetings = max(session.num_meetings, wait.meeting)


class _Making:
    """Held while a thread makes the first gathers of a group."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.lock = threading.RLock()


_making = _Making()
after_fork_in_child(_making.renew)  # another thread of the parent may have held it


class _NoGroup:
    """Stands for the world if torch.distributed is not initialized."""


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
    launch = read_launch(environment.environ())
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
            for session in gathers.sessions.values():  # one of them is the call that failed
                session.fail_next(record)


def forget(group: Any) -> None:
    """Leave the groups of a group that will not be used again."""
    if (found := _groups.pop(group, None)) is not None:
        found.close()


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def keep_uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Mark a function so that the compiler calls it instead of tracing it (torch/_dynamo/decorators.py: skip)."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@keep_uncompiled
def call_uncompiled(
    function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Return the function's result; if the compiler runs the caller, all that the function calls is left alone."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return function(*args, **kwargs)
    # None and False mean that no frame is traced now (torch/csrc/dynamo/eval_frame.c).
    callback = getattr(sys.modules.get("torch._C._dynamo.eval_frame"), "get_eval_frame_callback", None)
    if callback is not None and callback() in (None, False):
        return function(*args, **kwargs)
    result: Result = dynamo.disable(function)(*args, **kwargs)
    return result


_logger = logging.getLogger(__name__)
_NUM_REPORTS = 3
"""Attempts to report a failure: a signal's handler may raise in the midst of one."""
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_PATHS = "a directory that all ranks mount; or None: memory and sockets carry tensors"


def _refuse(what: str, got: object, want: str, rank: int | None = None) -> UsageError:
    return UsageError(what, rank=rank, got=repr_text(got), want=want)


def _check_ranks(ranks: Sequence[int], world_size: int, group: Any) -> tuple[int, ...]:
    """Return the ranks of a gather; UsageError unless they are different ranks of the world and of the group.

    An absent rank would be noticed only at the deadline.
    """
    try:
        checked = tuple(map(index, ranks))
    except TypeError:
        raise _refuse(
            "the ranks of a gather must be whole numbers", ranks, "global ranks, the gathering one first"
        ) from None
    if not checked or len(set(checked)) != len(checked) or min(checked) < 0:
        raise _refuse(
            "the ranks of a gather must be different ranks", list(ranks), "each rank once, the gathering one first"
        )
    if (top := max(checked)) >= world_size:
        what = f"there is no rank {repr_text(top)} in a world of {world_size}"
        raise _refuse(what, list(checked), f"global ranks from 0 to {world_size - 1}", rank=top)
    if group is None or isinstance(group, LaunchedRanks):
        return checked
    if isinstance(group, int):  # GroupMember.NON_GROUP_MEMBER: result of new_group on a rank outside of the group
        raise _refuse(
            "this rank is not in the group of the gather", group, f"a group with all of ranks {list(checked)}"
        )
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(group, distributed.ProcessGroup):
        what = f"the group of a gather must be a process group, not a {type(group).__name__}"
        raise _refuse(what, group, "a group of torch.distributed.new_group, or None for all ranks")
    members = distributed.get_process_group_ranks(group)
    if foreign := [rank for rank in checked if rank not in members]:
        what = f"rank {foreign[0]} is not in the group of the gather, which has ranks {list(members)}"[:300]
        raise _refuse(what, list(checked), "a group with all ranks of the gather", rank=foreign[0])
    return checked


def find_place() -> tuple[str, int]:
    """Return file and line of the user's call: the first frame outside this package and contextlib."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, contextlib.__file__)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class Gather(AbstractContextManager[list[Any]]):
    """Gathers the values of all ranks, in their order, on the first of them; an empty list elsewhere.

    Arguments and errors are those of `xrank.workspace.parallel`. In addition, `function` is the name of the function
    that the user called, `check` raises for a value that this function does not accept, and `place` replaces the file
    and line of the user's call in errors.
    """

    def __init__(
        self,
        function: str,
        value: object,
        ranks: Sequence[int],
        group: Any,
        *,
        workspace_path: str | os.PathLike[str] | None,
        timeout_seconds: float,
        early_exit: bool,
        key: str | None,
        check: Callable[[object], None] = lambda value: None,
        place: str | None = None,
    ) -> None:
        self._function, self._value, self._ranks, self._group = function, value, ranks, group
        self._workspace_path, self._timeout_seconds, self._early_exit = workspace_path, timeout_seconds, early_exit
        self._key, self._check, self._place = key, check, place
        self._open: _Open | None = None
        self._found_place = ("", 0)

    @keep_uncompiled
    def __enter__(self) -> list[Any]:
        return call_uncompiled(self._enter)

    @keep_uncompiled
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._open is not None:
            call_uncompiled(self._leave, self._open, error)

    @property
    def group(self) -> RankGroup:
        """The ranks that have met, in the body of a gather of several."""
        assert self._open is not None
        return self._open.exchange.group

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        opened = getattr(self, "_open", None)
        if opened is None or _is_finalizing() or opened.pid != os.getpid():
            return  # the end of a process is noticed as such
        error = UsageError(
            f"{opened.call} was entered but never left",
            next_step="enter gathers with `with`, or keep the context and call its __exit__ in the same thread",
        )
        _logger.error("%s; the other ranks' gather fails", error)
        _report(partial(opened.abandon, error), error)
        self._close(opened)

    # ---- the beginning

    def _enter(self) -> list[Any]:
        self._found_place = place = (self._place, 0) if self._place else find_place()
        try:
            world = find_world(self._group)
            ranks = _check_ranks(self._ranks, world.size, self._group)
        except BaseException as error:
            _report(partial(report_at_large, self._group, error, self._describe()), error)
            raise
        if world.rank not in ranks:
            return []
        if len(ranks) == 1:
            self._check_arguments()
            self._check(self._value)
            return [_copy_own(self._value)]
        require_linux(f"{self._function} of several ranks")
        group = find_group(world, self._group)
        group.claim(ranks, self._describe)
        session = group.session(ranks)
        try:
            path, deadline = self._check_arguments()
            while True:
                exchange = session.exchange(path, deadline, self._describe)
                call = exchange.begin(self._function, self._key, place, deadline)
                gathers, thread = _open.gathers, threading.current_thread().name
                gathers.append((exchange, call))
                self._open = _Open(group, session, path, exchange, call, os.getpid(), gathers, thread)
                try:
                    # A rank may have failed in an earlier call after this one had left it.
                    exchange.check(call)
                    self._check(self._value)  # here, so that the other ranks receive its error
                    if world.rank == ranks[0]:
                        return exchange.collect(call, _copy_own(self._value))
                    exchange.send(call, self._value)
                    return []
                except RankFailedError as error:
                    # The other ranks have found as well that this call is not the one that failed.
                    if not session.is_settled(error):
                        raise
                    self._close(self._open)
                    session.close(path, exchange)
        except BaseException as error:
            if self._open is not None:
                self._fail(error)
            else:
                text = self._describe()
                _report(partial(session.fail, error, text), error)
                _note(group.membership, error, name_of_ranks(ranks), text)
            raise

    def _describe(self) -> str:
        """Return the call, for people."""
        return str(Call(0, self._function, self._key, self._found_place))

    def _check_arguments(self) -> tuple[str | None, Deadline]:
        """Return the directory of the gather as an absolute path, and its deadline, which begins now."""
        key: object = self._key
        path: Any = self._workspace_path
        seconds: Any = self._timeout_seconds
        if key is not None and not isinstance(key, str):
            what = f"the key of a gather must be text, not a {type(key).__name__}"
            raise _refuse(what, key, "text that is equal on all ranks, for example '.'.join(map(str, key)), or None")
        if path is not None:
            if not isinstance(path, str | os.PathLike):
                raise _refuse(f"workspace_path must be a path, not a {type(path).__name__}", path, _PATHS)
            if is_url(path := clean_path(path)):
                raise _refuse(
                    f"{path}: live tensors cannot go through a store; use ObjectWorkspace for states", path, _PATHS
                )
            path = os.path.abspath(path)
        try:
            if isinstance(seconds, str | bytes):
                raise TypeError(f"it is a {type(seconds).__name__}")
            return path, Deadline(float(seconds))
        except (OverflowError, TypeError) as error:
            raise _refuse(f"timeout_seconds must be a number: {error}", seconds, "seconds above 0") from None

    # ---- the end

    def _leave(self, opened: _Open, error: BaseException | None) -> None:
        if opened.pid != os.getpid():  # a process forked in the body is not a rank, and must not act for this one
            self._close(opened)
            return
        if error is not None:
            self._fail(error)
            return
        try:
            if opened.gathers is not _open.gathers:
                raise UsageError(
                    f"a gather that thread {opened.thread!r} began ends in {threading.current_thread().name!r}",
                    got=str(opened.call),
                    next_step="leave the gather in the thread that entered it, by a `with` block",
                )
            opened.exchange.finish(opened.call, early_exit=self._early_exit)
        except BaseException as failure:
            self._fail(failure)
            raise
        self._close(opened)

    def _fail(self, error: BaseException) -> None:
        """Report the error, and leave the call as the other ranks do: their next calls meet."""
        opened = self._open
        assert opened is not None
        if opened.pid == os.getpid():
            _report(partial(opened.fail, error), error)
        self._close(opened)

    def _close(self, opened: _Open) -> None:
        self._open = None
        if (entry := (opened.exchange, opened.call)) in opened.gathers:
            opened.gathers.remove(entry)


class _Open(NamedTuple):
    """A gather that has begun."""

    group: GroupGathers
    session: Session
    path: str | None
    exchange: GatherExchange
    call: Call
    pid: int
    gathers: list[tuple[GatherExchange, Call]]
    """The gathers that the thread of that name is in."""
    thread: str

    def abandon(self, error: BaseException) -> None:
        """Fail the call on all ranks, from any thread at any moment: nothing is closed, which may be in use."""
        self.exchange.fail(self.call, error)
        _note(self.group.membership, error, name_of_ranks(self.session.ranks), str(self.call))

    def fail(self, error: BaseException) -> None:
        """Fail the call on all ranks."""
        call, session = self.call, self.session
        is_behind = self.exchange.fail(call, error)
        # The other ranks' state after a failure is unknown: the next gather begins with a new meeting.
        session.close(self.path, self.exchange)
        if is_behind:
            # The others failed in an earlier call, and wait for this rank at the next meeting: their call fails, too.
            session.refuse(FailureRecord.from_error(error, self.exchange.group.rank, str(call)).anew().to_error())
        _note(self.group.membership, error, name_of_ranks(session.ranks), str(call))


def _report(report: Callable[[], None], error: BaseException) -> None:
    """Report an error to the other ranks, whatever happens meanwhile: the user gets the error itself."""
    for _ in range(_NUM_REPORTS):
        try:
            report()
        except BaseException as failure:  # such as KeyboardInterrupt, from a signal in the midst of the report
            if not isinstance(failure, Exception) or isinstance(failure, InterruptedError):
                error.add_note(f"{type(failure).__name__} was raised while this error was reported to the other ranks")
            continue
        return


def _copy_own(value: Any) -> Any:
    """Return the first rank's own value as yielded: new containers, the same memory, no elements that share memory."""
    is_plain = type(value) is getattr(sys.modules.get("torch"), "Tensor", None)
    if is_plain:
        check_dense(value, "the value")
    tree, tensors = (None, [value]) if is_plain else pack(value)
    for i, tensor in enumerate(tensors):
        plain = tensor.detach().cpu()
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        tensors[i] = plain.contiguous() if 0 in plain.stride() and plain.numel() > 1 else plain
    return tensors[0] if is_plain else unpack(tree, tensors)
