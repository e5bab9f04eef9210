"""This process among the ranks of a job: what torchrun, srun, mpirun and Keras say in environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from xrank.environment import setting
from xrank.errors import UsageError


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


class KerasJobs(Struct, frozen=True):
    """Keras' own variables about the processes of a job; None for those that are not set."""

    addresses: str | None
    num_processes: int | None
    process_id: int | None


def read_run_id(environ: Mapping[str, str]) -> str | None:
    """Return the id of this run: ``XRANK_RUN_ID``, else the launcher's, else None."""
    launch = read_launch(environ)
    return setting(environ, "XRANK_RUN_ID") if launch is None else launch.run_id


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the launcher's description of this process, or None without a launcher.

    torchrun's marks win over srun's and mpirun's, since ``srun torchrun`` is common and torchrun made the ranks.

    Raises:
        UsageError: a variable is not a number, or a rank is outside its world.
    """
    own_id = setting(environ, "XRANK_RUN_ID")
    if "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ and "WORLD_SIZE" in environ:
        return Launch(
            *_plain_ranks(environ),
            run_id=own_id or _torchrun_id(environ["TORCHELASTIC_RUN_ID"]),
            attempt=environ.get("TORCHELASTIC_RESTART_COUNT"),
            launcher="torchrun",
        )
    # salloc and sbatch shells carry SLURM_PROCID=0 and job-wide counts too: only a step has tasks that cooperate.
    if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
        local_rank = _number(environ, "SLURM_LOCALID", 0)
        return Launch(
            _number(environ, "SLURM_PROCID"),
            _number(environ, "SLURM_STEP_NUM_TASKS"),
            local_rank,
            _slurm_tasks_here(environ) or local_rank + 1,
            run_id=own_id or _slurm_id(environ),
            attempt=environ.get("SLURM_RESTART_COUNT"),
            launcher="srun",
        )
    if "OMPI_COMM_WORLD_RANK" in environ and "OMPI_COMM_WORLD_SIZE" in environ:
        local_rank = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0)
        return Launch(
            _number(environ, "OMPI_COMM_WORLD_RANK"),
            _number(environ, "OMPI_COMM_WORLD_SIZE"),
            local_rank,
            _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", local_rank + 1),
            run_id=own_id,
            attempt=None,
            launcher="mpirun",
        )
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return Launch(*_plain_ranks(environ), run_id=own_id, attempt=None, launcher="bare")
    return None


def read_keras_jobs(environ: Mapping[str, str]) -> KerasJobs:
    """Return ``KERAS_DISTRIBUTION_*`` as Keras reads them (keras/src/distribution/distribution_lib.py: initialize)."""
    count, place = (
        _number(environ, name) if name in environ else None
        for name in ("KERAS_DISTRIBUTION_NUM_PROCESSES", "KERAS_DISTRIBUTION_PROCESS_ID")
    )
    return KerasJobs(environ.get("KERAS_DISTRIBUTION_JOB_ADDRESSES"), count, place)


def _plain_ranks(environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    local_rank = _number(environ, "LOCAL_RANK", 0)
    return (
        _number(environ, "RANK"),
        _number(environ, "WORLD_SIZE"),
        local_rank,
        _number(environ, "LOCAL_WORLD_SIZE", local_rank + 1),
    )


def _torchrun_id(text: str) -> str | None:
    # Every torchrun without --rdzv-id and --standalone has the id "none" (torch/distributed/run.py: get_args_parser,
    # --rdzv-id default "none"): used as an id, it would make last week's states look like this run's.
    return None if text in ("", "none") else text


def _slurm_id(environ: Mapping[str, str]) -> str | None:
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    return f"{job}.{step}" if job and step else None


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
