"""Programs and commands that a page shows, for tests that start them as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def find_block(page: str, words: str, language: str = "python") -> str:
    """Return the one block of a page that contains these words."""
    pattern = rf"^```{language}\n(.*?)^```$"
    blocks = re.findall(pattern, (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if words in block]
    return str(found)


def run_program(folder: Path, text: str, num_ranks: int) -> str:
    """Run a program in a folder under torchrun; return what it printed."""
    (folder / "program.py").write_text(text)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    return _run(folder, [*command, f"--nproc-per-node={num_ranks}", "program.py"])


def run_commands(folder: Path, text: str) -> str:
    """Run lines of a shell, in which `xrank` is this package's; return what they printed."""
    function = f'xrank() {{ "{sys.executable}" -m xrank "$@"; }}; python() {{ "{sys.executable}" "$@"; }}'
    return _run(folder, ["bash", "-c", f"set -e; {function}; {text}"])


def _run(folder: Path, command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(DOCS.parent)}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
