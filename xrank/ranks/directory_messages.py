"""Messages as files in a directory that all ranks mount, for ranks of several hosts."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash
from msgspec import Struct, to_builtins

from xrank import system
from xrank.errors import CorruptError, IncompleteError
from xrank.ranks.failure import damage_error
from xrank.ranks.memory import explain_no_space, row_major_bytes
from xrank.ranks.memory_messages import new_buffer
from xrank.ranks.waits import process_space
from xrank.storage.entries import Entry
from xrank.storage.shared_directory import OWN_PATH, STALE_SECONDS, list_names, make_directory
from xrank.system import after_fork_in_child, process_state

if TYPE_CHECKING:
    import torch


_NAME = re.compile(r"\.rank_[0-9a-f.]+\.message")
_STEP_NBYTES = 8 << 20
"""Bytes per read or write: the checksum then finds them in the processor's cache."""


class MessagePart(Struct, frozen=True):
    """A run of bytes in a message file."""

    offset: int
    nbytes: int
    digest: str
    """XXH3-128 in hexadecimal digits."""


class MessageReceipt(Struct, frozen=True):
    """Describes a message to its reader; with the directory it suffices to read the message."""

    name: str
    directory: str
    """Path of the directory on the writer's host; used in errors only."""
    buffers: Sequence[MessagePart]
    header: MessagePart

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.header.offset + self.header.nbytes

    def to_json(self) -> str:
        """Return the receipt as text."""
        return json.dumps(to_builtins(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, rank: int) -> MessageReceipt:
        """Return the receipt that `to_json` wrote; CorruptError if the text is none."""
        fields = Entry.parse(text, lambda fault: make_receipt_error(text, rank))
        name, directory = fields["name"].text(), fields["directory"].text()
        parts = []
        for part in (*fields["buffers"].entries(), fields["header"]):
            if len(part.table()) != 3:
                part.refuse("offset, nbytes and digest")
            parts.append(MessagePart(part["offset"].count(), part["nbytes"].count(), part["digest"].text()))
        # Only message files may be opened or removed here, whatever name the text contains.
        if not _NAME.fullmatch(name):
            raise make_receipt_error(text, rank)
        return cls(name, directory, parts[:-1], parts[-1])


def make_receipt_error(text: str, rank: int) -> CorruptError:
    """Return the error for a text from a rank that is not the receipt of a message."""
    return damage_error(f"rank {rank} sent a receipt without a message", ascii(text[:200]), rank=rank)


def write_message(directory: str, name: str, header: bytes, buffers: Sequence[memoryview]) -> MessageReceipt:
    """Write a new file, sync it, and return its receipt; after an OSError a partial file may remain."""
    # O_NOFOLLOW besides O_EXCL: some old network file systems resolved links first.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(directory, name), flags, 0o600)
    try:
        parts, offset = [], 0
        for buffer in (*buffers, memoryview(header)):
            parts.append(_write(fd, buffer, offset))
            offset += len(buffer)
        # The receipt promises that readers on other hosts see the whole file.
        os.fsync(fd)
    finally:
        # close may be the first call to report that the server is out of space (nfs(5)); it raises then.
        os.close(fd)
    return MessageReceipt(name, directory, parts[:-1], parts[-1])


def _write(fd: int, buffer: memoryview, offset: int) -> MessagePart:
    digest = xxhash.xxh3_128()
    done = 0
    while done < len(buffer):
        step = buffer[done : done + _STEP_NBYTES]
        n = os.pwrite(fd, step, offset + done)
        digest.update(step[:n])
        done += n
    return MessagePart(offset, len(buffer), digest.hexdigest())


def read_message(directory: str, receipt: MessageReceipt, rank: int) -> tuple[str, list[memoryview]]:
    """Return header and buffers, each in memory of its own; FileNotFoundError if not all of it is visible yet."""
    path = os.path.join(directory, receipt.name)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise _make_kind_error(path, rank, str(error.strerror)) from None
        raise
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise _make_kind_error(path, rank, stat.filemode(mode))
        *buffers, header = [_read(fd, part, path, rank) for part in (*receipt.buffers, receipt.header)]
    finally:
        system.close_read(fd)
    return bytes(header).decode(), buffers


def _make_kind_error(path: str, rank: int, got: str) -> CorruptError:
    return CorruptError(
        f"{path} is not the file that rank {rank} wrote", rank=rank, file=path, got=got, next_step=OWN_PATH
    )


def _read(fd: int, part: MessagePart, path: str, rank: int) -> memoryview:
    buffer, digest = new_buffer(part.nbytes), xxhash.xxh3_128()
    done = 0
    while done < part.nbytes:
        step = buffer[done : done + _STEP_NBYTES]
        n = os.preadv(fd, [step], part.offset + done)
        if n == 0:
            raise FileNotFoundError(errno.ENOENT, f"only {part.offset + done} bytes are visible yet", path)
        digest.update(step[:n])
        done += n
    if digest.hexdigest() != part.digest:
        raise CorruptError(
            f"{path}: the bytes of rank {rank}'s message differ from those it wrote",
            rank=rank,
            file=path,
            index_range=f"bytes {part.offset}-{part.offset + part.nbytes}",
            got=f"checksum {digest.hexdigest()}",
            want=f"checksum {part.digest}",
            next_step="gather again; if it happens again, check the file system",
        )
    return buffer


_OWNED_NAME = re.compile(r"\.rank_(\d+)\.([0-9a-f]{16})\.(\d+)\.[0-9a-f]{16}\.\d+\.message")


class MessageName:
    """Names of one process's messages: they contain the owner and a number, and are unique."""

    def __init__(self, rank: int) -> None:
        self._prefix = f".rank_{rank}.{_space_digest()}.{os.getpid()}.{os.urandom(8).hex()}"
        self._count = 0

    def new(self) -> str:
        """Return a name that was never used before."""
        self._count += 1
        return f"{self._prefix}.{self._count}.message"

    @staticmethod
    def owner_state(name: str) -> str | None:
        """Return ``alive``, ``gone``, or ``unknown`` for a process of another host; None if it is not a message."""
        match = _OWNED_NAME.fullmatch(name)
        if match is None:
            return None
        if match[2] != _space_digest():
            return "unknown"
        return process_state(int(match[3]))


def _space_digest() -> str:
    return xxhash.xxh3_64_hexdigest(process_space().encode())


class DirectoryMessages:
    """A `MessageWorkspace` in a directory, used by one thread at a time.

    Construction creates the directory, and removes messages that dead processes of this host left for this rank. Hosts
    may mount it under different paths.
    """

    patience_seconds = STALE_SECONDS

    def __init__(self, path: str | os.PathLike[str], rank: int) -> None:
        self._rank = rank
        self._begin()
        _living.add(self)
        self._path = os.path.abspath(os.fspath(path))
        # Every rank creates it: a rank cannot wait for another one here.
        make_directory(self._path)
        for name in list_names(self._path):
            if name.startswith(f".rank_{rank}.") and MessageName.owner_state(name) == "gone":
                # The file harms no run; another user may own it, or another rank may be removing it.
                with contextlib.suppress(OSError):
                    self._remove(name)

    def _begin(self) -> None:
        self._names = MessageName(self._rank)
        self._published: set[str] = set()
        self._pid = os.getpid()

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Write a message; see `MessageWorkspace`."""
        name = self._names.new()
        head, buffers = header.encode(), [row_major_bytes(tensor).data for tensor in tensors]
        try:
            with explain_no_space(self._path, "the message", sum(map(len, buffers)) + len(head)):
                receipt = write_message(self._path, name, head, buffers)
        except BaseException:
            with contextlib.suppress(OSError):
                self._remove(name)
            raise
        self._published.add(name)
        return receipt.to_json()

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message; see `MessageWorkspace`."""
        message = MessageReceipt.from_json(receipt, rank)
        try:
            return read_message(self._path, message, rank)
        except OSError as error:
            # After ESTALE, an unknown file handle, the next open looks the name up again.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            file = os.path.join(self._path, message.name)
            raise IncompleteError(
                f"{file}: the message of rank {rank} is not visible here",
                rank=rank,
                file=file,
                got=str(error),
                want=f"the {message.nbytes} bytes that rank {rank} wrote to {message.directory}",
                next_step="check that workspace_path is the same directory on both hosts",
            ) from None

    def retire(self, receipt: str) -> None:
        """Remove a message of this rank after its reader has fetched it."""
        self._remove(MessageReceipt.from_json(receipt, -1).name)

    def close(self) -> None:
        """Remove everything that this rank published. A second call does nothing."""
        if os.getpid() == self._pid:  # not in a process that the rank forked
            for name in list(self._published):
                self._remove(name)

    def _remove(self, name: str) -> None:
        self._published.discard(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._path, name))


_living: weakref.WeakSet[DirectoryMessages] = weakref.WeakSet()


def _begin_anew_in_child() -> None:
    # Otherwise a forked process would reuse its parent's names, and remove its parent's messages when it ends.
    for messages in _living:
        messages._begin()


after_fork_in_child(_begin_anew_in_child)
