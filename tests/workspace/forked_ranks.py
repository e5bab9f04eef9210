"""Ranks as forked processes, which may be killed and stopped: a program, and the function that runs it.

``python -m tests.workspace.forked_ranks`` imports torch once, and reads runs from its stdin, a line of JSON each. For a
run it forks a process, which forks the ranks of each job, calls the function with each rank's number, and writes their
results as JSON. A rank that was killed has the result None; one that hung fails the run, with its stacks.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any

_WAIT_SECONDS = 100
_ENVIRON = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
_GLOO = "connectFullMesh"
"""A busy machine now and then lets gloo's own meeting fail, before any test begins."""


def run_ranks(function: Callable[..., Any], count: int, argument: str = "") -> list[Any]:
    """Return the results of ranks that call a function of a test module; in processes that are gone afterwards."""
    return run_many(function, [(count, argument)])[0]


def run_many(function: Callable[..., Any], jobs: list[tuple[int, str]]) -> list[list[Any]]:
    """Return the results of several jobs of ranks, one after another: `run_ranks` for each count and argument."""
    with tempfile.NamedTemporaryFile("r") as answers, tempfile.NamedTemporaryFile("r") as complaints:
        words = [function.__module__, function.__name__, jobs, answers.name]
        run = {"environ": {**os.environ, **_ENVIRON}, "folder": os.getcwd(), "stderr": complaints.name, "words": words}
        program = _program()
        program.stdin.write(json.dumps(run) + "\n")
        program.stdin.flush()
        pid = int(program.stdout.readline())
        limit = Timer(_WAIT_SECONDS + 60 + 20 * len(jobs), os.killpg, (pid, signal.SIGKILL))
        limit.start()
        try:
            status = int(program.stdout.readline())
        finally:
            limit.cancel()
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # children of ranks
        assert status == 0, complaints.read()[-3000:]
        results: list[list[Any]] = json.load(answers)
        for of_job in results:
            assert not any(isinstance(one, dict) and "traceback" in one for one in of_job), (of_job, complaints.read())
    return results


@cache
def _program() -> Any:
    """Return the program that forks; it lives as long as this process, as all runs would import the same."""
    words = [sys.executable, "-m", "tests.workspace.forked_ranks"]
    made = subprocess.Popen(
        words, env={**os.environ, **_ENVIRON}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(made.communicate)
    return made


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """Return a call's value, or what its error contains, and the seconds that it took."""
    begun = time.monotonic()
    try:
        value = call()
    except BaseException as error:
        return {
            "error": type(error).__name__, "rank": getattr(error, "rank", None), "text": _text(error),
            "seconds": time.monotonic() - begun, "when": time.monotonic(),
        }  # fmt: skip
    return {"value": value, "seconds": time.monotonic() - begun}


def gather(value: int, ranks: list[int], **options: Any) -> list[int]:
    """Gather a small tensor and return the values that came."""
    import torch

    from xrank.workspace.parallel import get_tensors_parallel

    with get_tensors_parallel(torch.tensor(value), ranks, **options) as parts:
        return [int(part) for part in parts]


def kill_self() -> None:
    """End this rank as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def _text(error: BaseException) -> str:
    with suppress(Exception):
        return f"{error} {getattr(error, 'got', '')}"
    return "no text"


def serve() -> None:
    """Fork a process for each run that comes, and answer with its number, then with its exit code."""
    import torch.distributed

    import xrank.workspace.parallel  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        run = json.loads(line)
        if (pid := os.fork()) == 0:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(0, 1)
            os.dup2(os.open(run["stderr"], os.O_WRONLY), 2)
            os.chdir(run["folder"])
            os.environ.clear()
            os.environ.update(run["environ"])
            try:
                main(*run["words"])
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


def main(module: str, name: str, jobs: list[tuple[int, str]], file: str) -> None:
    """Run the jobs, whose stores are this process's, and write their results."""
    function = getattr(importlib.import_module(module), name)
    results = []
    for count, argument in jobs:
        one = _run(function, count, argument)
        if any(isinstance(result, dict) and _GLOO in result.get("traceback", "") for result in one):
            one = _run(function, count, argument)
        results.append(one)
    Path(file).write_text(json.dumps(results))


def _run(function: Callable[..., Any], count: int, argument: str) -> list[Any]:
    """Return the results of one job's ranks.

    The store comes after the forks: its thread may hold a lock of the C library, which a child would inherit locked.
    """
    import torch.distributed as dist

    ranks = []
    for rank in range(count):
        (reading, writing), (port, told_port) = os.pipe(), os.pipe()
        if (pid := os.fork()) == 0:
            faulthandler.dump_traceback_later(_WAIT_SECONDS, exit=True)
            result: Any = {"traceback": "it wrote no result"}
            try:
                number = int(os.read(port, 10))
                store = dist.TCPStore("127.0.0.1", number, is_master=False, wait_for_workers=False)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
                result = function(rank, *([argument] if argument else []))
            except BaseException:
                result = {"traceback": traceback.format_exc()}
            finally:
                with os.fdopen(writing, "w") as pipe:  # os.write may write a part: pipes have room for 64 KiB
                    pipe.write(json.dumps(result))
                os._exit(0)
        os.close(writing)
        os.close(port)
        ranks.append((pid, reading, told_port))
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, _, told_port in ranks:
        os.write(told_port, str(server.port).encode())
        os.close(told_port)
    results = []
    for pid, reading, _ in ranks:
        content = b""
        while part := os.read(reading, 1 << 16):
            content += part
        os.close(reading)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and not content:
            content = json.dumps({"traceback": f"no result after {_WAIT_SECONDS} s; stderr has the stacks"}).encode()
        results.append(json.loads(content) if content else None)
    return results


if __name__ == "__main__":
    serve()
