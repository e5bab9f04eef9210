"""Digests of tensors that can be taken of their parts in any order, by any thread.

A tensor's digest is the XXH3-128 of the XXH3-128 digests of its 64 KiB blocks, in order; a file's digest is the
XXH3-128 of its header's bytes and its tensors' digests, in the file's order. They find accidents, not attackers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import xxhash

__all__ = ["BLOCK_NBYTES", "TensorDigest", "digest_of_file", "digest_text"]

BLOCK_NBYTES = 1 << 16


class TensorDigest:
    """Collects the digest of one tensor from parts that come in any order, each byte once."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._blocks = bytearray(-(-nbytes // BLOCK_NBYTES) * 16)
        self._missing = -(-nbytes // BLOCK_NBYTES)
        self._edges: dict[int, list[tuple[int, bytes]]] = {}
        self._lock = threading.Lock()

    def add(self, start: int, data: memoryview) -> None:
        """Take in the tensor's bytes [start, start + len(data))."""
        position = 0
        while position < len(data):
            block, inside = divmod(start + position, BLOCK_NBYTES)
            block_nbytes = min(BLOCK_NBYTES, self._nbytes - block * BLOCK_NBYTES)
            part = data[position : position + block_nbytes - inside]
            if len(part) == block_nbytes:
                self._finish(block, xxhash.xxh3_128_digest(part))
            else:
                self._add_edge(block, inside, bytes(part), block_nbytes)
            position += len(part)

    def _add_edge(self, block: int, inside: int, part: bytes, block_nbytes: int) -> None:
        """Keep a part of a block until the others, which another window or thread brings, are there."""
        with self._lock:
            parts = self._edges.setdefault(block, [])
            parts.append((inside, part))
            if sum(len(data) for _, data in parts) < block_nbytes:
                return
            del self._edges[block]
        self._finish(block, xxhash.xxh3_128_digest(b"".join(data for _, data in sorted(parts))))

    def _finish(self, block: int, digest: bytes) -> None:
        with self._lock:
            self._blocks[block * 16 : block * 16 + 16] = digest
            self._missing -= 1

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
    """Return a digest as it stands in manifests and reports."""
    return f"xxh3:{digest.hex()}"
