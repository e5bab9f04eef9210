"""Links: messages with borders, descriptors, and the other end's death."""

import array
import os
import resource
import socket

import pytest

from tests.open_files import open_files, opened_since
from xrank.errors import CorruptError
from xrank.ranks.waits import is_readable
from xrank.ranks.wire import Link, Message


@pytest.fixture
def pair():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    links = Link(a), Link(b)
    yield links
    for link in links:
        link.close()


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
