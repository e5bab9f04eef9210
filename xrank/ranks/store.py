"""How ranks find each other: the variables of launchers, and a store of small values under names."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from time import sleep
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from xrank.environment import setting
from xrank.errors import RankFailedError, RankTimeoutError, UsageError
from xrank.ranks.failure import Deadline

if TYPE_CHECKING:
    from xrank.ranks.tcp_store import StoreServer


class Launch(Struct, frozen=True):
    """This process among those that a launcher started."""

    rank: int
    world_size: int
    local_rank: int
    """Number of the process on this host."""
    local_world_size: int
    run_id: str | None
    """An id that all ranks of this run share and no other run has; None if it is not known."""
    attempt: str | None
    """Restart count of the run, as the launcher counts."""
    launcher: str
    """``torchrun``, ``srun``, ``mpirun``; ``bare`` for RANK and WORLD_SIZE without a launcher's marks."""

    def __post_init__(self) -> None:
        for kind, place, places in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= place < places:
                raise UsageError(
                    f"{self.launcher} gives {kind} {place} of {places}",
                    got=str(place),
                    want=f"a number from 0 to {places - 1}" if places > 0 else "at least one process",
                    next_step="correct or unset the launcher's variables in this process",
                )

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are on one host, which only torchrun proves."""
        return self.launcher == "torchrun" and self.local_world_size == self.world_size


class KerasJobs(Struct, frozen=True):
    """Keras' own variables about the processes of a job; None for those that are not set."""

    addresses: str | None
    num_processes: int | None
    process_id: int | None


def read_run_id(environ: Mapping[str, str]) -> str | None:
    """Return the id of this run: ``XRANK_RUN_ID``, else the launcher's, else None."""
    launch = read_launch(environ)
    return setting(environ, "XRANK_RUN_ID") if launch is None else launch.run_id


_LAUNCHERS = {
    "torchrun": (
        ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"),
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
    ),
    # salloc and sbatch shells carry SLURM_PROCID=0 and job-wide counts too: only a step has tasks that cooperate.
    "srun": (("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), "SLURM_LOCALID", "", "SLURM_RESTART_COUNT"),
    "mpirun": (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",
    ),
    "bare": (("RANK", "WORLD_SIZE"), "LOCAL_RANK", "LOCAL_WORLD_SIZE", ""),
}
"""Launcher -> names of its variables: (marks, local rank, number of ranks on this host, restart count); "" if it has
none. A launcher counts if all of its marks are set; the last two of them are the rank and the world size. torchrun
comes first, since ``srun torchrun`` is common and torchrun made the ranks."""


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the launcher's description of this process, or None without a launcher."""
    for launcher, (marks, local_name, local_count, attempt) in _LAUNCHERS.items():
        if any(mark not in environ for mark in marks):
            continue
        local_rank = _number(environ, local_name, 0)
        rank, world_size = (_number(environ, mark) for mark in marks[-2:])
        num_here = _number(environ, local_count, local_rank + 1)
        run_id = None
        if launcher == "torchrun" and environ["TORCHELASTIC_RUN_ID"] not in ("", "none"):
            # Every torchrun without --rdzv-id and --standalone has the id "none" (torch/distributed/run.py:
            # get_args_parser): used as an id, it would make last week's states look like this run's.
            run_id = environ["TORCHELASTIC_RUN_ID"]
        elif launcher == "srun":
            job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
            run_id = f"{job}.{step}" if job and step else None
            num_here = _slurm_tasks_here(environ) or num_here
        run_id = setting(environ, "XRANK_RUN_ID") or run_id
        return Launch(rank, world_size, local_rank, num_here, run_id, environ.get(attempt), launcher)
    return None


def read_keras_jobs(environ: Mapping[str, str]) -> KerasJobs:
    """Return ``KERAS_DISTRIBUTION_*`` as Keras reads them (keras/src/distribution/distribution_lib.py: initialize)."""
    count, place = (
        _number(environ, name) if name in environ else None
        for name in ("KERAS_DISTRIBUTION_NUM_PROCESSES", "KERAS_DISTRIBUTION_PROCESS_ID")
    )
    return KerasJobs(environ.get("KERAS_DISTRIBUTION_JOB_ADDRESSES"), count, place)


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return this node's number of tasks out of ``4(x2),3``, or None if the step does not give it."""
    node = _number(environ, "SLURM_NODEID", 0)
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part, re.ASCII)
        if match is None:
            return None
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return None


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise UsageError(
            f"environment variable {name} is {'missing' if text is None else repr(text)}, not a number",
            got=text,
            want="a number of 0 or more",
            next_step=f"correct or unset {name}",
        )
    return int(text)


_PREFIX = "xrank/"
_PAUSE_SECONDS = 0.001
_NUM_PAUSES = 1000
_CONNECT_PAUSE_SECONDS = 0.05
_AGENT_SECONDS = 300.0
"""Time in which torchrun's store, which is there before its ranks, must answer."""
_groups = count(1)


class Store(Protocol):
    """Values by name. No method waits for a value.

    Raises:
        RankFailedError: from every method; the store is gone, with the process that kept it.
    """

    def put(self, name: str, value: str) -> None:
        """Set a value that all ranks then see."""

    def peek(self, name: str) -> str | None:
        """Return the value, or None before it was put."""

    def remove(self, name: str) -> None:
        """Forget a value, if it is there."""

    def claim(self, name: str, value: str) -> str:
        """Set a value if no rank has claimed the name before, and return the value that counts."""

    def clone(self) -> Store:
        """Return the same store for another thread to use."""


class GroupStore:
    """A torch.distributed store (``torch.distributed.Store``), or a `TcpStore`, as a `Store`."""

    def __init__(self, store: Any, prefix: str = _PREFIX) -> None:
        self._store, self._prefix = store, prefix
        self._kept: GroupStore | None = None

    def keep(self, other: GroupStore) -> None:
        """Keep another store open as long as this one: rank 0's may be the server that this one is connected to."""
        self._kept = other

    def put(self, name: str, value: str) -> None:
        """Set a value that all ranks then see."""
        with _name_store_failure():
            self._store.set(self._prefix + name, value)

    def peek(self, name: str) -> str | None:
        """Return the value, or None before it was put."""
        with _name_store_failure():
            # get alone would block until there is one (torch/csrc/distributed/c10d/Store.hpp).
            if not self._store.check([self._prefix + name]):
                return None
            return str(self._store.get(self._prefix + name).decode())

    def remove(self, name: str) -> None:
        """Forget a value, if it is there."""
        # A store that keeps every value may stay so: no name is used twice.
        with suppress(RuntimeError, NotImplementedError, OSError):
            self._store.delete_key(self._prefix + name)

    def claim(self, name: str, value: str) -> str:
        """Set a value if no rank has claimed the name before, and return the value that counts."""
        with _name_store_failure():
            if self._store.add(f"{self._prefix}{name}/claims", 1) == 1:
                self.put(name, value)
                return value
        for _ in range(_NUM_PAUSES):
            if (claimed := self.peek(name)) is not None:
                return claimed
            sleep(_PAUSE_SECONDS)  # the first is about to put it, or has ended
        return ""

    def clone(self) -> GroupStore:
        """Return the same store for another thread, over a connection of its own."""
        self.peek("")  # raises at once if the store is gone: a new connection would be tried again and again
        with _name_store_failure():
            return GroupStore(self._store.clone(), self._prefix)

    @property
    def host(self) -> str | None:
        """The host of the store, as this process knows it; None if no host listens, as for a file."""
        store = self._store
        while hasattr(store, "underlying_store"):  # a prefix's
            store = store.underlying_store
        found = getattr(store, "host", None)
        return found if isinstance(found, str) else None

    def with_prefix(self, name: str) -> GroupStore:
        """Return a part of this store: a prefix keeps its names apart."""
        return GroupStore(self._store, f"{self._prefix}{name}/")


class LocalStore:
    """A `Store` inside one process: where that is the whole world, and for tests."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def put(self, name: str, value: str) -> None:
        """Set a value."""
        self._values[name] = value

    def peek(self, name: str) -> str | None:
        """Return the value, or None before it was put."""
        return self._values.get(name)

    def remove(self, name: str) -> None:
        """Forget a value, if it is there."""
        self._values.pop(name, None)

    def claim(self, name: str, value: str) -> str:
        """Set a value unless its name is claimed; return the value that counts."""
        return self._values.setdefault(name, value)

    def clone(self) -> LocalStore:
        """Return itself: each of its methods is one step of the interpreter."""
        return self


class LaunchedRanks:
    """All ranks that a launcher started, and their store; takes the place of a process group.

    Args:
        is_own: whether rank 0's process keeps the store, which then ends with it.
        on_end: called on the first of them when their work has ended.
        place: this rank's number and the number of ranks, for work that outlives the process groups; None: those of
            torch's world, or of the launcher.
        name: the same on all ranks, and no other group's.
    """

    def __init__(
        self,
        store: GroupStore,
        *,
        is_own: bool,
        on_end: Callable[[], None] = lambda: None,
        place: tuple[int, int] | None = None,
        name: str = "",
    ) -> None:
        self.store, self.group_name = store, name
        self.is_own = is_own
        self.place = place
        self._on_end = on_end

    def make_background(self, rank: int, world_size: int) -> LaunchedRanks:
        """Return the same ranks for work of another thread; each of the ranks makes this call once.

        They have names and a connection of their own, and nothing of torch's process groups is used.
        """
        store = self.store.clone().with_prefix("background")
        store.keep(self.store)
        return LaunchedRanks(store, is_own=self.is_own, place=(rank, world_size))

    def end(self, *, is_first: bool) -> None:
        """End this rank's part of the work."""
        if is_first:
            self._on_end()


def group_place() -> tuple[int, int] | None:
    """Return rank and world size of torch.distributed, or None if it is not initialized."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def find_store(group: Any, environ: Mapping[str, str]) -> GroupStore:
    """Return the store of a process group, or of the world if None.

    If torch.distributed is not initialized, a launcher's own store is used (torchrun's agent keeps one for its
    ranks: torch/distributed/elastic/agent/server/api.py).
    """
    if isinstance(group, LaunchedRanks):
        return group.store
    import torch.distributed

    distributed: Any = torch.distributed  # its stubs leave the stores out
    if distributed.is_available() and distributed.is_initialized():
        owner: Any = distributed.group.WORLD if group is None else group
        return GroupStore(owner.get_group_store())
    if _has_agent_store(environ):
        return _agent_store(environ)
    raise UsageError(
        "the ranks have no store to connect through: torch.distributed is not initialized",
        want="an initialized process group, or torchrun",
        next_step="call torch.distributed.init_process_group first",
    )


def connect_launched_ranks(launch: Launch, environ: Mapping[str, str], *, timeout_seconds: float) -> LaunchedRanks:
    """Return the ranks of a launcher as a new group: with torchrun's store, or with one that rank 0 keeps.

    Every rank must call it equally often.
    """
    name = f"group_{next(_groups)}"  # a name in a store is not used twice
    deadline = Deadline(timeout_seconds)
    if _has_agent_store(environ):
        return LaunchedRanks(_agent_store(environ, name, deadline=deadline), is_own=False, name=name)
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        origin = "of RANK and WORLD_SIZE" if launch.launcher == "bare" else f"that {launch.launcher} started"
        raise UsageError(
            f"the ranks {origin} have no address to connect through",
            got=f"MASTER_ADDR={address or ''} MASTER_PORT={port}",
            want="MASTER_ADDR, rank 0's host, and MASTER_PORT, a free port there, in the environment of every rank",
            next_step="set both, or start the ranks by torchrun, which does",
        )
    server = None
    if launch.rank == 0:
        from xrank.ranks.tcp_store import StoreServer  # one process does not need sockets

        try:
            server = StoreServer(int(port))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"rank 0 cannot open a store at {address}:{port} (MASTER_ADDR, MASTER_PORT): {_first_line(error)}",
                rank=0,
                next_step="give MASTER_PORT a port that is free on rank 0's host",
            ) from error
    store = _connect_store(address, int(port), deadline, server)
    return LaunchedRanks(store.with_prefix(name), is_own=True, name=name)


def _connect_store(address: str, port: int, deadline: Deadline, server: StoreServer | None = None) -> GroupStore:
    """Return a connection to the store at an address once something listens there; RankTimeoutError if nothing does."""
    from xrank.ranks.tcp_store import TcpStore  # one process does not need sockets

    while True:
        try:
            return GroupStore(TcpStore(address, port, deadline.timeout_seconds, server))
        except (OSError, OverflowError) as error:
            if deadline.has_passed:
                raise RankTimeoutError(
                    f"rank 0 opened no store at {address}:{port} within {deadline.timeout_seconds:g} s: "
                    f"{_first_line(error)}",
                    rank=0,
                    waiting_for=(0,),
                    next_step="look at rank 0's own error first; MASTER_ADDR must be its host, seen from all others",
                ) from error
            sleep(min(_CONNECT_PAUSE_SECONDS, deadline.remaining_seconds))


def _has_agent_store(environ: Mapping[str, str]) -> bool:
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "MASTER_ADDR" in environ


def _agent_store(environ: Mapping[str, str], *names: str, deadline: Deadline | None = None) -> GroupStore:
    deadline = deadline or Deadline(_AGENT_SECONDS)
    store = _connect_store(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), deadline)
    # The agent's store outlives a restart, and the next attempt must not find the names of the last one.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store.with_prefix("/".join(("xrank", f"attempt_{attempt}", *names)))


@contextmanager
def _name_store_failure() -> Iterator[None]:
    """Turn the store's own error (torch.distributed.DistError, a RuntimeError; a connection's) into ours."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        cause = f"the store that connects the ranks is gone: {_first_line(error)}"
        next_step = "look at the error of rank 0, or of the launcher, first"
        failure = RankFailedError(f"rank 0 failed, or the launcher: {cause}", rank=0, cause=cause, next_step=next_step)
        raise failure from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
