"""Runs a piece of work again and again, stopped at each call that changes the disk: by SIGKILL, or by an error.

Generic: ``work`` is any callable without arguments that does all its state-changing calls through ``os`` functions
(looked up at the call) or through the extra functions named. Only for a single-threaded parent: it forks.
"""

from __future__ import annotations

import errno
import functools
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

STATE_CHANGING = (
    *("write", "pwrite", "pwritev", "writev", "fsync", "fdatasync", "ftruncate", "truncate", "posix_fallocate"),
    *("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "link", "symlink", "sendfile", "copy_file_range"),
)
"""Functions of os that are counted; os.open too where it may create. os.makedirs calls os.mkdir."""

Extra = tuple[ModuleType, str]


@dataclass(frozen=True)
class Outcome:
    """How a child ended."""

    finished: bool
    """It came to its end before the stop."""
    calls: tuple[str, ...]
    """The counted calls, up to the stop (errors only)."""
    error: BaseException | None = None
    """What the work raised."""


def kill_points(
    work: Callable[[], object],
    *,
    extra: Sequence[Extra] = (),
    every: int = 1,
    first: int = 1,
    torn: bool = False,
    limit: int = 2000,
) -> Iterator[int]:
    """Run the work in a child that is killed after its N-th call, N = first, first + every, …; yield N after each kill.

    Ends, after a last yield, when a child came to its end; between yields the caller checks and prepares the disk.

    Args:
        work: as above.
        extra: more functions to count.
        every: how many calls lie between two kills.
        first: the call of the first kill.
        torn: whether a call that writes is killed when it has written half, and another before it is made.
        limit: of calls.
    """
    for point in range(first, limit, every):
        pid = os.fork()
        if pid == 0:
            _child(work, _within(point) if torn else _after(point, _kill), extra)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL), f"call {point}: the work failed by itself (its traceback is above)"
        yield point
        if status == 0:
            return
    raise AssertionError(f"more than {limit} calls")


def error_points(
    work: Callable[[], object],
    number: int,
    *,
    extra: Sequence[Extra] = (),
    perform: bool = False,
    every: int = 1,
    first: int = 1,
    limit: int = 2000,
) -> Iterator[Outcome]:
    """Run the work in a child whose N-th call fails with that errno, N = first, first + every, …; yield how it ended.

    Args:
        work: as above.
        number: the errno.
        extra: more functions to count.
        perform: make the call before it "fails", as a network file system that lost the answer.
        every: how many calls lie between two that fail.
        first: the first call that fails.
        limit: of calls.
    """
    for point in range(first, limit, every):
        outcome = in_child(work, _before(point, number, perform), extra)
        yield outcome
        if len(outcome.calls) < point:
            return
    raise AssertionError(f"more than {limit} calls")


def in_child(work: Callable[[], object], stop: Any = None, extra: Sequence[Extra] = ()) -> Outcome:
    """Run the work in a child and return how it ended."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _child(work, stop, extra, report=write)
    os.close(write)
    with open(read, "rb") as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    assert content, "the child died without a word"
    result: Outcome = pickle.loads(content)
    return result


def _child(work: Callable[[], object], stop: Any, extra: Sequence[Extra], report: int | None = None) -> None:
    status = 1
    raw_write = os.write
    calls: list[str] = []
    error: BaseException | None = None
    try:
        if stop is not None:
            _wrap(stop, calls, extra)
        work()
        status = 0
    except BaseException as raised:
        error = raised
        if report is None:
            traceback.print_exc(file=sys.__stderr__)
    finally:
        if report is not None:
            try:
                content = pickle.dumps(Outcome(status == 0, tuple(calls), error))
            except Exception:
                content = pickle.dumps(Outcome(False, tuple(calls), RuntimeError(repr(error))))
            while content:
                content = content[raw_write(report, content) :]
        os._exit(status)


def _wrap(stop: Any, calls: list[str], extra: Sequence[Extra]) -> None:
    places: list[Extra] = [(os, name) for name in STATE_CHANGING if hasattr(os, name)]
    for module, name in [*places, *extra, (os, "open")]:
        setattr(module, name, _counted(getattr(module, name), name, stop, calls))


def _counted(function: Callable[..., Any], name: str, stop: Any, calls: list[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*arguments: Any, **named: Any) -> Any:
        if name == "open" and not (arguments[1] if len(arguments) > 1 else named.get("flags", 0)) & os.O_CREAT:
            return function(*arguments, **named)
        calls.append(name)
        return stop(len(calls), functools.partial(function, *arguments, **named))

    return counted


def _after(point: int, act: Callable[[], None]) -> Any:
    def stop(number: int, call: Callable[[], Any]) -> Any:
        try:
            return call()
        finally:
            if number == point:
                act()

    return stop


def _within(point: int) -> Any:
    def stop(number: int, call: Any) -> Any:
        if number == point:
            if call.func.__name__ in ("write", "pwrite"):
                fd, content, *place = call.args
                call.func(fd, memoryview(content).cast("B")[: max(1, len(content) // 2)], *place)
            _kill()
        return call()

    return stop


def _before(point: int, number: int, perform: bool) -> Any:
    def stop(count: int, call: Any) -> Any:
        if count != point:
            return call()
        if perform:
            call()
        # The system's own errors name the path, where the call has one.
        paths = [path for path in call.args[:1] if isinstance(path, str | os.PathLike)]
        raise OSError(number, os.strerror(number), *paths)

    return stop


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


NO_SPACE, INPUT_OUTPUT, STALE, QUOTA = errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT
