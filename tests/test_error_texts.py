"""Of every error in the package: no text below the command line names an option of it, and each has a next step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import xrank
from xrank import errors

ROOT = Path(xrank.__file__).parent
MODULES = sorted(
    path for path in ROOT.rglob("*.py") if path.parts[len(ROOT.parts)] not in ("cli", "faces.py", "testing")
)
# Options of other programs, and whole commands, which one types whatever the face is.
OTHERS = re.compile(r"--(ckpt-format|use-legacy-models|moe-extended-tp|pid) |xrank (layout show|inspect) .*--[a-z]+")
# Made without a step by the functions named here, and given one by `about` or `advise` before they are raised.
ERRORS = tuple(name for name in errors.__all__)
STEPLESS = {"corrupt", "unsafe"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield every text in the code, {} for what is put in, docstrings apart."""
    apart = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            apart.update(map(id, node.values))
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
            yield node.value


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_text_names_an_option_of_the_command_line(path: Path) -> None:
    found = [text for text in texts(tree_of(path)) if re.search(r"--[a-z]", OTHERS.sub("", f"{text} "))]
    assert found == []
