"""Which processes share a conversion: those that a launcher started, and others only where they are told to."""

from __future__ import annotations

from collections.abc import Mapping

from xrank import environment
from xrank.environment import Launch
from xrank.errors import UsageError

__all__ = ["find_launch"]

_MARKS = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def find_launch(environ: Mapping[str, str], *, distributed: bool) -> tuple[Launch | None, tuple[tuple[str, str], ...]]:
    """Return this process' place among the ranks that share a conversion, None where it is alone; and what to note.

    RANK and WORLD_SIZE alone, which many a lone shell carries, count only if `distributed` says so.

    Raises:
        UsageError: the launcher's variables are wrong, or `distributed` is asked for where there are none.
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
                "--distributed was given, and nothing says which rank this is",
                want="RANK and WORLD_SIZE in the environment of every rank",
                next_step="start the ranks by torchrun, srun or mpirun, or set both",
            )
        return None, ()
    if launch.world_size == 1:
        return None, ()
    if launch.launcher == "bare" and not distributed:
        message = f"RANK={launch.rank} and WORLD_SIZE={launch.world_size} were left alone: one process did all of it"
        return None, (("one-process", f"{message}; --distributed shares it among such ranks"),)
    return launch, ()
