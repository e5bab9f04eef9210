"""The rendezvous of ranks of one host: they find each other through the store, once, and become a circle.

The first rank listens on a socket with a random name outside the file system (unix(7): abstract) and puts the name
into the store. The others connect, which is possible on the same host only, whatever the hosts are called.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from xrank.errors import CorruptError, RankFailedError, RankTimeoutError
from xrank.ranks.board import Board
from xrank.ranks.circle import Circle
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.ranks.host_wire import Bells, HostWire
from xrank.ranks.link import Link
from xrank.ranks.meeting import CALL, Meeting
from xrank.ranks.peer import Peer, process_space
from xrank.ranks.wire import Message
from xrank.system import count_cores

_TICK_SECONDS = 0.02
_PEERS_PER_MESSAGE = 100
"""The roster of a large circle does not fit into one message."""
_SPIN_SECONDS = 200e-6
_GRACE_SECONDS = 2.0
"""Extra wait for the first rank, whose deadline may be a little later, to report the ranks that did not come."""


class RanksApartError(Exception):
    """Some ranks of a meeting share no memory, or no process numbers. All of its ranks get this error.

    They may go on to meet by `xrank.ranks.store_rendezvous`, in the same meeting.
    """


def meet(meeting: Meeting) -> Circle:
    """Return the circle of a meeting's ranks; every one of them must call it once.

    Raises:
        RankTimeoutError: ranks did not come; `waiting_for` names them.
        RankFailedError: a rank could not join, or failed meanwhile.
        RanksApartError: a rank shares no memory, or no process numbers, with the first.
    """
    return _Host(meeting).meet() if meeting.rank == meeting.ranks[0] else _join(meeting)


class _Host:
    """The first rank's side."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.others = tuple(meeting.ranks[1:])
        self.nonce = secrets.token_hex(16)
        self.secret = secrets.token_bytes(32)
        self.links: dict[int, Link] = {}
        self.guests: list[Link] = []  # connected, first message not yet received
        self.peers: dict[int, Peer] = {}
        self.threads: set[str] = set()
        self.next_look = Deadline(_TICK_SECONDS)

    def meet(self) -> Circle:
        meeting = self.meeting
        with ExitStack() as undo:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            undo.callback(listener.close)
            address = f"xrank-{secrets.token_hex(16)}"
            listener.bind(f"\0{address}")
            # Before the announcement: ranks connect as soon as they read the address.
            listener.listen(len(meeting.ranks))
            meeting.announce(address=address, nonce=self.nonce)
            undo.callback(self._close_links)
            # Pushed last, so it runs first: a rank whose link is closed looks in the store for the reason.
            undo.push(self._record_end)
            while len(self.links) < len(self.others):
                self._gather_guests(listener)
            meeting.check_threads(self.threads)
            board, bells = self._start()
            circle = _circle(meeting, board, bells, self.links, self.peers, self.secret)
            undo.pop_all()
            listener.close()
            for guest in self.guests:
                guest.close()
            meeting.store.remove(meeting.name)
            return circle

    def _gather_guests(self, listener: socket.socket) -> None:
        """Accept connections for a moment; raise if a rank has failed or gone."""
        if self.next_look.has_passed:  # not for each guest: the store may be slow
            self.next_look = Deadline(_TICK_SECONDS)
            absent = [rank for rank in self.others if rank not in self.links]
            self.meeting.raise_refusal(absent)
            if self.meeting.store.peek(_apart_name(self.meeting)) is not None:
                raise RanksApartError
            self.meeting.check(absent)
        poller = select.poll()
        for fd in (listener.fileno(), *(link.fileno() for link in (*self.guests, *self.links.values()))):
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll(1000 * min(_TICK_SECONDS, self.meeting.deadline.remaining_seconds)):
            joined = [rank for rank, link in self.links.items() if link.fileno() == fd]
            if joined:  # a rank that has joined sends nothing, so this is its end
                raise self._record_death(joined[0]).to_error()
            if fd == listener.fileno():
                self._admit(listener.accept()[0])
            for guest in [guest for guest in self.guests if guest.fileno() == fd]:
                self._welcome(guest)
        if self.meeting.deadline.has_passed:
            raise self.meeting.make_timeout_error([rank for rank in self.others if rank not in self.links])

    def _start(self) -> tuple[Board, Bells]:
        """Send all ranks the board, the bells and the roster."""
        ranks = self.meeting.ranks
        fd = Board.create(len(ranks))
        board, bells = Board(fd, len(ranks)), Bells.create()
        peers = [peer.to_dict() for peer in (Peer.from_this_process(ranks[0]), *self.peers.values())]
        try:
            for rank, link in self.links.items():
                try:
                    for start in range(0, len(peers), _PEERS_PER_MESSAGE):
                        link.send(Message({"peers": peers[start : start + _PEERS_PER_MESSAGE]}))
                    # The board last: its receiver takes it for the end of the roster.
                    # Links connect processes of this user on this host, so what they carry stays among them.
                    content = {"board": len(ranks), "secret": self.secret.hex()}
                    link.send(Message(content), (fd, *bells.descriptors))
                except (BrokenPipeError, ConnectionResetError):
                    board.fail(0, self._record_death(rank))  # for ranks that have the board already
                    bells.close()
                    raise self._record_death(rank).to_error() from None
        finally:
            os.close(fd)
        return board, bells

    def _close_links(self) -> None:
        for link in (*self.links.values(), *self.guests):
            link.close()

    def _record_end(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RanksApartError):
            self.meeting.announce()  # without an address
        elif error is not None:
            self.meeting.end(error)

    def _record_death(self, rank: int) -> FailureRecord:
        """Return the reason why a rank that had joined is gone: its own refusal, if it sent one."""
        if (refusal := self.meeting.read_refusal(rank)) is not None:
            return refusal
        peer = self.peers[rank]
        return FailureRecord(rank, peer.host, peer.pid, "it ended, or gave up, before all had come", CALL)

    def _admit(self, sock: socket.socket) -> None:
        link = Link(sock)
        # An abstract socket has no permissions, so any user of the host may connect.
        if link.peer_uid() == os.getuid():
            self.guests.append(link)
        else:
            link.close()

    def _welcome(self, link: Link) -> None:
        self.guests.remove(link)
        descriptors: list[int] = []
        try:
            message, descriptors = link.receive() or (Message({}), [])
            peer = Peer.from_dict(message.content)
        except CorruptError:
            peer = None
        for fd in descriptors:
            os.close(fd)
        if (
            peer is None
            or message.content.get("nonce") != self.nonce
            or peer.rank not in self.others
            or peer.rank in self.links
        ):
            link.close()  # a process of another run
            return
        self.meeting.check_at_large(message.content)
        self.threads.add(message.content.get("thread", ""))
        self.links[peer.rank] = link
        self.peers[peer.rank] = peer


def _join(meeting: Meeting) -> Circle:
    announced = meeting.await_first()
    _check_address(announced)
    host = Peer.from_dict(announced)
    if host.space != process_space():
        raise _report_apart(meeting)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.connect(f"\0{announced['address']}")
    except (ConnectionRefusedError, FileNotFoundError):
        sock.close()
        # The first rank has given up, and left the reason in the store; or it is in another network namespace.
        _raise_end(meeting)
        raise _report_apart(meeting) from None
    link = Link(sock)
    try:
        if link.peer_uid() != os.getuid():  # another user's process that has written itself into the store
            raise RankFailedError(
                f"{CALL} is announced by a process of another user",
                rank=host.rank,
                host=host.host,
                got=f"user {link.peer_uid()}",
                want=f"user {os.getuid()}, as all ranks",
                next_step="start all ranks as one user, and let no other user reach the store's port",
            )
        with suppress(BrokenPipeError, ConnectionResetError):  # the first has given up: `_roster` raises
            link.send(Message({**meeting.describe(), "nonce": announced["nonce"]}))
        peers, board, bells, secret = _roster(meeting, link, host)
        return _circle(meeting, board, bells, {host.rank: link}, peers, secret)
    except RanksApartError:
        link.close()
        raise
    except BaseException as error:
        meeting.refuse(error)
        link.close()
        raise


def _roster(meeting: Meeting, link: Link, host: Peer) -> tuple[dict[int, Peer], Board, Bells, bytes]:
    """Return the other ranks' processes, the board, the bells and the secret, which the first rank sends at the end."""
    peers: dict[int, Peer] = {}
    poller = select.poll()
    poller.register(link.fileno(), select.POLLIN)
    patience = Deadline(meeting.deadline.remaining_seconds + _GRACE_SECONDS)
    while True:
        while not poller.poll(1000 * min(_TICK_SECONDS, patience.remaining_seconds)):
            try:
                meeting.check([rank for rank in meeting.ranks if rank != meeting.rank])
            except RankFailedError:
                # A rank that met all others may have gone on, and ended, before this one looked.
                if poller.poll(0):
                    break
                raise
            if not patience.has_passed:
                continue
            raise RankTimeoutError(
                f"rank {host.rank} did not answer at {CALL}",
                rank=host.rank,
                waiting_for=(host.rank,),
                next_step=f"look at rank {host.rank}'s own error first",
            )
        received = link.receive()
        if received is None:
            _raise_end(meeting)
            raise RankFailedError(
                f"rank {host.rank} ended {CALL} before all had come",
                rank=host.rank,
                host=host.host,
                cause="it failed, or waited in vain for another rank",
                next_step=f"look at rank {host.rank}'s own error first",
            )
        message, descriptors = received
        if descriptors:
            board, *bells = descriptors
            try:
                return peers, Board(board, len(meeting.ranks)), Bells(bells), bytes.fromhex(message.content["secret"])
            finally:
                os.close(board)
        for peer in map(Peer.from_dict, message.content["peers"]):
            if peer.rank != meeting.rank:
                peers[peer.rank] = peer


def _circle(
    meeting: Meeting,
    board: Board,
    bells: Bells,
    links: Mapping[int, Link],
    peers: Mapping[int, Peer],
    secret: bytes,
) -> Circle:
    wire = HostWire(meeting.ranks, meeting.rank, board, bells, links, peers)
    has_own_processor = len(meeting.ranks) <= count_cores()
    spin_seconds = _SPIN_SECONDS if has_own_processor else 0.0
    return Circle(meeting.ranks, meeting.rank, wire, peers, secret=secret, spin_seconds=spin_seconds)


def _apart_name(meeting: Meeting) -> str:
    return f"{meeting.name}/apart"


def _report_apart(meeting: Meeting) -> RanksApartError:
    """Report to the first rank that this one is apart from it; return the error."""
    meeting.store.put(_apart_name(meeting), "1")
    return RanksApartError()


def _raise_end(meeting: Meeting) -> None:
    """Raise if the first rank has ended the meeting, or found that a rank is apart."""
    if (announced := meeting.find_announcement()) is not None:
        _check_address(announced)


def _check_address(announced: dict[str, Any]) -> None:
    if "address" not in announced:
        raise RanksApartError
