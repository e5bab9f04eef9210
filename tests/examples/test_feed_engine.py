"""The example of an engine that is fed by ranks: it compares the engine's answer with the whole model's, bit by bit."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[2] / "examples" / "feed_engine.py")


@pytest.mark.slow
def test_the_engine_answers_as_the_whole_model():
    command = [sys.executable, "-W", "error", SCRIPT, "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fed  36 tensors of 2 ranks to an engine, which answers as the whole model does\n"
