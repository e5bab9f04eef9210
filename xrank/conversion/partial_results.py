"""What a rank found while it made its share of a round, as it is sent to rank 0: a few arrays, however much it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrank.plan.digests import DigestPart
from xrank.plan.file_parts import FilePart

__all__ = ["PartialResults"]


@dataclass(frozen=True, slots=True)
class PartialResults:
    """One rank's findings."""

    parts: tuple[FilePart, ...]
    records: Sequence[tuple[int, int, int, int]]
    """(Record, start, end, CRC-32) of what was read of records that others read too."""
    num_checksums: int
    """Records that this rank alone read and compared, since the beginning."""
    differences: Mapping[str, Mapping[int, int]]
    """As `Outcome.differences`, of this round."""

    def to_message(self) -> dict[str, Any]:
        """Return the same as a gather takes it."""
        blocks, edges, crcs, data = [], [], [], []
        for part in self.parts:
            for tensor, digest in part.digests:
                blocks.append((part.index, tensor, digest.first_block, len(digest.blocks)))
                data.append(digest.blocks)
                for start, edge in digest.edges:
                    edges.append((part.index, tensor, start, len(edge)))
                    data.append(edge)
            crcs += [(part.index, *crc) for crc in part.crcs]
        return {
            "files": _table([(part.index,) for part in self.parts], 1),
            "blocks": _table(blocks, 4),
            "edges": _table(edges, 4),
            "crcs": _table(crcs, 5),
            "records": _table(self.records, 4),
            "bytes": _tensor(np.frombuffer(bytearray(b"".join(data)), np.uint8)),
            "num_checksums": self.num_checksums,
            "differences": {name: dict(ranks) for name, ranks in self.differences.items()},
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> PartialResults:
        """Return what `to_message` was made of."""
        data = message["bytes"].numpy().tobytes()
        crcs: dict[int, list[tuple[int, int, int, int]]] = {}
        for index, *crc in message["crcs"].tolist():
            crcs.setdefault(index, []).append(tuple(crc))
        edges: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for index, tensor, start, nbytes in message["edges"].tolist():
            edges.setdefault((index, tensor), []).append((start, nbytes))
        digests: dict[int, list[tuple[int, DigestPart]]] = {}
        position = 0
        for index, tensor, first_block, nbytes in message["blocks"].tolist():
            blocks = data[position : position + nbytes]
            position += nbytes
            found = []
            for start, length in edges.get((index, tensor), ()):
                found.append((start, data[position : position + length]))
                position += length
            digests.setdefault(index, []).append((tensor, DigestPart(first_block, blocks, tuple(found))))
        return cls(
            tuple(
                FilePart(index, tuple(digests.get(index, ())), tuple(crcs.get(index, ())))
                for (index,) in message["files"].tolist()
            ),
            [tuple(row) for row in message["records"].tolist()],
            message["num_checksums"],
            message["differences"],
        )


def _table(rows: Iterable[tuple[int, ...]], width: int) -> Any:
    return _tensor(np.array(list(rows), np.int64).reshape(-1, width))


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    import torch  # ranks that meet have it already: they met through its store

    return torch.from_numpy(array)
