"""The copies of one engine rank: planned and proven once, run at each step.

Runs of bytes whose both ends lie in rows in memory of this host go straight to their places, by the kernel. All other
tensors pass the executor's buffers: those that are cast, strided, padded, cut into tiny runs, on a device, or of ranks
on other hosts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from xrank import dtypes
from xrank.lending.local_bytes import locate_elements
from xrank.lending.peer_source import PeerSource, SpanMemory
from xrank.lending.tensor_target import TensorTarget
from xrank.plan.executor import Budget, execute
from xrank.plan.output import OutputFile
from xrank.plan.planner import Copies, FilePlan, Plan, TensorPlan
from xrank.plan.windows import share_all
from xrank.refit.runs import Call, Runs, cut_calls, find_runs, join_runs, mean_run_nbytes

if TYPE_CHECKING:
    import torch

_CHECK_SECONDS = 0.02
"""Time between two looks at the other ranks while the kernel copies."""
_SMALLEST_RUN_NBYTES = 64
"""Mean length of a tensor's runs below which the buffers' strided copies are faster than a span for each run."""


@dataclass(slots=True, eq=False)
class Transfer:
    """The copies of one rank; see `make_transfer`."""

    nbytes: int
    """Bytes that the copies fill."""
    source: PeerSource
    """To be closed by the caller."""
    calls: list[tuple[SpanMemory, Call]]
    buffered: Plan | None
    buffered_tensors: tuple[torch.Tensor, ...]
    budget: Budget

    @property
    def direct_nbytes(self) -> int:
        """Bytes that the kernel copies straight to their places."""
        return sum(call.nbytes for _, call in self.calls)

    def run(self, check: Callable[[], object]) -> int:
        """Fill all tensors once, and return the number of bytes that were read.

        The bytes are those of one step only if the trainer's statuses are the same before and after.

        Args:
            check: called now and then between two calls of the kernel or windows, by one thread at a time; it may
                raise.

        Raises:
            LendingEndedError, UnreadableMemoryError: a trainer rank's memory cannot be read any more.
            RankFailedError, RankTimeoutError: as `PeerSource.read_into`.
        """
        self._run_calls(check)
        return self.direct_nbytes + self._run_buffered(check)

    def _run_calls(self, check: Callable[[], object]) -> None:
        lock, next_check = threading.Lock(), 0.0
        left: Iterator[tuple[SpanMemory, Call]] = iter(self.calls)
        failures: list[BaseException] = []

        def work() -> None:
            nonlocal next_check
            try:
                while True:
                    with lock:
                        if failures or (job := next(left, None)) is None:
                            return
                        if monotonic() >= next_check:
                            check()
                            next_check = monotonic() + _CHECK_SECONDS
                    memory, call = job
                    memory.copy_spans(call.there, call.here)
            except BaseException as error:  # raised below
                failures.append(error)

        helpers = [
            threading.Thread(target=work, name=f"xrank-refit-{i}", daemon=True)
            for i in range(min(self.budget.workers, len(self.calls)) - 1)
        ]
        for thread in helpers:
            thread.start()
        work()
        for thread in helpers:
            thread.join()
        if failures:
            raise failures[0]

    def _run_buffered(self, check: Callable[[], object]) -> int:
        if self.buffered is None:
            return 0
        source, target = _CountedSource(self.source), TensorTarget(dict(enumerate(self.buffered_tensors)))

        def cancelled() -> bool:
            check()
            return False

        try:
            execute(
                self.buffered,
                source,
                target,
                budget=self.budget,
                shares=share_all(self.buffered),
                cancelled=cancelled,
            )
        finally:
            target.finish()
        return source.nbytes


def make_transfer(plan: Plan, tensors: Sequence[torch.Tensor], source: PeerSource, budget: Budget) -> Transfer:
    """Return the copies of a proven plan; nothing is read yet.

    Args:
        plan: one file with one tensor for each of `tensors`. Its replicas are not read: they are compared by their own
            ranks.
        tensors: detached tensors to fill.
        source: reads the plan's records.
        budget: threads and buffers.
    """
    runs: dict[SpanMemory, list[Runs]] = {}
    buffered: list[TensorPlan] = []
    buffered_tensors: list[torch.Tensor] = []
    for one, tensor in zip(plan.tensors, tensors, strict=True):
        found = _find_direct(one, tensor, source)
        if found is None:
            buffered.append(_without_replicas(one))
            buffered_tensors.append(tensor)
            continue
        for memory, its in found:
            runs.setdefault(memory, []).append(its)
    calls = [(memory, call) for memory, parts in runs.items() for call in cut_calls(join_runs(parts))]
    files = tuple(FilePlan(OutputFile.bare(one.output), (one,)) for one in buffered)
    return Transfer(
        plan.nbytes,
        source,
        _interleave(calls),
        Plan(plan.source, files) if files else None,
        tuple(buffered_tensors),
        budget,
    )


def _find_direct(one: TensorPlan, tensor: torch.Tensor, source: PeerSource) -> list[tuple[SpanMemory, Runs]] | None:
    """Return the runs that fill a tensor; None if it must pass the buffers."""
    width = dtypes.dtype(one.output.dtype).nbytes
    if one.source_dtype != one.output.dtype or one.changed or one.update is not None or one.output.is_padded:
        return None
    here = locate_elements(tensor)[0]
    if here is None or mean_run_nbytes(one.copies.nests, width) < _SMALLEST_RUN_NBYTES:
        return None
    found: list[tuple[SpanMemory, Runs]] = []
    for record in np.unique(one.copies.record).tolist():
        place = source.find_memory(record)
        if place is None:
            return None
        memory, there = place
        its = find_runs(one.copies.nests.take(np.flatnonzero(one.copies.record == record)), width)
        found.append((memory, Runs(its.there + there, its.here + here, its.nbytes)))
    return found


def _without_replicas(one: TensorPlan) -> TensorPlan:
    none = np.zeros(0, np.int64)
    return replace(one, replicas=Copies(none, none, one.replicas.nests.take(none)))


def _interleave(calls: Sequence[tuple[SpanMemory, Call]]) -> list[tuple[SpanMemory, Call]]:
    """Return the calls with those of different processes in turn: two readers of one process wait for its lock."""
    by_memory: dict[SpanMemory, list[Call]] = {}
    for memory, call in calls:
        by_memory.setdefault(memory, []).append(call)
    turns = max(map(len, by_memory.values()), default=0)
    return [(memory, its[turn]) for turn in range(turns) for memory, its in by_memory.items() if turn < len(its)]


class _CountedSource:
    """A source that counts the bytes it reads."""

    def __init__(self, source: PeerSource) -> None:
        self._source, self._lock = source, threading.Lock()
        self.nbytes = 0

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Read as the source does."""
        self._count(len(into))
        self._source.read_into(record, start, into)

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Fetch as the source does."""
        self._count(nbytes)
        return self._source.fetch(record, start, nbytes, staging)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
