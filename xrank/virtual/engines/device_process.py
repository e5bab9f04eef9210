"""A device as a process: forked, so that functions and closures need not be picklable, and killed with its parent.

The child inherits everything before the fork and exits by ``os._exit``, so the parent's exit handlers, finalizers and
file buffers do not run twice. A lock that another thread of the parent had at the fork stays locked in the child, and a
CUDA context does not work there at all: functions for devices must use neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from xrank.errors import RankFailedError, UsageError
from xrank.virtual.channels.segment import Segment
from xrank.virtual.channels.shared_channel import SharedLinks
from xrank.virtual.engines.engine import Job
from xrank.virtual.engines.failures import make_failure
from xrank.virtual.engines.stacks import StackRequest, collect_stacks, state_of

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
