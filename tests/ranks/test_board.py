"""The board: pages of shared memory, as another mapping of them sees them."""

import os
import random

import pytest

from tests.named_memory import named_memory
from xrank.ranks.failure import FailureRecord
from xrank.ranks.wire import Board


@pytest.fixture
def boards():
    fd = Board.create(3)
    boards = Board(fd, 3), Board(fd, 3)
    os.close(fd)
    yield boards
    for board in boards:
        board.close()


def test_the_first_failure_stays_and_is_seen_by_all(boards):
    mine, theirs = boards
    assert [theirs.failure(i) for i in range(3)] == [None] * 3
    first = FailureRecord(2, "host", 7, "x" * 5000, "call")
    mine.fail(2, first)
    mine.fail(2, FailureRecord(2, "host", 7, "another", "call"))
    seen = theirs.failure(2)
    assert seen is not None and seen.cause.startswith("xxx") and seen.rank == 2
    assert theirs.failure(1) is None and theirs.failure(0) is None


def test_half_a_record_does_not_count(boards):
    mine, theirs = boards
    mine.fail(0, FailureRecord(0, "host", 7, "a cause", "call"))
    chosen = random.Random(0)
    whole = bytes(mine.memory[64:256])
    for _ in range(200):
        at = chosen.randrange(4, 8 + 60)
        mine.memory[64 + at] ^= 1 << chosen.randrange(8)
        assert theirs.failure(0) is None
        mine.memory[64:256] = whole
    for length in (0, -1 & 0xFFFFFFFF, 4097):
        mine.memory[64:68] = length.to_bytes(4, "little")
        assert theirs.failure(0) is None


def test_a_board_has_no_name_and_may_be_closed_twice(boards):
    assert named_memory() == []
    boards[0].close()
    boards[0].close()
