"""Letter boxes: one message at a time, in the order of their numbers, as another mapping of the memory sees it."""

import os
import subprocess
import sys

import pytest

from xrank.ranks import wire
from xrank.ranks.wire import BOX_NBYTES, Board, Mailbox


@pytest.fixture
def boards():
    fd = Board.create(3)
    boards = Board(fd, 3), Board(fd, 3)
    os.close(fd)
    yield boards
    for board in boards:
        board.close()


@pytest.fixture
def boxes(boards, monkeypatch):
    """A rank's box, as it and as the first rank sees it."""
    monkeypatch.setattr(wire, "STORES_ARE_ORDERED", True)
    return Mailbox(boards[0], 1), Mailbox(boards[1], 1)


def put(box, number, *parts):
    return box.put(number, parts)


def test_a_full_box_takes_nothing_until_all_before_was_taken(boxes):
    mine, firsts = boxes
    assert put(mine, 1, b"one")
    assert not put(mine, 2, b"two"), "so it goes another way"
    assert firsts.take(1) == b"one"
    assert not put(mine, 3, b"three"), "two is still on its way"
    firsts.skip(2)
    assert put(mine, 3, b"three") and firsts.take(3) == b"three"


def test_what_does_not_fit_goes_another_way(boxes):
    mine, firsts = boxes
    capacity = BOX_NBYTES - 64
    assert not put(mine, 1, bytes(capacity + 1))
    content = os.urandom(capacity)
    assert put(mine, 1, content) and firsts.take(1) == content


def test_where_stores_may_be_seen_out_of_order_no_box_is_used(boards, monkeypatch):
    monkeypatch.setattr(wire, "STORES_ARE_ORDERED", False)
    assert not put(Mailbox(boards[0], 1), 1, b"x")


WRITER = """
import os, sys
from xrank.ranks.wire import Board, Mailbox
box = Mailbox(Board(int(sys.argv[1]), 2), 1)
for number in range(1, 20_001):
    content = number.to_bytes(4, "little") * (number % 97)
    looks = 0
    while not box.put(number, [content]):
        looks += 1
        if looks % 20 == 0:
            os.sched_yield()  # the reader may need this very core
"""


@pytest.mark.skipif(not wire.STORES_ARE_ORDERED, reason="no box is used on these processors")
def test_twenty_thousand_messages_of_another_process_come_whole_and_in_order():
    fd = Board.create(2)
    board = Board(fd, 2)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(fd)], pass_fds=[fd]) as writer:
        box, number, looks = Mailbox(board, 1), 1, 0
        while number <= 20_000:
            if (content := box.take(number)) is not None:
                assert content == number.to_bytes(4, "little") * (number % 97)
                number += 1
            elif (looks := looks + 1) % 20 == 0:
                os.sched_yield()
                assert writer.poll() in (None, 0)
    board.close()
    os.close(fd)
