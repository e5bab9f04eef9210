"""Real ranks for tests: gloo processes that start once and form a new world for every call.

Ranks are forked from a process that has imported torch, which takes a second or more; a new world of waiting ranks
takes some ten milliseconds. A rank that raises, dies or hangs becomes an error with its number and its stack. The
process that forks them is started as ``python -m xrank.testing.rank_pool <requests fd> <module>...``.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import itertools
import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from types import ModuleType
from typing import Any, NoReturn

from xrank import environment
from xrank.errors import RankFailedError, RankTimeoutError, UsageError, require, require_linux
from xrank.virtual.processes import DeviceFailure, collect_stacks
from xrank.words import ranks_text


@dataclass(frozen=True, slots=True)
class Task:
    """A call for a rank. It can be unpickled without the caller's modules."""

    rank: int
    world_size: int
    store_path: str
    """Path of a file that does not exist yet: the call's own rendezvous."""
    timeout_seconds: float
    search_path: tuple[str, ...]
    """``sys.path`` of the caller."""
    module: str
    module_file: str | None
    qualname: str
    arguments: bytes
    """Pickled (args, kwargs)."""
    by_rank: tuple[str, ...] = ()
    """Keywords of the function that each rank fills in: ``rank``, ``world_size``, both or none."""
    is_test: bool = False
    """Whether the module is a test's: then asserts are rewritten, and methods are bound to a new instance."""


def load_module(name: str, file: str | None, is_test: bool) -> ModuleType:
    """Import a module by its name if that leads to its file, else by the file."""
    known = sys.modules.get(name)
    if known is not None and name != "__main__" and (file is None or getattr(known, "__file__", None) == file):
        return known
    if not is_test and name != "__main__":
        spec = importlib.util.find_spec(name)
        if spec is not None and (file is None or spec.origin == file):
            return importlib.import_module(name)
    if file is None:
        raise ModuleNotFoundError(f"no module {name!r}, and no file to load it from", name=name)
    # A script's main part must not run again. So the module gets another name than __main__, as in multiprocessing.
    name = "__rank_main__" if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        if is_test:
            from _pytest.assertion.rewrite import rewrite_asserts

            with open(file, "rb") as handle:
                source = handle.read()
            tree = ast.parse(source, filename=file)
            rewrite_asserts(tree, source, file)
            exec(compile(tree, file, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - the user's own test
        else:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _call(task: Task) -> Any:
    for path in task.search_path:
        if path not in sys.path:
            sys.path.append(path)
    owner: Any = load_module(task.module, task.module_file, task.is_test)
    *outer, name = task.qualname.split(".")
    for part in outer:
        owner = getattr(owner, part)
    if task.is_test and isinstance(owner, type):
        owner = owner()
    function = getattr(owner, name)
    args, kwargs = pickle.loads(task.arguments)  # noqa: S301 - from our own parent
    values = {"rank": task.rank, "world_size": task.world_size}
    return function(*args, **kwargs, **{key: values[key] for key in task.by_rank})


def _serve(task: Task, connection: Connection) -> None:
    """Join the call's world, answer with the call's result or its failure, and leave the world."""
    distributed: Any = importlib.import_module("torch.distributed")  # its stubs hide FileStore
    joined = False
    try:
        distributed.init_process_group(
            "gloo",
            store=distributed.FileStore(task.store_path, task.world_size),
            rank=task.rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=task.timeout_seconds),
        )
        joined = True
        # A rank that fails at once would break connections that a slower rank is still making, and so make it unusable.
        distributed.barrier()
        answer, succeeded = pickle.dumps((True, _call(task), joined)), True
    except BaseException as error:  # pytest's outcomes are not Exceptions
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise
        answer, succeeded = pickle.dumps((False, _failure(task.rank, error), joined)), False
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(answer)
    # A failed rank closes its connections at once, so that the other ranks notice. A rank that succeeded keeps them
    # until the parent has all answers: a slower rank may still be connecting, or reading the last message.
    if succeeded:
        connection.recv_bytes()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    _forget_meshes()
    if not succeeded:
        connection.recv_bytes()


def _failure(rank: int, error: BaseException) -> DeviceFailure:
    raised_at, cause = time.monotonic(), None
    with contextlib.suppress(Exception):
        cause = pickle.dumps(error)
    summary = f"{type(error).__qualname__}: {error}"
    failure = RankFailedError(f"rank {rank} failed: {summary}", rank=rank, host=socket.gethostname(), cause=summary)
    failure.add_note(f"on rank {rank}:\n{''.join(traceback.format_exception(error))}")
    return DeviceFailure(raised_at, failure, cause)


def _forget_meshes() -> None:
    """Clear DTensor's caches of the last world, whose meshes name its groups and keep them, with three threads each."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    debug = importlib.import_module("torch.distributed.tensor.debug")
    for clear in ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(debug, clear, lambda: None)()
    for module, clear in (
        ("_redistribute", "_gen_transform_infos.cache_clear"),
        ("_redistribute", "clear_redistribute_planner_cache"),
        ("_collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
    ):
        with contextlib.suppress(AttributeError):  # another version of torch, without that cache
            attrgetter(clear)(importlib.import_module(f"torch.distributed.tensor.{module}"))()
    gc.collect()  # models and their meshes are often in cycles


def run_rank(log_fd: int, requests_fd: int, stacks_fd: int, life_fd: int) -> NoReturn:
    """Serve one call after another until the pool closes the connection; then end this forked process.

    The other end of the pipe `life_fd` is open while the pool's process runs.
    """

    def die_with_parent() -> None:
        os.read(life_fd, 1)
        os._exit(1)

    status = 0
    try:
        for fd in (1, 2):
            os.dup2(log_fd, fd)
        os.close(log_fd)
        threading.Thread(target=die_with_parent, daemon=True).start()
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, file=stacks_fd, all_threads=True)
        connection = Connection(requests_fd)
        connection.send_bytes(b"ready")
        while True:
            try:
                task = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own parent
            except EOFError:
                break
            _serve(task, connection)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


_REQUEST = struct.Struct("<qd")
"""A rank's pid and the seconds to wait for its end; pid 0 asks for a new rank."""
_ANSWER = struct.Struct("<q")
_STILL_RUNS = 1 << 32
_LAUNCH_VARIABLES = ("TORCHELASTIC_", "SLURM_", "OMPI_", "XRANK_")
_IMPORTED_EARLY = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint")
"""Modules that the starter imports if the pool's process has imported them: its ranks need them, too."""


class RankStarter:
    """The process, from the view of the pool; one thread uses it at a time."""

    def __init__(self, log_path: str) -> None:
        self.log_path = log_path
        self._socket, there = socket.socketpair()
        modules = [name for name in _IMPORTED_EARLY if name in sys.modules]
        environ = {k: v for k, v in environment.environ().items() if not k.startswith(_LAUNCH_VARIABLES)}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environ.pop(name, None)
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        if sys.platform == "linux":
            # Without this, gloo looks up the host's name, which takes seconds without a name server.
            environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with there, open(log_path, "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this package
                [sys.executable, "-m", "xrank.testing.rank_pool", str(there.fileno()), *modules],
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
            )

    def fork(self, fds: tuple[int, int, int, int], timeout_seconds: float) -> int | None:
        """Start a rank with the descriptors of `run_rank`; return its pid, None if the starter has ended or is late."""
        self._socket.settimeout(timeout_seconds)
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [_REQUEST.pack(0, 0.0)], fds)
            return self._answer()
        return None

    def await_end(self, pid: int, timeout_seconds: float) -> int | None:
        """Return the exit code of a rank, negative if a signal killed it, or None if it still runs."""
        self._socket.settimeout(None)
        with contextlib.suppress(OSError):
            self._socket.sendall(_REQUEST.pack(pid, timeout_seconds))
            status = self._answer()
            return None if status == _STILL_RUNS else status
        return None

    def close(self) -> None:
        """End the process, after its ranks."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _answer(self) -> int | None:
        content = self._socket.recv(_ANSWER.size, socket.MSG_WAITALL)
        return int(_ANSWER.unpack(content)[0]) if len(content) == _ANSWER.size else None


def _await_end(pid: int, timeout_seconds: float) -> int:
    deadline = time.monotonic() + timeout_seconds
    while True:
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return _STILL_RUNS
        time.sleep(0.002)


def main() -> None:
    """Serve the pool until it hangs up."""
    # Ctrl-C reaches the whole terminal group; the pool decides about the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in ("torch.distributed", *sys.argv[2:]):
        importlib.import_module(name)

    import torch

    # Under its own name, and not as __main__: the pool unpickles what ranks answer.
    from xrank.testing.rank_pool import run_rank as run_imported_rank

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # else a collection in a rank visits all imported objects, which copies their pages
    while True:
        request, fds, *_ = socket.recv_fds(requests, _REQUEST.size, 4)
        if not request:
            return
        pid, timeout_seconds = _REQUEST.unpack(request)
        if pid:
            answer = _await_end(pid, timeout_seconds)
        else:
            answer = os.fork()
            if not answer:
                requests.close()
                run_imported_rank(*fds)
            for fd in fds:
                os.close(fd)
        requests.sendall(_ANSWER.pack(answer))


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
            function: a function at a module's top level; torch.distributed is initialized inside it.
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
                f"{module}.{qualname} cannot be found by its name in a different process",
                got=qualname,
                want="a function of a module's top level",
                next_step="move it out of the function around it",
            )
        require("torch", "a test on ranks")
        require_linux("a test on ranks")
        arguments = pickle.dumps((tuple(args), dict(kwargs)))
        with self._lock:
            try:
                if self._folder is None:
                    self._folder = tempfile.TemporaryDirectory(prefix="xrank-ranks-")
                if self._starter is None:
                    self._starter = RankStarter(os.path.join(self._folder.name, "starter.log"))
                num_ready = len(self._ranks)
                while len(self._ranks) < world_size:
                    self._ranks.append(_Rank(len(self._ranks), self._folder.name, self._starter))
                deadline = time.monotonic() + _START_SECONDS
                for new in self._ranks[num_ready:]:
                    new.await_ready(deadline)
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
                results, failure = self._collect(world_size, time.monotonic() + timeout_seconds, timeout_seconds)
            except BaseException:
                # Ranks inside a call cannot serve the next one.
                self._end()
                raise
        if failure is not None:  # all ranks answered
            raise failure from failure.__cause__
        return results

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

    def _end(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()

    def _collect(self, count: int, deadline: float, timeout_seconds: float) -> tuple[list[Any], RankFailedError | None]:
        """Return the results, or an error of ranks that can serve the next call."""
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
                    succeeded, value, joined = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own ranks
                except (EOFError, ConnectionError):
                    failed.append((-math.inf, self._ranks[rank].death()))  # first: other failures follow from it
                    broken = True
                else:
                    if succeeded:
                        results[rank] = value
                    else:
                        # A rank that could not join is unusable: torch counts groups, and its count would differ from
                        # the other ranks' (torch/distributed/distributed_c10d.py: _World.group_count).
                        broken = broken or not joined
                        error = value.to_error()
                        if output := self._ranks[rank].output():
                            error.add_note(f"rank {rank} printed:\n{output}")
                        failed.append((value.raised_at, error))
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
            return [], first
        if stuck:
            hang = RankTimeoutError(
                f"{ranks_text(stuck)} did not return in {timeout_seconds:g} s",
                waiting_for=stuck,
                rank=stuck[0],
                got="no answer",
                want=f"an answer within {timeout_seconds:g} s",
                next_step="see the stack of each rank in the notes",
            )
            for rank in stuck:
                hang.add_note(f"stack of rank {rank}:\n{self._ranks[rank].stack()}")
            raise hang
        return [results[rank] for rank in range(count)], None


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
        how = "closed its connection" if status is None else f"exit code {status}"
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


if __name__ == "__main__":
    main()
