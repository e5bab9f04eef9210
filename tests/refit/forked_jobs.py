"""A trainer of four ranks and an engine of two, forked from a process that has imported torch; one rank is struck.

Run as a program it is the process that forks; the results of its ranks are the answer to a job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.fused_engine import FusedEngine
from tests.conversion.forker import Forker, answer_jobs, fork_answer, forker, read_answer
from tests.refit.jobs import SIZES, engine_of, same, shard, trainer_layouts, wait_for_file

SIDES = {"trainer": 4, "engine": 2}


@contextlib.contextmanager
def forked_jobs() -> Iterator[Forker]:
    """Start the process, and end it with all that it forked."""
    with forker(__name__, {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}) as forking:
        yield forking


# ---- what follows runs in that process and in its ranks


def _train(job: dict[str, Any], rank: int) -> dict[str, Any]:
    import xrank
    from xrank.errors import XrankError

    layouts = trainer_layouts()
    held = shard(1, layouts, rank)
    # The same values, made by a function: ranks then read each other's weights in each step, too.
    transform = (lambda name, tensor: {name: tensor.clone()}) if job.get("transforms") else None
    offer = xrank.offer_weights(held, job["address"], layouts=layouts, transform=transform)
    offer.wait_for_takers(SIDES["engine"], timeout_seconds=30)
    answer: dict[str, Any] = {"error": None}
    for step in range(1, job["steps"] + 1):
        for name, tensor in shard(step, layouts, rank).items():
            held[name].copy_(tensor)
        if step == 3:
            _strike_if_asked(job, "trainer", rank)
        try:
            offer.publish(step, timeout_seconds=20)
        except XrankError as error:
            answer = {"error": str(error), "at": time.monotonic(), "step": step}
            break
    return _leave(job, answer, offer.close)


def _serve(job: dict[str, Any], rank: int) -> dict[str, Any]:
    import xrank
    from xrank.errors import XrankError

    engine = FusedEngine(SIZES, rank, SIDES["engine"])
    weights = xrank.take_weights(engine, job["address"], loader=engine.load_weights)
    answer: dict[str, Any] = {"error": None}
    for number in range(1, job["steps"] + 1):
        if number == 3:
            _strike_if_asked(job, "engine", rank)
        try:
            weights.update(timeout_seconds=20)
        except XrankError as error:
            answer = {"error": str(error), "at": time.monotonic()}
        answer["held"] = weights.step
        answer["right"] = weights.step is None or same(engine, engine_of(weights.step, rank, SIDES["engine"]))
        if answer["error"] is not None or not answer["right"]:
            break
    return _leave(job, answer, weights.close)


def _leave(job: dict[str, Any], answer: dict[str, Any], close: Callable[[], None]) -> dict[str, Any]:
    """Close when all ranks have an answer: an error then names the struck rank, and not one that followed it."""
    if job.get("what"):
        with open(f"{job['address']}/answers", "a", encoding="utf-8") as file:
            file.write(".")
        end = time.monotonic() + 25
        while time.monotonic() < end and os.stat(f"{job['address']}/answers").st_size < sum(SIDES.values()) - 1:
            time.sleep(0.005)
    close()
    return answer


def _strike_if_asked(job: dict[str, Any], side: str, rank: int) -> None:
    """Kill or stop this process after some seconds, and note when; it goes on meanwhile."""
    if (job.get("side"), job.get("victim")) != (side, rank):
        return
    me = os.getpid()
    if os.fork() == 0:
        time.sleep(job["after"])
        Path(job["address"], "struck").write_text(str(time.monotonic()))
        os.kill(me, signal.SIGKILL if job["what"] == "kill" else signal.SIGSTOP)
        os._exit(0)


def _be_rank(job: dict[str, Any], side: str, rank: int, number: int, port: int) -> dict[str, Any]:
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    name = f"{side}{number}"
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=SIDES[side])
    dist.barrier()
    return _train(job, rank) if side == "trainer" else _serve(job, rank)


def _run(job: dict[str, Any], number: int, port: int) -> list[Any]:
    ranks = {
        (side, rank): fork_answer(partial(_be_rank, job, side, rank, number, port), {"error": "no answer"})
        for side, size in SIDES.items()
        for rank in range(size)
    }
    answers: dict[tuple[str, int], Any] = {}
    victim = (job.get("side"), job.get("victim"))
    for key in sorted(ranks, key=lambda key: key == victim):
        answers[key] = read_answer(*ranks[key], is_stopped=key == victim)
    struck = Path(job["address"], "struck")
    when = float(struck.read_text()) if struck.exists() else None
    return [when, [[*key, answers[key]] for key in sorted(answers)]]


if __name__ == "__main__":
    answer_jobs(_run)


__all__ = ["SIDES", "forked_jobs", "wait_for_file"]
