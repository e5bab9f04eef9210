"""The rendezvous: ranks of one host find each other through the store, once, and become a circle.

The first rank listens on a socket whose name no one can guess and no file holds (unix(7): abstract), and puts the name
into the store. The others connect: that they can is the proof of one host, whatever the hosts are called.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from time import sleep

from xrank.errors import CorruptError, RankFailedError, RankTimeoutError, UsageError
from xrank.ranks.board import Board
from xrank.ranks.circle import Circle, Peer
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.ranks.link import Link
from xrank.ranks.store import Store

__all__ = ["meet"]

_TICK_SECONDS = 0.02
_GRACE_SECONDS = 2.0
"""For the first rank, whose deadline may be a little later, to say which rank did not come."""


def meet(ranks: Sequence[int], rank: int, store: Store, name: str, deadline: Deadline) -> Circle:
    """Return the circle of these ranks; every one of them must call it, with the same name, once.

    Args:
        ranks: the first rank first.
        rank: this one, among them.
        store: seen by all.
        name: of this meeting; never used twice.
        deadline: until which all must have come.

    Raises:
        RankTimeoutError: ranks did not come; `waiting_for` has them.
        RankFailedError: a rank could not join, or failed meanwhile.
        UsageError: this rank shares no memory with the first.
    """
    if rank == ranks[0]:
        return _Host(ranks, store, name, deadline).meet()
    return _join(ranks, rank, store, name, deadline)


def _self_description(rank: int) -> dict[str, object]:
    # Process numbers mean the same only within one namespace of them (pid_namespaces(7)).
    space = os.stat("/proc/self/ns/pid").st_ino
    return {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "space": space}


class _Host:
    """The first rank's side."""

    def __init__(self, ranks: Sequence[int], store: Store, name: str, deadline: Deadline) -> None:
        self.ranks, self.store, self.name, self.deadline = tuple(ranks), store, name, deadline
        self.nonce = secrets.token_hex(16)
        self.links: dict[int, Link] = {}
        self.guests: list[Link] = []  # connected, and nothing said yet
        self.described: dict[int, dict[str, object]] = {ranks[0]: _self_description(ranks[0])}

    def meet(self) -> Circle:
        with ExitStack() as undo:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            undo.callback(listener.close)
            address = f"xrank-{secrets.token_hex(16)}"
            listener.bind(f"\0{address}")
            listener.listen(len(self.ranks))
            me = self.described[self.ranks[0]]
            self.store.put(self.name, json.dumps({**me, "address": address, "nonce": self.nonce}))
            undo.callback(self._close_links)
            undo.push(self._tell_late_ranks)
            while len(self.links) < len(self.ranks) - 1:
                self._check_joining()
                for fd in self._wait(listener):
                    joined = [rank for rank, link in self.links.items() if link.fileno() == fd]
                    if joined:
                        raise self._dead(joined[0]).to_error()
                    if fd == listener.fileno():
                        self._admit(listener.accept()[0])
                    for guest in [guest for guest in self.guests if guest.fileno() == fd]:
                        self._welcome(guest)
                if self.deadline.has_passed:
                    raise self._timeout()
            board = Board.create(len(self.ranks))
            undo.callback(os.close, board)
            memory = Board(board, len(self.ranks))
            for rank, link in self.links.items():
                try:
                    # One message for each rank: the roster of a large circle would not fit in one.
                    for described in self.described.values():
                        link.send(described)
                    link.send({"board": len(self.ranks)}, (board,))
                except (BrokenPipeError, ConnectionResetError):
                    memory.fail(0, self._dead(rank))  # for those that have the board already
                    raise self._dead(rank).to_error() from None
            circle = _circle(self.ranks, self.ranks[0], memory, self.links, self.described)
            undo.pop_all()
            os.close(board)
            listener.close()
            for guest in self.guests:
                guest.close()
            self.store.remove(self.name)
            return circle

    def _wait(self, listener: socket.socket) -> list[int]:
        """Return what there is to read after a moment: on a link of a rank that has joined, that is its end."""
        poller = select.poll()
        for fd in (listener.fileno(), *(link.fileno() for link in (*self.guests, *self.links.values()))):
            poller.register(fd, select.POLLIN)
        return [fd for fd, _ in poller.poll(1000 * min(_TICK_SECONDS, self.deadline.remaining_seconds))]

    def _close_links(self) -> None:
        for link in (*self.links.values(), *self.guests):
            link.close()

    def _tell_late_ranks(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Leave in the store why the meeting ended: ranks that come later find nobody on the socket."""
        me = self.described[self.ranks[0]]
        if isinstance(error, RankFailedError) and error.rank is not None:
            pid = int(str(self.described.get(error.rank, {}).get("pid", 0)))
            record = FailureRecord(error.rank, str(error.host), pid, str(error.cause), "the first gather")
        elif error is not None:
            record = FailureRecord.of(error, self.ranks[0], "the first gather")
        else:
            return
        with suppress(Exception):  # the store may be what failed
            self.store.put(self.name, json.dumps({**me, "ended": record.to_bytes().decode()}))

    def _dead(self, rank: int) -> FailureRecord:
        pid, host = int(str(self.described[rank]["pid"])), str(self.described[rank]["host"])
        return FailureRecord(rank, host, pid, "it ended, or gave up, before all had come", "the first gather")

    def _check_joining(self) -> None:
        for rank in self.ranks[1:]:
            if rank not in self.links and (failed := self.store.peek(f"{self.name}/{rank}")) is not None:
                raise FailureRecord.from_bytes(failed.encode()).to_error()

    def _admit(self, sock: socket.socket) -> None:
        link = Link(sock)
        if link.peer_uid() == os.getuid():
            self.guests.append(link)
        else:
            link.close()

    def _welcome(self, link: Link) -> None:
        self.guests.remove(link)
        try:
            message, descriptors = link.receive() or ({}, [])
        except CorruptError:
            message, descriptors = {}, []
        for fd in descriptors:
            os.close(fd)
        rank = message.get("rank")
        if message.get("nonce") != self.nonce or rank not in self.ranks[1:] or rank in self.links:
            link.close()  # a stranger: whoever it is, it is none of ours
            return
        assert isinstance(rank, int)
        self.links[rank] = link
        self.described[rank] = {key: message[key] for key in ("rank", "host", "pid", "space")}

    def _timeout(self) -> RankTimeoutError:
        absent = tuple(rank for rank in self.ranks[1:] if rank not in self.links)
        return RankTimeoutError(
            f"ranks {list(absent)} did not come to the first gather within {self.deadline.timeout_seconds:g} s",
            rank=absent[0],
            waiting_for=absent,
            got=f"ranks {[self.ranks[0], *sorted(self.links)]} came",
            want=f"all of ranks {list(self.ranks)}",
            next_step="every rank in `ranks` must make the call; raise timeout_seconds if they are slow",
        )


def _join(ranks: Sequence[int], rank: int, store: Store, name: str, deadline: Deadline) -> Circle:
    me = _self_description(rank)
    while (text := store.peek(name)) is None:
        if deadline.has_passed:
            raise RankTimeoutError(
                f"rank {ranks[0]} did not come to the first gather within {deadline.timeout_seconds:g} s",
                rank=ranks[0],
                waiting_for=(ranks[0],),
                want=f"all of ranks {list(ranks)}",
                next_step="every rank in `ranks` must make the call; raise timeout_seconds if they are slow",
            )
        sleep(min(_TICK_SECONDS, deadline.remaining_seconds))
    host = json.loads(text)
    _raise_ended(store, name)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.connect(f"\0{host['address']}")
    except (ConnectionRefusedError, FileNotFoundError):
        sock.close()
        _raise_ended(store, name)
        raise _tell(store, f"{name}/{rank}", rank, ranks[0], str(host["host"]), str(me["host"])) from None
    link = Link(sock)
    poller = select.poll()
    poller.register(link.fileno(), select.POLLIN)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # the first has given up: `receive` says so
            link.send({**me, "nonce": host["nonce"]})
        described: dict[int, dict[str, object]] = {}
        while True:
            if not poller.poll(1000 * (deadline.remaining_seconds + _GRACE_SECONDS)):
                raise RankTimeoutError(
                    f"rank {ranks[0]} did not answer at the first gather",
                    rank=ranks[0],
                    waiting_for=(ranks[0],),
                    next_step=f"look at rank {ranks[0]}'s own error first",
                )
            received = link.receive()
            if received is None:
                _raise_ended(store, name)
                raise RankFailedError(
                    f"rank {ranks[0]} ended the first gather before all had come",
                    rank=ranks[0],
                    host=str(host["host"]),
                    cause="it failed, or waited in vain for another rank",
                    next_step=f"look at rank {ranks[0]}'s own error first",
                )
            message, descriptors = received
            if descriptors:
                try:
                    board = Board(descriptors[0], len(ranks))
                finally:
                    os.close(descriptors[0])
                return _circle(ranks, rank, board, {ranks[0]: link}, described)
            described[int(message["rank"])] = message
    except BaseException:
        link.close()
        raise


def _raise_ended(store: Store, name: str) -> None:
    """Raise what the first rank said of a meeting that it ended."""
    ended = json.loads(store.peek(name) or "{}").get("ended")
    if ended is not None:
        raise FailureRecord.from_bytes(ended.encode()).to_error()


def _tell(store: Store, name: str, rank: int, first: int, first_host: str, host: str) -> UsageError:
    """Return the error of a rank that shares no memory with the first, after telling the first."""
    error = UsageError(
        f"rank {rank} on host {host} shares no memory with rank {first} on host {first_host}",
        rank=rank,
        host=host,
        got=f"hosts {first_host} and {host}",
        want="ranks of one host",
        next_step="give workspace_path, a directory that both hosts mount",
    )
    store.put(name, FailureRecord.of(error, rank, "the first gather").to_bytes().decode())
    return error


def _circle(
    ranks: Sequence[int], rank: int, board: Board, links: dict[int, Link], described: dict[int, dict[str, object]]
) -> Circle:
    space = _self_description(rank)["space"]
    peers, lives = {}, {}
    for r, d in described.items():
        if r == rank:
            continue
        peers[r] = Peer(r, str(d["host"]), int(str(d["pid"])))
        if d["space"] == space:
            with suppress(OSError):
                lives[r] = os.pidfd_open(peers[r].pid)
    return Circle(ranks, rank, board, links, peers, lives)
