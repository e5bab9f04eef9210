"""Ranks of a trainer and engines that end or fail between two steps: one outcome on all ranks of the trainer."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xrank
from tests.refit.jobs import wait_for_file
from tests.workspace.forked_ranks import attempt, kill_self, run_many
from xrank.errors import UsageError
from xrank.refit.publish import PublishReport

pytestmark = pytest.mark.timeout(180)

NOTICED_SECONDS = 2
"""Five times as long where other tests run beside these."""


def run_jobs(function: Any, folder: Path, count: int, jobs: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the results of jobs, each with a folder of its own."""
    folders = [folder / str(number) for number in range(len(jobs))]
    for one in folders:
        one.mkdir()
    texts = [json.dumps({**job, "folder": str(one)}) for job, one in zip(jobs, folders, strict=True)]
    return run_many(function, [(count, text) for text in texts])


# ---- a rank of the trainer


TRAINER_ENDS = [
    {"victim": victim, "snapshot": snapshot, "what": what}
    for victim, snapshot, what in [(2, False, "kill"), (0, False, "kill"), (2, True, "kill"), (0, True, "raise")]
]
CLOSES = [{"victim": 1, "snapshot": False, "what": "kill", "closes": True}]
LATE = [{"victim": 2, "snapshot": snapshot, "what": "kill", "late": 1} for snapshot in (False, True)]
"""The late rank has begun its call, and looks at the others only when one has raised and closed."""


def train_until_one_ends(rank: int, text: str) -> list[Any]:
    """Publish a step, let one rank end, and return what the others' next step and their close raise."""
    job = json.loads(text)
    offer = xrank.offer_weights({"weight": torch.ones(4, 4)}, job["folder"], snapshot=job["snapshot"])
    offer.publish(1, timeout_seconds=30)
    dist.barrier()
    if rank == job["victim"]:
        if job["what"] == "kill":
            kill_self()
        with pytest.raises(KeyError), offer:
            raise KeyError("planned")
        return []
    closed = Path(job["folder"]) / "closed"
    if rank == job.get("late"):
        offer._part.synchronize = lambda: wait_for_file(closed)  # type: ignore[method-assign]
    calls = [offer.close] if job.get("closes") else [lambda: offer.publish(2, timeout_seconds=30), offer.close]
    answers = [attempt(call) for call in calls]
    closed.touch()
    return answers


def test_the_end_of_a_trainer_rank_is_raised_by_publish_and_close_of_all_others(tmp_path: Path) -> None:
    """Without any engine, too, and whichever rank it is."""
    jobs = TRAINER_ENDS + CLOSES + LATE
    for job, results in zip(jobs, run_jobs(train_until_one_ends, tmp_path, 3, jobs), strict=True):
        others = [result for rank, result in enumerate(results) if rank != job["victim"]]
        assert len(others) == 2 and all(len(one) == (1 if job.get("closes") else 2) for one in others), (job, results)
        for call in [call for one in others for call in one]:
            assert call.get("error") == "RankFailedError" and call["rank"] == job["victim"], (job, call, others)
            assert call["text"].startswith(f"trainer rank {job['victim']} failed: "), (job, call)
            assert ("KeyError: 'planned'" in call["text"]) >= (job["what"] == "raise"), (job, call)
            assert call["seconds"] < 5 * NOTICED_SECONDS, (job, call)


def close_at_other_times(rank: int, text: str) -> Any:
    """Close after other ranks have done so and ended."""
    folder = Path(json.loads(text)["folder"])
    offer = xrank.offer_weights({"weight": torch.ones(4, 4)}, folder / "refit")
    offer.publish(1, timeout_seconds=30)
    for other in range(rank):
        wait_for_file(folder / str(other))
    offer.close()
    (folder / str(rank)).touch()
    return sorted(path.name for path in (folder / "refit").iterdir() if path.suffix == ".json")


def test_ranks_that_close_one_after_another_blame_no_other(tmp_path: Path) -> None:
    assert run_jobs(close_at_other_times, tmp_path, 2, [{}]) == [[[], []]]


# ---- engines


ENGINE_ENDS = [
    # How an engine fails or ends, whether the trainer makes snapshots, on_engine_failure, and the step that shows it.
    ("leaves out a tensor", False, "report", 1),
    ("leaves out a tensor", True, "report", 2),
    ("leaves out a tensor", False, "raise", 1),
    ("leaves out a tensor, and stays", True, "report", 2),
    ("is killed", False, "report", 2),
    ("is killed", True, "report", 2),
    ("is killed", False, "raise", 2),
    ("closes", False, "raise", None),
]


class Engine(torch.nn.Linear):
    """An engine whose loader may leave a parameter out."""

    def __init__(self, what: str) -> None:
        super().__init__(4, 4)
        self._names = {"weight"} if "tensor" in what else {"weight", "bias"}

    def load_weights(self, weights: Any) -> None:
        for name, loaded in weights:
            if name in self._names:
                self.get_parameter(name).data.copy_(loaded)


def train_or_serve(rank: int, text: str) -> Any:
    """Be one of two ranks of a trainer, or one of two engines, the second of which fails or ends."""
    job = json.loads(text)
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2], [3])]
    folder = Path(job["folder"])
    if rank > 1:
        return serve("serves" if rank == 2 else job["what"], folder, groups[rank - 1])
    held = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    options = {"snapshot": job["snapshot"], "on_engine_failure": job["mode"], "group": groups[0]}
    results = []
    with xrank.offer_weights(held, folder / "refit", **options) as offer:
        offer.wait_for_takers(2, timeout_seconds=30)
        (folder / f"seen-{rank}").touch()
        for step in (1, 2, 3):
            results.append(attempt(lambda step=step: list_report(offer.publish(step, timeout_seconds=30))))
            (folder / f"published-{step}-{rank}").touch()
            wait_for_file(folder / f"taken-{step}")
            wait_for_file(folder / "ended")
            for tensor in held.values():
                tensor.add_(1)
    return results


def list_report(report: PublishReport) -> list[Any]:
    return [sorted(report.takers), dict(report.failed)]


def serve(what: str, folder: Path, group: Any) -> None:
    model = Engine(what)
    with xrank.take_weights(model, folder / "refit", loader=model.load_weights, group=group) as weights:
        wait_for_file(folder / "seen-0")
        wait_for_file(folder / "seen-1")
        for step in (1, 2, 3) if what == "serves" else (1,):
            if "tensor" in what:
                with pytest.raises(UsageError, match="bias"):
                    weights.update(timeout_seconds=60)
            else:
                assert weights.update(step, timeout_seconds=60).step == step and model.bias.eq(step).all()
            if what == "serves":
                (folder / f"taken-{step}").touch()
        if "killed" in what:  # after it was seen to take the step
            wait_for_file(folder / "published-1-0")
            wait_for_file(folder / "published-1-1")
            die_and_show(folder / "ended")
        if "stays" in what:
            (folder / "ended").touch()
            wait_for_file(folder / "taken-3")
    if what != "serves":
        (folder / "ended").touch()


def die_and_show(path: Path) -> None:
    """Kill this rank; a child makes the file afterwards."""
    me = os.getpid()
    if os.fork() == 0:
        while os.getppid() == me:
            time.sleep(0.001)
        path.touch()
        os._exit(0)
    kill_self()


def test_engines_that_fail_or_end_are_reported_by_all_ranks_alike_and_the_training_goes_on(tmp_path: Path) -> None:
    jobs = [dict(zip(("what", "snapshot", "mode", "shown"), one, strict=True)) for one in ENGINE_ENDS]
    for job, (first, second, *_) in zip(jobs, run_jobs(train_or_serve, tmp_path, 4, jobs), strict=True):
        assert [without_times(one) for one in first] == [without_times(one) for one in second], (job, first, second)
        [good] = first[-1]["value"][0] or [None]  # the other engine; reports of snapshots have no takers
        for step, one in enumerate(first, 1):
            is_shown = step == job["shown"] or ("stays" in job["what"] and step > 2)
            if is_shown and job["mode"] == "raise":
                assert one["error"] == "RankFailedError" and reason_of(job) in one["text"], (job, one)
                assert one["text"].startswith("engine rank 0 (") and good not in one["text"], (job, one)
                continue
            assert "value" in one, (job, first)
            takers, failed = one["value"]
            if not job["snapshot"]:
                assert good in takers and len(takers) == 1 + (step == 1 and "tensor" not in job["what"]), (job, takers)
            assert len(failed) == is_shown and good not in failed, (job, step, failed)
            for name, cause in failed.items():
                assert name.startswith("engine rank 0 (") and cause.startswith(reason_of(job)), (job, failed)


def reason_of(job: dict[str, Any]) -> str:
    return (
        "its process ended"
        if "killed" in job["what"]
        else "UsageError: bias, from elements 0-0 on: the loader never writes"
    )


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in ("seconds", "when")}
