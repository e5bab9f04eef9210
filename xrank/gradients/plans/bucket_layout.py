"""Where gradients lie: each in a buffer, the last registered first, and the buckets that buffers are cut into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from xrank.gradients.config import GradientConfig

__all__ = ["BufferLayout", "Extent", "bucket_size_of", "default_bucket_size", "lay_out", "shard_of"]

_START_ALIGNMENT = 64
"""Elements: 128 bytes of 16 bits (megatron/core/distributed/param_and_grad_buffer.py), for the sake of kernels."""
_END_ALIGNMENT = 128
_WIDE_END_ALIGNMENT = 1 << 16
_MIN_BUCKET_SIZE = 1_000_000
_MAX_BUCKET_SIZE = 25_000_000
_NUM_BUCKETS = 8


@dataclass(frozen=True, slots=True)
class Extent:
    """A bucket of one buffer."""

    start: int
    stop: int
    numel_unpadded: int
    members: tuple[int, ...]
    """Places of its parameters in the order of registration, the last one first."""


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Where the parameters of one buffer lie."""

    offsets: tuple[int, ...]
    """Of each parameter, in the order of registration."""
    buckets: tuple[Extent, ...]

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def numel_unpadded(self) -> int:
        """The sum of the buckets'."""
        return sum(bucket.numel_unpadded for bucket in self.buckets)


def default_bucket_size(numel: int) -> int:
    """Return the elements of a bucket where nobody says them: so that several leave while the backward runs.

    Args:
        numel: elements that are exchanged between the same ranks.
    """
    return max(_MIN_BUCKET_SIZE, min(_MAX_BUCKET_SIZE, numel // _NUM_BUCKETS))


@lru_cache(maxsize=256)
def lay_out(
    numels: tuple[int, ...], is_alone: tuple[bool, ...], bucket_size: int | None, num_shards: int, is_wide: bool
) -> BufferLayout:
    """Return where parameters lie. The same arguments give the same layout, on any rank.

    Args:
        numels: elements of each parameter, in the order of registration.
        is_alone: whether a parameter has a bucket of its own.
        bucket_size: elements from which on a bucket is closed; all are one bucket when None.
        num_shards: equal parts that every bucket is to be cut into; 0 for none, and then there is no padding at all.
        is_wide: buckets end at multiples of 65,536 elements too.
    """
    start_alignment = _START_ALIGNMENT if num_shards else 1
    end_alignment = lcm(num_shards, _END_ALIGNMENT, _WIDE_END_ALIGNMENT if is_wide else 1) if num_shards else 1
    offsets = [0] * len(numels)
    buckets: list[Extent] = []
    members: list[int] = []
    start = end = 0

    def close() -> None:
        nonlocal start, end
        stop = _aligned(end, end_alignment)
        buckets.append(Extent(start, stop, end - start, tuple(members)))
        members.clear()
        start = end = stop

    for index in reversed(range(len(numels))):
        if is_alone[index] and members:
            close()
        offsets[index] = _aligned(end, start_alignment)
        end = offsets[index] + numels[index]
        members.append(index)
        if is_alone[index] or (bucket_size is not None and end - start >= bucket_size):
            close()
    if members:
        close()
    return BufferLayout(tuple(offsets), tuple(buckets))


def shard_of(start: int, stop: int, num_shards: int, place: int) -> tuple[int, int]:
    """Return the part of a bucket that is the shard at a place."""
    size = (stop - start) // num_shards
    return start + place * size, start + (place + 1) * size


def bucket_size_of(config: GradientConfig, numels: Sequence[int]) -> int | None:
    """Return the elements from which on buckets are closed; None for one bucket a buffer.

    Args:
        config: says it, or leaves it to the size of the model.
        numels: elements of all parameters that are exchanged between the same ranks.
    """
    if not config.overlap_grad_reduce:
        return None
    return config.bucket_size or default_bucket_size(sum(numels))


def _aligned(index: int, alignment: int) -> int:
    return -(-index // alignment) * alignment
