"""Messages in the memory of one host: readers find the writer's arenas through the writer's own descriptors."""

from __future__ import annotations

import json
import weakref
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from xrank.errors import CorruptError, IncompleteError, XrankError
from xrank.system import after_fork_in_child
from xrank.workspace.arena import ALIGNMENT, Arena, AttachedArena, Lease
from xrank.workspace.memory_file import MemoryPlace

if TYPE_CHECKING:
    import torch

_to_json = json.JSONEncoder(separators=(",", ":")).encode
_MIN_LENT_NBYTES = 64 << 10
"""Smaller messages are copied, because a lease costs as much as the copy."""
_MAX_LEASES = 2
"""Leases that one reader may hold of one writer. A reader that keeps its tensors gets copies from then on, and the
writer reuses its warm arena. Each further lease would cost the writer fresh pages, which take longer than the copy."""


class MemoryMessages:
    """A `MessageWorkspace` for one thread at a time. Exactly one reader fetches each message."""

    patience_seconds = 2.0
    """A message is visible at once, or its writer has ended; this is how long that may take to become known."""

    def __init__(self) -> None:
        self._arenas: list[Arena] = []
        self._attached: dict[int, dict[str, AttachedArena]] = {}
        self._leases: dict[int, list[Lease]] = {}
        _living.add(self)

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Write a message; see `MessageWorkspace`."""
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
            # The reader never gets the receipt, so it would never free the arena; and memory may be short.
            self._arenas.remove(arena)
            arena.close()
            raise
        kept = [kept.place.nonce for kept in self._arenas]
        return _to_json({"place": arena.description, "number": number, "kept": kept, "table": [end, len(table)]})

    def _free_arena(self, nbytes: int) -> Arena:
        free = [arena for arena in self._arenas if arena.is_free]
        if fitting := [arena for arena in free if arena.capacity >= nbytes]:
            return min(fitting, key=lambda arena: arena.capacity)
        # Free ones are too small, and a larger one takes their place; abandoned ones never come back.
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
            fields = json.loads(receipt)
            place, number, kept = _parse_place(fields["place"], rank), int(fields["number"]), set(fields["kept"])
            at, length = map(int, fields["table"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise _corrupt(rank, ascii(receipt[:200])) from None
        attached = self._attached.setdefault(rank, {})
        # The writer has closed these arenas; keeping them mapped would keep their memory.
        for nonce in attached.keys() - kept:
            del attached[nonce]
        arena = attached.get(place.nonce)
        if arena is None:
            arena = attached[place.nonce] = _attach(place, rank)
        if not arena.holds(number):
            raise _missing_error(place, rank)
        try:
            table = array("q", arena.read(at, 8 * length))
            parts = list(zip(table[::2], table[1::2], strict=True))
            if not parts or any(offset < 0 or nbytes < 0 or offset + nbytes > at for offset, nbytes in parts):
                raise ValueError
            header = arena.read(*parts.pop()).decode()
        except ValueError:
            raise _corrupt(rank, f"a table of {length} numbers at {at}") from None
        leases = self._leases[rank] = [lease for lease in self._leases.get(rank, []) if not lease.is_over]
        # A small message in a large arena is copied: a lease would keep all of the arena from the writer.
        if at >= max(_MIN_LENT_NBYTES, place.nbytes // 2) and len(leases) < _MAX_LEASES:
            buffers, lease = arena.lend(parts)
            leases.append(lease)
            return header, buffers
        return header, arena.copy(parts)

    def retire(self, receipt: str) -> None:
        """Do nothing: the reader frees the arena."""

    def close(self) -> None:
        """Release all messages and the mappings of other ranks' arenas. Fetched messages stay valid."""
        for arena in self._arenas:
            arena.close()
        self._forget()

    def release(self) -> None:
        """Release, in this process only, the memory that it shares with the process that forked it."""
        for arena in self._arenas:
            arena.release()
        self._forget()

    def _forget(self) -> None:
        self._arenas.clear()
        self._attached.clear()
        self._leases.clear()


_living: weakref.WeakSet[MemoryMessages] = weakref.WeakSet()


def _release_in_child() -> None:
    # Otherwise a forked process (a data loader) would keep memory that its parent releases, and end its messages.
    for messages in _living:
        messages.release()


after_fork_in_child(_release_in_child)


@lru_cache(maxsize=256)
def _parse_place(text: str, rank: int) -> MemoryPlace:
    """Return the place in a receipt; cached, because a writer has few arenas."""
    return MemoryPlace.from_json(text, rank)


def _attach(place: MemoryPlace, rank: int) -> AttachedArena:
    arena = AttachedArena.open(place)
    if arena is None:
        place.check_reachable(rank)
        raise _missing_error(place, rank)
    return arena


def _missing_error(place: MemoryPlace, rank: int) -> IncompleteError:
    return IncompleteError(
        f"the message of rank {rank} left its memory, or this process may not open it",
        rank=rank,
        host=place.host,
        file=place.path,
        next_step=f"check that rank {rank} (pid {place.pid}) still runs, as the same user and dumpable; "
        "else give workspace_path",
    )


def _corrupt(rank: int, got: str) -> XrankError:
    return CorruptError(
        f"rank {rank} sent a receipt that is not one of xrank's",
        rank=rank,
        got=got,
        next_step="run one version of xrank",
    )
