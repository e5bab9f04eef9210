"""Sources and targets: files that are not what was promised, more of them than may be open, and memory."""

import os
import random
import resource
import threading

import pytest

from tests.engine.engine_cases import MemorySource
from tests.open_files import open_files
from xrank import system
from xrank.engine.buffers import FileSource, FileTarget, MemoryTarget, NullTarget, Stretches, read_stretches
from xrank.errors import ContradictionError, CorruptError, IncompleteError
from xrank.layout.nest_table import int_array
from xrank.layout.stored_model import NO_CHECKSUM, RecordTable, SourceFile, StoredModel

pytestmark = pytest.mark.quick


def model_of(paths, records: list[tuple[int, int, int]]) -> StoredModel:
    """Return a model of these files with records of (file, offset, nbytes)."""
    files = tuple(SourceFile.from_status(str(path), os.stat(path)) for path in paths)
    columns = (int_array(record[i] for record in records) for i in range(3))
    return StoredModel("made", "made", files, RecordTable(*columns, int_array([NO_CHECKSUM] * len(records))), ())


@pytest.fixture
def one_file(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(bytes(range(100)))
    return path


@pytest.fixture
def source(one_file):
    source = FileSource(model_of([one_file], [(0, 0, 10), (0, 10, 90)]))
    yield source
    source.close()


def read(source, record: int, start: int, nbytes: int) -> bytes:
    into = bytearray(nbytes)
    source.read_into(record, start, memoryview(into))
    staging = memoryview(bytearray(nbytes + 5))
    assert source.fetch(record, start, nbytes, staging) == into
    return bytes(into)


def test_records_of_a_file(source):
    assert read(source, 0, 0, 10) == bytes(range(10))
    assert read(source, 1, 5, 20) == bytes(range(15, 35))
    assert read(source, 1, 90, 0) == b""
    source.check_unchanged()


def test_records_of_memory():
    numbers = memoryview(bytearray(range(16))).cast("I")
    source = MemorySource([memoryview(b"abcdef"), numbers])
    assert read(source, 0, 2, 3) == b"cde"
    assert read(source, 1, 6, 4) == bytes([6, 7, 8, 9])
    fetched = source.fetch(1, 0, 16, memoryview(bytearray(16)))
    numbers[0] = 0
    assert fetched[:4] == bytes(4)  # a view, no copy


def test_a_file_that_is_shorter_than_its_records(one_file):
    source = FileSource(model_of([one_file], [(0, 60, 50)]))
    assert read(source, 0, 0, 40) == bytes(range(60, 100))
    for start, nbytes in ((0, 41), (45, 5)):
        with pytest.raises(CorruptError, match="ends before byte") as caught:
            read(source, 0, start, nbytes)
        assert caught.value.file == str(one_file)
        assert caught.value.got == "100 bytes"
    source.close()


def test_a_file_that_is_cut_while_it_is_open(source, one_file):
    assert read(source, 0, 0, 1) == b"\0"
    os.truncate(one_file, 50)
    with pytest.raises(CorruptError) as caught:
        read(source, 1, 0, 90)
    assert (caught.value.got, caught.value.want[:9]) == ("50 bytes", "100 bytes")
    with pytest.raises(ContradictionError, match="changed"):
        source.check_unchanged()


def stretches_of(rows: list[tuple[int, int, int, int]]) -> Stretches:
    return Stretches(*(int_array(row[i] for row in rows) for i in range(4)))


def test_neighbors_are_read_together(tmp_path, monkeypatch):
    """Short stretches by one read for as many as fit the buffer, long ones by reads of their own."""
    rng = random.Random(20261129)
    paths = [tmp_path / name for name in "ab"]
    content = [rng.randbytes(300_000) for _ in paths]
    for path, data in zip(paths, content, strict=True):
        path.write_bytes(data)
    reads = []
    read_at = system.read_at
    monkeypatch.setattr(system, "read_at", lambda fd, into, at: reads.append((at, len(into))) or read_at(fd, into, at))
    # The last but one lies apart, the last one is long.
    records = [(i % 2, 100 + i // 2 * 300, 200) for i in range(400)] + [(0, 150_000, 10), (1, 150_000, 20_000)]
    source = FileSource(model_of(paths, records))
    rows = [(record, 5, 0, nbytes - 5) for record, (_, _, nbytes) in enumerate(records)]
    rng.shuffle(rows)
    place = 0
    for i, (record, start, _, nbytes) in enumerate(rows):
        rows[i] = record, start, place, nbytes
        place += nbytes
    window = memoryview(bytearray(place))
    read_stretches(source, stretches_of(rows), window, memoryview(bytearray(40_960)))
    for record, start, place, nbytes in rows:
        file, offset, _ = records[record]
        assert window[place : place + nbytes] == content[file][offset + start : offset + start + nbytes]
    assert len(reads) == 2 * 3 + 2 and max(nbytes for _, nbytes in reads) <= 40_960
    source.close()


def test_a_file_that_ends_among_neighbors_is_named_with_the_byte(tmp_path, one_file):
    source = FileSource(model_of([one_file], [(0, 60, 20), (0, 80, 10), (0, 98, 10)]))
    window = memoryview(bytearray(40))
    with pytest.raises(CorruptError, match=r"ends before byte 100\n") as caught:
        rows = [(2, 0, 0, 10), (1, 0, 10, 10), (0, 0, 20, 20)]
        read_stretches(source, stretches_of(rows), window, memoryview(bytearray(4096)))
    assert caught.value.got == "100 bytes"
    source.close()


def rewrite(path):
    path.write_bytes(bytes(100))
    os.utime(path, ns=(1, 1))


def replace(path):
    status = path.stat()
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, path)


def lengthen(path):
    status = path.stat()
    path.write_bytes(path.read_bytes() + b"more")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [rewrite, replace, lengthen])
def test_a_file_that_changed_since_its_metadata_was_read(source, one_file, change):
    change(one_file)
    with pytest.raises(ContradictionError, match="changed while it was being read") as caught:
        read(source, 0, 0, 1)
    assert caught.value.file == str(one_file)
    with pytest.raises(ContradictionError):
        source.check_unchanged()


def test_a_file_that_has_gone(source, one_file):
    one_file.unlink()
    with pytest.raises(IncompleteError, match="has disappeared"):
        read(source, 0, 0, 1)
    with pytest.raises(ContradictionError):
        source.check_unchanged()


@pytest.fixture
def few_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    # A quarter is the source's own; earlier tests of this process may have left more than the rest of a low limit open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest + 60, (highest + 12) * 4 // 3), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_files_than_descriptors(tmp_path, few_descriptors):
    paths = [tmp_path / str(i) for i in range(300)]
    for i, path in enumerate(paths):
        path.write_bytes(i.to_bytes(4, "little"))
    source = FileSource(model_of(paths, [(i, 0, 4) for i in range(300)]))
    wrong = []

    def work(seed: int) -> None:
        order = list(range(300))
        random.Random(seed).shuffle(order)
        try:
            wrong.extend(i for i in order if read(source, i, 0, 4) != i.to_bytes(4, "little"))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 4 <= len(set(open_files().values()) & set(map(str, paths))) <= limit // 4 + 4
    source.close()
    assert not set(open_files().values()) & set(map(str, paths))


def test_a_file_that_is_being_read_stays_open(tmp_path, few_descriptors, monkeypatch):
    paths = [tmp_path / str(i) for i in range(300)]
    for i, path in enumerate(paths):
        path.write_bytes(i.to_bytes(4, "little"))
    source = FileSource(model_of(paths, [(i, 0, 4) for i in range(300)]))
    preadv = os.preadv

    def preadv_after_all_others(fd, views, offset):
        monkeypatch.setattr(os, "preadv", preadv)
        for i in range(1, 300):
            assert read(source, i, 0, 4) == i.to_bytes(4, "little")
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv_after_all_others)
    assert read(source, 0, 0, 4) == bytes(4)
    source.close()


def test_targets(tmp_path):
    data = memoryview(b"0123456789")
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    FileTarget({3: fd}).write(3, 5, data)
    FileTarget({3: fd}).write(3, 0, data[:2])
    os.close(fd)
    assert (tmp_path / "out").read_bytes() == b"01\0\0\x000123456789"
    room = [bytearray(4), bytearray(20)]
    MemoryTarget([memoryview(view) for view in room]).write(1, 7, data)
    assert room == [bytearray(4), bytearray(7) + b"0123456789" + bytes(3)]
    NullTarget().write(9, 0, data)


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    FileTarget({0: fd}).write(0, 1, memoryview(b"0123456789"))
    os.close(fd)
    assert (tmp_path / "out").read_bytes() == b"\x000123456789"


def test_short_reads_are_gone_on_with(source, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:7]], offset))
    assert read(source, 1, 3, 60) == bytes(range(13, 73))
