"""Lists the figures of README and docs that are older than the code that they measure; exit code 1 if there are any.

`figures.toml` has an entry for each table: the page, a line of it, the command that measures it, the day of its last
run, and the code. A figure is old if a commit after that day has changed the code. `make release` wants none.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

from msgspec import Struct, convert

ROOT = Path(__file__).parent.parent


class Figures(Struct, frozen=True):
    """A table of figures."""

    page: str
    line: str
    """Text on the page, which finds the table."""
    command: str
    """Arguments of Python that measure it again."""
    measured: date
    code: tuple[str, ...]
    """Files and folders that decide about the figures."""


def read_figures(root: Path = ROOT) -> list[Figures]:
    """Return all entries."""
    return convert(tomllib.loads((root / "benchmarks" / "figures.toml").read_text())["figures"], list[Figures])


def find_changes(figures: Figures, root: Path = ROOT) -> list[str]:
    """Return the commits after the day of the measurement that have changed the code, newest first."""
    after = f"--since={figures.measured.isoformat()} 23:59:59"
    log = ["git", "log", "--format=%cs %h %s", after, "--", *figures.code]
    return subprocess.run(log, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> int:
    """Print the old figures, and return 1 if there are any."""
    old = 0
    for figures in read_figures():
        if changes := find_changes(figures):
            old += 1
            print(f"{figures.page}: {figures.line!r} is of {figures.measured}; {len(changes)} commits since, such as")
            print(f"    {changes[0]}\n    measure again: .venv-oracle/bin/python {figures.command}")
    print(f"{old} of {len(read_figures())} tables are older than their code")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
