"""Units of the records of objects in stores: large records, or small neighbours that one request brings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xrank.plan.source import StoredModel

BLOCK_NBYTES = 1 << 20
"""Bytes of a block of a large record, unless the budget has room for larger ones."""
LEAST_BLOCK_NBYTES = 64 << 10
ROOM_NBYTES = 16 << 20
"""Bytes of all blocks, unless the budget says otherwise."""
_SMALL_NBYTES = 256 << 10
"""Records up to this size share requests with their neighbours."""
_GAP_NBYTES = 16 << 10
"""Gaps up to this size between small records are read through."""


def count_requests(model: StoredModel) -> tuple[int, int]:
    """Return the number of requests for all blocks of a model in stores, and their bytes.

    Where the budget has room for larger blocks, the requests are fewer.
    """
    units = [unit for unit in make_units(model)[0] if model.files[unit.file].in_store is not None]
    nbytes = [unit.end - unit.start for unit in units]
    return sum(-(-one // BLOCK_NBYTES) for one in nbytes), sum(nbytes)


@dataclass(slots=True)
class Unit:
    """A large record, or small neighbours, in one object."""

    file: int
    start: int
    end: int
    used_nbytes: int
    """Bytes of its records."""
    step: int = 0
    """Bytes of a block; 0: not decided yet."""


def make_units(model: StoredModel) -> tuple[list[Unit], list[int]]:
    """Return the units of all objects, and each record's index into them."""
    records = model.records
    files, offsets, sizes = (column.tolist() for column in (records.file, records.offset, records.stored_nbytes))
    # Many files are read at the same time, and their blocks have to fit the room.
    most = max(LEAST_BLOCK_NBYTES, min(BLOCK_NBYTES, ROOM_NBYTES // (2 * max(1, len(model.files)))))
    small = min(_SMALL_NBYTES, most)
    units: list[Unit] = []
    unit_of = [0] * len(records)
    for record in np.lexsort((records.offset, records.file)).tolist():
        file, start, end = files[record], offsets[record], offsets[record] + sizes[record]
        last = units[-1] if units else None
        if last is not None and last.file == file and start >= last.start and end <= last.end:
            pass  # tied tensors share a record
        elif (
            last is not None
            and last.file == file
            and last.step
            and sizes[record] <= small
            and start - last.end <= _GAP_NBYTES
            and end - last.start <= most
        ):
            last.used_nbytes += end - max(start, last.end)
            last.end = end
            last.step = end - last.start
        else:
            # A unit of small records is one block.
            units.append(Unit(file, start, end, end - start, max(1, end - start) if end - start <= small else 0))
        unit_of[record] = len(units) - 1
    return units, unit_of
