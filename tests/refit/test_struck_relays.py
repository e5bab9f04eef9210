"""A rank of an engine that serves another engine, or of that other one, is killed or stopped at seeded moments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conversion.forker import Forker
from tests.refit.forked_jobs import RELAYED_SIDES, forked_jobs
from tests.refit.test_struck import NOTICED_SECONDS
from tests.sampled import sampled

pytestmark = pytest.mark.timeout(300)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the seeds: one, by `make test-all` two, in `make soak` all 100."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(100) if metafunc.config.getoption("soak") else sampled([75, 0], 2))


@pytest.fixture(scope="module")
def jobs() -> Iterator[Forker]:
    with forked_jobs() as jobs:
        yield jobs


def check_all_steps(jobs: Forker, folder: Path) -> None:
    """Let a trainer, a relay and a taker do some steps at an address."""
    _, answers = jobs.ask(address=str(folder), steps=4, relays=True)
    assert all(answer["error"] is None for _, _, answer in answers), answers
    engines = [answer for side, _, answer in answers if side != "trainer"]
    assert all(answer["held"] == 4 and answer["right"] for answer in engines), answers


def test_a_struck_rank_of_a_relay_or_its_taker_is_named(jobs: Forker, tmp_path: Path, seed: int, soak: bool) -> None:
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
    check_all_steps(jobs, tmp_path)  # new ranks at the same address, where dead ones have left their cards
