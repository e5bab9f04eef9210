"""Messages in memory of one host: the writer's arenas, which readers find by the writer's own descriptors."""

from __future__ import annotations

import json
import os
import weakref
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from xrank.errors import CorruptError, IncompleteError, XrankError
from xrank.workspace.arena import ALIGNMENT, Arena, AttachedArena, Lease
from xrank.workspace.memory_file import MemoryPlace

if TYPE_CHECKING:
    import torch

__all__ = ["MemoryMessages"]

_to_json = json.JSONEncoder(separators=(",", ":")).encode
_MIN_LENT_NBYTES = 64 << 10
"""Smaller messages are copied: a lease costs as much."""
_MAX_LEASES = 2
"""Of arenas of one writer, for one reader: who keeps what it gathers gets copies, and the writer's warm arena is
written again, where each lease would cost the writer fresh pages, which take longer than the copy."""


class MemoryMessages:
    """A `MessageWorkspace`; one thread at a time uses it, and one reader fetches each message."""

    patience_seconds = 2.0
    """It is there at once, or its writer has ended: so long that may take to become known."""

    def __init__(self) -> None:
        self._arenas: list[Arena] = []
        self._attached: dict[int, dict[str, AttachedArena]] = {}
        self._leases: dict[int, list[Lease]] = {}
        _living.add(self)

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Leave a message; see `MessageWorkspace`."""
        head = header.encode()
        table = array("q")
        end = 0
        for nbytes in (*(tensor.nbytes for tensor in tensors), len(head)):
            table.extend((end, nbytes))
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        arena = self._free_arena(end + 8 * len(table))
        number = arena.take()
        try:
            for i, tensor in enumerate(tensors):
                arena.write(table[2 * i], tensor)
            arena.write_bytes(table[-2], head)
            arena.write_bytes(end, table.tobytes())
        except BaseException:
            # Nobody will be told of it, so nobody would free it; and where there is no memory, its pages are wanted.
            self._arenas.remove(arena)
            arena.close()
            raise
        kept = [kept.place.nonce for kept in self._arenas]
        return _to_json({"place": arena.told, "number": number, "kept": kept, "table": [end, len(table)]})

    def _free_arena(self, nbytes: int) -> Arena:
        free = [arena for arena in self._arenas if arena.is_free]
        if fitting := [arena for arena in free if arena.capacity >= nbytes]:
            return min(fitting, key=lambda arena: arena.capacity)
        for arena in [*free, *(arena for arena in self._arenas if arena.is_abandoned)]:
            self._arenas.remove(arena)
            arena.close()
        self._arenas.append(Arena(nbytes))
        return self._arenas[-1]

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message; see `MessageWorkspace`.

        Raises:
            IncompleteError: the writer has ended, or the message was fetched already.
            UsageError: the writer is on another host.
        """
        try:
            told = json.loads(receipt)
            place, number, kept = _place(told["place"], rank), int(told["number"]), set(told["kept"])
            at, length = map(int, told["table"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _corrupt(rank, ascii(receipt[:200])) from None
        attached = self._attached.setdefault(rank, {})
        for nonce in attached.keys() - kept:
            del attached[nonce]
        arena = attached.get(place.nonce)
        if arena is None:
            arena = attached[place.nonce] = _opened(place, rank)
        if not arena.holds(number):
            raise _gone(place, rank)
        try:
            table = array("q", arena.read(at, 8 * length))
            parts = list(zip(table[::2], table[1::2], strict=True))
            if not parts or any(offset < 0 or nbytes < 0 or offset + nbytes > at for offset, nbytes in parts):
                raise ValueError
            header = arena.read(*parts.pop()).decode()
        except ValueError:
            raise _corrupt(rank, f"a table of {length} numbers at {at}") from None
        leases = self._leases[rank] = [lease for lease in self._leases.get(rank, []) if not lease.is_over]
        if at >= max(_MIN_LENT_NBYTES, place.nbytes // 2) and len(leases) < _MAX_LEASES:
            buffers, lease = arena.lend(parts)
            leases.append(lease)
            return header, buffers
        return header, arena.copy(parts)

    def retire(self, receipt: str) -> None:
        """Do nothing: an arena is free once its reader says so."""

    def close(self) -> None:
        """Let go of all messages, and of the mappings of others'; what was fetched stays."""
        for arena in self._arenas:
            arena.close()
        self._forget()

    def let_go(self) -> None:
        """Let go, in this process alone, of what it shares with the one that it was forked from."""
        for arena in self._arenas:
            arena.let_go()
        self._forget()

    def _forget(self) -> None:
        self._arenas.clear()
        self._attached.clear()
        self._leases.clear()


_living: weakref.WeakSet[MemoryMessages] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # A forked process (a data loader's) would keep all memory that its parent lets go of, and end its messages.
    for messages in _living:
        messages.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


@lru_cache(maxsize=256)
def _place(told: str, rank: int) -> MemoryPlace:
    """Return what a receipt says of an arena: a writer tells of few."""
    return MemoryPlace.from_json(told, rank)


def _opened(place: MemoryPlace, rank: int) -> AttachedArena:
    arena = AttachedArena.open(place)
    if arena is None:
        place.check_reachable(rank)
        raise _gone(place, rank)
    return arena


def _gone(place: MemoryPlace, rank: int) -> IncompleteError:
    return IncompleteError(
        f"the message of rank {rank} is no longer in its memory, or not open to this process",
        rank=rank,
        host=place.host,
        file=place.path,
        next_step=f"look whether rank {rank} (pid {place.pid}) still runs, as the same user and dumpable; "
        "else give workspace_path",
    )


def _corrupt(rank: int, got: str) -> XrankError:
    return CorruptError(
        f"the message of rank {rank} is no message of xrank's", rank=rank, got=got, next_step="run one version of xrank"
    )
