"""Blocks: never two at one place, used again when they came back, joined with their neighbours."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampled import count_of
from tests.virtual.shared_ends import memory_of
from xrank.errors import NoSpaceError
from xrank.virtual.channels.block_arena import BlockArena, free_block, lend, view
from xrank.virtual.channels.segment import Segment

STEPS = st.lists(st.one_of(st.integers(0, 300_000), st.floats(0, 1, exclude_max=True)), max_size=60)


@settings(max_examples=count_of(60))
@given(STEPS)
def test_no_byte_has_two_users_and_no_room_is_lost(steps):
    """Whole numbers take a block of that size; a fraction gives back one of those that are in use."""
    segment = Segment(2)
    try:
        arena = BlockArena(segment, 1)
        blocks, most, held = [], 0, 0
        for number, step in enumerate(steps):
            if isinstance(step, float):
                if blocks:
                    block, fill = blocks.pop(int(step * len(blocks)))
                    assert (view(segment, block) == fill).all()
                    free_block(segment, block.mark)
                    held -= _room(block.nbytes)
                continue
            block = arena.take(step)
            assert block.offset % 64 == 0 and block.nbytes == step
            arena.write(block.offset, memoryview(np.full(step, number % 251, np.uint8)))
            assert arena.is_warm(block.offset + step)
            blocks.append((block, number % 251))
            held += _room(step)
            most = max(most, held)
        for block, fill in blocks:
            assert (view(segment, block) == fill).all()
            free_block(segment, block.mark)
        assert arena.take(most).offset == segment.arena(1)  # all is one piece again
        assert arena.num_used == 1
    finally:
        segment.close()


def _room(nbytes):
    return max(64, -(-nbytes // 64) * 64)


def test_the_end_of_a_block_that_was_not_filled_has_pages_for_the_next_one():
    segment = Segment(2)
    try:
        arena = BlockArena(segment, 0)
        first, second = arena.take(1 << 20), arena.take(100)
        arena.write(second.offset, memoryview(b"x" * 100))
        assert arena.is_warm(first.offset + first.nbytes)
        # Pages must exist: a store to a missing page of a full memory would end the process.
        assert memory_of(segment) > 1 << 20
        assert not view(segment, first).any() and (view(segment, second) == ord("x")).all()
    finally:
        segment.close()


def test_a_lease_ends_with_the_last_of_its_views():
    segment = Segment(2)
    try:
        arena = BlockArena(segment, 0)
        block = arena.take(100)
        arena.write(block.offset, memoryview(bytes(range(100))))
        views = [lend(segment, block)]
        views += [views[0][5:], views[0].view(np.int32).reshape(5, 5), memoryview(views[0])[3:]]
        assert views[0].flags.writeable
        while views:
            assert segment.data[block.mark] == 1
            views.pop(0)
        assert segment.data[block.mark] == 0
    finally:
        segment.close()


def test_a_block_that_finds_no_room_loses_nothing():
    segment = Segment(2)
    try:
        arena = BlockArena(segment, 0)
        low, high = arena.take(64), arena.take(64)
        free_block(segment, high.mark)
        for _ in range(3):
            with pytest.raises(NoSpaceError):
                arena.take(segment.arena_nbytes)
        assert arena.num_used == 1
        assert arena.take(64).offset == high.offset
        free_block(segment, low.mark)
    finally:
        segment.close()
