"""The executor: carries out a plan within a memory budget.

Worker threads take windows of the output in order. Each fills its window from the source, checks and digests the bytes
while they are in cache, and writes the window. Memory is the workers' buffers, whatever the model's size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Literal, cast
from weakref import WeakValueDictionary

from msgspec import Struct, field
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.buffers import (
    SMALLEST_SHARED_NBYTES,
    PlacingTarget,
    SharedExtents,
    SharedRun,
    Source,
    Target,
    read_stretches,
    take_memory,
)
from xrank.engine.casts import (
    CastOverflowError,
    Factors,
    Tile,
    add_low_rank,
    change_elements,
    copy_cast,
    copy_same,
    count_cast_different,
    count_different,
    cut_tiles,
    read_factors,
)
from xrank.engine.faults import difference_error, make_checksums, overflow_error
from xrank.engine.object_records import ROOM_NBYTES, ObjectSource
from xrank.engine.planner import Plan, TensorPlan, UpdatePlan
from xrank.engine.windows import (
    WINDOW_NBYTES,
    FileHashes,
    FilePart,
    FileWindows,
    FinishedFile,
    Job,
    Portion,
    PreparedTensor,
    Read,
    RecordChecksums,
    read_rest,
)
from xrank.errors import UsageError, option
from xrank.layout.nests import Nest
from xrank.layout.output_files import PlacedBytes

STORE_WORKERS = 8
"""Fewest workers that read from stores to where the bytes stay: most of the time they wait for answers."""
_FEW_WORKERS = 4
"""Fewest workers that read from stores by blocks, which threads of the source ask for ahead."""
_STAGING_NBYTES = 2 << 20
_SMALLEST_STAGING_NBYTES = 256 << 10
_MOST_BLOCKS_NBYTES = 64 << 20
_SAMPLE = 64
_OWN_RUN = 4
"""Windows of a store's bytes that a worker makes at once in its own memory: each needs few requests."""


class Budget(Struct, frozen=True):
    """Number of worker threads, and bytes of each one's staging buffer beside its window; casts need as much again."""

    workers: int
    staging_nbytes: int
    allowed_nbytes: int = 0
    """Memory that the caller allows; buffers may take less."""
    num_windows: int = 1
    """Windows that a worker makes at once in its own memory."""

    @classmethod
    def from_memory(cls, max_memory_nbytes: int, workers: int, *, window_nbytes: int = WINDOW_NBYTES) -> Budget:
        """Return the largest budget whose buffers fit that many bytes; UsageError if not even one worker fits."""
        smallest = window_nbytes + 2 * _SMALLEST_STAGING_NBYTES
        if workers < 1 or max_memory_nbytes < smallest:
            raise UsageError(
                "the memory budget or the number of workers is too small",
                got=f"{max_memory_nbytes:,} bytes, {workers} workers",
                want=f"at least {smallest:,} bytes and one worker",
                next_step=f"give a larger {option('max_memory')}; 64MB is the default",
            )
        workers = min(workers, max_memory_nbytes // smallest)
        room = (max_memory_nbytes // workers - window_nbytes) // 2
        # Whole pages, as the buffers are maps.
        return cls(workers, min(_STAGING_NBYTES, room // 4096 * 4096), max_memory_nbytes)

    def share_with(
        self, objects: ObjectSource, parts: tuple[int, int] | None, *, in_memory: bool, is_straight: bool
    ) -> Budget:
        """Return the budget of a gather from stores: memory for runs of windows, blocks, and staging buffers.

        Blocks take half of what the windows leave, staging buffers a quarter; answers on their way and what the
        allocator keeps take the rest. `parts` has bytes and number of the target's own parts, if it has some;
        `in_memory`: windows are made in memory that the caller gives, as far as it can.
        """
        allowed = max(self.allowed_nbytes, self.nbytes)
        nbytes, num_windows, window_nbytes = 0, 1, 0
        fitting = allowed * 5 // 8 // (_OWN_RUN * WINDOW_NBYTES)
        if parts is not None:
            nbytes, workers = parts[0], parts[1] - 1  # each worker fills a part, and one is on its way
        elif is_straight and not in_memory and fitting >= _FEW_WORKERS:
            num_windows, workers = _OWN_RUN, min(max(self.workers, STORE_WORKERS), fitting)
            nbytes = workers * num_windows * WINDOW_NBYTES
        else:
            workers = max(self.workers, STORE_WORKERS if in_memory else _FEW_WORKERS)
            window_nbytes = WINDOW_NBYTES
        smallest = window_nbytes + 2 * _SMALLEST_STAGING_NBYTES
        rest = max(2 * smallest, allowed - nbytes)
        objects.limit(min(rest // 2, _MOST_BLOCKS_NBYTES))
        own = max(smallest, min(rest // 4, ROOM_NBYTES))
        budget = Budget.from_memory(own, workers, window_nbytes=window_nbytes)
        return replace(budget, num_windows=num_windows)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, those of casts included."""
        return self.workers * (self.num_windows * WINDOW_NBYTES + 2 * self.staging_nbytes)


def is_mostly_straight(plan: Plan, files: Sequence[int], objects: ObjectSource) -> bool:
    """Return whether most bytes of these files, by a sample of their tensors, need no memory beside their windows."""
    straight = total = 0
    tensors = [tensor for index in files for tensor in plan.files[index].tensors]
    for tensor in tensors[:: len(tensors) // _SAMPLE + 1]:
        nests = tensor.copies.nests
        sizes = nests.sizes
        is_dense = (nests.y_ends - nests.y == sizes) & (nests.swap().y_ends - nests.x == sizes)
        straight += int(sizes[is_dense].sum()) if tensor.source_dtype == tensor.output.dtype else 0
        total += int(sizes.sum())
    return objects.fills_memory and 2 * straight > total


class MergedTensor:
    """A tensor and its update; any thread may use it."""

    def __init__(self, plan: TensorPlan, update: UpdatePlan) -> None:
        self.plan, self.update = plan, update
        self.stored = PreparedTensor(replace(plan, output=replace(plan.output, dtype=plan.source_dtype), update=None))
        """The tensor as the source stores it."""
        self._factors: Factors | None = None
        self._lock = threading.Lock()

    def factors(self, read: Callable[[PreparedTensor], memoryview]) -> Factors:
        """Return the factors; the first caller reads them, other threads wait."""
        # Under the lock: a second reader would double the memory that `factors_nbytes` promises.
        with self._lock:
            if self._factors is None:
                a, b = self.update.a, self.update.b
                self._factors = read_factors(
                    read(PreparedTensor(a)),
                    a.source_dtype,
                    read(PreparedTensor(b)),
                    b.source_dtype,
                    a.output.shape[0],
                    self.update.rule,
                    kind=_kind(self.plan),
                )
            return self._factors


def factors_nbytes(plan: Plan) -> int:
    """Return the peak bytes of the largest pair of factors, as stored and as multiplied."""
    most = 0
    for tensor in plan.tensors:
        if tensor.update is not None:
            width = dtypes.dtype(_kind(tensor)).nbytes
            pair = (tensor.update.a.output, tensor.update.b.output)
            # While a factor is transposed and made contiguous, memory contains it twice.
            most = max(most, sum(part.nbytes + 2 * part.num_elements * width for part in pair))
    return most


def _kind(plan: TensorPlan) -> str:
    """Return the element type in which a tensor is merged."""
    return "F64" if plan.source_dtype == "F64" else "F32"


class Worker:
    """Makes windows until none is left; reports an exception to the execution."""

    def __init__(self, shared: _Execution, staging_nbytes: int, windows_nbytes: int) -> None:
        self._shared = shared
        self.ended = threading.Event()
        self._window = memoryview(b"")
        """The run of windows that is being made: the worker's own memory, or the target's."""
        self._own_windows = take_memory(windows_nbytes, "a worker's windows")
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
        self._window = self._own_windows
        if job.is_placed:
            assert self._shared.placing is not None
            self._window = self._shared.placing.place(file.index, first, nbytes)
            assert len(self._window) == nbytes, "a run of windows is longer than a piece of the target's memory"
        if self._shared.straight is not None:
            self._shared.straight.read_all(job.early, self._window)
        header = file.plan.output.header[first:last]
        self._window[: len(header)] = header
        done = len(header)
        portions = list(file.portions(windows))
        filled = set[int]() if job.early or not file.has_many(portions) else self._fill_many(file, portions)
        runs: list[SharedRun] = []
        for portion in portions:
            plan = file.plan.tensors[portion.tensor]
            part = self._window[portion.start : portion.stop]
            # No copy fills padding, so a padded tensor is cleared before its elements are copied.
            self._clear(done, portion.stop if plan.output.is_padded else portion.start)
            done = portion.stop
            if plan.update is not None:
                self._merge(self._shared.find_merged(file.index, portion.tensor, plan), portion, part)
            elif portion.tensor not in filled:
                there = {read.place - portion.start for read in job.early if read.place is not None}
                straight = self._fill(file.prepare(portion.tensor), portion.low, portion.high, part, there)
                runs += (run._replace(start=portion.start + run.start) for run in straight)
            elif len(plan.replicas):
                self._compare(file.prepare(portion.tensor), portion.low, portion.high, part)
            width = dtypes.dtype(plan.output.dtype).nbytes
            trailer = file.add(portion.tensor, portion.low * width, part) if self._shared.digests else None
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
        self._shared.job_done(job, nbytes, self._staging)

    def _fill_many(self, file: FileWindows, portions: Sequence[Portion]) -> set[int]:
        """Fill parts of straight tensors by tables of their copies, and return these tensors.

        A part that is long as it is stored remains for `_fill`, and so does one with an element that cannot be cast.
        """
        straight = {portion.tensor: portion for portion in portions if file.is_straight(portion.tensor)}
        plans = file.plan.tensors
        filled = {number for number in straight if plans[number].source_dtype == plans[number].output.dtype}
        for _, stretches in file.stretches(portion for number, portion in straight.items() if number in filled):
            read_stretches(self._shared.source, stretches, self._window, self._staging)
            self._shared.checksums.add_all(stretches, self._window)
        # One half of the buffer has what is read together, the other the elements as they are stored.
        half = len(self._staging) // 2
        staging, stored = self._staging[:half], self._staging[half:]
        to_cast = [portion for number, portion in straight.items() if number not in filled]
        for group, stretches in file.stretches(to_cast, half):
            read_stretches(self._shared.source, stretches, stored, staging)
            self._shared.checksums.add_all(stretches, stored)
            for number, low, high, start, stop in group:
                plan, part = plans[number], self._window[straight[number].start : straight[number].stop]
                # `_fill` meets the element again, and knows the rank that holds it.
                with suppress(CastOverflowError):
                    loops = ((high - low, 1, 1),)
                    copy_cast(stored[start:stop], plan.source_dtype, part, plan.output.dtype, 0, loops)
                    filled.add(number)
        return filled

    def _clear(self, start: int, stop: int) -> None:
        """Zero bytes of an earlier window that this one does not fill."""
        if start < stop:
            self._window[start:stop] = bytes(stop - start)

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
            self._fill(tensor.stored, low, high, stored)
            target = part[(low - portion.low) * target_width : (high - portion.low) * target_width]
            try:
                add_low_rank(stored, plan.source_dtype, factors, low, target, plan.output.dtype)
            except CastOverflowError as overflow:
                raise overflow_error(plan, int(plan.copies.rank[0]), overflow.value) from None

    def _whole(self, tensor: PreparedTensor) -> memoryview:
        """Return all of a small tensor, checked and compared like written ones."""
        memory = take_memory(tensor.plan.output.nbytes, f"{tensor.plan.output.name}, a factor of an update")
        self._fill(tensor, 0, tensor.plan.output.num_elements, memory)
        return memory

    def _fill(
        self, tensor: PreparedTensor, low: int, high: int, part: memoryview, there: Container[int] = ()
    ) -> list[SharedRun]:
        """Copy elements [low, high) of a tensor to `part`, and compare all replicas; return unchanged runs of bytes.

        Pieces whose first byte in `part` is in `there` are read already.
        """
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
                if len(into) >= SMALLEST_SHARED_NBYTES:
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
        self._compare(tensor, low, high, part)
        return runs

    def _compare(self, tensor: PreparedTensor, low: int, high: int, part: memoryview) -> None:
        """Compare all replicas of elements [low, high) of a tensor with `part`."""
        plan = tensor.plan
        width = dtypes.dtype(plan.source_dtype).nbytes
        for row, record, nest in tensor.replicas.cut(low, high):
            different = 0
            for tile, data in self._tiles(record, nest, width):
                if plan.source_dtype == plan.output.dtype and record not in plan.changed:
                    different += count_different(data, part, tile.target, tile.loops, width)
                else:
                    values, dtype = _values(plan, record, data)
                    different += count_cast_different(values, dtype, part, plan.output.dtype, tile.target, tile.loops)
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


_SIGNAL_LOOK_SECONDS = 0.2
_LONGEST_RUN = 8
"""Windows that are made at once in a target's own memory."""


class CancelledError(Exception):
    """`cancelled()` returned True; finished files stay finished."""


class Outcome(Struct):
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
    errors: dict[str, Sequence[float]] = field(default_factory=dict)
    """Last part of a module's name -> the fields of the `EncodingError` of all such modules, if it was asked for."""


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
    digests: bool = True,
    replicas: Literal["verify", "pick"] = "verify",
    begin: Callable[[int], None] = lambda index: None,
    finish: Callable[[FinishedFile], None] = lambda finished: None,
    finish_share: Callable[[FilePart], None] = lambda part: None,
    cancelled: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda done: None,
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
        checksums: state of the records that other executions have read; None: they have read none.
        file_hashes: gets each window of the files, which must be whole; None: they are not hashed.
        digests: whether tensors are digested; if not, `shares` are made, and their digests are not to be used.
        replicas: "verify" raises if pieces that must be equal differ, "pick" counts the differences.
        begin: called before a file's first byte is written, by one thread at a time.
        finish: called after a file's last byte was written and its sources were checked, by any thread.
        finish_share: called after a share's last byte was written, by any thread.
        cancelled: called before each window, by one thread at a time. If it returns True, the call raises
            CancelledError; it may also raise.
        progress: called with the bytes of all windows that are finished, by one thread at a time.

    Raises:
        CorruptError, ContradictionError: bytes differ from their recorded checksum; replicas differ.
        UsageError: a cast would turn a finite value into an infinite one.
    """
    objects: ObjectSource | None = getattr(source, "objects", None)
    share_memory: Callable[[int, int], tuple[int, int]] | None = getattr(target, "share_memory", None)
    whole = range(len(plan.files)) if files is None else files
    # Only what is made here is looked at: a caller that takes tensors one by one calls this for each.
    largest = max((plan.files[index].output.window_nbytes for index in (shares or whole)), default=0)
    is_straight = objects is None or is_mostly_straight(plan, whole if shares is None else [*shares], objects)
    is_straight = is_straight and largest <= WINDOW_NBYTES
    parts = None
    if share_memory is not None:
        most_nbytes = max((file.output.nbytes for file in plan.files), default=0)
        allowed = max(budget.allowed_nbytes, budget.nbytes)
        parts = share_memory(allowed * 5 // 8 if is_straight else allowed // 3, most_nbytes)
    if objects is not None:
        in_memory = hasattr(target, "place")
        budget = budget.share_with(objects, parts, in_memory=in_memory, is_straight=is_straight)
    checksums = checksums or make_checksums(plan)
    state = _Execution(
        plan, source, target, replicas, begin, finish, finish_share, cancelled, progress, budget.num_windows, checksums
    )
    state.file_hashes, state.digests = file_hashes, digests
    state.queue = state.windows([(index, None) for index in whole] if shares is None else shares.items())
    windows_nbytes = budget.num_windows * max(largest, WINDOW_NBYTES)
    workers = [Worker(state, budget.staging_nbytes, windows_nbytes) for _ in range(budget.workers)]
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
    """State that all workers share. Nothing refers back to it: the target's memory is free when the call is over."""

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
        checksums: RecordChecksums,
    ) -> None:
        self.checksums = checksums
        self.plan, self.source, self.target, self.replicas = plan, source, target, replicas
        self._begin, self._finish, self._finish_share = begin, finish, finish_share
        self._cancelled, self._progress, self._done, self._num_windows = cancelled, progress, 0, num_windows
        self.queue: Iterator[Job] = iter(())
        self.outcome = Outcome()
        self.failure: BaseException | None = None
        self.extents = SharedExtents(source, target)
        self._merged: WeakValueDictionary[tuple[int, int], MergedTensor] = WeakValueDictionary()
        """Tensors whose factors are in memory, by file and number: each as long as a worker refers to it."""
        self.file_hashes: FileHashes | None = None
        self.digests = True
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

    def find_merged(self, file: int, tensor: int, plan: TensorPlan) -> MergedTensor:
        """Return a tensor with an update; the same object for all callers while one of them refers to it."""
        with self._lock:
            found = self._merged.get((file, tensor))
            if found is None:
                assert plan.update is not None
                found = self._merged[file, tensor] = MergedTensor(plan, plan.update)
            return found

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

    def job_done(self, job: Job, nbytes: int, staging: memoryview) -> None:
        """Count a written run of windows; after the last one, report the file or the share of it."""
        file = job.file
        with self._lock:
            self._done += nbytes
            self._progress(self._done)
            file.remaining -= len(job.windows)
            if file.remaining:
                return
        if not file.is_whole:
            part = file.part()
            self._finish_share(part)
            with self._lock:
                self.outcome.parts[file.index] = part
            return
        # The worker of the last window reads the rest of the file's records: all checksums are then compared before the
        # file is reported as finished.
        read_rest(self.checksums, self.source, file.records, staging)
        finished, ending = file.finish()
        if self._late is None:
            for offset, data in ending:
                self.target.write(file.index, offset, memoryview(data))
        elif ending:
            self.write_late(file, ending[-1])
        self._finish(finished)
        with self._lock:
            self.outcome.files[file.index] = finished

    def write_late(self, file: FileWindows, placed: PlacedBytes) -> None:
        """Write bytes of a file's ending, if the target wants them as soon as they are known."""
        if self._late is not None:
            self._late(file.index, placed[0], memoryview(placed[1]))

    def differs(self, tensor: str, rank: int, num_elements: int) -> None:
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
