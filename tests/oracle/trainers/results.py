"""Writes the results of cells as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from tests.oracle.trainers.cells import CELLS, ENGINES, FRAMEWORKS, KINDS
from tests.oracle.trainers.families import FAMILIES

__all__ = ["write_table"]


class _Result(Protocol):
    name: str
    exit_code: int
    fault: str


def write_table(results: Iterable[_Result]) -> str:
    """Return a page with one table for each kind of training, and the faults below."""
    found = {result.name: result for result in results}
    right = sum(not result.fault for result in found.values())
    lines = [
        "# Trainers' folders, gathered by xrank",
        "",
        "`make corpus` writes this page. Each cell is one folder that transformers' Trainer left after two steps on",
        "two ranks, or that another framework saved. `xrank gather FOLDER --out MODEL` gathered it, with",
        "`--base-model` where it lacks config.json. A cell is ok if the model equals what the framework saves of its",
        "live model with `save_pretrained` (names, dtypes, values), transformers loads it without missing, unexpected",
        "or mismatched names, and the logits are equal. Adapters are compared with PEFT's `save_pretrained`. Other",
        "cells show xrank's exit code, or `differs`.",
        "",
        f"**{right} of {len(found)} cells are ok.**",
    ]
    for kind, meaning in KINDS.items():
        rows = [_write_row(kind, family, found) for family in FAMILIES]
        if any(rows):
            lines += ["", f"## {kind}: {meaning}", "", f"| family | {' | '.join(ENGINES)} |"]
            lines += ["| --- |" + " --- |" * len(ENGINES), *filter(None, rows)]
    lines += ["", "## Other frameworks", "", "| engine | kind | family | |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {cell.engine} | {cell.kind} | {cell.family} | {_mark(found[name])} |"
        for name, cell in CELLS.items()
        if cell.engine in FRAMEWORKS and name in found
    ]
    return "\n".join([*lines, *_write_faults(found.values())]) + "\n"


def _write_row(kind: str, family: str, found: dict[str, _Result]) -> str:
    """Return a family's row, or nothing where no cell of the kind was tried."""
    names = [f"{engine}-{kind}-{family}" for engine in ENGINES]
    marks = [_mark(found[name]) if name in found else "" for name in names]
    return f"| {family} | {' | '.join(marks)} |" if any(marks) else ""


def _mark(result: _Result) -> str:
    if not result.fault:
        return "ok"
    return f"exit {result.exit_code}" if result.exit_code else "differs"


def _write_faults(results: Iterable[_Result]) -> list[str]:
    """Return the list of faults, the most frequent families and kinds first."""
    faulty = [result for result in results if result.fault]
    if not faulty:
        return []
    counts = Counter(CELLS[result.name].family for result in faulty)
    faulty.sort(key=lambda result: (-counts[CELLS[result.name].family], CELLS[result.name].family, result.name))
    return ["", "## Faults", "", *(f"- `{r.name}`: {_mark(r)}. {r.fault}" for r in faulty)]
