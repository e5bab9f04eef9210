"""Reads the commands of the corpus from the lines of ``commands.txt``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

__all__ = ["COMMANDS", "Command", "Step"]


@dataclass(frozen=True)
class Step:
    """One run of xrank, or a copy."""

    words: tuple[str, ...]
    num_ranks: int = 1
    is_json: bool = True


@dataclass(frozen=True)
class Command:
    """Steps that run one after the other in one folder."""

    name: str
    steps: tuple[Step, ...]


def _read_step(text: str) -> Step:
    words = shlex.split(text)
    is_json, num_ranks = words[0] not in ("text", "cp"), 2 if words[0] == "x2" else 1
    if words[0] in ("text", "x2"):
        words = words[1:]
    if words[0] in ("gather", "reshard") and "--out" not in words:
        words += ["--out", "$W/out"]
    return Step((*words, *(["--json"] if is_json else [])), num_ranks, is_json)


def _read(line: str) -> Command:
    name, _, text = line.partition(": ")
    return Command(name, tuple(_read_step(step) for step in text.split(" ; ")))


_TEXT = Path(__file__).with_name("commands.txt").read_text()
COMMANDS = tuple(_read(line) for line in _TEXT.splitlines() if line and not line.startswith("#"))
