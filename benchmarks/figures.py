"""Lists the figures of README and docs that are older than the code that they measure; exit code 1 if there are any.

`figures.toml` has an entry for each table: the page, a line of it, the command that measures it, the day of its last
run, and the code. A figure is old if the code has changed since that day, other than in its texts: comments,
docstrings, errors. `make release` wants none.
"""

from __future__ import annotations

import ast
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


class _WithoutTexts(ast.NodeTransformer):
    """Empties strings, so that trees that differ only in their texts are equal."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        return ast.Constant("")


def find_changes(figures: Figures, root: Path = ROOT) -> list[str]:
    """Return the files of the code that have changed since the end of the day of the measurement, except in texts."""

    def git(*arguments: str, check: bool = True) -> str:
        return subprocess.run(["git", *arguments], cwd=root, check=check, capture_output=True, text=True).stdout

    base = git("rev-list", "-1", f"--before={figures.measured.isoformat()} 23:59:59", "HEAD").strip()

    def read(commit: str, path: str) -> str:
        text = git("show", f"{commit}:{path}", check=False)
        return ast.dump(_WithoutTexts().visit(ast.parse(text))) if path.endswith(".py") else text

    changed = git("diff", "--name-only", base, "HEAD", "--", *figures.code).splitlines()
    return [path for path in changed if read(base, path) != read("HEAD", path)]


def main() -> int:
    """Print the old figures, and return 1 if there are any."""
    old = 0
    for figures in read_figures():
        if changes := find_changes(figures):
            old += 1
            print(
                f"{figures.page}: {figures.line!r} is of {figures.measured}; since then {len(changes)} files changed,"
            )
            print(f"    such as {changes[0]}\n    measure again: .venv-oracle/bin/python {figures.command}")
    print(f"{old} of {len(read_figures())} tables are older than their code")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
