"""An engine that starts while the trainer is busy or gone takes the last step from another engine."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xrank
from tests.refit.jobs import SIZES, FusedEngine, engine_of, same, shard, trainer_layouts, wait_for_file
from tests.refit.test_refusals import both, weight
from xrank.errors import ContradictionError, IncompleteError, RankFailedError, RankTimeoutError, UsageError

pytestmark = pytest.mark.timeout(120)


def test_a_new_engine_takes_the_step_and_then_follows_the_trainer(tmp_path: Path) -> None:
    held, first, second = weight(3.0), weight(0.0), weight(0.0)
    with (
        both(tmp_path, held, first, relay=True) as (offer, old),
        xrank.take_weights(second, tmp_path, relay=True) as new,
    ):
        offer.publish(3)
        old.update(timeout_seconds=10)
        report = new.copy_from_engines(timeout_seconds=10)
        assert (report.step, report.moved_nbytes, new.step) == (3, 256, 3) and second["weight"].eq(3).all()
        with pytest.raises(RankTimeoutError, match="a new step did not arrive"):
            new.update(timeout_seconds=0.1)  # the trainer still shows step 3, which it holds
        with pytest.raises(RankTimeoutError, match="a newer step of a different engine did not arrive"):
            new.copy_from_engines(timeout_seconds=0.1)
        held["weight"].fill_(4)
        offer.publish(4)
        assert new.update(timeout_seconds=10).step == 4 and second["weight"].eq(4).all()
        old.copy_from_engines(timeout_seconds=10)
        assert old.step == 4 and first["weight"].eq(4).all()


def test_an_engine_of_other_cuts_takes_it_after_the_trainer_has_gone(run_jobs: Any, tmp_path: Path) -> None:
    run_jobs((4, train_then_serve, (str(tmp_path),)), (2, serve_and_relay, (str(tmp_path),)))


def train_then_serve(folder: str) -> None:
    rank, layouts = dist.get_rank(), trainer_layouts()
    with xrank.offer_weights(shard(5, layouts, rank), folder, layouts=layouts) as offer:
        offer.wait_for_takers(2, timeout_seconds=60)
        offer.publish(5, timeout_seconds=60)
    dist.barrier()
    wait_for_file(Path(folder) / "relayed")
    engine = FusedEngine(SIZES, rank, 4)
    with xrank.take_weights(engine, folder, loader=engine.load_weights) as weights:
        assert weights.copy_from_engines(timeout_seconds=60).step == 5
    assert same(engine, engine_of(5, rank, 4))
    (Path(folder) / f"done-{rank}").touch()


def serve_and_relay(folder: str) -> None:
    engine = FusedEngine(SIZES, dist.get_rank(), 2)
    with xrank.take_weights(engine, folder, loader=engine.load_weights, relay=True) as weights:
        weights.update(timeout_seconds=60)
        dist.barrier()
        (Path(folder) / "relayed").touch()
        for rank in range(4):
            wait_for_file(Path(folder) / f"done-{rank}")


def test_a_step_that_is_replaced_meanwhile_is_never_mixed(tmp_path: Path) -> None:
    held, first, ends = weight(0.0, 512, 512), weight(0.0, 512, 512), threading.Event()

    def serve() -> None:
        while not ends.is_set():
            old.update(timeout_seconds=20)

    def train() -> None:
        step = 1
        while not ends.is_set():
            held["weight"].fill_(step)
            offer.publish(step)
            step += 1
        held["weight"].fill_(step)
        offer.publish(step)

    with (
        both(tmp_path, held, first, relay=True) as (offer, old),
    ):
        threads = [threading.Thread(target=work) for work in (train, serve)]
        for thread in threads:
            thread.start()
        try:
            while old.step is None:
                pass
            for _ in range(20):
                target = weight(0.0, 512, 512)
                with xrank.take_weights(target, tmp_path) as new:
                    step = new.copy_from_engines(timeout_seconds=30).step
                    assert target["weight"].eq(step).all(), (step, target["weight"].unique())
        finally:
            ends.set()
            for thread in threads:
                thread.join()


def test_weights_that_changed_since_the_step_are_refused(tmp_path: Path) -> None:
    first, second = {**weight(0.0), "bias": torch.zeros(8)}, {**weight(0.0), "bias": torch.zeros(8)}
    with (
        both(tmp_path, {**weight(3.0), "bias": torch.ones(8)}, first, relay=True) as (offer, old),
        xrank.take_weights(second, tmp_path) as new,
    ):
        offer.publish(3)
        old.update(timeout_seconds=10)
        first["bias"][2] = 7
        with pytest.raises(ContradictionError, match=r"bias has changed on engine rank 0 .* since it got the step"):
            new.copy_from_engines(timeout_seconds=10)
        assert new.step is None
        assert new.update(timeout_seconds=10).step == 3 and second["bias"].eq(1).all()


def test_no_engine_lends_a_step(tmp_path: Path) -> None:
    with (
        both(tmp_path, weight(), weight(0.0)) as (offer, old),
        xrank.take_weights(weight(0.0), tmp_path, relay=True) as new,
    ):
        offer.publish(1)
        old.update(timeout_seconds=10)  # without relay
        with pytest.raises(IncompleteError, match="no other engine offers a step"):
            new.copy_from_engines(timeout_seconds=10)
        new.update(timeout_seconds=10)
        with pytest.raises(IncompleteError, match="no other engine offers a step"):  # not from itself
            new.copy_from_engines(timeout_seconds=10)


def test_a_dead_engine_is_named_and_another_one_is_taken(tmp_path: Path) -> None:
    targets = [weight(0.0) for _ in range(3)]
    with (
        both(tmp_path, weight(), targets[0], relay=True) as (offer, dead),
        xrank.take_weights(targets[1], tmp_path) as new,
    ):
        offer.publish(1)
        dead.update(timeout_seconds=10)
        (path,) = tmp_path.glob("relay-*")
        registration = json.loads(path.read_text())
        registration["status"] |= {"nonce": "11" * 16, "socket": "xrank-gone", "port": None}  # another process by now
        path.write_text(json.dumps(registration))
        with pytest.raises(RankFailedError, match="engine rank 0"):
            new.copy_from_engines(timeout_seconds=10)
        assert new.step is None and not targets[1]["weight"].any()
        with xrank.take_weights(targets[2], tmp_path, relay=True) as living:
            living.update(timeout_seconds=10)
            assert new.copy_from_engines(timeout_seconds=10).step == 1


def test_a_cast_of_another_engine_is_not_passed_on_as_the_trainers_values(tmp_path: Path) -> None:
    half = {"weight": torch.zeros(8, 8, dtype=torch.bfloat16)}
    with (
        both(tmp_path, weight(0.1), half, relay=True) as (offer, old),
        xrank.take_weights(weight(0.0), tmp_path) as full,
        xrank.take_weights({"weight": half["weight"].clone()}, tmp_path) as new,
    ):
        offer.publish(1)
        old.update(timeout_seconds=10)
        with pytest.raises(UsageError, match="weight: the other engine has cast it"):
            full.copy_from_engines(timeout_seconds=10)
        assert new.copy_from_engines(timeout_seconds=10).step == 1
