"""The process engine: one process per device, channels in shared memory, and a host that monitors all of them.

The host polls the devices' messages, their exits and the clock in one wait. The run ends at the first device that fails
or dies, at a deadlock, and at the time limit. In every case, `run` leaves no process, file or memory behind.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Sequence

from xrank.errors import RankTimeoutError, UsageError
from xrank.virtual.channels.channel import HOST, Array, ChannelStatistics, make_heading
from xrank.virtual.channels.segment import Segment
from xrank.virtual.channels.shared_channel import SharedChannel, SharedLinks
from xrank.virtual.engines.deferred_signals import DeferredSignals
from xrank.virtual.engines.device_process import (
    DeviceFailure,
    DeviceProcess,
    DeviceResult,
    kill_all,
    read_device_stacks,
    start_device,
)
from xrank.virtual.engines.engine import EngineOutcome, Job
from xrank.virtual.engines.failures import join_failures, make_deadlock_error, make_failure, make_timeout_error
from xrank.virtual.engines.watch import describe_waits, find_deadlock, find_waits

MAX_DEVICES = 256
"""Each device takes three file descriptors of the host, and 10 MB or more of memory."""

_LOOK_SECONDS = 0.1
"""Interval of the host's deadlock checks while nothing happens."""


def run(jobs: Sequence[Job], *, timeout_seconds: float) -> EngineOutcome:
    """Run each job in its own process; see `xrank.virtual.engines.engine.Engine`.

    Raises:
        RankFailedError: a device raised or died; the first such error, with all known ones in ``failures``.
        RankTimeoutError: the time limit is over, and ``waiting_for`` lists the devices that do not wait; or devices
            wait for messages that no device will send, and ``waiting_for`` lists these devices.
        UsageError: this system lacks a requirement, or there are too many devices.
    """
    if len(jobs) > MAX_DEVICES:
        raise UsageError(
            f"{len(jobs)} devices need too many processes",
            got=str(len(jobs)),
            want=f"at most {MAX_DEVICES}",
            next_step='give engine="in-process", or count with xrank.virtual.plan',
        )
    deadline = time.monotonic() + timeout_seconds
    devices = tuple(job.device for job in jobs)
    bells: list[int] = []
    processes: list[DeviceProcess] = []
    with DeferredSignals() as signals:
        segment = Segment(len(devices) + 1)
        try:
            bells.extend(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(len(devices) + 1))
            for job in jobs:
                # Appended one by one: if a start fails, the cleanup knows the processes before it.
                processes.append(start_device(job, segment, bells, devices))  # noqa: PERF401
            with signals.allow():
                links = SharedLinks(segment, bells, devices, HOST)
                for job in jobs:
                    channel = links.to_device(job.device)
                    for number, packet in enumerate(job.packets):
                        channel.send(packet, make_heading("packet", call=number))
                return _Collector(links, processes, timeout_seconds, deadline).collect()
        finally:
            # After a success as well: children of a device may outlive it. Before the segment is freed, which they use.
            kill_all(processes)
            for bell in bells:
                os.close(bell)
            segment.close()


class _Collector:
    """Collects the devices' messages until all have finished or one has failed."""

    def __init__(
        self, links: SharedLinks, processes: Sequence[DeviceProcess], timeout_seconds: float, deadline: float
    ) -> None:
        self._links = links
        self._processes = {process.device: process for process in processes}
        self._timeout_seconds, self._deadline = timeout_seconds, deadline
        self._running = set(self._processes)
        self._returned: dict[int, list[Array]] = {device: [] for device in self._processes}
        self._finished: dict[int, DeviceResult] = {}
        self._failed: list[DeviceFailure] = []
        self._poll = select.poll()
        self._poll.register(links.bell, select.POLLIN)
        self._by_pidfd = {process.pidfd: process for process in processes}
        for pidfd in self._by_pidfd:
            self._poll.register(pidfd, select.POLLIN)

    def collect(self) -> EngineOutcome:
        while self._running:
            left = self._deadline - time.monotonic()
            ready = self._poll.poll(1000 * max(0.0, min(left, _LOOK_SECONDS)))
            self._links.clear_bell()
            # Ended processes first: all their messages have arrived.
            ended = [self._by_pidfd[fd] for fd, _ in ready if fd in self._by_pidfd]
            for device in tuple(self._running):
                # A device that never stops sending must not keep the host from its clock; an ended one sends no more.
                has_ended = any(process.device == device for process in ended)
                self._take(device, math.inf if has_ended else self._deadline)
            if self._failed:
                raise join_failures([word.to_error() for word in sorted(self._failed, key=lambda word: word.raised_at)])
            if died := [process for process in ended if process.device in self._running]:
                raise join_failures([process.death() for process in died])
            for process in ended:
                self._poll.unregister(process.pidfd)
            if self._running:
                self._check_progress(is_quiet=not ready)
        return self._outcome()

    def _take(self, device: int, deadline: float) -> None:
        channel = self._links.from_device(device)
        while device in self._running and time.monotonic() < deadline and self._try_collect(channel):
            if channel.has_array:
                returned = self._returned[device]
                returned.append(channel.receive(make_heading("return", call=len(returned))))
                continue
            word = channel.receive_object()
            self._running.discard(device)
            if isinstance(word, DeviceFailure):
                self._failed.append(word)
            else:
                self._finished[device] = word

    def _try_collect(self, channel: SharedChannel) -> bool:
        try:
            return channel.collect()
        except Exception as error:  # an object of the user's that cannot be unpickled
            failure = make_failure(channel.source, error, pid=self._processes[channel.source].pid)
            failure.__cause__ = error
            self._running.discard(channel.source)
            self._failed.append(DeviceFailure(time.monotonic(), failure, cause=None))
            return False

    def _check_progress(self, *, is_quiet: bool) -> None:
        devices = tuple(self._processes)
        if is_quiet and (waits := find_deadlock(self._links, devices, self._running)):
            raise make_deadlock_error(waits, others_work=len(waits) < len(self._running))
        if time.monotonic() >= self._deadline:
            raise self._make_hang_error(devices)

    def _make_hang_error(self, devices: Sequence[int]) -> RankTimeoutError:
        waits = find_waits(self._links, self._running)
        stuck = [self._processes[device] for device in sorted(self._running - set(waits))]
        error = make_timeout_error(
            [process.device for process in stuck],
            describe_waits(devices, self._running, waits),
            self._timeout_seconds,
        )
        for device, stacks in read_device_stacks(stuck).items():
            error.add_note(f"stack of device {device}:\n{stacks}")
        return error

    def _outcome(self) -> EngineOutcome:
        sent = {(HOST, device): end.sent for device, end in self._links.outgoing.items() if end.sent.messages}
        received = {
            (device, HOST): end.received for device, end in self._links.incoming.items() if end.received.messages
        }
        for device, finished in self._finished.items():
            sent |= {(device, target): ChannelStatistics(*counts) for target, counts in finished.sent.items()}
            received |= {(source, device): ChannelStatistics(*counts) for source, counts in finished.received.items()}
        return EngineOutcome(
            results=tuple(self._finished[device].result for device in self._processes),
            returned=tuple(tuple(self._returned[device]) for device in self._processes),
            sent=sent,
            received=received,
        )
