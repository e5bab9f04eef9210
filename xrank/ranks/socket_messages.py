"""Messages over sockets, for ranks of several hosts that share neither memory nor a directory.

The writer keeps a copy of each message and serves it. The receipt contains the writer's addresses; only a process that
knows a token can read, and the token derives from a secret that the ranks share. Tensors cross the network unencrypted,
like all tensors of a training, with a checksum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import xxhash
from msgspec import Struct

from xrank.errors import CorruptError, IncompleteError
from xrank.ranks.byte_service import PeerConnection, PeerGoneError, PeerRefusalError, PeerService, connect, derive_token
from xrank.ranks.directory_messages import make_receipt_error
from xrank.ranks.memory import make_no_memory_error, row_major_bytes
from xrank.ranks.memory_messages import ALIGNMENT, new_buffer
from xrank.storage.entries import Entry

if TYPE_CHECKING:
    import torch


class SocketMessages:
    """A `MessageWorkspace` for one thread at a time.

    Args:
        check: raises if a rank is known to have failed; called while a writer is silent.
        secret: shared by the ranks alone; None: receipts contain the token, and must go only to ranks of the job.
        across_hosts: whether readers may be on other hosts, so that this rank needs a port.
        addresses: returns the addresses of the port, as `PeerService` takes them.
    """

    patience_seconds = 20.0
    """A message is visible at once, or its writer has ended. Another host knows of that after ten to fourteen seconds
    (`xrank.ranks.processes`)."""

    def __init__(
        self,
        check: Callable[[], None] = lambda: None,
        *,
        secret: bytes | None = None,
        across_hosts: bool = True,
        addresses: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        self._check = check
        self._secret, self._across_hosts, self._addresses = secret, across_hosts, addresses
        self._contents: dict[int, _Content] = {}
        self._num_published = 0
        self._service: PeerService | None = None
        self._connections: dict[str, PeerConnection] = {}
        self._pid = os.getpid()

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Copy a message, and serve the copy; see `MessageWorkspace`."""
        sizes = [*(tensor.nbytes for tensor in tensors), len(head := header.encode())]
        places = _places_of(sizes)
        nbytes = places[-1] + sizes[-1]
        try:
            content = new_buffer(nbytes)
        except (MemoryError, OSError) as error:
            raise make_no_memory_error("a message", nbytes, "free memory, or give workspace_path") from error
        for place, tensor in zip(places, tensors, strict=False):
            content[place : place + tensor.nbytes] = row_major_bytes(tensor).data
        content[places[-1] :] = head
        if self._service is None:
            addresses = self._addresses() if self._across_hosts else ()
            self._service = PeerService(
                self._contents, across_hosts=self._across_hosts, addresses=addresses, secret=self._secret
            )
        self._num_published += 1
        self._contents[self._num_published] = _Content(content)
        return json.dumps(
            {
                "service": self._service.describe(),
                "number": self._num_published,
                "sizes": sizes,
                "digest": xxhash.xxh3_128_hexdigest(content),
            }
        )

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message; see `MessageWorkspace`."""
        message = _Receipt.from_json(receipt, rank, self._secret)
        places = _places_of(message.sizes)
        content = new_buffer(places[-1] + message.sizes[-1])
        try:
            self._read(rank, message, content)
        except (PeerGoneError, PeerRefusalError) as error:
            raise _missing_error(rank, message, str(error)) from None
        digest = xxhash.xxh3_128_hexdigest(content)
        if digest != message.digest:
            raise CorruptError(
                f"the bytes of rank {rank}'s message differ from those it sent",
                rank=rank,
                got=f"checksum {digest}",
                want=f"checksum {message.digest}",
                next_step="gather again; if it happens again, check the network, and the memory of both hosts",
            )
        parts = [content[start : start + nbytes] for start, nbytes in zip(places, message.sizes, strict=True)]
        return bytes(parts.pop()).decode(), parts

    def _read(self, rank: int, message: _Receipt, into: memoryview) -> None:
        def tick(silent_seconds: float) -> None:
            self._check()
            if silent_seconds > self.patience_seconds:
                raise _missing_error(rank, message, f"no answer for {silent_seconds:.0f} s")

        connection = self._connections.pop(message.socket, None)
        try:
            if connection is None:
                connection = connect(message.socket, message.port, message.addresses, message.token, tick)
            connection.read_into(message.number, 0, into, tick)
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        self._connections[message.socket] = connection

    def retire(self, receipt: str) -> None:
        """Release a message of this rank after its reader has fetched it."""
        self._contents.pop(_Receipt.from_json(receipt, -1, self._secret).number, None)

    def close(self) -> None:
        """Release all messages, and close all connections. Fetched messages stay valid. A second call does nothing."""
        if os.getpid() != self._pid:  # the service's thread is the parent's
            return
        if self._service is not None:
            self._service.close()
        self._contents.clear()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


class _Content:
    """The bytes of a message, as `xrank.ranks.byte_service.ServedBytes`."""

    def __init__(self, content: memoryview) -> None:
        self.nbytes, self._content = len(content), content

    def find_row(self, start: int, nbytes: int) -> memoryview:
        return self._content[start : start + nbytes]

    def read_into(self, start: int, into: memoryview) -> None:
        into[:] = self.find_row(start, len(into))


class _Receipt(Struct, frozen=True):
    """A receipt's fields."""

    socket: str
    port: int | None
    addresses: tuple[str, ...]
    token: bytes
    number: int
    sizes: tuple[int, ...]
    """Bytes of each tensor, and of the header."""
    digest: str
    """XXH3-128 of the whole message in hexadecimal digits."""

    @classmethod
    def from_json(cls, text: str, rank: int, secret: bytes | None) -> _Receipt:
        fields = Entry.parse(text, lambda fault: make_receipt_error(text, rank))
        service, sizes = fields["service"], fields["sizes"].counts()
        name, port = service["socket"].text(), service.get("port")
        if not sizes:
            fields["sizes"].refuse("sizes")
        return cls(
            name,
            None if port is None else port.count(below=1 << 16),
            service["addresses"].texts(),
            service["token"].digest() if secret is None else derive_token(secret, name),
            fields["number"].count(),
            sizes,
            fields["digest"].text(),
        )


def _places_of(sizes: Sequence[int]) -> list[int]:
    """Return the first byte of each part of a message."""
    places, end = [], 0
    for nbytes in sizes:
        places.append(end)
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return places


def _missing_error(rank: int, message: _Receipt, got: str) -> IncompleteError:
    places = ", ".join(f"{address} port {message.port}" for address in message.addresses) or "a socket of this host"
    return IncompleteError(
        f"the message of rank {rank} cannot be read from it",
        rank=rank,
        got=got[:500],
        want=f"an answer of rank {rank} at {places}",
        next_step=f"check that rank {rank} still runs, and that its host accepts connections on any port; else give "
        "workspace_path, a directory that all hosts mount",
    )
