"""An engine rank that lends the step it holds to other engines, such as one that starts while the trainer is busy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import xxhash

from xrank.lending.local_bytes import LocalBytes, local_bytes
from xrank.lending.memory_offer import MemoryOffer
from xrank.lending.peer_memory import memory_at
from xrank.plan.output import OutputTensor
from xrank.refit.card import Address
from xrank.refit.targets import Filling

DIGEST_NBYTES = 16
_CHUNK_NBYTES = 1 << 20


class Relay:
    """Lends an engine rank's tensors from the first step on; its status shows which step they hold.

    Args:
        place: the address.
        engine: name of the engine.
        rank: this rank.
        ranks: all ranks of the engine.
        status: description of the offer that contains this rank's status.
    """

    def __init__(self, place: Address, engine: str, rank: int, ranks: Sequence[int], status: dict[str, Any]) -> None:
        self._place, self._engine, self._rank = place, engine, rank
        self._content = {"engine": engine, "rank": rank, "ranks": list(ranks), "status": status}
        self._loan = ExitStack()
        self._filling: Filling | None = None
        self._views: list[LocalBytes] = []
        self._digests = np.zeros((0, DIGEST_NBYTES), np.uint8)

    def record(self, filling: Filling) -> None:
        """Record the digests of the present values; new tensors are lent first.

        Args:
            filling: the tensors that hold a step, after they were filled.
        """
        if filling is not self._filling:
            self._lend(filling)
        for digest, view in zip(self._digests, self._views, strict=True):
            digest[:] = np.frombuffer(digest_bytes(view), np.uint8)

    def close(self) -> None:
        """Stop lending."""
        self._loan.close()
        self._filling = None

    def _lend(self, filling: Filling) -> None:
        self.close()
        self._views = [local_bytes(tensor) for tensor in filling.tensors]
        self._digests = np.zeros((len(self._views), DIGEST_NBYTES), np.uint8)
        offer = MemoryOffer([*self._views, _ArrayBytes(self._digests)], across_hosts=True)
        self._loan.callback(offer.close)
        tensors = [
            _describe(one.output, one.source_dtype != one.output.dtype or one.output.name in filling.cast)
            for one in filling.plan.tensors
        ]
        content = {**self._content, "offer": offer.describe(), "tensors": tensors}
        card = self._place.write_relay(self._engine, self._rank, content)
        self._loan.callback(self._place.remove, card)
        self._filling = filling


class _ArrayBytes:
    """The bytes of an array as `LocalBytes`."""

    def __init__(self, array: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> None:
        self._array, self.nbytes = array, array.nbytes
        self.address: int | None = array.ctypes.data if array.nbytes else None

    def find_row(self, start: int, nbytes: int) -> memoryview | None:
        """Return the bytes from `start` on in place."""
        return memory_at(self._array.ctypes.data + start, nbytes)

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""
        into[:] = memory_at(self._array.ctypes.data + start, len(into))


def digest_bytes(view: LocalBytes) -> bytes:
    """Return the digest of a tensor's bytes."""
    digest, staging = xxhash.xxh3_128(), memoryview(bytearray(min(view.nbytes, _CHUNK_NBYTES)))
    for start in range(0, view.nbytes, _CHUNK_NBYTES):
        nbytes = min(_CHUNK_NBYTES, view.nbytes - start)
        row = view.find_row(start, nbytes)
        if row is None:
            row = staging[:nbytes]
            view.read_into(start, row)
        digest.update(row)
    return digest.digest()


def _describe(output: OutputTensor, is_cast: bool) -> list[Any]:
    nests = None if output.part is None else [[nest.x, nest.y, *map(list, nest.loops)] for nest in output.part.nests]
    return [output.name, output.dtype, list(output.global_shape), list(output.shape), nests, is_cast]
