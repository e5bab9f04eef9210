"""Messages in memory: what is not the message that was fields is never read; what is left, and what fails."""

import errno
import fcntl
import json
import os

import pytest

from tests.open_files import open_files, opened_since
from tests.workspace.memory_use import NBYTES, arenas, holds, num_mapped, place_of
from xrank.errors import CorruptError, IncompleteError, NoSpaceError, UsageError, XrankError
from xrank.ranks import memory_messages
from xrank.testing.workspace_contract import fill_tensor

# ---- what is not the message that was fields


def changed(receipt, **changes):
    fields = json.loads(receipt)
    return json.dumps({**fields, "place": json.dumps({**json.loads(fields["place"]), **changes})})


@pytest.mark.parametrize("part", ["pid", "fd", "device", "inode", "nbytes", "nonce"])
def test_memory_that_is_not_as_told_is_never_read(writer, reader, part):
    receipt = writer.publish("", [fill_tensor(1, NBYTES)])
    # The next numbers may lead to the very same: to a thread of this process, to the mapping's own descriptor.
    wrong = {"nonce": "0" * 32, "pid": 1 << 23, "fd": 1 << 20}.get(part) or place_of(receipt)[part] + 1
    with pytest.raises(IncompleteError, match="rank 1"):
        reader.fetch(1, changed(receipt, **{part: wrong}))
    assert num_mapped() == 1
    assert holds(reader.fetch(1, receipt)[1][0], 1)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK])
def test_memory_whose_size_may_change_is_never_read(writer, reader, seals):
    receipt = writer.publish("", [fill_tensor(1, NBYTES)])
    place = place_of(receipt)
    other = os.memfd_create("xrank-" + place["nonce"], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.sendfile(other, place["fd"], 0, place["nbytes"])
    fcntl.fcntl(other, fcntl.F_ADD_SEALS, seals)
    fields = changed(receipt, fd=other, inode=os.fstat(other).st_ino)
    with pytest.raises(IncompleteError):
        reader.fetch(1, fields)
    # It is all that was wrong with it.
    fcntl.fcntl(other, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    assert holds(reader.fetch(1, fields)[1][0], 1)
    os.close(other)


def test_a_file_on_disk_or_of_another_user_is_never_read(writer, reader, tmp_path, monkeypatch):
    receipt = writer.publish("", [fill_tensor(1, NBYTES)])
    place = place_of(receipt)
    on_disk = os.open(tmp_path / f"xrank-{place['nonce']}", os.O_RDWR | os.O_CREAT)
    os.sendfile(on_disk, place["fd"], 0, place["nbytes"])
    status = os.fstat(on_disk)
    with pytest.raises(IncompleteError):
        reader.fetch(1, changed(receipt, fd=on_disk, inode=status.st_ino, device=status.st_dev))
    os.close(on_disk)
    with monkeypatch.context() as patch:
        patch.setattr(memory_messages.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(IncompleteError):
            reader.fetch(1, receipt)


def test_memory_of_another_host_is_an_error_that_names_it(writer, reader):
    receipt = writer.publish("", [fill_tensor(1, 10)])
    with pytest.raises(UsageError, match=r"rank 1 .*node7") as caught:
        reader.fetch(1, changed(receipt, space="elsewhere", host="node7", inode=1))
    assert "workspace_path" in caught.value.next_step


@pytest.mark.parametrize("part", ["place", "number", "kept", "table"])
def test_a_receipt_that_was_changed_gives_no_message(writer, reader, part):
    fields = json.loads(writer.publish("", [fill_tensor(1, 1000)]))
    without = {key: value for key, value in fields.items() if key != part}
    wrong = [None, "x", [], {}, -1, 1 << 70, ["x"], [1], [None, 1], [-8, 16], [0, 1 << 40], [64, 3]]
    for damaged in [without] + [{**fields, part: value} for value in wrong]:
        try:
            _, buffers = reader.fetch(1, json.dumps(damaged))
        except (CorruptError, IncompleteError):
            continue
        # Of what is kept, nothing is needed for the message.
        assert part == "kept" and holds(buffers[0], 1, 1000)
    if part != "kept":
        assert holds(reader.fetch(1, json.dumps(fields))[1][0], 1, 1000)


# ---- what is left, what fails


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("at", range(5))
def test_no_memory_is_said_and_leaves_nothing(writer, reader, monkeypatch, number, at):
    """Five writes make a message of two tensors: the arena's head, the tensors, header and table."""
    held = reader.fetch(1, writer.publish("", [fill_tensor(1, NBYTES)]))[1]
    pwrite, calls = os.pwrite, []

    def fail(fd, data, offset):
        calls.append(fd)
        if len(calls) > at:
            raise OSError(number, os.strerror(number))
        return pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(XrankError) as caught:
            writer.publish("head", [fill_tensor(2, NBYTES), fill_tensor(2, 99)])
    assert len(calls) == at + 1
    if number == errno.EIO:
        assert "the message cannot be written to memory: Input/output error" in str(caught.value)
    else:
        assert isinstance(caught.value, NoSpaceError) and caught.value.free_nbytes > 0
        assert caught.value.needed_nbytes == [64, NBYTES, 99, 4, 6 * 8][at]
    del caught
    assert len(arenas()) == 1
    assert holds(reader.fetch(1, writer.publish("", [fill_tensor(3, NBYTES)]))[1][0], 3) and holds(held[0], 1)


def test_many_messages_leave_what_one_leaves(writer, reader):
    reader.fetch(1, writer.publish("", [fill_tensor(0, NBYTES)]))
    opened = open_files()
    for number in range(300):
        reader.fetch(1, writer.publish("", [fill_tensor(0, number % 50 * 20_000)]))
    assert not opened_since(opened) and num_mapped() == 2
