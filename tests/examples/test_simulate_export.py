"""The example of a simulated export: two cuts of one model over a thousand ranks, and a page."""

import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(__file__).parents[2] / "examples" / "simulate_export.py")


def test_two_cuts_are_compared_and_one_is_drawn(tmp_path):
    page = tmp_path / "export.html"
    command = [sys.executable, "-W", "error", SCRIPT, "--dp", "8", "--html", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["FSDP", "wrote", "replicas"]
    assert "256 ranks write 141 GB, of it" in lines[0] and "256 ranks write 141 GB, of it" in lines[2]
    assert "Seconds of each rank" in page.read_text()
