"""The files of a ``sharded_state``: one or several parts of each rank."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from xrank.errors import ContradictionError, IncompleteError
from xrank.readers.advice import ONE_SAVE
from xrank.stores import places
from xrank.words import numbers_text, ranks_text

# vllm/model_executor/model_loader/sharded_state_loader.py: TP_ONLY_PATTERN, PP_AND_TP_PATTERN.
_NAME = re.compile(
    r"model-(?:rank-([0-9]{1,6})|pp-([0-9]{1,6})-tp-([0-9]{1,6}))-part-([0-9]{1,6})\.safetensors", re.ASCII
)


@dataclass(frozen=True, slots=True)
class RankParts:
    """The files by rank, in the order of their parts."""

    files: Mapping[int, tuple[str, ...]]
    num_stages: int
    """Number of pipeline stages; a stage's ranks follow each other."""

    @property
    def tp_size(self) -> int:
        """Number of ranks that share a stage's tensors."""
        return len(self.files) // self.num_stages


def is_state_name(name: str) -> bool:
    """Return whether a file's name is that of a part."""
    return _NAME.fullmatch(name) is not None


def list_parts(folder: str) -> RankParts:
    """Return the files of a folder.

    Raises:
        IncompleteError: a rank or a part before another one is missing. The last ranks and parts are not counted
            anywhere, so that only the shapes show whether they are missing.
        ContradictionError: the files are of two saves.
    """
    found: dict[tuple[int, int], dict[int, str]] = {}
    patterns = set()
    for name in sorted(places.list_names(folder)):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        patterns.add(match[1] is None)
        place = (0, int(match[1])) if match[1] is not None else (int(match[2]), int(match[3]))
        found.setdefault(place, {})[int(match[4])] = os.path.join(folder, name)
    if len(patterns) > 1:
        raise ContradictionError(
            f"{folder} holds files with and without pipeline stages",
            file=folder,
            got="model-rank-* and model-pp-*",
            want="the files of one save",
            next_step=ONE_SAVE,
        )
    num_stages, tp_size = (max(place[axis] for place in found) + 1 for axis in (0, 1))
    cells = [(stage, rank) for stage in range(num_stages) for rank in range(tp_size)]
    missing = [number for number, place in enumerate(cells) if place not in found]
    if missing:
        raise IncompleteError(
            f"{ranks_text(missing)} of {len(cells)} left no file in {folder}",
            rank=missing[0],
            file=folder,
            got=f"files of {ranks_text(set(range(len(cells))) - {*missing})}",
            want=f"files of each of {len(cells)} ranks",
            next_step="copy the missing files from the nodes that saved them",
        )
    for number, place in enumerate(cells):
        parts = found[place]
        if len(parts) <= max(parts):
            absent = sorted(set(range(max(parts))) - {*parts})
            raise IncompleteError(
                f"rank {number} left no part {numbers_text(absent)} in {folder}",
                rank=number,
                file=folder,
                got=f"parts {numbers_text(parts)}",
                want=f"parts 0-{max(parts)}",
                next_step="copy the missing files from the node that saved them",
            )
    files = {n: tuple(file for _, file in sorted(found[place].items())) for n, place in enumerate(cells)}
    return RankParts(files, num_stages)
