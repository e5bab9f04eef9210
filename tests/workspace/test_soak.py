"""Thousands of mixed gathers of 4 ranks, some of which raise, or are killed and started again.

``make test`` does 500 of them, always the same, ``make test-all`` 2,500; ``make soak`` 200,000, from a seed that it
prints, or that is given:
``make soak ARGS="--seed 17"``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

_EPOCH = 250
_MAX_GROWTH_NBYTES = 64 << 20
"""Growth of a rank in bytes after a quarter of its life: arenas keep the sizes of the largest gathers drawn."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the seed of each job, and how many gathers it makes."""
    given = metafunc.config.getoption("seed")
    if metafunc.config.getoption("soak"):
        first = int.from_bytes(os.urandom(3)) if given is None else given
        jobs = [(first + i, 10_000, 500) for i in range(20)]
    else:
        jobs = [(given or 0, 500, 400), pytest.param(1, 2000, 400, marks=pytest.mark.slow)]
    metafunc.parametrize(("seed", "count", "seconds"), jobs)


@pytest.mark.timeout(600)
def test_mixed_gathers(tmp_path: Path, seed: int, count: int, seconds: int) -> None:
    print(f"seed {seed}, {count} gathers")
    through = tmp_path / "through"
    through.mkdir()
    job = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.workspace.soaking"]
        + [str(argument) for argument in (seed, count, _EPOCH, through, seconds)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told, complaints = job.communicate(timeout=seconds + 20)
    except subprocess.TimeoutExpired:
        pytest.fail(f"seed {seed}: no end")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, complaints[-3000:]
    said = json.loads(told.splitlines()[-1])
    assert not said["wrong"], f"seed {seed}: {json.dumps(said, indent=1)}\n{complaints[-6000:]}"
    assert said["kills"] == count // _EPOCH - 1
    assert list(through.iterdir()) == []
    for rank in said["ranks"]:
        assert rank["counts"]["gathers"] > 0 and rank["counts"].get("exceptions", 0) >= 0
        later = rank["rss"][len(rank["rss"]) // 4 :]
        assert later[-1] - later[0] < _MAX_GROWTH_NBYTES, (seed, rank["rss"])
        assert rank["fds"][-1] <= rank["fds"][0] + 2, (seed, rank["fds"])
    print(said)
