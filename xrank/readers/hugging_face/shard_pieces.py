"""The pieces of tensors in shards, collected file by file into arrays."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from xrank.dialects.boxes import Box, box_nests
from xrank.errors import ContradictionError
from xrank.formats.dcp_items import read_saved_offsets
from xrank.formats.regular_file import Origin
from xrank.formats.safetensors_header import SafetensorsHeader
from xrank.layout.nest_table import NestTable
from xrank.plan.source import StoredShard
from xrank.readers.advice import ONE_SAVE
from xrank.readers.records import Records


@dataclass(slots=True)
class ShardPieces:
    """Every tensor's pieces, as rows of numbers; a million of them take a few arrays."""

    records: Records = field(default_factory=Records)
    names: dict[str, str] = field(default_factory=dict)
    """Name -> element type."""
    rows: dict[str, array[int]] = field(default_factory=dict)
    """Name -> for each piece: rank, record, then first index and end in each dim."""
    ndim: dict[str, int] = field(default_factory=dict)

    def add(self, rank: int, header: SafetensorsHeader) -> None:
        """Add the pieces in one file."""
        offsets = read_saved_offsets(header, Origin(header.path))
        record_of = self.records.add_safetensors(header)
        for tensor in header.tensors:
            dtype = self.names.setdefault(tensor.name, tensor.dtype)
            ndim = self.ndim.setdefault(tensor.name, len(tensor.shape))
            if (dtype, ndim) != (tensor.dtype, len(tensor.shape)):
                raise ContradictionError(
                    f"{tensor.name}: rank {rank}'s piece has another type than earlier pieces",
                    tensor=tensor.name,
                    file=header.path,
                    got=f"{tensor.dtype}, {len(tensor.shape)} dims",
                    want=f"{dtype}, {ndim} dims",
                    next_step=ONE_SAVE,
                )
            row = self.rows.setdefault(tensor.name, array("q"))
            row.extend((rank, record_of(tensor)))
            for at, size in zip(offsets[tensor.name], tensor.shape, strict=True):
                row.extend((at, at + size))

    def table(self, name: str) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Return a tensor's rows."""
        return np.frombuffer(self.rows[name], dtype=np.int64).reshape(-1, 2 + 2 * self.ndim[name])

    def reach(self, name: str) -> tuple[int, ...]:
        """Return the smallest shape that contains all pieces."""
        return tuple(self.table(name)[:, 3::2].max(axis=0).tolist())

    def boxes(self, name: str) -> list[Box]:
        """Return the pieces' index ranges."""
        return [tuple(zip(row[2::2], row[3::2], strict=True)) for row in self.table(name).tolist()]

    def shard(self, name: str, shape: tuple[int, ...]) -> StoredShard:
        """Return a tensor with its pieces."""
        table = self.table(name)
        nests = [box_nests(box, shape) for box in self.boxes(name)]
        kept = [i for i, nest in enumerate(nests) if nest]
        return StoredShard(
            name,
            self.names[name],
            shape,
            # File names count ranks from 1.
            table[kept, 0] - 1,
            table[kept, 1].copy(),
            NestTable.from_nests([nests[i][0] for i in kept]),
        )
