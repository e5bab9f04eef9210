"""The memory that a rank lends, and its description for the other ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xrank.errors import ContradictionError, CorruptError
from xrank.formats.entries import Entry
from xrank.lending.local_bytes import LocalBytes, TensorBytes
from xrank.lending.mooncake_memory import MooncakeEngine
from xrank.lending.peer_memory import LendingEndedError, LendingSign, PeerMemory, UnreadableMemoryError
from xrank.ranks.link import is_readable
from xrank.ranks.peer import Peer, process_space
from xrank.sockets.peer_service import PeerService
from xrank.sockets.peer_wire import derive_token
from xrank.system import keep_descriptors_free


class MemoryOffer:
    """The memory that this rank lends, from construction until `close`.

    Args:
        views: bytes of tensors, which must not change meanwhile.
        across_hosts: whether ranks on other hosts also read; the offer then listens on a port.
        by_mooncake: whether Mooncake may read the views that are in a row in memory, too.
        addresses: of the port, as `PeerService` takes them.
        secret: shared with the readers, who add the token to the description (`add_token`); None: it is in it.

    Raises:
        UsageError: as `MooncakeEngine`.
    """

    def __init__(
        self,
        views: Sequence[LocalBytes],
        *,
        across_hosts: bool = True,
        by_mooncake: bool = False,
        addresses: Sequence[str] = (),
        secret: bytes | None = None,
    ) -> None:
        self.views = tuple(views)
        spans = [(view.address, view.nbytes) for view in self.views if view.address]
        self._mooncake = MooncakeEngine(spans) if by_mooncake else None
        self._service = PeerService(
            dict(enumerate(self.views)), across_hosts=across_hosts, addresses=addresses, secret=secret
        )
        self._sign = LendingSign()

    def describe(self) -> dict[str, Any]:
        """Return a JSON description with which other ranks read the offer; with a token, only those may receive it."""
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "space": process_space(),
            # A reader looks for the nonce at its address: if this process has ended, its number may be another one's.
            "nonce": self._sign.content.hex(),
            "nonce_address": self._sign.address,
            **self._service.describe(),
            "mooncake": None if self._mooncake is None else self._mooncake.session,
            "views": [[view.address, view.nbytes] for view in self.views],
        }

    def check_unchanged(self) -> None:
        """Check that torch has counted no change in place of the lent tensors.

        Raises:
            ContradictionError: a tensor has changed; the output may contain parts of old and new values.
        """
        for index, view in enumerate(self.views):
            if isinstance(view, TensorBytes) and not view.is_unchanged:
                raise ContradictionError(
                    f"tensor {index} of those that this rank lends was changed in place while other ranks read it",
                    want="the same values until all ranks have read them",
                    next_step="do not step the optimizer meanwhile, in any thread or hook; then repeat the call",
                )

    @property
    def failure(self) -> Exception | None:
        """The first exception of a read for another rank."""
        return self._service.failure

    def close(self) -> None:
        """Stop lending. Ranks that still read get an error. Further calls do nothing."""
        # The sign first: from here on a reader trusts no bytes that it has copied by itself.
        self._sign.end()
        self._service.close()
        if self._mooncake is not None:
            self._mooncake.close()


def add_token(description: Mapping[str, Any], secret: bytes) -> dict[str, Any]:
    """Return an offer's description with the token that its readers derive from their secret."""
    return {**description, "token": derive_token(secret, str(description.get("socket"))).hex()}


@dataclass(slots=True, eq=False)
class PeerOffer:
    """Another rank's offer: its description, and the ways in which this process can read it."""

    rank: int
    host: str
    pid: int
    space: str
    nonce: bytes
    nonce_address: int
    socket: str
    port: int | None
    hosts: tuple[str, ...]
    token: bytes
    mooncake: str | None
    """Session of its engine."""
    addresses: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """Address of each view; 0 if its bytes are not in a row in memory."""
    nbytes: np.ndarray[tuple[int], np.dtype[np.int64]]
    unreadable: set[int] = field(default_factory=set)
    memory: PeerMemory | None = None
    life: int | None = None
    """A pidfd, if its process can be watched from here."""
    _is_gone: bool = False

    @classmethod
    def from_description(cls, rank: int, description: Mapping[str, Any]) -> PeerOffer:
        """Return the offer of a `MemoryOffer` description.

        Raises:
            CorruptError: the description is invalid.
        """
        whole = Entry(
            description,
            lambda fault: CorruptError(
                f"rank {rank} does not describe what it lends",
                rank=rank,
                got=fault,
                want="the description of MemoryOffer.describe",
                next_step="give all ranks the same version of xrank",
            ),
        )
        port, mooncake = whole.get("port"), whole.get("mooncake")
        views = whole["views"].value
        if not isinstance(views, list) or not all(map(_is_view, views)):  # plain checks: there are many
            whole["views"].refuse("a list of addresses and sizes")
        if len(whole["socket"].text().encode()) > 100:  # unix(7): 107 bytes at most
            whole["socket"].refuse("the name of a socket")
        return cls(
            rank=rank,
            host=whole["host"].text(),
            pid=whole["pid"].count(low=1, below=1 << 31),
            space=whole["space"].text(),
            nonce=whole["nonce"].digest(),
            nonce_address=whole["nonce_address"].count(below=1 << 64),
            socket=whole["socket"].text(),
            port=None if port is None else port.count(below=1 << 16),
            hosts=whole["addresses"].texts(),
            token=whole["token"].digest(),
            mooncake=None if mooncake is None else mooncake.text(),
            addresses=np.array([address or 0 for address, _ in views], np.uint64),
            nbytes=np.array([nbytes for _, nbytes in views], np.int64),
        )

    def watch(self, *, direct: bool) -> None:
        """Watch the peer's process if it is on this host; with `direct`, try to read its memory by the kernel.

        On another host or in another namespace, its process number belongs to another process, which is not touched.
        """
        if self.space != process_space():
            return
        try:
            self.life = Peer(self.rank, self.host, self.pid, self.space).open_life()
            if self.life is not None:
                keep_descriptors_free(self.life)
        except ProcessLookupError:
            self._is_gone = True
        if direct:
            # If the kernel refuses, the peer's service sends the bytes.
            with suppress(LendingEndedError, UnreadableMemoryError):
                self.memory = PeerMemory(self.pid, self.nonce_address, self.nonce)

    @property
    def has_ended(self) -> bool:
        """Whether its process is known to have ended."""
        return self._is_gone or (self.life is not None and is_readable(self.life))

    def close(self) -> None:
        """Stop watching the process."""
        if self.life is not None:
            os.close(self.life)
            self.life = None


def _is_view(value: Any) -> bool:
    if type(value) is not list or len(value) != 2:
        return False
    address, nbytes = value
    return (address is None or (type(address) is int and 0 <= address < 1 << 64)) and (
        type(nbytes) is int and 0 <= nbytes < 1 << 63
    )
