"""Work in the background: one piece at a time in a process, in a thread of its own.

The interpreter waits at its end for a running piece, since the thread is not a daemon: what has begun is finished, also
after an exception in the main thread.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from xrank.errors import XrankError
from xrank.system import after_fork_in_child

Made = TypeVar("Made")

_logger = logging.getLogger(__name__)


class BackgroundWork(Future[Made], Generic[Made]):
    """A piece of work that runs in the background, as a `concurrent.futures.Future` that remembers whether it was read.

    Args:
        name: the work in a few words, for people.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.is_read = name, False

    def result(self, timeout: float | None = None) -> Made:
        """Return the result, or raise the failure, of finished work.

        Raises:
            TimeoutError: the work still runs after `timeout` seconds.
        """
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the failure of finished work, or None; errors as `result`."""
        failure = super().exception(timeout)
        self.is_read = True
        return failure

    def __repr__(self) -> str:
        state = "running" if not self.done() else "done" if super().exception() is None else "failed"
        return f"<{self.name} in the background: {state}>"


class _Last:
    """The last piece of work of this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.work: BackgroundWork[Any] | None = None


_last = _Last()
after_fork_in_child(_last.forget)  # the child has neither the thread nor the other ranks


def run_in_background(name: str, work: Callable[[], Made]) -> Future[Made]:
    """Start work in a thread of its own, and return at once. The last work must have ended: `await_background`.

    Args:
        name: the work in a few words, for people.
        work: an exception that it raises becomes that of the result.
    """
    assert _last.work is None or _last.work.done()
    made: BackgroundWork[Made] = BackgroundWork(name)
    made.set_running_or_notify_cancel()

    _last.work = made
    threading.Thread(target=_run, args=(made, work), name=f"xrank: {name}", daemon=False).start()
    return made


def _run(made: BackgroundWork[Made], work: Callable[[], Made]) -> None:
    try:
        result = work()
    except BaseException as error:
        # The result may never be read, so the failure is also logged.
        _logger.error("%s failed in the background: %s", made.name, error)
        # The error outlives the work, and its frames hold what the work held, such as the copy of a model.
        del work
        traceback.clear_frames(error.__traceback__)
        made.set_exception(error)
    else:
        made.set_result(result)


def await_background(name: str) -> None:
    """Wait until the last work in the background has ended.

    Args:
        name: the work that waits, for people.
    """
    work = _last.work
    if work is None or work.done():
        return
    _logger.info("%s waits for the end of %s", name, work.name)
    Future.exception(work)  # its own limits end it; not a reading by the caller


def raise_background_failure() -> None:
    """Raise the failure of the last work in the background, if no caller has read it. A second call does nothing.

    Raises:
        XrankError: that failure, or one that names it.
    """
    work = _last.work
    if work is None or work.is_read or not work.done():
        return
    failure = work.exception()
    if isinstance(failure, XrankError):
        raise failure
    if failure is not None:
        raise XrankError(
            f"{work.name} failed in the background: {type(failure).__name__}: {failure}",
            next_step="look at its cause, then repeat this call",
        ) from failure
