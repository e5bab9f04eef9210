"""One gather on one rank: a context manager, which live gathers and shared conversions enter."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import index
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from xrank.errors import RankFailedError, UsageError, require_linux
from xrank.ranks.exchange import Call, GatherExchange
from xrank.ranks.failure import Deadline, FailureRecord
from xrank.ranks.group import RankGroup
from xrank.ranks.sessions import GroupGathers, Session, find_group, find_world, open_gathers, report_at_large
from xrank.ranks.store import LaunchedRanks
from xrank.ranks.values import check_sendable, is_plain, pack, unpack
from xrank.storage.url import clean_path, is_url
from xrank.words import repr_text

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


def check_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of a gather; UsageError if they are not different whole numbers."""
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
    return checked


def check_exist(ranks: tuple[int, ...], world_size: int, group: Any) -> None:
    """Check that the ranks are in the world and in the group: an absent rank would be noticed only at the deadline."""
    if max(ranks) >= world_size:
        top = max(ranks)
        what = f"there is no rank {repr_text(top)} in a world of {world_size}"
        raise _refuse(what, list(ranks), f"global ranks from 0 to {world_size - 1}", rank=top)
    if group is None or isinstance(group, LaunchedRanks):
        return
    if isinstance(group, int):  # GroupMember.NON_GROUP_MEMBER: result of new_group on a rank outside of the group
        raise _refuse("this rank is not in the group of the gather", group, f"a group with all of ranks {list(ranks)}")
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(group, distributed.ProcessGroup):
        what = f"the group of a gather must be a process group, not a {type(group).__name__}"
        raise _refuse(what, group, "a group of torch.distributed.new_group, or None for all ranks")
    members = distributed.get_process_group_ranks(group)
    if foreign := [rank for rank in ranks if rank not in members]:
        what = f"rank {foreign[0]} is not in the group of the gather, which has ranks {list(members)}"[:300]
        raise _refuse(what, list(ranks), "a group with all ranks of the gather", rank=foreign[0])


def find_place() -> tuple[str, int]:
    """Return file and line of the user's call: the first frame outside this package and contextlib."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, contextlib.__file__)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class Gather(AbstractContextManager[list[Any]]):
    """Gathers the values of all ranks, in their order, on the first of them; an empty list elsewhere.

    Arguments and errors are those of `xrank.workspace.parallel`.

    Args:
        function: name of the function that the user called.
        check: raises for a value that the function does not accept.
        place: replaces the file and line of the user's call in errors.
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
        call_uncompiled(self._leave, error)

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
            f"{opened.call} was entered, and dropped without being left",
            next_step="enter gathers by `with`, or keep the context and call its __exit__ in the same thread",
        )
        _logger.error("%s; the other ranks' gather fails", error)
        _report(partial(opened.abandon, error), error)
        self._close(opened)

    # ---- the beginning

    def _enter(self) -> list[Any]:
        self._found_place = place = (self._place, 0) if self._place else find_place()
        try:
            ranks = check_ranks(self._ranks)
            world = find_world(self._group)
            check_exist(ranks, world.size, self._group)
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
                gathers, thread = open_gathers(), threading.current_thread().name
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
                group.note(error, ranks, text)
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
                raise _refuse(f"{path}: live tensors go through no store; ObjectWorkspace keeps states", path, _PATHS)
            path = os.path.abspath(path)
        try:
            if isinstance(seconds, str | bytes):
                raise TypeError(f"it is a {type(seconds).__name__}")
            return path, Deadline(float(seconds))
        except (OverflowError, TypeError) as error:
            raise _refuse(f"timeout_seconds must be a number: {error}", seconds, "seconds above 0") from None

    # ---- the end

    def _leave(self, error: BaseException | None) -> None:
        opened = self._open
        if opened is None:
            return
        if opened.pid != os.getpid():  # a process forked in the body is not a rank, and must not act for this one
            self._close(opened)
            return
        if error is not None:
            self._fail(error)
            return
        try:
            if opened.gathers is not open_gathers():
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
        self.group.note(error, self.session.ranks, str(self.call))

    def fail(self, error: BaseException) -> None:
        """Fail the call on all ranks."""
        call, session = self.call, self.session
        is_behind = self.exchange.fail(call, error)
        # The other ranks' state after a failure is unknown: the next gather begins with a new meeting.
        session.close(self.path, self.exchange)
        if is_behind:
            # The others failed in an earlier call, and wait for this rank at the next meeting: their call fails, too.
            session.refuse(FailureRecord.from_error(error, self.exchange.group.rank, str(call)).anew().to_error())
        self.group.note(error, session.ranks, str(call))


def _report(report: Callable[[], None], error: BaseException) -> None:
    """Report an error to the other ranks, whatever happens meanwhile: the user gets the error itself."""
    for _ in range(_NUM_REPORTS):
        try:
            report()
        except BaseException as failure:  # such as KeyboardInterrupt, from a signal in the midst of the report
            if not isinstance(failure, Exception) or isinstance(failure, InterruptedError):
                error.add_note(f"{type(failure).__name__} came while this error was reported to the other ranks")
            continue
        return


def _copy_own(value: object) -> Any:
    """Return the first rank's own value as yielded: new containers, the same memory."""
    if is_plain(value):
        check_sendable(value)
        return _plain_values(value.detach().cpu())
    tree, tensors = pack(value)
    return unpack(tree, [_plain_values(tensor.cpu()) for tensor in tensors])


def _plain_values(tensor: Any) -> Any:
    """Return a tensor whose elements do not share memory, like those of the other ranks."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if 0 in tensor.stride() and tensor.numel() > 1:
        tensor = tensor.contiguous()
    return tensor
