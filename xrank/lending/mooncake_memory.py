"""Memory of other processes, read by Mooncake's transfer engine: over RDMA, or over TCP.

Mooncake is a package of its own (kvcache-ai/Mooncake; its calls are those of version 0.3.13's `mooncake.engine`). xrank
uses it only where the caller asks for it, because its ports demand no token.

A call that has failed may still be filling memory: Mooncake gives up after 30 seconds, and what a stopped process sends
later is written all the same. Only the end of the engine ends that. So every failure ends it, before any error is
raised, and the next call makes another one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from xrank.environment import environ
from xrank.errors import UsageError, option
from xrank.lending.peer_memory import SpanArray, UnreadableMemoryError
from xrank.sockets.host_addresses import host_addresses

_MAX_SPANS = 512
"""Spans of one call: its TCP transport refused 4,096 as a full queue."""


def is_mooncake(wire: str | None, call: str) -> bool:
    """Return whether a caller's ``wire`` names Mooncake.

    Args:
        wire: of the caller.
        call: the caller, for errors.

    Raises:
        UsageError: it names something else, or Mooncake's engine cannot be imported.
    """
    if wire is None:
        return False
    if wire != "mooncake":
        raise UsageError(
            f"{call} knows no {option('wire')} of this name",
            got=repr(wire),
            want="None or 'mooncake'",
            next_step=f"leave {option('wire')} out: one host reads by the kernel, several by sockets",
        )
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"{call} cannot load Mooncake's transfer engine",
            got=str(error),
            want=f"the package of {option('wire')}='mooncake'",
            next_step="run pip install mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda without CUDA, "
            f"and install the libraries that it names; or leave {option('wire')} out",
        ) from None
    return True


class MooncakeEngine:
    """This process's end of Mooncake; several threads may read at once.

    The environment says how it transfers, as for Mooncake's own programs: ``MOONCAKE_PROTOCOL`` (``tcp``, the default,
    or ``rdma``), ``MOONCAKE_DEVICE`` (names of network devices; empty: Mooncake chooses) and
    ``MOONCAKE_LOCAL_HOSTNAME`` (the address under which other hosts reach this one; default: the first that it has).

    Args:
        spans: (address, bytes) of the memory that others read, or that this process fills; it must live until `close`.
            Empty and overlapping spans are allowed.

    Raises:
        UsageError: Mooncake cannot transfer by this protocol or device, or cannot register the memory.
    """

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._spans = _merge_spans(spans)
        self._lock = threading.Lock()
        self._num_readers, self._has_failed = 0, False
        self._native = _start(self._spans)

    @property
    def session(self) -> str:
        """The name under which other processes reach this engine."""
        return f"{_host()}:{self._native.get_rpc_port()}"

    def read(self, session: str, here: list[int], there: list[int], nbytes: list[int]) -> bool:
        """Copy spans of another process's memory to spans of this one's; return False if a read of any thread failed.

        Once all threads have left a failed read, no byte arrives any more. The next read begins anew.
        """
        with self._lock:
            if self._has_failed:
                return False
            if self._native is None:
                self._native = _start(self._spans)
            self._num_readers += 1
        is_done = False
        try:
            is_done = not self._native.batch_transfer_sync_read(session, here, there, nbytes)
        finally:
            with self._lock:
                self._num_readers -= 1
                self._has_failed |= not is_done
                if self._has_failed and not self._num_readers:
                    self._end()
        return is_done

    def close(self) -> None:
        """End all transfers; no thread may read. Further calls do nothing."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._has_failed = False
        if self._native is not None:
            for address, _ in self._spans:
                self._native.unregister_memory(address)
            self._native = None  # Mooncake has no call that ends an engine


class MooncakeMemory:
    """The memory that another process lends by Mooncake; several threads may read at once.

    Args:
        engine: this process's engine.
        session: the other one's.
    """

    def __init__(self, engine: MooncakeEngine, session: str) -> None:
        self._engine, self._session = engine, session

    def copy_spans(self, there: SpanArray, here: SpanArray) -> None:
        """Copy spans of that process's memory to spans of this one's, which the engine must have.

        Args:
            there: (address, bytes) of each span to read.
            here: spans to fill, of as many bytes in all; they may be cut otherwise.

        Raises:
            UnreadableMemoryError: Mooncake could not read. Part of the bytes may be copied, and no more will be.
        """
        pairs = pair_spans(there, here)
        for start in range(0, len(pairs), _MAX_SPANS):
            sources, targets, nbytes = pairs[start : start + _MAX_SPANS].T.tolist()
            if not self._engine.read(self._session, targets, sources, nbytes):
                raise UnreadableMemoryError


def pair_spans(there: SpanArray, here: SpanArray) -> SpanArray:
    """Return rows of (address there, address here, bytes): both sides cut wherever either is."""
    sides = (there, here)
    ends = [np.cumsum(side[:, 1]) for side in sides]
    cuts = np.union1d(*ends)
    starts = np.concatenate((np.zeros(1, np.uint64), cuts[:-1]))[: len(cuts)]
    addresses = []
    for side, its in zip(sides, ends, strict=True):
        owner = np.searchsorted(its, starts, side="right")
        addresses.append(side[owner, 0] + (starts - (its - side[:, 1])[owner]))
    return np.stack((*addresses, cuts - starts), axis=1)


def _start(spans: Sequence[tuple[int, int]]) -> Any:
    """Return a new engine of Mooncake that has the spans."""
    from mooncake.engine import TransferEngine

    native = TransferEngine()
    protocol, device = environ().get("MOONCAKE_PROTOCOL", "tcp"), environ().get("MOONCAKE_DEVICE", "")
    if native.initialize(_host(), "P2PHANDSHAKE", protocol, device):
        raise UsageError(
            "Mooncake's transfer engine does not start",
            got=f"MOONCAKE_PROTOCOL={protocol}, MOONCAKE_DEVICE={device}, MOONCAKE_LOCAL_HOSTNAME={_host()}",
            want="a protocol, a device and an address that this host has",
            next_step=f"set these variables, or leave {option('wire')} out",
        )
    for address, nbytes in spans:
        if native.register_memory(address, nbytes):
            raise UsageError(
                f"Mooncake cannot register {nbytes:,} bytes of this process's memory",
                want="memory that its devices can read",
                next_step=f"raise the limit of locked memory (ulimit -l), or leave {option('wire')} out",
            )
    return native


def _host() -> str:
    return environ().get("MOONCAKE_LOCAL_HOSTNAME") or host_addresses()[0]


def _merge_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans by rising address; those that touch become one: Mooncake refuses overlapping ones."""
    merged: list[tuple[int, int]] = []
    for address, nbytes in sorted(span for span in spans if span[1]):
        if merged and address <= sum(merged[-1]):
            first = merged[-1][0]
            merged[-1] = (first, max(sum(merged[-1]), address + nbytes) - first)
        else:
            merged.append((address, nbytes))
    return merged
