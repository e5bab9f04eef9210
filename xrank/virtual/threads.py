"""The engine without processes: each device is a thread of the caller's process, each channel a queue.

Its results equal those of the process engine bit by bit; it starts at once and works in a debugger. Python runs one
thread at a time, so its speed is not meaningful. A thread cannot be killed: after a failure or a timeout, waiting
devices end at once, but a computing or sleeping one continues (until the process exits at the latest). Devices share
all objects that a function reaches other than its arguments, where processes have copies.
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

from xrank.virtual.arrays import Array, copy_of
from xrank.virtual.channels import HOST, ChannelStatistics, Heading, VirtualChannel, make_heading
from xrank.virtual.engine import (
    Counts,
    DeviceJob,
    EngineOutcome,
    describe_wait,
    join_failures,
    make_deadlock_error,
    make_failure,
    make_timeout_error,
)

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
        """Record that a device has ended, and its error."""
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


class QueueChannel(VirtualChannel):
    """A channel between two threads of one process.

    Args:
        source: the sending device, or `HOST`.
        target: the receiving device, or `HOST`.
        monitor: the monitor in which the receiver waits.
    """

    def __init__(self, source: int, target: int, monitor: Monitor) -> None:
        super().__init__(source, target)
        self.monitor = monitor
        self.arrays: deque[tuple[Heading, Array]] = deque()

    def put(self, array: Array, heading: Heading) -> None:
        """Send a copy of the array."""
        self.monitor.fill(self.arrays, (heading, copy_of(array)), self.target)

    def take(self, heading: Heading) -> tuple[Heading, Array]:
        """Wait for the next array."""
        taken: tuple[Heading, Array] = self.monitor.drain(self.arrays, self.target, self.source, heading)
        return taken


@dataclass(slots=True)
class QueueLinks:
    """The channels of one device; a channel between devices is created at its first use by either side."""

    device: int
    monitor: Monitor
    from_host: QueueChannel
    to_host: QueueChannel
    between: dict[tuple[int, int], QueueChannel]
    """Channels between devices, shared by the links of all devices."""

    def to_device(self, device: int) -> QueueChannel:
        """Return the channel to another device."""
        return self._channel(self.device, device)

    def from_device(self, device: int) -> QueueChannel:
        """Return the channel from another device."""
        return self._channel(device, self.device)

    def _channel(self, source: int, target: int) -> QueueChannel:
        found = self.between.get((source, target))
        # If both devices create the channel at once, one wins: setdefault is atomic.
        return found or self.between.setdefault((source, target), QueueChannel(source, target, self.monitor))


def run(jobs: Sequence[DeviceJob], *, timeout_seconds: float) -> EngineOutcome:
    """Run jobs on threads, with the contract of `engine.Engine`."""
    end = monotonic() + timeout_seconds
    monitor = Monitor(live={job.device for job in jobs})
    between: dict[tuple[int, int], QueueChannel] = {}
    links = [
        QueueLinks(d, monitor, QueueChannel(HOST, d, monitor), QueueChannel(d, HOST, monitor), between)
        for d in (job.device for job in jobs)
    ]
    for job, link in zip(jobs, links, strict=True):
        for number, packet in enumerate(job.packets):
            link.from_host.send(packet, make_heading("packet", call=number))
    results: dict[int, Any] = {}
    threads = {
        job.device: threading.Thread(
            # The caller's context variables, which a forked process would have as well.
            target=contextvars.copy_context().run,
            args=(_run_device, job, link, results),
            name=f"virtual-device-{job.device}",
            daemon=True,
        )
        for job, link in zip(jobs, links, strict=True)
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
    channels = [*between.values(), *(link.from_host for link in links), *(link.to_host for link in links)]
    returned = tuple(
        tuple(link.to_host.receive(make_heading("return", call=number)) for number in range(job.num_returned))
        for job, link in zip(jobs, links, strict=True)
    )
    return EngineOutcome(
        tuple(results[job.device] for job in jobs),
        returned,
        _counts((channel, channel.sent) for channel in channels),
        _counts((channel, channel.received) for channel in channels),
    )


def _run_device(job: DeviceJob, links: QueueLinks, results: dict[int, Any]) -> None:
    """Run a device from beginning to end."""
    error: BaseException | None = None
    try:
        if _may_begin(links.monitor):
            results[job.device] = job.body(links)
    except _DeviceStoppedError:
        pass
    except BaseException as raised:
        error = raised
    links.monitor.leave(job.device, error)


def _may_begin(monitor: Monitor) -> bool:
    """Limit this thread's torch threads; return False if the run is already over, as on a busy machine."""
    torch = sys.modules.get("torch")
    with monitor.lock:
        if torch is not None and not monitor.is_over:  # after the run, the caller's own number is restored
            torch.set_num_threads(1)
        return not monitor.is_over


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
    _wait_for_exits([thread for thread in threads.values() if not thread.is_alive()])


def _wait_for_exits(threads: Sequence[threading.Thread]) -> None:
    """Wait until the kernel has removed threads that Python has joined.

    After `join` returns, C libraries still clean up after the thread under their own locks (MKL under a spin lock). A
    fork at that moment, such as the process engine's, would leave the lock locked in the child forever.
    """
    end = monotonic() + _EXIT_SECONDS
    for thread in threads:
        while thread.native_id and os.path.exists(f"/proc/self/task/{thread.native_id}") and monotonic() < end:
            sleep(0.0002)


def _counts(pairs: Iterator[tuple[VirtualChannel, ChannelStatistics]]) -> Counts:
    return {(channel.source, channel.target): count for channel, count in pairs if count.messages}


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
