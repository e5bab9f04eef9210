"""One message as a file: what a writer leaves in a shared directory for one reader, who is told when it is there.

The file is its buffers, one after another, then a JSON header; where they lie, and their checksums, are in the receipt
that the writer tells. It is written under a name that no other message ever has, so that nothing a network file system
remembers of a name can be wrong, and read into memory by pread, never by mmap, which a truncation would turn into a
kill.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import xxhash

from xrank.errors import CorruptError
from xrank.workspace.arena import new_buffer

__all__ = ["MessagePart", "MessageReceipt", "read_message", "write_message"]

_NAME = re.compile(r"\.rank_[0-9a-f.]+\.message")
_STEP_NBYTES = 8 << 20
"""Of a read and of a checksum: fresh from the one, still in the cache for the other."""


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A run of bytes in a message file."""

    offset: int
    nbytes: int
    digest: str
    """XXH3-128 in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class MessageReceipt:
    """What the writer of a message tells its reader; together with a directory it is all that is needed."""

    name: str
    directory: str
    """As the writer calls it; for errors alone."""
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
        """Return what `to_json` gave.

        Raises:
            CorruptError: it did not give that.
        """
        try:
            told = json.loads(text)
            name, directory = str(told["name"]), str(told["directory"])
            *buffers, header = [MessagePart(**part) for part in (*told["buffers"], told["header"])]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _no_receipt(text, rank) from None
        numbers = [number for part in (*buffers, header) for number in (part.offset, part.nbytes)]
        # Whatever the text says, only a message is opened here, or removed.
        if not _NAME.fullmatch(name) or any(type(number) is not int or number < 0 for number in numbers):
            raise _no_receipt(text, rank)
        return cls(name, directory, buffers, header)


def _no_receipt(text: str, rank: int) -> CorruptError:
    return CorruptError(f"rank {rank} tells no message's name", rank=rank, got=ascii(text[:200]))


def write_message(directory: str, name: str, header: bytes, buffers: Sequence[memoryview]) -> MessageReceipt:
    """Write a new file, synced, and return its receipt.

    Raises:
        OSError: what write, fsync or close says; there may be a part of a file then.
    """
    # O_NOFOLLOW besides O_EXCL: some network file systems of old resolved links first.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(directory, name), flags, 0o600)
    try:
        parts, offset = [], 0
        for buffer in (*buffers, memoryview(header)):
            parts.append(_write(fd, buffer, offset))
            offset += len(buffer)
        os.fsync(fd)
    finally:
        # A close may be the first to hear that the server had no space (nfs(5)); it raises then.
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
    """Return header and buffers, each in memory of its own, as they were written.

    Raises:
        FileNotFoundError: the file is not to be seen, or not whole; it may come.
        OSError: what open and read say.
        CorruptError: bytes are not what was written.
    """
    path = os.path.join(directory, receipt.name)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        *buffers, header = [_read(fd, part, path, rank) for part in (*receipt.buffers, receipt.header)]
    finally:
        os.close(fd)
    return bytes(header).decode(), buffers


def _read(fd: int, part: MessagePart, path: str, rank: int) -> memoryview:
    buffer, digest = new_buffer(part.nbytes), xxhash.xxh3_128()
    done = 0
    while done < part.nbytes:
        step = buffer[done : done + _STEP_NBYTES]
        n = os.preadv(fd, [step], part.offset + done)
        if n == 0:
            raise FileNotFoundError(errno.ENOENT, f"only {part.offset + done} bytes are to be seen yet", path)
        digest.update(step[:n])
        done += n
    if digest.hexdigest() != part.digest:
        raise CorruptError(
            f"{path}: the message of rank {rank} is not what it wrote",
            rank=rank,
            file=path,
            index_range=f"bytes {part.offset}-{part.offset + part.nbytes}",
            got=f"checksum {digest.hexdigest()}",
            want=f"checksum {part.digest}",
            next_step="gather again; if it happens again, check the file system",
        )
    return buffer
