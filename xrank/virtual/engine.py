"""Engines, which run the bodies of devices; the channels between devices; and the engine of threads.

A transport is a subclass of `VirtualChannel` with `put` and `take`, and `Links` that return one device's ends of its
channels. An engine first sends each device its packets, with the heading ``make_heading("packet", call=number)``, then
calls ``body(links)``. The call order of one device::

    links.from_device(HOST).receive(...)  the packets that the host sent before the device began
    links.to_device(d).send(...)          never waits for the receiver: two devices may both send first
    links.from_device(d).receive(...)     waits; messages of one device arrive in the order of sending
    links.to_device(HOST).send(...)       the outputs of a program, with make_heading("return", call=number)

Only the device's own thread uses its ends. The engine ends a wait with an exception when another device has failed or
the time limit is over. Both sides of a channel count every array independently of the devices' statistics, and tests
compare the two. A received array has the kind (numpy or torch) of the sent one.

In the engine of threads, `run`, a device is a thread of the caller's process and a channel a queue. Its results equal
those of `xrank.virtual.processes` bit by bit; it starts at once and works in a debugger. Python runs one thread at a
time, so its speed is not meaningful. A thread cannot be killed: after a failure or a timeout, waiting devices end at
once, but a computing or sleeping one continues. Devices share all objects that a function reaches other than its
arguments, where processes have copies.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, NamedTuple, Protocol, TypeAlias
from zlib import crc32

from xrank.errors import RankFailedError, RankTimeoutError, UsageError, XrankError
from xrank.virtual.arrays import Array, copy_of
from xrank.virtual.programs import ALGORITHMS, COLLECTIVES, REDUCTIONS
from xrank.words import first_lines, list_text

HOST = -1
"""The host, as source or target of a channel."""

KINDS = ("packet", "return", "send", *COLLECTIVES)
"""Kinds of messages; a heading contains the place in this list."""


class Heading(NamedTuple):
    """The call that a message belongs to: ``len(Heading())`` integers from 0 to 2**32 - 1, for any transport.

    A receiver passes the heading that it expects; a different one means that two devices call different things.
    """

    kind: int = KINDS.index("send")
    """Place in `KINDS`."""
    algorithm: int = 0
    """Place in `ALGORITHMS`."""
    reduction: int = 0
    """Place in `REDUCTIONS`, plus 1; 0 without a reduction."""
    root: int = 0
    """The root device, plus 1; 0 without a root."""
    group: int = 0
    """CRC-32 of the members' numbers, in the group's order; 0 outside of collectives."""
    call: int = 0
    """Number of earlier collectives of this group, counted by the device; for packets, their number."""
    shape: int = 0
    """CRC-32 of the shape of the members' arrays, if the sent pieces do not show it; otherwise 0."""

    def __str__(self) -> str:
        words = [KINDS[self.kind] if self.kind < len(KINDS) else f"kind {self.kind}"]
        if self.reduction:
            words.append(REDUCTIONS[self.reduction - 1])
        if self.root:
            words.append(f"with root {self.root - 1}")
        if self.group:
            words.append(f"by {ALGORITHMS[self.algorithm]}, call {self.call} of group #{self.group:08x}")
        elif self.call:
            words.append(f"number {self.call}")
        return " ".join(words)


PLAIN = Heading()


def make_heading(
    kind: str,
    *,
    algorithm: str = "push",
    reduction: str | None = None,
    root: int | None = None,
    group: Sequence[int] = (),
    call: int = 0,
    shape: Sequence[int] | None = None,
) -> Heading:
    """Encode the description of a message as a heading."""
    return Heading(
        KINDS.index(kind),
        ALGORITHMS.index(algorithm),
        0 if reduction is None else REDUCTIONS.index(reduction) + 1,
        0 if root is None else root + 1,
        _digest(group) if group else 0,
        call % 2**32,
        0 if shape is None else _digest(shape),
    )


def _digest(numbers: Sequence[int]) -> int:
    return crc32(",".join(map(str, numbers)).encode())


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Arrays that passed one end of a channel, and the bytes of their elements. Objects are not counted."""

    messages: int = 0
    nbytes: int = 0

    def __add__(self, other: ChannelStatistics) -> ChannelStatistics:
        return ChannelStatistics(self.messages + other.messages, self.nbytes + other.nbytes)


class VirtualChannel(ABC):
    """One direction from one device, or the `HOST`, to another: first in, first out, lossless."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.target = target
        self.sent = ChannelStatistics()
        """Counted by this end; if one process has both ends, by the sender."""
        self.received = ChannelStatistics()
        """Counted by this end; if one process has both ends, by the receiver."""

    def send(self, array: Array, heading: Heading = PLAIN) -> None:
        """Send an array without waiting for the receiver; the caller may change the array afterwards."""
        nbytes = array.nbytes
        self.put(array, heading)
        # After the put, which may end with an exception: only sent messages count.
        self.sent += ChannelStatistics(1, nbytes)

    def receive(self, heading: Heading = PLAIN) -> Array:
        """Wait for the next array and return it; the receiver may keep and change it.

        Raises:
            UsageError: the message has a different heading.
        """
        found, array = self.take(heading)
        self.received += ChannelStatistics(1, array.nbytes)
        if found != heading:
            raise contradiction(self.source, self.target, found, heading)
        return array

    @abstractmethod
    def put(self, array: Array, heading: Heading) -> None:
        """Send without counting: copy the array, whatever its strides."""

    @abstractmethod
    def take(self, heading: Heading) -> tuple[Heading, Array]:
        """Receive without counting or checks; the expected heading is shown if the receiver hangs."""


class Links(Protocol):
    """One device's ends of its channels, created by the engine."""

    def to_device(self, device: int) -> VirtualChannel:
        """Return the end that sends to another device, or to `HOST`."""

    def from_device(self, device: int) -> VirtualChannel:
        """Return the end that receives from another device, or from `HOST`."""


def contradiction(source: int, target: int, found: Heading, wanted: Heading) -> UsageError:
    """Return the error for a message with an unexpected heading."""
    sender, receiver = ("the host" if end == HOST else f"device {end}" for end in (source, target))
    if found._replace(group=wanted.group) == wanted:
        description = "the same of a different group"
    elif found._replace(shape=wanted.shape) == wanted:
        description = "a piece of an array with a different shape"
    else:
        description = str(found)
    return UsageError(
        f"{receiver} expects {wanted}, but {sender} sent it {description}",
        rank=target,
        got=str(found),
        want=str(wanted),
        next_step="let all members of a group call the same collectives in the same order",
    )


Body: TypeAlias = Callable[[Links], Any]

Counts: TypeAlias = Mapping[tuple[int, int], ChannelStatistics]
"""Counts by source and target of a channel, `HOST` for the host; unused channels may be absent."""


@dataclass(frozen=True, slots=True)
class DeviceJob:
    """The work of one device."""

    device: int
    body: Body
    packets: tuple[Array, ...] = ()
    """Arrays that the host sends to the device, in this order."""


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    """The results and counts of all devices, in the order of the jobs."""

    results: tuple[Any, ...]
    """Return values of the bodies."""
    returned: tuple[tuple[Array, ...], ...]
    """The arrays that each device sent to the host, in order."""
    sent: Counts
    """Counted by the senders' ends, including the host's."""
    received: Counts
    """Counted by the receivers' ends, including the host's."""


def make_failure(device: int, error: BaseException, *, pid: int | None = None) -> RankFailedError:
    """Return the error for a device whose body raised; the caller raises it ``from`` that exception."""
    try:
        cause = f"{type(error).__name__}: {error}"
    except Exception:  # the exception's own code failed
        cause = f"{type(error).__name__}: (its text cannot be shown)"
    failure = RankFailedError(
        f"device {device} failed: {cause}",
        rank=device,
        pid=pid,
        cause=cause,
        **{part: getattr(error, part) for part in ("got", "want", "next_step") if isinstance(error, XrankError)},
    )
    failure.add_note(f"on device {device}:\n{''.join(traceback.format_exception(error)).rstrip()}")
    return failure


def join_failures(errors: Sequence[RankFailedError]) -> RankFailedError:
    """Return the first of several errors, with all of them in its ``failures``."""
    errors[0].failures = tuple(errors)
    return errors[0]


def describe_wait(source: int, running: Collection[int], message: str) -> str:
    """Describe a device's wait for a sender; `running` are the devices that have not ended."""
    sender = "the host" if source == HOST else f"device {source}"
    ended = ", which has ended" if source != HOST and source not in running else ""
    return f"{sender}{ended} ({message})"


def make_timeout_error(devices: Sequence[int], waits: Mapping[int, str], timeout_seconds: float) -> RankTimeoutError:
    """Return the error for a run that exceeded its time limit: `devices` have not ended, and do not wait as `waits`."""
    if not devices:
        return make_deadlock_error(waits)
    noun = "device" if len(devices) == 1 else "devices"
    return RankTimeoutError(
        f"{noun} {list_text(devices, 16)} did not end within {timeout_seconds:g} seconds",
        rank=devices[0],
        waiting_for=tuple(devices),
        got=_describe_waits(waits) if waits else None,
        next_step="look at their stacks, below; or give a larger timeout_seconds=",
    )


def make_deadlock_error(waits: Mapping[int, str], *, others_work: bool = False) -> RankTimeoutError:
    """Return the error for devices that wait for each other or for devices that have ended."""
    return RankTimeoutError(
        f"{'these devices can never' if others_work else 'no device can'} continue: {_describe_waits(waits)}",
        rank=min(waits, default=None),
        waiting_for=tuple(waits),
        next_step="let the members of a group call the same collectives in one order, and match each receive with a "
        "send",
    )


def _describe_waits(waits: Mapping[int, str]) -> str:
    """Describe the waits of up to eight devices."""
    return "; ".join(first_lines([f"device {device} waits for {what}" for device, what in waits.items()], 8))


_GRACE_SECONDS = 0.5
"""Time for threads that are about to end, once the outcome is known."""

_EXIT_SECONDS = 5.0
"""Time until the operating system has ended the threads that finished their work."""


class _DeviceStoppedError(BaseException):
    """Ends a waiting device's thread after another failed; a BaseException, so ``except Exception`` misses it."""


class _Wait(NamedTuple):
    queue: deque[Any]
    source: int
    what: object


@dataclass(slots=True)
class Monitor:
    """The monitor of one run's threads: one lock, and the wait of each thread."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    live: set[int] = field(default_factory=set)
    """Devices that have not ended."""
    waits: dict[int, _Wait] = field(default_factory=dict)
    """The wait of each waiting device; filling its queue removes the wait."""
    failures: list[tuple[int, BaseException]] = field(default_factory=list)
    stuck: dict[int, str] | None = None
    """Descriptions of all waits at a deadlock."""
    is_over: bool = False
    wakers: dict[int, threading.Condition] = field(default_factory=dict)

    def waker(self, device: int) -> threading.Condition:
        """Return the condition on which a device, or the host, waits."""
        if device not in self.wakers:
            self.wakers[device] = threading.Condition(self.lock)
        return self.wakers[device]

    def fill(self, queue: deque[Any], value: Any, target: int) -> None:
        """Append a value to a queue and wake the device that waits for it."""
        with self.lock:
            queue.append(value)
            waiting = self.waits.get(target)
            if waiting is not None and waiting.queue is queue:
                # Removed by the sender: a receiver that has not woken up yet must not count as stuck.
                del self.waits[target]
                self.waker(target).notify()

    def drain(self, queue: deque[Any], device: int, source: int, what: object) -> Any:
        """Wait for the next value of a queue and return it."""
        with self.lock:
            while not queue:
                self.waits[device] = _Wait(queue, source, what)
                # The last device to wait finds the deadlock, because waits change only under the lock.
                self.stop_if_stuck()
                while device in self.waits and not self.is_over:
                    self.waker(device).wait()
                if self.is_over:
                    raise _DeviceStoppedError
            return queue.popleft()

    def leave(self, device: int, error: BaseException | None) -> None:
        """Record the end of a device."""
        with self.lock:
            self.live.discard(device)
            self.waits.pop(device, None)
            if error is not None:
                self.failures.append((device, error))
                self.stop()
            elif not self.live:
                self.waker(HOST).notify()
            else:
                self.stop_if_stuck()

    def stop_if_stuck(self) -> None:
        """Stop all devices if every live one waits; the caller has the lock."""
        if not self.is_over and self.live <= self.waits.keys():
            self.stuck = self.describe_waits()
            self.stop()

    def describe_waits(self) -> dict[int, str]:
        """Describe the waits of all waiting devices; the caller has the lock."""
        return {d: describe_wait(wait.source, self.live, str(wait.what)) for d, wait in sorted(self.waits.items())}

    def stop(self) -> None:
        """End all waits; the caller has the lock."""
        self.is_over = True
        for waker in self.wakers.values():
            waker.notify_all()


class _QueueChannel(VirtualChannel):
    """A channel between two threads of one process."""

    def __init__(self, source: int, target: int, monitor: Monitor) -> None:
        super().__init__(source, target)
        self.monitor = monitor
        self.arrays: deque[tuple[Heading, Array]] = deque()

    def put(self, array: Array, heading: Heading) -> None:
        self.monitor.fill(self.arrays, (heading, copy_of(array)), self.target)

    def take(self, heading: Heading) -> tuple[Heading, Array]:
        taken: tuple[Heading, Array] = self.monitor.drain(self.arrays, self.target, self.source, heading)
        return taken


@dataclass(slots=True)
class _QueueLinks:
    """The channels of one device; a channel is created at its first use by either side."""

    device: int
    monitor: Monitor
    channels: dict[tuple[int, int], _QueueChannel]
    """By source and target, shared by the links of all devices."""

    def to_device(self, device: int) -> _QueueChannel:
        return self._channel(self.device, device)

    def from_device(self, device: int) -> _QueueChannel:
        return self._channel(device, self.device)

    def _channel(self, source: int, target: int) -> _QueueChannel:
        found = self.channels.get((source, target))
        # If both devices create the channel at once, one wins: setdefault is atomic.
        return found or self.channels.setdefault((source, target), _QueueChannel(source, target, self.monitor))


def run(jobs: Sequence[DeviceJob], *, timeout_seconds: float) -> EngineOutcome:
    """Run all jobs on threads, return their outcome, and release all resources in any case."""
    end = monotonic() + timeout_seconds
    monitor = Monitor(live={job.device for job in jobs})
    channels: dict[tuple[int, int], _QueueChannel] = {}
    host = _QueueLinks(HOST, monitor, channels)
    for job in jobs:
        for number, packet in enumerate(job.packets):
            host.to_device(job.device).send(packet, make_heading("packet", call=number))
    results: dict[int, Any] = {}
    threads = {
        job.device: threading.Thread(
            # The caller's context variables, which a forked process would have as well.
            target=contextvars.copy_context().run,
            args=(_run_device, job, _QueueLinks(job.device, monitor, channels), results),
            name=f"virtual-device-{job.device}",
            daemon=True,
        )
        for job in jobs
    }
    with _limit_torch_threads():
        try:
            for thread in threads.values():
                thread.start()
            _wait(monitor, threads, end, timeout_seconds)
        finally:
            with monitor.lock:
                monitor.stop()
            _join_threads(monitor, threads)
    returned = tuple(
        tuple(end.receive(make_heading("return", call=number)) for number in range(len(end.arrays)))
        for end in (host.from_device(job.device) for job in jobs)
    )
    return EngineOutcome(
        tuple(results[job.device] for job in jobs),
        returned,
        {ends: channel.sent for ends, channel in channels.items() if channel.sent.messages},
        {ends: channel.received for ends, channel in channels.items() if channel.received.messages},
    )


def _run_device(job: DeviceJob, links: _QueueLinks, results: dict[int, Any]) -> None:
    """Run a device from beginning to end, unless the run is already over, as on a busy machine."""
    monitor, torch, error = links.monitor, sys.modules.get("torch"), None
    with monitor.lock:
        is_over = monitor.is_over
        if torch is not None and not is_over:  # after the run, the caller's own number is restored
            torch.set_num_threads(1)
    try:
        if not is_over:
            results[job.device] = job.body(links)
    except _DeviceStoppedError:
        pass
    except BaseException as raised:
        error = raised
    monitor.leave(job.device, error)


def _wait(monitor: Monitor, threads: dict[int, threading.Thread], end: float, timeout_seconds: float) -> None:
    """Wait until all devices have ended; raise the error that ends the run otherwise."""
    with monitor.lock:
        waker = monitor.waker(HOST)
        while monitor.live and not monitor.is_over:
            if not waker.wait(max(0.0, end - monotonic())) and monotonic() >= end:
                break
        failures, stuck = list(monitor.failures), monitor.stuck
        waits = monitor.describe_waits()
        busy = sorted(monitor.live - waits.keys())
    if failures:
        raise join_failures([make_failure(device, error) for device, error in failures]) from failures[0][1]
    if stuck is not None:
        raise make_deadlock_error(stuck)
    if monitor.live:
        error = make_timeout_error(busy, waits, timeout_seconds)
        frames = sys._current_frames()
        for device in busy[:8]:
            frame = frames.get(threads[device].ident or 0)
            if frame is not None:
                error.add_note(f"stack of device {device}:\n{''.join(traceback.format_stack(frame)).rstrip()}")
        raise error


def _join_threads(monitor: Monitor, threads: dict[int, threading.Thread]) -> None:
    """Wait for threads that are about to end; a computing or sleeping one may never end."""
    begun = monotonic()
    for thread in filter(threading.Thread.is_alive, threads.values()):
        thread.join(max(0.0, begun + _GRACE_SECONDS - monotonic()))
    for device, thread in threads.items():
        if thread.is_alive() and device not in monitor.live:  # on a busy machine, it has not exited yet
            thread.join(max(0.0, begun + _EXIT_SECONDS - monotonic()))
    # After `join` returns, C libraries still clean up after the thread under their own locks (MKL under a spin lock). A
    # fork at that moment, such as the process engine's, would leave the lock locked in the child forever: so wait until
    # the kernel has removed the joined threads.
    end = monotonic() + _EXIT_SECONDS
    for thread in [thread for thread in threads.values() if not thread.is_alive()]:
        while thread.native_id and os.path.exists(f"/proc/self/task/{thread.native_id}") and monotonic() < end:
            sleep(0.0002)


_torch_lock = threading.Lock()
_torch_runs = [0, 0]
"""Number of runs that limit torch to one thread, and the number of threads to restore."""


@contextmanager
def _limit_torch_threads() -> Iterator[None]:
    """Limit torch to one thread, as in the processes, because the number of threads changes how sums are split."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with _torch_lock:
        if not _torch_runs[0]:
            _torch_runs[1] = torch.get_num_threads()
        _torch_runs[0] += 1
    try:
        yield
    finally:
        with _torch_lock:
            _torch_runs[0] -= 1
            if not _torch_runs[0]:
                torch.set_num_threads(_torch_runs[1])
