"""Links: messages with borders, descriptors, and the other end's death."""

import array
import os
import resource
import socket
import subprocess
import sys

import pytest

from tests.open_files import open_files, opened_since
from xrank.errors import CorruptError
from xrank.ranks.host_wire import Link
from xrank.ranks.processes import is_readable
from xrank.ranks.wire import Message


@pytest.fixture
def pair():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    links = Link(a), Link(b)
    yield links
    for link in links:
        link.close()


def test_messages_keep_their_borders_and_order(pair):
    sent = [Message({"i": i, "text": "ü" * i}, bytes(range(i))) for i in range(20)]
    for message in sent:
        pair[0].send(message)
    pair[1].send(Message({"other": "way"}))
    assert [pair[1].receive() for _ in range(20)] == [(message, []) for message in sent]
    assert pair[0].receive() == (Message({"other": "way"}), [])
    large = Message({"large": "x" * 60_000}, os.urandom(32 << 10))
    pair[0].send(large)
    assert pair[1].receive() == (large, [])


def test_who_is_not_to_wait_is_told_that_the_other_has_too_much_to_read(pair):
    large = Message({}, bytes(32 << 10))
    with pytest.raises(BlockingIOError):
        while True:
            pair[0].send(large, wait=False)
    assert pair[1].receive() == (large, [])
    pair[0].send(large, wait=False)


def test_descriptors_come_along_and_are_closed_in_children(pair):
    reading, writing = os.pipe()
    pair[0].send(Message({"a": "pipe"}), (writing,))
    os.close(writing)
    message, (mine,) = pair[1].receive()
    assert message.content == {"a": "pipe"} and not os.get_inheritable(mine)
    os.write(mine, b"hello")
    assert os.read(reading, 5) == b"hello"
    os.close(mine)
    os.close(reading)


def test_the_end_of_the_other_side_is_none(pair):
    pair[0].send(Message({"last": 1}))
    pair[0].close()
    assert is_readable(pair[1].fileno())
    assert pair[1].receive() == (Message({"last": 1}), [])
    assert pair[1].receive() is None
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        pair[1].send(Message({}))


@pytest.mark.parametrize(
    "content", [b"", b"no json", b"\2\0\0\0[]", b"\3\0\0\0{}", b"\xff\xff\xff\xff{}", b"\1\0\0\0\xff", b"x" * 140_000]
)
def test_what_is_no_message_is_refused_and_its_descriptors_closed(pair, content):
    before = open_files()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 20))]
    pair[0]._socket.sendmsg([content], rights)
    with pytest.raises(CorruptError):
        pair[1].receive()
    assert not opened_since(before)


def test_the_other_ends_user_is_known(pair):
    assert pair[0].peer_uid() == os.getuid()


def test_descriptors_above_1023_can_be_asked():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("no more than 1024 descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    reading, writing = os.pipe()
    try:
        os.dup2(reading, 1500, inheritable=False)
        assert not is_readable(1500)
        os.write(writing, b"x")
        assert is_readable(1500)
    finally:
        for fd in (reading, writing, 1500):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_killed_process_ends_its_link():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[b.fileno()])
    b.close()
    link, life = Link(a), os.pidfd_open(child.pid)
    assert not is_readable(a.fileno()) and not is_readable(life)
    child.kill()
    assert link.receive() is None
    child.wait()  # the kernel ends a process' sockets a moment before it ends the process
    assert is_readable(life)
    os.close(life)
    link.close()
