"""Histories of live gathers drawn from a seed: what each rank does in each step, and what the rules say it must get.

A step is one gather of a list of ranks, in which at most one rank does something wrong. Ranks that are not in the list
go on to the next step, except where a step begins with all ranks: a wrong list of ranks fails the gather that waits for
its rank, and only then the drawn one.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.workspace.forked_ranks import attempt, kill_self
from xrank.workspace.parallel import get_tensors_parallel

EVENTS = (
    *("none",) * 6,
    *("wrong argument", "wrong argument", "wrong ranks", "raise in the body", "raise in the body", "other order"),
    *("stop", "die before", "die in the body", "die after"),
)
WRONG: tuple[dict[str, Any], ...] = ({"timeout_seconds": 0}, {"key": (1, 2)}, {"workspace_path": "https://a/b"})
_SIZES = (1, 3000, 60_000)


@dataclass(frozen=True)
class Step:
    """One gather of all live ranks in a list."""

    number: int
    ranks: tuple[int, ...]
    event: str
    culprit: int
    through_directory: bool
    size: int
    wrong: int
    begins_together: bool
    dead: frozenset[int]
    """Ranks that died in earlier steps."""

    def value(self, rank: int) -> int:
        """Return the elements of a rank's tensor."""
        return 100 * self.number + rank


def draw(seed: int) -> tuple[int, list[Step]]:
    """Return the number of ranks, and the steps."""
    chosen = random.Random(f"history {seed}")
    world = chosen.randint(2, 6)
    lists = [tuple(chosen.sample(range(world), chosen.randint(2, world))) for _ in range(3)]
    steps: list[Step] = []
    dead: set[int] = set()
    together = False
    for number in range(chosen.randint(5, 9)):
        ranks = chosen.choice(lists)
        event = chosen.choice(EVENTS)
        live = [rank for rank in ranks if rank not in dead]
        if len(live) < len(ranks):
            event = "none"  # the dead rank is what fails it
        is_delicate = event in ("wrong ranks", "other order")
        culprit = chosen.choice(live or ranks)
        begins_together = together or is_delicate or chosen.random() < 0.3
        through_directory, size, wrong = chosen.random() < 0.25, chosen.choice(_SIZES), chosen.randrange(3)
        steps.append(
            Step(number, ranks, event, culprit, through_directory, size, wrong, begins_together, frozenset(dead))
        )
        together = is_delicate
        if event.startswith("die"):
            dead.add(culprit)
    return world, steps


def run_history(rank: int, argument: str) -> list[dict[str, Any]]:
    """Return what a rank gets in each step in which it takes part."""
    seed, directory = argument.split(" ", 1)
    world, steps = draw(int(seed))
    store = dist.distributed_c10d._get_default_store()
    results = []
    with get_tensors_parallel(None, range(world)):  # a rank that dies before its first gather has left no sign
        pass
    for step in steps:
        if rank in step.dead:
            break
        if step.begins_together:
            num_live = world - len(step.dead)
            store.add(f"step {step.number}", 1)
            while store.add(f"step {step.number}", 0) < num_live:
                time.sleep(0.002)
        if rank in step.ranks:
            result = attempt(lambda: _take_part(step, rank, directory))  # noqa: B023
            results.append({"step": step.number, **result})
            if step.event == "die after" and rank == step.culprit:
                kill_self()
    return results


def _take_part(step: Step, rank: int, directory: str) -> list[list[int]]:
    ranks, options, acts = list(step.ranks), {}, step.culprit == rank
    if step.through_directory:
        options["workspace_path"] = directory
    if acts and step.event == "wrong argument":
        options |= WRONG[step.wrong]
    if acts and step.event == "wrong ranks":
        ranks = [*ranks, ranks[0]]
    if acts and step.event == "other order":
        ranks.reverse()
    if acts and step.event == "die before":
        kill_self()
    if acts and step.event == "stop":
        _stop_soon()
    with get_tensors_parallel(torch.full((step.size,), step.value(rank)), ranks, **options) as parts:
        if acts and step.event == "raise in the body":
            raise KeyError("planned")
        if acts and step.event == "die in the body":
            kill_self()
        return [[len(part), int(part[0]), int(part[-1])] for part in parts]


def _stop_soon() -> None:
    """Stop this rank in a moment, for half a second: one process does both, so the stop is never the later one."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(0.002)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)


def find_fault(seed: int, results: list[Any], limit_seconds: float) -> str:
    """Return what is not as the rules say; "" if all is."""
    world, steps = draw(seed)
    for rank in range(world):
        died = any(step.event.startswith("die") and step.culprit == rank for step in steps)
        if died != (results[rank] is None):
            return f"rank {rank} {'lives' if died else 'gave no results'}"
    for step in steps:
        for rank in step.ranks:
            if results[rank] is None:
                continue
            got = next((result for result in results[rank] if result["step"] == step.number), None)
            if got is None:
                return f"rank {rank} did not come to {step}"
            if fault := _check(step, rank, got):
                return f"rank {rank}: {fault}: {got} in {step}"
            if "error" in got and got["seconds"] > limit_seconds:
                return f"rank {rank} waited {got['seconds']:.1f} s in {step}"
    return ""


def _check(step: Step, rank: int, got: dict[str, Any]) -> str:
    error = got.get("error")
    if dead := step.dead & set(step.ranks):
        return "" if error == "RankFailedError" and got["rank"] in dead else f"{dead} were dead"
    if step.event in ("none", "stop", "die after"):
        values = [step.value(one) for one in step.ranks]
        want = [[step.size, value, value] for value in values] if rank == step.ranks[0] else []
        return "" if got.get("value") == want else f"want {want}"
    if step.event == "other order":
        return "" if error in ("ContradictionError", "RankFailedError") else "ranks disagree"
    if rank == step.culprit:
        want_error = "KeyError" if step.event == "raise in the body" else "UsageError"
        return "" if error == want_error else f"want {want_error}"
    return "" if error == "RankFailedError" and got["rank"] == step.culprit else f"want rank {step.culprit} named"
