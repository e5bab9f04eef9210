"""Parts of an output file that several executions made, joined to the result of one execution of the whole file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xrank.plan.checksums import JoinedCrc32
from xrank.plan.digests import DigestPart, TensorDigest, digest_of_file
from xrank.plan.output import OutputFile, PlacedBytes


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """An output file whose every byte is written and whose sources are checked."""

    index: int
    digest: bytes
    tensor_digests: tuple[bytes, ...]
    """In the file's order."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """The digests and CRCs of an output file's windows that one execution has written."""

    index: int
    digests: tuple[tuple[int, DigestPart], ...]
    """(Tensor of the file, part of its digest); tensors of which nothing was written are left out."""
    crcs: tuple[tuple[int, int, int, int], ...]
    """(Tensor of the file, start, end, CRC-32 of these bytes), if the file's ending needs them."""


def make_finished_file(
    output: OutputFile, index: int, digests: Sequence[bytes], ending: Sequence[PlacedBytes]
) -> FinishedFile:
    """Return the result for a file with these digests of its tensors and this ending."""
    around = b"".join((output.header, *(data for _, data in (*output.fragments, *ending))))
    return FinishedFile(index, digest_of_file(around, digests), tuple(digests))


class JoinedFile:
    """Collects the parts of one file, each byte of which is in one of them."""

    def __init__(self, output: OutputFile, index: int) -> None:
        self._output, self._index = output, index
        self._digests = [TensorDigest(tensor.nbytes) for tensor in output.tensors]
        self._crcs = [JoinedCrc32(tensor.nbytes) for tensor in output.tensors] if output.ending else []

    def join(self, part: FilePart) -> None:
        """Add a part."""
        for tensor, digest in part.digests:
            self._digests[tensor].join(digest)
        for tensor, start, end, crc in part.crcs:
            self._crcs[tensor].add(start, end, crc)

    def finish(self) -> tuple[FinishedFile, Sequence[PlacedBytes]]:
        """Return the file's result and the ending that is still to be written; all parts must have been added."""
        ending: Sequence[PlacedBytes] = ()
        if self._output.ending is not None:
            values = [crc.value for crc in self._crcs]
            assert None not in values, "bytes of a tensor were never read for its CRC"
            ending = self._output.ending([value for value in values if value is not None])
        digests = [digest.digest() for digest in self._digests]
        return make_finished_file(self._output, self._index, digests, ending), ending
