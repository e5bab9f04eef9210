"""What a rank lends of its memory, and how the others learn of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xrank.errors import ContradictionError, CorruptError
from xrank.lending.local_bytes import LocalBytes, TensorBytes
from xrank.lending.peer_memory import LendingEndedError, LendingSign, PeerMemory, UnreadableMemoryError
from xrank.lending.peer_service import PeerService
from xrank.ranks.link import is_readable
from xrank.ranks.peer import Peer, process_space

__all__ = ["MemoryOffer", "PeerOffer"]


class MemoryOffer:
    """What this rank lends of its memory, from its construction until `close`.

    Args:
        views: tensors' bytes; nobody may change them meanwhile.
        across_hosts: whether ranks of other hosts are to read, too; for them it listens on a port.
    """

    def __init__(self, views: Sequence[LocalBytes], *, across_hosts: bool = True) -> None:
        self.views = tuple(views)
        self._service = PeerService(self.views, across_hosts=across_hosts)
        self._sign = LendingSign()

    def told(self) -> dict[str, Any]:
        """Return, as JSON holds it, what the other ranks need to read it; only they may learn of it."""
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "space": process_space(),
            "nonce": self._sign.content.hex(),
            "nonce_address": self._sign.address,
            **self._service.told(),
            "views": [[view.address, view.nbytes] for view in self.views],
        }

    def check_unchanged(self) -> None:
        """See that torch counted no change in place of what is lent.

        Raises:
            ContradictionError: it did; the output may hold parts of the old and of the new.
        """
        for index, view in enumerate(self.views):
            if isinstance(view, TensorBytes) and not view.is_unchanged:
                raise ContradictionError(
                    f"tensor {index} of those that this rank lends was changed in place while it was being read",
                    want="the same values until all ranks have read them",
                    next_step="let no thread or hook step the optimizer meanwhile; then make the same call again",
                )

    @property
    def failure(self) -> Exception | None:
        """What a read of it for another rank raised, the first if several did."""
        return self._service.failure

    def close(self) -> None:
        """Lend nothing any more; who still reads hears of it. Twice is once."""
        self._sign.end()
        self._service.close()


@dataclass(slots=True, eq=False)
class PeerOffer:
    """What another rank lends, as it told, and what was found out of how it can be read."""

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
    addresses: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """By view; 0: not in a row in its memory."""
    nbytes: np.ndarray[tuple[int], np.dtype[np.int64]]
    unreadable: set[int] = field(default_factory=set)
    memory: PeerMemory | None = None
    life: int | None = None
    """A pidfd, where its process can be watched."""

    @classmethod
    def of(cls, rank: int, told: Mapping[str, Any]) -> PeerOffer:
        """Return what a `MemoryOffer` told.

        Raises:
            CorruptError: no offer did.
        """
        try:
            port, views = told["port"], told["views"]
            return cls(
                rank=rank,
                host=str(told["host"]),
                pid=int(told["pid"]),
                space=str(told["space"]),
                nonce=bytes.fromhex(told["nonce"]),
                nonce_address=int(told["nonce_address"]),
                socket=str(told["socket"]),
                port=None if port is None else int(port),
                hosts=tuple(map(str, told["addresses"])),
                token=bytes.fromhex(told["token"]),
                addresses=np.array([address or 0 for address, _ in views], np.uint64),
                nbytes=np.array([nbytes for _, nbytes in views], np.int64),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            raise CorruptError(
                f"rank {rank} does not say what it lends",
                rank=rank,
                got=ascii(told)[:200],
                want="what MemoryOffer.told returns",
                next_step="give all ranks the same version of xrank",
            ) from None

    def watch(self, *, direct: bool) -> None:
        """Watch its process, where it is one of this host, and prove that its memory can be read, where it is to be.

        A process number of another host or namespace means another process here: none but the peer's is touched.
        """
        if self.space != process_space():
            return
        self.life = Peer(self.rank, self.host, self.pid, self.space).open_life()
        if direct:
            with suppress(LendingEndedError, UnreadableMemoryError):
                self.memory = PeerMemory(self.pid, self.nonce_address, self.nonce)

    @property
    def has_ended(self) -> bool:
        """Whether its process is known to have ended."""
        return self.life is not None and is_readable(self.life)

    def close(self) -> None:
        """Watch its process no more."""
        if self.life is not None:
            os.close(self.life)
            self.life = None
