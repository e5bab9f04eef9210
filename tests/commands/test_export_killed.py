"""Live conversions of 4 ranks, any of which is killed, stopped or fails, at seeded moments and after each named step.

Never half a model is visible; all that live name the one that was lost; the same call on fresh ranks ends right.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.commands.exported import tensors_of
from tests.commands.forked_exports import ForkedExports, forked_exports, parts_of
from tests.commands.made_workspaces import wide_model
from tests.commands.strikes import REPLACING, STEPS, contents, digests
from tests.sampled import sampled

pytestmark = pytest.mark.timeout(300)

OLD, NEW = 1, 0
"""Steps of the model."""
OPTIONS = {"max_shard_size": "150KB", "config_overrides": {"model_type": "toy"}}
NUM_FILES = 4
NOTICED_SECONDS = 10
"""Two are promised; a machine that is busy with other tests may take its time."""
PATIENCE_SECONDS = 6
"""Of calls that wait in vain: longer than such a machine lets one rank stand, which would be missed as well."""
NUM_CALLS = {"export": (246, 177), "load": (45, 45), "iterate": (400, 37)}
"""What the first rank, and any other, does in a whole run, roughly: moments are drawn from as many."""


class Exports:
    """Exports to one folder, and what may be seen of them."""

    def __init__(self, ranks: ForkedExports, folder: Path) -> None:
        self.ranks, self.out, self.folder = ranks, folder / "model", folder
        self.known: dict[int, dict[str, bytes]] = {}
        for step in (OLD, NEW):
            self.right(self(step=step), step)
            made, want = tensors_of(self.out), wide_model(step)
            assert digests(made.items()) == digests((name, want[name]) for name in made) and made.keys() == want.keys()
            self.known[step] = self.content()
            shutil.move(self.out, folder / f"model of step {step}")
        assert sum(name.endswith(".safetensors") for name in self.known[NEW]) == NUM_FILES
        self.memory = named_memory()

    def __call__(self, *, step: int = NEW, **job: Any) -> list[Any]:
        options = {**OPTIONS, **job.pop("options", {})}
        return self.ranks(self.out, step=step, round_nbytes=60_000, options=options, **job)

    def content(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.out.iterdir()}

    def seen(self) -> int | None:
        """Return which model a reader finds; None: none. Half a one fails."""
        if not os.path.lexists(self.out):
            return None
        found = self.content()
        whole = [step for step, content in self.known.items() if content == found]
        assert whole, f"half a model is visible: {sorted(found)}"
        return whole[0]

    def clear(self, *, old: bool) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        if old:
            shutil.copytree(self.folder / f"model of step {OLD}", self.out)

    def right(self, said: list[Any], step: int = NEW) -> dict[str, Any]:
        """Check that a run ended well on all ranks, and that it left the model and nothing else; return its report."""
        assert all(one is not None and one.get("report") == said[0].get("report") for one in said), said
        assert not any(one["left"] for one in said), said
        assert [path.name for path in self.out.parent.iterdir() if path.name.startswith(".")] == []
        assert step not in self.known or self.seen() == step
        return dict(said[0]["report"])

    def strike(self, *, overwrite: bool = False, **strike: Any) -> tuple[int | None, dict[str, Any] | None]:
        """Export while a rank is killed; return what was visible then, and the report of the run after that, if any."""
        self.clear(old=overwrite)
        options = {"overwrite": overwrite}
        said = self(options=options, strike={"what": "kill", **strike})
        assert "step" not in strike or any(one is None or "seconds_after" in one for one in said), (
            "it was never reached"
        )
        seen = self.seen()
        assert seen in ((OLD, NEW) if overwrite else (None, NEW)), seen
        check_named(said, strike["victim"], stands=seen == NEW)
        if seen == NEW:
            # Whoever could not hear that it stands calls again: it is refused, or made once more, and stays right.
            if overwrite:
                self.right(self(options=options))
            else:
                assert {one["type"] for one in self(options=options)} == {"OutputExistsError"}
                assert self.seen() == NEW
            return seen, None
        report = self.right(self(options=options))
        assert named_memory() <= self.memory
        assert self.ranks.num_processes() == 0
        return seen, report


def named_memory() -> set[str]:
    """Return what of ours lies in /dev/shm, where other programs put theirs at any time."""
    return {name for name in os.listdir("/dev/shm") if re.search("xrank-[0-9a-f]{8}", name)}


def check_named(said: list[Any], victim: int, *, stands: bool = False, kind: str = "RankFailedError") -> None:
    """Check that all ranks that live name the one that was lost, soon; where the output stands they may end well."""
    if said[victim] is not None and "seconds_after" not in said[victim]:
        assert not any("type" in one for one in said), "it came to its end first"
        return
    for rank, one in enumerate(said):
        if rank == victim:
            continue
        assert one is not None, (rank, said)
        # Where the blow fell late, a rank may have ended before it: it has no such number, and no error, as seen below.
        assert one["left"] == [] and one.get("seconds_after", 0) < NOTICED_SECONDS, (rank, said)
        if not (stands and "type" not in one):
            assert one.get("type") == kind and one["rank"] == victim, (rank, said)


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedExports]:
    with forked_exports() as forked:
        yield forked


@pytest.fixture(scope="module")
def exports(ranks: ForkedExports, tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(ranks, tmp_path_factory.mktemp("exports"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the moments: all in `make soak`, the first and each step once in `make test-all`, some in `make test`."""
    soak = metafunc.config.getoption("soak")
    if "seed" in metafunc.fixturenames:
        num_seeds = 20 if metafunc.function is test_a_rank_killed_at_any_moment else 3
        metafunc.parametrize("seed", sampled(range(100 if soak else num_seeds), 20))
    if "struck" in metafunc.fixturenames:
        # The first rank and another, a new model and one that replaces; where time is short one of these for each.
        steps = [
            (step, number)
            for step in REPLACING
            for number in (range(1, NUM_FILES + 1) if soak and step.startswith("file") else [1])
        ]
        cases = [
            (step, number, victim, overwrite)
            for i, (step, number) in enumerate(steps)
            for victim in (0, 1 + i % 3)
            for overwrite in (False, True)
            if step in STEPS or overwrite
        ]
        if not soak:
            cases = [case for i, case in enumerate(cases) if i % 4 == (0, 3, 1, 2)[i // 4 % 4]]
        metafunc.parametrize("struck", sampled(cases, 6), ids=lambda case: " ".join(map(str, case)))


def test_a_rank_killed_at_any_moment(exports: Exports, seed: int) -> None:
    chosen = random.Random(seed)
    victim = chosen.randrange(4)
    calls = chosen.randrange(1, NUM_CALLS["export"][victim > 0])
    delay = chosen.choice((0.0, 0.02)) * chosen.random()
    exports.strike(overwrite=chosen.random() < 0.5, victim=victim, calls=calls, delay_seconds=delay)


def test_a_rank_killed_after_each_step(exports: Exports, struck: tuple[str, int, int, bool]) -> None:
    step, number, victim, overwrite = struck
    seen, report = exports.strike(overwrite=overwrite, victim=victim, step=step, number=number)
    # A process may be killed and not yet have ended when the first rank looks, and its part may be in by then.
    has_part_to_do = step in STEPS[: STEPS.index("file in place")] or (step.startswith("file") and number < NUM_FILES)
    if has_part_to_do or (victim == 0 and step in STEPS[: STEPS.index("named")]):
        assert seen != NEW, "another's part was in, perhaps, once the last file was in place"
    if step == "file finished" and seen != NEW:
        assert report is not None and report["output"]["resumed_nbytes"] > 0, "what was finished is gone on with"
    if step in REPLACING[REPLACING.index("named") :]:
        assert seen == NEW


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "replaced"])
def test_a_model_appears_at_one_instant(exports: Exports, overwrite: bool) -> None:
    """Between any two changes of a file, and so wherever a kill strikes, there is nothing, the old one or the new."""
    old, new = (contents(str(exports.folder / f"model of step {step}")) for step in (OLD, NEW))
    exports.clear(old=overwrite)
    said = exports(options={"overwrite": overwrite}, watch=True)
    exports.right(said)
    assert said[0]["seen"] == [old if overwrite else None, new]


def test_a_run_that_finds_all_files_finished_ends_well_on_all_ranks(exports: Exports, every: int) -> None:
    """The first rank commits while the others may not yet have looked for its stage."""
    for _ in range(3 // every or 1):
        seen, report = exports.strike(victim=0, step="manifest")
        assert seen is None and report is not None
        weights = sum(len(data) for name, data in exports.known[NEW].items() if name.endswith(".safetensors"))
        assert report["output"]["resumed_nbytes"] == weights


@pytest.mark.parametrize("step", sampled(["file finished", "manifest"], 2))
def test_a_rank_that_stops_is_named_at_the_deadline(exports: Exports, step: str) -> None:
    exports.clear(old=False)
    said = exports(options={"timeout_seconds": PATIENCE_SECONDS}, strike={"victim": 2, "what": "stop", "step": step})
    for rank, one in enumerate(said):
        if rank != 2 and not (exports.seen() == NEW and "report" in one):
            # Which rank's patience ends first is nobody's to say; the others hear of it, with its cause.
            assert one["type"] in ("RankTimeoutError", "RankFailedError") and "rank 2" in one["message"], said
            assert one["seconds_after"] < PATIENCE_SECONDS + NOTICED_SECONDS, said
    if exports.seen() != NEW:
        exports.right(exports())


@pytest.mark.parametrize(
    "fault",
    sampled([(1, 40, "fail"), (0, 1, "fail"), (3, 25, "fail"), (2, 3, "fail to lend"), (0, 1, "fail to lend")], 3),
    ids=lambda fault: " ".join(map(str, fault)),
)
def test_a_rank_whose_tensors_cannot_be_read_any_more_is_named(exports: Exports, fault: tuple[int, int, str]) -> None:
    """To itself it is its own error, also where only those that it lends to can have met it."""
    victim, calls, what = fault
    exports.clear(old=False)
    said = exports(strike={"victim": victim, "what": what, "calls": calls})
    for rank, one in enumerate(said):
        assert one is not None and "the device was lost" in one["message"], (rank, said)
        assert (one["type"], one.get("rank")) == (
            ("RuntimeError", None) if rank == victim else ("RankFailedError", victim)
        )
        assert one["took_seconds"] < 18 and not one["left"], said
    assert exports.seen() is None
    exports.right(exports())


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[None]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("room", [0.5, 1.06], ids=["weights", "what follows them"])
def test_a_full_disk_is_named_and_the_next_run_goes_on(ranks: ForkedExports, tmp_path: Path, room: float) -> None:
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in wide_model(NEW).values())
    out = tmp_path / "disk" / "model"
    with small_disk(out.parent, int(nbytes * room)):
        said = ranks(out, round_nbytes=60_000, options=OPTIONS)
        full = [rank for rank, one in enumerate(said) if one["type"] == "NoSpaceError"]  # two may find it at once
        assert full and all(rank in full or one["rank"] in full for rank, one in enumerate(said)), said
        assert not out.exists()
        subprocess.run(["mount", "-o", f"remount,size={4 * nbytes}", str(out.parent)], check=True)
        said = ranks(out, round_nbytes=60_000, options=OPTIONS)
        assert all(one is not None and "report" in one for one in said), said
        assert room < 1 or said[0]["report"]["output"]["resumed_nbytes"] > 0, said
        assert digests(tensors_of(out).items()) == digests(wide_model(NEW).items())
        assert os.listdir(out.parent) == ["model"]


def test_a_rank_killed_while_a_model_is_loaded(exports: Exports, seed: int) -> None:
    source = exports.folder / f"model of step {NEW}"
    before = sorted(path.name for path in source.parent.iterdir())
    check_killed(exports, source, "load", seed)
    said = exports.ranks(source, task="load")
    assert [one["digests"] for one in said] == [digests(parts_of(NEW, rank)[0].items()) for rank in range(4)]
    assert sorted(path.name for path in source.parent.iterdir()) == before


def test_a_rank_killed_while_a_model_is_iterated_over(exports: Exports, seed: int) -> None:
    check_killed(exports, exports.folder / "none", "iterate", seed)
    whole = digests(wide_model(NEW).items())
    said = exports.ranks(exports.folder / "none", task="iterate", options={"ranks": "all"})
    assert [one["digests"] for one in said] == [whole] * 4


def check_killed(exports: Exports, place: Path, task: str, seed: int) -> None:
    chosen = random.Random(seed)
    victim = seed % 4
    options = {"ranks": chosen.choice(("first", "all"))} if task == "iterate" else {}
    calls = chosen.randrange(1, NUM_CALLS[task][victim > 0 and options.get("ranks") != "all"])
    strike = {"victim": victim, "what": "kill", "calls": calls, "delay_seconds": chosen.choice((0, 0.01))}
    said = exports.ranks(place, task=task, options=options, strike=strike)
    check_named(said, victim, stands=True)
    assert named_memory() <= exports.memory
    assert exports.ranks.num_processes() == 0
