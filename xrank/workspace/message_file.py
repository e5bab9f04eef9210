"""One message as a file in a shared directory, written for one reader.

The file contains its buffers, one after another, then a JSON header. The receipt records their offsets and checksums.
A message's name is never reused, so a network file system cannot have outdated information about it. The file is read
by pread, not mapped, because truncating a mapped file would kill the reader.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import xxhash

from xrank import system
from xrank.errors import CorruptError
from xrank.formats.entries import Entry
from xrank.workspace.arena import new_buffer

_NAME = re.compile(r"\.rank_[0-9a-f.]+\.message")
_STEP_NBYTES = 8 << 20
"""Bytes per read or write: the checksum then finds them in the processor's cache."""


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A run of bytes in a message file."""

    offset: int
    nbytes: int
    digest: str
    """XXH3-128 in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class MessageReceipt:
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
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, rank: int) -> MessageReceipt:
        """Return the receipt that `to_json` wrote.

        Raises:
            CorruptError: the text is not a receipt.
        """
        fields = Entry.parse(text, lambda fault: make_receipt_error(text, rank))
        name, directory = fields["name"].text(), fields["directory"].text()
        *buffers, header = [_parse_part(part) for part in (*fields["buffers"].entries(), fields["header"])]
        # Only message files may be opened or removed here, whatever name the text contains.
        if not _NAME.fullmatch(name):
            raise make_receipt_error(text, rank)
        return cls(name, directory, buffers, header)


def _parse_part(part: Entry) -> MessagePart:
    if len(part.table()) != 3:
        part.refuse("offset, nbytes and digest")
    return MessagePart(part["offset"].count(), part["nbytes"].count(), part["digest"].text())


def make_receipt_error(text: str, rank: int) -> CorruptError:
    """Return the error for a text from a rank that is not the receipt of a message."""
    return CorruptError(
        f"rank {rank} sent a receipt that names no message",
        rank=rank,
        got=ascii(text[:200]),
        next_step="run the same version of xrank on all ranks",
    )


def write_message(directory: str, name: str, header: bytes, buffers: Sequence[memoryview]) -> MessageReceipt:
    """Write a new file, sync it, and return its receipt.

    Raises:
        OSError: from write, fsync or close; a partial file may remain.
    """
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
    """Return header and buffers, each in memory of its own.

    Raises:
        FileNotFoundError: the file is not visible yet, or not to its end.
        OSError: from open or read.
        CorruptError: the bytes differ from those that were written.
    """
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
        f"{path}: is not the file that rank {rank} wrote",
        rank=rank,
        file=path,
        got=got,
        want="a file",
        next_step="choose another workspace_path, in which no other user may write",
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
