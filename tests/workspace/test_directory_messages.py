"""Messages as files: their names, whose they are, what a failing medium leaves, and what else lies in the directory."""

import errno
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.open_files import open_files, opened_since
from tests.workspace.child import Child
from tests.workspace.failing_os import FailingOs
from xrank import gather_checkpoint
from xrank.errors import NoSpaceError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.ranks import directory_messages
from xrank.ranks.directory_messages import DirectoryMessages, MessageName
from xrank.testing.workspace_contract import fill_tensor
from xrank.workspace.nfs import NFSWorkspace


@pytest.fixture
def writer(tmp_path):
    return DirectoryMessages(tmp_path, 1)


@pytest.fixture
def reader(tmp_path):
    return DirectoryMessages(tmp_path, 0)


def name_of(receipt):
    return json.loads(receipt)["name"]


# ---- names


def test_a_message_is_one_hidden_file_that_only_its_owner_may_open(tmp_path, writer):
    old = os.umask(0)
    try:
        receipt = writer.publish("head", [fill_tensor(1, 100)])
    finally:
        os.umask(old)
    assert os.listdir(tmp_path) == [name_of(receipt)] and name_of(receipt).startswith(".rank_1.")
    assert os.stat(tmp_path / name_of(receipt)).st_mode & 0o777 == 0o600
    assert os.path.getsize(tmp_path / name_of(receipt)) == 104
    writer.retire(receipt)
    assert os.listdir(tmp_path) == []


def test_no_name_is_used_twice(tmp_path, monkeypatch):
    opened = FailingOs("open", 0, times=0)
    monkeypatch.setattr(directory_messages, "os", opened)
    for _ in range(3):
        writer = DirectoryMessages(tmp_path, 1)
        for _ in range(10):
            writer.retire(writer.publish("", []))
        writer.publish("", [])
        writer.close()
    # What could not be written was a name as well: a client may have seen its beginning.
    monkeypatch.setattr(directory_messages, "os", failing := FailingOs("pwrite", errno.EIO))
    with pytest.raises(OSError):
        writer.publish("", [fill_tensor(1, 1)])
    receipt = writer.publish("", [])
    names = [args[0] for args in opened.calls]
    assert len(set(names)) == len(names) == 33 and failing.calls
    assert name_of(receipt).split(".")[-2] == "13"


def test_closing_removes_what_is_in_flight_and_keeps_states(tmp_path):
    workspace = NFSWorkspace(tmp_path, rank=1, world_size=2, run_id="run")
    workspace.write_configs_and_weights({"a": 1}, {})
    other = DirectoryMessages(tmp_path, 0)
    theirs = name_of(other.publish("", []))
    for _ in range(3):
        workspace.publish("", [fill_tensor(1, 1)])
    assert len(os.listdir(tmp_path)) == 5
    for _ in range(2):
        workspace.close()
        assert sorted(os.listdir(tmp_path)) == [theirs, "rank_1_state.pth"]
    assert workspace.read_configs_and_weights_from_rank(1) == ({"a": 1}, {})


def test_a_child_removes_nothing_of_its_parents_and_has_names_of_its_own(tmp_path, writer, reader):
    receipt = writer.publish("mine", [])
    child = Child(lambda: name_of(writer.publish("the child's", [])) in os.listdir(tmp_path) and writer.close() is None)
    assert child.is_content()
    assert os.listdir(tmp_path) == [name_of(receipt)]
    assert reader.fetch(1, receipt) == ("mine", [])


# ---- what dead processes left

KILLED = """
import sys
from xrank.ranks.directory_messages import DirectoryMessages
for rank in (1, 2, 11):
    print(DirectoryMessages(sys.argv[1], rank).publish("", []), flush=True)
sys.stdin.read()
"""


def test_construction_removes_what_dead_processes_left_for_this_rank(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        names = [name_of(process.stdout.readline()) for _ in range(3)]
        DirectoryMessages(tmp_path, 1)
        assert sorted(os.listdir(tmp_path)) == sorted(names), "its process lives"
        process.kill()
    mine = DirectoryMessages(tmp_path, 1)
    kept = [*names[1:], name_of(mine.publish("", []))]
    # Of another host (or another boot, or container) nobody here can say whether it lives.
    digest, pid = names[0].split(".")[2:4]
    kept += [names[0].replace(digest, "0123456789abcdef"), names[0].replace(f".{pid}.", ".1.")]
    kept += [names[0] + ".txt", names[0][1:], ".rank_1.message", ".rank_1..message"]
    for name in kept:
        (tmp_path / name).touch()
    for name in (names[0], names[0].replace(f".{pid}.", f".{pid}{10**30}.")):
        (tmp_path / name).touch()
    DirectoryMessages(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_what_cannot_be_removed_is_in_nobodys_way(tmp_path, monkeypatch):
    name = MessageName(1).new().replace(f".{os.getpid()}.", f".{1 << 23}.")
    for number in (errno.EACCES, errno.EPERM, errno.ESTALE, errno.ENOENT):
        (tmp_path / name).touch()
        with monkeypatch.context() as patch:
            patch.setattr(directory_messages, "os", FailingOs("unlink", number))
            workspace = NFSWorkspace(tmp_path, rank=1, world_size=2, run_id="run")
        assert workspace.fetch(1, workspace.publish("head", [])) == ("head", [])
        workspace.close()
        assert os.listdir(tmp_path) == [name]


# ---- a medium that fails


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize(
    ("call", "at", "works"),
    [
        ("open", 0, False),
        *(("pwrite", at, False) for at in range(3)),
        ("fsync", 0, False),
        ("fsync", 0, True),
        ("close", 0, True),
    ],
)
def test_a_failure_leaves_nothing_of_the_message(tmp_path, writer, reader, monkeypatch, number, call, at, works):
    """Three writes make a message of two tensors: theirs, and the header's."""
    before = writer.publish("before", [])
    opened = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(directory_messages, "os", failing := FailingOs(call, number, at=at, works=works))
        with pytest.raises(OSError) as caught:
            writer.publish("\u00fc", [fill_tensor(1, 5000), fill_tensor(2, 3)])
    assert len(failing.calls) == at + 1
    if number == errno.EIO:
        assert caught.value.errno == errno.EIO
    else:
        assert isinstance(caught.value, NoSpaceError) and caught.value.file == str(tmp_path)
        assert caught.value.needed_nbytes == 5005 and caught.value.free_nbytes > 0
        assert ("quota" in caught.value.got) == (number == errno.EDQUOT)
    assert os.listdir(tmp_path) == [name_of(before)] and not opened_since(opened)
    assert reader.fetch(1, writer.publish("after", [])) == ("after", [])
    writer.close()
    assert os.listdir(tmp_path) == []


def test_a_medium_that_cannot_even_remove_it_says_what_was_first(writer, monkeypatch):
    failing = FailingOs("pwrite", errno.ENOSPC)
    failing.unlink = FailingOs("unlink", errno.EIO).unlink
    monkeypatch.setattr(directory_messages, "os", failing)
    with pytest.raises(NoSpaceError):
        writer.publish("", [fill_tensor(1, 1)])


def test_an_interrupt_leaves_nothing_either(tmp_path, writer, monkeypatch):
    def interrupted(fd):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(directory_messages.os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.publish("", [fill_tensor(1, 1)])
    assert os.listdir(tmp_path) == []


def test_short_writes_and_reads_are_continued(writer, reader, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(directory_messages.os, "pwrite", lambda fd, data, at: pwrite(fd, data[:1000], at))
    monkeypatch.setattr(directory_messages.os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:700]], at))
    tensor = torch.arange(5000, dtype=torch.int16)
    header, (buffer,) = reader.fetch(1, writer.publish("header" * 1000, [tensor]))
    assert header == "header" * 1000 and bytes(buffer) == tensor.numpy().tobytes()


# ---- beside states


def test_a_gather_of_states_ignores_messages(tmp_path):
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    layouts["up"] = "[f/tp]"
    path = tmp_path / "workspace"
    ranks = [NFSWorkspace(path, rank=rank, world_size=2, run_id="run") for rank in range(2)]
    receipts = []
    for rank, workspace in enumerate(ranks):
        receipts.append(workspace.publish("before", [fill_tensor(rank, 100)]))
        workspace.write_configs_and_weights({}, {"up": fill_tensor(rank, 100)}, layouts=layouts)
        receipts.append(workspace.publish("after", [fill_tensor(rank, 100)]))
    report = gather_checkpoint(path, tmp_path / "model")
    assert report.ok and report.num_parameters == 200
    for number, receipt in enumerate(receipts):
        header, (buffer,) = ranks[0].fetch(number // 2, receipt)
        assert header == ("before", "after")[number % 2] and bytes(buffer) == bytes([number // 2]) * 100
    for workspace in ranks:
        workspace.close()
    assert sorted(os.listdir(path)) == ["rank_0_state.pth", "rank_1_state.pth"]
