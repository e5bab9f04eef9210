"""The engine of processes: a process for each device, channels of shared memory, and a host that watches them all.

The host looks at what devices send, at their ends, and at the clock, all in one wait. The first that fails or ends
without a word ends the run; so does a circle of devices that wait for each other, and the deadline. Whatever happened,
no process, file, descriptor or memory is left when `run` returns or raises.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Sequence

from xrank.errors import RankTimeoutError, UsageError
from xrank.virtual.channels.channel import HOST, Array, ChannelStatistics, heading_of
from xrank.virtual.channels.segment import Segment
from xrank.virtual.channels.shared_channel import SharedChannel, SharedLinks
from xrank.virtual.engines.device_process import DeviceProcess, Failed, Finished, end_all, stacks_of, start
from xrank.virtual.engines.engine import Job, Outcome
from xrank.virtual.engines.failures import all_wait, failed, late, with_all
from xrank.virtual.engines.held_signals import HeldSignals
from xrank.virtual.engines.watch import find_deadlock, told, waits_of

__all__ = ["MAX_DEVICES", "run"]

MAX_DEVICES = 256
"""Each takes three descriptors of the host, and 10 MB or more."""

_LOOK_SECONDS = 0.1
"""How often the host looks for a circle of waits while nothing happens."""


def run(jobs: Sequence[Job], *, timeout_seconds: float) -> Outcome:
    """Run all jobs, each in a process of its own; see `xrank.virtual.engines.engine.Engine`.

    Raises:
        RankFailedError: a device raised or ended; the first, with all that are known in ``failures``.
        RankTimeoutError: the time is over, and ``waiting_for`` are those that wait for nobody; or devices wait for what
            nobody will send, and ``waiting_for`` are these.
        UsageError: this system cannot do it, or there are too many devices.
    """
    if len(jobs) > MAX_DEVICES:
        raise UsageError(
            f"{len(jobs)} devices are too many processes",
            got=str(len(jobs)),
            want=f"at most {MAX_DEVICES}",
            next_step='give engine="in-process", or count with xrank.virtual.plan',
        )
    deadline = time.monotonic() + timeout_seconds
    devices = tuple(job.device for job in jobs)
    bells: list[int] = []
    processes: list[DeviceProcess] = []
    with HeldSignals() as signals:
        segment = Segment(len(devices) + 1)
        try:
            bells.extend(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(len(devices) + 1))
            for job in jobs:
                # One by one: when the next cannot be started, those before it are known.
                processes.append(start(job, segment, bells, devices))  # noqa: PERF401
            with signals.released():
                links = SharedLinks(segment, bells, devices, HOST)
                for job in jobs:
                    channel = links.to_device(job.device)
                    for number, packet in enumerate(job.packets):
                        channel.send(packet, heading_of("packet", call=number))
                return _Host(links, processes, timeout_seconds, deadline).collect()
        finally:
            end_all(processes)
            for bell in bells:
                os.close(bell)
            segment.close()


class _Host:
    """Collects what devices send until all have finished, or one has not."""

    def __init__(
        self, links: SharedLinks, processes: Sequence[DeviceProcess], timeout_seconds: float, deadline: float
    ) -> None:
        self._links = links
        self._processes = {process.device: process for process in processes}
        self._timeout_seconds, self._deadline = timeout_seconds, deadline
        self._running = set(self._processes)
        self._returned: dict[int, list[Array]] = {device: [] for device in self._processes}
        self._finished: dict[int, Finished] = {}
        self._failed: list[Failed] = []
        self._poll = select.poll()
        self._poll.register(links.bell, select.POLLIN)
        self._by_pidfd = {process.pidfd: process for process in processes}
        for pidfd in self._by_pidfd:
            self._poll.register(pidfd, select.POLLIN)

    def collect(self) -> Outcome:
        while self._running:
            left = self._deadline - time.monotonic()
            ready = self._poll.poll(1000 * max(0.0, min(left, _LOOK_SECONDS)))
            self._links.hush()
            # Ends first: what an ended process sent has all come.
            ended = [self._by_pidfd[fd] for fd, _ in ready if fd in self._by_pidfd]
            for device in tuple(self._running):
                # One that sends for ever must not keep the host from its clock; one that has ended does not.
                has_ended = any(process.device == device for process in ended)
                self._take(device, math.inf if has_ended else self._deadline)
            if self._failed:
                raise with_all([word.to_error() for word in sorted(self._failed, key=lambda word: word.raised_at)])
            if died := [process for process in ended if process.device in self._running]:
                raise with_all([process.death() for process in died])
            for process in ended:
                self._poll.unregister(process.pidfd)
            if self._running:
                self._look(is_quiet=not ready)
        return self._outcome()

    def _take(self, device: int, deadline: float) -> None:
        channel = self._links.from_device(device)
        while device in self._running and time.monotonic() < deadline and self._collects(channel):
            if channel.has_array:
                returned = self._returned[device]
                returned.append(channel.receive(heading_of("return", call=len(returned))))
                continue
            word = channel.receive_object()
            self._running.discard(device)
            if isinstance(word, Failed):
                self._failed.append(word)
            else:
                self._finished[device] = word

    def _collects(self, channel: SharedChannel) -> bool:
        try:
            return channel.collect()
        except Exception as error:  # an object of the user's that cannot be made again
            failure = failed(channel.source, error, pid=self._processes[channel.source].pid)
            failure.__cause__ = error
            self._running.discard(channel.source)
            self._failed.append(Failed(time.monotonic(), failure, cause=None))
            return False

    def _look(self, *, is_quiet: bool) -> None:
        devices = tuple(self._processes)
        if is_quiet and (waits := find_deadlock(self._links, devices, self._running)):
            raise all_wait(waits, others_work=len(waits) < len(self._running))
        if time.monotonic() >= self._deadline:
            raise self._hang(devices)

    def _hang(self, devices: Sequence[int]) -> RankTimeoutError:
        waits = waits_of(self._links, self._running)
        stuck = [self._processes[device] for device in sorted(self._running - set(waits))]
        error = late(
            [process.device for process in stuck],
            told(devices, self._running, waits),
            self._timeout_seconds,
        )
        for device, stacks in stacks_of(stuck).items():
            error.add_note(f"device {device} stands here:\n{stacks}")
        return error

    def _outcome(self) -> Outcome:
        sent = {(HOST, device): end.sent for device, end in self._links.outgoing.items() if end.sent.messages}
        received = {
            (device, HOST): end.received for device, end in self._links.incoming.items() if end.received.messages
        }
        for device, finished in self._finished.items():
            sent |= {(device, target): ChannelStatistics(*counts) for target, counts in finished.sent.items()}
            received |= {(source, device): ChannelStatistics(*counts) for source, counts in finished.received.items()}
        return Outcome(
            results=tuple(self._finished[device].result for device in self._processes),
            returned=tuple(tuple(self._returned[device]) for device in self._processes),
            sent=sent,
            received=received,
        )
