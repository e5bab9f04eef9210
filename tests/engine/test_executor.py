"""Executions against the bytes that each tensor must become, on both kinds of source and target."""

import os
import random
import signal
import threading
import zlib
from contextlib import ExitStack, contextmanager
from copy import copy

import numpy as np
import pytest

from tests.engine.engine_cases import (
    MadeModel,
    MemorySource,
    add_random,
    box_nest,
    by_torch,
    expected_file,
    lay_out,
    outputs_of,
    plain_digest,
    use_as_store,
)
from xrank import dtypes
from xrank.engine import executor, windows
from xrank.engine.buffers import FileSource, FileTarget, MemoryTarget, NullTarget
from xrank.engine.executor import Budget, CancelledError, execute
from xrank.engine.object_records import ObjectSource
from xrank.engine.planner import make_plan
from xrank.engine.windows import digest_of_file
from xrank.errors import ContradictionError, CorruptError, UsageError
from xrank.layout.nests import Nest
from xrank.storage.uploads import PartPool, PartsTarget, UploadedFile, UploadedPart

pytestmark = pytest.mark.quick

BUDGET = Budget(2, 4096)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_thread_outlives_a_test():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture(params=["one by one", "as a table"])
def small_windows(monkeypatch, request):
    """Make windows of 512 bytes, so that small tensors cross many; their copies are few, or seem to be many."""
    monkeypatch.setattr(windows, "_MANY_COPIES", 16 if request.param == "one by one" else 0)
    for module in (windows, executor):
        monkeypatch.setattr(module, "WINDOW_NBYTES", 512)


class KeptParts:
    """Keeps the parts that are uploaded."""

    def __init__(self):
        self.parts = {}

    def put_part(self, key, upload_id, number, data):
        assert (key, number) not in self.parts, "a part was sent twice"
        self.parts[key, number] = bytes(data)
        return UploadedPart(number, len(data), "", 0)


def random_model(rng: random.Random) -> MadeModel:
    made = MadeModel()
    for i in range(rng.randint(1, 6)):
        shape = [rng.randint(0 if rng.random() < 0.1 else 1, 12) for _ in range(rng.randint(0, 4))]
        dtype = rng.choice(["F64", "C64", "I64", "F32", "BF16", "U16", "F8_E4M3", "BOOL"])
        add_random(made, rng.randint, f"t{i}", shape, dtype=dtype, num_cuts=rng.randint(0, 6))
    return made


@contextmanager
def opened(made: MadeModel, folder, files, source_kind: str, target_kind: str):
    """Yield the model, its source, a target, and a function that returns the output files' bytes."""
    models = {"memory": made.in_memory, "file": lambda: made.on_disk(folder)}
    model = models.get(source_kind, lambda: made.in_store(folder))()
    sources = {"memory": lambda: MemorySource(made.views), "file": lambda: FileSource(model)}
    source = sources.get(source_kind, lambda: ObjectSource(model))()
    with ExitStack() as stack:
        if source_kind != "memory":
            stack.callback(source.close)
        if target_kind == "parts":
            yield model, source, *stack.enter_context(uploading(files, random.Random(len(made.records))))
            return
        room = [bytearray(file.nbytes) for file in files]
        fds = {}
        if target_kind == "file":
            fds = {i: os.open(folder / file.name, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for i, file in enumerate(files)}
        for fd in fds.values():
            stack.callback(os.close, fd)
        target = FileTarget(fds) if fds else MemoryTarget([memoryview(view) for view in room])
        yield model, source, target, lambda: [os.pread(fds[i], 1 << 26, 0) for i in fds] or [bytes(r) for r in room]


@contextmanager
def uploading(files, rng: random.Random):
    """Yield a target that uploads files in parts of one to twelve windows, and a function that returns their bytes."""
    uploads, pool, target = KeptParts(), PartPool(), PartsTarget()
    target._pool = pool
    for i, file in enumerate(files):
        part_nbytes = rng.choice([1, 2, 5, 9, 12]) * 512
        target._files[i] = UploadedFile(uploads, pool, str(i), "", file.nbytes, part_nbytes)

    def written():
        numbers = [[part.number for part in target._files[i].finish_parts()] for i in range(len(files))]
        return [b"".join(uploads.parts[str(i), number] for number in each) for i, each in enumerate(numbers)]

    try:
        yield target, written
    finally:
        pool.close()


@pytest.mark.parametrize("target_kind", ["memory", "file", "parts"])
@pytest.mark.parametrize("source_kind", ["memory", "file", "object", "copied object"])
def test_random_models_become_their_bytes(tmp_path, small_windows, monkeypatch, source_kind, target_kind):
    use_as_store(tmp_path, monkeypatch, fills_memory=source_kind == "object")
    rng = random.Random(f"{source_kind}{target_kind}")
    for _ in range(100 if source_kind == target_kind == "memory" else 25):
        made = random_model(rng)
        files = lay_out(outputs_of(made), rng.randint(1, 3), rng.choice([8, 100, 512, 2000]))
        told, begun, finished = [], [], {}
        with opened(made, tmp_path, files, source_kind, target_kind) as (model, source, target, written):
            plan = make_plan(model, files)
            outcome = execute(
                plan,
                source,
                target,
                budget=Budget(rng.randint(1, 4), rng.choice([4096, 8192])),
                begin=begun.append,
                finish=lambda done, finished=finished: finished.setdefault(done.index, done),
                progress=told.append,
            )
            assert written() == [expected_file(file, made.whole) for file in files]
        assert told == sorted(told) and told[-1] == plan.nbytes == sum(file.nbytes for file in files)
        assert begun == list(range(len(files)))
        assert outcome.files == finished
        assert sorted(finished) == begun
        for i, file in enumerate(files):
            digests = [plain_digest(made.whole[tensor.name]) for tensor in file.tensors]
            assert list(finished[i].tensor_digests) == digests
            assert finished[i].digest == digest_of_file(file.header, digests)
        assert outcome.num_checksums == sum(crc >= 0 for crc in made.crc32)
        assert outcome.differences == {}


@pytest.mark.parametrize(("source_kind", "target_kind"), [("file", "file"), ("memory", "memory")])
def test_windows_and_buffers_of_the_real_size(tmp_path, source_kind, target_kind):
    rng = random.Random(20261113)
    made = MadeModel()
    for i, (shape, dtype) in enumerate([((1100, 700), "F32"), ((1_500_001,), "U8"), ((3, 700, 300), "BF16")]):
        add_random(made, rng.randint, f"t{i}", shape, dtype=dtype, num_cuts=5)
    whole = np.frombuffer(rng.randbytes(4 * 900 * 800), np.uint8)
    pieces = [(i, [box_nest(((0, 900), (i * 400, i * 400 + 400)), (900, 800), (1, 0))]) for i in range(2)]
    made.add("transposed", "F32", (900, 800), whole, pieces)
    files = lay_out(outputs_of(made), 2, 4096)
    with opened(made, tmp_path, files, source_kind, target_kind) as (model, source, target, written):
        execute(make_plan(model, files), source, target, budget=Budget.from_memory(4 * MIB, 2))
        assert written() == [expected_file(file, made.whole) for file in files]


@pytest.mark.parametrize("target", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("source", ["F64", "F32", "F16", "BF16"])
def test_casts_through_windows(small_windows, source, target):
    rng, made = random.Random(source + target), MadeModel()
    wide = dtypes.numpy_dtype(source)
    expected = {}
    for i in range(12):
        shape = [rng.randint(1, 20) for _ in range(rng.randint(0, 3))]
        values = np.random.default_rng(i).standard_normal(int(np.prod(shape))).astype(wide)
        add_random(made, rng.randint, f"t{i}", shape, dtype=source, whole=values, num_cuts=4)
        expected[f"t{i}"] = by_torch(values.view(f"u{wide.itemsize}"), source, target).tobytes()
    files = lay_out(outputs_of(made, target))
    room = bytearray(files[0].nbytes)
    plan, memory = make_plan(made.in_memory(), files), MemoryTarget([memoryview(room)])
    # The smaller buffer has no room for a window of all types, as they are stored.
    outcome = execute(plan, MemorySource(made.views), memory, budget=Budget(2, rng.choice([1024, 8192])))
    assert bytes(room) == expected_file(files[0], expected)
    assert outcome.num_checksums == sum(crc >= 0 for crc in made.crc32)


def test_a_cast_that_overflows_ends_the_execution(small_windows):
    made = MadeModel()
    values = np.ones(100, np.float32)
    values[70] = 1e30
    row = Nest(0, 0, ((50, 1, 1),))
    made.add("a", "F32", (100,), values, [(0, [row]), (3, [row._replace(y=50)])])
    plan = make_plan(made.in_memory(), lay_out(outputs_of(made, "F16")))
    with pytest.raises(UsageError, match=r"1e\+30 does not fit F16") as caught:
        execute(plan, MemorySource(made.views), NullTarget(), budget=BUDGET)
    assert (caught.value.tensor, caught.value.rank) == ("a", 3)


def test_thousands_of_tiny_tensors_in_a_window():
    rng, made = random.Random(20261114), MadeModel()
    for i in range(2_000):
        shape = rng.choice([(), (0,), (1,), (2, 2), (5,)])
        add_random(made, rng.randint, f"t{i:05}", shape, dtype="BF16", num_cuts=1)
    files = lay_out(outputs_of(made))
    assert files[0].nbytes < MIB
    room, told = bytearray(files[0].nbytes), []
    outcome = execute(
        make_plan(made.in_memory(), files),
        MemorySource(made.views),
        MemoryTarget([memoryview(room)]),
        budget=Budget(4, MIB),
        progress=told.append,
    )
    assert bytes(room) == expected_file(files[0], made.whole)
    assert told == [files[0].nbytes]
    assert len(outcome.files[0].tensor_digests) == 2_000


def test_only_the_files_asked_for_are_made(small_windows):
    made = MadeModel()
    for i in range(6):
        add_random(made, random.Random(i).randint, f"t{i}", (20, 20), num_cuts=3)
    files = lay_out(outputs_of(made), 3)
    room = [bytearray(file.nbytes) for file in files]
    begun, told = [], []
    outcome = execute(
        make_plan(made.in_memory(), files),
        MemorySource(made.views),
        MemoryTarget([memoryview(view) for view in room]),
        budget=BUDGET,
        files=[2, 0],
        begin=begun.append,
        progress=told.append,
    )
    assert begun == [2, 0]
    assert sorted(outcome.files) == [0, 2]
    assert [bytes(view) for view in room] == [
        expected_file(files[0], made.whole),
        bytes(files[1].nbytes),
        expected_file(files[2], made.whole),
    ]
    assert told == sorted(told) and told[-1] == files[0].nbytes + files[2].nbytes
    assert (
        execute(make_plan(made.in_memory(), files), MemorySource(made.views), NullTarget(), budget=BUDGET, files=[])
        == executor.Outcome()
    )


def two_ranks(*, change: int | None = None, record: int = 1, is_recorded: bool = False, has_checksum: bool = True):
    """Return a model whose tensor two ranks hold, with one byte of a record changed.

    Args:
        change: the byte.
        record: which record; the higher rank's is 1.
        is_recorded: whether the record's checksum is that of the changed bytes: the ranks differ.
        has_checksum: whether there are checksums at all.
    """
    made = MadeModel()
    whole = np.frombuffer(random.Random(5).randbytes(4 * 60 * 50), np.uint8)
    nest = box_nest(((0, 60), (0, 50)), (60, 50))
    made.add("a", "F32", (60, 50), whole, [(0, [nest]), (4, [nest])], has_checksum=has_checksum)
    if change is not None:
        changed = bytearray(made.records[record])
        changed[change] ^= 1
        made.records[record] = bytes(changed)
        if is_recorded and has_checksum:
            made.crc32[record] = zlib.crc32(changed)
    return made


def run(made: MadeModel, **options):
    plan = make_plan(made.in_memory(), lay_out(outputs_of(made)))
    return execute(plan, MemorySource(made.views), NullTarget(), budget=BUDGET, **options)


@pytest.mark.parametrize("has_checksum", [True, False])
def test_replicas_that_differ_end_the_execution(small_windows, has_checksum):
    made = two_ranks(change=4 * 555 + 1, is_recorded=True, has_checksum=has_checksum)
    with pytest.raises(ContradictionError) as caught:
        run(made)
    error = caught.value
    assert str(error) == "a: rank 4 holds different values than rank 0"
    assert (error.tensor, error.rank, error.index_range) == ("a", 4, "element [11, 5]")
    assert error.got.startswith("1 of 3,000 elements differ, the first at element [11, 5]")


def test_replicas_that_differ_are_counted_where_the_lowest_rank_is_picked(small_windows):
    made = two_ranks(change=4 * 555 + 1, is_recorded=True)
    outcome = run(made, replicas="pick")
    assert outcome.differences == {"a": {4: 1}}
    assert outcome.num_checksums == 2
    assert outcome.files[0].tensor_digests == (plain_digest(made.whole["a"]),)


@pytest.mark.parametrize("replicas", ["verify", "pick"])
@pytest.mark.parametrize("record", [0, 1])
def test_a_corrupt_replica_is_corrupt_and_no_difference(small_windows, replicas, record):
    with pytest.raises(CorruptError, match="checksum") as caught:
        run(two_ranks(change=4 * 555 + 1, record=record), replicas=replicas)
    error = caught.value
    assert (error.tensor, error.rank) == ("a", (0, 4)[record])
    assert error.index_range == "the whole tensor"
    assert "crc32" in error.got


def test_corruption_of_bytes_that_belong_to_no_tensor_is_found(small_windows):
    made = MadeModel()
    column = box_nest(((0, 40), (0, 2)), (40, 2), (0, 1))
    spread = column._replace(loops=((40, 9, 2), (2, 1, 1)))  # rows of 2 with 7 between them: read one by one
    made.add("a", "F32", (40, 2), np.zeros(320, np.uint8), [(0, [spread])], noise=3)
    assert run(made).num_checksums == 1
    for byte in (0, 4 * (3 + 9 + 5), len(made.records[0]) - 1):
        changed = bytearray(made.records[0])
        changed[byte] ^= 1
        damaged = copy(made)
        damaged.records = [bytes(changed)]
        with pytest.raises(CorruptError):
            run(damaged)


def test_cancelled_before_anything_and_in_between(small_windows):
    made = two_ranks()
    calls = iter([False, False, True])
    told = []
    with pytest.raises(CancelledError):
        run(made, cancelled=lambda: True, progress=told.append)
    assert told == []
    with pytest.raises(CancelledError):
        run(made, cancelled=lambda: next(calls, True), progress=told.append)
    assert max(told, default=0) <= 2 * 512


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("where", ["begin", "finish", "cancelled", "progress"])
def test_a_callback_that_raises_ends_the_execution(small_windows, where):
    def fail(*_):
        raise BrokenError(where)

    with pytest.raises(BrokenError, match=where):
        run(two_ranks(), **{where: fail})


@pytest.mark.parametrize("workers", [1, 4])
def test_a_write_that_fails_ends_the_execution(small_windows, workers):
    made, written = two_ranks(), []

    class Target:
        def write(self, file, offset, data):
            if offset >= 3 * 512:
                raise OSError(28, "No space left on device")
            written.append(offset)

    plan = make_plan(made.in_memory(), lay_out(outputs_of(made)))
    finished = []
    with pytest.raises(OSError, match="No space"):
        execute(plan, MemorySource(made.views), Target(), budget=Budget(workers, 4096), finish=finished.append)
    assert not finished
    assert set(written) <= {0, 512, 1024}


def test_a_read_that_fails_ends_the_execution(small_windows):
    class Source(MemorySource):
        def read_into(self, record, start, into):
            if start > 5_000:
                raise BrokenError
            super().read_into(record, start, into)

    made = two_ranks()
    plan = make_plan(made.in_memory(), lay_out(outputs_of(made)))
    with pytest.raises(BrokenError):
        execute(plan, Source(made.views), NullTarget(), budget=BUDGET)


def test_a_thread_that_cannot_be_started_ends_the_execution(small_windows, monkeypatch):
    start, started = threading.Thread.start, []

    def start_two(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    made = two_ranks()
    plan = make_plan(made.in_memory(), lay_out(outputs_of(made)))
    with pytest.raises(RuntimeError, match="can't start"):
        execute(plan, MemorySource(made.views), NullTarget(), budget=Budget(4, 4096))
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_waits_for_the_windows_under_way(small_windows, workers):
    """A write that still runs after the call returned would write to a descriptor that the caller has closed."""
    made = two_ranks()
    plan = make_plan(made.in_memory(), lay_out(outputs_of(made)))
    entered, may_go_on, returned, late = threading.Barrier(workers + 1), threading.Event(), threading.Event(), []

    class Target:
        def write(self, file, offset, data):
            if not may_go_on.is_set():  # which it is if the signal is delivered late
                entered.wait(50)
                may_go_on.wait(50)
            late.append(returned.is_set())

    def interrupt():
        entered.wait(50)  # until all workers write
        # To this thread: one that a worker gets does not wake the main thread.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        # Only so long that a call which does not wait would have returned by now.
        returned.wait(0.2)
        may_go_on.set()

    helper = threading.Thread(target=interrupt)
    helper.start()
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            execute(plan, MemorySource(made.views), Target(), budget=Budget(workers, 4096))
    finally:
        returned.set()
        signal.signal(signal.SIGINT, previous)
        helper.join()
    assert late and not any(late)


def test_a_budget_fits_the_memory_it_is_given():
    for max_memory in (MIB + 512 * 1024, 2 * MIB, 5 * MIB, 7_777_777, 64 << 20, 1 << 40):
        for workers in (1, 2, 3, 16):
            budget = Budget.from_memory(max_memory, workers)
            assert 1 <= budget.workers <= workers
            assert budget.nbytes == budget.workers * (MIB + 2 * budget.staging_nbytes) <= max_memory
            assert 256 * 1024 <= budget.staging_nbytes <= 2 * MIB
            assert budget.staging_nbytes % 4096 == 0
    assert Budget.from_memory(64 << 20, 2) == Budget(2, 2 * MIB, 64 << 20)
    assert Budget.from_memory(4 * MIB, 16).workers == 2


@pytest.mark.parametrize(("max_memory", "workers"), [(MIB + 512 * 1024 - 1, 1), (64 << 20, 0), (0, 1)])
def test_a_budget_that_is_too_small_is_refused(max_memory, workers):
    with pytest.raises(UsageError, match="too small") as caught:
        Budget.from_memory(max_memory, workers)
    assert "1,572,864 bytes" in caught.value.want


class Objects:
    """Takes the room of a source's blocks."""

    def limit(self, nbytes):
        self.room_nbytes = nbytes


@pytest.mark.parametrize("max_memory", [12 * MIB, 64_000_000, 256_000_000, 1 << 30])
@pytest.mark.parametrize("workers", [1, 2, 16])
@pytest.mark.parametrize("target", ["file", "memory", "parts"])
@pytest.mark.parametrize("is_straight", [True, False])
def test_a_budget_is_shared_with_a_store(max_memory, workers, target, is_straight):
    objects, num_parts = Objects(), max(4, min(17, max_memory * 5 // 8 // (5 * MIB)))
    parts = (num_parts * 5 * MIB, num_parts) if target == "parts" else None
    given = Budget.from_memory(max_memory, workers)
    budget = given.share_with(objects, parts, in_memory=target == "memory", is_straight=is_straight)
    windows_nbytes = parts[0] if parts else budget.workers * budget.num_windows * MIB
    staging_nbytes = budget.workers * 2 * budget.staging_nbytes
    assert windows_nbytes + objects.room_nbytes + staging_nbytes <= max(max_memory, 24 * MIB)
    assert 1 <= budget.workers <= (num_parts - 1 if parts else 16)
    assert (budget.num_windows == 4) == (target == "file" and is_straight and max_memory > 32 * MIB)
    assert parts or objects.room_nbytes >= max_memory * 3 // 16 or objects.room_nbytes == 64 * MIB


def test_the_smallest_budget_moves_everything(tmp_path):
    made = MadeModel()
    add_random(made, random.Random(9).randint, "a", (900, 1000), dtype="F64", num_cuts=6)
    files = lay_out(outputs_of(made))
    with opened(made, tmp_path, files, "file", "file") as (model, source, target, written):
        execute(make_plan(model, files), source, target, budget=Budget.from_memory(MIB + 512 * 1024, 9))
        assert written() == [expected_file(files[0], made.whole)]
