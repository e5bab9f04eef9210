"""Deferred signals: an exception between a fork and the record of its pid would leave an unknown process."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import math
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, Self

from xrank.errors import RankFailedError, RankTimeoutError, UsageError
from xrank.virtual.arrays import Array
from xrank.virtual.channels import HOST, ChannelStatistics, make_heading
from xrank.virtual.engine import (
    EngineOutcome,
    Job,
    describe_wait,
    join_failures,
    make_deadlock_error,
    make_failure,
    make_timeout_error,
)
from xrank.virtual.shared_channels import Segment, SharedChannel, SharedLinks, Wait, num_sent
from xrank.virtual.stacks import StackRequest, collect_stacks, state_of


class DeferredSignals:
    """Defers Python's signal handlers in a ``with`` block, except inside `allow`; runs them at the end.

    Blocking the signals would not suffice: the kernel would deliver them to another thread, and Python would still run
    the handlers in the main thread. In other threads no handler runs, so there is nothing to defer.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._pending: list[int] = []
        self._are_held = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in signal.valid_signals():
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, self._take)
            except BaseException:  # from a handler that was not deferred yet
                self.__exit__()
                raise
        return self

    def __exit__(self, *args: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for number in self._pending:
            self._handlers[number](number, None)

    @contextlib.contextmanager
    def allow(self) -> Iterator[None]:
        """Run handlers immediately, until one of them raises."""
        try:
            self._release()
            yield
        finally:
            self._are_held = True

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._are_held:
            self._pending.append(number)
            return
        # If the handler raises, later signals must not interrupt the cleanup.
        self._are_held = True
        self._handlers[number](number, frame)
        self._release()

    def _release(self) -> None:
        """Run the pending handlers, then stop deferring unless a handler raises."""
        self._are_held = False
        while self._pending:
            self._are_held = True
            while self._pending:  # a signal between the two lines above may have emptied it
                number = self._pending.pop(0)
                self._handlers[number](number, None)
            self._are_held = False


_PR_SET_PDEATHSIG = 1
_NO_MESSAGE_STATUS = 70


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A device's process, as its parent sees it."""

    device: int
    pid: int
    pidfd: int
    stacks: int
    """Pipe to which the process writes its threads' stacks on a signal."""

    def death(self) -> RankFailedError:
        """Return the error for a process that ended without a message."""
        how = self._status()
        return RankFailedError(
            f"device {self.device} died: {how}",
            rank=self.device,
            host=socket.gethostname(),
            pid=self.pid,
            cause=how,
            next_step="let devices end by returning or raising; a killed device may have run out of memory",
        )

    def _status(self) -> str:
        try:
            info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return "of unknown cause, because this program's own SIGCHLD handling hides it"
        assert info is not None
        if info.si_code == os.CLD_EXITED:
            return f"exit status {info.si_status}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(info.si_status).name}"
        return f"killed by signal {info.si_status}"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process."""
        return state_of(self.pid) in ("T", "t")

    def ask_for_stacks(self) -> None:
        """Signal the process to write its threads' stacks."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """The last message of a device that succeeded: its body's return value and its channels' counts."""

    result: object
    sent: dict[int, tuple[int, int]]
    """(messages, bytes) by target."""
    received: dict[int, tuple[int, int]]
    """(messages, bytes) by source."""


@dataclass(frozen=True, slots=True)
class DeviceFailure:
    """The last message of a device whose body raised; always picklable."""

    raised_at: float
    """Seconds on the host's monotonic clock, which orders the failures of all processes."""
    error: RankFailedError
    """The error for the caller."""
    cause: bytes | None
    """The body's exception, pickled; None if it cannot be pickled."""

    @classmethod
    def from_exception(cls, error: BaseException, device: int) -> DeviceFailure:
        """Describe an exception, on the device that raised it."""
        raised_at = time.monotonic()
        cause = None
        # Pickling runs the user's code, which may raise anything.
        with contextlib.suppress(Exception):
            cause = pickle.dumps(error)
        # The failure has the exception's text and stack, so the host can show both without unpickling it.
        return cls(raised_at, make_failure(device, error, pid=os.getpid()), cause)

    def to_error(self) -> RankFailedError:
        """Return the caller's error, with the original exception as its cause if that could be pickled."""
        if self.cause is not None:
            with contextlib.suppress(Exception):
                self.error.__cause__ = pickle.loads(self.cause)  # noqa: S301 - from our own process
        return self.error


def start_device(job: Job, segment: Segment, bells: Sequence[int], devices: Sequence[int]) -> DeviceProcess:
    """Fork a device while signals are deferred; it sends the host a `DeviceResult` or `DeviceFailure`."""
    for stream in (sys.stdout, sys.stderr):
        # The child would print the buffers' content a second time.
        with contextlib.suppress(Exception):
            stream.flush()
    parent = os.getpid()
    libc = ctypes.CDLL(None)
    stacks, stacks_there = os.pipe()
    try:
        with warnings.catch_warnings():
            # Python 3.12 and later warn if other threads exist; the module's docstring describes the risk.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                _prepare_child(libc, parent, stacks_there)
                _run_device(job, SharedLinks(segment, bells, devices, job.device))
            except BaseException:
                # Not even the error could be sent.
                traceback.print_exc()
                _flush()
            finally:
                os._exit(_NO_MESSAGE_STATUS)
    except BaseException:
        os.close(stacks)
        raise
    finally:
        os.close(stacks_there)
    # Parent and child both do this; the first one succeeds.
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    try:
        return DeviceProcess(job.device, pid, os.pidfd_open(pid), stacks)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(stacks)
        raise


def _prepare_child(libc: ctypes.CDLL, parent: int, stacks: int) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have died before prctl; then no signal will come.
    if os.getppid() != parent:
        os._exit(_NO_MESSAGE_STATUS)
    # Killing the device's own process group also kills its children, and Ctrl-C reaches only the parent.
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    # The descriptor is shared with the parent: a signal here would wake the parent's event loop.
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # Finalizers of the parent's objects must run in the parent only.
    gc.freeze()
    sys.stdin = open(os.devnull)  # noqa: SIM115 - open until the process exits
    if "torch" in sys.modules:
        import torch

        # First of all: torch would otherwise wait for the parent's threads, which do not exist here.
        torch.set_num_threads(1)


def _run_device(job: Job, links: SharedLinks) -> NoReturn:
    pid = os.getpid()
    try:
        try:
            result = job.body(links)
        finally:
            # A process that the body forked must not return from it and send a second result.
            if os.getpid() != pid:
                os._exit(0)
        finished = DeviceResult(
            result,
            {
                device: (end.sent.messages, end.sent.nbytes)
                for device, end in links.outgoing.items()
                if end.sent.messages
            },
            {
                device: (end.received.messages, end.received.nbytes)
                for device, end in links.incoming.items()
                if end.received.messages
            },
        )
        _flush()
        try:
            links.to_host.send_object(finished)
        except Exception as error:
            raise UsageError(
                f"the return value of device {job.device} cannot be sent to the host: {error}",
                rank=job.device,
                got=f"a {type(result).__module__}.{type(result).__qualname__}",
                want="arrays, numbers, texts, or other picklable objects",
                next_step="return less, or arrays alone",
            ) from error
    # exit() in the body ends the process with that status, and the host reports a dead device, as for real ranks.
    except SystemExit as error:
        _flush()
        os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException as error:
        _flush()
        links.to_host.send_object(DeviceFailure.from_exception(error, job.device))
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def read_device_stacks(processes: Sequence[DeviceProcess]) -> dict[int, str]:
    """Return the stacks of each device's threads; the handler is in C, so it works inside any Python call."""
    found = {process.device: "(it is stopped by a signal)" for process in processes if process.is_stopped}
    processes = [process for process in processes if process.device not in found]
    stacks = collect_stacks(
        [StackRequest(process.pid, process.stacks, process.ask_for_stacks) for process in processes]
    )
    for process, text in zip(processes, stacks, strict=True):
        found[process.device] = text or "(it does not react: it is inside the kernel)"
    return found


def kill_all(processes: Sequence[DeviceProcess]) -> None:
    """Kill the processes and their children, wait until they have ended, and close their descriptors."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # The group reaches the device's children; it is missing until one side has called setpgid.
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
    for process in processes:
        # A SIGCHLD handler of the program may have waited for it already.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, 0)
        os.close(process.pidfd)
        os.close(process.stacks)


def find_waits(links: SharedLinks, devices: Collection[int]) -> dict[int, Wait]:
    """Return the waits of those devices whose awaited message was not sent yet.

    Args:
        links: the host's links.
        devices: devices that have not finished.
    """
    waits: dict[int, Wait] = {}
    for device in devices:
        end = links.end_of(device)
        wait = links.board.read(end)
        if wait is not None and num_sent(links.segment, links.segment.ring(wait.source, end)) == wait.num_taken:
            waits[device] = wait
    return waits


def find_deadlock(links: SharedLinks, devices: Sequence[int], running: Collection[int]) -> dict[int, str]:
    """Return the devices whose awaited message can never be sent, each with a description of its wait.

    Args:
        links: the host's links; the host sends no more messages.
        devices: all devices, in the order of their ends.
        running: the devices that have not finished.
    """
    names = (*devices, HOST)
    waits = find_waits(links, running)
    # Remove devices that wait for a free one, directly or through others; the rest can never continue.
    while True:
        free = {device for device in running if device not in waits}
        hopeful = {device for device, wait in waits.items() if names[wait.source] in free}
        if not hopeful:
            break
        waits = {device: wait for device, wait in waits.items() if device not in hopeful}
    # The board is read device by device. A wait that kept its number lasted throughout, so all these waits coincided.
    again = find_waits(links, waits)
    if any(device not in again or again[device].turn != wait.turn for device, wait in waits.items()):
        return {}
    return describe_waits(devices, running, waits)


def describe_waits(devices: Sequence[int], running: Collection[int], waits: dict[int, Wait]) -> dict[int, str]:
    """Describe waits for the errors of `xrank.virtual.engine`."""
    names = (*devices, HOST)
    now = time.monotonic()
    return {
        device: describe_wait(
            names[wait.source], running, f"{wait.heading or 'an object'}, since {now - wait.since:.1f} s"
        )
        for device, wait in sorted(waits.items())
    }


MAX_DEVICES = 256
"""Each device takes three file descriptors of the host, and 10 MB or more of memory."""

_LOOK_SECONDS = 0.1
"""Interval of the host's deadlock checks while nothing happens."""


def run(jobs: Sequence[Job], *, timeout_seconds: float) -> EngineOutcome:
    """Run each job in its own process; see `xrank.virtual.engine.Engine`.

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
