"""One rank of a `RankPool`: a process that serves many calls, each in a new world."""

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
