"""Ctrl-C and SIGTERM at many moments of a gather of 200 MB, as a terminal and a scheduler send them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.bench import Bench, made_bench
from tests.conversion.made_workspaces import leave
from xrank.conversion.verify import verify_model
from xrank.layout import DeviceMesh

XRANK = os.path.join(os.path.dirname(sys.executable), "xrank")
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


def start(bench: Bench, *options: str) -> subprocess.Popen[str]:
    command = [
        XRANK,
        "gather",
        "--workspace",
        bench.workspace,
        "--out",
        bench.out,
        "--max-shard-size",
        "20MB",
        "--json",
    ]
    return subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    """Wait for a gather that must succeed; return its report."""
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 0, stderr
    report: dict[str, Any] = json.loads(stdout)
    return report


def finished(bench: Bench) -> int:
    """Count the files that a running gather has finished."""
    return len(list(bench.folder.glob(".model.xrank-*/*.safetensors")))


def wait_until(process: subprocess.Popen[str], bench: Bench, count: int) -> None:
    """Wait until there is a stage, and that many files of it are finished."""
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        if list(bench.folder.glob(".model.xrank-*")) and finished(bench) >= count:
            return
        time.sleep(0.0005)


MOMENTS = [(0, 0.0), (0, 0.01), (1, 0.0), (4, 0.002), (7, 0.0)]
"""Files finished, and seconds after that."""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_at_many_moments(large: tuple[Bench, dict[str, str]], number: signal.Signals, status: int) -> None:
    bench, digests = large
    resumed = 0
    for count, delay in MOMENTS:
        process = start(bench)
        wait_until(process, bench, count)
        time.sleep(delay)
        process.send_signal(number)
        sent = time.monotonic()
        stdout, stderr = process.communicate(timeout=30)
        assert time.monotonic() - sent < 2, "it took too long to end"
        if os.path.lexists(bench.out):  # it was quicker
            assert verify_model(bench.out).ok
            shutil.rmtree(bench.out)
            continue
        assert process.returncode == status, stderr
        assert f"the same command goes on (exit {status})" in stderr
        assert "Traceback" not in stderr
        assert json.loads(stdout)["exit_code"] == status
        stages = [name for name in bench.names() if name.startswith(".model.xrank-")]
        assert len(stages) <= 1
        done = finished(bench)
        assert done >= count
        report = ended(start(bench))
        assert report is not None
        assert {file["name"]: file["digest"] for file in report["output"]["files"]} == digests
        assert report["output"]["resumed_nbytes"] >= done * SHARD_NBYTES
        resumed += done > 0
        assert not [name for name in bench.names() if name.startswith(".")]
        shutil.rmtree(bench.out)
    assert resumed >= 2, "no moment was late enough"
    assert verify_nothing_left(bench)


def verify_nothing_left(bench: Bench) -> bool:
    return bench.names() == ["run42"]


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_twice_quickly(large: tuple[Bench, dict[str, str]], first: signal.Signals, second: signal.Signals) -> None:
    bench, digests = large
    process = start(bench)
    wait_until(process, bench, 1)
    process.send_signal(first)
    random.seed(int(first) * 100 + int(second))
    time.sleep(random.random() * 0.01)
    process.send_signal(second)
    sent = time.monotonic()
    process.communicate(timeout=30)
    assert time.monotonic() - sent < 2
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


def test_killed_outright(large: tuple[Bench, dict[str, str]], tmp_path: Path) -> None:
    bench, digests = large
    process = start(bench)
    wait_until(process, bench, 3)
    process.kill()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert not os.path.lexists(bench.out)
    report = ended(start(bench))
    assert report is not None
    assert {file["name"]: file["digest"] for file in report["output"]["files"]} == digests
    assert report["output"]["resumed_nbytes"] >= 2 * SHARD_NBYTES  # the third may not have been in the journal yet
    shutil.rmtree(bench.out)
    assert verify_nothing_left(bench)
