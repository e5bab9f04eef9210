"""Records of a later version: made once and whole, whoever reads them, in memory that stays flat."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.readers.made_deltas import Model, write_delta, write_whole
from xrank.engine import changed_records
from xrank.engine.changed_records import ChangedSource
from xrank.engine.sources import open_source
from xrank.engine.windows import Read
from xrank.errors import CorruptError, UsageError
from xrank.formats.deltas import BodyReader
from xrank.layout.stored_model import StoredModel
from xrank.readers.base import Hints
from xrank.readers.deltas import VersionReader

NUM_BYTES = {"a.weight": 700_000, "b.weight": 300_001, "c.weight": 0, "d.weight": 5, "e.weight": 600_000}


@pytest.fixture(params=["xor", "overwrite"])
def chain(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[StoredModel, list[Model]]:
    """Return a model of two changes, and its versions; ``d.weight`` never changes."""
    generator = np.random.default_rng(1)
    models: list[Model] = [{name: ("U8", (count,), generator.bytes(count)) for name, count in NUM_BYTES.items()}]
    write_whole(tmp_path / "base", models[0])
    for version in (1, 2):
        new = dict(models[-1])
        for name, count in NUM_BYTES.items():
            bits = np.frombuffer(new[name][2], np.uint8).copy()
            bits[generator.integers(0, max(count, 1), count // 50 if name != "d.weight" else 0)] ^= 17
            new[name] = "U8", (count,), bits.tobytes()
        write_delta(tmp_path / "deltas", models[-1], new, version, encoding=request.param)
        models.append(new)
    hints = Hints(base_path=str(tmp_path / "base"))
    return VersionReader().read(str(tmp_path / "deltas" / "weight_v000002"), hints), models


def records_of(model: StoredModel) -> Iterator[tuple[str, int]]:
    for shard in model.shards:
        if len(shard.record):
            yield shard.name, int(shard.record[0])


@pytest.mark.parametrize(("room", "largest"), [(32 << 20, 16 << 20), (800_000, 700_000), (1 << 20, 1000)])
def test_any_range_is_the_new_versions(
    chain: tuple[StoredModel, list[Model]], monkeypatch: pytest.MonkeyPatch, room: int, largest: int
) -> None:
    """Also where memory has no room, so that records are made again or lie in the scratch file."""
    monkeypatch.setattr(changed_records, "_ROOM_NBYTES", room)
    monkeypatch.setattr(changed_records, "_LARGEST_NBYTES", largest)
    model, models = chain
    records, choices = dict(records_of(model)), random.Random(0)
    with closing(open_source(model)) as source:
        for _ in range(200):
            name = choices.choice(list(records))
            start = choices.randint(0, NUM_BYTES[name])
            count = choices.randint(0, NUM_BYTES[name] - start)
            into = bytearray(count)
            source.read_into(records[name], start, memoryview(into))
            assert into == models[-1][name][2][start : start + count]
            staging = memoryview(bytearray(count))
            assert source.fetch(records[name], start, count, staging) == into
        assert isinstance(source, ChangedSource) and source._held_nbytes <= room


def test_threads_make_each_record_once(chain: tuple[StoredModel, list[Model]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for another's record makes the next one that was announced."""
    model, models = chain
    begun, makers = list[int](), set[int]()
    make = ChangedSource._make

    def count(self: ChangedSource, record: int) -> None:
        begun.append(record)
        makers.add(threading.get_ident())
        make(self, record)

    monkeypatch.setattr(ChangedSource, "_make", count)
    records = dict(records_of(model))
    with closing(open_source(model)) as source, ThreadPoolExecutor(4) as threads:
        assert isinstance(source, ChangedSource)
        reads = [Read(records[name], at, 100_000, None) for name in ["a.weight", "e.weight"] for at in (0, 100_000)]
        assert source.announce(reads) and source.announce([])

        def read(start: int) -> bytes:
            into = bytearray(1000)
            source.read_into(records["a.weight"], start, memoryview(into))
            return bytes(into)

        found = list(threads.map(read, range(0, 600_000, 1000)))
    assert b"".join(found) == models[-1]["a.weight"][2][:600_000]
    assert sorted(begun) in ([records["a.weight"]], sorted(records[name] for name in ("a.weight", "e.weight")))


def test_announcements_end_where_memory_does(chain: tuple[StoredModel, list[Model]]) -> None:
    """Otherwise the executor would plan all windows of a model before it makes the first."""
    model, _ = chain
    with closing(open_source(model)) as source:
        assert isinstance(source, ChangedSource)
        record = dict(records_of(model))["a.weight"]
        answers = [source.announce([Read(record, 0, 1 << 20, None)]) for _ in range(40)]
        assert answers == [True] * 32 + [False] * 8
        source.read_into(record, 0, memoryview(bytearray(10)))
        for _ in range(2):
            source.read_into(record, 0, memoryview(bytearray(600_000)))
        assert source.announce([Read(record, 0, 1 << 20, None)])


def test_checksums_of_all_versions(chain: tuple[StoredModel, list[Model]]) -> None:
    """Of a record that was made, of one that was not, and of one without a change."""
    model, models = chain
    with closing(open_source(model)) as source:
        assert isinstance(source, ChangedSource)
        for name, record in records_of(model):
            if name == "a.weight":
                source.read_into(record, 0, memoryview(bytearray(9)))
            digests = [xxhash.xxh3_128(each[name][2]).hexdigest() for each in models]
            traced = [own["xxh3-128"] for own in source.trace(record, ["xxh3-128"])]
            assert traced == (digests if name != "d.weight" else digests[:1])


def test_a_wrong_checksum_names_the_version(tmp_path: Path) -> None:
    """Before any byte of the tensor is used; the later versions only inherit the mistake."""
    generator = np.random.default_rng(2)
    models: list[Model] = [{"a.weight": ("U8", (5000,), generator.bytes(5000))} for _ in range(4)]
    write_whole(tmp_path / "base", models[0])
    for version in (1, 2, 3):
        old = models[version - 1] if version != 2 else models[3]
        write_delta(tmp_path / "deltas", old, models[version], version, states=False)
    model = VersionReader().read(str(tmp_path / "deltas" / "weight_v000003"), Hints(base_path=str(tmp_path / "base")))
    with closing(open_source(model)) as source, pytest.raises(CorruptError, match="weight_v000002") as caught:
        source.read_into(0, 0, memoryview(bytearray(1)))
    assert caught.value.tensor == "a.weight" and str(caught.value.got).startswith("xxh3-128 ")
    assert caught.value.want == xxhash.xxh3_128(models[2]["a.weight"][2]).hexdigest()


def test_a_failed_record_leaves_its_room(
    chain: tuple[StoredModel, list[Model]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next thread that wants it meets the error itself, and does not wait."""
    model, _ = chain

    def fail(self: BodyReader, data: object) -> None:
        raise UsageError("made to fail")

    monkeypatch.setattr(BodyReader, "apply", fail)
    with closing(open_source(model)) as source:
        for _ in range(3):
            with pytest.raises(UsageError, match="made to fail"):
                source.read_into(dict(records_of(model))["a.weight"], 0, memoryview(bytearray(1)))
        assert isinstance(source, ChangedSource) and source._held_nbytes == 0 and not source._claims.claimed
