"""How ranks become a group: they find each other through the store, once, and agree on a wire."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from time import monotonic, sleep
from typing import Any

from xrank.errors import ContradictionError, CorruptError, RankFailedError, RankTimeoutError
from xrank.ranks.failure import Deadline, FailureRecord, absence_error, damage_error
from xrank.ranks.group import RankGroup
from xrank.ranks.store import Store
from xrank.ranks.waits import PERIOD_SECONDS, Awaits, LongWait, Peer, WaitMonitor, process_space, record_end
from xrank.ranks.wire import Bells, Board, HostWire, Link, Message, StoreWire
from xrank.system import after_fork_in_child, count_cores

_P = 2**255 - 19
_A24 = 121665
_BASE_POINT = (9).to_bytes(32, "little")
_NBYTES = 32


def x25519(private: bytes, public: bytes) -> bytes:
    """Return the shared secret of a private and a public key, each of 32 bytes (RFC 7748, section 5)."""
    k = int.from_bytes(private, "little") & ~7 & (1 << 255) - 1 | 1 << 254
    x1 = int.from_bytes(public, "little") & (1 << 255) - 1
    x2, z2, x3, z3, swap = 1, 0, x1, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swap ^ bit:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swap = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a % _P, b * b % _P, d * a % _P, c * b % _P
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % _P, x1 * (da - cb) ** 2 % _P
        x2, z2 = aa * bb % _P, e * (aa + _A24 * e) % _P
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, _P - 2, _P) % _P).to_bytes(_NBYTES, "little")


class KeyPair:
    """The key pair of a process."""

    def __init__(self) -> None:
        self._private = os.urandom(_NBYTES)
        self.public = x25519(self._private, _BASE_POINT).hex()
        """For the others, in hexadecimal digits."""
        self._shared: dict[str, bytes] = {}

    def seal(self, secret: bytes, public: str, purpose: str) -> str:
        """Return a secret of 32 bytes for the owner of a public key alone, by a purpose that is never used twice."""
        if public not in self._shared:
            shared = x25519(self._private, bytes.fromhex(public))
            if not any(shared):  # RFC 7748, section 6.1: the other's is no point of large order
                raise damage_error("the public key of a rank cannot be read", public[:80])
            self._shared[public] = shared
        keys = "".join(sorted((public, self.public)))
        pad = hmac.digest(self._shared[public], f"{purpose} {keys}".encode(), hashlib.sha256)
        return bytes(a ^ b for a, b in zip(secret, pad, strict=True)).hex()

    def unseal(self, sealed: str, public: str, purpose: str) -> bytes:
        """Return the secret that the owner of a public key has sealed for this one."""
        return bytes.fromhex(self.seal(bytes.fromhex(sealed), public, purpose))


@cache
def own_key_pair() -> KeyPair:
    """Return the key pair of this process."""
    return KeyPair()


after_fork_in_child(own_key_pair.cache_clear)


CALL = "the first gather"
_THREAD_SECONDS = 0.3
_PAUSE_SECONDS = (0.0005, 0.02)
"""Shortest and longest pause between two looks for the first rank: ranks of one program come almost together."""


@dataclass(slots=True, eq=False)
class Meeting:
    """One meeting, as one of its ranks sees it.

    Args:
        name: name of this meeting; never used twice.
        way: the medium of the gathers, which must be the same on all ranks.
        check_around: raises if an enclosing gather has failed, so that waiting is of no use.
        begin_long_wait: returns a wait that has become long.
        num_at_large: number of this rank's failures in calls whose ranks it could not name.
        find_at_large: returns such a failure of other ranks that has failed no call of this rank yet.
    """

    ranks: Sequence[int]
    rank: int
    store: Store
    name: str
    deadline: Deadline
    way: str
    check_around: Callable[[], None] = lambda: None
    begin_long_wait: Callable[[Awaits], LongWait | None] = lambda awaits: None
    thread: str = ""
    num_at_large: int = 0
    find_at_large: Callable[[Sequence[int]], FailureRecord | None] = lambda ranks: None
    monitor: WaitMonitor = field(init=False)

    def __post_init__(self) -> None:
        self.monitor = WaitMonitor(self.begin_long_wait)

    def check(self, absent: Sequence[int], watched: Sequence[int] | None = None) -> None:
        """Raise if it is known that the meeting will not take place.

        The `absent` ranks are the others that are not known to have come. The meeting ends with the process of any
        `watched` rank; by default, of any absent one.
        """
        self.check_around()
        if not self.monitor.is_due:
            return
        is_first = self.rank == self.ranks[0]
        awaits, awaited = (Awaits.ARRIVAL, absent) if is_first else (Awaits.FIRST, self.ranks[:1])
        try:
            self.raise_refusal(("refused",))  # the first rank may not have come yet and ended the meeting for it
            self.monitor.look(awaits, tuple(awaited), absent if watched is None else watched)
        except RankFailedError:
            self.raise_reason()
            raise

    def describe(self) -> dict[str, Any]:
        """Return this rank's process, for the ranks that it meets."""
        me = Peer.from_this_process(self.rank).to_dict()
        return {**me, "at_large": self.num_at_large, "thread": self.thread}

    def check_threads(self, threads: Iterable[str]) -> None:
        """Raise if another thread of this rank gathers as well; others came with threads of these names.

        Ranks whose threads have different names may each be at another thread's gather. A moment shows the second
        thread, if there is one. Names need not be equal: a rank may have threads that others have not.
        """
        self.monitor.raise_if_confirmed()
        if any(thread != self.thread for thread in threads):
            end = monotonic() + _THREAD_SECONDS
            while monotonic() < end:
                sleep(_PAUSE_SECONDS[1])
                self.check_around()

    def check_at_large(self, described: dict[str, Any]) -> None:
        """Raise if a rank that has come failed before in a call that may have been this one."""
        if described.get("at_large") and (failure := self.find_at_large((described["rank"],))) is not None:
            raise failure.to_error()

    def announce(self, **more: Any) -> None:
        """On the first rank: announce its process."""
        self.store.put(self.name, json.dumps({**self.describe(), "way": self.way, **more}))

    def await_first(self) -> dict[str, Any]:
        """Return the first rank's announcement; raise if it does not come, or gathers through another medium."""
        first, pause = self.ranks[0], _PAUSE_SECONDS[0]
        try:
            while (announced := self.find_announcement()) is None:
                if self.deadline.has_passed:
                    raise self.make_timeout_error((first,))
                self.check([rank for rank in self.ranks if rank != self.rank])
                sleep(min(pause, self.deadline.remaining_seconds))
                pause = min(2 * pause, _PAUSE_SECONDS[1])
            # Another rank may know already that they waited for each other, and have come here with its next call.
            self.monitor.raise_if_confirmed()
            if announced["way"] != self.way:
                what = f"rank {self.rank} gathers through {self.way}, but rank {first} through {announced['way']}"
                raise ContradictionError(what, rank=self.rank, next_step="give workspace_path on all ranks or on none")
            self.check_at_large(announced)
        except BaseException as error:
            self.refuse(error)  # the first may come, or wait for this one already
            raise
        return announced

    def refuse(self, error: BaseException) -> None:
        """Send the other ranks, which wait for this one or come later, the reason why it can't take part."""
        text = FailureRecord.from_error(error, self.rank, CALL).to_text()
        with suppress(Exception):  # the store may be what failed
            if self.rank == self.ranks[0]:
                self.announce(ended=text)
                return
            self.store.put(f"{self.name}/{self.rank}", text)
            self.store.put(f"{self.name}/refused", text)

    def read_refusal(self, rank: int | str) -> FailureRecord | None:
        """Return the reason why a rank can't take part, if it sent one; of any rank for "refused"."""
        text = self.store.peek(f"{self.name}/{rank}")
        return None if text is None else FailureRecord.from_text(text)

    def raise_refusal(self, ranks: Sequence[int | str]) -> None:
        """Raise the refusal of any of these ranks, if one sent it."""
        for rank in ranks:
            if (refusal := self.read_refusal(rank)) is not None:
                raise refusal.to_error()

    def raise_reason(self) -> None:
        """Raise the reason why this meeting ended, if a rank reported one: that rank may have ended itself since."""
        if (end := self.find_end()) is not None:
            raise end.to_error()

    def find_end(self) -> FailureRecord | None:
        """Return the failure with which this meeting has ended, if it has."""
        ended = self._read_announcement().get("ended")
        return self.read_refusal("refused") if ended is None else FailureRecord.from_text(ended)

    def find_announcement(self) -> dict[str, Any] | None:
        """Return the first rank's announcement; None before it came. Raise its reason if it has ended the meeting."""
        announced = self._read_announcement()
        if "ended" in announced:
            raise FailureRecord.from_text(announced["ended"]).to_error()
        return announced or None

    def _read_announcement(self) -> dict[str, Any]:
        announced: dict[str, Any] = json.loads(self.store.peek(self.name) or "{}")
        return announced

    def make_silence_error(self) -> RankTimeoutError:
        """Return the error that the first rank does not answer."""
        first = self.ranks[0]
        return RankTimeoutError(
            f"rank {first} did not answer at {CALL}",
            rank=first,
            waiting_for=(first,),
            next_step=f"look at rank {first}'s own error first",
        )

    def make_timeout_error(self, absent: Sequence[int]) -> RankTimeoutError:
        """Return the error that names the ranks that did not come."""
        return absence_error(absent, self.ranks, self.deadline, f" to {CALL}")


_TICK_SECONDS = 0.02
_ENDED = "it ended, or gave up, before all had arrived"
_PEERS_PER_MESSAGE = 100
"""The roster of a large group does not fit into one message."""
_SPIN_SECONDS = 200e-6
_GRACE_SECONDS = 2.0
"""Extra wait for the first rank, whose deadline may be a little later, to report the ranks that did not come."""


class RanksApartError(Exception):
    """Some ranks of a meeting share no memory, or no process numbers: all of its ranks get this error."""


def meet(meeting: Meeting) -> RankGroup:
    """Return the group of a meeting's ranks; every one of them must call it once."""
    return _Host(meeting).meet() if meeting.rank == meeting.ranks[0] else _join(meeting)


class _Host:
    """The first rank's side."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.others = tuple(meeting.ranks[1:])
        self.nonce = os.urandom(16).hex()
        self.secret = os.urandom(32)
        self.links: dict[int, Link] = {}
        self.guests: list[Link] = []  # connected, first message not yet received
        self.peers: dict[int, Peer] = {}
        self.threads: set[str] = set()
        self.next_look = Deadline(_TICK_SECONDS)

    def meet(self) -> RankGroup:
        meeting, has_met = self.meeting, False
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as listener:
            address = f"xrank-{os.urandom(16).hex()}"
            listener.bind(f"\0{address}")
            # Before the announcement: ranks connect as soon as they read the address.
            listener.listen(len(meeting.ranks))
            meeting.announce(address=address, nonce=self.nonce)
            try:
                while len(self.links) < len(self.others):
                    self._gather_guests(listener)
                meeting.check_threads(self.threads)
                board, bells = self._start()
                group = _make_group(meeting, board, bells, self.links, self.peers, self.secret)
                has_met = True
            # Before the links are closed: a rank whose link is closed looks in the store for the reason.
            except RanksApartError:
                meeting.announce()  # without an address
                raise
            except BaseException as error:
                meeting.refuse(error)
                raise
            finally:
                for link in self.guests if has_met else (*self.links.values(), *self.guests):
                    link.close()
        meeting.store.remove(meeting.name)
        return group

    def _gather_guests(self, listener: socket.socket) -> None:
        """Accept connections for a moment; raise if a rank has failed or gone."""
        if self.next_look.has_passed:  # not for each guest: the store may be slow
            self.next_look = Deadline(_TICK_SECONDS)
            absent = [rank for rank in self.others if rank not in self.links]
            self.meeting.raise_refusal(absent)
            if self.meeting.store.peek(f"{self.meeting.name}/apart") is not None:
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

    def _record_death(self, rank: int) -> FailureRecord:
        """Return the reason why a rank that had joined is gone: its own refusal, if it sent one."""
        if (refusal := self.meeting.read_refusal(rank)) is not None:
            return refusal
        return record_end(rank, self.peers[rank], _ENDED, CALL)

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


def _join(meeting: Meeting) -> RankGroup:
    announced = meeting.await_first()
    if "address" not in announced:
        raise RanksApartError
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
                f"{CALL} is announced by a process of user {link.peer_uid()}, not of {os.getuid()}, as all ranks",
                rank=host.rank,
                host=host.host,
                next_step="start all ranks as one user, and make the store's port unreachable for other users",
            )
        with suppress(BrokenPipeError, ConnectionResetError):  # the first has given up: `_roster` raises
            link.send(Message({**meeting.describe(), "nonce": announced["nonce"]}))
        peers, board, bells, secret = _roster(meeting, link, host)
        return _make_group(meeting, board, bells, {host.rank: link}, peers, secret)
    except BaseException as error:
        if not isinstance(error, RanksApartError):
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
            raise meeting.make_silence_error()
        received = link.receive()
        if received is None:
            _raise_end(meeting)
            raise RankFailedError(
                f"rank {host.rank} ended {CALL} before all had arrived",
                rank=host.rank,
                host=host.host,
                cause="it failed, or its wait for another rank timed out",
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


def _make_group(
    meeting: Meeting,
    board: Board,
    bells: Bells,
    links: Mapping[int, Link],
    peers: Mapping[int, Peer],
    secret: bytes,
) -> RankGroup:
    wire = HostWire(meeting.ranks, meeting.rank, board, bells, links, peers)
    spin_seconds = _SPIN_SECONDS if len(meeting.ranks) <= count_cores() else 0.0  # each has its own processor
    return RankGroup(meeting.ranks, meeting.rank, wire, peers, secret=secret, spin_seconds=spin_seconds)


def _report_apart(meeting: Meeting) -> RanksApartError:
    """Report to the first rank that this one is apart from it; return the error."""
    meeting.store.put(f"{meeting.name}/apart", "1")
    return RanksApartError()


def _raise_end(meeting: Meeting) -> None:
    """Raise if the first rank has ended the meeting, or found that a rank is apart."""
    if "address" not in (meeting.find_announcement() or {"address": ""}):
        raise RanksApartError


def meet_across_hosts(meeting: Meeting, *, period_seconds: float = PERIOD_SECONDS) -> RankGroup:
    """Return the group of a meeting's ranks, as `meet`, through the store alone."""
    is_first = meeting.rank == meeting.ranks[0]
    known: dict[int, Peer] = {}
    keys = own_key_pair()
    if not is_first:
        first = Peer.from_dict(meeting.await_first())
        known[first.rank] = first
    wire = StoreWire(meeting.ranks, meeting.rank, meeting.store, meeting.name, period_seconds=period_seconds)
    try:
        if is_first:
            meeting.announce()  # after the first beat: the others may wait for this rank from now on
        wire.watch(known)
        me = Peer.from_this_process(meeting.rank)
        meeting.store.put(f"{meeting.name}/here/{me.rank}", json.dumps({**meeting.describe(), "key": keys.public}))
        if is_first:
            publics = _collect(meeting, wire, known)
            secret = os.urandom(32)
            roster: dict[str, Any] = {
                "peers": [peer.to_dict() for peer in (me, *known.values())],
                "key": keys.public,
                "sealed": {
                    rank: keys.seal(secret, public, f"{meeting.name} {rank}") for rank, public in publics.items()
                },
            }
            meeting.store.put(f"{meeting.name}/roster", json.dumps(roster))
        else:
            roster = _await_roster(meeting, wire, known)
            sealed = roster["sealed"][str(meeting.rank)]
            secret = keys.unseal(sealed, roster["key"], f"{meeting.name} {meeting.rank}")
        # Each from the moment it is known, so its death is seen while others are still awaited.
        wire.watch(known)
        return RankGroup(meeting.ranks, meeting.rank, wire, known, secret=secret)
    except BaseException as error:
        meeting.refuse(error)
        if not is_first:  # by both ways: others may not have come to the wire yet, and see this rank's end first
            wire.fail(FailureRecord.from_error(error, meeting.rank, CALL))
        wire.close()
        raise


def _collect(meeting: Meeting, wire: StoreWire, known: dict[int, Peer]) -> dict[int, str]:
    """On the first rank: wait until all have come; return their public keys."""
    threads: set[str] = set()
    publics: dict[int, str] = {}
    while absent := [rank for rank in meeting.ranks[1:] if rank not in known]:
        for rank in absent:
            if (described := _find_description(meeting, rank)) is not None:
                meeting.check_at_large(described)
                threads.add(described.get("thread", ""))
                publics[rank] = str(described.get("key", ""))
                known[rank] = Peer.from_dict(described)
        wire.watch(known)
        meeting.raise_refusal(absent)
        _check(meeting, wire, known)
        if meeting.deadline.has_passed and (absent := [rank for rank in absent if rank not in known]):
            raise meeting.make_timeout_error(absent)
        wire.pump(_TICK_SECONDS)
    meeting.check_threads(threads)
    return publics


def _await_roster(meeting: Meeting, wire: StoreWire, known: dict[int, Peer]) -> dict[str, Any]:
    """On another rank: wait until the first publishes the roster, when all have come; return it."""
    patience = Deadline(meeting.deadline.remaining_seconds + _GRACE_SECONDS)
    while (text := meeting.store.peek(f"{meeting.name}/roster")) is None:
        meeting.find_announcement()
        try:
            _check(meeting, wire, known)
        except RankFailedError:
            # A rank that met all others may have gone on, and ended, before this one looked.
            if (text := meeting.store.peek(f"{meeting.name}/roster")) is not None:
                break
            raise
        if patience.has_passed:
            raise meeting.make_silence_error()
        wire.pump(_TICK_SECONDS)
    roster: dict[str, Any] = json.loads(text)
    peers = map(Peer.from_dict, roster["peers"])
    known |= {peer.rank: peer for peer in peers if peer.rank != meeting.rank}
    return roster


def _check(meeting: Meeting, wire: StoreWire, known: dict[int, Peer]) -> None:
    others = [rank for rank in meeting.ranks if rank != meeting.rank]
    # All are watched: a first rank that announced itself for a meeting in memory, and died before its first beat on
    # this wire, is known, and only its beat of the world stands still.
    meeting.check([rank for rank in others if rank not in known], watched=others)
    if failures := wire.failures():
        raise next(iter(failures.values())).to_error()
    for rank in sorted(wire.ended | wire.silent):
        meeting.raise_reason()  # a rank writes it before it ends
        described = _find_description(meeting, rank)  # of a rank that has come
        peer = known.get(rank) or (None if described is None else Peer.from_dict(described))
        raise record_end(rank, peer, _ENDED, CALL).to_error()


def _find_description(meeting: Meeting, rank: int) -> dict[str, Any] | None:
    text = meeting.store.peek(f"{meeting.name}/here/{rank}")
    return None if text is None else json.loads(text)
