"""Objects that are uploaded in parts, each confirmed by a checksum, and that appear whole at one instant.

`Uploads` repeats and counts the single requests of a store's `WritableBackend`. `UploadedFile` cuts a file that threads
write in windows into parts and sends each full part at once: memory is a few parts, whatever the model's size. Parts
that an interrupted run has uploaded are made again, to prove them, and not sent.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from mmap import mmap
from typing import Protocol, TypeAlias, cast

from isal import isal_zlib
from msgspec import Struct, field

from xrank.errors import XrankError
from xrank.storage.client import ABSENT, Backend, FaultError, FaultKind, ObjectStore, copy_bytes
from xrank.storage.commit import Count

WRITABLE = ("s3", "gs", "az", "abfs")
"""Schemes of the stores that take uploads."""
SMALLEST_PART_NBYTES = 5 << 20
"""Fewest bytes of a part that is not the last (S3 User Guide, "Amazon S3 multipart upload limits")."""
MOST_PARTS = 10_000
"""S3's limit; Azure takes 50,000 (Azure REST reference, "Put Block List")."""
_MIB = 1 << 20
_LEAST_BUFFERS = 4
"""One is filled while the others are sent."""
_MOST_BUFFERS = 17
_STREAM_SENDERS = 3
"""Parts of `upload_object` on their way at once; with the one that is being filled they take 20 MiB."""

KnownParts: TypeAlias = dict[int, tuple[int, str, int | None]]
"""Number of a part -> its bytes, its etag, and its CRC-32 where the store lists one."""


class UploadedPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A part that the store has confirmed."""

    number: Count
    """From 1 on."""
    nbytes: Count
    etag: str
    """With its quotes; of a store that gives parts none, their MD5."""
    crc32: Count


class UploadedObject(Struct, frozen=True):
    """An object as the store describes it."""

    nbytes: int
    etag: str
    mark: str | None
    """The stage that has written it."""


class WritableBackend(Backend, Protocol):
    """The requests of a store that takes uploads, without repetitions; a `condition` is as in `ObjectStore.put`."""

    lists_only_own: bool
    """Whether the names of parts distinguish xrank's uploads from other programs' in `list_uploads`."""

    def check_writable(self, url: str) -> None:
        """Raise UsageError if a package or credentials for writing are missing, or the store ignores conditions."""

    def put(self, key: str, data: bytes | memoryview, condition: str | None, mark: str = "") -> str:
        """Write an object at one instant and return its version."""

    def delete(self, key: str) -> None:
        """Delete an object; it may be absent."""

    def look(self, key: str) -> UploadedObject | None:
        """Return an object as the store describes it; None if it is absent."""

    def create(self, key: str, mark: str) -> str:
        """Begin an upload and return its id."""

    def put_part(self, key: str, upload_id: str, part: UploadedPart, data: Body) -> str:
        """Upload a part, whose etag is its MD5; return its etag when the store has confirmed its bytes."""

    def list_parts(self, key: str, upload_id: str) -> KnownParts | None:
        """Return the parts that are in the store; None without such an upload."""

    def complete(
        self, key: str, upload_id: str, parts: Sequence[UploadedPart], mark: str, condition: str | None
    ) -> None:
        """Make the object of the parts."""

    def abort(self, key: str, upload_id: str) -> None:
        """Remove an upload and its parts; it may be gone."""

    def list_uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Return (key, id) of the uploads below a prefix that are neither completed nor aborted."""


class Body(io.RawIOBase):
    """Bytes that clients read, again if need be, piece by piece: no client holds a copy of a part, or its memory."""

    def __init__(self, data: bytes | memoryview) -> None:
        # Not a view of it: once the owner has released its memory, a request that was left behind reads nothing.
        self._data, self._at = data, 0

    def __len__(self) -> int:
        return len(self._data)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes."""
        end = len(self._data) if size is None or size < 0 else min(self._at + size, len(self._data))
        piece = bytes(self._data[self._at : end])
        self._at = end
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place."""
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at


PART_NAME = re.compile(r"([0-9a-f]{10}[0-9a-f]{12})-(\d{5})-([0-9a-f]{32})")
"""Name of a part in stores that do not number parts: upload, number, MD5. All names have one length."""


def part_name(upload_id: str, part: UploadedPart) -> str:
    """Return the name of a part as in `PART_NAME`."""
    return f"{upload_id}-{part.number:05}-{part.etag.strip(chr(34))}"


def part_nbytes_for(nbytes: int) -> int:
    """Return the bytes of each part of an object, in whole MiB: 5 MiB, or more where 10,000 parts would not suffice.

    >>> part_nbytes_for(16 << 30) >> 20, part_nbytes_for(1 << 40) >> 20
    (5, 105)
    """
    return max(SMALLEST_PART_NBYTES, -(-nbytes // (MOST_PARTS * _MIB)) * _MIB)


def count_parts(nbytes: int) -> int:
    """Return the number of parts of an object.

    >>> count_parts(12 << 20)
    3
    """
    return -(-nbytes // part_nbytes_for(nbytes))


class Uploads:
    """Uploads to one bucket or container; any thread may call it. Requests and their errors are as `ObjectStore`'s.

    UsageError when it is made without credentials or a package, or if the store ignores conditions.
    """

    def __init__(self, store: ObjectStore, url: str | None = None) -> None:
        self._store = store
        self._backend = cast("WritableBackend", store.backend)
        self._backend.check_writable(url or store.root)
        self.lists_only_own = self._backend.lists_only_own

    def create(self, key: str, mark: str) -> str:
        """Begin an upload and return its id."""
        return self._store.repeat(key, "written", lambda: self._backend.create(key, mark))

    def put_part(self, key: str, upload_id: str, number: int, data: bytes | memoryview) -> UploadedPart:
        """Upload a part; return when the store has confirmed its bytes by a checksum."""
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        part = UploadedPart(number, len(data), f'"{md5}"', isal_zlib.crc32(data))

        def send() -> UploadedPart:
            etag = self._backend.put_part(key, upload_id, part, Body(data))
            return UploadedPart(number, part.nbytes, etag, part.crc32)

        return self._store.repeat(key, f"written (part {number})", send, written_nbytes=len(data))

    def list_parts(self, key: str, upload_id: str) -> KnownParts | None:
        """Return the parts that are in the store; None without such an upload."""
        return self._store.repeat(key, "looked at", lambda: self._backend.list_parts(key, upload_id))

    def complete(
        self, key: str, upload_id: str, parts: Sequence[UploadedPart], mark: str, condition: str | None = ABSENT
    ) -> None:
        """Make the object of the parts, where the `condition` of `ObjectStore.put` holds.

        OutputExistsError if another object is there; IncompleteError if there is no such upload.
        """
        send = partial(self._backend.complete, key, upload_id, parts, mark, condition)
        if self._publish(key, send, mark, sum(part.nbytes for part in parts)):
            self.abort(key, upload_id)

    def put_new(self, key: str, data: bytes | memoryview, mark: str, condition: str | None = ABSENT) -> None:
        """Write a small object, as `complete` does; return when the store has confirmed its bytes."""
        send = partial(self._backend.put, key, data, condition, mark)
        self._publish(key, send, mark, len(data), sent_nbytes=len(data))

    def head(self, key: str) -> UploadedObject | None:
        """Return an object as the store describes it; None if it is absent."""
        return self._store.repeat(key, "looked at", lambda: self._backend.look(key))

    def abort(self, key: str, upload_id: str) -> None:
        """Remove an upload and its parts; it may be gone."""
        self._store.repeat(key, "cleaned", lambda: self._backend.abort(key, upload_id))

    def list_uploads(self, prefix: str) -> list[tuple[str, str, float]]:
        """Return (key, id, age in seconds) of the uploads below a prefix that are neither completed nor aborted.

        The age of an upload that another program may have begun is 0.
        """
        found = self._store.repeat(prefix, "listed", lambda: self._backend.list_uploads(prefix))
        now = time.time()
        return [(key, one, now - int(one[:10], 16) if self.lists_only_own else 0.0) for key, one in found]

    def _publish(self, key: str, send: Callable[[], object], mark: str, nbytes: int, sent_nbytes: int = 0) -> bool:
        """Send a request that makes an object; return whether this stage had made it, as where an answer was lost."""

        def settle() -> bool:
            try:
                send()
                return False
            except FaultError as fault:
                if fault.kind not in (FaultKind.CHANGED, FaultKind.MISSING):
                    raise
                there = self._backend.look(key)
                if there is None:
                    raise
                if (there.mark, there.nbytes) != (mark, nbytes):
                    raise FaultError(FaultKind.EXISTS, "an object that this gather has not written") from None
                return True

        return self._store.repeat(key, "written", settle, written_nbytes=sent_nbytes)


def upload_object(
    uploads: Uploads,
    key: str,
    fill: Callable[[Callable[[memoryview], None]], None],
    *,
    nbytes: int,
    mark: str,
) -> None:
    """Upload an object while its bytes are made, in order; it appears or is replaced at one instant, or not at all.

    `fill` is called once with a function that takes the bytes, piece by piece. `nbytes` is about the object's size.
    No other object has the `mark`. After an error, of `fill` or the store, no part is left, if it can be reached.
    """
    part_nbytes = part_nbytes_for(nbytes + nbytes // 8)
    buffer, upload_id, sent = bytearray(), "", list[Future[UploadedPart]]()
    slots = threading.BoundedSemaphore(_STREAM_SENDERS)

    def put(number: int, data: bytearray) -> UploadedPart:
        try:
            return uploads.put_part(key, upload_id, number, memoryview(data))
        finally:
            slots.release()

    def send() -> None:
        nonlocal buffer, upload_id
        for one in sent:
            if one.done():
                one.result()  # raises that part's failure
        upload_id = upload_id or uploads.create(key, mark)
        slots.acquire()
        sent.append(senders.submit(put, len(sent) + 1, buffer))
        buffer = bytearray()

    def write(data: memoryview) -> None:
        data = data.cast("B")
        while data:
            piece = data[: part_nbytes - len(buffer)]
            buffer.extend(piece)
            data = data[len(piece) :]
            if len(buffer) == part_nbytes:
                send()

    with ThreadPoolExecutor(_STREAM_SENDERS, thread_name_prefix="xrank-upload") as senders:
        try:
            fill(write)
            if upload_id and buffer:
                send()
            if upload_id:
                uploads.complete(key, upload_id, [one.result() for one in sent], mark, None)
            else:
                uploads.put_new(key, memoryview(buffer), mark, None)
        except BaseException:
            senders.shutdown(wait=True, cancel_futures=True)
            if upload_id:
                with suppress(XrankError):  # the failure that led here counts
                    uploads.abort(key, upload_id)
            raise


class _Filling(Struct):
    buffer: mmap
    nbytes: int
    filled: int = 0


class PartPool:
    """Buffers and threads that all files of one output share; close it at the end.

    Parts of at most `part_nbytes` take the memory `room_nbytes`; there are four at least.
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

    def send(self, buffer: mmap, work: Callable[[], UploadedPart]) -> Future[UploadedPart]:
        """Do the work, which reads the buffer, on a thread; then the buffer is free."""
        with self._changed:
            self._num_sending += 1

        def run() -> UploadedPart:
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


class UploadedFile(Struct):
    """A file on its way: any thread may write to it, never the same bytes twice."""

    uploads: Uploads
    pool: PartPool
    key: str
    upload_id: str
    nbytes: int
    part_nbytes: int
    """Bytes of each part but the last."""
    known: KnownParts = field(default_factory=dict)
    """Parts that the store has already."""
    late: Sequence[tuple[int, int]] = ()
    """(offset, bytes) of what `write_late` writes, by rising offset."""
    kept_nbytes: int = 0
    """Bytes of parts that were not sent again."""
    _filling: dict[int, _Filling] = field(default_factory=dict)
    _sent: list[Future[UploadedPart]] = field(default_factory=list)
    _done: list[UploadedPart] = field(default_factory=list)
    """Parts that the store has confirmed, or has had before."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _taking: threading.Lock = field(default_factory=threading.Lock)

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes into their parts, and send those that are full; leave out the places of late bytes.

        XrankError if an earlier part could not be sent.
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

    def finish_parts(self) -> tuple[UploadedPart, ...]:
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
        nbytes, etag, listed = self.known.get(number, (-1, "", None))
        crc32 = isal_zlib.crc32(view) if nbytes == len(view) else -1
        # An etag that is no MD5, as of encrypted objects, only makes the part go again.
        is_known = crc32 >= 0 and listed in (None, crc32)
        if is_known and etag.strip('"') == hashlib.md5(view, usedforsecurity=False).hexdigest():
            view.release()
            self.pool.give_back(part.buffer)
            with self._lock:
                self._done.append(UploadedPart(number, nbytes, etag, crc32))
                self.kept_nbytes += nbytes
            return

        def send() -> UploadedPart:
            with view:
                return self.uploads.put_part(self.key, self.upload_id, number, view)

        future = self.pool.send(part.buffer, send)
        with self._lock:
            self._sent.append(future)

    def _check_sent(self) -> None:
        with self._lock:
            while self._sent and self._sent[0].done():
                self._done.append(self._sent[0].result())
                del self._sent[0]


class PartsTarget:
    """Files in parts as the executor's target; see `xrank.engine.buffers.PlacingTarget`."""

    def __init__(self) -> None:
        self._pool: PartPool | None = None
        self._files: dict[int, UploadedFile] = {}

    def share_memory(self, room_nbytes: int, largest_nbytes: int) -> tuple[int, int]:
        """Return the memory that parts of files of such sizes take in such a room, and their number; called first."""
        self._pool = self._pool or PartPool(room_nbytes, part_nbytes_for(largest_nbytes))
        return self._pool.nbytes, self._pool.num_parts

    def part_nbytes(self, file: int) -> int:
        """Return the bytes of each part of a file; 0 where bytes that are written late lie among others."""
        return 0 if self._files[file].late else self._files[file].part_nbytes

    def place(self, file: int, offset: int, nbytes: int) -> memoryview:
        """Return the memory for bytes of one part; wait while all parts are on their way."""
        return self._files[file].place(offset, nbytes)

    def placed(self, file: int, offset: int, nbytes: int) -> None:
        """Take bytes that were put into their place."""
        self._files[file].placed(offset, nbytes)

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Put bytes at `offset` of that output file."""
        self._files[file].write(offset, data)

    def write_late(self, file: int, offset: int, data: memoryview) -> None:
        """Put bytes of the file's ending at `offset`."""
        self._files[file].write_late(offset, data)
