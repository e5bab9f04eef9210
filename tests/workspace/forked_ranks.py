"""Ranks as forked processes, which may be killed and stopped: a program, and the function that runs it.

``python -m tests.workspace.forked_ranks MODULE FUNCTION [[COUNT, ARGUMENT], ...] FILE`` forks ranks for each job, calls
the function with each rank's number, and writes their results as JSON. A rank that was killed has the result None;
one that hung fails the run, with its stacks.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_WAIT_SECONDS = 100
_GLOO = "connectFullMesh"
"""A busy machine now and then lets gloo's own meeting fail, before any test begins."""


def run_ranks(function: Callable[..., Any], count: int, argument: str = "") -> list[Any]:
    """Return the results of ranks that call a function of a test module; in processes that are gone afterwards."""
    return run_many(function, [(count, argument)])[0]


def run_many(function: Callable[..., Any], jobs: list[tuple[int, str]]) -> list[list[Any]]:
    """Return the results of several jobs of ranks, one after another: `run_ranks` for each count and argument."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.NamedTemporaryFile("r") as answers:
        words = [function.__module__, function.__name__, json.dumps(jobs), answers.name]
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.workspace.forked_ranks", *words],
            env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            _, complaints = program.communicate(timeout=_WAIT_SECONDS + 60 + 20 * len(jobs))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
        assert program.returncode == 0, complaints[-3000:]
        results: list[list[Any]] = json.load(answers)
    for of_job in results:
        assert not any(isinstance(one, dict) and "traceback" in one for one in of_job), (of_job, complaints)
    return results


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


def main(module: str, name: str, jobs: str, file: str) -> None:
    """Run the jobs, whose stores are this process's, and write their results."""
    import torch

    torch.set_num_threads(1)
    function = getattr(importlib.import_module(module), name)
    results = []
    for count, argument in json.loads(jobs):
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
                import traceback

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
    main(*sys.argv[1:5])
