"""Bodies of a delta: what has changed in each tensor from one version of a model to the next, compressed into a file.

The file has a place for the largest frame of each tensor and takes only the bytes that are written: the bodies of
several tensors grow in it at the same time, and memory stays flat. It has no name, and goes away with the process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from itertools import accumulate

import xxhash
from msgspec import Struct

from xrank.engine.executor import Budget
from xrank.engine.tensor_pairs import MEMORY_NBYTES, Bytes, Side, read_pairs
from xrank.environment import environ, scratch_folder
from xrank.formats.deltas import BodyWriter, Checksum, most_frame_nbytes, new_checksum
from xrank.ranks.memory import LocalBytes, MemoryBytes, explain_no_space
from xrank.system import write_at

_PAGE_NBYTES = 4096


class Body(Struct, frozen=True):
    """What a tensor has become."""

    number: int
    """Of the tensor in the plans that were compared."""
    nbytes: int
    """Bytes of the frame; 0: the tensor has not changed."""
    checksum: str
    """Of the new bytes, of the delta's kind."""
    digest: str
    """XXH3-128 of the new bytes."""
    base_digest: str
    """XXH3-128 of the old bytes."""


class Bodies(Struct, frozen=True, eq=False):
    """The bodies of some tensors."""

    found: Sequence[Body]
    """By rising number."""
    frames: Sequence[LocalBytes]
    """The frames of those that have changed, in this order."""


class _Making(Struct, eq=False):
    """A tensor whose bytes come."""

    writer: BodyWriter
    checksum: Checksum
    digests: tuple[Checksum, Checksum]
    """Of the new and the old bytes."""
    end: int
    """Where the file takes the next bytes of its frame."""


def make_bodies(
    sides: tuple[Side, Side],
    numbers: Sequence[int],
    encoding: str,
    checksum: str,
    max_memory_nbytes: int,
    workers: int,
    keep: Callable[[int, int, Bytes], object] = lambda number, low, new: None,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Bodies:
    """Compare tensors by number, those of the new version with those of the old one; errors as `read_pairs`.

    The largest tensors are taken first, so that no thread is left with one of them at the end. `keep` gets each stretch
    of new bytes after it was compared: the number of the tensor, the first byte, and the bytes.
    """
    import tempfile  # most commands need no scratch file

    plan, folder = sides[0].plan, scratch_folder(environ())
    sizes = {number: plan.files[number].output.nbytes for number in sorted(numbers)}
    rooms = [-(-most_frame_nbytes(encoding, n) // _PAGE_NBYTES) * _PAGE_NBYTES for n in sizes.values()]
    starts = dict(zip(sizes, accumulate(rooms, initial=0), strict=False))
    making: dict[int, _Making] = {}
    found: dict[int, Body] = {}
    with tempfile.TemporaryFile(dir=folder) as file:
        fd = file.fileno()

        def put(number: int, data: bytes) -> None:
            view = memoryview(data)
            while view:
                written = write_at(fd, view, making[number].end)
                view, making[number].end = view[written:], making[number].end + written

        def begin(number: int) -> _Making:
            writer = BodyWriter(encoding, sizes[number], lambda data: put(number, data))
            new, old = xxhash.xxh3_128(), xxhash.xxh3_128()
            return _Making(
                writer, new if checksum == "xxh3-128" else new_checksum(checksum), (new, old), starts[number]
            )

        def take(number: int, low: int, new: Bytes, old: Bytes) -> None:
            if not low:
                making[number] = begin(number)
            one = making[number]
            one.writer.add(old, new)
            for digest, data in zip(one.digests, (new, old), strict=True):
                digest.update(data.data)
            if one.checksum is not one.digests[0]:
                one.checksum.update(new.data)
            keep(number, low, new)
            if low + len(new) == sizes[number]:
                is_changed = one.writer.finish() is not None
                nbytes = one.end - starts[number] if is_changed else 0
                new_digest, old_digest = (digest.hexdigest() for digest in one.digests)
                found[number] = Body(number, nbytes, one.checksum.hexdigest(), new_digest, old_digest)
                del making[number]

        with explain_no_space(folder, "what has changed in the tensors", sum(sizes.values())):
            os.ftruncate(fd, sum(rooms))
            budget = Budget.from_memory(max_memory_nbytes, workers, window_nbytes=MEMORY_NBYTES)
            order = sorted(sizes, key=lambda number: -sizes[number])
            read_pairs(sides, order, budget, take, cancelled=cancelled, progress=progress)
        memory = memoryview(mmap.mmap(fd, sum(rooms))) if rooms else memoryview(b"")
    bodies = [found[number] for number in sizes]
    places = [(starts[one.number], one.nbytes) for one in bodies if one.nbytes]
    return Bodies(bodies, [MemoryBytes(memory[start : start + nbytes]) for start, nbytes in places])
