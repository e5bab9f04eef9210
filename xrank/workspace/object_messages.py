"""Messages as objects in a bucket, for ranks of several hosts without a common directory.

An object appears whole, under a name that is never reused, and only where none is (If-None-Match). The receipt contains
its size and checksums. No listing decides anything: a reader asks for the name that the receipt gives.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import xxhash

from xrank.errors import CorruptError, IncompleteError, XrankError
from xrank.stores.ranges import read_ranges
from xrank.stores.upload_stream import upload_object
from xrank.stores.uploads import Uploads
from xrank.workspace.arena import new_buffer
from xrank.workspace.message_file import MessagePart, MessageReceipt
from xrank.workspace.message_names import MessageName, NamedMessages
from xrank.workspace.object_place import ObjectPlace
from xrank.workspace.plain_memory import row_major_bytes

if TYPE_CHECKING:
    import torch


class ObjectMessages(NamedMessages):
    """A `MessageWorkspace` in a bucket, used by one thread at a time.

    Construction removes messages that dead processes of this host left for this rank.

    Args:
        url: the prefix, ``s3://bucket/prefix``.
        rank: this rank.

    Raises:
        UsageError: it is not such a URL, or there are no credentials.
        XrankError: the store does not answer.
    """

    patience_seconds = 10.0
    """S3 shows an object at once (S3 User Guide, "Amazon S3 data consistency model"); other stores may need longer."""

    def __init__(self, url: str | os.PathLike[str], rank: int) -> None:
        self._place = ObjectPlace.from_url(url)
        super().__init__(rank)
        with _naming(rank):
            for name, _ in find_object_messages(self._place):
                if name.startswith(f".rank_{rank}.") and MessageName.owner_state(name) == "gone":
                    with contextlib.suppress(XrankError):  # it harms no run
                        self._remove(name)

    def _begin(self) -> None:
        super()._begin()
        self._opened: Uploads | None = None

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Write a message; see `MessageWorkspace`."""
        name = self._names.new()
        buffers = [row_major_bytes(tensor).data for tensor in tensors]
        parts: list[MessagePart] = []

        def fill(write: Callable[[memoryview], None]) -> None:
            offset = 0
            for buffer in chain(buffers, (memoryview(header.encode()),)):
                parts.append(MessagePart(offset, len(buffer), xxhash.xxh3_128_hexdigest(buffer)))
                write(buffer)
                offset += len(buffer)

        nbytes, key = sum(map(len, buffers)) + len(header), self._place.key(name)
        self._published.add(name)
        with _naming(self._rank):
            upload_object(self._uploads(), key, fill, nbytes=nbytes, mark=secrets.token_hex(8))
        return MessageReceipt(name, self._place.url, parts[:-1], parts[-1]).to_json()

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message; see `MessageWorkspace`.

        Raises:
            IncompleteError: there is no such object.
            CorruptError: its bytes differ from those that were written.
        """
        message = MessageReceipt.from_json(receipt, rank)
        store, key, url = self._place.store, self._place.key(message.name), self._place.url_of(message.name)
        parts = (*message.buffers, message.header)
        buffers = [new_buffer(part.nbytes) for part in parts]
        try:
            status = store.head(key)
            if status.nbytes != message.nbytes:
                raise _make_damage_error(url, rank, f"{status.nbytes:,} bytes", f"{message.nbytes:,} bytes")
            read_ranges(store, key, status, zip((part.offset for part in parts), buffers, strict=True))
        except IncompleteError as error:
            raise IncompleteError(
                f"{url}: the message of rank {rank} is not there",
                rank=rank,
                file=url,
                got=error.got,
                want=f"the {message.nbytes} bytes that rank {rank} wrote to {message.directory}",
                next_step="check that workspace_path is the same URL on both hosts",
            ) from None
        except XrankError as error:
            error.about(f"the message of rank {rank}", rank=rank)
            raise
        for part, buffer in zip(parts, buffers, strict=True):
            digest = xxhash.xxh3_128_hexdigest(buffer)
            if digest != part.digest:
                raise _make_damage_error(url, rank, f"checksum {digest}", f"checksum {part.digest}", part)
        return bytes(buffers[-1]).decode(), buffers[:-1]

    def close(self) -> None:
        """Remove everything that this rank published. A second call does nothing."""
        super().close()
        if self._opened is not None:
            self._opened.close()

    def _unlink(self, name: str) -> None:
        with _naming(self._rank):
            self._place.store.delete(self._place.key(name))

    def _uploads(self) -> Uploads:
        if self._opened is None:
            self._opened = self._place.open_uploads()
        return self._opened


def find_object_messages(place: ObjectPlace) -> Iterator[tuple[str, int]]:
    """Yield names and bytes of the messages in a place, as far as its listing shows them."""
    for name, status in place.store.list_folder(place.key("")[:-1]).objects.items():
        if MessageName.owner_state(name) is not None:
            yield name, status.nbytes


@contextlib.contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Let errors of the store name the rank."""
    try:
        yield
    except XrankError as error:
        error.about(f"rank {rank}", rank=rank)
        raise


def _make_damage_error(url: str, rank: int, got: str, want: str, part: MessagePart | None = None) -> CorruptError:
    return CorruptError(
        f"{url}: the bytes of rank {rank}'s message differ from those it wrote",
        rank=rank,
        file=url,
        index_range=None if part is None else f"bytes {part.offset}-{part.offset + part.nbytes}",
        got=got,
        want=want,
        next_step="gather again; if it happens again, check the store",
    )
