"""Simulates a conversion: its real plan, its traffic, and the time at given rates, without moving data."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from xrank.engine.executor import Budget
from xrank.engine.rounds import divide
from xrank.errors import names_own_arguments
from xrank.layout.nest_table import IntArray
from xrank.recipes.options import GatherOptions
from xrank.virtual.simulation.rates import Prediction, Rates, predict, read_rates
from xrank.virtual.simulation.traffic import ConversionTraffic, count_compared_nbytes, count_rounds
from xrank.virtual.simulation.work import PlannedWork, count_refit, place_engine, plan_work

_WORKERS = 4
"""Threads per rank, which determine its buffers: the default on a machine with enough cores."""


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """The result of a simulation."""

    work: PlannedWork
    traffic: ConversionTraffic
    rates: Rates | None
    prediction: Prediction | None
    """None if no rates were given."""
    buffer_nbytes: int
    """Upper limit of each rank's buffers, in bytes."""
    seconds: float
    """Seconds that the simulation itself took."""

    @property
    def memory_nbytes(self) -> IntArray:
        """Bytes of each rank: its part of the model, and its buffers."""
        return self.work.held_nbytes + self.buffer_nbytes

    def __str__(self) -> str:
        """Return what `xrank simulate` prints."""
        from xrank.engine.report import align_rows
        from xrank.virtual.simulation.display import simulation_rows, simulation_table

        return f"{align_rows(simulation_rows(self))}\n\n{simulation_table(self)}"


@names_own_arguments
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
    """Predict the traffic of a gather, an export, a reshard or a refit, and its time.

    A refit has the ranks of the trainer and, after them, those of the engine (`xrank.take_weights`).

    Args:
        path: a checkpoint or workspace; or a layout file of a model that need not exist.
        operation: ``"gather"``, ``"export"``, ``"reshard"`` or ``"refit"``.
        mesh: replaces the mesh of a layout file; such as ``"pp=8 dp=16 tp=32"``.
        link: rates of the machine (`read_rates`); None predicts no seconds.
        to: the new layout file of a reshard, or that of a refit's engine.
        num_ranks: number of processes that share a gather or reshard; 1 if None.
        dtype: element type of a layout file's tensors; ``"bf16"`` if None.
        recipe: as for a gather; None keeps the names of a layout file.

    Raises:
        UsageError, LayoutError: the call must change.
        IncompleteError, ContradictionError, CorruptError, UnsafeError: as in the operation itself.

    Example:
        >>> import torch, xrank
        >>> workspace = xrank.NFSWorkspace("simulated", rank=0, world_size=1)
        >>> workspace.write_configs_and_weights({}, {"weight": torch.ones(2, 3)})
        >>> found = xrank.simulate("simulated", num_ranks=2)
        >>> found.traffic.total("read_nbytes").tolist()
        [24, 0]
    """
    started = time.monotonic()
    rates = link if isinstance(link, Rates) or link is None else read_rates(link)
    work = plan_work(
        os.fspath(path),
        operation,
        mesh=mesh,
        to=to,
        num_ranks=num_ranks,
        dtype=dtype,
        recipe=recipe,
        needs_mesh=rates is not None and bool(rates.link.axes),
    )
    work = place_engine(work) if operation == "refit" else work
    options = GatherOptions(workers=_WORKERS)
    budget = Budget.from_memory(options.max_memory_nbytes, _WORKERS)
    traffic = compute_traffic(work, budget.staging_nbytes)
    prediction = None if rates is None else predict(traffic, rates, work.mesh)
    return Simulation(work, traffic, rates, prediction, budget.nbytes, time.monotonic() - started)


def compute_traffic(work: PlannedWork, staging_nbytes: int) -> ConversionTraffic:
    """Compute the traffic of planned work, with a buffer of so many bytes for each worker."""
    plan, holder = work.plan, work.holder
    if work.operation == "refit":
        return count_refit(work)
    division = divide(plan, range(len(plan.files)), work.num_ranks, holder=holder)
    rounds = count_rounds(plan, division, holder, staging_nbytes)
    compared = np.zeros(work.num_ranks, np.int64)
    if holder is not None:
        compared = count_compared_nbytes(plan, holder, work.num_ranks)
    return ConversionTraffic(rounds, compared, is_each_read=False)
