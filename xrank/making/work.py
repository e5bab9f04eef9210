"""The work of one rank on a plan's files: the arguments that all ways of making them share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xrank.decisions.options import ReplicaChoice
from xrank.layout.nest_table import IntArray
from xrank.plan.budget import Budget
from xrank.plan.buffers import OpenSource
from xrank.plan.file_hashes import FileHashes
from xrank.plan.planner import Plan

if TYPE_CHECKING:
    from xrank.decisions.transformed_plan import Transforms


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A plan, and the settings by which one rank makes its files. The opener of the source also closes it."""

    plan: Plan
    """The plan of all files."""
    source: OpenSource
    """The source that this rank reads."""
    budget: Budget
    """Threads and buffers of this rank; a transform needs memory for one whole tensor and its outputs on top."""
    replicas: ReplicaChoice = "verify"
    """Whether differing replicas raise an error or one is picked."""
    holder: IntArray | None = None
    """By record, the position in the team of the rank whose memory holds it; None: the records are in files."""
    transforms: Transforms | None = None
    """Outputs of a caller's function on a live model's tensors; they are in separate files."""
    file_hashes: FileHashes | None = None
    """Hashes the files that this rank writes alone, for a signature."""

    def split_files(self, files: Iterable[int]) -> tuple[list[int], list[int]]:
        """Split files by index into copied and transformed ones."""
        apart = set() if self.transforms is None else self.transforms.files
        parts: tuple[list[int], list[int]] = ([], [])
        for index in files:
            parts[index in apart].append(index)
        return parts
