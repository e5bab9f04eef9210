"""Stacks of processes: each one writes its own on a signal, by faulthandler, which works inside any Python call.

The output has no end mark, and a busy machine may suspend its writer within a line. It is complete once the process
has left the signal handler, which the kernel shows (proc(5): status).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SIGNAL = signal.SIGUSR1
_PATIENCE_SECONDS = (0.5, 5.0)
"""Time limits for a process that sleeps inside the kernel, and for one that runs or is ready to run."""
_LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class StackRequest:
    """A request to a process that has registered SIGUSR1 with faulthandler, for all threads."""

    pid: int
    stacks: int
    """File descriptor of the pipe that the process writes to."""
    ask: Callable[[], None]
    """Sends the signal; does nothing if the process has ended."""


def collect_stacks(processes: Sequence[StackRequest]) -> list[str]:
    """Return the stacks of each process; empty if it does not react."""
    before = [_signal_in(process.pid)[1] for process in processes]
    for process in processes:
        process.ask()
    parts = [b""] * len(processes)
    waiting = set(range(len(processes)))
    begun = time.monotonic()
    while waiting:
        # Check the state before reading: whatever is in the pipe after the handler's end is complete.
        pending, inside, slow = set(), set(), set()
        for number in waiting:
            # A process that sleeps now, after its handler, has already written everything that is read below.
            is_running = state_of(processes[number].pid) == "R"
            is_pending, blocking = _signal_in(processes[number].pid)
            if is_pending:
                pending.add(number)
            if blocking - before[number]:
                inside.add(number)  # the handler blocks its own signal
            if is_running or number in inside:
                slow.add(number)
        over = {number for number in waiting - pending - inside if parts[number]}
        ready = _readable([processes[number].stacks for number in waiting], 0.0 if over else _LOOK_SECONDS)
        seconds = time.monotonic() - begun
        for number in tuple(waiting):
            process = processes[number]
            if process.stacks in ready:
                content = os.read(process.stacks, 65536)
                parts[number] += content
                if content:
                    continue
                waiting.discard(number)  # the process has ended
            if number in over or seconds > _PATIENCE_SECONDS[number in slow]:
                waiting.discard(number)
    return [part.decode(errors="replace") for part in parts]


def state_of(pid: int) -> str | None:
    """Return the state of a process' main thread as one letter (proc(5): stat); None if the process is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].split()[0].decode()
    return None


def _readable(descriptors: Sequence[int], seconds: float) -> set[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(1000 * seconds)}


def _signal_in(pid: int) -> tuple[bool, set[str]]:
    """Return whether the signal is pending for a process, and which of its threads block it."""
    is_pending, blocking = False, set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/status", "rb") as status:
                masks = dict(line.split(b":") for line in status if line.startswith((b"Sig", b"Shd")))
                has = {name: int(masks[name], 16) >> (_SIGNAL - 1) & 1 for name in (b"SigPnd", b"ShdPnd", b"SigBlk")}
                is_pending |= bool(has[b"SigPnd"] or has[b"ShdPnd"])
                if has[b"SigBlk"]:
                    blocking.add(thread)
    return is_pending, blocking
