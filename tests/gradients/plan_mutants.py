"""One-line mutations of the code that makes gradient plans, each loaded beside the package that the process has."""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import xrank.gradients

__all__ = ["Mutant", "draw_mutants", "mutated_package"]

_MODULES = ("plan_maker", "later_reductions", "marks", "mesh_places", "placed_parameters", "plan_entries", "plan")
_FOLDER = Path(xrank.gradients.__file__).parent / "plans"
_PACKAGE = "xrank.gradients"
_LEFT_OUT = ("explain", "mark", "__reduce__", "__post_init__", "_check_axes", "_rename_axes")
"""Functions that only refuse, explain or rename."""

_SWAPPED: dict[type[Any], type[Any]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.And: ast.Or,
    ast.Or: ast.And,
}  # fmt: skip
_WORDS = {
    "sum": "average", "average": "sum", "dp": "tp", "tp": "dp", "cp": "dp", "pp": "dp", "ep": "edp", "edp": "ep",
    "etp": "tp", "tensor": "word", "word": "tensor", "conditional": "tensor",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One module with one changed expression."""

    module: str
    line: int
    what: str
    source: str

    def __str__(self) -> str:
        return f"{self.module}.py:{self.line}: {self.what}"


def draw_mutants(seed: int, count: int) -> list[Mutant]:
    """Return so many mutants, each once, in an order that the seed defines."""
    mutants = [mutant for module in _MODULES for mutant in _iter_mutants(module)]
    return random.Random(seed).sample(mutants, min(count, len(mutants)))


@contextmanager
def mutated_package(mutant: Mutant | None) -> Iterator[ModuleType]:
    """Import `xrank.gradients` anew with the mutant in it; the process has its own package back afterwards."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[:2] == _PACKAGE.split(".")}
    for name in kept:
        del sys.modules[name]
    finder = _Finder(mutant)
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(_PACKAGE)
    finally:
        sys.meta_path.remove(finder)
        # Its watch of optimizers would not know those that the process's own package attaches.
        watch = sys.modules.get(f"{_PACKAGE}.step_watch")
        for handle in () if watch is None else watch._WATCH:
            handle.remove()
        for name in [name for name in sys.modules if name.split(".")[:2] == _PACKAGE.split(".")]:
            del sys.modules[name]
        sys.modules.update(kept)
        import xrank

        xrank.gradients = kept[_PACKAGE]  # type: ignore[assignment]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant | None) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        mutant = self._mutant
        if mutant is None or name != f"{_PACKAGE}.plans.{mutant.module}":
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(mutant), origin=str(_FOLDER / f"{mutant.module}.py"))


class _Loader(importlib.abc.Loader):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._mutant.source, str(self._mutant), "exec"), module.__dict__)


def _iter_mutants(module: str) -> Iterator[Mutant]:
    tree = ast.parse((_FOLDER / f"{module}.py").read_text())
    for node in _iter_nodes(tree):
        for what, undo in _change(node):
            yield Mutant(module, getattr(node, "lineno", 0), what, ast.unparse(ast.fix_missing_locations(tree)))
            undo()


def _iter_nodes(tree: ast.Module) -> list[ast.AST]:
    """Return the expressions that a plan depends on: not errors, texts, annotations or declarations of classes."""
    found: list[ast.AST] = []

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.Raise | ast.ImportFrom | ast.Import | ast.AnnAssign | ast.JoinedStr):
            return
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("__all__", "AXIS_ALIASES", "names"):
            return
        if isinstance(node, ast.FunctionDef) and node.name in _LEFT_OUT:
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            return
        found.append(node)
        # Without decorators: they make classes and caches, not plans.
        children = node.body if isinstance(node, ast.FunctionDef | ast.ClassDef) else ast.iter_child_nodes(node)
        for child in children:
            walk(child)

    walk(tree)
    return found


def _change(node: Any) -> Iterator[tuple[str, Any]]:
    """Change a node, yield what was changed with a function that undoes it."""
    before = ast.unparse(node) if isinstance(node, ast.expr) else ""

    def describe() -> str:
        return f"{before[:60]} -> {ast.unparse(node)[:60]}"

    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        old = node.ops[0]
        node.ops[0] = _SWAPPED[type(old)]()
        yield describe(), lambda: node.ops.__setitem__(0, old)
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPPED:
        old = node.op
        node.op = _SWAPPED[type(old)]()
        yield describe(), lambda: setattr(node, "op", old)
    elif isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1, -1):
        old = node.value
        node.value = old + 1
        yield describe(), lambda: setattr(node, "value", old)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        old = node.value
        node.value = not old
        yield describe(), lambda: setattr(node, "value", old)
    elif isinstance(node, ast.Constant) and node.value in _WORDS:
        old = node.value
        node.value = _WORDS[old]
        yield describe(), lambda: setattr(node, "value", old)
    elif isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body

        def undo() -> None:
            node.body, node.orelse = node.orelse, node.body

        yield describe(), undo
    elif isinstance(node, ast.If):
        old = node.test
        node.test = ast.UnaryOp(ast.Not(), old)
        yield f"if {ast.unparse(old)[:60]} -> if not", lambda: setattr(node, "test", old)
    elif isinstance(node, ast.Tuple) and len(node.elts) > 1 and isinstance(node.ctx, ast.Load):
        for index in range(len(node.elts)):
            taken = node.elts.pop(index)
            yield describe(), lambda index=index, taken=taken: node.elts.insert(index, taken)
