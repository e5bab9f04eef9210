"""Ranks as forked processes, which may be killed and stopped: a program, and the function that runs it.

``python -m tests.gather.forked_ranks MODULE FUNCTION COUNT [ARGUMENT]`` forks ranks, calls the function with each
rank's number, and prints their results as a JSON list. A rank that was killed has the result None.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_WAIT_SECONDS = 100


def run_ranks(function: Callable[..., Any], count: int, argument: str = "") -> list[Any]:
    """Return the results of ranks that call a function of a test module; in processes that are gone afterwards."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    words = [function.__module__, function.__name__, str(count), argument]
    job = subprocess.Popen(
        [sys.executable, "-m", "tests.gather.forked_ranks", *words],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        answers, complaints = job.communicate(timeout=_WAIT_SECONDS + 60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, complaints[-3000:]
    results: list[Any] = json.loads(answers.splitlines()[-1])
    assert not any(isinstance(result, dict) and "traceback" in result for result in results), (results, complaints)
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

    from xrank.gather.parallel import get_tensors_parallel

    with get_tensors_parallel(torch.tensor(value), ranks, **options) as parts:
        return [int(part) for part in parts]


def kill_self() -> None:
    """End this rank as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def _text(error: BaseException) -> str:
    with suppress(Exception):
        return f"{error} {getattr(error, 'got', '')}"
    return "no text"


def main(module: str, name: str, count: str, argument: str) -> None:
    """Run the ranks; the store is this process's."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    function = getattr(importlib.import_module(module), name)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(int(count)):
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            faulthandler.dump_traceback_later(_WAIT_SECONDS, exit=True)
            result: Any = {"traceback": "it wrote no result"}
            try:
                own = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
                dist.init_process_group("gloo", store=own, rank=rank, world_size=int(count))
                result = function(rank, *([argument] if argument else []))
            except BaseException:
                import traceback

                result = {"traceback": traceback.format_exc()}
            finally:
                os.write(writing, json.dumps(result).encode())
                os._exit(0)
        os.close(writing)
        ranks.append((pid, reading))
    results = []
    for pid, reading in ranks:
        content = b""
        while part := _read(reading):
            content += part
        os.waitpid(pid, 0)
        results.append(json.loads(content) if content else None)
    print(json.dumps(results))


def _read(fd: int) -> bytes:
    select.select([fd], [], [])
    return os.read(fd, 1 << 16)


if __name__ == "__main__":
    main(*[*sys.argv[1:], ""][:4])
