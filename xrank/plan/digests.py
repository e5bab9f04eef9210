"""Digests of tensors, computed from their parts in any order and by any thread.

A tensor's digest is the XXH3-128 of the XXH3-128 digests of its 64 KiB blocks, in order; a file's digest is the
XXH3-128 of its header's bytes and its tensors' digests, in the file's order. Other bytes outside tensors, such as a
zip's directory, count as header. The digests detect accidents, not attacks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

BLOCK_NBYTES = 1 << 16


class DigestPart(NamedTuple):
    """A part of a tensor's digest, from some stretches of its bytes."""

    blocks: tuple[tuple[int, bytes], ...]
    """(First block, digests of it and of those after it) for runs of whole blocks, by rising number."""
    edges: tuple[tuple[int, bytes], ...]
    """(start, bytes) of the partial blocks at the ends of stretches."""


class TensorDigest:
    """Collects the digest of one tensor from parts that come in any order, each byte once."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._num_blocks = self._missing = -(-nbytes // BLOCK_NBYTES)
        self._known: list[tuple[int, int]] = []  # (first, one past the last), as they came
        self._blocks = bytearray()  # 16 bytes for each; made when the first is known
        self._edges: dict[int, list[tuple[int, bytes]]] = {}
        self._lock = threading.Lock()

    def add(self, start: int, data: memoryview) -> None:
        """Add the tensor's bytes [start, start + len(data))."""
        stop = start + len(data)
        first = -(-start // BLOCK_NBYTES)  # first block that begins in data
        last = self._num_blocks if stop == self._nbytes else stop // BLOCK_NBYTES  # one past the last that ends in it
        if first < last:
            ends = [min((block + 1) * BLOCK_NBYTES, self._nbytes) - start for block in range(first, last)]
            digests = b"".join(
                xxhash.xxh3_128_digest(data[block * BLOCK_NBYTES - start : end])
                for block, end in zip(range(first, last), ends, strict=True)
            )
            with self._lock:
                self._finish(first, digests)
            self._add_edge(start, data[: first * BLOCK_NBYTES - start])
            self._add_edge(start + ends[-1], data[ends[-1] :])
        else:
            # No whole block is in data, but data may cross one border between two blocks.
            border = min(first * BLOCK_NBYTES, stop)
            self._add_edge(start, data[: border - start])
            self._add_edge(border, data[border - start :])

    def _add_edge(self, start: int, part: memoryview) -> None:
        """Keep a part of a block until another window or thread has added the rest."""
        if not part:
            return
        # Parts of a block come once each, so the sum of their sizes shows that the block is complete.
        block = start // BLOCK_NBYTES
        block_nbytes = min(BLOCK_NBYTES, self._nbytes - block * BLOCK_NBYTES)
        with self._lock:
            parts = self._edges.setdefault(block, [])
            parts.append((start, bytes(part)))
            if sum(len(data) for _, data in parts) == block_nbytes:
                del self._edges[block]
                whole = b"".join(data for _, data in sorted(parts))
                self._finish(block, xxhash.xxh3_128_digest(whole))

    def _finish(self, block: int, digests: bytes) -> None:
        """Record the digests of one or more blocks; the caller holds the lock."""
        if not self._blocks:
            self._blocks = bytearray(self._num_blocks * 16)
        self._blocks[block * 16 : block * 16 + len(digests)] = digests
        # Each block is finished once, because each byte is added once; so counting suffices.
        num_blocks = len(digests) // 16
        self._missing -= num_blocks
        if self._known and self._known[-1][1] == block:  # the usual case: windows come nearly in order
            self._known[-1] = self._known[-1][0], block + num_blocks
        else:
            self._known.append((block, block + num_blocks))

    def part(self) -> DigestPart:
        """Return the part that has been added so far."""
        stretches: list[tuple[int, int]] = []
        for first, last in sorted(self._known):
            if stretches and stretches[-1][1] == first:
                stretches[-1] = stretches[-1][0], last
            else:
                stretches.append((first, last))
        blocks = tuple((first, bytes(self._blocks[first * 16 : last * 16])) for first, last in stretches)
        return DigestPart(blocks, tuple(edge for _, parts in sorted(self._edges.items()) for edge in parts))

    def join(self, part: DigestPart) -> None:
        """Add a part of another digest of the same tensor, of bytes that are new here."""
        with self._lock:
            for first, digests in part.blocks:
                self._finish(first, digests)
        for start, data in part.edges:
            self._add_edge(start, memoryview(data))

    def digest(self) -> bytes:
        """Return the digest; every byte must have been added."""
        assert self._missing == 0, f"{self._missing} blocks of a tensor were never digested"
        return xxhash.xxh3_128_digest(bytes(self._blocks))


def digest_of_file(header: bytes, tensors: Iterable[bytes]) -> bytes:
    """Return the digest of a file with that header and tensors of these digests."""
    state = xxhash.xxh3_128(header)
    for digest in tensors:
        state.update(digest)
    return state.digest()


def digest_text(digest: bytes) -> str:
    """Return a digest as manifests and reports record it."""
    return f"xxh3:{digest.hex()}"
