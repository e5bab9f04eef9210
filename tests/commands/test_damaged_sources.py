"""1 to 3 faults of 30 kinds in checkpoints of six formats: all are listed, and every whole tensor is saved."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.faults.planted import ALONE, KINDS, PAYLOAD, SOURCES, Planted, Source, cases, make_source, plant
from tests.sampled import sampled_rows
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect
from xrank.errors import XrankError
from xrank.testing.rank_pool import RankPool

pytestmark = pytest.mark.timeout(240)
COUNTS: Counter[str] = Counter()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> dict[str, Source]:
    """Sources by format; each is made when a test first needs it."""

    class Made(dict[str, Source]):
        def __missing__(self, name: str) -> Source:
            self[name] = make_source(name, tmp_path_factory.mktemp(name), rank_pool)
            return self[name]

    return Made()


def whole_names(source: Source, lost: set[int]) -> set[str]:
    """Return the tensors of which each element lies in a record that is not lost, element by element."""
    found = set()
    for shard in source.model.shards:
        held = np.zeros(int(np.prod(shard.shape, dtype=np.int64)), np.bool_)
        for row, record in enumerate(shard.record.tolist()):
            if record not in lost:
                nest = shard.nests[row]
                places = np.array([nest.y])
                for count, _, stride in nest.loops:
                    places = (places[:, None] + np.arange(count) * stride).ravel()
                held[places] = True
        if held.all():
            found.add(shard.name)
    return found


def gathered(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


def planted(source: Source, kind: str, count: int, rng: random.Random) -> list[Planted]:
    """Plant a fault of the kind, and others beside it in other files."""
    found: list[Planted] = []
    files = rng.sample(source.files, len(source.files))
    others = rng.sample([one for one in KINDS if one not in ALONE], len(KINDS) - len(ALONE))
    for wanted in (kind, *others[: count - 1]):
        taken = {path for one in found for path in (one.file, *one.others)}
        free = [file for file in files if file not in taken]
        while free and (one := plant(source, wanted, free.pop(), rng)) is None:
            pass
        found += [] if one is None else [one]
    return found


@pytest.mark.parametrize(("name", "kind", "count"), sampled_rows(cases(range(3)), 31))
def test_all_faults_are_listed_and_all_whole_tensors_saved(
    tmp_path: Path, made: dict[str, Source], name: str, kind: str, count: int
) -> None:
    pristine = made[name]
    rng = random.Random(f"{name} {kind} {count}")
    known = pristine.folder.parent / "known"
    if not known.exists():
        gather_checkpoint(pristine.folder, known, recipe="none")
    kept = pristine.folder.parent / "kept"
    if not kept.exists():
        shutil.copytree(pristine.folder, kept)
    try:
        # With one foreign and two lost files of four, there is no majority.
        faults = planted(pristine, kind, min(count, 2) if name == "verl" and kind in ALONE else count, rng)
        if not faults:
            pytest.skip("no file to plant it in")
        check(tmp_path, pristine, faults, gathered(known), rng)
    finally:
        shutil.rmtree(pristine.folder)
        shutil.copytree(kept, pristine.folder, copy_function=shutil.copy2)


def check(tmp_path: Path, source: Source, faults: list[Planted], known: dict[str, torch.Tensor], rng) -> None:
    report = inspect(source.folder, deep=True)
    told = json.dumps(report.to_dict()["problems"])
    unseen = [one for one in faults if not any(str(path) in told for path in (one.file, *one.others))]
    assert not unseen, (unseen, told)
    whole = whole_names(source, {record for one in faults for record in one.lost}) & known.keys()
    listed = {one["name"] for one in report.details["missing"]}
    if not report.details["tensors"]:  # nothing could be read
        listed = {shard.name for shard in source.model.shards}
    assert listed == {shard.name for shard in source.model.shards} - whole_names(
        source, {record for one in faults for record in one.lost}
    ), told
    out = tmp_path / "salvaged"
    if not whole:
        with pytest.raises(XrankError):
            gather_checkpoint(source.folder, out, recipe="none", salvage=True)
        return
    gather_checkpoint(source.folder, out, recipe="none", salvage=True)
    found = gathered(out)
    assert found.keys() == whole
    assert all(equal(tensor, known[found_name]) for found_name, tensor in found.items())
    missing = {one["name"] for one in json.loads((out / "salvage.json").read_text())["missing"]}
    assert missing == listed
    # A damaged replica of a tensor that is whole all the same is no tensor to choose: all that is read must be right.
    damaged = {record for one in faults if one.kind in PAYLOAD for record in one.lost}
    torn = {shard.name for shard in source.model.shards if damaged & set(shard.record.tolist())}
    chosen = rng.sample(sorted(whole - torn), min(3, len(whole - torn)))
    if not chosen:
        return
    gather_checkpoint(source.folder, tmp_path / "chosen", recipe="none", include=[*map(re.escape, chosen)])
    found = gathered(tmp_path / "chosen")
    assert found.keys() == set(chosen) and all(equal(found[one], known[one]) for one in chosen)
    for lost in rng.sample(sorted(known.keys() - whole), min(1, len(known.keys() - whole))):
        with pytest.raises(XrankError):
            gather_checkpoint(source.folder, tmp_path / "lost", recipe="none", include=re.escape(lost))
        assert not (tmp_path / "lost").exists()


def test_thirty_kinds_are_planted() -> None:
    assert len(KINDS) >= 30 and len(SOURCES) == 6
