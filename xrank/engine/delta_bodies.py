"""Bodies of a delta: what has changed in each tensor from one version of a model to the next, compressed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import xxhash
from msgspec import Struct

from xrank.engine.executor import Budget
from xrank.engine.made_records import ScratchFile
from xrank.engine.tensor_pairs import MEMORY_NBYTES, Bytes, TensorSide, read_pairs
from xrank.formats.deltas import BodyWriter, Checksum, most_frame_nbytes, new_checksum
from xrank.ranks.memory import LocalBytes


class DeltaBody(Struct, frozen=True):
    """The change of a tensor between two versions."""

    number: int
    """Number of the tensor in the plans that are compared."""
    nbytes: int
    """Bytes of the frame; 0: the tensor has not changed."""
    checksum: str
    """Checksum of the new bytes, of the kind that the delta records."""
    digest: str = ""
    """XXH3-128 of the new bytes; empty: no plan was read."""
    base_digest: str = ""
    """XXH3-128 of the old bytes."""


class Bodies(Struct, frozen=True, eq=False):
    """The bodies of some tensors."""

    found: Sequence[DeltaBody]
    frames: Sequence[LocalBytes]
    """The frames of those that have changed, in this order."""


class FrameFile:
    """A file with a place for the largest frame of each tensor, by number, of which the disk has only written bytes.

    Frames of several tensors grow in it at the same time, and memory stays flat.
    """

    def __init__(self, rooms: Mapping[int, int]) -> None:
        self._starts = dict(zip(rooms, accumulate(rooms.values(), initial=0), strict=False))
        self._ends = dict(self._starts)
        self._file = ScratchFile(None, sum(rooms.values()), "the changes of tensors are kept")

    def put(self, number: int, data: bytes) -> None:
        """Add bytes to a frame; errors as of `ScratchFile.write`."""
        self._file.write(memoryview(data), self._ends[number])
        self._ends[number] += len(data)

    def frame(self, number: int) -> LocalBytes:
        """Return a frame."""
        return _Frame(self._file, self._starts[number], self._ends[number] - self._starts[number])


class _Frame:
    def __init__(self, file: ScratchFile, start: int, nbytes: int) -> None:
        self._file, self._start, self.nbytes = file, start, nbytes
        self.address: int | None = None

    def find_row(self, start: int, nbytes: int) -> memoryview | None:
        return None

    def read_into(self, start: int, into: memoryview) -> None:
        self._file.read_into(into, self._start + start)


class _UnfinishedBody(Struct, eq=False):
    """A tensor whose bytes come."""

    writer: BodyWriter
    checksum: Checksum
    digests: tuple[Checksum, Checksum]
    """Of the new and the old bytes."""


def make_bodies(
    sides: tuple[TensorSide, TensorSide],
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
    sizes = {number: sides[0].plan.files[number].output.nbytes for number in numbers}
    file = FrameFile({number: most_frame_nbytes(encoding, nbytes) for number, nbytes in sizes.items()})
    making: dict[int, _UnfinishedBody] = {}
    found: dict[int, DeltaBody] = {}

    def take(number: int, low: int, new: Bytes, old: Bytes) -> None:
        if not low:
            writer = BodyWriter(encoding, sizes[number], lambda data: file.put(number, data))
            digests = xxhash.xxh3_128(), xxhash.xxh3_128()
            making[number] = _UnfinishedBody(
                writer, digests[0] if checksum == "xxh3-128" else new_checksum(checksum), digests
            )
        one = making[number]
        one.writer.add(old, new)
        for state, data in zip(one.digests, (new, old), strict=True):
            state.update(data.data)
        if one.checksum is not one.digests[0]:
            one.checksum.update(new.data)
        keep(number, low, new)
        if low + len(new) == sizes[number]:
            nbytes = 0 if one.writer.finish() is None else file.frame(number).nbytes
            digests_text = [state.hexdigest() for state in one.digests]
            found[number] = DeltaBody(number, nbytes, one.checksum.hexdigest(), *digests_text)
            del making[number]

    budget = Budget.from_memory(max_memory_nbytes, workers, window_nbytes=MEMORY_NBYTES)
    order = sorted(numbers, key=lambda number: -sizes[number])
    read_pairs(sides, order, budget, take, cancelled=cancelled, progress=progress)
    bodies = [found[number] for number in numbers]
    return Bodies(bodies, [file.frame(one.number) for one in bodies if one.nbytes])
