"""Files whose last blocks are zeros, as a crash leaves them where sizes reached the disk and data did not.

File systems that allocate late (ext4, XFS) commit a file's size before its data unless the writer calls fsync; what is
missing then reads as zeros from a border of blocks on. Tensors of zeros begin at their own first byte, which is on such
a border by chance only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from xrank.formats.regular_file import open_regular
from xrank.plan.source import NO_CHECKSUM, StoredModel

_BLOCK_NBYTES = 4096
_CHUNK_NBYTES = 1 << 20
_MAX_ELEMENT_NBYTES = 8
_CAUSE = (
    "a crash leaves this if the data had not reached the disk. The format records no checksums, so these may also be "
    "tensors of zeros: compare the file with another copy, or the tensors with an earlier step"
)


def note_zero_tails(model: StoredModel) -> Iterator[tuple[str, str]]:
    """Yield a note on each file that ends in whole blocks of zeros, where no checksum covers them.

    Args:
        model: the model; of each file the last block is read, and more only where that is zeros.
    """
    records = model.records
    bare = records.crc32 == NO_CHECKSUM
    ends = np.zeros(len(model.files), dtype=np.int64)
    np.maximum.at(ends, records.file[bare], (records.offset + records.stored_nbytes)[bare])
    for number in np.flatnonzero(ends).tolist():
        path, end = model.files[number].path, int(ends[number])
        start = _find_zeros(path, end)
        border = -(-start // _BLOCK_NBYTES) * _BLOCK_NBYTES
        # The last element before the border may end in zero bytes.
        if end - border >= _BLOCK_NBYTES and border - start < _MAX_ELEMENT_NBYTES:
            lost = f"{path} ends in {end - border:,} bytes of zeros, which begin at a block's border"
            yield "zero-blocks", f"{lost}: {_CAUSE}"


def _find_zeros(path: str, end: int) -> int:
    """Return where the zeros begin that a file contains before `end`."""
    with open_regular(path) as file:
        low = max(0, (end - 1) // _BLOCK_NBYTES * _BLOCK_NBYTES)
        while True:
            content = file.read(low, end - low).rstrip(b"\0")
            if content or low == 0:
                return low + len(content)
            end, low = low, max(0, low - _CHUNK_NBYTES)
