"""Checksums put together from pieces, against zlib's of the whole."""

import itertools
import random
import threading
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xrank.engine.buffers import Stretches
from xrank.engine.windows import RecordChecksums
from xrank.layout.nest_table import int_array
from xrank.layout.stored_model import NO_CHECKSUM, RecordTable

pytestmark = pytest.mark.quick

Pieces = list[tuple[int, int, int]]
"""(record, start, end)."""


def table_of(records: list[bytes], crcs: list[int]) -> RecordTable:
    zeros = int_array([0] * len(records))
    return RecordTable(zeros, zeros, int_array(map(len, records)), int_array(crcs))


def right(records: list[bytes]) -> RecordTable:
    return table_of(records, [zlib.crc32(record) for record in records])


def refuse(record: int, crc: int) -> None:
    raise AssertionError(f"record {record} is right, and {crc:08x} was computed")


def add(checksums: RecordChecksums, records: list[bytes], pieces: Pieces) -> None:
    for record, start, end in pieces:
        checksums.add(record, start, memoryview(records[record])[start:end])


def random_cuts(rng: random.Random, records: list[bytes]) -> Pieces:
    """Return pieces that make all records, each byte once, in any order."""
    pieces = []
    for i, record in enumerate(records):
        cuts = sorted({0, len(record), *(rng.randint(0, len(record)) for _ in range(rng.randint(0, 9)))})
        pieces += [(i, a, b) for a, b in itertools.pairwise(cuts)]
    rng.shuffle(pieces)
    return pieces


def test_pieces_in_any_order():
    rng = random.Random(20261109)
    for _ in range(400):
        records = [rng.randbytes(rng.randint(1, 300)) for _ in range(3)]
        checksums = RecordChecksums(right(records), refuse)
        pieces = random_cuts(rng, records)
        add(checksums, records, pieces[:-1])
        assert checksums.num_checked == 2
        assert checksums.missing(range(3)) == pieces[-1:]
        add(checksums, records, pieces[-1:])
        assert checksums.num_checked == 3
        assert checksums.missing(range(3)) == []


@given(st.data())
@settings(deadline=None)
def test_overlaps_and_what_is_missing(data):
    """Whatever was added before, adding the missing bytes ends it."""
    record = data.draw(st.binary(min_size=1, max_size=60))
    checksums = RecordChecksums(right([record]), refuse)
    bounds = st.integers(0, len(record))
    known: set[int] = set()
    for a, b in data.draw(st.lists(st.tuples(bounds, bounds), max_size=12)):
        start, end = min(a, b), max(a, b)
        if start < end:
            add(checksums, [record], [(0, start, end)])
            known |= set(range(start, end))
    missing = checksums.missing([0])
    left = {byte for _, start, end in missing for byte in range(start, end)}
    assert known | left == set(range(len(record)))
    assert checksums.num_checked == (not left)
    add(checksums, [record], data.draw(st.permutations(missing)))
    assert checksums.num_checked == 1
    assert checksums.missing([0]) == []


@pytest.mark.parametrize("damaged", [0, 99, 199])
def test_a_mismatch_is_reported_once_with_what_was_computed(damaged):
    rng = random.Random(damaged)
    records = [rng.randbytes(200), rng.randbytes(50)]
    found = bytearray(records[0])
    found[damaged] ^= 1
    reported = []
    checksums = RecordChecksums(right(records), lambda *report: reported.append(report))
    add(checksums, [bytes(found), records[1]], [*random_cuts(rng, records), (0, 0, 10)])
    assert reported == [(0, zlib.crc32(found))]
    assert checksums.num_checked == 2


def test_records_without_a_checksum_are_let_alone():
    records = [b"some", b"bytes"]
    checksums = RecordChecksums(table_of(records, [NO_CHECKSUM, zlib.crc32(b"bytes")]), refuse)
    assert not checksums.wants(0)
    assert checksums.missing([0, 1]) == [(1, 0, 5)]
    add(checksums, [b"more", b"bytes"], [(0, 0, 4), (1, 0, 5)])
    assert checksums.num_checked == 1
    assert not checksums.wants(1)


def test_a_checksum_of_all_ones_is_one():
    # NO_CHECKSUM is -1, and this record's value has the same bits in 32.
    record = bytes.fromhex("ffffffff")
    assert zlib.crc32(record) == 0xFFFFFFFF
    checksums = RecordChecksums(right([record]), refuse)
    assert checksums.missing([0]) == [(0, 0, 4)]


def test_missing_names_only_what_it_is_asked_for():
    records = [bytes(10), bytes(20)]
    checksums = RecordChecksums(right(records), refuse)
    add(checksums, records, [(1, 5, 7), (1, 9, 20)])
    assert checksums.missing([0]) == [(0, 0, 10)]
    assert checksums.missing([1]) == [(1, 0, 5), (1, 7, 9)]
    assert checksums.missing([]) == []


def test_stretches_of_a_window_count_as_pieces_do():
    rng = random.Random(20261129)
    for _ in range(200):
        records = [rng.randbytes(rng.randint(1, 60)) for _ in range(6)]
        left_open = np.array([rng.random() < 0.3 for _ in records]) if rng.random() < 0.5 else None
        crcs = [NO_CHECKSUM if rng.random() < 0.2 else zlib.crc32(record) for record in records]
        one, other = (RecordChecksums(table_of(records, crcs), refuse, left_open=left_open) for _ in range(2))
        pieces = [(i, 0, len(record)) for i, record in enumerate(records) if rng.random() < 0.5]
        pieces += rng.choices(random_cuts(rng, records), k=5)
        window = b"".join(records[i][a:b] for i, a, b in pieces)
        sizes = [b - a for _, a, b in pieces]
        columns = (
            [i for i, _, _ in pieces],
            [a for _, a, _ in pieces],
            [sum(sizes[:i]) for i in range(len(sizes))],
            sizes,
        )
        one.add_all(Stretches(*map(int_array, columns)), memoryview(window))
        add(other, records, pieces)
        assert one.num_checked == other.num_checked
        assert one.missing(range(6)) == other.missing(range(6))
        assert one.take_parts(range(6)) == other.take_parts(range(6))


def test_the_first_wrong_stretch_of_a_window_is_reported():
    records = [bytes([i] * 4) for i in range(4)]
    reported = []
    checksums = RecordChecksums(right(records), lambda *report: reported.append(report))
    window = b"".join(records[i] for i in (3, 0, 1)) + b"else" + b"more"
    rows = int_array([3, 0, 1, 2, 0]), int_array([0] * 5), int_array(range(0, 20, 4)), int_array([4] * 5)
    checksums.add_all(Stretches(*rows), memoryview(window))
    assert reported == [(2, zlib.crc32(b"else"))]
    assert checksums.num_checked == 4


def test_many_threads():
    rng = random.Random(20261110)
    records = [rng.randbytes(5_000) for _ in range(8)]
    checksums = RecordChecksums(right(records), refuse)
    pieces = [(i, a, min(a + 37, 5_000)) for i in range(8) for a in range(0, 5_000, 37)]
    rng.shuffle(pieces)
    failures = []

    def work(own: Pieces) -> None:
        try:
            add(checksums, records, own)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(pieces[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert checksums.num_checked == 8
    assert checksums.missing(range(8)) == []
