"""The example of a gather of one's own: its tests pass, and fail where the gather is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_gather_test.py"


def pytest_of(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "xrank.testing.plugin", "-c", os.devnull, file.name],
        cwd=file.parent,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.slow
def test_it_passes(tmp_path: Path) -> None:
    copy = tmp_path / EXAMPLE.name
    copy.write_text(EXAMPLE.read_text())
    done = pytest_of(copy)
    assert done.returncode == 0 and "8 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_wrong_gather_does_not(tmp_path: Path) -> None:
    copy = tmp_path / EXAMPLE.name
    right = "start = sum(map(columns_of, range(place)))\n    joined"
    assert right in EXAMPLE.read_text()
    copy.write_text(EXAMPLE.read_text().replace(right, "start = place\n    joined"))
    done = pytest_of(copy)
    assert done.returncode == 1 and "2 failed, 6 passed" in done.stdout, done.stdout + done.stderr
