"""The executor: carries out a plan within a memory budget.

Worker threads take windows of the output in order. Each fills its window from the source, checks and digests the bytes
while they are in cache, and writes the window. Memory is the workers' buffers, whatever the model's size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

from xrank.plan.budget import STORE_WORKERS, Budget, is_mostly_straight
from xrank.plan.buffers import PlacingTarget, Source, Target
from xrank.plan.checksums import RecordChecksums
from xrank.plan.faults import raise_mismatch
from xrank.plan.file_hashes import FileHashes
from xrank.plan.file_parts import FilePart, FinishedFile, make_finished_file
from xrank.plan.merging import MergedTensors
from xrank.plan.object_source import ObjectSource
from xrank.plan.output import PlacedBytes
from xrank.plan.planner import Plan
from xrank.plan.sharing import SharedExtents
from xrank.plan.windows import WINDOW_NBYTES, FileWindows, Job, Read
from xrank.plan.worker import Worker

__all__ = ["CancelledError", "FinishedFile", "Outcome", "execute"]

_SIGNAL_LOOK_SECONDS = 0.2
_LONGEST_RUN = 8
"""Windows that are made at once in a target's own memory."""


class CancelledError(Exception):
    """`cancelled()` returned True; finished files stay finished."""


@dataclass(slots=True)
class Outcome:
    """The results of an execution."""

    files: dict[int, FinishedFile] = field(default_factory=dict)
    parts: dict[int, FilePart] = field(default_factory=dict)
    """File index -> its part, for files of which a share was made."""
    num_checksums: int = 0
    """Records whose every byte agreed with its recorded checksum."""
    shared_nbytes: int = 0
    """Bytes whose blocks the file system shares with the source; they were not written."""
    differences: dict[str, dict[int, int]] = field(default_factory=dict)
    """Tensor -> rank -> number of differing elements, if the lowest rank's were picked."""


def execute(
    plan: Plan,
    source: Source,
    target: Target,
    *,
    budget: Budget,
    files: Sequence[int] | None = None,
    shares: Mapping[int, Sequence[range]] | None = None,
    checksums: RecordChecksums | None = None,
    file_hashes: FileHashes | None = None,
    replicas: Literal["verify", "pick"] = "verify",
    begin: Callable[[int], None] = lambda index: None,
    finish: Callable[[FinishedFile], None] = lambda finished: None,
    finish_share: Callable[[FilePart], None] = lambda part: None,
    cancelled: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Outcome:
    """Make output files of a plan; return when all are done or one has failed.

    Args:
        plan: the whole plan.
        source: reads the plan's records.
        target: writes the output. One with a method ``write_late`` gets the parts of endings by it, each as soon as it
            is known; windows have any bytes in their place. A method ``share_memory`` is given first a share of the
            budget and the bytes of the largest file, and returns how much memory it takes, in how many parts. In a
            `PlacingTarget` windows are made in its own memory.
        budget: threads and buffers.
        files: indices of the output files to make, in this order; all if None.
        shares: in place of `files`, the windows to make of each file. No ending is written for these files. Their
            records are checked as far as they are read here; the caller joins the reads of other executions.
        checksums: state of the records that other executions have read; None: none was read.
        file_hashes: gets each window of the files, which must be whole; None: they are not hashed.
        replicas: "verify" raises if pieces that must be equal differ, "pick" counts the differences.
        begin: called once for each file before its first byte is written, by one thread at a time.
        finish: called for each file after its last byte was written and its sources were checked, by any thread.
        finish_share: called for each share after its last byte was written, by any thread.
        cancelled: called before each window, by one thread at a time; it may also raise.
        progress: called with the bytes of each finished window, by one thread at a time.

    Raises:
        CorruptError: bytes differ from their recorded checksum.
        ContradictionError: replicas differ.
        UsageError: a cast would turn a finite value into an infinite one.
        CancelledError: `cancelled` returned True.
    """
    objects: ObjectSource | None = getattr(source, "objects", None)
    share_memory: Callable[[int, int], tuple[int, int]] | None = getattr(target, "share_memory", None)
    whole = range(len(plan.files)) if files is None else files
    # Only what is made here is looked at: a caller that takes tensors one by one calls this for each.
    is_straight = objects is None or is_mostly_straight(plan, whole if shares is None else [*shares], objects)
    parts = None
    if share_memory is not None:
        largest_nbytes = max((file.output.nbytes for file in plan.files), default=0)
        parts = share_memory(budget.parts_room(is_straight=is_straight), largest_nbytes)
    if objects is not None:
        in_memory = hasattr(target, "place")
        budget = budget.share_with(objects, parts, in_memory=in_memory, is_straight=is_straight)
    state = _Execution(
        plan, source, target, replicas, begin, finish, finish_share, cancelled, progress, budget.num_windows
    )
    state.file_hashes = file_hashes
    if checksums is not None:
        state.checksums = checksums
    state.queue = state.windows([(index, None) for index in whole] if shares is None else shares.items())
    workers = [Worker(state, budget.staging_nbytes, budget.num_windows) for _ in range(budget.workers)]
    threads = [threading.Thread(target=worker.work, name=f"xrank-worker-{i}") for i, worker in enumerate(workers)]
    try:
        for thread in threads:
            thread.start()
        _wait(threads, workers)
    except BaseException as error:  # Ctrl-C while waiting: no thread may outlive the call
        state.fail(error)
        # The event of a thread that never started is never set.
        _wait([thread for thread in threads if thread.ident is not None], workers)
        raise
    if state.failure is not None:
        raise state.failure
    state.outcome.num_checksums = state.checksums.num_checked
    state.outcome.shared_nbytes = state.extents.nbytes
    return state.outcome


def _wait(threads: Sequence[threading.Thread], workers: Sequence[Worker]) -> None:
    # A join that Ctrl-C interrupts marks its thread as ended, so the next join returns at once (CPython 3.11,
    # threading.py: Thread._wait_for_tstate_lock). An event can be waited for again.
    for thread, worker in zip(threads, workers, strict=False):
        # A signal that another thread takes, or that comes just before the wait, does not end a wait of this thread:
        # its handler runs between two waits.
        while not worker.ended.wait(_SIGNAL_LOOK_SECONDS):
            pass
        thread.join()


class _Execution:
    """State that all workers share; any thread may call its methods.

    Nothing refers back to it, so that the target's memory is free as soon as the call is over.
    """

    def __init__(
        self,
        plan: Plan,
        source: Source,
        target: Target,
        replicas: Literal["verify", "pick"],
        begin: Callable[[int], None],
        finish: Callable[[FinishedFile], None],
        finish_share: Callable[[FilePart], None],
        cancelled: Callable[[], bool],
        progress: Callable[[int], None],
        num_windows: int,
    ) -> None:
        self.plan, self.source, self.target, self.replicas = plan, source, target, replicas
        self._begin, self._finish, self._finish_share = begin, finish, finish_share
        self._cancelled, self._progress, self._num_windows = cancelled, progress, num_windows
        self.queue: Iterator[Job] = iter(())
        self.outcome = Outcome()
        self.failure: BaseException | None = None
        self.extents = SharedExtents(source, target)
        self.checksums = RecordChecksums(plan.source.records, partial(raise_mismatch, plan))
        self.merging = MergedTensors()
        self.file_hashes: FileHashes | None = None
        self._ahead: deque[Job] = deque()
        """Windows that come next; the source has begun to fetch the first `_num_announced`."""
        self._num_announced = 0
        self._announce: Callable[[Sequence[Read]], bool] | None = getattr(source, "announce", None)
        self._late: Callable[[int, int, memoryview], None] | None = getattr(target, "write_late", None)
        self.placing = cast("PlacingTarget", target) if hasattr(target, "place") else None
        self.straight = source if isinstance(source, ObjectSource) and source.fills_memory else None
        self._lock = threading.Lock()

    def windows(self, files: Iterable[tuple[int, Sequence[range] | None]]) -> Iterator[Job]:
        """Yield all windows of these files, or of the shares of them, in order; begin each file before its first."""
        for index, share in files:
            self._begin(index)
            file = FileWindows(self.plan.files[index], index, share)
            unit = -(-self.placing.part_nbytes(index) // WINDOW_NBYTES) if self.placing else 0
            # Bytes of a disk are digested while they are in cache, so that more windows at once bring nothing.
            longest = min(unit or self._num_windows, _LONGEST_RUN) if self.straight else 1
            straight = self.straight if longest > 1 else None  # single windows share blocks
            for windows in file.runs(longest, unit or longest):
                yield from self._make_jobs(file, windows, straight, is_placed=unit > 0)

    def _make_jobs(
        self, file: FileWindows, windows: range, straight: ObjectSource | None, *, is_placed: bool
    ) -> Iterator[Job]:
        """Yield a run of windows as one job, or as one for each if it needs many blocks at once."""
        early: list[Read] = []
        others: list[Read] = []
        for read in file.reads(windows) if self._announce else ():
            is_early = straight is not None and read.place is not None and straight.is_large(read.record)
            (early if is_early else others).append(read)
        is_short = len(windows) == 1 or sum(read.nbytes for read in others) <= WINDOW_NBYTES
        if is_short:
            yield Job(file, windows, is_placed, early, others)
        else:
            for window in windows:
                yield from self._make_jobs(file, range(window, window + 1), straight, is_placed=is_placed)

    def next_job(self) -> Job | None:
        """Return the next run of windows; None when none is left or a worker failed."""
        # The lock orders `cancelled`, `begin` and the queue: each runs on one thread at a time.
        with self._lock:
            if self.failure is not None:
                return None
            if self._cancelled():
                raise CancelledError
            if self._announce is None:
                return next(self.queue, None)
            self._look_ahead(self._announce)
            self._num_announced = max(0, self._num_announced - 1)
            return self._ahead.popleft() if self._ahead else None

    def _look_ahead(self, announce: Callable[[Sequence[Read]], bool]) -> None:
        """Let the source fetch what the next windows read, as far as it has room; the caller has the lock."""
        while True:
            if self._num_announced == len(self._ahead):
                job = next(self.queue, None)
                if job is None:
                    return
                self._ahead.append(job)
            job = self._ahead[self._num_announced]
            # Early reads need no announcement; those of the windows behind them may.
            if not (announce(job.others) if job.others else len(self._ahead) < STORE_WORKERS):
                return
            self._num_announced += 1

    def job_done(self, job: Job, nbytes: int) -> bool:
        """Count a written run of windows; return whether it was the file's last."""
        with self._lock:
            self._progress(nbytes)
            job.file.remaining -= len(job.windows)
            return job.file.remaining == 0

    def file_done(self, file: FileWindows) -> None:
        """Report a file, or a share of one, whose windows are all written and whose records are checked."""
        if not file.is_whole:
            part = file.part()
            self._finish_share(part)
            with self._lock:
                self.outcome.parts[file.index] = part
            return
        ending = file.ending()
        if self._late is None:
            for offset, data in ending:
                self.target.write(file.index, offset, memoryview(data))
        elif ending:
            self.write_late(file, ending[-1])
        digests = [digest.digest() for digest in file.digests]
        finished = make_finished_file(file.plan.output, file.index, digests, ending)
        self._finish(finished)
        with self._lock:
            self.outcome.files[file.index] = finished

    def write_late(self, file: FileWindows, placed: PlacedBytes) -> None:
        """Write bytes of a file's ending, if the target wants them as soon as they are known."""
        if self._late is not None:
            self._late(file.index, placed[0], memoryview(placed[1]))

    def differs(self, tensor: str, rank: int, num_elements: int) -> None:
        """Count elements in which a rank's replica differs from the written one."""
        with self._lock:
            ranks = self.outcome.differences.setdefault(tensor, {})
            ranks[rank] = ranks.get(rank, 0) + num_elements

    def fail(self, error: BaseException) -> None:
        """Keep the first failure; workers stop at their next window."""
        with self._lock:
            if self.failure is None:
                self.failure = error
        if self.file_hashes is not None:
            self.file_hashes.abort()
