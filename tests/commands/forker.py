"""A process that has imported torch and forks ranks: a start of torch for each rank of each job would take seconds.

It takes jobs as JSON, one a line, and answers each with how its ranks ended, as JSON too.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Forker:
    """The process, as tests see it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, **job: Any) -> list[Any]:
        """Return what came of a job, by rank."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process that forks ended: {self._process.wait()}"
        return list(json.loads(answer))

    def num_processes(self) -> int:
        """Return how many ranks, and what they may have started, still run: all but the forker and its store."""
        with os.scandir("/proc") as entries:
            pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
        running = 0
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                running += os.getsid(pid) == self._process.pid
        return running - 2


@contextlib.contextmanager
def forker(module: str, environ: Mapping[str, str]) -> Iterator[Forker]:
    """Start a module as that process, and end it with all that it forked."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Forker(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def answer_jobs(run: Callable[[dict[str, Any], int, int], list[Any]]) -> None:
    """Do all jobs, in that process.

    Args:
        run: does one, given its number and the port of a store that no rank's end takes away, as torchrun's agent's.
    """
    _prepare()
    port = _serve_store()
    for number, line in enumerate(sys.stdin):
        print(json.dumps(run(json.loads(line), number, port)), flush=True)


def fork_answer(work: Callable[[], dict[str, Any]], nothing: dict[str, Any]) -> tuple[int, int]:
    """Fork a process that does the work and writes its answer, or `nothing` if it raised; return its pid and pipe."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    answer = nothing
    try:
        os.close(reading)
        answer = work()
    except BaseException:
        traceback.print_exc()
    finally:
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)


def read_answer(pid: int, reading: int, *, is_stopped: bool) -> Any:
    """Return the answer of a forked process, once it has ended; None if it was killed.

    Args:
        pid: the process.
        reading: its pipe, which is closed.
        is_stopped: whether it is stopped, or will be: it goes on now, and its answer waits in the pipe.
    """
    if is_stopped:
        await_end(pid)
    content = b""
    while part := os.read(reading, 65536):
        content += part
    os.close(reading)
    if not is_stopped:
        os.waitpid(pid, 0)
    return json.loads(content) if content else None


def await_end(pid: int) -> int:
    """Wait until a forked process ends, letting it go on wherever it has stopped or stops yet; return its status."""
    while os.WIFSTOPPED(status := os.waitpid(pid, os.WUNTRACED)[1]):
        os.kill(pid, signal.SIGCONT)
    return status


def _prepare() -> None:
    """Do once what each rank would do again after it is forked: import xrank, read the recipes, collect garbage."""
    import xrank
    from xrank.recipes.recipe_file import load_shipped_recipes

    for module in pkgutil.walk_packages(xrank.__path__, "xrank."):
        # Integrations import their frameworks, which may be absent.
        if not module.name.endswith(".__main__") and not module.name.startswith("xrank.integrations."):
            importlib.import_module(module.name)
    load_shipped_recipes()
    gc.collect()
    gc.freeze()  # a collection in a rank would look at all that torch made, and copy its pages


def _serve_store() -> int:
    """Fork a process that keeps a store; return its port."""
    import torch.distributed as dist

    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(0)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        while True:
            time.sleep(60)
    return int(os.read(reading, 10))
