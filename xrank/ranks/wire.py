"""The wires between the ranks of a group: memory and sockets on one host, a store across hosts.

To add a transport of short messages, statuses and failures, write a class with the methods of `Wire`, and let
`xrank.ranks.meeting` give it to a `RankGroup`. Large values take a `MessageWorkspace`, lent tensors
`xrank.ranks.loans`, and gradients `xrank.gradients.wire`.
"""

from __future__ import annotations

import array
import json
import mmap
import os
import platform
import select
import socket
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from struct import Struct
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from xrank.errors import CorruptError, RankFailedError
from xrank.ranks.failure import FailureRecord, damage_error
from xrank.ranks.store import Store
from xrank.ranks.waits import PERIOD_SECONDS, Heartbeat, Peer, is_readable

if TYPE_CHECKING:
    import torch


STORES_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686", "i586", "i386")
"""Whether all processors see stores in the order they were made in: a message before the number that announces it.
Other processors need barrier instructions for that, which Python does not have."""


class Status(IntEnum):
    """Numbers that each rank publishes to all others; the first three only grow."""

    ARRIVED = 0
    """Last call whose part the rank has done: message sent or, on the first rank, all received."""
    ENDED = 1
    """Bodies that the rank has ended without an error; on the first rank, bodies that have ended so on all ranks."""
    LEFT = 2
    """Call up to which no other rank needs this one."""
    SLEEPS = 3
    """Whether the rank may be asleep, so that only a message or a nudge wakes it: a member of `Sleep`."""


class Sleep(IntEnum):
    """The events that wake a rank."""

    NOT = 0
    """None are needed: the rank is awake."""
    LIGHT = 1
    """Any nudge or message."""
    UNTIL_ALL = 2
    """The status of the last of all others: a wake-up for each of them would cost more than the gather."""


class Message(NamedTuple):
    """A message from one rank to another: a JSON object and bytes. A frozen dataclass takes twice as long to make."""

    content: dict[str, Any]
    payload: bytes = b""


NUDGE = Message({})
"""Empty; the receiver looks again at the statuses that it waits for."""


class Wire(Protocol):
    """One rank's connection to the others. One thread at a time uses it; only `pump` waits."""

    shares_memory: bool
    """Whether all ranks share memory."""
    max_payload_nbytes: int
    """Largest payload of a message; 0 if the wire carries JSON only."""
    inboxes: dict[int, deque[Message]]
    """Rank -> received messages that were not yet taken, in their order."""
    ended: set[int]
    """Ranks whose processes were seen to have ended."""
    silent: set[int]
    """Ranks that closed their end, so that they send nothing more."""

    def send(self, rank: int, message: Message) -> None:
        """Send; messages to one rank keep their order.

        Raises:
            ConnectionError: that rank is gone.
            BlockingIOError: that rank's buffer is full; nothing was sent.
        """

    def look(self) -> None:
        """Receive messages that lie in shared memory, without a system call; ends of ranks are not noticed."""

    def pump(self, seconds: float) -> None:
        """Receive messages and notice ends of ranks; wait up to `seconds` for the first."""

    def set_status(self, status: Status, value: int) -> None:
        """Set one of this rank's own statuses; wake the first rank if it sleeps until all ranks have reached it."""

    def nudge(self, ranks: Sequence[int]) -> None:
        """Wake ranks that wait for a status of this one; those that are gone or awake are left alone."""

    def get_status(self, rank: int, status: Status) -> int:
        """Return a status of any rank, as far as it is known here."""

    def fail(self, record: FailureRecord) -> None:
        """Report this rank's failure to all others; the first record stays."""

    def failures(self) -> dict[int, FailureRecord]:
        """Return the failure records of other ranks by the rank that wrote them, in the order of ranks."""

    def close(self) -> None:
        """Release all resources; ranks that still wait see this rank as gone. A second call does nothing."""


@runtime_checkable
class MessageWorkspace(Protocol):
    """Carries tensors between live ranks; each message has one sender and one reader.

    Call order: the sender publishes, and passes the receipt to the reader by any channel of its own. The reader fetches
    only after that, because a network file system caches for half a minute that a name is absent. It fetches once, and
    again only if it did not see the message. Once the reader has confirmed, the sender retires the message. A name is
    never used for two messages. A call never waits for another rank.

    Every rank publishes and fetches, from one thread at a time. Only the sender retires. A crash leaves at most the
    messages in flight; the next start of this rank, or ``xrank clean``, removes them.
    """

    patience_seconds: float
    """How long a message may stay invisible to a reader that has its receipt."""

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Write a message and return its receipt, a text by which any process finds it.

        Args:
            header: JSON that describes the tensors; never a pickle.
            tensors: dense tensors of any strides and device. Their elements are written row-major, as bytes.

        Raises:
            NoSpaceError: the medium is full; no part of the message remains.
        """
        ...

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message of a rank: its header, and the bytes of each tensor, in memory that the caller owns.

        The caller may write to this memory. It stays valid as long as a tensor uses it, also after the message retires.

        Raises:
            IncompleteError: the message is not visible; within `patience_seconds` it may become so.
            CorruptError: the bytes differ from those that were published.
        """
        ...

    def retire(self, receipt: str) -> None:
        """Release a message of this rank after its reader has fetched it."""
        ...

    def close(self) -> None:
        """Release everything that this rank published. Fetched messages stay valid. A second call does nothing."""
        ...


_WORD_NBYTES = 8
_PAGE_NBYTES = 4096
BOX_NBYTES = 40 << 10
"""Bytes of a mailbox with its numbers: whole pages."""
_POSTED, _TAKEN, _NBYTES = range(3)
"""A mailbox's numbers: of its message, of the last message that the first rank took, and the message's size."""
_BOX_HEAD_NBYTES = 64
_SHARE_NBYTES = _PAGE_NBYTES + BOX_NBYTES
_ALARM = len(Status)
"""Index of the alarm in the first share: not 0 once any rank has written a failure record."""
_RECORD_HEAD = Struct("<II")  # length, CRC-32
_RECORD = 64
_COMMON = (Status.ARRIVED, Status.ENDED)
"""Statuses that the first rank waits for until all others have reached them."""

_MAX_NBYTES = 128 << 10
"""Largest message; half of the default buffer of a Unix socket (Linux, net.core.wmem_default: 212,992)."""
_HEAD = Struct("<I")
_NO_CONTENT = _HEAD.pack(2) + b"{}"
"""Beginning of a message that is a payload alone."""
_to_json = json.JSONEncoder(separators=(",", ":")).encode
# As numbers: combining enum members takes longer than the call.
_SEND, _SEND_AT_ONCE = int(socket.MSG_NOSIGNAL), int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC)
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_RIGHTS_NBYTES = socket.CMSG_SPACE(16 * array.array("i").itemsize)


class Board:
    """The shares of all ranks of a group, by position in its rank list."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        self.memory = mmap.mmap(fd, num_ranks * _SHARE_NBYTES)
        # Not struct.Struct("<q"), which loads and stores byte by byte.
        self.words = memoryview(self.memory).cast("q")

    @staticmethod
    def create(num_ranks: int) -> int:
        """Return the descriptor of a new board: unnamed memory, which the kernel frees after its last user."""
        fd = os.memfd_create("xrank-board", os.MFD_CLOEXEC)
        # All pages now: if memory is short, this raises; a later store through the mapping would be a SIGBUS.
        os.posix_fallocate(fd, 0, num_ranks * _SHARE_NBYTES)
        return fd

    @staticmethod
    def index(position: int, status: Status = Status.ARRIVED) -> int:
        """Return the index of a rank's status in `words`; 0 before it was set."""
        return position * (_SHARE_NBYTES // _WORD_NBYTES) + status

    def fail(self, position: int, record: FailureRecord) -> None:
        """Write a rank's failure record, unless it has one."""
        if self.failure(position) is not None:
            return
        content, at = record.to_text().encode(), position * _SHARE_NBYTES + _RECORD
        self.memory[at + _RECORD_HEAD.size : at + _RECORD_HEAD.size + len(content)] = content
        # Content, head, alarm, in this order: a reader that sees the alarm too early finds a wrong checksum, not a
        # wrong record.
        _RECORD_HEAD.pack_into(self.memory, at, len(content), zlib.crc32(content))
        self.words[_ALARM] = 1

    def failure(self, position: int) -> FailureRecord | None:
        """Return a rank's failure record, if it has one."""
        at = position * _SHARE_NBYTES + _RECORD
        length, checksum = _RECORD_HEAD.unpack_from(self.memory, at)
        if not 0 < length <= _PAGE_NBYTES - _RECORD - _RECORD_HEAD.size:
            return None
        content = self.memory[at + _RECORD_HEAD.size : at + _RECORD_HEAD.size + length]
        return FailureRecord.from_text(content) if zlib.crc32(content) == checksum else None

    def close(self) -> None:
        """Release the memory."""
        self.words.release()
        self.memory.close()


class Mailbox:
    """The mailbox of the rank at a position of a board, as it or the first rank sees it."""

    def __init__(self, board: Board, position: int) -> None:
        start = position * _SHARE_NBYTES + _PAGE_NBYTES
        self._memory, self._words = board.memory, board.words
        self._start, self._word = start + _BOX_HEAD_NBYTES, start // _WORD_NBYTES

    def put(self, number: int, parts: Sequence[bytes]) -> bool:
        """Put a message, the concatenation of `parts`, if all before it were taken; return whether it was put."""
        words, word, at, nbytes = self._words, self._word, self._start, sum(map(len, parts))
        if words[word + _TAKEN] != number - 1 or nbytes > BOX_NBYTES - _BOX_HEAD_NBYTES or not STORES_ARE_ORDERED:
            return False
        for part in parts:
            end = at + len(part)
            self._memory[at:end] = part
            at = end
        words[word + _NBYTES] = nbytes
        words[word + _POSTED] = number  # last: the first rank reads the box once it sees the number
        return True

    def take(self, number: int) -> bytes | None:
        """Return the message of that number if it is here, and free the box."""
        words, word = self._words, self._word
        if words[word + _POSTED] != number:
            return None
        content = self._memory[self._start : self._start + words[word + _NBYTES]]
        # After the copy: the sender may fill the box again at once.
        words[word + _TAKEN] = number
        return content

    def skip(self, number: int) -> None:
        """On the first rank: count the message of that number, which came through the socket, as taken."""
        self._words[self._word + _TAKEN] = number


class Link:
    """One end of a Unix socket that keeps message borders, with file descriptors where needed.

    The kernel closes it when either process ends, so a waiting process always wakes. One thread at a time uses an end.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setblocking(True)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    def send(self, message: Message, descriptors: tuple[int, ...] = (), *, wait: bool = True) -> None:
        """Send a message of at most 128 KiB, with descriptors; BlockingIOError if it may not `wait` for room."""
        parts = encode_message(message)
        assert sum(map(len, parts)) <= _MAX_NBYTES, parts[0]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self._socket.sendmsg(parts, rights, _SEND if wait else _SEND_AT_ONCE)

    def receive(self) -> tuple[Message, list[int]] | None:
        """Return the next message and its descriptors, which the caller closes; None when the other end is gone."""
        try:
            content, ancillary, flags, _ = self._socket.recvmsg(_MAX_NBYTES, _RIGHTS_NBYTES, _RECEIVE)
        except ConnectionResetError:
            return None
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if not content and not descriptors:
            return None
        try:
            # A message that was cut is damaged, even if what is left of it could be decoded.
            return decode_message(b"" if flags & _CUT else content), list(descriptors)
        except CorruptError:
            for fd in descriptors:
                os.close(fd)
            raise

    def peer_uid(self) -> int:
        """Return the user id of the other end, from the kernel (unix(7): SO_PEERCRED)."""
        credentials = array.array("i")
        credentials.frombytes(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return credentials[1]

    def close(self) -> None:
        """Close this end; the other end's next `receive` returns None."""
        self._socket.close()


def encode_message(message: Message) -> list[bytes]:
    """Return the bytes of a message, in parts that are sent together: the length of its JSON, that, and its payload."""
    if not message.content:
        return [_NO_CONTENT, message.payload]
    content = _to_json(message.content).encode()
    return [_HEAD.pack(len(content)), content, message.payload]


def decode_message(content: bytes) -> Message:
    """Return the message that `encode_message` encoded; CorruptError if the bytes are not one."""
    if content.startswith(_NO_CONTENT):
        return Message({}, content[len(_NO_CONTENT) :])
    if len(content) >= _HEAD.size:
        end = _HEAD.size + _HEAD.unpack_from(content)[0]
        with suppress(ValueError):
            value = json.loads(content[_HEAD.size : end])
            if isinstance(value, dict):
                return Message(value, content[end:])
    raise damage_error("a message between two ranks is damaged", f"{len(content)} bytes", "JSON")


class Bells:
    """Descriptors that wake the ranks of a group: one for the first rank, one for all others (eventfd(2)).

    Sleeping ranks poll for the edge, and no rank reads the counter: a ring wakes all sleepers of that descriptor and
    costs the ranks that are awake nothing.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)

    @classmethod
    def create(cls) -> Bells:
        """Return new bells."""
        return cls([os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)])

    def ring(self, *, is_for_first: bool) -> None:
        """Wake the first rank, or all others."""
        os.eventfd_write(self.descriptors[0 if is_for_first else 1], 1)

    def close(self) -> None:
        """Close the descriptors; a second call does nothing."""
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors = ()


class HostWire:
    """A `Wire`; all processes share memory and process numbers.

    The board has the ranks in the order of `ranks`. The first rank has links to all others, these to the first alone.
    """

    shares_memory = True
    max_payload_nbytes = 32 << 10

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        board: Board,
        bells: Bells,
        links: Mapping[int, Link],
        peers: Mapping[int, Peer],
    ) -> None:
        self.inboxes: dict[int, deque[Message]] = {r: deque() for r in links}
        self.ended: set[int] = set()
        self.silent: set[int] = set()
        self._rank, self._board, self._bells, self._links = rank, board, bells, dict(links)
        self._words = board.words
        self._position = {r: i for i, r in enumerate(ranks)}
        self._first = ranks[0]
        self._first_sleeps = board.index(0, Status.SLEEPS)
        self._own = board.index(self._position[rank])
        self._others = {r: board.index(i) for r, i in self._position.items() if r != rank}
        # Messages to the first rank go through mailboxes or links; numbers keep their order across both.
        self._box, self._num_sent = Mailbox(board, self._position[rank]), 0
        self._boxes = {r: Mailbox(board, self._position[r]) for r in links} if rank == self._first else {}
        self._num_taken = dict.fromkeys(self._boxes, 0)
        self._lives: dict[int, int] = {}
        self._sources = {link.fileno(): r for r, link in self._links.items()}
        for r, peer in peers.items():
            life = None
            with suppress(ProcessLookupError):
                life = peer.open_life()
            if life is None:
                self.ended.add(r)  # the meeting proved that it can be watched, so it has ended already
            else:
                self._lives[r] = life
                self._sources[life] = r
        # One epoll queue for all descriptors: a poll costs the same for two ranks and for a hundred.
        self._events = select.epoll()
        for fd in self._sources:
            self._events.register(fd, select.EPOLLIN)
        self._bell = bells.descriptors[0 if rank == self._first else 1]
        self._events.register(self._bell, select.EPOLLIN | select.EPOLLET)

    def send(self, rank: int, message: Message) -> None:
        """Send; see `Wire`."""
        if rank != self._first:
            self._links[rank].send(message, wait=False)
            return
        if self._box.put(self._num_sent + 1, encode_message(message)):
            if self._words[self._first_sleeps] == Sleep.LIGHT:
                self._bells.ring(is_for_first=True)
        else:
            self._links[rank].send(message, wait=False)
        self._num_sent += 1

    def look(self) -> None:
        """Receive the messages in the mailboxes."""
        for rank, box in self._boxes.items():
            if (content := box.take(self._num_taken[rank] + 1)) is not None:
                self._num_taken[rank] += 1
                self.inboxes[rank].append(decode_message(content))

    def pump(self, seconds: float) -> None:
        """Receive messages and notice ends; see `Wire`."""
        for fd, _ in self._events.poll(seconds):
            if fd == self._bell:
                continue
            rank = self._sources[fd]
            if fd == self._lives.get(rank):
                self.ended.add(rank)
            elif (received := self._links[rank].receive()) is not None:
                message, descriptors = received
                for descriptor in descriptors:
                    os.close(descriptor)
                if (box := self._boxes.get(rank)) is not None:
                    self.look()  # a message in its box was sent before this one
                    self._num_taken[rank] += 1
                    box.skip(self._num_taken[rank])
                self.inboxes[rank].append(message)
                continue
            else:
                self.silent.add(rank)
            self._events.unregister(fd)  # a closed descriptor stays readable and would end every later poll at once
        self.look()

    def set_status(self, status: Status, value: int) -> None:
        """Set one of this rank's own statuses; see `Wire`."""
        words = self._words
        # The value first, then the look for a sleeper: the first rank announces its sleep before it looks for values.
        words[self._own + status] = value
        if (
            words[self._first_sleeps] == Sleep.UNTIL_ALL
            and status in _COMMON
            and self._rank != self._first
            and all(words[at + status] >= value for rank, at in self._others.items() if rank != self._first)
        ):
            self._bells.ring(is_for_first=True)

    def nudge(self, ranks: Sequence[int]) -> None:
        """Wake ranks; see `Wire`."""
        sleeping = [r for r in ranks if self._words[self._others[r] + Status.SLEEPS] == Sleep.LIGHT]
        if self._first in sleeping:
            self._bells.ring(is_for_first=True)
        if any(r != self._first for r in sleeping):
            self._bells.ring(is_for_first=False)

    def get_status(self, rank: int, status: Status) -> int:
        """Return the present status of any rank."""
        return self._words[(self._own if rank == self._rank else self._others[rank]) + status]

    def fail(self, record: FailureRecord) -> None:
        """Report this rank's failure; see `Wire`."""
        self._board.fail(self._position[self._rank], record)

    def failures(self) -> dict[int, FailureRecord]:
        """Return the other ranks' failure records."""
        if not self._words[_ALARM]:
            return {}
        failures = {r: self._board.failure(i) for r, i in self._position.items() if r != self._rank}
        return {rank: failure for rank, failure in failures.items() if failure is not None}

    def close(self) -> None:
        """Release all resources; see `Wire`."""
        self._events.close()
        for link in self._links.values():
            link.close()
        for fd in self._lives.values():
            os.close(fd)
        self._lives.clear()
        self._bells.close()
        self._board.close()


_LOOK_SECONDS = 0.1
"""Seconds between two reads of failures and ends."""
_POLL_SECONDS = (0.0005, 0.02)
"""Shortest and longest sleep of a wait between two reads of the store; each is twice as long as the last."""
_FAILURE_READ_SECONDS = 5.0
"""Longest stay of rank 0 after a failure. Its process usually keeps the store, and a rank that a busy machine delays
for seconds would otherwise find the store gone and take rank 0's end for the failure."""


class StoreWire:
    """A `Wire`; its heartbeat begins with its construction, and its names in the store with the meeting's `name`."""

    shares_memory = False
    max_payload_nbytes = 0

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        store: Store,
        name: str,
        *,
        period_seconds: float = PERIOD_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        sources = ranks[1:] if rank == ranks[0] else ranks[:1]
        self.inboxes: dict[int, deque[Message]] = {r: deque() for r in sources}
        self.ended: set[int] = set()
        self.silent: set[int] = set()
        self._ranks, self._rank, self._store, self._name, self._clock = tuple(ranks), rank, store, name, clock
        self._sent = dict.fromkeys(sources, 0)
        self._taken = dict.fromkeys(sources, 0)
        self._statuses = [0] * len(Status)
        self._lives: dict[int, int] = {}
        self._peers: dict[int, Peer] = {}
        self._failures: dict[int, FailureRecord] = {}
        self._looked = -_LOOK_SECONDS
        self._is_closed = False
        self._failure: FailureRecord | None = None
        self._pid = os.getpid()
        position = ranks.index(rank)

        def report(store: Store, missed: int) -> None:
            # The alarm last, here and below: the others read the rest only once they see it.
            store.put(f"{name}/missed/{missed}", "1")
            store.put(f"{name}/alarm", "1")

        self._heartbeat = Heartbeat(
            store.clone(),
            f"{name}/beat/{rank}",
            {r: f"{name}/beat/{r}" for r in (*ranks[position + 1 :], *ranks[:position])},
            report,
            period_seconds=period_seconds,
            clock=clock,
        )

    def watch(self, peers: Mapping[int, Peer]) -> None:
        """Record the other ranks' processes; from now on those of this host are watched by pidfd."""
        for rank, peer in peers.items():
            if rank not in self._peers:
                self._peers[rank] = peer
                try:
                    if (life := peer.open_life()) is not None:
                        self._lives[rank] = life
                except ProcessLookupError:
                    self.ended.add(rank)

    def send(self, rank: int, message: Message) -> None:
        """Send; see `Wire`."""
        assert not message.payload
        self._sent[rank] += 1
        self._put(f"{self._rank}-{rank}/{self._sent[rank]}", json.dumps(message.content, separators=(",", ":")))

    def look(self) -> None:
        """Do nothing: messages are in the store, which `pump` reads."""

    def pump(self, seconds: float) -> None:
        """Receive messages and notice ends; see `Wire`."""
        end, pause = self._clock() + seconds, _POLL_SECONDS[0]
        while not self._take() and not self._look() and (remaining := end - self._clock()) > 0:
            sleep(min(pause, remaining))
            pause = min(2 * pause, _POLL_SECONDS[1])

    def _take(self) -> bool:
        """Move messages from the store to the inboxes; return whether there were any."""
        any_came = False
        for rank, inbox in self.inboxes.items():
            while (text := self._peek(key := f"{rank}-{self._rank}/{self._taken[rank] + 1}")) is not None:
                self._taken[rank] += 1
                self._ask(self._store.remove, f"{self._name}/{key}")
                any_came = True
                if (message := Message(json.loads(text))) != NUDGE:
                    inbox.append(message)
        return any_came

    def _look(self) -> bool:
        """Read failures and ends from the store, every 0.1 s at most; return whether any are new."""
        if self._clock() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = self._clock()
        before = len(self._failures), len(self.ended), len(self.silent)
        self.ended.update(rank for rank, life in self._lives.items() if is_readable(life))
        if self._peek("alarm") is not None:
            for rank in self._ranks:
                if rank == self._rank:
                    continue
                # The failure is read last: a rank writes it before it closes, so an end is never seen without it.
                if rank not in self.silent and self._peek(f"closed/{rank}") is not None:
                    self.silent.add(rank)
                # The kernel reports the end of a process on this host; a late beat there shows a busy host, not an end.
                is_here = rank in self._lives
                if rank not in self.ended and not is_here and self._peek(f"missed/{rank}") is not None:
                    self.ended.add(rank)
                if rank not in self._failures and (text := self._peek(f"failed/{rank}")) is not None:
                    self._failures[rank] = FailureRecord.from_text(text)
        return (len(self._failures), len(self.ended), len(self.silent)) != before

    def nudge(self, ranks: Sequence[int]) -> None:
        """Wake ranks; see `Wire`."""
        for rank in ranks:
            self.send(rank, NUDGE)

    def set_status(self, status: Status, value: int) -> None:
        """Set one of this rank's own statuses."""
        if status == Status.SLEEPS:  # writing it would take as long as a nudge
            return
        if status == Status.LEFT:
            self._looked = -_LOOK_SECONDS  # the next call begins with a look: it is not to begin if a rank has failed
        self._statuses[status] = value
        self._put(f"words/{self._rank}", json.dumps(self._statuses))

    def get_status(self, rank: int, status: Status) -> int:
        """Return a status of any rank."""
        text = self._peek(f"words/{rank}")
        return 0 if text is None else int(json.loads(text)[status])

    def fail(self, record: FailureRecord) -> None:
        """Report this rank's failure; see `Wire`."""
        self._failure = record
        with suppress(RankFailedError):  # the failure may be the store's
            if self._peek(f"failed/{self._rank}") is None:
                self._put(f"failed/{self._rank}", record.to_text())
                self._put("alarm", "1")

    def failures(self) -> dict[int, FailureRecord]:
        """Return the other ranks' failure records."""
        self._look()
        return {rank: self._failures[rank] for rank in self._ranks if rank in self._failures}

    def close(self) -> None:
        """Release all resources; see `Wire`."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() == self._pid:  # a forked process is not the rank, and shares its connection to the store
            if self._rank == 0 and self._failure is not None:
                # While the heart still beats, so that the others see a failure instead of a death.
                self._await_readers(self._failure)
            self._heartbeat.stop()
            with suppress(RankFailedError):
                self._put(f"closed/{self._rank}", "1")
                self._put("alarm", "1")
        for fd in self._lives.values():
            os.close(fd)
        self._lives.clear()

    def _await_readers(self, failure: FailureRecord) -> None:
        """Wait until all others have closed, failed or ended: the store that they read may end with this process."""
        end = self._clock() + _FAILURE_READ_SECONDS
        # A rank that this one has waited for in vain may not read anything for hours.
        others = set(self._ranks) - {self._rank, failure.rank, *failure.absent}
        with suppress(RankFailedError):
            while self._clock() < end:
                named = {record.rank for record in self._failures.values()}  # dead, or the first to know
                others -= {*self.ended, *self.silent, *self._failures, *named}
                others = {rank for rank in others if self._peek(str(rank)) is None}  # those of `Meeting.refuse` know
                if not others:
                    break
                self.pump(_POLL_SECONDS[1])

    def _put(self, key: str, value: str) -> None:
        self._ask(self._store.put, f"{self._name}/{key}", value)

    def _peek(self, key: str) -> str | None:
        text: str | None = self._ask(self._store.peek, f"{self._name}/{key}")
        return text

    def _ask(self, operation: Callable[..., Any], *arguments: str) -> Any:
        """Return the store's answer; if the store is gone, name the process that most likely kept it."""
        try:
            return operation(*arguments)
        except RankFailedError as error:
            if (peer := self._peers.get(error.rank or 0)) is not None:
                raise FailureRecord(peer.rank, peer.host, peer.pid, str(error.cause), "a gather").to_error() from error
            raise
