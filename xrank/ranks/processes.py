"""The processes of ranks: how others name them, see them end on one host, and notice their ends between hosts."""

from __future__ import annotations

import atexit
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from time import monotonic
from typing import Any
from weakref import WeakSet

from msgspec import Struct, to_builtins

from xrank.errors import XrankError
from xrank.ranks.failure import FailureRecord, damage_error
from xrank.ranks.store import Store
from xrank.system import after_fork_in_child

PERIOD_SECONDS = 2.0
MAX_MISSED = 5


class Peer(Struct, frozen=True):
    """A rank's process."""

    rank: int
    host: str
    pid: int
    space: str
    """Kernel and process namespace in which `pid` is this process."""
    network: str = ""
    """Kernel and network namespace, in which processes reach each other's abstract sockets (unix(7))."""

    @classmethod
    def from_this_process(cls, rank: int) -> Peer:
        """Return the peer of a rank that runs in this process."""
        space = process_space()
        with suppress(FileNotFoundError):  # another system than Linux
            network = f"{space.partition('.')[0]}.{os.stat('/proc/self/ns/net').st_ino}"
            return cls(rank, socket.gethostname(), os.getpid(), space, network)
        return cls(rank, socket.gethostname(), os.getpid(), space, socket.gethostname())

    def to_dict(self) -> dict[str, Any]:
        """Return the peer as a JSON object."""
        record: dict[str, Any] = to_builtins(self)
        return record

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> Peer:
        """Return the peer of a `to_dict`, which may have other entries; CorruptError if an entry is not as it wrote."""
        rank, host, pid, space = (description.get(name) for name in ("rank", "host", "pid", "space"))
        if type(rank) is type(pid) is int and 0 < pid < 1 << 31 and type(host) is type(space) is str:
            return cls(rank, host, pid, space, str(description.get("network", "")))
        raise damage_error(
            "a rank's description of its process is damaged", ascii(description)[:200], "rank, host, pid and space"
        )

    def open_life(self) -> int | None:
        """Return a pidfd (pidfd_open(2)), readable once the process has ended; None if it can't be watched.

        Raises:
            ProcessLookupError: the process has ended, and its parent has noticed it.
        """
        if self.space == process_space():
            try:
                return os.pidfd_open(self.pid)
            except ProcessLookupError:
                raise
            except OSError:  # no descriptor left
                pass
        return None


@cache
def process_space() -> str:
    """Return an id of the space in which process numbers are unique: boot and namespace (pid_namespaces(7))."""
    try:
        # No module beyond those imported anyway.
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as boot:
            return f"{boot.read().strip()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except FileNotFoundError:
        return socket.gethostname()  # another system than Linux


# A forked process may be the first of a namespace of its own.
after_fork_in_child(process_space.cache_clear)


def is_readable(fd: int) -> bool:
    """Return whether a descriptor can be read without waiting; a pidfd can once its process has ended."""
    poller = select.poll()  # not select.select, which takes no descriptor above 1023
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def record_end(rank: int, peer: Peer | None, cause: str, call: str) -> FailureRecord:
    """Return the record of a rank that has ended without one of its own; its process may be unknown."""
    host, pid = ("unknown", 0) if peer is None else (peer.host, peer.pid)
    return FailureRecord(rank, host, pid, cause, call)


class Heartbeat:
    """By which ranks on several hosts notice each other's deaths, from construction until `stop`.

    Each rank's thread counts up a number in the store and watches the number of the next rank in the list, by its own
    clock: clocks of two hosts are never compared. While the next rank has not come yet, or has ended, it watches the
    one after it, so that every rank is watched. Deaths are found whatever the main threads do, and each rank reads one
    number a period, however many ranks there are. The first beat is in the store when the construction returns.

    Args:
        store: a store that no other thread uses.
        mine: name of this rank's number.
        others: names of the other ranks' numbers, in the order in which this rank watches them. A rank without a
            number has not come yet.
        report: called on the heartbeat's thread, once for each rank that has missed five beats.
    """

    def __init__(
        self,
        store: Store,
        mine: str,
        others: Mapping[int, str],
        report: Callable[[Store, int], None],
        *,
        period_seconds: float = PERIOD_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._stopped = threading.Event()
        with suppress(XrankError):  # if the store is gone, its next user in the main thread raises
            store.put(mine, "0")
        arguments = (self._stopped, store, mine, dict(others), report, period_seconds, clock)
        self._thread = threading.Thread(target=_beat, args=arguments, name="xrank heartbeat", daemon=True)
        _running.add(self)
        self._thread.start()

    def stop(self) -> None:
        """Stop the beat; the others soon see this rank as gone."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)  # it may be in a store that does not answer


def _beat(
    stopped: threading.Event,
    store: Store,
    mine: str,
    others: dict[int, str],
    report: Callable[[Store, int], None],
    period_seconds: float,
    clock: Callable[[], float],
) -> None:
    seen, seen_at, num_missed, count = None, clock(), 0, 0
    with suppress(XrankError):
        while True:
            count += 1
            store.put(mine, str(count))
            beats = ((rank, number) for rank, name in others.items() if (number := store.peek(name)) is not None)
            beat = next(beats, None)  # of the first of the others that has come
            if beat != seen:
                seen, seen_at, num_missed = beat, clock(), 0
            elif beat is not None:
                # Both count: if the store itself is stalled, seconds pass, but this rank makes no reads either.
                num_missed += 1
                if num_missed >= MAX_MISSED and clock() - seen_at >= MAX_MISSED * period_seconds:
                    report(store, beat[0])
                    del others[beat[0]]  # from now on this rank watches the next one in the list
            if stopped.wait(period_seconds):
                return


_running: WeakSet[Heartbeat] = WeakSet()


def _stop_all() -> None:
    # No thread may be inside the store's C++ code when the interpreter ends.
    for heartbeat in list(_running):
        heartbeat.stop()


atexit.register(_stop_all)
after_fork_in_child(_running.clear)  # threads stay with the parent
