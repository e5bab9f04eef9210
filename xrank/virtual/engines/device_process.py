"""A device as a process: forked, so that functions and closures need no name, and never older than its parent.

All that a device takes from its parent exists before the fork, and it leaves by ``os._exit``: none of the parent's exit
handlers, finalizers of garbage or buffers of files run a second time. What the parent's other threads held at the
moment of the fork stays held in the child, and a CUDA context does not work there at all: let functions that devices
run use neither.
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
from xrank.virtual.engines.failures import failed
from xrank.virtual.engines.stacks import Asked, state_of, told_stacks

__all__ = ["DeviceProcess", "Failed", "Finished", "end_all", "stacks_of", "start"]

_PR_SET_PDEATHSIG = 1
_NO_MESSAGE_STATUS = 70


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A device's process as its parent knows it."""

    device: int
    pid: int
    pidfd: int
    stacks: int
    """Where it writes its threads' stacks when asked by a signal."""

    def death(self) -> RankFailedError:
        """Return the error for a process that has ended without a word."""
        how = self._status()
        return RankFailedError(
            f"device {self.device} died: {how}",
            rank=self.device,
            host=socket.gethostname(),
            pid=self.pid,
            cause=how,
            next_step="let devices end by returning or raising; one that was killed may have met the end of the memory",
        )

    def _status(self) -> str:
        try:
            info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return "how, this program's own handling of SIGCHLD has hidden"
        assert info is not None
        if info.si_code == os.CLD_EXITED:
            return f"exit status {info.si_status}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(info.si_status).name}"
        return f"killed by signal {info.si_status}"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return state_of(self.pid) in ("T", "t")

    def ask_for_stacks(self) -> None:
        """Let it write where it stands."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Finished:
    """A device's last word when it did not fail: what its body gave back, and what its channels counted."""

    result: object
    sent: dict[int, tuple[int, int]]
    """(messages, bytes) by target."""
    received: dict[int, tuple[int, int]]
    """(messages, bytes) by source."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A device's last word when its body raised: always something that travels."""

    raised_at: float
    """On the host's monotonic clock, which all its processes share: whose failure came first."""
    error: RankFailedError
    """What the caller is told."""
    cause: bytes | None
    """What the body raised, pickled where it can be."""

    @classmethod
    def of(cls, error: BaseException, device: int) -> Failed:
        """Return what is told of an exception, on the device that it was raised on."""
        raised_at = time.monotonic()
        cause = None
        # It may do anything: it is the user's.
        with contextlib.suppress(Exception):
            cause = pickle.dumps(error)
        return cls(raised_at, failed(device, error, pid=os.getpid()), cause)

    def to_error(self) -> RankFailedError:
        """Return the caller's error, caused by the exception itself where it came."""
        if self.cause is not None:
            with contextlib.suppress(Exception):
                self.error.__cause__ = pickle.loads(self.cause)  # noqa: S301 - from our own process
        return self.error


def start(job: Job, segment: Segment, bells: Sequence[int], devices: Sequence[int]) -> DeviceProcess:
    """Fork a device, while signals are held; it runs the job and sends `Finished`, or `Failed`, to the host."""
    for stream in (sys.stdout, sys.stderr):
        # What waits in a buffer would be printed twice.
        with contextlib.suppress(Exception):
            stream.flush()
    parent = os.getpid()
    libc = ctypes.CDLL(None)
    stacks, stacks_there = os.pipe()
    try:
        with warnings.catch_warnings():
            # Python 3.12 and later warn where other threads live; the module's docstring says what that means.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                _settle(libc, parent, stacks_there)
                _live(job, SharedLinks(segment, bells, devices, job.device))
            except BaseException:
                # Not even its last word could be sent.
                traceback.print_exc()
                _flush()
            finally:
                os._exit(_NO_MESSAGE_STATUS)
    except BaseException:
        os.close(stacks)
        raise
    finally:
        os.close(stacks_there)
    # The child does the same: whoever is first.
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    try:
        return DeviceProcess(job.device, pid, os.pidfd_open(pid), stacks)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(stacks)
        raise


def _settle(libc: ctypes.CDLL, parent: int, stacks: int) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_NO_MESSAGE_STATUS)
    # A group of its own ends with all that the device may start; and Ctrl-C is for the parent, which ends the device.
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # The parent's garbage has finalizers that are the parent's business.
    gc.freeze()
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    if "torch" in sys.modules:
        import torch

        # Before anything else: the parent's threads, which torch would count on, are not here.
        torch.set_num_threads(1)


def _live(job: Job, links: SharedLinks) -> NoReturn:
    pid = os.getpid()
    try:
        try:
            result = job.body(links)
        finally:
            # A process that the body has forked, and that came back from it, has nothing to say.
            if os.getpid() != pid:
                os._exit(0)
        finished = Finished(
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
                f"what device {job.device} gave back cannot be sent to the host: {error}",
                rank=job.device,
                got=f"a {type(result).__module__}.{type(result).__qualname__}",
                want="arrays, numbers, texts, or what else pickle takes",
                next_step="give back less, or arrays alone",
            ) from error
    except SystemExit as error:
        _flush()
        os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException as error:
        _flush()
        links.to_host.send_object(Failed.of(error, job.device))
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def stacks_of(processes: Sequence[DeviceProcess]) -> dict[int, str]:
    """Return where each device's threads stand; the handler is C, so it answers from within any Python call."""
    told = {process.device: "(it is stopped by a signal)" for process in processes if process.is_stopped}
    processes = [process for process in processes if process.device not in told]
    stacks = told_stacks([Asked(process.pid, process.stacks, process.ask_for_stacks) for process in processes])
    for process, words in zip(processes, stacks, strict=True):
        told[process.device] = words or "(it does not react: it is inside the kernel)"
    return told


def end_all(processes: Sequence[DeviceProcess]) -> None:
    """Kill the processes, with all that they started, wait for their ends, and let go of them."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
    for process in processes:
        # Somebody's handler of SIGCHLD may have been quicker.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, 0)
        os.close(process.pidfd)
        os.close(process.stacks)
