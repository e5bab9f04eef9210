"""Simulates a conversion: its real plan, what it moves, and how long that takes at told rates; no byte moves."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from xrank.decisions.options import GatherOptions
from xrank.layout.nest_table import IntArray
from xrank.plan.division import divide
from xrank.plan.executor import Budget
from xrank.simulation.counted_reads import compared_nbytes, counted_rounds, num_places
from xrank.simulation.followed_reads import followed_compared_nbytes, followed_rounds
from xrank.simulation.planned_work import PlannedWork, planned_work
from xrank.simulation.prediction import Prediction, predicted
from xrank.simulation.rates import Rates, read_rates
from xrank.simulation.traffic import Traffic

__all__ = ["Simulation", "simulate", "traffic_of"]

_WORKERS = 4
"""Threads of each rank, for its buffers: the default where there are cores enough, whatever this machine has."""
_MOST_FOLLOWED = 20_000
"""Windows and pieces of which each read is followed, times ranks that look at them; more are counted."""


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """A conversion that was simulated."""

    work: PlannedWork
    traffic: Traffic
    rates: Rates | None
    prediction: Prediction | None
    """None where no rates were told."""
    buffer_nbytes: int
    """Of each rank, at most."""
    seconds: float
    """That the simulation itself took."""

    @property
    def memory_nbytes(self) -> IntArray:
        """By rank: what it holds of the model, and its buffers."""
        return self.work.held_nbytes + self.buffer_nbytes


def simulate(
    path: str | os.PathLike[str],
    operation: str = "gather",
    *,
    mesh: str | None = None,
    link: str | os.PathLike[str] | Rates | None = None,
    to: str | os.PathLike[str] | None = None,
    num_ranks: int | None = None,
    dtype: str | None = None,
    recipe: str | os.PathLike[str] | None = None,
) -> Simulation:
    """Return what a gather, an export or a reshard would move, and how long it would take.

    Args:
        path: a checkpoint or workspace; or a layout file, of a model that nobody has.
        operation: ``"gather"``, ``"export"`` or ``"reshard"``.
        mesh: such as ``"pp=8 dp=16 tp=32"``, in place of a layout file's.
        link: rates of the machine (`read_rates`); None: no seconds are told.
        to: the new layout file, of a reshard.
        num_ranks: how many processes share a gather or reshard; 1 if None.
        dtype: of a layout file's tensors; ``"bf16"`` if None.
        recipe: as for a gather; None leaves the names of a layout file alone.

    Raises:
        UsageError, LayoutError: the call must change.
        IncompleteError, ContradictionError, CorruptError, UnsafeError: as the operation itself.
    """
    started = time.monotonic()
    rates = link if isinstance(link, Rates) or link is None else read_rates(link)
    work = planned_work(
        os.fspath(path),
        operation,
        mesh=mesh,
        to=to,
        num_ranks=num_ranks,
        dtype=dtype,
        recipe=recipe,
        needs_mesh=rates is not None and bool(rates.link.axes),
    )
    options = GatherOptions(workers=_WORKERS)
    budget = Budget.within(options.max_memory_nbytes, _WORKERS)
    traffic = traffic_of(work, budget.staging_nbytes)
    prediction = None if rates is None else predicted(traffic, rates, work.mesh)
    return Simulation(work, traffic, rates, prediction, budget.nbytes, time.monotonic() - started)


def traffic_of(work: PlannedWork, staging_nbytes: int, *, follow: bool | None = None) -> Traffic:
    """Return what a work moves.

    Args:
        work: planned.
        staging_nbytes: of each worker's buffer.
        follow: whether each read is followed; None: if they are not too many.
    """
    plan, holder = work.plan, work.holder
    division = divide(plan, range(len(plan.files)), work.num_ranks, holder=holder)
    if follow is None:
        # Of a plan from memory every rank has a view of its own.
        follow = num_places(plan) * (1 if holder is None else work.num_ranks) <= _MOST_FOLLOWED
    rounds = (
        followed_rounds(plan, division, holder, staging_nbytes)
        if follow
        else counted_rounds(plan, division, holder, staging_nbytes)
    )
    compared = np.zeros(work.num_ranks, np.int64)
    if holder is not None:
        compared = (followed_compared_nbytes if follow else compared_nbytes)(plan, holder, work.num_ranks)
    return Traffic(rounds, compared, follow)
