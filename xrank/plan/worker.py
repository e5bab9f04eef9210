"""One thread of the executor: its buffers, and the making of a window."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator
from typing import Literal, Protocol

from xrank import dtypes
from xrank.layout.nests import Nest
from xrank.plan.buffers import PlacingTarget, Source, Target, take_memory
from xrank.plan.casts import (
    CastOverflowError,
    change_elements,
    copy_cast,
    copy_same,
    count_cast_different,
    count_different,
)
from xrank.plan.checksums import RecordChecksums, read_rest
from xrank.plan.faults import difference_error, overflow_error
from xrank.plan.file_hashes import FileHashes
from xrank.plan.low_rank import add_low_rank
from xrank.plan.merging import MergedTensor, MergedTensors
from xrank.plan.object_source import ObjectSource
from xrank.plan.output import PlacedBytes
from xrank.plan.planner import Plan, TensorPlan
from xrank.plan.sharing import SharedExtents, SharedRun
from xrank.plan.tiles import Tile, cut_tiles
from xrank.plan.windows import WINDOW_NBYTES, FileWindows, Job, Portion, PreparedTensor


class _Shared(Protocol):
    """The methods and state of an execution that its workers use."""

    plan: Plan
    source: Source
    target: Target
    replicas: Literal["verify", "pick"]
    checksums: RecordChecksums
    extents: SharedExtents
    merging: MergedTensors
    file_hashes: FileHashes | None
    placing: PlacingTarget | None
    straight: ObjectSource | None

    def next_job(self) -> Job | None: ...
    def job_done(self, job: Job, nbytes: int) -> bool: ...
    def file_done(self, file: FileWindows) -> None: ...
    def write_late(self, file: FileWindows, placed: PlacedBytes) -> None: ...
    def differs(self, tensor: str, rank: int, num_elements: int) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class Worker:
    """Makes windows until none is left; reports an exception to the execution."""

    def __init__(self, shared: _Shared, staging_nbytes: int, num_windows: int) -> None:
        self._shared = shared
        self.ended = threading.Event()
        self._window = memoryview(b"")
        """The run of windows that is being made: the worker's own memory, or the target's."""
        self._own_windows = take_memory(num_windows * WINDOW_NBYTES, "a worker's windows")
        self._staging = take_memory(staging_nbytes, "a worker's buffer")
        self._stored: memoryview | None = None
        """Stored elements of a tensor with an update, as many as fit a window."""
        self._merged: MergedTensor | None = None

    def work(self) -> None:
        """Run until no window is left or some worker has failed."""
        try:
            while (job := self._shared.next_job()) is not None:
                self._make(job)
        except BaseException as error:  # raised again by the caller of `execute`
            self._shared.fail(error)
        finally:
            self.ended.set()

    def _make(self, job: Job) -> None:
        file, windows = job.file, job.windows
        first, last = file.span(windows)
        nbytes = last - first
        self._window = self._find_memory(job, first, nbytes)
        if self._shared.straight is not None:
            self._shared.straight.read_all(job.early, self._window)
        header = file.plan.output.header[first:last]
        self._window[: len(header)] = header
        done = len(header)
        runs: list[SharedRun] = []
        for portion in file.portions(windows):
            tensor = file.prepare(portion.tensor)
            part = self._window[portion.start : portion.stop]
            # No copy fills padding, so a padded tensor is cleared before its elements are copied.
            self._clear(done, portion.stop if tensor.plan.output.is_padded else portion.start)
            done = portion.stop
            if tensor.plan.update is not None:
                self._merge(self._shared.merging.get(file.index, portion.tensor, tensor.plan), portion, part)
            else:
                there = {read.place - portion.start for read in job.early if read.place is not None}
                straight = self._bring(tensor, portion.low, portion.high, part, there)
                runs += (run._replace(start=portion.start + run.start) for run in straight)
            width = dtypes.dtype(tensor.plan.output.dtype).nbytes
            trailer = file.add(portion.tensor, portion.low * width, part)
            if trailer is not None:
                self._shared.write_late(file, trailer)
        self._clear(done, nbytes)
        for start, data in file.fragments(windows):
            self._window[start : start + len(data)] = data
        if self._shared.file_hashes is not None:
            self._shared.file_hashes.add(file.index, windows, self._window[:nbytes])
        if job.is_placed:
            assert self._shared.placing is not None
            self._shared.placing.placed(file.index, first, nbytes)
        else:
            # The window was read and digested in any case; only the writing of shared blocks is left out.
            for start, stop in self._shared.extents.share(file.index, first, nbytes, sorted(runs)):
                self._shared.target.write(file.index, first + start, self._window[start:stop])
        # The last worker to finish a window of the file reads the rest of its records: all checksums are then compared
        # before the file is reported as finished.
        if self._shared.job_done(job, nbytes):
            if file.is_whole:
                read_rest(self._shared.checksums, self._shared.source, file.records, self._staging)
            self._shared.file_done(file)

    def _find_memory(self, job: Job, first: int, nbytes: int) -> memoryview:
        if not job.is_placed:
            return self._own_windows
        assert self._shared.placing is not None
        memory = self._shared.placing.place(job.file.index, first, nbytes)
        assert len(memory) == nbytes, "a run of windows is longer than a piece of the target's memory"
        return memory

    def _clear(self, start: int, stop: int) -> None:
        """Zero bytes of an earlier window that this one does not fill."""
        if start < stop:
            self._window[start:stop] = bytes(stop - start)

    def _bring(
        self, tensor: PreparedTensor, low: int, high: int, part: memoryview, there: Container[int] = ()
    ) -> list[SharedRun]:
        """Copy elements [low, high) of a tensor to `part`, and compare them with every replica of them.

        Args:
            tensor: the tensor.
            low: first element.
            high: one past the last.
            part: their bytes.
            there: first bytes of pieces of `part` that are read already.

        Returns:
            The bytes of `part` that the source contains unchanged.
        """
        runs = self._fill(tensor, low, high, part, there)
        if len(tensor.plan.replicas):
            self._compare(tensor, low, high, part)
        return runs

    def _merge(self, tensor: MergedTensor, portion: Portion, part: memoryview) -> None:
        """Write a portion of a tensor to `part`, with its update added; replicas are compared before that."""
        self._merged = tensor  # keeps its factors in memory
        plan = tensor.plan
        factors = tensor.factors(self._whole)
        if self._stored is None:
            self._stored = take_memory(WINDOW_NBYTES, f"{plan.output.name}, to which an update is added")
        width, target_width = (dtypes.dtype(name).nbytes for name in (plan.source_dtype, plan.output.dtype))
        step = len(self._stored) // width
        for low in range(portion.low, portion.high, step):
            # A stored type wider than the written one needs several rounds for one window.
            high = min(low + step, portion.high)
            stored = self._stored[: (high - low) * width]
            self._bring(tensor.stored, low, high, stored)
            target = part[(low - portion.low) * target_width : (high - portion.low) * target_width]
            try:
                add_low_rank(stored, plan.source_dtype, factors, low, target, plan.output.dtype)
            except CastOverflowError as overflow:
                raise overflow_error(plan, int(plan.copies.rank[0]), overflow.value) from None

    def _whole(self, tensor: PreparedTensor) -> memoryview:
        """Return all of a small tensor, checked and compared like written ones."""
        memory = take_memory(tensor.plan.output.nbytes, f"{tensor.plan.output.name}, a factor of an update")
        self._bring(tensor, 0, tensor.plan.output.num_elements, memory)
        return memory

    def _fill(
        self, tensor: PreparedTensor, low: int, high: int, part: memoryview, there: Container[int]
    ) -> list[SharedRun]:
        """Copy elements [low, high) of a tensor to `part`; return the runs of bytes that were read unchanged."""
        runs = []
        plan = tensor.plan
        width = dtypes.dtype(plan.source_dtype).nbytes
        for row, record, nest in tensor.copies.cut(low, high):
            cast = plan.source_dtype != plan.output.dtype or record in plan.changed
            if tensor.goes_straight(record, nest):
                length = nest.loops[0][0] if nest.loops else 1
                into = part[nest.y * width : (nest.y + length) * width]
                if nest.y * width not in there:
                    self._shared.source.read_into(record, nest.x * width, into)
                self._shared.checksums.add(record, nest.x * width, into)
                runs.append(SharedRun(nest.y * width, len(into), record, nest.x * width))
                continue
            for tile, data in self._tiles(record, nest, width):
                if not cast:
                    copy_same(data, part, tile.target, tile.loops, width)
                    continue
                try:
                    values, dtype = _values(plan, record, data)
                    copy_cast(values, dtype, part, plan.output.dtype, tile.target, tile.loops)
                except CastOverflowError as overflow:
                    raise overflow_error(plan, int(plan.copies.rank[row]), overflow.value) from None
        return runs

    def _compare(self, tensor: PreparedTensor, low: int, high: int, part: memoryview) -> None:
        """Compare elements [low, high) in `part` with every replica of them."""
        plan = tensor.plan
        width = dtypes.dtype(plan.source_dtype).nbytes
        for row, record, nest in tensor.replicas.cut(low, high):
            tiles = self._tiles(record, nest, width)
            different = sum(_count(plan, record, tile, data, part) for tile, data in tiles)
            # --replicas pick chooses among ranks, not among tensors: a tied tensor that differs is an error.
            if different and (self._shared.replicas == "verify" or record in plan.tied):
                raise difference_error(self._shared.plan, plan, row, self._shared.source)
            if different:
                self._shared.differs(plan.output.name, int(plan.replicas.rank[row]), different)

    def _tiles(self, record: int, nest: Nest, width: int) -> Iterator[tuple[Tile, memoryview]]:
        """Yield a nest's tiles, each with its bytes, which stay valid until the next."""
        for tile in cut_tiles(nest, len(self._staging) // width):
            data = self._shared.source.fetch(record, tile.start * width, tile.length * width, self._staging)
            if tile.is_dense:
                self._shared.checksums.add(record, tile.start * width, data)
            yield tile, data


def _values(plan: TensorPlan, record: int, data: memoryview) -> tuple[memoryview, str]:
    """Return a record's elements as its tensor gets them, multiplied and added to, and their type."""
    if record not in plan.changed:
        return data, plan.source_dtype
    return change_elements(data, plan.source_dtype, *plan.changed[record])


def _count(plan: TensorPlan, record: int, tile: Tile, data: memoryview, part: memoryview) -> int:
    """Return how many elements of a replica's tile differ from those in `part`."""
    if plan.source_dtype == plan.output.dtype and record not in plan.changed:
        width = dtypes.dtype(plan.source_dtype).nbytes
        return count_different(data, part, tile.target, tile.loops, width)
    values, dtype = _values(plan, record, data)
    return count_cast_different(values, dtype, part, plan.output.dtype, tile.target, tile.loops)
