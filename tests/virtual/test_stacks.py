"""The stacks of processes come whole, however busy the machine is; a process that cannot answer is left."""

import ctypes
import faulthandler
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from xrank.virtual import processes
from xrank.virtual.processes import collect_stacks


@contextmanager
def process(body):
    """Fork a process that runs the body; yield its pipe and the function that asks it."""
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
        yield reading, lambda: os.kill(pid, signal.SIGUSR1)
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


def runs_here(writing, ready):
    faulthandler.register(signal.SIGUSR1, file=writing)
    ready()
    while True:
        pass


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


def blocks_the_signal(writing, ready):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    ready()
    while True:
        signal.sigwait([signal.SIGUSR2])


def ends(writing, ready):
    ready()
    os._exit(0)


def test_stacks_come_whole(monkeypatch):
    monkeypatch.setattr(processes, "_QUIET_SECONDS", 2.0)  # a busy machine halts a process for longer
    with process(stands_here) as one, process(runs_here) as other, process(halts_in_the_middle) as third:
        for _ in range(2):
            stacks = collect_stacks([one, other, third])
            assert stacks[0].count("in stands_here") == stacks[1].count("in runs_here") == 1
            assert stacks[2] == "one half, the other"


def test_a_busy_process_gets_more_time():
    """A signal that comes late stands for a machine that lets the process wait."""
    with process(runs_here) as (stacks, ask):
        assert "in runs_here" in collect_stacks([(stacks, threading.Timer(1, ask).start)])[0]


@pytest.mark.parametrize("body", [blocks_the_signal, ends])
def test_a_process_that_cannot_answer_does_not_hide_the_others(body, monkeypatch):
    monkeypatch.setattr(processes, "_PATIENCE_SECONDS", 2.0)
    with process(body) as one, process(stands_here) as other:
        stacks = collect_stacks([one, other])
        assert stacks[0] == "" and "in stands_here" in stacks[1]
