"""An object that is uploaded while its bytes are made, in order: its size need not be known before the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from xrank.errors import XrankError
from xrank.stores.uploads import Part, Uploads, part_nbytes_for

_SENDERS = 3
"""Parts on their way at once; with the one that is being filled they take 20 MiB."""


def upload_object(
    uploads: Uploads,
    key: str,
    fill: Callable[[Callable[[memoryview], None]], None],
    *,
    nbytes: int,
    mark: str,
    replaces: bool = False,
) -> None:
    """Upload an object, which appears whole at one instant, or not at all.

    Args:
        uploads: of the bucket.
        key: the object.
        fill: called once with a function that takes the object's bytes, piece by piece, in order.
        nbytes: about the size of the object, which decides the size of its parts.
        mark: text that no other object has: it tells this upload's object from another's after a lost answer.
        replaces: whether the object may take the place of another one.

    Raises:
        OutputExistsError: an object is there, and `replaces` is not set.
        XrankError: the store does not take the bytes; errors of `fill`. No part is left, if the store can be reached.
    """
    stream = _Stream(uploads, key, part_nbytes_for(nbytes + nbytes // 8), mark)
    try:
        fill(stream.write)
        stream.finish(replaces=replaces)
    except BaseException:
        stream.abort()
        raise
    finally:
        stream.close()


class _Stream:
    def __init__(self, uploads: Uploads, key: str, part_nbytes: int, mark: str) -> None:
        self._uploads, self._key, self._part_nbytes, self._mark = uploads, key, part_nbytes, mark
        self._buffer = bytearray()
        self._upload_id: str | None = None
        self._sent: list[Future[Part]] = []
        self._senders: ThreadPoolExecutor | None = None
        self._slots = threading.BoundedSemaphore(_SENDERS)

    def write(self, data: memoryview) -> None:
        """Take the next bytes, and send each part that they fill."""
        data = data.cast("B")
        while data:
            piece = data[: self._part_nbytes - len(self._buffer)]
            self._buffer += piece
            data = data[len(piece) :]
            if len(self._buffer) == self._part_nbytes:
                self._send()

    def finish(self, *, replaces: bool) -> None:
        """Make the object of all bytes."""
        if self._upload_id is None:
            self._uploads.put_new(self._key, memoryview(self._buffer), self._mark, replaces=replaces)
            return
        if self._buffer:
            self._send()
        parts = [one.result() for one in self._sent]
        self._uploads.complete(self._key, self._upload_id, parts, self._mark, replaces=replaces)
        self._upload_id = None

    def abort(self) -> None:
        """Remove the parts that were sent."""
        self.close()
        if self._upload_id is not None:
            with suppress(XrankError):  # the failure that led here counts
                self._uploads.abort(self._key, self._upload_id)

    def close(self) -> None:
        """Wait for the parts on their way."""
        if self._senders is not None:
            self._senders.shutdown(wait=True, cancel_futures=True)

    def _send(self) -> None:
        for one in self._sent:
            if one.done():
                one.result()  # raises that part's failure
        if self._upload_id is None:
            self._upload_id = self._uploads.create(self._key, self._mark)
        if self._senders is None:
            self._senders = ThreadPoolExecutor(_SENDERS, thread_name_prefix="xrank-upload")
        self._slots.acquire()
        number, buffer, self._buffer = len(self._sent) + 1, self._buffer, bytearray()
        self._sent.append(self._senders.submit(self._put, self._upload_id, number, buffer))

    def _put(self, upload_id: str, number: int, buffer: bytearray) -> Part:
        try:
            return self._uploads.put_part(self._key, upload_id, number, memoryview(buffer))
        finally:
            self._slots.release()
