"""The memory of an execution, and its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from xrank.errors import UsageError, option
from xrank.plan.object_source import ObjectSource
from xrank.plan.object_units import ROOM_NBYTES
from xrank.plan.planner import Plan
from xrank.plan.windows import WINDOW_NBYTES

STORE_WORKERS = 8
"""Fewest workers that read from stores to where the bytes stay: most of the time they wait for answers."""
_FEW_WORKERS = 4
"""Fewest workers that read from stores by blocks, which threads of the source ask for ahead."""
_STAGING_NBYTES = 2 << 20
_SMALLEST_STAGING_NBYTES = 256 << 10
_MOST_BLOCKS_NBYTES = 64 << 20
_SAMPLE = 64
_OWN_RUN = 4
"""Windows of a store's bytes that a worker makes at once in its own memory: each needs few requests."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Number of worker threads, and bytes of each one's staging buffer beside its window; casts need as much again."""

    workers: int
    staging_nbytes: int
    allowed_nbytes: int = field(default=0, compare=False)
    """Memory that the caller allows; buffers may take less."""
    num_windows: int = 1
    """Windows that a worker makes at once in its own memory."""

    @classmethod
    def from_memory(cls, max_memory_nbytes: int, workers: int, *, window_nbytes: int = WINDOW_NBYTES) -> Budget:
        """Return the largest budget whose buffers fit that many bytes, with that many for each worker's window.

        Raises:
            UsageError: not even one worker with the smallest buffers fits.
        """
        smallest = window_nbytes + 2 * _SMALLEST_STAGING_NBYTES
        if workers < 1 or max_memory_nbytes < smallest:
            raise UsageError(
                "the memory budget or the number of workers is too small",
                got=f"{max_memory_nbytes:,} bytes, {workers} workers",
                want=f"at least {smallest:,} bytes and one worker",
                next_step=f"give a larger {option('max_memory')}; 64MB is the default",
            )
        workers = min(workers, max_memory_nbytes // smallest)
        room = (max_memory_nbytes // workers - window_nbytes) // 2
        # Whole pages, as the buffers are maps.
        return cls(workers, min(_STAGING_NBYTES, room // 4096 * 4096), max_memory_nbytes)

    def parts_room(self, *, is_straight: bool) -> int:
        """Return the bytes that the parts of uploads may take; see `is_mostly_straight`."""
        allowed = max(self.allowed_nbytes, self.nbytes)
        return allowed * 5 // 8 if is_straight else allowed // 3

    def share_with(
        self, objects: ObjectSource, parts: tuple[int, int] | None, *, in_memory: bool, is_straight: bool
    ) -> Budget:
        """Return the budget of a gather from stores: memory for runs of windows, blocks, and staging buffers.

        Args:
            objects: reads the blocks.
            parts: bytes and number of the target's parts, in which windows are made.
            in_memory: whether windows are made in memory that the caller gives, as far as it can.
            is_straight: see `is_mostly_straight`.

        Blocks take half of what the windows leave, staging buffers a quarter; answers on their way and what the
        allocator keeps take the rest.
        """
        allowed = max(self.allowed_nbytes, self.nbytes)
        nbytes, num_windows, window_nbytes = 0, 1, 0
        fitting = allowed * 5 // 8 // (_OWN_RUN * WINDOW_NBYTES)
        if parts is not None:
            nbytes, workers = parts[0], parts[1] - 1  # each worker fills a part, and one is on its way
        elif is_straight and not in_memory and fitting >= _FEW_WORKERS:
            num_windows, workers = _OWN_RUN, min(max(self.workers, STORE_WORKERS), fitting)
            nbytes = workers * num_windows * WINDOW_NBYTES
        else:
            workers = max(self.workers, STORE_WORKERS if in_memory else _FEW_WORKERS)
            window_nbytes = WINDOW_NBYTES
        smallest = window_nbytes + 2 * _SMALLEST_STAGING_NBYTES
        rest = max(2 * smallest, allowed - nbytes)
        objects.limit(min(rest // 2, _MOST_BLOCKS_NBYTES))
        own = max(smallest, min(rest // 4, ROOM_NBYTES))
        return replace(Budget.from_memory(own, workers, window_nbytes=window_nbytes), num_windows=num_windows)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, those of casts included."""
        return self.workers * (self.num_windows * WINDOW_NBYTES + 2 * self.staging_nbytes)


def is_mostly_straight(plan: Plan, files: Sequence[int], objects: ObjectSource) -> bool:
    """Return whether most bytes of stores need no memory beside their windows.

    Args:
        plan: the plan.
        files: indices of the output files that are made; some of their tensors tell of all.
        objects: the stores that are read.
    """
    straight = total = 0
    tensors = [tensor for index in files for tensor in plan.files[index].tensors]
    for tensor in tensors[:: len(tensors) // _SAMPLE + 1]:
        nests = tensor.copies.nests
        sizes = nests.sizes
        is_dense = (nests.y_ends - nests.y == sizes) & (nests.swap().y_ends - nests.x == sizes)
        straight += int(sizes[is_dense].sum()) if tensor.source_dtype == tensor.output.dtype else 0
        total += int(sizes.sum())
    return objects.fills_memory and 2 * straight > total
