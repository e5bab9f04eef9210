"""Ctrl-C and SIGTERM at many moments of a gather of 200 MB, as a terminal and a scheduler send them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import pytest
import torch

from tests.cli.bench import Bench, made_bench
from tests.commands.made_workspaces import leave
from tests.sampled import sampled
from xrank.layout import DeviceMesh

XRANK = os.path.join(os.path.dirname(sys.executable), "xrank")
Gather: TypeAlias = "subprocess.Popen[str]"
SHARDS = 10
SHARD_NBYTES = 20 * 10**6


@pytest.fixture(scope="module")
def large() -> Iterator[tuple[Bench, dict[str, str]]]:
    """A bench with 200 MB of states, and the digest of each file that a gather of them makes."""
    with made_bench() as bench:
        names = [f"layers.{i}.weight" for i in range(SHARDS)]
        values = torch.arange(SHARD_NBYTES // 4, dtype=torch.int32).reshape(-1, 1000)
        model = {name: values + i for i, name in enumerate(names)}
        leave(bench.workspace, model, layouts=dict.fromkeys(names, "[f/tp, h]"), mesh=DeviceMesh((2,), ("tp",)))
        report = ended(start(bench))
        assert report is not None
        assert report["output"]["nbytes"] == SHARDS * SHARD_NBYTES
        shutil.rmtree(bench.out)
        yield bench, {file["name"]: file["digest"] for file in report["output"]["files"]}


SIGNALLED = """
import os, signal, sys, threading, time
from xrank.cli.main import main
from xrank.storage.folder_stage import FolderStage

count, pause, *numbers = sys.argv[1].split(",")
finish_part, create_part, done = FolderStage.finish_part, FolderStage.create_part, []

def send():
    for number in map(int, numbers):
        if pause == "own thread":
            signal.pthread_kill(threading.get_ident(), number)
            break
        os.kill(os.getpid(), number)
        time.sleep(float(pause))
    hold()

def hold():
    # A busy machine may let the main thread, which meets the signal, wait until the others have finished all.
    while not all(signal.getsignal(int(number)) is signal.SIG_IGN for number in numbers):
        time.sleep(0.001)

def finished(self, *arguments):
    finish_part(self, *arguments)
    done.append(arguments)
    if len(done) == int(count):
        send()

def created(self, *arguments):
    if done and len(done) >= int(count):
        hold()
    descriptor = create_part(self, *arguments)
    if not done and count == "0":
        send()
    return descriptor

FolderStage.finish_part, FolderStage.create_part = finished, created
sys.argv[:] = ["xrank", *sys.argv[2:]]
sys.exit(main())
"""
"""Runs xrank, and signals its own process just when so many files are finished: a busy machine misses no moment.

No further file is begun until the signal is met; what is begun may still be finished."""


def start(bench: Bench, *, after: int | None = None, numbers: Sequence[int] = (), pause: float | str = 0.0) -> Gather:
    """Start a gather that meets these signals when that many files are finished.

    With `pause` "own thread", the thread that finishes the last of them takes the first signal, not the main thread.
    """
    gather = ["gather", "--workspace", bench.workspace, "--out", bench.out, "--max-shard-size", "20MB", "--json"]
    told = ",".join(map(str, (after, pause, *map(int, numbers))))
    command = [XRANK] if after is None else [sys.executable, "-c", SIGNALLED, told]
    return subprocess.Popen([*command, *gather], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: Gather) -> dict[str, Any] | None:
    """Wait for a gather that must succeed; return its report."""
    stdout, stderr = process.communicate(timeout=150)
    assert process.returncode == 0, stderr
    report: dict[str, Any] = json.loads(stdout)
    return report


def finished(bench: Bench) -> int:
    """Count the files that a running gather has finished."""
    return len(list(bench.folder.glob(".model.xrank-*/*.safetensors")))


@pytest.mark.parametrize("after", sampled([1, 0, 4, 7], 4))
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_at_many_moments(large: tuple[Bench, dict[str, str]], number: signal.Signals, status: int, after: int) -> None:
    bench, digests = large
    process = start(bench, after=after, numbers=[number])
    stdout, stderr = process.communicate(timeout=150)
    assert process.returncode == status, stderr
    assert f"the same command resumes (exit {status})" in stderr
    assert "Traceback" not in stderr
    assert json.loads(stdout)["exit_code"] == status
    assert not os.path.lexists(bench.out)
    assert len([name for name in bench.names() if name.startswith(".model.xrank-")]) == 1
    done = finished(bench)
    assert after <= done < SHARDS
    report = ended(start(bench))
    assert report is not None
    assert {file["name"]: file["digest"] for file in report["output"]["files"]} == digests
    assert report["output"]["resumed_nbytes"] >= after * SHARD_NBYTES
    shutil.rmtree(bench.out)
    assert verify_nothing_left(bench)


def verify_nothing_left(bench: Bench) -> bool:
    return bench.names() == ["run42"]


@pytest.mark.parametrize("second", sampled([signal.SIGINT, signal.SIGTERM], 2))
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_twice_quickly(large: tuple[Bench, dict[str, str]], first: signal.Signals, second: signal.Signals) -> None:
    bench, digests = large
    pause = random.Random(int(first) * 100 + int(second)).random() * 0.01
    process = start(bench, after=1, numbers=[first, second], pause=pause)
    process.communicate(timeout=150)
    # As a shell sees it: a second signal may meet the process when it has let go of its handlers.
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    assert code in (130, 143)
    assert not os.path.lexists(bench.out)
    report = ended(start(bench))
    assert report is not None
    assert {file["name"]: file["digest"] for file in report["output"]["files"]} == digests
    assert report["output"]["resumed_nbytes"] >= SHARD_NBYTES
    shutil.rmtree(bench.out)
    assert verify_nothing_left(bench)


def test_a_signal_that_another_thread_takes(large: tuple[Bench, dict[str, str]]) -> None:
    """The main thread, which waits for the others, is not woken by it."""
    bench, _ = large
    process = start(bench, after=1, numbers=[signal.SIGTERM], pause="own thread")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143 and "the same command resumes" in stderr
    for name in bench.names():
        if name != "run42":
            shutil.rmtree(bench.folder / name)


def test_killed_outright(large: tuple[Bench, dict[str, str]]) -> None:
    bench, digests = large
    process = start(bench, after=3, numbers=[signal.SIGKILL])
    process.communicate(timeout=150)
    assert process.returncode == -signal.SIGKILL
    assert not os.path.lexists(bench.out)
    report = ended(start(bench))
    assert report is not None
    assert {file["name"]: file["digest"] for file in report["output"]["files"]} == digests
    assert report["output"]["resumed_nbytes"] >= 3 * SHARD_NBYTES
    shutil.rmtree(bench.out)
    assert verify_nothing_left(bench)
