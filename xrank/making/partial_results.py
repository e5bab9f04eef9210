"""The findings of a rank from its share of a round, as it sends them to rank 0: a few arrays, however many they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrank.plan.digests import DigestPart
from xrank.plan.file_parts import FilePart


@dataclass(frozen=True, slots=True)
class PartialResults:
    """One rank's findings."""

    parts: tuple[FilePart, ...]
    records: Sequence[tuple[int, int, int, int]]
    """(Record, start, end, CRC-32) of the stretches that this rank read of records that others read too."""
    num_checksums: int
    """Number of records that this rank alone read and compared, since the beginning."""
    differences: Mapping[str, Mapping[int, int]]
    """Differences in this round, as in `Outcome.differences`."""
    shared_nbytes: int = 0
    """Bytes in this round, as in `Outcome.shared_nbytes`."""

    def to_message(self) -> dict[str, Any]:
        """Return the findings as a message for a gather."""
        digests = [(part.index, tensor, digest) for part in self.parts for tensor, digest in part.digests]
        blocks = [(index, tensor, *one) for index, tensor, digest in digests for one in digest.blocks]
        edges = [(index, tensor, *one) for index, tensor, digest in digests for one in digest.edges]
        crcs = [(part.index, *crc) for part in self.parts for crc in part.crcs]
        data = b"".join(one[3] for one in (*blocks, *edges))
        return {
            "files": _table([(part.index,) for part in self.parts], 1),
            "blocks": _table(((*one[:3], len(one[3])) for one in blocks), 4),
            "edges": _table(((*one[:3], len(one[3])) for one in edges), 4),
            "crcs": _table(crcs, 5),
            "records": _table(self.records, 4),
            "bytes": _tensor(np.frombuffer(bytearray(data), np.uint8)),
            "num_checksums": self.num_checksums,
            "shared_nbytes": self.shared_nbytes,
            "differences": {name: dict(ranks) for name, ranks in self.differences.items()},
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> PartialResults:
        """Return the findings from a message of `to_message`."""
        data = message["bytes"].numpy().tobytes()
        crcs: dict[int, list[tuple[int, int, int, int]]] = {}
        for index, *crc in message["crcs"].tolist():
            crcs.setdefault(index, []).append(tuple(crc))
        found: dict[int, dict[int, tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]]] = {}
        # In the order of `to_message`: the bytes of all blocks, then those of all edges.
        position = 0
        for kind, table in enumerate(("blocks", "edges")):
            for index, tensor, start, nbytes in message[table].tolist():
                digest = found.setdefault(index, {}).setdefault(tensor, ([], []))
                digest[kind].append((start, data[position : position + nbytes]))
                position += nbytes
        digests = {
            index: tuple((tensor, DigestPart(*map(tuple, digest))) for tensor, digest in tensors.items())
            for index, tensors in found.items()
        }
        return cls(
            tuple(
                FilePart(index, digests.get(index, ()), tuple(crcs.get(index, ())))
                for (index,) in message["files"].tolist()
            ),
            [tuple(row) for row in message["records"].tolist()],
            message["num_checksums"],
            message["differences"],
            message["shared_nbytes"],
        )


def _table(rows: Iterable[tuple[int, ...]], width: int) -> Any:
    return _tensor(np.array(list(rows), np.int64).reshape(-1, width))


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    import torch  # ranks that meet have imported it already: they met through its store

    return torch.from_numpy(array)
