"""The work of making a plan's files, as one rank has it: what all ways of making them are told alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xrank.decisions.options import ReplicaChoice
from xrank.decisions.transformed_plan import Transforms
from xrank.layout.nest_table import IntArray
from xrank.plan.buffers import OpenSource
from xrank.plan.executor import Budget
from xrank.plan.planner import Plan

__all__ = ["Work"]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A plan, and what else decides how one rank makes its files; whoever opened the source closes it."""

    plan: Plan
    """All files."""
    source: OpenSource
    """Where this rank reads."""
    budget: Budget
    """Threads and buffers of this rank; of what is transformed, one whole tensor and its outputs come on top."""
    replicas: ReplicaChoice = "verify"
    """Whether replicas that differ are refused or picked among."""
    holder: IntArray | None = None
    """By record, the position in the team of the rank in whose memory it lies; None: records of files."""
    transforms: Transforms | None = None
    """What is made of a live model's tensors by a caller's function, in files apart."""

    def split_files(self, files: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return, of these files by index, those of what is copied and those of what is transformed."""
        apart = set() if self.transforms is None else self.transforms.files
        parts: tuple[list[int], list[int]] = ([], [])
        for index in files:
            parts[index in apart].append(index)
        return parts
