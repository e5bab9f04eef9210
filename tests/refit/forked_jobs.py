"""A trainer of four ranks and engines of two, forked from a process that has imported torch; one rank is struck.

Run as a program it is the process that forks; the results of its ranks are the answer to a job.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.fused_engine import FusedEngine
from tests.commands.forker import Forker, answer_jobs, fork_answer, forker, read_answer
from tests.refit.jobs import SIZES, engine_of, same, shard, trainer_layouts, wait_for_file
from xrank.ranks import loans

SIDES = {"trainer": 4, "engine": 2}
RELAYED_SIDES = {"trainer": 4, "relay": 2, "taker": 2}
"""The relay takes each step from the trainer, and the taker copies it from the relay. Then the trainer goes on."""
_EXTRA_STEPS = {"taker": 3}
"""Steps that a trainer publishes after a taker of a relay was struck, which concerns the relay in no way. After another
rank of an engine was struck it publishes one.
"""


@contextlib.contextmanager
def forked_jobs() -> Iterator[Forker]:
    """Start the process, and end it with all that it forked."""
    with forker(__name__, {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}) as forking:
        yield forking


# ---- what follows runs in that process and in its ranks


def _train(job: dict[str, Any], rank: int, number: int) -> dict[str, Any]:
    import xrank
    from xrank.errors import XrankError

    layouts = trainer_layouts()
    held = shard(1, layouts, rank)
    # The same values, made by a function: ranks then read each other's weights in each step, too.
    transform = (lambda name, tensor: {name: tensor.clone()}) if job.get("transforms") else None
    offer = xrank.offer_weights(held, job["address"], layouts=layouts, transform=transform)
    sides = _find_sides(job)
    if rank == 0 or not job.get("many"):
        offer.wait_for_takers(sum(sides.values()) - sides["trainer"], timeout_seconds=100)
    if rank == 0:
        Path(job["address"], "all-are-here").touch()
    answer: dict[str, Any] = {"error": None, "raised": False, "reports": []}
    last = Path(job["address"], f"last-{number}")
    for step in range(1, job["steps"] + 1):
        for name, tensor in shard(step, layouts, rank).items():
            held[name].copy_(tensor)
        if step == 3:
            _strike_if_asked(job, "trainer", rank)
        try:
            report = offer.publish(step, timeout_seconds=200 if job.get("many") else 40)
        except XrankError as error:
            answer |= {"error": str(error), "at": time.monotonic(), "raised": True}
            break
        answer["reports"].append([step, sorted(report.takers), dict(report.failed)])
        if report.failed and answer["error"] is None:
            entries = "; ".join(f"{role} failed: {cause}" for role, cause in report.failed.items())
            answer |= {"error": entries, "at": time.monotonic()}
            _write_once(last, step + _EXTRA_STEPS.get(job.get("side", ""), 1))
        if last.exists() and step >= int(last.read_text()):
            break
    return _leave(job, number, answer | {"step": step}, offer.close)


def _serve(job: dict[str, Any], side: str, rank: int, number: int) -> dict[str, Any]:
    import xrank
    from xrank.errors import XrankError

    rank, size = (0, 1) if job.get("many") else (rank, SIDES["engine"])  # many engines of one rank each
    engine = FusedEngine(SIZES, rank, size)
    weights = xrank.take_weights(engine, job["address"], loader=engine.load_weights, relay=side == "relay")
    answer: dict[str, Any] = {"error": None, "engine": weights._engine}
    if job.get("many"):  # none looks for a step before all have started, which takes the machine's cores
        wait_for_file(Path(job["address"], "all-are-here"), seconds=200, pause=0.1)
    if side == "taker":
        for other in range(RELAYED_SIDES["relay"]):
            wait_for_file(Path(job["address"], f"relay-is-here-{number}-{other}"))
    for count in range(1, job["steps"] + 1):
        if count == 3:
            _strike_if_asked(job, side, rank)
        try:
            if side == "taker":
                weights.copy_from_engines(timeout_seconds=40)
            else:
                with _in_turn(job, count):
                    weights.update(timeout_seconds=200 if job.get("many") else 40)
                if count == 1:
                    Path(job["address"], f"{side}-is-here-{number}-{rank}").touch()
        except XrankError as error:
            answer |= {"error": str(error), "at": time.monotonic()}
        answer["held"] = weights.step
        answer["right"] = weights.step is None or same(engine, engine_of(weights.step, rank, size))
        if answer["error"] is not None or not answer["right"]:
            break
    return _leave(job, number, answer, weights.close)


def _write_once(path: Path, number: int) -> None:
    """Write a number unless another rank has."""
    staged = path.with_suffix(f".{os.getpid()}")
    staged.write_text(str(number))
    with contextlib.suppress(FileExistsError):
        os.link(staged, path)


def _find_sides(job: dict[str, Any]) -> dict[str, int]:
    if job.get("many"):
        return {"trainer": 4, "engine": job["many"]}
    return RELAYED_SIDES if job.get("relays") else SIDES


def _leave(job: dict[str, Any], number: int, answer: dict[str, Any], close: Callable[[], None]) -> dict[str, Any]:
    """Close when all ranks have an answer: an error then names the struck rank, and not one that followed it."""
    from xrank.errors import XrankError

    if job.get("what") or job.get("relays"):
        answers = Path(job["address"], f"answers-{number}")
        with answers.open("a", encoding="utf-8") as file:
            file.write(".")
        count, end = sum(_find_sides(job).values()) - bool(job.get("what")), time.monotonic() + 25
        if job.get("side") == "taker":  # its relay goes on until the trainer closes
            count -= RELAYED_SIDES["relay"]
        while time.monotonic() < end and answers.stat().st_size < count:
            time.sleep(0.005)
    answer["close"] = None
    try:
        close()
    except XrankError as error:
        answer |= {"close": str(error)}
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
    if job.get("many"):
        _be_on_own_host(job["limit"])
        if side == "engine":
            return _serve(job, side, rank, number)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    name = f"{side}{number}"
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=_find_sides(job)[side])
    dist.barrier()
    return _train(job, rank, number) if side == "trainer" else _serve(job, side, rank, number)


def _be_on_own_host(limit: int) -> None:
    """Let this process be on a host of its own, as far as it can tell, with a soft limit of open files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    space = f"host of {os.getpid()}"
    loans.process_space = lambda: space


def _be_strangers(job: dict[str, Any]) -> None:
    """Connect to the trainer's ranks, and keep silent."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    wait_for_file(Path(job["address"], "trainer.json"))
    parts = json.loads(Path(job["address"], "trainer.json").read_text())["parts"]
    kept = []
    count = 0
    while True:  # they are sent away, and others come
        for _ in range(job["strangers"] if count == 0 else 20):
            stranger = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(OSError):
                stranger.connect("\0" + parts[count % len(parts)]["offer"]["socket"])
            kept.append(stranger)
            count += 1
        for stranger in kept[: -job["strangers"]]:
            stranger.close()
        del kept[: -job["strangers"]]
        time.sleep(0.2)


@contextlib.contextmanager
def _in_turn(job: dict[str, Any], step: int) -> Iterator[None]:
    """Let four of many engines take a step at once, as many as the machine can give time to."""
    if not job.get("many"):
        yield
        return
    with Path(job["address"], f"turn-{step}-{os.getpid() % 4}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(job: dict[str, Any], number: int, port: int) -> list[Any]:
    strangers = fork_answer(partial(_be_strangers, job), {})[0] if job.get("strangers") else None
    ranks = {
        (side, rank): fork_answer(partial(_be_rank, job, side, rank, number, port), {"error": "no answer"})
        for side, size in _find_sides(job).items()
        for rank in range(size)
    }
    answers: dict[tuple[str, int], Any] = {}
    victim = (job.get("side"), job.get("victim"))
    for key in sorted(ranks, key=lambda key: key == victim):
        answers[key] = read_answer(*ranks[key], is_stopped=key == victim)
    if strangers is not None:
        os.kill(strangers, signal.SIGKILL)
        os.waitpid(strangers, 0)
    struck = Path(job["address"], "struck")
    when = float(struck.read_text()) if struck.exists() else None
    return [when, [[*key, answers[key]] for key in sorted(answers)]]


if __name__ == "__main__":
    answer_jobs(_run)


__all__ = ["RELAYED_SIDES", "SIDES", "forked_jobs", "wait_for_file"]
