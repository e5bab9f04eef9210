"""A check: a plan that reads files to verify them, and the judge of its outcome; for one process or a whole team."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from xrank.errors import XrankError
from xrank.making.rereading import hash_beside, read_through
from xrank.plan.budget import Budget
from xrank.plan.decoding import open_source
from xrank.plan.executor import Outcome
from xrank.plan.output import OutputTensor
from xrank.plan.planner import Plan
from xrank.plan.report_facts import ProofFacts, SourceFacts
from xrank.teams.team import Team


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """Facts of a check that passed."""

    source: SourceFacts
    proof: ProofFacts
    outputs: Sequence[OutputTensor]
    """The tensors that were checked."""
    notes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """A check that was planned from metadata and has not read the data yet."""

    plan: Plan
    judge: Callable[[Outcome], Verdict]
    """Returns the facts of a sound outcome, or raises an error about it."""
    explain: Callable[[XrankError], XrankError] = lambda error: error
    """Returns an error of the reading in the words of this check."""


def run_check(check: Check, budget: Budget, progress: Callable[[int, int], None] | None, team: Team) -> Verdict | None:
    """Run a check, and return its verdict on the first rank, which judges; return None on the others.

    Args:
        check: the same check on all ranks of a team.
        budget: threads and buffers.
        progress: called, on the first rank, with (bytes assembled so far, bytes in all).
        team: the ranks that share the reading.

    Raises:
        XrankError: the data is wrong.
        RankFailedError: another rank found an error, or failed.
    """
    try:
        with hash_beside(check.plan.source.hashes, team) as finish_hashes:
            if team.size == 1:
                outcome = read_through(check.plan, budget, progress)
            else:
                outcome = _read_together(check.plan, budget, progress, team)
            finish_hashes()
    except XrankError as error:
        raise check.explain(error) from error
    return check.judge(outcome) if team.is_first else None


def _read_together(plan: Plan, budget: Budget, progress: Callable[[int, int], None] | None, team: Team) -> Outcome:
    from xrank.making.rounds import NoOutputs, make_in_rounds  # one process does not need this module
    from xrank.making.work import Work

    show = progress or (lambda done, total: None)
    with closing(open_source(plan.source)) as source:
        return make_in_rounds(
            team,
            Work(plan, source, budget),
            range(len(plan.files)),
            NoOutputs(),
            what="what is verified",
            progress=lambda done: show(done, plan.nbytes),
        )
