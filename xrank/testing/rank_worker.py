"""Ranks of a `RankPool`, which serve many calls, each in a new world; and the process that forks them.

So torch is imported once. That process is started as ``python -m xrank.testing.rank_worker <requests fd> <module>...``.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from operator import attrgetter
from types import ModuleType
from typing import Any, NoReturn

from xrank import environment


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


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a rank, in a form that can always be pickled."""

    raised_at: float
    """Time on the host's monotonic clock, which all its processes share: it orders failures."""
    summary: str
    traceback: str
    error: bytes | None
    """The pickled exception; None if it cannot be pickled."""
    joined: bool
    """Whether the rank had joined its world. A rank that could not join is unusable: torch counts groups, and its count
    would differ from the other ranks' (torch/distributed/distributed_c10d.py: _World.group_count)."""


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
            exec(_test_code(file), module.__dict__)  # noqa: S102 - the user's own test
        else:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _test_code(file: str) -> Any:
    from _pytest.assertion.rewrite import rewrite_asserts

    with open(file, "rb") as handle:
        source = handle.read()
    tree = ast.parse(source, filename=file)
    rewrite_asserts(tree, source, file)
    return compile(tree, file, "exec", dont_inherit=True)


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
    """Join the call's world, answer with the call's result or its `Failure`, and leave the world."""
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
        answer, succeeded = pickle.dumps((True, _call(task))), True
    except BaseException as error:  # pytest's outcomes are not Exceptions
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise
        answer, succeeded = pickle.dumps((False, _failure(error, joined))), False
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


def _failure(error: BaseException, joined: bool) -> Failure:
    raised_at = time.monotonic()
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301 - some exceptions only fail here
    except Exception:
        pickled = None
    summary = f"{type(error).__qualname__}: {error}"
    return Failure(raised_at, summary, "".join(traceback.format_exception(error)), pickled, joined)


def _forget_meshes() -> None:
    """Clear DTensor's caches of the last world, and free its meshes.

    The meshes name groups that have other names in the next world, and keep these groups: each has three threads, one
    of which polls a hundred times a second, until Python frees it.
    """
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


def _die_with_parent(life_fd: int) -> None:
    """Wait until the other end of the pipe is closed, which happens only when the parent ends."""
    os.read(life_fd, 1)
    os._exit(1)


def run_rank(log_fd: int, requests_fd: int, stacks_fd: int, life_fd: int) -> NoReturn:
    """Serve one call after another until the pool closes the connection; then end this forked process."""
    status = 0
    try:
        for fd in (1, 2):
            os.dup2(log_fd, fd)
        os.close(log_fd)
        threading.Thread(target=_die_with_parent, args=(life_fd,), daemon=True).start()
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
        with there, open(log_path, "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this package
                [sys.executable, "-m", "xrank.testing.rank_worker", str(there.fileno()), *modules],
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environ_of_ranks(),
            )

    def fork(self, fds: tuple[int, int, int, int], timeout_seconds: float) -> int | None:
        """Start a rank and return its pid, or None if the process has ended or does not answer.

        Args:
            fds: the rank's descriptors: its log, its connection to the pool, a pipe for its stacks, and a pipe whose
                other end is open while the pool's process runs.
            timeout_seconds: time for the imports.
        """
        self._socket.settimeout(timeout_seconds)
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [_REQUEST.pack(0, 0.0)], fds)
            return self._answer()
        return None

    def await_end(self, pid: int, timeout_seconds: float) -> int | None:
        """Return the exit status of a rank, negative if a signal killed it, or None if it still runs."""
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


def _environ_of_ranks() -> dict[str, str]:
    environ = {k: v for k, v in environment.environ().items() if not k.startswith(_LAUNCH_VARIABLES)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    if sys.platform == "linux":
        # Without this, gloo looks up the host's name, which takes seconds without a name server.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environ


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
    from xrank.testing import rank_worker

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
                rank_worker.run_rank(*fds)
            for fd in fds:
                os.close(fd)
        requests.sendall(_ANSWER.pack(answer))


if __name__ == "__main__":
    main()
