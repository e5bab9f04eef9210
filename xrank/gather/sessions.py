"""Sessions: the circles that this process has joined, kept between gathers and closed after a failure.

A session chooses the medium of tensors together with the rendezvous: memory on one host, a directory across hosts. A
third one needs a key in `_Session.exchanges`, a word for `Meeting.way`, and an argument of `get_tensors_parallel`,
`get_configs_parallel` and the shared team.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import Any
from weakref import WeakKeyDictionary

from xrank import environment
from xrank.errors import UsageError
from xrank.gather.exchange import Call, GatherExchange
from xrank.gather.tree import check_sendable, is_plain, pack, unpack
from xrank.public_calls import check_no_url
from xrank.ranks.circle import Circle
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.ranks.meeting import CALL, Meeting
from xrank.ranks.rendezvous import meet
from xrank.ranks.store import find_store
from xrank.ranks.store_rendezvous import meet_across_hosts
from xrank.workspace.directory_messages import DirectoryMessages
from xrank.workspace.memory_messages import MemoryMessages

__all__ = ["failure_check", "forget", "gather_values"]


class _Session:
    """The gathers of one list of ranks over one group's store."""

    def __init__(self) -> None:
        self.exchanges: dict[str | None, GatherExchange] = {}
        """Exchanges by directory; None is memory."""
        self.num_meetings = 0
        self.pid = os.getpid()

    def exchange(
        self, ranks: tuple[int, ...], rank: int, group: Any, path: str | None, deadline: Deadline
    ) -> GatherExchange:
        """Return the exchange through a directory or memory; the first call for it makes a meeting."""
        if (exchange := self.exchanges.get(path)) is not None:
            return exchange
        meeting = self._next_meeting(ranks, rank, group, path, deadline)
        if path is None:
            exchange = GatherExchange(meet(meeting), MemoryMessages())
        else:
            circle = meet_across_hosts(meeting)
            exchange = GatherExchange(circle, _directory_messages(path, circle))
        self.exchanges[path] = exchange
        return exchange

    def refuse(
        self,
        ranks: tuple[int, ...],
        rank: int,
        group: Any,
        path: str | None,
        deadline: Deadline,
        error: BaseException,
    ) -> None:
        """Fail the next meeting: the other ranks are at this rank's call there, and would wait for it."""
        self._next_meeting(ranks, rank, group, path, deadline).refuse(error)

    def close(self, path: str | None, exchange: GatherExchange) -> None:
        """Close an exchange and forget it: the next gather makes a meeting."""
        exchange.close()
        # After a failure inside the body, a gather there may have made a new exchange.
        if self.exchanges.get(path) is exchange:
            del self.exchanges[path]

    def _next_meeting(
        self, ranks: tuple[int, ...], rank: int, group: Any, path: str | None, deadline: Deadline
    ) -> Meeting:
        # Every rank counts alike, as a failure makes all of them meet anew: they agree on a name that was never used.
        self.num_meetings += 1
        name = f"meeting/{'.'.join(map(str, ranks))}/{self.num_meetings}"
        way = "memory" if path is None else "a directory"
        store = find_store(group, environment.environ())
        return Meeting(ranks, rank, store, name, deadline, way, _check_open_gathers)


_sessions: WeakKeyDictionary[Any, dict[tuple[int, ...], _Session]] = WeakKeyDictionary()
"""Sessions by process group: they end when the group is destroyed."""


class _OpenGathers(threading.local):
    """The gathers whose bodies this thread is in, the outermost first."""

    def __init__(self) -> None:
        self.gathers: list[tuple[GatherExchange, Call]] = []


_open = _OpenGathers()


def _check_open_gathers() -> None:
    """Raise if a gather around this thread has failed: a value that it waits for inside may then never come.

    Raises:
        RankFailedError: the same as on all other ranks of that gather.
    """
    for exchange, call in _open.gathers:
        exchange.look(call)


def _check_gathers_around() -> None:
    """Check all gathers around this thread but the innermost, whose own waits check it."""
    for exchange, call in _open.gathers[:-1]:
        exchange.look(call)


def failure_check() -> Callable[[], None]:
    """Return `_check_open_gathers` of this thread, for other threads to call, one at a time, while this one waits."""
    open_gathers = tuple(_open.gathers)

    def check() -> None:
        for exchange, call in open_gathers:
            exchange.look(call)

    return check


def forget(group: Any) -> None:
    """Leave the circles of a group that will not be used again."""
    for session in _sessions.pop(group, {}).values():
        for exchange in session.exchanges.values():
            exchange.close()


class _NoGroup:
    """Stands for the world if torch.distributed is not initialised."""


_NO_GROUP = _NoGroup()


@contextmanager
def gather_values(
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
) -> Iterator[list[Any]]:
    """Yield the values of all ranks, in their order, on the first of them; an empty list elsewhere.

    Arguments and errors are those of `xrank.gather.parallel`. `check` raises for a value that the function does not
    accept. `place` replaces the file and line of the user's call in errors.
    """
    ranks = _check_ranks(ranks)
    world = _world()
    rank, world_size = _find_rank() if world is None else (world.rank(), world.size())
    _check_exist(ranks, world_size)
    if rank not in ranks:
        yield []
        return
    if workspace_path is not None:
        check_no_url(workspace_path)
    deadline = Deadline(timeout_seconds)
    if len(ranks) == 1:
        check(value)
        yield [_copy_own(value)]
        return
    session = _session(world if group is None else group, ranks)
    path = None if workspace_path is None else os.path.abspath(os.fspath(workspace_path))
    exchange = session.exchange(ranks, rank, group, path, deadline)
    call = exchange.begin(function, key, (place, 0) if place else _place(), deadline)
    exchange.circle.check_around = _check_gathers_around
    _open.gathers.append((exchange, call))
    pid = os.getpid()
    try:
        # A rank may have failed in an earlier call after this one had left it.
        exchange.check(call)
        check(value)  # here, so that the other ranks receive its error
        parts: list[Any] = []
        if rank == ranks[0]:
            parts = exchange.collect(call, _copy_own(value))
        else:
            exchange.send(call, value)
        yield parts
        if os.getpid() == pid:  # a process forked in the body is not a rank, and must not act for this one
            exchange.finish(call, early_exit=early_exit)
    except BaseException as error:
        if os.getpid() != pid:
            raise
        is_behind = exchange.fail(call, error)
        # The other ranks' state after a failure is unknown: the next gather begins with a new meeting.
        session.close(path, exchange)
        # The others failed in an earlier call, and wait for this rank in the next meeting.
        if is_behind:
            session.refuse(ranks, rank, group, path, deadline, error)
        raise
    finally:
        _open.gathers.remove((exchange, call))


def _directory_messages(path: str, circle: Circle) -> DirectoryMessages:
    try:
        return DirectoryMessages(path, circle.rank)
    except BaseException as error:
        # The others have met this rank, and wait in their first gather.
        circle.fail(FailureRecord.from_error(error, circle.rank, CALL))
        circle.close()
        raise


def _check_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    try:
        checked = tuple(index(rank) for rank in ranks)
    except TypeError:
        raise UsageError(
            "the ranks of a gather must be whole numbers",
            got=repr(ranks)[:200],
            want="a list of global ranks, the gathering one first",
            next_step="give such a list",
        ) from None
    if not checked or len(set(checked)) != len(checked) or min(checked) < 0:
        raise UsageError(
            "the ranks of a gather must be different ranks",
            got=str(list(ranks)),
            want="each rank once, the gathering one first",
            next_step="take repeated ranks out of the list",
        )
    return checked


def _check_exist(ranks: tuple[int, ...], world_size: int | None) -> None:
    # Without this check, an absent rank would be noticed only at the deadline.
    if world_size is not None and max(ranks) >= world_size:
        raise UsageError(
            f"there is no rank {max(ranks)} in a world of {world_size}",
            rank=max(ranks),
            got=str(list(ranks)),
            want=f"global ranks from 0 to {world_size - 1}",
            next_step="take ranks of this world",
        )


def _world() -> Any:
    """Return the process group of all ranks; None if torch.distributed is not initialised."""
    distributed = sys.modules.get("torch.distributed")
    return getattr(getattr(distributed, "group", None), "WORLD", None)


def _find_rank() -> tuple[int, int | None]:
    """Return this rank and the number of ranks by the launcher's variables; the number is None without a launcher."""
    launch = environment.read_launch(environment.environ())
    return (0, None) if launch is None else (launch.rank, launch.world_size)


def _copy_own(value: object) -> Any:
    """Return the first rank's own value as yielded: new containers, the same memory."""
    if is_plain(value):
        check_sendable(value)
        return value.detach().cpu()
    tree, tensors = pack(value)
    return unpack(tree, [tensor if tensor.is_cpu else tensor.cpu() for tensor in tensors])


def _session(group: Any, ranks: tuple[int, ...]) -> _Session:
    if isinstance(group, int):  # GroupMember.NON_GROUP_MEMBER: result of new_group on a rank outside of the group
        raise UsageError(
            "this rank is not in the group of the gather",
            got=f"group={group}",
            want=f"a group with all of ranks {list(ranks)}",
            next_step="omit the group, or make it with these ranks",
        )
    sessions = _sessions.setdefault(_NO_GROUP if group is None else group, {})
    session = sessions.get(ranks)
    if session is None or session.pid != os.getpid():
        # After a fork the links belong to the parent.
        session = sessions[ranks] = _Session()
    return session


_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def _place() -> tuple[str, int]:
    """Return file and line of the user's call: the first frame outside this package and contextlib."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, contextlib.__file__)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
