"""Places of gradients in a buffer, the last registered parameter first, and the buckets that cut the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from xrank.gradients.config import GradientConfig

_START_ALIGNMENT = 64
"""Elements: 128 bytes of 16 bits (megatron/core/distributed/param_and_grad_buffer.py), which kernels prefer."""
_END_ALIGNMENT = 128
# Both as in that file: NCCL's bandwidth is high for sizes that a large power of two divides.
_WIDE_END_ALIGNMENT = 1 << 16
_MIN_BUCKET_SIZE = 1_000_000
_MAX_BUCKET_SIZE = 25_000_000
_NUM_BUCKETS = 8


@dataclass(frozen=True, slots=True)
class Extent:
    """The place of one bucket in its buffer."""

    start: int
    stop: int
    numel_unpadded: int
    members: tuple[int, ...]
    """Indices of its parameters in the order of registration, the last one first."""


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Places of the parameters of one buffer."""

    offsets: tuple[int, ...]
    """Offset of each parameter in elements, in the order of registration."""
    buckets: tuple[Extent, ...]

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].stop if self.buckets else 0


@lru_cache(maxsize=256)
def lay_out(
    numels: tuple[int, ...], is_alone: tuple[bool, ...], bucket_size: int | None, num_shards: int, is_wide: bool
) -> BufferLayout:
    """Return the places of parameters. The same arguments give the same layout on any rank."""
    # Without shards no rank needs equal parts, so padding would only be sent for nothing.
    start_alignment = _START_ALIGNMENT if num_shards else 1
    end_alignment = lcm(num_shards, _END_ALIGNMENT, _WIDE_END_ALIGNMENT if is_wide else 1) if num_shards else 1
    offsets = [0] * len(numels)
    buckets: list[Extent] = []
    members: list[int] = []
    start = end = 0

    def close() -> None:
        nonlocal start, end
        # A bucket ends where all shards are equal and aligned; the next one starts there.
        stop = _align(end, end_alignment)
        buckets.append(Extent(start, stop, end - start, tuple(members)))
        members.clear()
        start = end = stop

    # Backwards produce gradients from the last registered parameter to the first, so buckets fill in this order.
    for index in reversed(range(len(numels))):
        if is_alone[index] and members:
            close()
        offsets[index] = _align(end, start_alignment)
        end = offsets[index] + numels[index]
        members.append(index)
        if is_alone[index] or (bucket_size is not None and end - start >= bucket_size):
            close()
    if members:
        close()
    return BufferLayout(tuple(offsets), tuple(buckets))


def choose_bucket_size(config: GradientConfig, numels: Sequence[int]) -> int | None:
    """Return the number of elements that closes a bucket; None for one bucket per buffer.

    The default depends on the elements that the same ranks exchange: several buckets leave while the backward runs.
    """
    if not config.overlap_grad_reduce:
        return None
    return config.bucket_size or max(_MIN_BUCKET_SIZE, min(_MAX_BUCKET_SIZE, sum(numels) // _NUM_BUCKETS))


def _align(index: int, alignment: int) -> int:
    return -(-index // alignment) * alignment


def shard_bounds(start: int, stop: int, num_shards: int, place: int) -> tuple[int, int]:
    """Return the bounds of one shard of a bucket."""
    size = (stop - start) // num_shards
    return start + place * size, start + (place + 1) * size
