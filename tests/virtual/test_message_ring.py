"""Rings: records arrive complete and in order, for any length and any relative speed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampled import count_of
from xrank.virtual.channels.block_arena import BlockArena
from xrank.virtual.channels.message_ring import RingReader, RingWriter, num_sent
from xrank.virtual.channels.segment import Segment

STEPS = st.lists(st.one_of(st.integers(1, 200), st.integers(1, 100_000), st.none()), max_size=80)


@settings(max_examples=count_of(60))
@given(STEPS)
def test_records_come_whole_and_in_order(steps):
    """Numbers send a record of that length; None takes one."""
    segment = Segment(3)
    try:
        head = segment.ring(2, 0)
        arena = BlockArena(segment, 2)
        writer, reader = RingWriter(segment, head, arena), RingReader(segment, head)
        sent, taken = [], 0
        for number, step in enumerate([*steps, *[None] * (len(steps) + 1)]):
            if step is not None:
                sent.append(bytes([number % 255 + 1]) * step)
                writer.push(sent[-1])
                continue
            assert reader.has_record == (taken < len(sent))
            assert reader.pop() == (sent[taken] if taken < len(sent) else None)
            taken = min(taken + 1, len(sent))
        assert num_sent(segment, head) == reader.num_taken == len(sent)
        arena.take(1)
        assert arena.num_used <= 2  # the chunk that both are in
    finally:
        segment.close()


def test_every_pair_has_a_ring_of_its_own():
    segment = Segment(4)
    try:
        arenas = [BlockArena(segment, end) for end in range(4)]
        pairs = [(a, b) for a in range(4) for b in range(4)]
        for a, b in pairs:
            RingWriter(segment, segment.ring(a, b), arenas[a]).push(bytes([a, b]))
        for a, b in pairs:
            assert RingReader(segment, segment.ring(a, b)).pop() == bytes([a, b])
    finally:
        segment.close()
