"""A rank of either side, or of engines that copy from each other, is killed or stopped at seeded moments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands.forker import Forker
from tests.refit.forked_jobs import RELAYED_SIDES, SIDES, forked_jobs
from tests.sampled import sampled

pytestmark = pytest.mark.timeout(300)

NOTICED_SECONDS = 2
"""Five times as long where other tests run beside these."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the seeds: five and one (two by `make test-all`), in `make soak` all 200 and 100."""
    is_soak = metafunc.config.getoption("soak")
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(200) if is_soak else sampled(range(0, 200, 40), 2))
    if "relay_seed" in metafunc.fixturenames:
        metafunc.parametrize("relay_seed", range(100) if is_soak else sampled([75, 0], 2))


@pytest.fixture(scope="module")
def jobs() -> Iterator[Forker]:
    with forked_jobs() as jobs:
        yield jobs


def test_all_steps_are_right_where_nothing_happens(jobs: Forker, tmp_path: Path) -> None:
    _, answers = jobs.ask(address=str(tmp_path), steps=4)
    assert all(answer["error"] is answer["close"] is None for _, _, answer in answers), answers
    check_outcomes([answer for side, _, answer in answers if side == "trainer"])
    assert [answer["held"] for side, _, answer in answers if side == "engine"] == [4, 4]
    assert all(answer["right"] for side, _, answer in answers if side == "engine")


def test_a_struck_rank_is_named_by_all_others(jobs: Forker, tmp_path: Path, seed: int, soak: bool) -> None:
    """All ranks of the trainer come to the same outcome: they raise in one step, or go on with one report."""
    rng = random.Random(seed)
    side = rng.choice(list(SIDES))
    victim, what = rng.randrange(SIDES[side]), rng.choice(["kill", "stop"])
    job = {"side": side, "victim": victim, "what": what, "transforms": seed % 80 >= 40}
    struck, answers = jobs.ask(address=str(tmp_path), steps=100_000, after=rng.random() ** 2 / 20, **job)
    assert struck is not None, answers
    for own_side, rank, answer in answers:
        if own_side == "engine" and answer is not None:
            assert answer["right"], (own_side, rank, answer)  # also the one that went on after a stop
        if (own_side, rank) != (side, victim):
            assert f"{side} rank {victim}" in answer["error"], (own_side, rank, answer)
            assert answer["at"] - struck < NOTICED_SECONDS * (1 if soak else 5), (own_side, rank, answer)
    trainers = [
        answer for own_side, rank, answer in answers if own_side == "trainer" and (side, victim) != ("trainer", rank)
    ]
    check_outcomes(trainers)
    for answer in trainers:
        assert answer["raised"] == (side == "trainer"), answer
        if side == "engine":  # the training has gone on
            assert answer["step"] > min(step for step, _, failed in answer["reports"] if failed), answer
            assert answer["close"] is None, answer
        elif what == "kill":
            assert f"trainer rank {victim} failed" in answer["close"], answer
    if seed % 3 == 0:  # new ranks at the same address, where dead ones have left files
        (tmp_path / "struck").unlink()
        test_all_steps_are_right_where_nothing_happens(jobs, tmp_path)


def test_a_struck_rank_of_a_relay_or_its_taker_is_named(
    jobs: Forker, tmp_path: Path, relay_seed: int, soak: bool
) -> None:
    seed = relay_seed
    rng = random.Random(seed)
    side = ("relay", "taker")[seed % 2]
    victim, what = rng.randrange(RELAYED_SIDES[side]), ("kill", "stop")[seed // 2 % 2]
    job = {"side": side, "victim": victim, "what": what, "relays": True}
    struck, answers = jobs.ask(address=str(tmp_path), steps=100_000, after=rng.random() ** 2 / 20, **job)
    assert struck is not None, answers
    last = max(answer["step"] for own_side, _, answer in answers if own_side == "trainer")
    name = next(answer["engine"] for own_side, rank, answer in answers if own_side == side and rank != victim)
    for own_side, rank, answer in answers:
        if own_side != "trainer" and answer is not None:
            assert answer["right"], (own_side, rank, answer)  # also the one that went on after a stop
        if (own_side, rank) == (side, victim):
            continue
        if (side, own_side) == ("taker", "relay"):  # it went on until the trainer had closed
            assert answer["held"] == last and "trainer rank" in answer["error"], (rank, answer)
            continue
        named = f"engine rank {victim}" if own_side == side else f"engine rank {victim} ({name})"
        other = f"engine rank {1 - victim} ({name}) failed: RankFailedError: engine rank {victim} failed"
        assert named in answer["error"] or other in answer["error"], (own_side, rank, name, answer)
        assert answer["at"] - struck < NOTICED_SECONDS * (1 if soak else 5), (own_side, rank, answer)
    (tmp_path / "struck").unlink()
    _, answers = jobs.ask(address=str(tmp_path), steps=4, relays=True)  # new ranks, where dead ones have left files
    assert all(answer["error"] is None for _, _, answer in answers), answers
    engines = [answer for side, _, answer in answers if side != "trainer"]
    assert all(answer["held"] == 4 and answer["right"] for answer in engines), answers


def test_many_engines_and_strangers_share_few_descriptors(jobs: Forker, tmp_path: Path, soak: bool) -> None:
    """All ranks are on hosts of their own, so that each needs connections; strangers come all the time.

    150 engines under a soft limit of 1,024, in CI 20 under one of 64: the limit is raised, no engine is taken for dead.
    """
    many, limit, strangers = (150, 1024, 1500) if soak else (20, 64, 300)
    _, answers = jobs.ask(address=str(tmp_path), steps=2, many=many, limit=limit, strangers=strangers)
    assert all(answer["error"] is answer["close"] is None for _, _, answer in answers), answers
    engines = [answer for side, _, answer in answers if side == "engine"]
    assert len(engines) == many and all(answer["held"] == 2 and answer["right"] for answer in engines)
    trainers = [answer for side, _, answer in answers if side == "trainer"]
    check_outcomes(trainers)
    assert all(len(takers) == many and not failed for _, takers, failed in trainers[0]["reports"]), trainers


def check_outcomes(trainers: list[dict[str, Any]]) -> None:
    """Check that all ranks of a trainer have ended in one step, and have the same reports of all steps before."""
    assert len({answer["step"] for answer in trainers}) == 1, trainers
    assert all(answer["reports"] == trainers[0]["reports"] for answer in trainers), trainers
