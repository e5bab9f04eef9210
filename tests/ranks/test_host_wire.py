"""The wire of one host: what goes through boxes and sockets, and who is woken when."""

import os
import select
import socket

import pytest

from xrank.ranks.waits import Peer
from xrank.ranks.wire import Bells, Board, HostWire, Link, Message, Sleep, Status

pytestmark = pytest.mark.usefixtures("nothing_left")

RANKS = (2, 0, 1)


@pytest.fixture
def wires():
    fd = Board.create(len(RANKS))
    bells = Bells.create()
    links = {rank: {} for rank in RANKS}
    for rank in RANKS[1:]:
        links[2][rank], links[rank][2] = map(Link, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    wires = {}
    for rank in RANKS:
        peers = {r: Peer.from_this_process(r) for r in RANKS if r != rank}
        own_bells = Bells(map(os.dup, bells.descriptors))
        wires[rank] = HostWire(RANKS, rank, Board(fd, len(RANKS)), own_bells, links[rank], peers)
    os.close(fd)
    bells.close()
    yield wires
    for wire in wires.values():
        wire.close()
        wire.close()


def is_rung(wire):
    """Say whether a wait of this wire's would end now."""
    return bool(select.select([wire._events], [], [], 0)[0])


def test_messages_keep_their_order_whichever_way_they_go(wires):
    first, sender = wires[2], wires[0]
    sizes = [10, 50_000, 10, 10, 30_000, 10, 45_000, 20]
    sent = [Message({"i": i, "text": "x" * size}) for i, size in enumerate(sizes)]
    for i, message in enumerate(sent):
        sender.send(2, message)
        if i % 3 == 2:
            first.pump(0)
        if i % 3 == 0:
            first.look()
    while len(first.inboxes[0]) < len(sent):
        first.pump(10)
    assert list(first.inboxes[0]) == sent and not first.inboxes[1]


def test_what_lies_in_the_box_comes_before_what_came_by_socket_later(wires):
    sent = [Message({}, b"in the box"), Message({}, b"by socket")]
    for message in sent:
        wires[0].send(2, message)
    wires[2].pump(0)
    assert list(wires[2].inboxes[0]) == sent


def test_a_socket_is_used_only_where_the_box_is_full(wires):
    first, sender = wires[2], wires[0]
    for i in range(3):
        sender.send(2, Message({"i": i}))
        assert is_rung(first) is (i > 0)
    first.look()
    assert [message.content["i"] for message in first.inboxes[0]] == [0]
    for _ in range(2):  # a message of each rank's at a time
        first.pump(0)
    assert [message.content["i"] for message in first.inboxes[0]] == [0, 1, 2]
    sender.send(2, Message({}, b"3"))
    first.look()
    assert first.inboxes[0][-1] == Message({}, b"3") and not is_rung(first)


def test_nobody_is_woken_who_does_not_sleep(wires):
    wires[0].set_status(Status.ARRIVED, 1)
    wires[0].send(2, Message({}, b"x"))
    wires[0].nudge((2,))
    wires[2].nudge((0, 1))
    assert not any(map(is_rung, wires.values()))


def test_who_sleeps_lightly_is_woken_by_any_message_and_any_nudge(wires):
    wires[2].set_status(Status.SLEEPS, Sleep.LIGHT)
    wires[0].send(2, Message({}, b"x"))
    assert is_rung(wires[2])
    wires[2].pump(0)
    assert not is_rung(wires[2]), "a ring is heard once"
    wires[1].nudge((2,))
    assert is_rung(wires[2]) and not is_rung(wires[0])
    wires[0].set_status(Status.SLEEPS, Sleep.LIGHT)
    wires[2].nudge((0, 1))
    assert is_rung(wires[0])


@pytest.mark.parametrize("word", [Status.ARRIVED, Status.ENDED])
def test_who_waits_for_all_is_woken_by_the_last(wires, word):
    wires[2].set_status(Status.SLEEPS, Sleep.UNTIL_ALL)
    wires[0].send(2, Message({}, b"x"))
    wires[1].set_status(word, 4)
    wires[0].set_status(word, 5)
    wires[0].nudge((2,))
    wires[1].set_status(Status.LEFT, 9)
    assert not is_rung(wires[2])
    wires[1].set_status(word, 5)
    assert is_rung(wires[2])


def test_no_record_is_looked_for_without_an_alarm(wires, monkeypatch):
    monkeypatch.setattr(Board, "failure", lambda *_: pytest.fail("nobody failed"))
    assert wires[2].failures() == {}
