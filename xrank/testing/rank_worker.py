"""One rank of a `RankPool`: a process that lives through many calls, and belongs to another world in each.

Started as ``python -m xrank.testing.rank_worker <requests fd> <stacks fd> <life fd>``.
"""

from __future__ import annotations

import ast
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

__all__ = ["Failure", "Task"]


@dataclass(frozen=True, slots=True)
class Task:
    """A call as it travels to a rank: nothing in it needs the caller's modules to be unpickled."""

    rank: int
    world_size: int
    store_path: str
    """A file that does not exist yet: the call's own rendezvous."""
    timeout_seconds: float
    search_path: tuple[str, ...]
    """``sys.path`` of the caller."""
    module: str
    module_file: str | None
    qualname: str
    arguments: bytes
    """Pickled (args, kwargs)."""
    told: tuple[str, ...] = ()
    """Which of ``rank`` and ``world_size`` the function takes as keywords."""
    is_test: bool = False
    """Whether the module is a test's: imported with pytest's readable asserts, methods bound to a fresh instance."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank raised, in a form that always travels."""

    raised_at: float
    """On the host's monotonic clock, which all its processes share: whose failure came first."""
    summary: str
    traceback: str
    error: bytes | None
    """The pickled exception, where it can be pickled."""
    joined: bool
    """Whether the rank was in its world by then. One that could not join is spoiled: torch counts groups, and its count
    would differ from the other ranks' (torch/distributed/distributed_c10d.py: _World.group_count)."""


def load_module(name: str, file: str | None, is_test: bool) -> ModuleType:
    """Import a module by its name where that leads to its file, else by the file."""
    known = sys.modules.get(name)
    if known is not None and name != "__main__" and (file is None or getattr(known, "__file__", None) == file):
        return known
    if not is_test and name != "__main__":
        spec = importlib.util.find_spec(name)
        if spec is not None and (file is None or spec.origin == file):
            return importlib.import_module(name)
    if file is None:
        raise ModuleNotFoundError(f"no module {name!r}, and no file to load it from", name=name)
    # A script's main part must not run again, so it gets another name than __main__, as multiprocessing does.
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
    told = {"rank": task.rank, "world_size": task.world_size}
    return function(*args, **kwargs, **{key: told[key] for key in task.told})


def _serve(task: Task, connection: Connection) -> None:
    """Join the call's world, answer whether the call succeeded and its result or `Failure`, and leave the world."""
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
        # One that fails at once would break the connections that a slower one is still making, and so spoil it.
        distributed.barrier()
        answer, succeeded = pickle.dumps((True, _call(task))), True
    except BaseException as error:  # pytest's outcomes are no Exceptions
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise
        answer, succeeded = pickle.dumps((False, _failure(error, joined))), False
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(answer)
    # A rank that failed takes its connections down at once, so that the others hear of it. One that succeeded keeps
    # them until the parent has all answers: a slower rank may still be connecting, or reading the last message.
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
    """Drop what DTensor remembers of the last world: its meshes name groups that the next world names otherwise."""
    if "torch.distributed.tensor" in sys.modules:
        debug = importlib.import_module("torch.distributed.tensor.debug")
        for clear in ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
            getattr(debug, clear, lambda: None)()


def _die_with_parent(life_fd: int) -> None:
    """Wait until the other end of the pipe is gone, which only happens when the parent is."""
    os.read(life_fd, 1)
    os._exit(1)


def main() -> None:
    """Serve one call after another until the parent hangs up."""
    requests_fd, stacks_fd, life_fd = (int(text) for text in sys.argv[1:4])
    threading.Thread(target=_die_with_parent, args=(life_fd,), daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks_fd, all_threads=True)
    # Ctrl-C reaches the whole terminal group; the parent decides what becomes of the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    import torch

    torch.set_num_threads(1)
    connection = Connection(requests_fd)
    connection.send_bytes(b"ready")
    while True:
        try:
            task = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own parent
        except EOFError:
            return
        _serve(task, connection)


if __name__ == "__main__":
    # Tasks are pickled as of the importable module, not of __main__.
    from xrank.testing import rank_worker

    rank_worker.main()
