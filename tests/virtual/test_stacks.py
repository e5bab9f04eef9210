"""Where a process stands is told whole, and waited for, however busy the machine is; one that cannot tell is left."""

import ctypes
import faulthandler
import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from xrank.virtual import processes
from xrank.virtual.processes import StackRequest, collect_stacks, state_of


@contextmanager
def process(body):
    """Fork a process that does this, given where it may write and what says that it is ready; give what asks it."""
    (reading, writing), (here, there) = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        try:
            body(writing, lambda: os.write(there, b"x"))
        finally:
            os._exit(1)
    os.close(writing)
    os.close(there)
    try:
        assert os.read(here, 1) == b"x"
        yield StackRequest(pid, reading, lambda: os.kill(pid, signal.SIGUSR1))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(here)


def stands_here(writing, ready):
    faulthandler.register(signal.SIGUSR1, file=writing)
    ready()
    while True:
        signal.pause()


def halts_in_the_middle(writing, ready):
    """As on a busy machine, which lets others run between two words."""

    def write(number):
        os.write(writing, b"one half, ")
        time.sleep(0.4)
        os.write(writing, b"the other")

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(write)
    ctypes.CDLL(None).signal(signal.SIGUSR1, handler)
    ready()
    while True:
        pass


def runs_here(writing, ready):
    faulthandler.register(signal.SIGUSR1, file=writing)
    ready()
    while True:
        pass


def runs_and_then_sleeps(writing, ready):
    """It answers in between, on another signal."""
    faulthandler.register(signal.SIGUSR1, file=writing)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    told = []
    signal.signal(signal.SIGUSR2, lambda *_: told.append(1))
    ready()
    while not told:
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    while True:
        signal.pause()


def block_signal(writing, ready):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    ready()
    while True:
        signal.sigwait([signal.SIGUSR2])


def has_a_thread_that_hears_nothing(writing, ready):
    """A signal that a thread blocked from the start does not mean that it is in the handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    stands_here(writing, ready)


def ends(writing, ready):
    ready()
    os._exit(0)


def test_stacks_come_whole_at_once(monkeypatch):
    monkeypatch.setattr(processes, "_PATIENCE_SECONDS", (40.0, 40.0))
    with process(stands_here) as one, process(has_a_thread_that_hears_nothing) as other:
        begun = time.monotonic()
        for _ in range(3):
            said = collect_stacks([one, other])
            assert all(words.count("in stands_here") == 1 for words in said)
        assert time.monotonic() - begun < 30, "no process was awaited: here it takes milliseconds"


def test_stacks_are_complete_when_the_writer_pauses():
    with process(halts_in_the_middle) as one, process(stands_here) as other:
        said = collect_stacks([one, other])
    assert said[0] == "one half, the other" and "in stands_here" in said[1]


def test_a_running_process_gets_more_time():
    """A signal that comes late stands for a machine that lets the process wait."""
    with process(runs_here) as one:
        late = replace(one, ask=threading.Timer(1, one.ask).start)
        assert "in runs_here" in collect_stacks([late])[0]


def test_output_just_after_a_look_is_read(monkeypatch):
    """As on a machine that halts when the host has found the pipe empty, for longer than the host has patience."""
    readable = processes._readable

    def readable_before_it_spoke(descriptors, seconds):
        found = readable(descriptors, seconds)
        os.kill(one.pid, signal.SIGUSR2)
        while state_of(one.pid) == "R":
            pass
        monkeypatch.setattr(processes, "_readable", readable)
        return found

    monkeypatch.setattr(processes, "_readable", readable_before_it_spoke)
    monkeypatch.setattr(processes, "_PATIENCE_SECONDS", (0.0, 50.0))
    with process(runs_and_then_sleeps) as one:
        assert "in runs_and_then_sleeps" in collect_stacks([one])[0]


@pytest.mark.parametrize("body", [block_signal, ends])
def test_a_process_that_cannot_answer_is_not_awaited(body, monkeypatch):
    monkeypatch.setattr(processes, "_PATIENCE_SECONDS", (0.1, 50.0))
    with process(body) as one:
        while state_of(one.pid) == "R":
            pass
        begun = time.monotonic()
        assert collect_stacks([one]) == [""]
        assert time.monotonic() - begun < 20
