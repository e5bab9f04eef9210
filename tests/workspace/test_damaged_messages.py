"""Message files that are not as they were written, or not to be seen: what may still come, and what never will."""

import errno
import json
import os
import random

import pytest

from tests.open_files import open_files, opened_since
from tests.workspace.failing_os import FailingOs
from xrank.errors import CorruptError, IncompleteError
from xrank.ranks import directory_messages
from xrank.ranks.directory_messages import DirectoryMessages
from xrank.testing.workspace_contract import fill_tensor

SIZES = [3000, 1, 0, 20_000]
HEADER = "the header " * 50


@pytest.fixture
def writer(tmp_path):
    return DirectoryMessages(tmp_path, 1)


@pytest.fixture
def reader(tmp_path):
    return DirectoryMessages(tmp_path, 0)


@pytest.fixture
def receipt(writer):
    return writer.publish(HEADER, [fill_tensor(7, size) for size in SIZES])


@pytest.fixture
def file(tmp_path, receipt):
    return tmp_path / json.loads(receipt)["name"]


def is_whole(message):
    header, buffers = message
    return header == HEADER and [bytes(buffer) for buffer in buffers] == [b"\7" * size for size in SIZES]


# ---- what may still come


def test_what_is_not_there_may_come(reader, receipt, file):
    os.rename(file, file.with_suffix(".away"))
    for _ in range(2):
        with pytest.raises(IncompleteError, match="rank 1 is not visible") as caught:
            reader.fetch(1, receipt)
        assert (caught.value.rank, caught.value.file) == (1, str(file))
        assert f"the {sum(SIZES) + len(HEADER)} bytes" in caught.value.want and str(file.parent) in caught.value.want
    os.rename(file.with_suffix(".away"), file)
    assert is_whole(reader.fetch(1, receipt))


@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_what_a_client_does_not_see_may_come(reader, receipt, monkeypatch, call, number):
    opened = open_files()
    monkeypatch.setattr(directory_messages, "os", FailingOs(call, number, times=2))
    for _ in range(2):
        with pytest.raises(IncompleteError):
            reader.fetch(1, receipt)
    assert is_whole(reader.fetch(1, receipt))
    assert not opened_since(opened)


@pytest.mark.parametrize("at", range(4))
def test_a_file_that_goes_stale_while_it_is_read_may_come(reader, receipt, monkeypatch, at):
    monkeypatch.setattr(directory_messages, "os", FailingOs("preadv", errno.ESTALE, at=at))
    with pytest.raises(IncompleteError):
        reader.fetch(1, receipt)
    assert is_whole(reader.fetch(1, receipt))


@pytest.mark.parametrize("nbytes", [0, 1, 2999, 3000, 3001, 10_000, 23_001, 23_002, 23_550])
def test_what_is_not_whole_may_come(reader, receipt, file, nbytes):
    content = file.read_bytes()
    assert len(content) == 23_551
    file.write_bytes(content[:nbytes])
    with pytest.raises(IncompleteError) as caught:
        reader.fetch(1, receipt)
    assert f"only {nbytes} bytes" in caught.value.got
    file.write_bytes(content)
    assert is_whole(reader.fetch(1, receipt))


# ---- what never will


def test_a_flipped_bit_anywhere_is_found_and_its_place_is_said(reader, receipt, file):
    content = bytearray(file.read_bytes())
    starts = [0, 3000, 3001, 23_001]  # of the parts that have bytes; the last is the header
    ends = [*starts[1:], len(content)]
    chance = random.Random(2)
    edges = [*starts, *(end - 1 for end in ends)]
    for at in [*edges, *chance.sample(range(23_001), 142), *chance.sample(range(23_001, len(content)), 50)]:
        content[at] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
        with pytest.raises(CorruptError, match="bytes of rank 1's message differ from those it wrote") as caught:
            reader.fetch(1, receipt)
        (part,) = [part for part in zip(starts, ends, strict=True) if part[0] <= at < part[1]]
        assert caught.value.index_range == "bytes {}-{}".format(*part)
        assert (caught.value.rank, caught.value.file) == (1, str(file))
        assert caught.value.got != caught.value.want
        content[at] = HEADER.encode()[at - starts[-1]] if at >= starts[-1] else 7
    file.write_bytes(content)
    assert is_whole(reader.fetch(1, receipt))


def test_a_link_in_its_place_is_refused(reader, receipt, file):
    os.rename(file, file.with_suffix(".away"))
    os.symlink(file.with_suffix(".away"), file)
    with pytest.raises(CorruptError, match="is not the file that rank 1 wrote"):
        reader.fetch(1, receipt)


def test_a_pipe_or_a_directory_in_its_place_is_refused_at_once(reader, receipt, file):
    for put in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        file.rmdir() if file.is_dir() else file.unlink()
        put(file)
        with pytest.raises(CorruptError, match="is not the file that rank 1 wrote"):
            reader.fetch(1, receipt)


# ---- receipts


def changed_name(fields, file):
    for name in (".", "..", "", "/etc/passwd", f"../{file.parent.name}/{file.name}", file.name[1:], file.name + "\0"):
        yield {**fields, "name": name}
    yield {**fields, "name": f"sub/{file.name}"}
    yield {**fields, "name": 3}
    yield {**fields, "name": [file.name]}


def changed_parts(fields):
    for part in ({}, None, 3, [], {**fields["header"], "offset": -1}, {**fields["header"], "nbytes": "3"}):
        yield {**fields, "header": part}
        yield {**fields, "buffers": [part]}
    yield {**fields, "header": {**fields["header"], "more": 1}}
    yield {**fields, "header": {**fields["header"], "nbytes": 1.5}}
    yield {**fields, "buffers": 3}


def test_a_receipt_that_was_changed_is_corrupt(writer, reader, receipt, file):
    fields = json.loads(receipt)
    without = [{key: value for key, value in fields.items() if key != part} for part in fields]
    for damaged in [*changed_name(fields, file), *changed_parts(fields), *without]:
        with pytest.raises(CorruptError, match="rank 1"):
            reader.fetch(1, json.dumps(damaged))
        with pytest.raises(CorruptError):
            writer.retire(json.dumps(damaged))
    fields["header"]["digest"] = fields["header"]["digest"].upper()[::-1]
    with pytest.raises(CorruptError, match="differ from those it wrote"):
        reader.fetch(1, json.dumps(fields))
    assert is_whole(reader.fetch(1, receipt)) and file.exists()
