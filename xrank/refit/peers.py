"""Ranks of both jobs as others see them: statuses and outcomes in their memory, and whether they live."""

from __future__ import annotations

import json
import mmap
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial
from math import inf
from time import monotonic, sleep, thread_time
from typing import Any
from zlib import crc32

from msgspec import Struct, field
from msgspec.structs import replace

from xrank.errors import ContradictionError, CorruptError, RankFailedError, RankTimeoutError, UsageError, XrankError
from xrank.ranks.byte_service import PeerConnection, PeerGoneError, PeerRefusalError, read_view
from xrank.ranks.loans import LendingEndedError, PeerOffer, PeerSource, UnreadableMemoryError
from xrank.ranks.memory import MemoryBytes
from xrank.ranks.team import Team
from xrank.refit.directory import Address, RankRegistration

SILENT_SECONDS = 1.5
"""Longest silence of a rank over a socket: a stopped rank is to be named within 2 seconds."""
_GRACE_SECONDS = 0.2
"""Time in which the statuses may still show why another rank's memory cannot be read."""
PAUSE_SECONDS = 0.0005
_LOOK_SECONDS = 0.25
"""Time between two looks at the state of a process of this host."""
_STOPPED = ("T", "t")
"""proc(5), /proc/pid/stat: stopped by a signal, or by a tracer."""
_LEAVE_SECONDS = 2.0
"""Longest time for which a rank that closes waits for others."""
_DAMAGED_SECONDS = 1.5
"""Longest time in which an owner may write its status: on a busy machine the kernel may pause it meanwhile."""

_FIELDS = struct.Struct("<qqqqqqqH")
STATUS_NBYTES = 512
"""Bytes of a status: a checksum, the fields, and the cause as text."""
_TEXT_NBYTES = STATUS_NBYTES - 4 - _FIELDS.size

_OUTCOME_HEAD = struct.Struct("<II")
"""Before an outcome in memory: checksum and length of its text."""
_OUTCOME_NBYTES = 4 << 20
"""Most bytes of an outcome: 4,000 engine ranks that all failed take 2.5 MB."""


class Phase(IntEnum):
    """The state of a rank."""

    CLOSED = 0
    """Trainer: the weights may change. Engine: the rank is outside `update`."""
    WAITING = 8
    """Engine: the rank waits for a step."""
    OPEN = 1
    """Trainer: the weights are those of the step, and the rank counts its checks of them."""
    STEADY = 2
    """Trainer: a snapshot has the weights of the step; it needs no checks."""
    READING = 3
    """Engine: the rank writes to its tensors."""
    COPIED = 10
    """Engine: the rank has copied all bytes of a step, and waits until each trainer rank confirms them."""
    DONE = 4
    """Engine: the rank has all weights of the step."""
    LATE = 5
    """Engine: no new step came in time, and the rank raised. The trainer waits for its next call."""
    READABLE = 9
    """Trainer: the values of the step are final, and other ranks may read them to prepare what they lend."""
    FAILED = 6
    """The rank raised; the cause is known."""
    ENDED = 7
    """The rank has closed its offer or its weights."""


_PHASES = frozenset(Phase)


class RankStatus(Struct, frozen=True):
    """The state of a rank at one moment."""

    phase: Phase = Phase.CLOSED
    step: int = -1
    """Trainer: the step that is open, or was last. Engine: the last step that the rank has taken."""
    generation: int = 0
    """Trainer: the number of changes of the phase. Engine: the number of times that the rank began to write to its
    tensors. Weights read between two equal ones are of one step."""
    checks: int = 0
    """Trainer: the number of checks, since the step is open, that no tensor changed."""
    round: int = 0
    """Engine: the number of the call of `update` that the rank is in or has left; ranks in one call have the same."""
    offer: int = 0
    """Engine: the number of the offer that `step` belongs to."""
    committed: int = 0
    """Trainer: the last step whose outcome this rank knows. Engine: the last round in which this rank saw all ranks
    with one step."""
    cause: str = ""

    def to_bytes(self) -> bytes:
        """Return the status as `STATUS_NBYTES` bytes."""
        text = self.cause.encode()[:_TEXT_NBYTES]
        numbers = (self.phase, self.step, self.generation, self.checks, self.round, self.offer, self.committed)
        body = _FIELDS.pack(*numbers, len(text)) + text
        return crc32(body).to_bytes(4, "little") + body.ljust(STATUS_NBYTES - 4, b"\0")

    @classmethod
    def from_bytes(cls, content: bytes) -> RankStatus | None:
        """Return the status; None if the bytes are not one, as while their owner writes them."""
        body = content[4:]
        phase, step, generation, checks, round_, offer, committed, length = _FIELDS.unpack_from(body)
        end = _FIELDS.size + length
        if end > len(body) or crc32(body[:end]) != int.from_bytes(content[:4], "little") or phase not in _PHASES:
            return None
        text = body[_FIELDS.size : end].decode(errors="replace")
        return cls(Phase(phase), step, generation, checks, round_, offer, committed, text)


class StepOutcome(Struct, frozen=True):
    """The outcome of a step: the trainer's first rank decides it, and the other ranks take it over."""

    step: int
    takers: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    """Engine ranks that failed, and why."""
    error: XrankError | None = None
    """Raised by all ranks."""
    is_over: bool = False
    """Whether a trainer rank has failed, so that no engine may take the step."""

    def to_json(self) -> bytes:
        """Return the outcome as text for other ranks."""
        error = None if self.error is None else self.error.to_record()
        return json.dumps([self.step, self.takers, dict(self.failed), error, self.is_over]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> StepOutcome:
        """Return the outcome of such a text."""
        step, takers, failed, error, is_over = json.loads(text)
        return cls(step, tuple(takers), failed, None if error is None else XrankError.from_record(error), is_over)


_NO_STATUS = RankStatus()


class StatusBlock(MemoryBytes):
    """This rank's status; one thread writes it. A reader that sees a part of it reads again."""

    def __init__(self, status: RankStatus = _NO_STATUS) -> None:
        super().__init__(memoryview(mmap.mmap(-1, STATUS_NBYTES)))
        self.write(status)

    def write(self, status: RankStatus) -> None:
        """Replace the status."""
        self.value = status
        self._content[:] = status.to_bytes()

    def update(self, **changes: Any) -> None:
        """Change some fields of the status."""
        self.write(replace(self.value, **changes))


class OutcomeBlock(MemoryBytes):
    """The last outcome that this rank knows. Its status shows the step of it afterwards."""

    def __init__(self) -> None:
        super().__init__(memoryview(mmap.mmap(-1, _OUTCOME_NBYTES)))  # no page is in use before it is written

    def write(self, outcome: StepOutcome) -> None:
        """Replace the outcome."""
        text = outcome.to_json()
        self._content[: _OUTCOME_HEAD.size + len(text)] = _OUTCOME_HEAD.pack(crc32(text), len(text)) + text


class Pause:
    """Sleeps between two looks of a thread, which wait for the same event.

    The ranks that are waited for may need the cores: on a host with as many ranks as cores, trainer ranks that looked
    each half millisecond took 40 % of the time of the engine's copies. So waiting takes 2 % of a core at most. Ranks
    that answer slowly have much to answer, and get four times as long. Short waits end soon.

    Example:
        >>> pause, looks = Pause(), iter([False, False, True])
        >>> while not next(looks):
        ...     pause()
    """

    def __init__(self) -> None:
        self._began = self._looked = monotonic()
        self._resumed = thread_time()

    def __call__(self) -> None:
        """Sleep for a time that suits the cost of the last look."""
        now = monotonic()
        longest = min(0.04, 0.1 * (now - self._began))
        seconds = max(50.0 * (thread_time() - self._resumed), 4.0 * (now - self._looked))
        sleep(max(PAUSE_SECONDS, min(longest, seconds)))
        self._looked, self._resumed = monotonic(), thread_time()


class PeerRank:
    """Reads the status of a rank: by the kernel on this host, else over a socket.

    The last view of its `MemoryOffer` is its status; `role` is the rank in words, such as ``"trainer rank 3"``.
    """

    def __init__(self, role: str, rank: int, description: Mapping[str, Any]) -> None:
        self.role, self.rank = role, rank
        self._offer = PeerOffer.from_description(rank, description)
        if self._offer.nbytes[-1:].tolist() != [STATUS_NBYTES]:
            raise CorruptError(
                f"{role} sent no valid status",
                rank=rank,
                got=f"views of {self._offer.nbytes[-3:].tolist()} bytes, not a last one of {STATUS_NBYTES}",
                next_step="use the same version of xrank in both jobs",
            )
        self._offer.watch(direct=True)
        self._view = len(self._offer.nbytes) - 1
        self._connection: PeerConnection | None = None
        self._looked_at = -_LOOK_SECONDS
        self._stopped_since: float | None = None
        self._content = bytearray(STATUS_NBYTES)
        self._last: tuple[bytes, RankStatus | None] = (b"", None)
        self._lock = threading.Lock()
        self.may_return = False
        """Whether the last error was that the rank is stopped or silent, and not that it ended."""
        self.has_answered = False
        """Whether its status could be read the last time."""

    @property
    def place(self) -> str:
        """The host and the process, for errors."""
        return f"host {self._offer.host}, pid {self._offer.pid}"

    @property
    def last(self) -> RankStatus | None:
        """The status that was read last, also of a rank that is stopped since; None if it was damaged."""
        return self._last[1]

    def read(self) -> RankStatus:
        """Return its status; raise RankFailedError or RankTimeoutError if it ended, is stopped or does not answer."""
        with self._lock:
            self.may_return = self.has_answered = False
            self._check_alive()
            end = monotonic() + _DAMAGED_SECONDS
            while True:
                self._bring(self._view, memoryview(self._content))
                if self._last[0] != self._content:  # most looks find the bytes of the last one
                    content = bytes(self._content)
                    self._last = content, RankStatus.from_bytes(content)
                self._check_running()
                if self._last[1] is not None:
                    self.has_answered = True
                    return self._last[1]
                if monotonic() > end:
                    raise self.make_error("its status is damaged")
                self._check_alive()
                sleep(PAUSE_SECONDS)

    def try_read(self) -> RankStatus | None:
        """Return its status; None if it cannot be read."""
        try:
            return self.read()
        except (RankFailedError, RankTimeoutError):
            return None

    def read_outcome(self) -> StepOutcome:
        """Return the outcome that a trainer rank keeps beside its status; errors as `read`."""
        view, head = self._view - 1, bytearray(_OUTCOME_HEAD.size)
        with self._lock:
            end = monotonic() + _DAMAGED_SECONDS
            while monotonic() < end:
                self._bring(view, memoryview(head))
                checksum, length = _OUTCOME_HEAD.unpack(head)
                text = bytearray(len(head) + min(length, int(self._offer.nbytes[view]) - len(head)))
                self._bring(view, memoryview(text))
                if text.startswith(head) and crc32(text[len(head) :]) == checksum:
                    return StepOutcome.from_json(bytes(text[len(head) :]))
                sleep(PAUSE_SECONDS)
        raise self.make_error("its outcome is damaged")

    def read_view(self, view: int, start: int, into: memoryview) -> None:
        """Fill `into` from a byte of a view on, counted from the last view, the status, at -1; errors as `read`."""
        with self._lock:
            self._check_alive()
            self._bring(len(self._offer.nbytes) + view, into.cast("B"), start)

    def make_error(self, cause: str) -> RankFailedError:
        """Return the error that names this rank."""
        return make_failure(self.role, self.rank, cause, self._offer.host, self._offer.pid)

    def close(self) -> None:
        """Close the connection, and stop watching the process."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._offer.close()

    def _bring(self, view: int, into: memoryview, start: int = 0) -> None:
        offer = self._offer
        if offer.memory is not None:
            try:
                offer.memory.read_into(int(offer.addresses[view]) + start, into)
            except LendingEndedError:
                raise self.make_error("its process ended, or its memory is no longer readable") from None
            except UnreadableMemoryError:
                offer.memory = None
            else:
                return
        known, self._connection = self._connection, None
        try:
            self._connection = read_view(known, offer.place, view, start, into, self._tick)
        except (PeerGoneError, PeerRefusalError) as error:
            raise self.make_error(str(error)) from None

    def _tick(self, silent_seconds: float) -> None:
        self._check_alive()
        self._check_running()
        if silent_seconds > SILENT_SECONDS:
            self.may_return = True
            raise RankTimeoutError(
                f"{self.role} has not answered for {silent_seconds:.1f} s",
                rank=self.rank,
                host=self._offer.host,
                waiting_for=(self.rank,),
                got=f"no answer from {self.place}",
                next_step=f"check whether {self.role} is stopped, or its host cut off; then repeat the call",
            )

    def _check_alive(self) -> None:
        if self._offer.has_ended:
            raise self.make_error("its process ended")

    def _check_running(self) -> None:
        """Raise if its process has been stopped for two looks."""
        now = monotonic()
        if self._offer.life is not None and now >= self._looked_at + _LOOK_SECONDS:
            self._looked_at = now
            if not _is_stopped(self._offer.pid):
                self._stopped_since = None
            elif self._stopped_since is None:
                self._stopped_since = now
        if self._stopped_since is not None and self._looked_at >= self._stopped_since + _LOOK_SECONDS:
            self.may_return = True
            raise self.make_error("its process is stopped (SIGSTOP)")


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name of the program, in parentheses, may contain anything (proc(5)).
            return file.read().rpartition(")")[2].split()[0] in _STOPPED
    except (OSError, IndexError):
        return False


def open_siblings(job: str, team: Team, parts: Sequence[Mapping[str, Any]]) -> list[PeerRank]:
    """Return the other ranks of this job, the trainer or an engine, by the offers that all of them shared."""
    return [
        PeerRank(f"{job} rank {rank}", rank, part["offer"])
        for rank, part in zip(team.ranks, parts, strict=True)
        if rank != team.rank
    ]


open_source = partial(PeerSource, timeout_seconds=SILENT_SECONDS, grace_seconds=_GRACE_SECONDS)
"""Makes a source of what ranks lend, which finds a stopped rank as soon as a look at the statuses does."""


def make_failure(role: str, rank: int, cause: str, host: str | None = None, pid: int | None = None) -> RankFailedError:
    """Return the error that names a rank, and its process if that is known."""
    return RankFailedError(
        f"{role} failed: {cause}",
        rank=rank,
        host=host,
        pid=pid,
        cause=cause,
        got=cause if host is None else f"{cause}; host {host}, pid {pid}",
        next_step=f"look at {role}'s own error first, start it again if it ended, then repeat the call",
    )


def check_phase(peer: PeerRank, status: RankStatus) -> None:
    """Raise a `RankFailedError` if a rank reports that it has failed or ended."""
    if status.phase in (Phase.FAILED, Phase.LATE):
        raise peer.make_error(status.cause)
    if status.phase is Phase.ENDED:
        raise peer.make_error(f"it has closed its side{f' after {status.cause}' if status.cause else ''}")


def wait_while(
    peers: Iterable[PeerRank],
    is_waited_for: Callable[[PeerRank], bool],
    *,
    end: float = inf,
    between: Callable[[list[PeerRank]], object] = lambda _: None,
) -> None:
    """Look at ranks until none is waited for any more, or until the `end`; `between` runs between two looks."""
    waiting = list(peers)
    while waiting and monotonic() < end:
        waiting = [peer for peer in waiting if is_waited_for(peer)]
        if waiting:
            between(waiting)
            sleep(PAUSE_SECONDS)


class EngineRanks:
    """The other ranks of this engine, by their statuses: ranks of an engine take a step all together or not at all."""

    def __init__(self, block: StatusBlock, peers: Sequence[PeerRank]) -> None:
        self._block, self.peers = block, peers

    def find_round(self) -> int:
        """Return the number of this rank's next call.

        Ranks that have failed may have repeated their calls before this rank made its own: it joins them. They cannot
        have committed a step without this rank. `check` finds ranks that cannot be read.
        """
        statuses = [peer.try_read() for peer in self.peers]
        return max(self._block.value.round + 1, *(status.round for status in statuses if status is not None), 0)

    def check(self) -> None:
        """Raise if another rank has failed in this call of `update`, has ended, or is stopped."""
        own = self._block.value.round
        for peer in self.peers:
            status = peer.read()
            if status.phase is Phase.ENDED or status.round == own:
                check_phase(peer, status)
            elif status.round > own > status.committed:
                raise peer.make_error("it failed in this call, and has already called again")

    def wait_for_all(self, own: RankStatus, check: Callable[[], object]) -> bool:
        """Wait until all ranks hold this rank's step; return False if one holds a newer step, or another trainer's.

        A rank that holds a step leaves it only for a newer one of another rank. So if each rank was seen with the same
        step, even one after the other, all of them keep it.
        """
        waiting = list(self.peers)
        while waiting:
            for peer in list(waiting):
                status = peer.read()
                if status.committed >= own.round:  # it saw all ranks with one step
                    waiting.remove(peer)
                elif status.round == own.round and status.phase in (Phase.DONE, Phase.CLOSED):
                    if status.offer != own.offer or status.step > own.step:
                        return False
                    if status.step == own.step:
                        waiting.remove(peer)
            if waiting:
                check()
                sleep(PAUSE_SECONDS)
        return True

    def wait_until_seen(self) -> None:
        """Wait until no rank still looks for this rank's last step, for a moment at most: it is about to close."""
        own = self._block.value.round

        def looks_for_it(peer: PeerRank) -> bool:
            status = peer.try_read()
            return status is not None and status.phase is Phase.DONE and status.round == own

        wait_while(self.peers, looks_for_it, end=monotonic() + _LEAVE_SECONDS)

    def close(self) -> None:
        """Close all connections."""
        for peer in self.peers:
            peer.close()


_REFRESH_SECONDS = 0.05
"""Time between two looks into the directory."""
_RETRY_SECONDS = 0.5
"""Time in which an engine rank that has failed may repeat its call; then the trainer goes on without it."""
_SUSPECT_SECONDS = 2.0
"""Longest time until all ranks have noticed that the first one does not answer."""
_SHOWN = (Phase.OPEN, Phase.STEADY)
_HOLDING = (Phase.CLOSED, Phase.WAITING, Phase.LATE, Phase.FAILED)
"""Phases in which all ranks of an engine hold the step of its status: a failure while it wrote has none."""


class EngineParts(Struct):
    """The engine ranks at one moment, by their part in a step."""

    waiting: list[PeerRank] = field(default_factory=list)
    """Ranks that have not yet taken the step."""
    taken: list[str] = field(default_factory=list)
    failed: list[tuple[PeerRank, RankStatus]] = field(default_factory=list)
    """Ranks whose last call of `update` has raised; for a moment they are among `waiting`, too."""
    reading: list[PeerRank] = field(default_factory=list)
    """Those of `waiting` that write to their tensors, or wait until what they wrote is confirmed."""
    must_confirm: bool = False
    """Whether one of them waits for that now: the others need no checks yet."""


class EngineWatch:
    """Finds engine ranks by their registrations, which the trainer's first rank removes, and reads their statuses."""

    def __init__(self, place: Address, offer: int, *, is_first: bool) -> None:
        self._place, self._offer, self._is_first = place, offer, is_first
        self._registrations: dict[str, RankRegistration] = {}
        self._peers: dict[str, PeerRank] = {}
        self._reported: dict[str, int] = {}
        """Rank -> the call of `update` whose failure was reported."""
        self._paused: set[str] = set()
        """Stopped or silent ranks, which are left alone until the next step."""
        self._failed: dict[str, tuple[int, float]] = {}
        """Rank -> the call of `update` that has failed, and the time since which this is known in the present step."""
        self._next_refresh = 0.0
        self._ended: dict[str, XrankError] = {}
        """Engine ranks that have ended, or were stopped, since the last outcome, and how."""
        self._left: dict[str, int] = {}
        """Engine ranks that have closed since the last outcome, and the step that they held."""
        self.look(-1)
        self._ended.clear()  # ranks of earlier jobs, whose registrations are removed now

    def begin_step(self) -> None:
        """Look again for ranks that were stopped or silent during the last step."""
        self._paused.clear()
        self._failed.clear()
        self._next_refresh = 0.0

    def look(self, step: int) -> EngineParts:
        """Return the engine ranks' parts in a step. Ranks that have ended are left out; `settle` names them."""
        self._refresh()
        found = EngineParts()
        for name, peer in list(self._peers.items()):
            try:
                status = peer.read()
            except (RankFailedError, RankTimeoutError) as error:
                self._lose(name, peer, error)
                continue
            if status.phase is Phase.ENDED:
                self._note_left(peer.role, peer.rank, status.cause, status.round, status.step)
                self._forget(name, remove=True)
            elif status.offer == self._offer and status.step >= step and status.phase in _HOLDING:
                found.taken.append(peer.role)
            elif status.phase is Phase.FAILED:
                found.failed.append((peer, status))
                if self._failed.get(name, (-1, 0.0))[0] != status.round:
                    self._failed[name] = status.round, monotonic()
                if monotonic() < self._failed[name][1] + _RETRY_SECONDS:
                    found.waiting.append(peer)  # in its first moment in this step it may repeat its call
            else:
                found.waiting.append(peer)
                if status.phase in (Phase.READING, Phase.COPIED):
                    found.reading.append(peer)
                found.must_confirm |= status.phase is Phase.COPIED
        found.taken += [role for role, held in self._left.items() if held >= step and role not in found.taken]
        return found

    def settle(self, found: EngineParts) -> tuple[dict[str, str], list[XrankError]]:
        """Return why engine ranks have failed, by rank, and the errors of those that were not returned before."""
        errors = list(self._ended.values())
        failed = {
            role: (error.cause if isinstance(error, RankFailedError) else None) or error.message
            for role, error in self._ended.items()
        }
        for peer, status in found.failed:
            failed[peer.role] = status.cause
            if self._reported.get(peer.role) != status.round:
                self._reported[peer.role] = status.round
                errors.append(peer.make_error(status.cause))
        self._ended.clear()
        self._left.clear()
        return failed, errors

    def close(self) -> None:
        """Close all connections; after the trainer's registration was removed, no engine rank leaves last words."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._read_left()

    def _refresh(self) -> None:
        now = monotonic()
        if now < self._next_refresh:
            return
        self._next_refresh = now + _REFRESH_SECONDS
        found = self._place.find_all("engine", self._registrations)
        for name in [*self._peers.keys() - found.keys()]:
            self._forget(name)
        self._read_left()
        for name, one in found.items():
            if name not in self._registrations and name not in self._paused:
                self._add(name, one)
        self._registrations = {name: one for name, one in found.items() if name not in self._paused}

    def _add(self, name: str, registration: RankRegistration) -> None:
        try:
            content = registration.describe("an engine's rank", "engine, rank and offer")
            rank, engine = content["rank"].count(below=1 << 31), content["engine"].text()
            self._peers[name] = PeerRank(f"engine rank {rank} ({engine})", rank, content["offer"].table())
        except (CorruptError, RankFailedError, UsageError):
            if self._is_first:  # the trainer goes on: an engine with a damaged registration cannot take anything
                self._place.remove(registration)

    def _read_left(self) -> None:
        """Read and remove the last words of engine ranks that have closed."""
        for left in self._place.find_all("left").values() if self._is_first else ():
            with suppress(CorruptError):  # not xrank's
                content = left.describe("the end of an engine's rank", "engine, rank, step, round, cause and trainer")
                engine, rank = content["engine"].text(), content["rank"].count(below=1 << 31)
                step, round_ = content["step"].count(low=-1), content["round"].count(low=-1)
                cause = content["cause"].text()
                if content["trainer"].value == self._offer:
                    self._note_left(f"engine rank {rank} ({engine})", rank, cause, round_, step)
            self._place.remove(left)

    def _note_left(self, role: str, rank: int, cause: str, round_: int, step: int) -> None:
        if not cause:
            self._left[role] = step
        elif self._reported.get(role) != round_:
            self._reported[role] = round_
            self._ended[role] = make_failure(role, rank, cause)

    def _lose(self, name: str, peer: PeerRank, error: XrankError) -> None:
        """Drop a rank that has failed. One that closes removes its registration before its status is gone."""
        if self._place.has(self._registrations[name]):
            self._ended[peer.role] = error
        else:
            self._read_left()
        if peer.may_return:
            self._paused.add(name)
            self._registrations.pop(name, None)
        self._forget(name, remove=not peer.may_return)

    def _forget(self, name: str, *, remove: bool = False) -> None:
        self._peers.pop(name).close()
        if remove and self._is_first and name in self._registrations:
            self._place.remove(self._registrations[name])


class TrainerRanks:
    """The other ranks of this trainer."""

    def __init__(
        self, block: StatusBlock, outcomes: OutcomeBlock, peers: Sequence[PeerRank], *, is_first: bool
    ) -> None:
        self.block, self.peers, self.is_first, self._outcomes = block, peers, is_first, outcomes

    def check(self, step: int) -> None:
        """Raise if a step has failed on another rank; the error names it."""
        if self.is_first:
            self.find_late(step)
        else:
            outcome = self.find_outcome(step)
            if outcome is not None and outcome.error is not None:
                raise outcome.error

    def find_late(self, step: int) -> list[PeerRank]:
        """Return the ranks that do not show a step yet; raise if a rank has ended, or failed or left the step.

        Of several failures this raises their cause, as far as it can be seen, rather than one that follows from it.
        """
        late: list[PeerRank] = []
        reported: list[XrankError] = []
        followed: list[XrankError] = []
        for peer in self.peers:
            try:
                status = peer.read()
                _check_step(peer, status, step)
            except (RankFailedError, RankTimeoutError, ContradictionError) as error:
                if not peer.has_answered:
                    raise
                cause = error.cause if isinstance(error, RankFailedError) else None
                is_first_cause = cause is None or not cause.startswith(("RankFailedError", "RankTimeoutError"))
                (reported if is_first_cause else followed).append(error)
                continue
            if status.step < step or status.phase not in _SHOWN or not status.checks:
                late.append(peer)
        for failure in (*reported, *followed):
            raise failure
        return late

    def decide(self, outcome: StepOutcome) -> None:
        """Let the other ranks take an outcome over."""
        self._outcomes.write(outcome)
        self.block.update(committed=outcome.step)

    def wait_until_known(self, step: int) -> None:
        """Wait until all living ranks have taken the outcome over; raise if none has: they took this rank for dead."""
        known: list[PeerRank] = []
        refusals: list[tuple[PeerRank, RankStatus]] = []

        def is_waited_for(peer: PeerRank) -> bool:
            status = peer.try_read()
            if status is None:
                return False  # the next step names it
            if status.committed >= step:
                known.append(peer)
            elif status.step >= step and status.phase in (Phase.FAILED, Phase.ENDED):
                refusals.append((peer, status))
            else:
                return True
            return False

        wait_while(self.peers, is_waited_for)
        if refusals and not known:
            check_phase(*refusals[-1])

    def find_outcome(self, step: int) -> StepOutcome | None:
        """Return the outcome of a step once the first rank has decided it."""
        if self.is_first:
            return None
        first = self.peers[0]
        try:
            status = first.read()
        except (RankFailedError, RankTimeoutError) as error:
            if first.last is None or first.last.committed < step:
                return self._ask_others(step, error)
            status = first.last  # it was stopped after it had decided
        if status.committed >= step:
            return self._take_over(first, step)
        _check_step(first, status, step)
        return None

    def leave(self, cause: str) -> RankFailedError | None:
        """Show that this rank closes, and return the error of a rank that has ended before it closed.

        Each rank waits for a moment until all have seen each other close.
        """
        self.block.update(phase=Phase.ENDED, checks=0, cause=cause)
        end = monotonic() + _LEAVE_SECONDS
        lost: list[RankFailedError] = []
        for checks in (0, 1):

            def is_open(peer: PeerRank, checks: int = checks) -> bool:
                if lost:
                    return False
                try:
                    status = peer.read()
                except RankTimeoutError:
                    return True
                except RankFailedError as error:
                    if not peer.may_return and not checks:
                        lost.append(error)
                    return peer.may_return
                return status.phase is not Phase.ENDED or status.checks < checks

            self.block.update(checks=checks)
            wait_while(self.peers, is_open, end=end)
            if lost:
                return lost[0]
        return None

    def close(self) -> None:
        """Close all connections."""
        for peer in self.peers:
            peer.close()

    def _take_over(self, peer: PeerRank, step: int) -> StepOutcome:
        outcome = peer.read_outcome()
        if outcome.step != step:
            raise _step_error(peer, outcome.step, step)
        self.decide(outcome)
        return outcome

    def _ask_others(self, step: int, error: XrankError) -> StepOutcome:
        """Return the outcome that another rank has taken over from the first one, which has ended; else raise.

        A rank that shows its failure here takes no outcome from the first rank any more. So if all do, none has one.
        """
        cause = f"{type(error).__name__}: {error}"
        self.block.update(phase=Phase.FAILED, step=step, cause=cause)
        knowing: list[PeerRank] = []

        def may_know(peer: PeerRank) -> bool:
            status = None if knowing else peer.try_read()
            if status is None:
                return False
            if status.committed >= step:
                knowing.append(peer)
                return False
            return status.step == step and status.phase not in (Phase.FAILED, Phase.ENDED)

        wait_while(self.peers[1:], may_know, end=monotonic() + _SUSPECT_SECONDS)
        if knowing:
            return self._take_over(knowing[0], step)
        raise error


def _check_step(peer: PeerRank, status: RankStatus, step: int) -> None:
    """Raise if a rank has failed in a step, has closed, or publishes a later step."""
    if status.step >= step or status.phase is Phase.ENDED:  # failures of earlier steps are over
        check_phase(peer, status)
    if status.step > step:
        raise _step_error(peer, status.step, step)


def _step_error(peer: PeerRank, got: int, step: int) -> ContradictionError:
    return ContradictionError(
        f"{peer.role} publishes step {got}, but this rank step {step}",
        rank=peer.rank,
        want=f"step {step} on all ranks of the trainer",
        next_step="let all ranks publish the same steps in the same order",
    )
