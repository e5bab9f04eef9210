"""Signals are held whichever thread the kernel gives them to, and are lost never."""

import os
import signal
import threading

import pytest

from xrank.virtual.processes import DeferredSignals


def interrupt():
    """Send a signal that another thread gets, and wait until Python has it."""
    pipe, there = os.pipe()
    os.set_blocking(there, False)
    before = signal.set_wakeup_fd(there, warn_on_full_buffer=False)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert os.read(pipe, 1)
    finally:
        signal.set_wakeup_fd(before)
        os.close(pipe)
        os.close(there)


def test_an_interrupt_waits_for_the_released_part():
    done, steps = threading.Event(), []
    thread = threading.Thread(target=done.wait)
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # here, so that the other thread gets it
    try:
        with pytest.raises(KeyboardInterrupt), DeferredSignals() as signals:
            interrupt()
            steps.append("held")
            try:
                with signals.allow():
                    steps.append("never")
            finally:
                interrupt()
                steps.append("held again")
    finally:
        done.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert steps == ["held", "held again"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_returns_runs_as_usual():
    calls = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: calls.append(number))
    try:
        with DeferredSignals() as signals:
            signal.raise_signal(signal.SIGUSR2)
            assert calls == []
            with signals.allow():
                assert len(calls) == 1
                signal.raise_signal(signal.SIGUSR2)
                signal.raise_signal(signal.SIGUSR2)
                assert len(calls) == 3
            signal.raise_signal(signal.SIGUSR2)
            assert len(calls) == 3
        assert len(calls) == 4
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_signal_during_a_handler_is_handled_after_it():
    steps = []

    def handle(number, frame):
        steps.append("begun")
        if len(steps) == 1:
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGINT)
        steps.append("done")

    before = signal.signal(signal.SIGUSR2, handle)
    try:
        with pytest.raises(KeyboardInterrupt), DeferredSignals() as signals, signals.allow():
            signal.raise_signal(signal.SIGUSR2)
            steps.append("never")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert steps == ["begun", "done", "begun", "done"]
