"""The example of a trainer and an engine: it compares their answers after each step."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[2] / "examples" / "refit.py")


@pytest.mark.slow
def test_the_engine_answers_as_the_trainer_after_each_step():
    command = [sys.executable, "-W", "error", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0 and not re.search("Error|Exception", done.stderr), done.stderr
    line = "the engine answers as the trainer does; 9,216 of 9,216 bytes a rank were moved"
    assert done.stdout.splitlines() == [f"step {step}: {line}" for step in (1, 2, 3)]
