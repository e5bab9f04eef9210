"""Sessions: the circles that this process has joined, kept between gathers and given up after a failure."""

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
from xrank.gather.exchange import Call, Exchange
from xrank.gather.tree import check_sendable, is_plain, pack, unpack
from xrank.ranks.circle import Circle
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.ranks.meeting import CALL, Meeting
from xrank.ranks.rendezvous import meet
from xrank.ranks.store import find_store
from xrank.ranks.store_rendezvous import meet_across_hosts
from xrank.workspace.directory_messages import DirectoryMessages
from xrank.workspace.memory_messages import MemoryMessages

__all__ = ["failure_check", "forget", "gathered"]


class _Session:
    """The gathers of one list of ranks over one group's store."""

    def __init__(self) -> None:
        self.exchanges: dict[str | None, Exchange] = {}
        """By the directory that they go through; None is memory."""
        self.num_meetings = 0
        self.pid = os.getpid()

    def exchange(self, ranks: tuple[int, ...], rank: int, group: Any, path: str | None, deadline: Deadline) -> Exchange:
        """Return the exchange through a directory, or memory; after a meeting, if there is none yet."""
        if (exchange := self.exchanges.get(path)) is not None:
            return exchange
        meeting = self._next_meeting(ranks, rank, group, path, deadline)
        if path is None:
            exchange = Exchange(meet(meeting), MemoryMessages())
        else:
            circle = meet_across_hosts(meeting)
            exchange = Exchange(circle, _directory_messages(path, circle))
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
        """Let the next meeting fail: the others are at this rank's call there, and would wait for it."""
        self._next_meeting(ranks, rank, group, path, deadline).refuse(error)

    def _next_meeting(
        self, ranks: tuple[int, ...], rank: int, group: Any, path: str | None, deadline: Deadline
    ) -> Meeting:
        self.num_meetings += 1
        name = f"meeting/{'.'.join(map(str, ranks))}/{self.num_meetings}"
        way = "memory" if path is None else "a directory"
        store = find_store(group, environment.environ())
        return Meeting(ranks, rank, store, name, deadline, way, _check_open_gathers)


_sessions: WeakKeyDictionary[Any, dict[tuple[int, ...], _Session]] = WeakKeyDictionary()
"""By process group: when one is destroyed, its sessions go with it."""


class _OpenGathers(threading.local):
    """The gathers in whose bodies a thread is, the outermost first."""

    def __init__(self) -> None:
        self.gathers: list[tuple[Exchange, Call]] = []


_open = _OpenGathers()


def _check_open_gathers() -> None:
    """Raise if any gather failed in whose body this thread is: what it waits for inside may then never come.

    Raises:
        RankFailedError: as on all other ranks of that gather.
    """
    for exchange, call in _open.gathers:
        exchange.look(call)


def _check_gathers_around() -> None:
    """Do so but for the innermost, whose own waits look at it themselves."""
    for exchange, call in _open.gathers[:-1]:
        exchange.look(call)


def failure_check() -> Callable[[], None]:
    """Return `_check_open_gathers` of this thread, for others to call, one at a time, while this one waits for them."""
    open_gathers = tuple(_open.gathers)

    def check() -> None:
        for exchange, call in open_gathers:
            exchange.look(call)

    return check


def forget(group: Any) -> None:
    """Leave the circles of a group that is not gathered over any more."""
    for session in _sessions.pop(group, {}).values():
        for exchange in session.exchanges.values():
            exchange.close()


class _NoGroup:
    """Stands for the world where torch.distributed is not initialised."""


_NO_GROUP = _NoGroup()


@contextmanager
def gathered(
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

    Arguments and errors as `xrank.gather.parallel`; `check` raises for a value that the function does not take, and
    `place` stands in errors for the file and line of the user's call.
    """
    ranks = _checked_ranks(ranks)
    world = _world()
    rank, world_size = _launched_rank() if world is None else (world.rank(), world.size())
    _check_exist(ranks, world_size)
    if rank not in ranks:
        yield []
        return
    deadline = Deadline(timeout_seconds)
    if len(ranks) == 1:
        check(value)
        yield [_own(value)]
        return
    session = _session(world if group is None else group, ranks)
    path = None if workspace_path is None else os.path.abspath(os.fspath(workspace_path))
    exchange = session.exchange(ranks, rank, group, path, deadline)
    call = exchange.begin(function, key, (place, 0) if place else _place(), deadline)
    exchange.circle.check_around = _check_gathers_around
    _open.gathers.append((exchange, call))
    pid = os.getpid()
    try:
        exchange.check(call)
        check(value)  # here, so that the others hear of what it raises
        parts: list[Any] = []
        if rank == ranks[0]:
            parts = exchange.collect(call, _own(value))
        else:
            exchange.send(call, value)
        yield parts
        if os.getpid() == pid:  # a process forked in the body is no rank: it must not speak for this one
            exchange.finish(call, early_exit=early_exit)
    except BaseException as error:
        if os.getpid() != pid:
            raise
        is_behind = exchange.fail(call, error)
        # What the others do after a failure is not known: the next gather begins with a new meeting.
        exchange.close()
        if session.exchanges.get(path) is exchange:
            del session.exchanges[path]
        if is_behind:
            session.refuse(ranks, rank, group, path, deadline, error)
        raise
    finally:
        _open.gathers.remove((exchange, call))


def _directory_messages(path: str, circle: Circle) -> DirectoryMessages:
    try:
        return DirectoryMessages(path, circle.rank)
    except BaseException as error:
        circle.fail(FailureRecord.from_error(error, circle.rank, CALL))
        circle.close()
        raise


def _checked_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    try:
        checked = tuple(index(rank) for rank in ranks)
    except TypeError:
        raise UsageError(
            "the ranks of a gather are whole numbers",
            got=repr(ranks)[:200],
            want="a list of global ranks, the one that gathers first",
            next_step="give such a list",
        ) from None
    if not checked or len(set(checked)) != len(checked) or min(checked) < 0:
        raise UsageError(
            "the ranks of a gather must be different ranks",
            got=str(list(ranks)),
            want="each rank once, the one that gathers first",
            next_step="take repeated ranks out of the list",
        )
    return checked


def _check_exist(ranks: tuple[int, ...], world_size: int | None) -> None:
    # Waited for, a rank that cannot come would be missed at the deadline alone.
    if world_size is not None and max(ranks) >= world_size:
        raise UsageError(
            f"there is no rank {max(ranks)} in a world of {world_size}",
            rank=max(ranks),
            got=str(list(ranks)),
            want=f"global ranks from 0 to {world_size - 1}",
            next_step="take ranks that there are",
        )


def _world() -> Any:
    """Return the process group of all ranks, or None where torch.distributed is not initialised."""
    distributed = sys.modules.get("torch.distributed")
    return getattr(getattr(distributed, "group", None), "WORLD", None)


def _launched_rank() -> tuple[int, int | None]:
    """Return this rank and the number of all; None where nothing says it."""
    launch = environment.read_launch(environment.environ())
    return (0, None) if launch is None else (launch.rank, launch.world_size)


def _own(value: object) -> Any:
    """Return the first rank's own value as it yields it: new containers, its own memory."""
    if is_plain(value):
        check_sendable(value)
        return value.detach().cpu()
    tree, tensors = pack(value)
    return unpack(tree, [tensor if tensor.is_cpu else tensor.cpu() for tensor in tensors])


def _session(group: Any, ranks: tuple[int, ...]) -> _Session:
    if isinstance(group, int):  # GroupMember.NON_GROUP_MEMBER: new_group's answer to a rank that is not in the group
        raise UsageError(
            "this rank is not in the group that it is to gather over",
            got=f"group={group}",
            want=f"a group with all of ranks {list(ranks)}",
            next_step="leave the group out, or make it with these ranks",
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
