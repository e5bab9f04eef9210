"""Files that are uploaded in parts while they are made: windows fill a part, and a full part is sent at once.

Memory is a few parts, whatever the model's size. Parts that an interrupted run has uploaded are made again, to prove
them, and not sent.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from mmap import mmap

from isal import isal_zlib

from xrank.plan.buffers import copy_bytes
from xrank.stores.uploads import SMALLEST_PART_NBYTES, Part, Uploads

_LEAST_BUFFERS = 4
"""One is filled while the others are sent."""
_MOST_BUFFERS = 17


@dataclass(slots=True)
class _Filling:
    """A part that is being filled."""

    buffer: mmap
    nbytes: int
    filled: int = 0


class PartPool:
    """Buffers and threads that all files of one output share; close it at the end.

    Args:
        room_nbytes: memory for parts; there are four at least.
        part_nbytes: bytes of the largest part.
    """

    def __init__(self, room_nbytes: int = 0, part_nbytes: int = SMALLEST_PART_NBYTES) -> None:
        self.num_parts = max(_LEAST_BUFFERS, min(room_nbytes // part_nbytes, _MOST_BUFFERS))
        self.nbytes = self.num_parts * part_nbytes
        self._senders = ThreadPoolExecutor(self.num_parts - 1, thread_name_prefix="xrank-upload")
        self._changed = threading.Condition()
        self._free: list[mmap] = []
        self._num_buffers = 0
        self._num_sending = 0

    def take(self, nbytes: int) -> mmap:
        """Return a buffer of at least that size; wait while all are full and on their way.

        With all buffers half filled, waiting would be in vain, so that one more is made. Windows come nearly in order,
        and then at most one part waits for windows that no thread has begun.
        """
        with self._changed:
            while not self._free and self._num_buffers >= self.num_parts and self._num_sending:
                self._changed.wait()
            if self._free and len(self._free[-1]) >= nbytes:
                return self._free.pop()
            if self._free:  # parts of larger files are larger
                self._free.pop()
                self._num_buffers -= 1
            self._num_buffers += 1
        return mmap(-1, nbytes)

    def send(self, buffer: mmap, work: Callable[[], Part]) -> Future[Part]:
        """Do the work, which reads the buffer, on a thread; then the buffer is free."""
        with self._changed:
            self._num_sending += 1

        def run() -> Part:
            try:
                return work()
            finally:
                self.give_back(buffer, was_sending=True)

        return self._senders.submit(run)

    def give_back(self, buffer: mmap, *, was_sending: bool = False) -> None:
        """Make a buffer free."""
        with self._changed:
            self._free.append(buffer)
            self._num_sending -= was_sending
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for the parts on their way, drop the others, and free the memory."""
        self._senders.shutdown(wait=True, cancel_futures=True)
        self._free.clear()


@dataclass(slots=True)
class UploadedFile:
    """A file on its way: any thread may write to it, never the same bytes twice.

    Args:
        uploads: of the bucket.
        pool: buffers and threads.
        key: of the object.
        upload_id: of its upload.
        nbytes: bytes of the file.
        part_nbytes: bytes of each part but the last.
        known: parts that the store has already: number -> (bytes, etag, CRC-32 where the store lists it).
        late: (offset, bytes) of what `write_late` writes, by rising offset.
    """

    uploads: Uploads
    pool: PartPool
    key: str
    upload_id: str
    nbytes: int
    part_nbytes: int
    known: dict[int, tuple[int, str, int | None]] = field(default_factory=dict)
    late: Sequence[tuple[int, int]] = ()
    kept_nbytes: int = 0
    """Bytes of parts that were not sent again."""
    _filling: dict[int, _Filling] = field(default_factory=dict)
    _sent: list[Future[Part]] = field(default_factory=list)
    _done: list[Part] = field(default_factory=list)
    """Parts that the store has confirmed, or has had before."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _taking: threading.Lock = field(default_factory=threading.Lock)

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes into their parts, and send those that are full; leave out the places of late bytes.

        Raises:
            XrankError: an earlier part could not be sent.
        """
        end = offset + len(data)
        for index in range(bisect_right(self.late, offset, key=sum), len(self.late)):
            start, nbytes = self.late[index]
            if start >= end:
                break
            self.write_late(offset, data[: max(0, start - offset)])
            data, offset = data[max(0, start + nbytes - offset) :], max(offset, start + nbytes)
        self.write_late(offset, data)

    def write_late(self, offset: int, data: memoryview) -> None:
        """Copy bytes into their parts, and send those that are full; errors as `write`."""
        self._check_sent()
        while data:
            number, start = divmod(offset, self.part_nbytes)
            piece = data[: self.part_nbytes - start]
            part = self._part(number)
            copy_bytes(piece, memoryview(part.buffer)[start : start + len(piece)])
            self._count(number, part, len(piece))
            data, offset = data[len(piece) :], offset + len(piece)

    def place(self, offset: int, nbytes: int) -> memoryview:
        """Return the memory of bytes of one part, which has no late ones; wait while all parts are on their way.

        Errors as `write`.
        """
        self._check_sent()
        number, start = divmod(offset, self.part_nbytes)
        return memoryview(self._part(number).buffer)[start : start + nbytes]

    def placed(self, offset: int, nbytes: int) -> None:
        """Take bytes that were put into their place, and send the part if it is full."""
        number = offset // self.part_nbytes
        self._count(number, self._filling[number], nbytes)

    def _count(self, number: int, part: _Filling, nbytes: int) -> None:
        with self._lock:
            part.filled += nbytes
            is_full = part.filled == part.nbytes
            if is_full:
                del self._filling[number]
        if is_full:
            self._send(number + 1, part)

    def finish(self) -> tuple[Part, ...]:
        """Return all parts after the store has confirmed the last of them."""
        parts = self.finish_parts()
        assert sum(part.nbytes for part in parts) == self.nbytes, "bytes of the file were never written"
        return parts

    def finish_parts(self) -> tuple[Part, ...]:
        """Return the parts that were written here, after the store has confirmed the last of them."""
        with self._lock:
            sent, done = list(self._sent), list(self._done)
        assert not self._filling, "bytes of a part were never written"
        return tuple(sorted([*done, *(one.result() for one in sent)], key=lambda part: part.number))

    def _part(self, number: int) -> _Filling:
        # Two locks: a thread that waits for a buffer holds up those that need one, not those that fill one.
        part = self._filling.get(number)
        if part is not None:
            return part
        with self._taking:
            part = self._filling.get(number)
            if part is None:
                nbytes = min(self.part_nbytes, self.nbytes - number * self.part_nbytes)
                part = _Filling(self.pool.take(self.part_nbytes), nbytes)
                with self._lock:
                    self._filling[number] = part
        return part

    def _send(self, number: int, part: _Filling) -> None:
        view = memoryview(part.buffer)[: part.nbytes]
        kept = self._find_known(number, view)
        if kept is not None:
            view.release()
            self.pool.give_back(part.buffer)
            with self._lock:
                self._done.append(kept)
                self.kept_nbytes += kept.nbytes
            return

        def send() -> Part:
            with view:
                return self.uploads.put_part(self.key, self.upload_id, number, view)

        future = self.pool.send(part.buffer, send)
        with self._lock:
            self._sent.append(future)

    def _find_known(self, number: int, view: memoryview) -> Part | None:
        """Return the part that the store has, if its bytes are these."""
        nbytes, etag, crc32 = self.known.get(number, (-1, "", None))
        if nbytes != len(view):
            return None
        here = isal_zlib.crc32(view)
        # An etag that is no MD5, as of encrypted objects, only makes the part go again.
        if crc32 not in (None, here) or etag.strip('"') != hashlib.md5(view, usedforsecurity=False).hexdigest():
            return None
        return Part(number, nbytes, etag, here)

    def _check_sent(self) -> None:
        with self._lock:
            while self._sent and self._sent[0].done():
                self._done.append(self._sent[0].result())
                del self._sent[0]
