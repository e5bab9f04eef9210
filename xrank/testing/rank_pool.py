"""Real ranks for tests: gloo processes that start once and form a new world for every call.

Ranks are forked from a process that has imported torch, which takes a second or more; a new world of waiting ranks
takes some ten milliseconds. A rank that raises, dies or hangs becomes an error with its number and its stack.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from xrank.errors import RankFailedError, RankTimeoutError, UsageError, require, require_linux
from xrank.testing.rank_worker import Failure, RankStarter, Task
from xrank.virtual.processes import collect_stacks
from xrank.words import ranks_text

MAX_RANKS = 8
"""Each rank is a process that shares the memory of its imports, torch among them, with the others."""

_START_SECONDS = 120.0
_GRACE_SECONDS = 15.0
"""Time for the other ranks to notice a failed rank, before they are ended."""


class RankPool:
    """Runs functions on real gloo ranks.

    Call order: construct (starts nothing), `run` any number of times, `close`. One call runs at a time; other threads
    wait. Ranks are reused: module globals that a function sets are still there in a later call. Ranks end with `close`,
    and with this process, however it ends.
    """

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._starter: RankStarter | None = None
        self._lock = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._calls = itertools.count()

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 45.0
    ) -> list[Any]:
        """Call the function on every rank of a new gloo world, and return the results by rank.

        Args:
            world_size: 1 to 8.
            function: a function at a module's top level; torch.distributed is initialised inside it.
            args: arguments for each rank, pickled.
            timeout_seconds: time limit of the call, without the start of ranks.

        Raises:
            RankFailedError: a rank raised or died. It names the first; the traceback is a note, the exception the
                cause, and ``failures`` has all.
            RankTimeoutError: ranks did not return; their stacks are in the notes.
        """
        return self.run_by_name(
            world_size,
            function.__module__,
            getattr(sys.modules.get(function.__module__), "__file__", None),
            function.__qualname__,
            args,
            {},
            timeout_seconds=timeout_seconds,
        )

    def run_by_name(
        self,
        world_size: int,
        module: str,
        module_file: str | None,
        qualname: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        by_rank: tuple[str, ...] = (),
        is_test: bool = False,
        timeout_seconds: float = 45.0,
    ) -> list[Any]:
        """Run a function that is given by its place, as `run` does; ``by_rank`` and ``is_test`` as in `Task`."""
        __tracebackhide__ = True
        if not 1 <= world_size <= MAX_RANKS:
            raise UsageError(f"a pool has no {world_size} ranks", got=str(world_size), want=f"1 to {MAX_RANKS} ranks")
        if "<" in qualname:
            raise UsageError(
                f"{module}.{qualname} cannot be found by its name in another process",
                got=qualname,
                want="a function of a module's top level",
                next_step="move it out of the function around it",
            )
        require("torch", "a test on ranks")
        require_linux("a test on ranks")
        arguments = pickle.dumps((tuple(args), dict(kwargs)))
        with self._lock:
            try:
                self._grow(world_size)
                assert self._folder is not None
                store_path = os.path.join(self._folder.name, f"store-{next(self._calls)}")
                for rank in range(world_size):
                    self._ranks[rank].send(
                        Task(
                            rank=rank,
                            world_size=world_size,
                            store_path=store_path,
                            timeout_seconds=timeout_seconds,
                            search_path=tuple(sys.path),
                            module=module,
                            module_file=module_file,
                            qualname=qualname,
                            arguments=arguments,
                            by_rank=by_rank,
                            is_test=is_test,
                        )
                    )
                # The last rank removes the store's file, since ranks may use it until they leave; else `_end` does.
                return self._collect(world_size, time.monotonic() + timeout_seconds, timeout_seconds)
            except _SurvivedError as failure:
                raise failure.error from failure.error.__cause__
            except BaseException:
                # Ranks inside a call cannot serve the next one.
                self._end()
                raise

    def close(self) -> None:
        """End all ranks; a later `run` starts new ones."""
        with self._lock:
            self._end()
            if self._starter is not None:
                self._starter.close()
                self._starter = None
            if self._folder is not None:
                self._folder.cleanup()
                self._folder = None

    def _grow(self, count: int) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="xrank-ranks-")
        if self._starter is None:
            self._starter = RankStarter(os.path.join(self._folder.name, "starter.log"))
        num_ready = len(self._ranks)
        while len(self._ranks) < count:
            self._ranks.append(_Rank(len(self._ranks), self._folder.name, self._starter))
        deadline = time.monotonic() + _START_SECONDS
        for rank in self._ranks[num_ready:]:
            rank.await_ready(deadline)

    def _end(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()

    def _collect(self, count: int, deadline: float, timeout_seconds: float) -> list[Any]:
        __tracebackhide__ = True
        results: dict[int, Any] = {}
        failed: list[tuple[float, RankFailedError]] = []
        broken = False
        waiting = {self._ranks[rank].connection: rank for rank in range(count)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own ranks
                except (EOFError, ConnectionError):
                    failed.append((-math.inf, self._ranks[rank].death()))  # first: other failures follow from it
                    broken = True
                else:
                    if succeeded:
                        results[rank] = value
                    else:
                        broken = broken or not value.joined
                        failed.append((value.raised_at, _make_rank_error(rank, value, self._ranks[rank].output())))
                if failed:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        stuck = tuple(sorted(waiting.values()))
        if not stuck and not broken:
            for rank in range(count):
                self._ranks[rank].release()
        if failed:
            failures = tuple(error for _, error in sorted(failed, key=lambda pair: pair[0]))
            first = failures[0]
            first.failures = failures
            if stuck:
                first.add_note(f"ended, because they still waited for rank {first.rank}: {ranks_text(stuck)}")
            if broken or stuck:
                raise first
            raise _SurvivedError(first)
        if stuck:
            raise self._hang(stuck, timeout_seconds)
        return [results[rank] for rank in range(count)]

    def _hang(self, stuck: tuple[int, ...], timeout_seconds: float) -> RankTimeoutError:
        error = RankTimeoutError(
            f"{ranks_text(stuck)} did not return in {timeout_seconds:g} s",
            waiting_for=stuck,
            rank=stuck[0],
            got="no answer",
            want=f"an answer within {timeout_seconds:g} s",
            next_step="see the stack of each rank in the notes",
        )
        for rank in stuck:
            error.add_note(f"stack of rank {rank}:\n{self._ranks[rank].stack()}")
        return error


class _SurvivedError(Exception):
    """All ranks answered, some with an error: the pool can serve the next call."""

    def __init__(self, error: RankFailedError) -> None:
        super().__init__(error)
        self.error = error


class _Rank:
    """A worker process, from the view of its parent."""

    def __init__(self, rank: int, folder: str, starter: RankStarter) -> None:
        self.rank = rank
        self._starter = starter
        here, there = socket.socketpair()
        self.connection = Connection(here.detach())
        self._stacks, stacks_there = os.pipe()
        life_there, self._life = os.pipe()
        self._log_path = os.path.join(folder, f"rank-{rank}.log")
        self._seen = 0
        fds = (there.fileno(), stacks_there, life_there)
        try:
            with open(self._log_path, "wb") as log:
                pid = starter.fork((log.fileno(), *fds), _START_SECONDS)
        finally:
            there.close()
            os.close(stacks_there)
            os.close(life_there)
        self._pid = pid
        self._status: int | None = None
        if pid is None:
            self._log_path = starter.log_path  # why it could not start

    def await_ready(self, deadline: float) -> None:
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            raise RankTimeoutError(f"rank {self.rank} did not start", waiting_for=(self.rank,), rank=self.rank)
        try:
            self.connection.recv_bytes()
        except (EOFError, ConnectionError):
            raise self.death() from None

    def send(self, task: Task) -> None:
        try:
            self.connection.send_bytes(pickle.dumps(task))
        except (BrokenPipeError, ConnectionError):
            raise self.death() from None

    def release(self) -> None:
        """Let the rank leave the call's world, after all ranks have answered."""
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            self.connection.send_bytes(b"leave")

    def output(self) -> str:
        """Return the rank's output since the last call of this."""
        with open(self._log_path, "rb") as log:
            log.seek(self._seen)
            text = log.read()
        self._seen += len(text)
        return text.decode(errors="replace")[-10_000:]

    def death(self) -> RankFailedError:
        status = self._await_end()
        how = "closed its connection" if status is None else f"exit status {status}"
        if status is not None and status < 0:
            with contextlib.suppress(ValueError):
                how = f"killed by {signal.Signals(-status).name}"
        error = RankFailedError(f"rank {self.rank} died: {how}", rank=self.rank, host=socket.gethostname(), cause=how)
        if output := self.output():
            error.add_note(f"rank {self.rank} printed:\n{output}")
        return error

    def stack(self) -> str:
        """Return the stacks of the rank's threads. Its handler is C, and so answers from within any Python call."""
        (stack,) = collect_stacks([(self._stacks, lambda: self._send_signal(signal.SIGUSR1))])
        return stack or "(it does not react: stopped, or inside the kernel)"

    def _send_signal(self, number: int) -> None:
        if self._pid is not None:  # not yet awaited: nobody else has the number
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _await_end(self) -> int | None:
        if self._pid is not None:
            self._status = self._starter.await_end(self._pid, _GRACE_SECONDS)
            if self._status is not None:
                self._pid = None
        return self._status

    def end(self) -> None:
        self._send_signal(signal.SIGKILL)
        self._await_end()
        self.connection.close()
        os.close(self._stacks)
        os.close(self._life)


def _make_rank_error(rank: int, failure: Failure, output: str) -> RankFailedError:
    error = RankFailedError(
        f"rank {rank} failed: {failure.summary}", rank=rank, host=socket.gethostname(), cause=failure.summary
    )
    error.add_note(f"on rank {rank}:\n{failure.traceback}")
    if output:
        error.add_note(f"rank {rank} printed:\n{output}")
    if failure.error is not None:
        with contextlib.suppress(Exception):
            error.__cause__ = pickle.loads(failure.error)  # noqa: S301 - from our own ranks
    return error
