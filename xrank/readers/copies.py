"""Detects a rank's file that is a copy of another rank's, for all readers of torch archives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isal import isal_zlib

from xrank.dtypes import dtype
from xrank.errors import ContradictionError
from xrank.formats.regular_file import Origin
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive

_TELLING_ELEMENTS = 8
_ONES = {"F32": b"\0\0\x80\x3f", "BF16": b"\x80\x3f", "F16": b"\0\x3c"}


class CopiedValues:
    """Detects copied files: ranks hold different weights, so the checksums of two files cannot all be equal."""

    def __init__(self) -> None:
        self._seen: dict[tuple[tuple[int, int], ...], Origin] = {}

    def add(self, archive: TorchArchive, tensors: Iterable[ArchivedTensor], num_elements: int, origin: Origin) -> None:
        """Add the tensors that only this rank should hold, with `num_elements` elements besides padding.

        Raises:
            ContradictionError: another rank holds the same.
        """
        # A few elements may be equal by chance, and padding often is.
        if not archive.has_checksums or num_elements < _TELLING_ELEMENTS:
            return
        found = tuple(
            (archive.records[t.key].nbytes, archive.records[t.key].crc32) for t in tensors if is_telling(archive, t)
        )
        if not found:
            return
        other = self._seen.setdefault(found, origin)
        if other is not origin:
            raise ContradictionError(
                origin.locate(f"is a copy of rank {other.rank}'s file"),
                rank=origin.rank,
                file=origin.path,
                got=f"the checksums of all {len(found)} tensors as in {other.path}",
                want="different weights",
                next_step=f"copy rank {origin.rank}'s file, or rank {other.rank}'s, again from where it was saved",
            )


def is_telling(archive: TorchArchive, tensor: ArchivedTensor) -> bool:
    """Return whether a tensor's values tell it from others; zeros or ones (norms, new adapters, padding) do not."""
    record, width = archive.records[tensor.key], dtype(tensor.dtype).nbytes
    if tensor.shape in ((), (0,)) or record.nbytes < width:
        return False
    count = record.nbytes // width
    patterns: Sequence[bytes] = [bytes(width), *([_ONES[tensor.dtype]] if tensor.dtype in _ONES else [])]
    return all(compute_repeated_crc32(pattern, count) != record.crc32 for pattern in patterns)


def compute_repeated_crc32(pattern: bytes, count: int) -> int:
    """Return the CRC-32 of a pattern repeated `count` times, in O(log count) steps."""
    total, total_nbytes = 0, 0
    power, power_nbytes = isal_zlib.crc32(pattern), len(pattern)
    # Square and multiply: `power` is the CRC of 1, 2, 4, ... repetitions, and the bits of the count choose among them.
    while count:
        if count & 1:
            total = isal_zlib.crc32_combine(total, power, power_nbytes) if total_nbytes else power
            total_nbytes += power_nbytes
        power, power_nbytes = isal_zlib.crc32_combine(power, power, power_nbytes), 2 * power_nbytes
        count >>= 1
    return total
