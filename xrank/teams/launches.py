"""Finds the processes that share a conversion: those of a launcher, of a process group, or this process alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from xrank import environment
from xrank.environment import Launch
from xrank.errors import UsageError, option
from xrank.gather.arguments import find_place
from xrank.stores.url import is_url
from xrank.teams.team import Team
from xrank.writers.output_place import OutputPlace

# Only launchers set these: beside them wrong variables are a fault, and without them what a shell has left over.
_MARKS = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def find_launch(environ: Mapping[str, str], *, distributed: bool) -> tuple[Launch | None, tuple[tuple[str, str], ...]]:
    """Return this process's place among the ranks that share a conversion, or None, and notes for the report.

    RANK and WORLD_SIZE alone, which many shells export, count only with `distributed`.

    Raises:
        UsageError: the launcher's variables are wrong, or missing although `distributed` is set.
    """
    try:
        launch = environment.read_launch(environ)
    except UsageError:
        if distributed or not environ.keys().isdisjoint(_MARKS):
            raise
        return None, ()
    if launch is None:
        if distributed:
            raise UsageError(
                f"{option('distributed', True)} was given, but the environment does not name this rank",
                want="RANK and WORLD_SIZE in the environment of every rank",
                next_step="start the ranks by torchrun, srun or mpirun, or set both",
            )
        return None, ()
    if launch.world_size == 1:
        return None, ()
    if launch.launcher == "bare" and not distributed:
        message = f"RANK={launch.rank} and WORLD_SIZE={launch.world_size} were left alone: one process did all of it"
        return None, (("one-process", f"{message}; {option('distributed', True)} shares it among such ranks"),)
    return launch, ()


def find_launched_team(out: str, *, distributed: bool, timeout_seconds: float) -> Team:
    """Return the team of all ranks that a launcher started, or of this process alone.

    Args:
        out: a path whose folder carries messages between hosts; beside a URL, sockets do.
        distributed: whether a launcher's ranks share the work; without it, each works alone.
        timeout_seconds: how long a live rank may take to arrive.

    Raises:
        UsageError: as `find_launch`.
        RankTimeoutError: rank 0 did not open its store in time.
    """
    launch = find_launch(environment.environ(), distributed=True)[0] if distributed else None
    return Team() if launch is None else _team_of_launch(launch, out, timeout_seconds)


def find_group_team(group: Any, place: str, *, timeout_seconds: float, call: str, joins_launch: bool = True) -> Team:
    """Return the team of a process group, of the world where the group is None, or of this process alone.

    Args:
        group: torch's process group, or None.
        place: a path whose folder carries messages between hosts; beside a URL, sockets do.
        timeout_seconds: how long a live rank may take to arrive.
        call: name of the function that the user called.
        joins_launch: whether a launcher's ranks are a team where torch.distributed is not initialised.

    Raises:
        UsageError: this rank is not in the group.
        RankTimeoutError: ranks did not arrive.
        RankFailedError: a rank failed, or has ended.
        ContradictionError: ranks wait for each other in different calls.
    """
    from xrank.gather.groups import WorkWatch
    from xrank.ranks.appointment import appoint

    file, line = find_place()
    watch = WorkWatch(group, f"{call}, called at {file}:{line}") if _is_initialised() else None
    found = appoint(group, environment.environ(), timeout_seconds=timeout_seconds, watch=watch)
    if found is not None:
        from xrank.teams.shared_team import SharedTeam  # one process does not need this module

        return SharedTeam(
            found.group,
            found.ranks,
            found.rank,
            None if found.is_one_host else _message_folder(place),
            num_here=found.num_here,
            is_one_host=found.is_one_host,
            timeout_seconds=timeout_seconds,
        )
    if joins_launch and not _is_initialised():
        launch, _ = find_launch(environment.environ(), distributed=False)
        if launch is not None:
            return _team_of_launch(launch, place, timeout_seconds)
    return Team()


def _team_of_launch(launch: Launch, out: str, timeout_seconds: float) -> Team:
    from xrank.ranks.store import connect_launched_ranks
    from xrank.teams.shared_team import SharedTeam

    group = connect_launched_ranks(launch, environment.environ(), timeout_seconds=timeout_seconds)
    # Only torchrun proves that all ranks are on one host; messages between hosts also work on one host.
    is_one_host = launch.launcher == "torchrun" and launch.local_world_size == launch.world_size
    return SharedTeam(
        group,
        range(launch.world_size),
        launch.rank,
        None if is_one_host else _message_folder(out),
        num_here=launch.local_world_size or 1,
        is_one_host=is_one_host,
        timeout_seconds=timeout_seconds,
    )


def _message_folder(place: str) -> str | None:
    """Return the folder beside a path that carries messages between hosts; None: sockets do, as beside a URL."""
    return None if is_url(place) else OutputPlace.from_path(place).parent


def find_world() -> tuple[int, int]:
    """Return this process's rank in the world of torch.distributed, and the world's size; (0, 1) without one."""
    if not _is_initialised():
        return 0, 1
    distributed: Any = sys.modules["torch.distributed"]
    return distributed.get_rank(), distributed.get_world_size()


def _is_initialised() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
