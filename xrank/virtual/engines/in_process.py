"""The engine without processes: every device is a thread of the caller's process, every channel a queue.

It gives what the engine of processes gives, bit by bit, starts at once, and can be followed in a debugger. Python runs
one thread at a time, so it is no measure of speed. A thread cannot be killed: after a failure or at the deadline the
devices that wait end at once, one that computes or sleeps is left to itself (it ends with the process at the latest).
What a function reaches beside its arguments is shared by all devices, where processes have copies.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, NamedTuple

from xrank.virtual.arrays import copy_of
from xrank.virtual.channels.channel import (
    HOST,
    Array,
    ChannelStatistics,
    Heading,
    VirtualChannel,
    heading_of,
)
from xrank.virtual.engines.engine import Counts, Job, Outcome
from xrank.virtual.engines.failures import all_wait, awaited, failed, late, with_all

__all__ = ["QueueChannel", "Room", "run"]

_GRACE_SECONDS = 0.5
"""For threads that are about to end anyway, once the outcome is known."""

_EXIT_SECONDS = 5.0
"""For threads that have nothing more to do, until the operating system has ended them."""


class _StoppedError(BaseException):
    """Ends the thread of a device that waits, when another has failed; no ``except Exception`` holds it up."""


class _Wait(NamedTuple):
    queue: deque[Any]
    source: int
    what: object


@dataclass(slots=True)
class Room:
    """Where the threads of one run wait for each other: one lock, and what each of them waits for."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    live: set[int] = field(default_factory=set)
    """Devices that have not ended."""
    waits: dict[int, _Wait] = field(default_factory=dict)
    """What each device that waits does wait for; whoever fills its queue takes it out."""
    failures: list[tuple[int, BaseException]] = field(default_factory=list)
    stuck: dict[int, str] | None = None
    """Who waited for what, when nobody was left who could go on."""
    is_over: bool = False
    wakers: dict[int, threading.Condition] = field(default_factory=dict)

    def waker(self, device: int) -> threading.Condition:
        """Return the condition on which a device, or the host, waits."""
        if device not in self.wakers:
            self.wakers[device] = threading.Condition(self.lock)
        return self.wakers[device]

    def fill(self, queue: deque[Any], value: Any, target: int) -> None:
        """Put a value into a queue, and wake the device that waits for it."""
        with self.lock:
            queue.append(value)
            waiting = self.waits.get(target)
            if waiting is not None and waiting.queue is queue:
                del self.waits[target]
                self.waker(target).notify()

    def drain(self, queue: deque[Any], device: int, source: int, what: object) -> Any:
        """Return the next value of a queue, waiting for it."""
        with self.lock:
            while not queue:
                self.waits[device] = _Wait(queue, source, what)
                self.look_for_the_end()
                while device in self.waits and not self.is_over:
                    self.waker(device).wait()
                if self.is_over:
                    raise _StoppedError
            return queue.popleft()

    def leave(self, device: int, error: BaseException | None) -> None:
        """Note that a device has ended, and how."""
        with self.lock:
            self.live.discard(device)
            self.waits.pop(device, None)
            if error is not None:
                self.failures.append((device, error))
                self.stop()
            elif not self.live:
                self.waker(HOST).notify()
            else:
                self.look_for_the_end()

    def look_for_the_end(self) -> None:
        """Stop all if nobody is left who could go on; called with the lock held."""
        if not self.is_over and self.live <= self.waits.keys():
            self.stuck = self.reasons()
            self.stop()

    def reasons(self) -> dict[int, str]:
        """Return what each device that waits does wait for, in words; called with the lock held."""
        return {d: awaited(wait.source, self.live, str(wait.what)) for d, wait in sorted(self.waits.items())}

    def stop(self) -> None:
        """Let no thread wait any longer; called with the lock held."""
        self.is_over = True
        for waker in self.wakers.values():
            waker.notify_all()


class QueueChannel(VirtualChannel):
    """A channel between two threads of one process.

    Args:
        source: the device that sends, or `HOST`.
        target: the device that receives, or `HOST`.
        room: where the receiver waits.
    """

    def __init__(self, source: int, target: int, room: Room) -> None:
        super().__init__(source, target)
        self.room = room
        self.arrays: deque[tuple[Heading, Array]] = deque()
        self.objects: deque[Any] = deque()

    def put(self, array: Array, heading: Heading) -> None:
        """Send a copy."""
        self.room.fill(self.arrays, (heading, copy_of(array)), self.target)

    def take(self, heading: Heading) -> tuple[Heading, Array]:
        """Receive."""
        taken: tuple[Heading, Array] = self.room.drain(self.arrays, self.target, self.source, heading)
        return taken

    def send_object(self, value: Any) -> None:
        """Send the object itself: its sender has no more use for it."""
        self.room.fill(self.objects, value, self.target)

    def receive_object(self) -> Any:
        """Receive."""
        return self.room.drain(self.objects, self.target, self.source, "an object")


@dataclass(slots=True)
class QueueLinks:
    """The channels of one device; those between devices are made when one of both first asks."""

    device: int
    room: Room
    from_host: QueueChannel
    to_host: QueueChannel
    between: dict[tuple[int, int], QueueChannel]
    """Of all devices."""

    def to_device(self, device: int) -> QueueChannel:
        """Return the channel to another device."""
        return self._channel(self.device, device)

    def from_device(self, device: int) -> QueueChannel:
        """Return the channel from another device."""
        return self._channel(device, self.device)

    def _channel(self, source: int, target: int) -> QueueChannel:
        found = self.between.get((source, target))
        # One of two that ask at once is kept, by a step that Python does not interrupt.
        return found or self.between.setdefault((source, target), QueueChannel(source, target, self.room))


def run(jobs: Sequence[Job], *, timeout_seconds: float) -> Outcome:
    """Run jobs on threads, as `engine.Engine` promises."""
    end = monotonic() + timeout_seconds
    room = Room(live={job.device for job in jobs})
    between: dict[tuple[int, int], QueueChannel] = {}
    links = [
        QueueLinks(d, room, QueueChannel(HOST, d, room), QueueChannel(d, HOST, room), between)
        for d in (job.device for job in jobs)
    ]
    for job, link in zip(jobs, links, strict=True):
        for number, packet in enumerate(job.packets):
            link.from_host.send(packet, heading_of("packet", call=number))
    results: dict[int, Any] = {}
    threads = {
        job.device: threading.Thread(
            target=contextvars.copy_context().run,
            args=(_live, job, link, results),
            name=f"virtual-device-{job.device}",
            daemon=True,
        )
        for job, link in zip(jobs, links, strict=True)
    }
    with _one_torch_thread():
        try:
            for thread in threads.values():
                thread.start()
            _wait(room, threads, end, timeout_seconds)
        finally:
            with room.lock:
                room.stop()
            _let_end(room, threads)
    channels = [*between.values(), *(link.from_host for link in links), *(link.to_host for link in links)]
    returned = tuple(
        tuple(link.to_host.receive(heading_of("return", call=number)) for number in range(job.num_returned))
        for job, link in zip(jobs, links, strict=True)
    )
    return Outcome(
        tuple(results[job.device] for job in jobs),
        returned,
        _counts((channel, channel.sent) for channel in channels),
        _counts((channel, channel.received) for channel in channels),
    )


def _live(job: Job, links: QueueLinks, results: dict[int, Any]) -> None:
    """Be a device, from beginning to end."""
    error: BaseException | None = None
    try:
        if _begins(links.room):
            results[job.device] = job.body(links)
    except _StoppedError:
        pass
    except BaseException as raised:
        error = raised
    links.room.leave(job.device, error)


def _begins(room: Room) -> bool:
    """Let this thread compute as a device does, unless a busy machine has started it when the run was over."""
    torch = sys.modules.get("torch")
    with room.lock:
        if torch is not None and not room.is_over:  # then the caller gets its own number of threads back, to keep
            torch.set_num_threads(1)
        return not room.is_over


def _wait(room: Room, threads: dict[int, threading.Thread], end: float, timeout_seconds: float) -> None:
    """Wait until all devices have ended; raise what ends the run otherwise."""
    with room.lock:
        waker = room.waker(HOST)
        while room.live and not room.is_over:
            if not waker.wait(max(0.0, end - monotonic())) and monotonic() >= end:
                break
        failures, stuck = list(room.failures), room.stuck
        waits = room.reasons()
        busy = sorted(room.live - waits.keys())
    if failures:
        raise with_all([failed(device, error) for device, error in failures]) from failures[0][1]
    if stuck is not None:
        raise all_wait(stuck)
    if room.live:
        error = late(busy, waits, timeout_seconds)
        frames = sys._current_frames()
        for device in busy[:8]:
            frame = frames.get(threads[device].ident or 0)
            if frame is not None:
                error.add_note(f"device {device} stands at:\n{''.join(traceback.format_stack(frame)).rstrip()}")
        raise error


def _let_end(room: Room, threads: dict[int, threading.Thread]) -> None:
    """Wait for the threads that end by themselves; one that computes or sleeps may do so for ever."""
    begun = monotonic()
    for thread in filter(threading.Thread.is_alive, threads.values()):
        thread.join(max(0.0, begun + _GRACE_SECONDS - monotonic()))
    for device, thread in threads.items():
        if thread.is_alive() and device not in room.live:  # a busy machine has not let it run
            thread.join(max(0.0, begun + _EXIT_SECONDS - monotonic()))
    _wait_for_exits([thread for thread in threads.values() if not thread.is_alive()])


def _wait_for_exits(threads: Sequence[threading.Thread]) -> None:
    """Wait until threads that Python has done with are gone.

    When `join` returns, C libraries still clean up after the thread, under locks of their own (MKL under a spin lock).
    A fork at that moment, such as the other engine's, has the lock held for ever in the child.
    """
    end = monotonic() + _EXIT_SECONDS
    for thread in threads:
        while thread.native_id and os.path.exists(f"/proc/self/task/{thread.native_id}") and monotonic() < end:
            sleep(0.0002)


def _counts(pairs: Iterator[tuple[VirtualChannel, ChannelStatistics]]) -> Counts:
    return {(channel.source, channel.target): count for channel, count in pairs if count.messages}


_torch_lock = threading.Lock()
_torch_runs = [0, 0]
"""How many runs keep torch at one thread, and the number of threads to go back to."""


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Have torch compute with one thread, as the processes do: sums are otherwise cut differently."""
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
