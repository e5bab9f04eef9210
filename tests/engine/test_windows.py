"""Windows against the bytes of the file they are cut from."""

import math
import random
import threading

import pytest
from msgspec.structs import replace

from tests.engine.engine_cases import MadeModel, add_random, expected_file, lay_out, outputs_of, pairs_of
from xrank import dtypes
from xrank.engine import windows
from xrank.engine.planner import Copies, FilePlan, TensorPlan, make_plan
from xrank.engine.windows import FileWindows, PreparedCopies
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest
from xrank.layout.output_files import OutputFile, OutputTensor

pytestmark = pytest.mark.quick

NO_COPIES = Copies(int_array([]), int_array([]), NestTable.from_nests([]))


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(windows, "WINDOW_NBYTES", 64)


def file_of(shapes: list[tuple[str, tuple[int, ...]]], header_nbytes: int = 16) -> FileWindows:
    offset, outputs = header_nbytes, []
    for i, (dtype, shape) in enumerate(shapes):
        outputs.append(OutputTensor(f"t{i}", dtype, shape, offset))
        offset += outputs[-1].nbytes
    file = OutputFile("f", bytes(header_nbytes), tuple(outputs), offset)
    return FileWindows(FilePlan(file, tuple(TensorPlan(o, o.dtype, NO_COPIES, NO_COPIES) for o in outputs)), 0)


def check_portions(file: FileWindows) -> None:
    """Check that the portions of all windows are each tensor's bytes, once and in order."""
    output = file.plan.output
    assert file.count == file.remaining == -(-output.nbytes // 64)
    seen: dict[int, int] = {}
    for window in range(file.count):
        last = 0
        for portion in file.portions(range(window, window + 1)):
            tensor = output.tensors[portion.tensor]
            width = dtypes.dtype(tensor.dtype).nbytes
            assert 0 <= portion.start < portion.stop <= 64
            assert portion.start >= last
            assert window * 64 + portion.start == tensor.offset + portion.low * width
            assert (portion.high - portion.low) * width == portion.stop - portion.start
            assert portion.low == seen.get(portion.tensor, 0)
            seen[portion.tensor], last = portion.high, portion.stop
    assert seen == {i: t.num_elements for i, t in enumerate(output.tensors) if t.nbytes}


def test_portions_are_every_tensor_once(small_windows):
    rng = random.Random(20261107)
    for _ in range(300):
        kinds = [(rng.choice(["F64", "C64"]), (rng.choice([0, 1, 3, 8, 16, 100]),)) for _ in range(rng.randint(0, 6))]
        kinds += [("BF16", (rng.choice([0, 1, 5, 32, 64, 200]),)) for _ in range(rng.randint(0, 6))]
        kinds += [("U8", (rng.choice([0, 1, 63, 64, 65, 500]),)) for _ in range(rng.randint(0, 6))]
        check_portions(file_of(kinds, rng.choice([8, 56, 64, 72, 200])))


def test_a_tensor_without_bytes_hides_no_other(small_windows):
    file = file_of([("U8", (0,)), ("U8", (200,)), ("U8", (0,)), ("U8", (0, 4)), ("U8", (9,)), ("U8", (0,))], 64)
    each = file.runs(1, 1)
    assert [[p.tensor for p in file.portions(one)] for one in each] == [[], [1], [1], [1], [1, 4]]


def test_runs_are_all_windows_in_order_and_end_at_each_unit(small_windows):
    rng = random.Random(20261126)
    for _ in range(300):
        count, unit = rng.randint(1, 40), rng.randint(1, 9)
        cuts = sorted(rng.sample(range(count + 1), min(2 * rng.randint(1, 3), (count + 1) // 2 * 2)))
        shares = [range(*pair) for pair in zip(cuts[::2], cuts[1::2], strict=True)]
        stretch = rng.randint(1, unit)
        plan = file_of([("U8", (64 * count - 16,))]).plan
        runs = list(FileWindows(plan, 0, shares).runs(stretch, unit))
        assert [window for run in runs for window in run] == [window for share in shares for window in share]
        assert all(1 <= len(run) <= stretch and run[0] // unit == run[-1] // unit for run in runs)


def test_a_file_of_a_header_alone_has_windows(small_windows):
    assert file_of([], 200).count == 4
    assert file_of([("F32", (0,))], 8).count == 1


def test_cut_yields_what_lies_in_a_range(small_windows):
    rng = random.Random(20261108)
    for _ in range(200):
        made = MadeModel()
        shape = [rng.randint(1, 9) for _ in range(rng.randint(1, 3))]
        add_random(made, rng.randint, "a", shape, num_cuts=4, replicas=False)
        plan = make_plan(made.in_memory(), lay_out(outputs_of(made)))
        copies = next(iter(plan.tensors)).copies
        prepared = PreparedCopies(copies, math.prod(shape))
        low = rng.randint(0, copies.nests.y_ends.max())
        high = rng.randint(low, copies.nests.y_ends.max())
        for _ in range(2):  # the second time from what was prepared
            cut = sorted(
                (record, int(x), low + int(y))
                for row, record, nest in prepared.cut(low, high)
                for x, y in zip(*pairs_of(nest), strict=True)
            )
            assert cut == sorted(
                (int(copies.record[row]), int(x), int(y))
                for row in range(len(copies))
                for x, y in zip(*pairs_of(copies.nests[row]), strict=True)
                if low <= y < high
            )


def test_stretches_are_the_bytes_of_straight_tensors(small_windows, monkeypatch):
    """In tables of a bounded size, for windows that cut tensors anywhere; other tensors have none."""
    monkeypatch.setattr(windows, "_MOST_STRETCHES", 4)
    rng = random.Random(20261129)
    num_straight = num_tables = 0
    for _ in range(200):
        made = MadeModel()
        for name in "abc":
            shape = [rng.randint(1, 9) for _ in range(rng.randint(1, 3))]
            add_random(made, rng.randint, name, shape, num_cuts=4)
        (output,) = lay_out(outputs_of(made))
        file = FileWindows(make_plan(made.in_memory(), [output]).files[0], 0)
        whole = expected_file(output, made.whole)
        for one in file.runs(2, 2):
            found, portions, first = {}, list(file.portions(one)), file.span(one)[0]
            straight = [portion for portion in portions if file.is_straight(portion.tensor)]
            for _, table in file.stretches(straight):
                num_tables += 1
                for record, start, place, nbytes in zip(*(column.tolist() for column in table), strict=True):
                    assert nbytes > 0
                    found.update((place + i, made.records[record][start + i]) for i in range(nbytes))
            num_straight += len(straight)
            assert found == {i: whole[first + i] for portion in straight for i in range(portion.start, portion.stop)}
    assert num_straight > 300 and num_tables > num_straight // 4


def test_groups_of_stored_elements_fit_their_room(small_windows):
    file = file_of([("BF16", (n,)) for n in (3, 4, 1, 9, 2, 8)])
    tensors = tuple(replace(tensor, source_dtype="F32") for tensor in file.plan.tensors)
    file = FileWindows(replace(file.plan, tensors=tensors), 0)
    portions = list(file.portions(range(2)))
    groups = [group for group, _ in file.stretches(portions, 32)]
    assert [[(one.tensor, one.start, one.stop) for one in group] for group in groups] == [
        [(0, 0, 12), (1, 12, 28), (2, 28, 32)],
        [(4, 0, 8)],
        [(5, 0, 32)],
    ]
    assert [portion.tensor for portion in portions] == [0, 1, 2, 3, 4, 5]


def test_few_prepared_tensors_are_kept():
    file = file_of([("U8", (1,))] * 1000)
    for i in range(1000):
        assert file.prepare(i).plan is file.plan.tensors[i]
        assert file.prepare(i) is file.prepare(i)
    assert len(file._prepared) == windows._PREPARED_TENSORS


def test_prepared_tensors_of_many_threads():
    file = file_of([("U8", (1,))] * 300)
    wrong = []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(2_000):
            i = rng.randrange(300)
            if file.prepare(i).plan is not file.plan.tensors[i]:
                wrong.append(i)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_records_are_those_of_copies_and_replicas():
    made = MadeModel()
    row = Nest(0, 0, ((4, 1, 1),))
    whole = random.Random(1)
    made.add("unused", "U8", (4,), memoryview(whole.randbytes(4)), [(0, [row])])
    made.add("a", "U8", (4,), memoryview(whole.randbytes(4)), [(1, [row]), (0, [row])])
    plan = make_plan(made.in_memory(), lay_out(outputs_of(made)[1:]))
    assert FileWindows(plan.files[0], 0).records.tolist() == [1, 2]
