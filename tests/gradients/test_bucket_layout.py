from itertools import pairwise
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrank.gradients.config import GradientConfig
from xrank.gradients.plan import choose_bucket_size, lay_out, shard_bounds

parameters = st.lists(st.tuples(st.integers(0, 700), st.booleans()), max_size=12)


@given(parameters, st.none() | st.integers(1, 1500), st.integers(0, 9), st.booleans())
def test_invariant_11(told, bucket_size, num_shards, is_wide):
    """Reverse order, disjoint, aligned, equal shards, every parameter whole in one bucket."""
    numels, is_alone = tuple(numel for numel, _ in told), tuple(alone for _, alone in told)
    offsets, buckets = lay_out(numels, is_alone, bucket_size, num_shards, is_wide)
    assert sorted(index for bucket in buckets for index in bucket.members) == list(range(len(told)))
    order = [index for bucket in buckets for index in bucket.members]
    assert order == sorted(order, reverse=True)

    end = 0
    for bucket in buckets:
        assert bucket.start == end
        place = bucket.start
        for index in bucket.members:
            assert offsets[index] >= place
            assert offsets[index] - place < (64 if num_shards else 1)
            place = offsets[index] + numels[index]
        assert place == bucket.start + bucket.numel_unpadded <= bucket.stop
        end = bucket.stop

    if not num_shards:
        assert end == sum(b.numel_unpadded for b in buckets) == sum(numels)
        return
    assert all(offset % 64 == 0 for offset in offsets)
    for bucket in buckets:
        multiple = lcm(num_shards, 128, 65536 if is_wide else 1)
        assert bucket.stop % multiple == 0 and bucket.stop - bucket.start - bucket.numel_unpadded < multiple
        shards = [shard_bounds(bucket.start, bucket.stop, num_shards, place) for place in range(num_shards)]
        assert shards[0][0] == bucket.start and shards[-1][1] == bucket.stop
        assert all(a[1] == b[0] for a, b in pairwise(shards))
        assert len({stop - start for start, stop in shards}) == 1


def test_megatrons_numbers():
    # megatron-core 0.16.1's _ParamAndGradBuffer, bucket size 300, 4 ranks, the first parameter a shared embedding:
    # (0, 32, 0), (64, 320, 0), then a bucket from 384: (384, 1184, 1), ends 384 and 1280.
    offsets, buckets = lay_out((800, 256, 32), (True, False, False), 300, 4, False)
    assert offsets == (384, 64, 0)
    assert [(bucket.start, bucket.stop, bucket.numel_unpadded) for bucket in buckets] == [
        (0, 384, 320),
        (384, 1280, 800),
    ]
    # A layer of 4.2M elements with buckets of 1M is a bucket a layer.
    assert len(lay_out((4_200_000,) * 24, (False,) * 24, 1_000_000, 0, False)[1]) == 24
    assert len(lay_out((4_200_000,) * 24, (False,) * 24, None, 0, False)[1]) == 1


def test_a_bucket_that_is_just_full_is_closed():
    assert [bucket.members for bucket in lay_out((5, 5, 4), (False,) * 3, 9, 0, False)[1]] == [(2, 1), (0,)]


@pytest.mark.parametrize(
    ("numel", "size"), [(0, 1_000_000), (8_000_000, 1_000_000), (80_000_000, 10_000_000), (10**12, 25_000_000)]
)
def test_the_default_follows_the_size_of_the_model(numel, size):
    overlapped = GradientConfig(overlap_grad_reduce=True)
    assert choose_bucket_size(overlapped, [numel // 2, numel - numel // 2]) == size
    assert choose_bucket_size(GradientConfig(), [numel]) is None
    assert choose_bucket_size(GradientConfig(bucket_size=7), [numel]) is None
    assert choose_bucket_size(GradientConfig(overlap_grad_reduce=True, bucket_size=7), [numel]) == 7
