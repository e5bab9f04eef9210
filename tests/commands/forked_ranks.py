"""Ranks of one command, forked from a process that has imported torch.

Run as a program it is the process that forks; how its ranks ended is the answer to a job.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.commands.forker import Forker, answer_jobs, await_end, forker
from tests.free_port import free_port


@dataclass(frozen=True)
class Rank:
    """How a rank ended."""

    exit_code: int
    """Negative: the signal that killed it."""
    stdout: str
    stderr: str


class ForkedRanks:
    """The process that forks."""

    def __init__(self, forking: Forker) -> None:
        self._forking = forking

    def __call__(self, *arguments: object, num_ranks: int = 4, **job: Any) -> list[Rank]:
        """Run ``xrank`` with these arguments as so many ranks.

        Args:
            *arguments: of the command.
            num_ranks: how many.
            **job: ``launcher``, whose marks they carry: torchrun, srun, or bare; ``far``: each on a host of its own,
                as far as it can tell; ``window_nbytes``, ``round_nbytes``: of the engine; ``act``: (rank, what
                befalls it), see `befall`; ``environ``: further variables; ``more``: (rank, further arguments).
        """
        ended = self._forking.ask(arguments=list(map(str, arguments)), num_ranks=num_ranks, **job)
        return [Rank(*rank) for rank in ended]


@contextlib.contextmanager
def forked_ranks() -> Iterator[ForkedRanks]:
    """Start the process, and end it with all that it forked."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("XRANK_")}
    with forker(__name__, {**clean, "OMP_NUM_THREADS": "1", "XRANK_TIMEOUT": "20"}) as forking:
        yield ForkedRanks(forking)


# ---- what follows runs in that process and in its ranks


def _environ(job: dict[str, Any], rank: int, number: int, port: int) -> dict[str, str]:
    size, launcher = job["num_ranks"], job.get("launcher", "torchrun")
    if launcher == "torchrun":
        marks = {
            "TORCHELASTIC_RUN_ID": "made", "TORCHELASTIC_RESTART_COUNT": str(number), "RANK": str(rank),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(0 if job.get("far") else rank),
            "LOCAL_WORLD_SIZE": str(1 if job.get("far") else size),
        }  # fmt: skip
    elif launcher == "srun":
        marks = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_LOCALID": "0"}
    else:
        marks = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    return {**marks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **job.get("environ", {})}


def befall(what: str, moment: int) -> None:
    """Let something befall this process at its so manieth call that changes a file, or that sends to rank 0.

    ``kill`` and ``stop`` are signals, ``full`` is a disk that takes no more bytes of weights. The name of an errno lets
    the call fail that changes a file. ``before`` and ``after`` kill it at its so manieth request to a bucket.
    """
    if what in ("before", "after"):
        kill_at_request(what, moment)
        return
    from xrank.ranks.exchange import GatherExchange

    calls = 0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            if (
                what.startswith("E")
                and isinstance(arguments[0], int)
                and not stat.S_ISREG(os.fstat(arguments[0]).st_mode)
            ):
                return function(*arguments, **named)  # a pipe between threads
            calls += 1
            if calls == moment:
                if what not in ("kill", "stop"):
                    number = errno.ENOSPC if what == "full" else getattr(errno, what)
                    raise OSError(
                        number, os.strerror(number), *(path for path in arguments[:1] if isinstance(path, str))
                    )
                os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            return function(*arguments, **named)

        return call

    changing = ("pwrite", "write", "fsync", "rename", "unlink")
    names = {"kill": (*changing, "open"), "stop": (*changing, "open"), "full": ("pwrite",)}
    for name in names.get(what, (*changing, "mkdir", "ftruncate")):
        setattr(os, name, watched(getattr(os, name)))
    if what in ("kill", "stop"):
        GatherExchange.send = watched(GatherExchange.send)  # type: ignore[method-assign]
        GatherExchange.collect = watched(GatherExchange.collect)  # type: ignore[method-assign]


def kill_at_request(when: str, moment: int) -> None:
    """Kill this process before it sends its so manieth request to a bucket, or after that was answered."""
    from botocore.httpsession import URLLib3Session

    send, numbers = URLLib3Session.send, itertools.count(1)

    def counted(*arguments: Any, **named: Any) -> Any:
        is_last = next(numbers) == moment
        if is_last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = send(*arguments, **named)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    URLLib3Session.send = counted


def _be_rank(job: dict[str, Any], rank: int, environ: dict[str, str]) -> None:
    import xrank.ranks.waits
    from xrank.cli.main import main
    from xrank.engine import executor, rounds, windows

    os.environ.update(environ)
    if job.get("far"):
        xrank.ranks.waits.process_space = lambda: f"host {rank}"
    for module in (windows, executor):
        module.WINDOW_NBYTES = job.get("window_nbytes", windows.WINDOW_NBYTES)  # type: ignore[attr-defined]
    rounds.ROUND_NBYTES = job.get("round_nbytes", rounds.ROUND_NBYTES)
    if "act" in job and job["act"][0] == rank:
        befall(*job["act"][1:])
    more = job["more"][1] if "more" in job and job["more"][0] == rank else []
    sys.argv = ["xrank", *job["arguments"], *more]
    main()


def _fork(job: dict[str, Any], rank: int, environ: dict[str, str], files: Sequence[Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        os.setpgid(0, 0)
        _be_rank(job, rank, environ)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 98
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run(job: dict[str, Any], number: int, port: int) -> list[tuple[int, str, str]]:
    place = port if job.get("launcher", "torchrun") == "torchrun" else free_port()
    stopped = job["act"][0] if "act" in job and job["act"][1] == "stop" else None
    with contextlib.ExitStack() as opened:
        files = [
            tuple(opened.enter_context(tempfile.TemporaryFile("w+")) for _ in ("stdout", "stderr"))
            for _ in range(job["num_ranks"])
        ]
        pids = [_fork(job, rank, _environ(job, rank, number, place), files[rank]) for rank in range(len(files))]
        codes = {}
        for rank in sorted(range(len(pids)), key=lambda rank: rank == stopped):
            # One that stops goes on when all others have ended.
            status = await_end(pids[rank]) if rank == stopped else os.waitpid(pids[rank], 0)[1]
            codes[rank] = os.waitstatus_to_exitcode(status)
        for file in (file for pair in files for file in pair):
            file.seek(0)
        return [(codes[rank], out.read(), err.read()) for rank, (out, err) in enumerate(files)]


def _main() -> None:
    import torch.distributed  # noqa: F401  every rank has it when it is forked

    answer_jobs(_run)


if __name__ == "__main__":
    _main()
