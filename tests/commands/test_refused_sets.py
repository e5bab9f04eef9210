"""States that do not belong together: each wrong set is refused by rank, file and run, before a byte is written."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

import pytest
import torch

from tests.cli.bench import Bench
from tests.commands.made_workspaces import (
    LAYOUTS,
    RUN,
    copied,
    leave,
    leave_plain,
    made_model,
    rewrite,
    rewrite_record,
    state_of,
)
from xrank.layout import DeviceMesh

pytestmark = pytest.mark.quick


def mended(bench: Bench, good: object, model: dict[str, torch.Tensor]) -> None:
    """Put the good workspace back; the same command must then succeed."""
    shutil.rmtree(bench.workspace)
    shutil.copytree(str(good), bench.workspace)
    bench.succeeds(model)


@pytest.mark.parametrize(
    ("absent", "named"), [([0], "rank 0"), ([1], "rank 1"), ([3], "rank 3"), ([1, 2], "ranks 1-2")]
)
def test_missing_ranks(bench: Bench, absent: list[int], named: str) -> None:
    model = leave(bench.workspace, ranks=set(range(4)) - set(absent))
    bench.refused(
        "IncompleteError",
        says=[
            f"{named} of 4 wrote nothing in {bench.workspace} (run {RUN}, step 2000",
            "ranks 0-3",
            f"let {named} ",
        ],
        rank=absent[0],
        file=f"rank_{absent[0]}_state.pth",
    )
    leave(bench.workspace, ranks=absent)
    bench.succeeds(model)


def test_no_rank_at_all(bench: Bench) -> None:
    bench.refused("IncompleteError", says=["no rank wrote a state in", "rank_<r>_state.pth"], file="run42")
    bench.succeeds(leave(bench.workspace))


def test_an_empty_rank_file(bench: Bench) -> None:
    model = leave(bench.workspace)
    state_of(bench.workspace, 2).write_bytes(b"")
    says = ["rank 2 wrote nothing yet", "got   0 bytes", "let rank 2 write again"]
    bench.refused("IncompleteError", says=says, rank=2, file="rank_2_state.pth")
    leave(bench.workspace, ranks=[2])
    bench.succeeds(model)


def test_a_stale_rank_of_a_larger_world(bench: Bench) -> None:
    larger = DeviceMesh((1, 6), ("dp", "tp"))
    leave(bench.workspace, {"norm.weight": torch.ones(8)}, mesh=larger, ranks=[4, 5], run_id="run-51c0", step=1500)
    model = leave(bench.workspace)
    bench.refused(
        "ContradictionError",
        says=[
            "rank 4, but the run has 4 ranks",
            "ranks 4-5: run run-51c0, step 1500, 6 ranks",
            f"run {RUN}, step 2000",
        ],
        rank=4,
        file="rank_4_state.pth",
    )
    for rank in (4, 5):
        state_of(bench.workspace, rank).unlink()
    bench.succeeds(model)


def test_a_smaller_world_after_a_larger_one(bench: Bench) -> None:
    # Most states are the old run's: counting them would ask the new run's ranks to write the old run again.
    model = made_model()
    leave(bench.workspace, model, mesh=DeviceMesh((4, 2), ("dp", "tp")), run_id="old", step=1)
    leave(bench.workspace, model, mesh=DeviceMesh((1, 2), ("dp", "tp")), run_id="new", step=2)
    bench.refused(
        "ContradictionError",
        says=["states of different runs", "ranks 0-1: run new, step 2, 2 ranks; ranks 2-7: run old, step 1, 8 ranks"],
    )
    for rank in range(2, 8):
        state_of(bench.workspace, rank).unlink()
    bench.succeeds(model)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"run_id": "run-51c0"}, "rank 1 of another: run run-51c0, step 2000"),
        ({"run_id": None}, "rank 1 of another: run without id, step 2000"),
        ({"step": 1500}, f"rank 1 of another: run {RUN}, step 1500"),
        ({"attempt": "3"}, f"rank 1 of another: run {RUN}, attempt 3, step 2000"),
    ],
    ids=["run", "no run id", "step", "attempt"],
)
def test_a_state_of_something_else(bench: Bench, fields: dict[str, object], said: str) -> None:
    model = leave(bench.workspace)
    good = copied(bench.workspace)
    rewrite_record(bench.workspace, 1, **fields)
    # Both are shown: what the others are of, and what this one is of.
    says = ["rank 1 of 4 wrote nothing", f"(run {RUN}, step 2000, 4 ranks)", said, "let rank 1 write again"]
    bench.refused("IncompleteError", says=says, rank=1, file="rank_1_state.pth")
    mended(bench, good, model)


@pytest.mark.parametrize("fields", [{"run_id": "run-51c0"}, {"step": 1500}, {"attempt": "3"}])
def test_half_of_one_and_half_of_another(bench: Bench, fields: dict[str, object]) -> None:
    model = leave(bench.workspace)
    good = copied(bench.workspace)
    for rank in (1, 3):
        rewrite_record(bench.workspace, rank, **fields)
    says = ["states of different runs", f"ranks 0, 2: run {RUN}, step 2000", "ranks 1, 3: run ", str(*fields.values())]
    bench.refused("ContradictionError", says=says, rank=1, file="rank_1_state.pth")
    mended(bench, good, model)


def test_a_copied_rank_file(bench: Bench) -> None:
    model = leave(bench.workspace)
    shutil.copy(state_of(bench.workspace, 1), state_of(bench.workspace, 2))
    says = ["is a copy of another rank's state", "got   the state of rank 1", "the state of rank 2", "let rank 2"]
    bench.refused("ContradictionError", says=says, rank=2, file="rank_2_state.pth")
    leave(bench.workspace, ranks=[2])
    bench.succeeds(model)


def forget(*ranks: int) -> Callable[[Bench], None]:
    def change(bench: Bench) -> None:
        for rank in ranks:
            rewrite(bench.workspace, rank, lambda state: state.pop("xrank"))

    return change


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (forget(2), "IncompleteError", "rank 2 of another: without a record"),
        (forget(0, 2), "ContradictionError", f"ranks 0, 2: without a record; ranks 1, 3: run {RUN}"),
        (forget(0, 1, 3), "IncompleteError", f"(without a record)\n  got   ranks 0-1, 3; rank 2 of another: run {RUN}"),
    ],
    ids=["one without", "half without", "one with"],
)
def test_states_with_and_without_a_record(bench: Bench, change: Callable[[Bench], None], kind: str, said: str) -> None:
    model = leave(bench.workspace)
    good = copied(bench.workspace)
    change(bench)
    bench.refused(kind, says=[said])
    mended(bench, good, model)


def test_a_hole_among_states_without_a_record(bench: Bench) -> None:
    for rank in (0, 5):
        leave_plain(bench.workspace, rank, {"norm.weight": torch.ones(8)})
    bench.refused("IncompleteError", says=["ranks 1-4 of 6 wrote nothing", "got   ranks 0, 5", "ranks 0-5"], rank=1)


def test_a_record_that_claims_an_endless_world(bench: Bench) -> None:
    model = leave(bench.workspace)
    good = copied(bench.workspace)
    for rank in range(4):
        rewrite_record(bench.workspace, rank, world_size=10**15)
    started = time.process_time()
    bench.refused("IncompleteError", says=["ranks 4-999999999999999 of 1000000000000000 wrote nothing"], rank=4)
    assert time.process_time() - started < 5
    mended(bench, good, model)


def test_a_tensor_that_one_rank_lacks(bench: Bench) -> None:
    model = leave(bench.workspace)
    good = copied(bench.workspace)
    rewrite(bench.workspace, 2, lambda state: state["weight"].pop("up.weight"))
    says = [
        "up.weight: rank 2 of its mesh holds no part of it",
        "got   parts on ranks 0-1, 3",
        "parts on ranks 0-3",
    ]
    bench.refused("IncompleteError", says=says, rank=2, tensor="up.weight")
    mended(bench, good, model)


def test_a_tensor_of_some_ranks_by_right(bench: Bench) -> None:
    # Pipeline stages: each tensor lies on a mesh of its own, and nobody misses it elsewhere.
    model = made_model()
    first, second = (DeviceMesh((1, 2), ("dp", "tp"), ranks) for ranks in ([0, 1], [2, 3]))
    for mesh, names in ((first, ["embed.weight", "steps"]), (second, ["up.weight", "down.weight", "norm.weight"])):
        part = {name: model[name] for name in names}
        leave(bench.workspace, part, mesh=mesh, world_size=4, layouts=LAYOUTS)
    bench.succeeds(model)
    assert bench.gather().exit_code == 0  # it is there now
    shutil.rmtree(bench.out)
    state_of(bench.workspace, 3).unlink()
    bench.refused("IncompleteError", says=["rank 3 of 4 wrote nothing"], rank=3)
