"""Messages in the memory of one host: a writer's arenas, which readers map and lease."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import stat
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta, Struct

from xrank.errors import IncompleteError, UsageError, XrankError
from xrank.ranks.failure import damage_error
from xrank.ranks.memory import explain_no_memory, row_major_bytes
from xrank.ranks.waits import process_space
from xrank.system import after_fork_in_child, anonymous_memory, host_name

if TYPE_CHECKING:
    import torch


# linux/fcntl.h: F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE; Python has them on Linux only
_SIZE_SEALS = 1 | 2 | 4
_SEALS = _SIZE_SEALS | 8
_MARK = "xrank-"


_Count: TypeAlias = Annotated[int, Meta(ge=0)]


class MemoryPlace(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a sealed file lies, as its writer describes it and its reader checks it."""

    pid: _Count
    fd: _Count
    device: _Count
    inode: _Count
    nbytes: _Count
    nonce: str
    """Part of the name that the kernel shows for the file; unique among processes and hosts."""
    space: str
    """Identifies the numbering of pids: the host's boot and the namespace. Used in errors only."""
    host: str

    def to_json(self) -> str:
        """Return the place as text for the store."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str, rank: int) -> MemoryPlace:
        """Return the place that `to_json` wrote; CorruptError if the text is none."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (ValueError, RecursionError, TypeError):
            raise damage_error(
                f"rank {rank} does not describe an address in its memory", ascii(text[:200]), rank=rank
            ) from None

    @property
    def path(self) -> str:
        """Path of the writer's descriptor."""
        return f"/proc/{self.pid}/fd/{self.fd}"

    def check_reachable(self, rank: int) -> None:
        """Raise UsageError if this process could not reach the place even if it still exists."""
        if self.space == process_space():
            return
        here = host_name()
        raise UsageError(
            f"the memory of rank {rank} is on host {self.host}, which this process on {here} cannot reach",
            rank=rank,
            host=self.host,
            want="ranks on one host, in one pid namespace",
            next_step="use NFSWorkspace, or give workspace_path, a directory that both mount",
        )


class MemoryFile:
    """The writer's side: a new file, written through `fd`, that exists until it is closed."""

    def __init__(self) -> None:
        self.nonce = os.urandom(16).hex()
        self.fd = os.memfd_create(_MARK + self.nonce, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # A new memfd has mode 0777.
        os.fchmod(self.fd, 0o600)

    def seal(self, *, writable: bool = False) -> MemoryPlace:
        """Seal the size, and the content unless it stays `writable`, and return the file's place."""
        import fcntl

        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS if writable else _SEALS)
        status = os.fstat(self.fd)
        return MemoryPlace(
            pid=os.getpid(),
            fd=self.fd,
            device=status.st_dev,
            inode=status.st_ino,
            nbytes=status.st_size,
            nonce=self.nonce,
            space=process_space(),
            host=host_name(),
        )

    def close(self) -> None:
        """Close the file; readers that opened it keep it."""
        os.close(self.fd)


def open_place(place: MemoryPlace, *, writable: bool = False) -> int | None:
    """Return the caller's own descriptor of the sealed file, or None if the file no longer exists.

    The system reuses pids and descriptors, so the file found there is accepted only if it matches the place.
    """
    try:
        # stat before open: the descriptor may by now be a tape or a pipe, and opening that may have an effect.
        if not _matches(os.stat(place.path), place):
            return None
        access = os.O_RDWR if writable else os.O_RDONLY
        fd = os.open(place.path, access | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # the process ended, the descriptor was closed, or the pid now belongs to another user
    import fcntl

    seals, is_right = _SIZE_SEALS if writable else _SEALS, False
    with suppress(OSError):  # EINVAL: not a file in memory
        is_right = (
            # Once more: between stat and open the writer may have closed the descriptor and reused its number.
            _matches(os.fstat(fd), place)
            and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals
            and os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)") == f"/memfd:{_MARK}{place.nonce}"
        )
    if is_right:
        return fd
    os.close(fd)
    return None


def _matches(status: os.stat_result, place: MemoryPlace) -> bool:
    return (
        stat.S_ISREG(status.st_mode)
        and (status.st_dev, status.st_ino, status.st_size) == (place.device, place.inode, place.nbytes)
        and status.st_uid == os.geteuid()
    )


_ALIGNMENT = 64
_HEAD_NBYTES = _ALIGNMENT
_USE, _NUMBER = range(2)
"""Indexes of an arena's words."""
_FREE, _TAKEN, _LENT, _ABANDONED = range(4)
_NO_MESSAGE = 0
_MIN_NBYTES = 128 << 10
_NEXT_STEP = "free memory on this host, or give workspace_path"
_SMALL_NBYTES = 4 << 20
"""Up to this size a plain copy costs less than creating the tensor that torch copies to with all its threads."""
_HUGE_NBYTES = 4 << 20
"""Larger buffers get huge pages, because fresh small pages cost three times the copy."""


class Arena:
    """The writer's side of one arena, of at least `nbytes`; memory is allocated when it is written."""

    def __init__(self, nbytes: int) -> None:
        # A power of two: the next message, if it is a little larger, still fits the same warm pages.
        total = max(_MIN_NBYTES, 1 << (nbytes + _HEAD_NBYTES - 1).bit_length())
        self.capacity = total - _HEAD_NBYTES
        self._written = 0
        self._num_messages = 0
        self._file = MemoryFile()
        try:
            with explain_no_memory("the message", total, _NEXT_STEP):
                os.ftruncate(self._file.fd, total)
            self.place: MemoryPlace = self._file.seal(writable=True)
            self.description = self.place.to_json()
            self._whole: torch.Tensor | None = None
            self._memory = mmap.mmap(self._file.fd, total)
            self._words = _words_of(self._memory)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            # Allocates the page of the words, which are then stored through the mapping.
            self._write_fresh(0, memoryview(bytes(_HEAD_NBYTES)))
        except BaseException:
            self._file.close()
            raise

    @property
    def use(self) -> int:
        """State of the arena: `_FREE` if no reader needs it any more, `_ABANDONED` if no reader will ever free it."""
        return self._words[_USE]

    def take(self) -> int:
        """Mark the arena as taken until its reader frees it, and return the new message's number."""
        self._num_messages += 1
        # The number before the state: a reader that sees the arena taken must find this message's number.
        self._words[_NUMBER] = self._num_messages
        self._words[_USE] = _TAKEN
        return self._num_messages

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """Copy a tensor's elements, row-major, to `offset`; writes to fresh memory go upwards."""
        nbytes = tensor.nbytes
        if nbytes == 0:
            return
        if offset + nbytes <= self._written:
            start = _HEAD_NBYTES + offset
            if nbytes <= _SMALL_NBYTES and is_as_in_memory(tensor):
                ctypes.memmove(self._address + start, tensor.data_ptr(), nbytes)
            else:
                import torch

                if self._whole is None:
                    self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)
                self._whole[start : start + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            return
        self.write_bytes(offset, row_major_bytes(tensor).data)

    def write_bytes(self, offset: int, content: bytes | memoryview) -> None:
        """Write bytes at `offset`, like `write`."""
        start, end = _HEAD_NBYTES + offset, offset + len(content)
        if end <= self._written:
            self._memory[start : _HEAD_NBYTES + end] = content
        else:
            self._write_fresh(start, memoryview(content))
            self._written = end

    def _write_fresh(self, position: int, data: memoryview) -> None:
        with explain_no_memory("the message", len(data), _NEXT_STEP):
            while data:
                n = os.pwrite(self._file.fd, data, position)
                data, position = data[n:], position + n

    def close(self) -> None:
        """End the message in it and release the memory. Readers keep what they hold."""
        # A reader that has mapped the arena, and still has the receipt, must see that the message is gone.
        self._words[_NUMBER] = _NO_MESSAGE
        self.release()

    def release(self) -> None:
        """Release the memory in this process only."""
        self._file.close()
        # A tensor made by `write` may still hold the mapping for a moment; the mapping ends with the last such tensor.
        del self._memory, self._words, self._whole


def _words_of(memory: mmap.mmap) -> memoryview:
    # memoryview items are loaded and stored as whole numbers. Like every slice, this one keeps the mapping alive.
    return memoryview(memory)[:_HEAD_NBYTES].cast("q")


def is_as_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie at its address, one after another."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class Lease:
    """A reader's use of an arena with these words, until `whole`, the array behind all lent buffers, ends."""

    def __init__(self, words: memoryview, whole: np.ndarray) -> None:
        self.is_over = False
        self._words = words
        self._is_abandoned = False
        self._end = weakref.ref(whole, self._finish)
        _leases.add(self)

    def _finish(self, whole: object) -> None:
        self.is_over = True
        if _leases is not None:  # at interpreter exit, module globals may be gone
            _leases.discard(self)
        if not self._is_abandoned:
            self._words[_USE] = _FREE

    def abandon(self) -> None:
        """Stop counting on the arena's return, so that the writer takes another one."""
        self._is_abandoned = True
        self._words[_USE] = _ABANDONED


_leases: set[Lease] = set()
"""Leases that are not over: a weak reference calls its callback only as long as it exists itself."""


def _abandon_leases() -> None:
    # After the fork two processes hold the same tensors, and neither can know when the other one drops them.
    for lease in list(_leases):
        lease.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_abandon_leases)


class AttachedArena:
    """The reader's side of an arena."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._words = memory, _words_of(memory)

    @classmethod
    def open(cls, place: MemoryPlace) -> AttachedArena | None:
        """Map an arena; return None if it no longer exists."""
        fd = open_place(place, writable=True)
        if fd is None:
            return None
        try:
            return cls(mmap.mmap(fd, place.nbytes))
        finally:
            os.close(fd)

    def holds(self, number: int) -> bool:
        """Return whether that message lies here and was not fetched yet."""
        return self._words[_USE] == _TAKEN and self._words[_NUMBER] == number

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes at `offset`."""
        return self._memory[_HEAD_NBYTES + offset : _HEAD_NBYTES + offset + nbytes]

    def copy(self, parts: list[tuple[int, int]]) -> list[memoryview]:
        """Return copies of (offset, nbytes) parts, and give the arena back to the writer."""
        copies = [new_buffer(nbytes) for _, nbytes in parts]
        with memoryview(self._memory) as whole:
            for (offset, nbytes), copy in zip(parts, copies, strict=True):
                copy[:] = whole[_HEAD_NBYTES + offset : _HEAD_NBYTES + offset + nbytes]
        self.drop()
        return copies

    def drop(self) -> None:
        """Give the arena back to the writer."""
        self._words[_USE] = _FREE

    def lend(self, parts: list[tuple[int, int]]) -> tuple[list[memoryview], Lease]:
        """Return (offset, nbytes) parts in place; the writer gets the arena back when the last of them is gone.

        Tensors and views made from a part keep it alive. If this process forks meanwhile, the writer never gets the
        arena back, and takes another.
        """
        # Until the lease ends, the writer must not reuse the arena.
        self._words[_USE] = _LENT
        # All parts, and nothing else, reference this one array: it is freed with the last of them.
        whole = np.frombuffer(self._memory, np.uint8)
        lease = Lease(self._words, whole)
        view = whole.data
        starts = [(_HEAD_NBYTES + offset, nbytes) for offset, nbytes in parts]
        return [view[start : start + nbytes] for start, nbytes in starts], lease


def align(sizes: Iterable[int]) -> tuple[list[tuple[int, int]], int]:
    """Return (first byte, size) of each part of a message, and the aligned end of the last one."""
    places, end = [], 0
    for nbytes in sizes:
        places.append((end, nbytes))
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, end


def new_buffer(nbytes: int) -> memoryview:
    """Return writable, uninitialized memory owned by the caller; large buffers lie in huge pages."""
    return np.empty(nbytes, np.uint8).data if nbytes < _HUGE_NBYTES else memoryview(anonymous_memory(nbytes))


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
        places, end = align([*(tensor.nbytes for tensor in tensors), len(head)])
        table = array("q", chain.from_iterable(places))
        arena = self._free_arena(end + 8 * len(table))
        number = arena.take()
        try:
            for (start, _), tensor in zip(places, tensors, strict=False):
                arena.write(start, tensor)
            arena.write_bytes(places[-1][0], head)
            arena.write_bytes(end, table.tobytes())
        except BaseException:
            # The reader never gets the receipt, so it would never free the arena; and memory may be short.
            self._arenas.remove(arena)
            arena.close()
            raise
        kept = [kept.place.nonce for kept in self._arenas]
        return _to_json({"place": arena.description, "number": number, "kept": kept, "table": [end, len(table)]})

    def _free_arena(self, nbytes: int) -> Arena:
        free = [arena for arena in self._arenas if arena.use == _FREE]
        if fitting := [arena for arena in free if arena.capacity >= nbytes]:
            return min(fitting, key=lambda arena: arena.capacity)
        # Free ones are too small, and a larger one takes their place; abandoned ones never come back.
        for arena in [*free, *(arena for arena in self._arenas if arena.use == _ABANDONED)]:
            self._arenas.remove(arena)
            arena.close()
        self._arenas.append(Arena(nbytes))
        return self._arenas[-1]

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message; see `MessageWorkspace`. UsageError: the writer is on another host."""
        try:
            fields = json.loads(receipt)
            place, number, kept = _parse_place(fields["place"], rank), int(fields["number"]), set(fields["kept"])
            at, length = map(int, fields["table"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise _make_receipt_error(rank, ascii(receipt[:200])) from None
        attached = self._attached.setdefault(rank, {})
        # The writer has closed these arenas; keeping them mapped would keep their memory.
        for nonce in attached.keys() - kept:
            del attached[nonce]
        arena = attached.get(place.nonce)
        if arena is None and (arena := AttachedArena.open(place)) is None:
            place.check_reachable(rank)
        if arena is None or not arena.holds(number):
            what = f"the message of rank {rank} is gone, or this process may not open it"
            next_step = f"check that rank {rank} (pid {place.pid}) still runs, as the same user and dumpable"
            next_step += "; else give workspace_path"
            raise IncompleteError(what, rank=rank, host=place.host, file=place.path, next_step=next_step)
        attached[place.nonce] = arena
        try:
            table = array("q", arena.read(at, 8 * length))
            parts = list(zip(table[::2], table[1::2], strict=True))
            if not parts or any(offset < 0 or nbytes < 0 or offset + nbytes > at for offset, nbytes in parts):
                raise ValueError
            header = arena.read(*parts.pop()).decode()
        except ValueError:
            raise _make_receipt_error(rank, f"a table of {length} numbers at {at}") from None
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
        self.release(Arena.close)

    def release(self, release: Callable[[Arena], None]) -> None:
        """Release all memory, each arena by `release`."""
        for arena in self._arenas:
            release(arena)
        self._arenas.clear()
        self._attached.clear()
        self._leases.clear()


_living: weakref.WeakSet[MemoryMessages] = weakref.WeakSet()


def _release_in_child() -> None:
    # Otherwise a forked process (a data loader) would keep memory that its parent releases, and end its messages.
    for messages in _living:
        messages.release(Arena.release)


after_fork_in_child(_release_in_child)


_parse_place = lru_cache(maxsize=256)(MemoryPlace.from_json)
"""Returns the place in a receipt; cached, because a writer has few arenas."""


def _make_receipt_error(rank: int, got: str) -> XrankError:
    return damage_error(f"rank {rank} sent a receipt that is not in xrank's format", got, rank=rank)
