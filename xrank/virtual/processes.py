"""The engine of processes: one per device, forked, and a host that monitors all of them.

Devices are forked, so functions and closures need not be picklable. A child inherits everything before the fork and
exits by ``os._exit``, so the parent's exit handlers, finalizers and file buffers do not run twice. A lock that another
thread of the parent had at the fork stays locked in the child, and a CUDA context does not work there at all: functions
for devices must use neither.

The host polls the devices' messages, their exits and the clock in one wait. The run ends at the first device that fails
or dies, at a deadlock, and at the time limit. In every case, `run` leaves no process, file or memory behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, Self

from xrank.errors import RankFailedError, RankTimeoutError, UsageError
from xrank.virtual.arrays import Array
from xrank.virtual.engine import (
    HOST,
    ChannelStatistics,
    DeviceJob,
    EngineOutcome,
    describe_wait,
    join_failures,
    make_deadlock_error,
    make_failure,
    make_heading,
    make_timeout_error,
)
from xrank.virtual.shared_channels import MAX_READS, DeviceWait, SharedLinks, SharedMemory

MAX_DEVICES = 256
"""Each device takes three file descriptors of the host, and 10 MB or more of memory."""

_LOOK_SECONDS = 0.1
"""Interval of the host's deadlock checks while nothing happens."""
_PR_SET_PDEATHSIG = 1
_NO_MESSAGE_STATUS = 70


def run(jobs: Sequence[DeviceJob], *, timeout_seconds: float) -> EngineOutcome:
    """Run each job in its own process, as `xrank.virtual.engine.run` does on threads."""
    if len(jobs) > MAX_DEVICES:
        raise UsageError(
            f"{len(jobs)} devices need too many processes",
            got=str(len(jobs)),
            want=f"at most {MAX_DEVICES}",
            next_step='give engine="in-process", or count with xrank.virtual.plan',
        )
    deadline = time.monotonic() + timeout_seconds
    processes: list[DeviceProcess] = []
    with DeferredSignals() as signals:
        shared = SharedMemory([job.device for job in jobs])
        try:
            for job in jobs:
                # Appended one by one: if a start fails, the cleanup knows the processes before it.
                processes.append(start_device(job, shared))
                shared.close_inboxes([job.device])
            with signals.allow():
                links = SharedLinks(shared, HOST)
                for job in jobs:
                    channel = links.to_device(job.device)
                    for number, packet in enumerate(job.packets):
                        channel.send(packet, make_heading("packet", call=number))
                return _Host(links, processes, timeout_seconds, deadline).collect()
        finally:
            # After a success as well: children of a device may outlive it. Before the memory is freed, which they use.
            kill_all(processes)
            shared.close()


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """The last message of a device that succeeded: its body's return value and its channels' counts."""

    result: object
    sent: dict[int, ChannelStatistics]
    """By target."""
    received: dict[int, ChannelStatistics]
    """By source."""


@dataclass(frozen=True, slots=True)
class DeviceFailure:
    """The last message of a device, or of a test's rank, whose body raised; always picklable."""

    raised_at: float
    """Seconds on the host's monotonic clock, which orders the failures of all processes."""
    error: RankFailedError
    """The error for the caller, with the text and stack of the exception, which need not be unpickled for them."""
    cause: bytes | None
    """The body's exception, pickled; None if it cannot be pickled."""

    def to_error(self) -> RankFailedError:
        """Return the caller's error, with the original exception as its cause if that could be pickled."""
        if self.cause is not None:
            with contextlib.suppress(Exception):
                self.error.__cause__ = pickle.loads(self.cause)  # noqa: S301 - from our own process
        return self.error


class _Host:
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
        self._waits: dict[int, DeviceWait] = {}
        self._by_pidfd = {process.pidfd: process for process in processes}
        for pidfd in self._by_pidfd:
            links.poll.register(pidfd, select.POLLIN)

    def collect(self) -> EngineOutcome:
        while self._running:
            left = self._deadline - time.monotonic()
            ready = self._links.exchange(max(0.0, min(left, _LOOK_SECONDS)))
            # All messages of an ended process are in the pipe, and these reads empty it once. No more of them: a device
            # that never stops sending must not keep the host from its clock.
            for _ in range(MAX_READS):
                if not self._links.collect():
                    break
            for device in tuple(self._running):
                self._take(device)
            if self._failed:
                raise join_failures([word.to_error() for word in sorted(self._failed, key=lambda word: word.raised_at)])
            ended = [self._by_pidfd[descriptor] for descriptor in ready if descriptor in self._by_pidfd]
            if died := [process for process in ended if process.device in self._running]:
                raise join_failures([process.death() for process in died])
            for process in ended:
                self._links.poll.unregister(process.pidfd)
            if self._running and not ready and (waits := self._find_deadlock()):
                raise make_deadlock_error(self._describe(waits), others_work=len(waits) < len(self._running))
            if self._running and time.monotonic() >= self._deadline:
                raise self._make_hang_error()
        sent = {(HOST, device): end.sent for device, end in self._links.outgoing.items()}
        received = {(device, HOST): end.received for device, end in self._links.incoming.items()}
        for device, word in self._finished.items():
            sent |= {(device, target): count for target, count in word.sent.items()}
            received |= {(source, device): count for source, count in word.received.items()}
        return EngineOutcome(
            results=tuple(self._finished[device].result for device in self._processes),
            returned=tuple(tuple(self._returned[device]) for device in self._processes),
            sent={ends: count for ends, count in sent.items() if count.messages},
            received={ends: count for ends, count in received.items() if count.messages},
        )

    def _take(self, device: int) -> None:
        channel, returned = self._links.from_device(device), self._returned[device]
        while channel.arrays:
            returned.append(channel.receive(make_heading("return", call=len(returned))))
        while channel.objects and device in self._running:
            try:
                word = channel.receive_object()
            except Exception as error:  # an object of the user's that cannot be unpickled
                failure = make_failure(device, error, pid=self._processes[device].pid)
                failure.__cause__ = error
                word = DeviceFailure(time.monotonic(), failure, cause=None)
            self._waits.pop(device, None)
            if isinstance(word, DeviceWait):
                self._waits[device] = word
            elif word is not None:
                self._running.discard(device)
                if isinstance(word, DeviceFailure):
                    self._failed.append(word)
                else:
                    self._finished[device] = word

    def _find_deadlock(self) -> Mapping[int, DeviceWait]:
        """Return the waits that no message can end."""
        # The counts of sent messages may be old, but not so old that a wait that is over seems endless. Say that they
        # lack the message that ended it. Then its source sent the message after it had told of a wait of its own, so
        # that wait is over too. The same holds for that source, and so on back to a first wait, whose message is
        # counted.
        sent = {HOST: {device: end.sent.messages for device, end in self._links.outgoing.items()}}
        sent |= {device: wait.sent for device, wait in self._waits.items()}
        sent |= {d: {to: count.messages for to, count in word.sent.items()} for d, word in self._finished.items()}
        waits = dict(self._waits)
        while True:
            # Remove devices that wait for a free one or for a message in transit, directly or through others.
            hopeful = {
                device
                for device, wait in waits.items()
                if (wait.source in self._running and wait.source not in waits)
                or sent[wait.source].get(device, 0) != wait.num_taken
            }
            if not hopeful:
                return waits
            waits = {device: wait for device, wait in waits.items() if device not in hopeful}

    def _describe(self, waits: Mapping[int, DeviceWait]) -> dict[int, str]:
        now = time.monotonic()
        return {
            device: describe_wait(wait.source, self._running, f"{wait.message}, since {now - wait.since:.1f} s")
            for device, wait in sorted(waits.items())
        }

    def _make_hang_error(self) -> RankTimeoutError:
        stuck = [self._processes[device] for device in sorted(self._running - set(self._waits))]
        waits = self._describe(self._waits)
        error = make_timeout_error([process.device for process in stuck], waits, self._timeout_seconds)
        texts = {each.device: "(it is stopped by a signal)" for each in stuck if each.is_stopped()}
        others = [process for process in stuck if process.device not in texts]
        stacks = collect_stacks([(each.stacks, each.ask_for_stacks) for each in others])
        texts |= {process.device: stack for process, stack in zip(others, stacks, strict=True)}
        for device, text in sorted(texts.items()):
            error.add_note(f"stack of device {device}:\n{text or '(it does not react: it is inside the kernel)'}")
        return error


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
        how = "of unknown cause, because this program's own SIGCHLD handling hides it"
        with contextlib.suppress(ChildProcessError):
            info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
            assert info is not None
            how = f"exit code {info.si_status}"
            if info.si_code != os.CLD_EXITED:
                known = info.si_status in signal.valid_signals()
                how = f"killed by {signal.Signals(info.si_status).name if known else f'signal {info.si_status}'}"
        return RankFailedError(
            f"device {self.device} died: {how}",
            rank=self.device,
            host=socket.gethostname(),
            pid=self.pid,
            cause=how,
            next_step="let devices end with a return or an exception; a killed device may have run out of memory",
        )

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process: the state of its main thread (proc(5): stat)."""
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        return False

    def ask_for_stacks(self) -> None:
        """Signal the process to write its threads' stacks; the handler is in C, so it works inside any Python call."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGUSR1)


def start_device(job: DeviceJob, shared: SharedMemory) -> DeviceProcess:
    """Fork a device while signals are deferred; it sends the host a `DeviceResult` or `DeviceFailure`."""
    _flush()  # the child would print the buffers' content a second time
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
                shared.close_inboxes([end for end in shared.inboxes if end != job.device])
                _run_device(job, SharedLinks(shared, job.device))
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


def _run_device(job: DeviceJob, links: SharedLinks) -> NoReturn:
    pid = os.getpid()
    try:
        try:
            result = job.body(links)
        finally:
            # A process that the body forked must not return from it and send a second result.
            if os.getpid() != pid:
                os._exit(0)
        sent = {device: end.sent for device, end in links.outgoing.items()}
        received = {device: end.received for device, end in links.incoming.items()}
        _flush()
        try:
            links.to_device(HOST).send_object(DeviceResult(result, sent, received))
        except Exception as error:
            raise UsageError(
                f"the return value of device {job.device} cannot be sent to the host: {error}",
                rank=job.device,
                got=f"a {type(result).__module__}.{type(result).__qualname__}",
                want="arrays, numbers, texts, or other picklable objects",
                next_step="return less, or only arrays",
            ) from error
    # exit() in the body ends the process with that status, and the host reports a dead device, as for real ranks.
    except SystemExit as error:
        _flush()
        os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException as error:
        raised_at = time.monotonic()
        _flush()
        cause = None
        # Pickling runs the user's code, which may raise anything.
        with contextlib.suppress(Exception):
            cause = pickle.dumps(error)
        links.to_device(HOST).send_object(DeviceFailure(raised_at, make_failure(job.device, error, pid=pid), cause))
    links.finish()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


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


class DeferredSignals:
    """Defers Python's signal handlers in a ``with`` block, except inside `allow`; runs them at the end.

    Blocking the signals would not suffice: the kernel would deliver them to another thread, and Python would still run
    the handlers in the main thread.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._pending: list[int] = []
        self._are_held = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # in other threads no handler runs
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


_PATIENCE_SECONDS = 5.0
"""Time in which a process answers, also on a busy machine; one that sleeps inside the kernel does not."""
_QUIET_SECONDS = 0.5
"""Time after the last output of a process that has written its stacks."""


def collect_stacks(processes: Sequence[tuple[int, Callable[[], None]]]) -> list[str]:
    """Return the stacks of processes that have registered SIGUSR1 with faulthandler; empty if one does not react.

    A process is the pipe that it writes to, and a function that sends it the signal.
    """
    texts, waiting = dict.fromkeys((stacks for stacks, _ in processes), b""), select.poll()
    for stacks, ask in processes:
        waiting.register(stacks, select.POLLIN)
        ask()
    end, num_waiting = time.monotonic() + _PATIENCE_SECONDS, len(texts)
    # When all have written something, only the rest of it is awaited.
    while num_waiting and (left := min(_QUIET_SECONDS if all(texts.values()) else end, end - time.monotonic())) > 0:
        ready = waiting.poll(1000 * left)
        if not ready and all(texts.values()):
            break
        for stacks, _ in ready:
            content = os.read(stacks, 65536)
            texts[stacks] += content
            if not content:  # the process has ended
                waiting.unregister(stacks)
                num_waiting -= 1
    return [text.decode(errors="replace") for text in texts.values()]
