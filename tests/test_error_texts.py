"""Of every error in the package: no text below the command line names an option of it, and each has a next step."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import xrank
from xrank import errors

ROOT = Path(xrank.__file__).parent
MODULES = sorted(
    path for path in ROOT.rglob("*.py") if path.parts[len(ROOT.parts)] not in ("cli", "errors.py", "testing")
)
# Options of other programs, and whole commands, which one types whatever the face is.
OTHERS = re.compile(
    r"--(ckpt-format|dist-ckpt-optim-fully-reshardable|use-legacy-models|moe-extended-tp|pid) "
    r"|xrank (layout show|inspect) .*--[a-z]+"
)


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


def found_in(find: Callable[[ast.Module], list[Any]]) -> dict[str, list[Any]]:
    """Return what is found in each module in which anything is."""
    return {str(path.relative_to(ROOT)): found for path in MODULES if (found := find(tree_of(path)))}


def test_no_text_names_an_option_of_the_command_line() -> None:
    pattern = re.compile(r"--[a-z]")
    assert found_in(lambda tree: [t for t in texts(tree) if pattern.search(OTHERS.sub("", f"{t} "))]) == {}


def errors_made(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in errors.__all__:
                yield node


def has_next_step(call: ast.Call) -> bool:
    parts = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in parts:  # **parts
        return True
    if "next_step" in parts:
        step = parts["next_step"]
        return not (isinstance(step, ast.Constant) and not step.value)
    kind = getattr(errors, getattr(call.func, "id", getattr(call.func, "attr", "")))
    # Made of what is wanted, or of the class.
    return issubclass(kind, errors.LayoutError) or (issubclass(kind, errors.UsageError) and "want" in parts)


def test_every_error_has_a_next_step() -> None:
    assert found_in(lambda tree: [call.lineno for call in errors_made(tree) if not has_next_step(call)]) == {}


def test_no_next_step_removes_what_may_be_a_part_of_a_model() -> None:
    def find(tree: ast.Module) -> list[str]:
        steps = (k.value for call in errors_made(tree) for k in call.keywords if k.arg == "next_step")
        found = (text for step in steps for text in texts(ast.Module([ast.Assign([], step)], [])))
        return [text for text in found if re.search(r"\b(remove|delete|rm|clear)\b", text)]

    assert found_in(find) == {}


def test_errors_are_right_when_they_are_made() -> None:
    """No text of an error is written again; `about` and `advise` are for what only a caller knows."""
    parts = {"message", "got", "want", "next_step"}

    def find(tree: ast.Module) -> list[int]:
        stores = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        return [n.lineno for n in stores if isinstance(n.ctx, ast.Store) and n.attr in parts]

    assert found_in(find) == {}


def test_steps_that_follow_from_what_is_wanted() -> None:
    assert errors.UsageError("x is 3", want="1 or 2").next_step == "give 1 or 2"
    assert errors.UsageError("x is 3", want="1 or 2", next_step="see y").next_step == "see y"
    assert errors.LayoutError("x").next_step == "correct the layout, its sizes or the mesh"


def test_no_text_speaks_of_the_command_or_the_call_alone() -> None:
    pattern = re.compile(r"(run|make) the same (command|call)")
    assert found_in(lambda tree: [text for text in texts(tree) if pattern.search(text)]) == {}
