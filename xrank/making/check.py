"""A check: what is read to verify something, and what is said of what was found; alone, or by all ranks of a team."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from xrank.errors import XrankError
from xrank.making.rereading import read_through
from xrank.plan.buffers import FileSource
from xrank.plan.executor import Budget, Outcome
from xrank.plan.output import OutputTensor
from xrank.plan.planner import Plan
from xrank.plan.report import ProofFacts, SourceFacts
from xrank.teams.team import Team

__all__ = ["Check", "Verdict", "run_check"]


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """Facts of what was read and found good."""

    source: SourceFacts
    proof: ProofFacts
    outputs: Sequence[OutputTensor]
    """The tensors that were checked."""
    notes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """Something that was planned from metadata, and is to be read."""

    plan: Plan
    judge: Callable[[Outcome], Verdict]
    """Returns the facts of what was read, or raises an error about it."""
    explain: Callable[[XrankError], XrankError] = lambda error: error
    """Says of an error while it is read what it means."""


def run_check(check: Check, budget: Budget, progress: Callable[[int, int], None] | None, team: Team) -> Verdict | None:
    """Read, and return the verdict on the first rank, which judges; None on the others.

    Args:
        check: on all ranks of a team the same.
        budget: threads and buffers.
        progress: called, on the first rank, with (bytes put together so far, bytes in all).
        team: the ranks that share the reading, together.

    Raises:
        XrankError: what was read is wrong.
        RankFailedError: another rank found it so, or failed.
    """
    try:
        if team.size == 1:
            outcome = read_through(check.plan, budget, progress)
        else:
            outcome = _read_together(check.plan, budget, progress, team)
    except XrankError as error:
        raise check.explain(error) from error
    return check.judge(outcome) if team.is_first else None


def _read_together(plan: Plan, budget: Budget, progress: Callable[[int, int], None] | None, team: Team) -> Outcome:
    from xrank.making.rounds import NoOutputs, make_in_rounds  # one process is done without
    from xrank.making.work import Work

    show = progress or (lambda done, total: None)
    with closing(FileSource(plan.source)) as source:
        return make_in_rounds(
            team,
            Work(plan, source, budget),
            range(len(plan.files)),
            NoOutputs(),
            what="what is verified",
            progress=lambda done: show(done, plan.nbytes),
        )
