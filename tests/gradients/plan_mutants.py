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
from itertools import islice
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import xrank.gradients

__all__ = ["Mutant", "draw_mutants", "mutated_package"]

_MODULES = ("plan", "roles")
_FOLDER = Path(xrank.gradients.__file__).parent
_PACKAGE = "xrank.gradients"
_LEFT_OUT = (
    "explain",
    "_explain_place",
    "_list_elements",
    "_dtype",
    "mark",
    "__reduce__",
    "__post_init__",
    "_check_axes",
    "_rename_axes",
)
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
_NAMES = {"min": "max", "max": "min", "all": "any", "any": "all", "sorted": "list", "reversed": "list"}
_ATTRIBUTES = {
    "shard_ranks": "across_ranks", "across_ranks": "shard_ranks", "ranks": "shard_ranks", "start": "stop",
    "stop": "start", "dense": "expert", "sharded": "partial", "partial": "sharded", "shape": "ranks",
    "numel_unpadded": "numel", "is_expert": "over_pp", "over_pp": "is_expert", "over_tp": "tied", "tied": "over_tp",
}  # fmt: skip
"""Names and attributes that one may take for each other."""


@dataclass(frozen=True)
class Mutant:
    """One module with one changed expression."""

    module: str
    number: int
    """Index among the mutants of its module."""
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.module}.py:{self.line}: {self.what}"

    @property
    def source(self) -> str:
        """The module's text with the change."""
        tree = _parse(self.module)
        next(islice(_iter_changes(tree), self.number, None))
        return ast.unparse(ast.fix_missing_locations(tree))


def draw_mutants(seed: int, count: int) -> list[Mutant]:
    """Return so many mutants, each once, in an order that the seed defines."""
    mutants = [
        Mutant(module, number, line, what)
        for module in _MODULES
        for number, (line, what) in enumerate(_iter_changes(_parse(module)))
    ]
    return random.Random(seed).sample(mutants, min(count, len(mutants)))


@contextmanager
def mutated_package(mutant: Mutant, source: str) -> Iterator[ModuleType]:
    """Import `xrank.gradients` anew with the mutant's source in it; the process has its own package back afterwards."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[:2] == _PACKAGE.split(".")}
    for name in kept:
        del sys.modules[name]
    finder = _Finder(mutant, source)
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(_PACKAGE)
    finally:
        sys.meta_path.remove(finder)
        # Its watch of optimizers would not know those that the process's own package attaches.
        watch = sys.modules.get(f"{_PACKAGE}.optimizers")
        for handle in () if watch is None else watch._WATCH:
            handle.remove()
        for name in [name for name in sys.modules if name.split(".")[:2] == _PACKAGE.split(".")]:
            del sys.modules[name]
        sys.modules.update(kept)
        import xrank

        xrank.gradients = kept[_PACKAGE]  # type: ignore[assignment]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant, source: str) -> None:
        self._mutant, self._source = mutant, source

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != f"{_PACKAGE}.{self._mutant.module}":
            return None
        loader = _Loader(compile(self._source, str(self._mutant), "exec"))
        return importlib.machinery.ModuleSpec(name, loader, origin=str(_FOLDER / f"{self._mutant.module}.py"))


class _Loader(importlib.abc.Loader):
    def __init__(self, code: CodeType) -> None:
        self._code = code

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)


def _parse(module: str) -> ast.Module:
    return ast.parse((_FOLDER / f"{module}.py").read_text())


def _iter_changes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Change one expression of a module after another, and yield line and change while the tree has it."""
    for node in _iter_nodes(tree):
        for holder, key, value in [*_list_edits(node)]:
            old = getattr(holder, key) if isinstance(key, str) else holder[key]
            shown = old if isinstance(key, int) and isinstance(old, ast.stmt) else node
            before = _describe(shown)
            _set(holder, key, value)
            yield getattr(node, "lineno", 0), f"{before} -> {'pass' if shown is old else _describe(node)}"
            _set(holder, key, old)


def _set(holder: Any, key: str | int, value: Any) -> None:
    if isinstance(key, str):
        setattr(holder, key, value)
    else:
        holder[key] = value


def _describe(node: Any) -> str:
    kinds = (ast.expr, ast.stmt)
    return ast.unparse(node.test if isinstance(node, ast.If) else node)[:60] if isinstance(node, kinds) else "a filter"


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


def _list_edits(node: Any) -> Iterator[tuple[Any, str | int, Any]]:
    """Yield changes of a node: what holds the changed part, its name or index there, and its new value."""
    kind, value = type(node), getattr(node, "value", None)
    is_read = isinstance(getattr(node, "ctx", None), ast.Load)
    if kind is ast.Name and is_read and node.id in _NAMES:
        yield node, "id", _NAMES[node.id]
    elif kind is ast.Attribute and is_read and node.attr in _ATTRIBUTES:
        yield node, "attr", _ATTRIBUTES[node.attr]
    elif kind is ast.comprehension and node.ifs:
        yield node, "ifs", []
    elif kind in (ast.Return, ast.keyword) and isinstance(value, ast.UnaryOp):
        yield node, "value", value.operand
    elif kind is ast.Compare and type(node.ops[0]) in _SWAPPED:
        yield node.ops, 0, _SWAPPED[type(node.ops[0])]()
    elif kind in (ast.BinOp, ast.BoolOp) and type(node.op) in _SWAPPED:
        yield node, "op", _SWAPPED[type(node.op)]()
    elif kind is ast.Constant and type(value) is int and value in (0, 1, -1):
        yield node, "value", value + 1
    elif kind is ast.Constant and type(value) is bool:
        yield node, "value", not value
    elif kind is ast.Constant and value in _WORDS:
        yield node, "value", _WORDS[value]
    elif kind in (ast.IfExp, ast.If):
        yield node, "test", ast.UnaryOp(ast.Not(), node.test)
    elif kind is ast.Tuple and is_read and len(node.elts) > 1:
        for index in range(len(node.elts)):
            yield node, "elts", node.elts[:index] + node.elts[index + 1 :]
    for field in ("body", "orelse"):
        statements = getattr(node, field, None)
        for index, statement in enumerate(statements if isinstance(statements, list) else ()):
            if isinstance(statement, ast.AugAssign | ast.Expr) and not _is_text(statement):
                yield statements, index, ast.copy_location(ast.Pass(), statement)


def _is_text(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
