"""The errors of an execution: each names tensor, rank, file and range, and says how much."""

import random
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from tests.engine.engine_cases import MadeModel, MemorySource, add_random, box_nest, lay_out, outputs_of
from xrank import dtypes
from xrank.engine import faults
from xrank.engine.faults import checksum_error, difference_error, overflow_error
from xrank.engine.planner import make_plan
from xrank.errors import ContradictionError, CorruptError, UsageError
from xrank.layout.nests import Nest, restrict

pytestmark = pytest.mark.quick


def halves(whole: np.ndarray, dtype: str = "F32", *, has_checksum: bool = True) -> MadeModel:
    """Return a model of [4, 6]: left columns on ranks 0 and 2, right ones on 1 and 3, rank 3's stored transposed."""
    made = MadeModel()
    left, right = ((0, 4), (0, 3)), ((0, 4), (3, 6))
    nests = [box_nest(left, (4, 6)), box_nest(right, (4, 6)), box_nest(left, (4, 6)), box_nest(right, (4, 6), (1, 0))]
    made.add("a", dtype, (4, 6), whole, [(i, [nest]) for i, nest in enumerate(nests)], has_checksum=has_checksum)
    return made


def change(made: MadeModel, record: int, values: np.ndarray, *, is_recorded: bool = True) -> None:
    made.records[record] = values.tobytes()
    if is_recorded and made.crc32[record] >= 0:
        made.crc32[record] = zlib.crc32(made.records[record])


def difference_of(made: MadeModel, rank: int):
    plan = make_plan(made.in_memory(), lay_out(outputs_of(made)))
    (tensor,) = plan.tensors
    row = tensor.replicas.rank.tolist().index(rank)
    return difference_error(plan, tensor, row, MemorySource(made.views))


WHOLE = np.arange(24, dtype=np.float32)


@pytest.mark.parametrize("chunk_nbytes", [1 << 20, 16])
def test_a_difference_says_how_many_where_and_by_how_much(monkeypatch, chunk_nbytes):
    monkeypatch.setattr(faults, "_CHUNK_NBYTES", chunk_nbytes)
    made = halves(WHOLE)
    ours = WHOLE.reshape(4, 6)[:, 3:].T.copy()  # as rank 3 stores it
    ours[2, 1] += 0.5
    ours[0, 3] -= 8
    ours[1, 3] = np.nan
    change(made, 3, ours)
    error = difference_of(made, 3)
    assert type(error) is ContradictionError
    assert str(error) == "a: rank 3 holds different values than rank 1"
    assert (error.tensor, error.rank, error.file, error.index_range) == ("a", 3, "memory", "element [1, 5]")
    assert error.got == "3 of 12 elements differ, the first at element [1, 5], by at most 8, 1 of them by NaN"
    assert error.want == "equal replicas"


@pytest.mark.parametrize("dtype", sorted(dtypes.DTYPES))
def test_a_difference_of_any_element_type(dtype):
    width = dtypes.dtype(dtype).nbytes
    made = halves(np.zeros(24 * width, np.uint8), dtype)
    ours = np.zeros(12 * width, np.uint8)
    ours[5 * width] = 1
    change(made, 2, ours)
    error = difference_of(made, 2)
    assert type(error) is ContradictionError
    assert error.got.startswith("1 of 12 elements differ, the first at element [1, 2], by at most ")


def test_a_replica_of_what_several_ranks_hold_names_the_one_that_differs():
    made = MadeModel()
    rows = [box_nest(((i, i + 1), (0, 6)), (4, 6)) for i in range(4)]
    whole = box_nest(((0, 4), (0, 6)), (4, 6))
    made.add("a", "F32", (4, 6), WHOLE, [(i, [row]) for i, row in enumerate(rows)])
    made.add("b", "F32", (4, 6), WHOLE, [(9, [whole])])
    other = WHOLE.copy()
    other[13] = -1
    change(made, 4, other)
    plan = make_plan(made.in_memory(), lay_out(outputs_of(made)[:1]), tied={"a": ["b"]})
    (tensor,) = plan.tensors
    error = difference_error(plan, tensor, 0, MemorySource(made.views))
    assert str(error) == "b is tied to a, but rank 9's differs from rank 2's a"
    assert error.got == "1 of 24 elements differ, the first at element [2, 1], by at most 14"


@pytest.mark.parametrize(("record", "rank"), [(2, 2), (0, 0)])
def test_a_difference_that_is_damage_is_called_so(record, rank):
    made = halves(WHOLE)
    damaged = np.frombuffer(made.records[record], np.uint8).copy()
    damaged[17] ^= 4
    change(made, record, damaged, is_recorded=False)
    error = difference_of(made, 2)
    assert type(error) is CorruptError
    assert (error.tensor, error.rank) == ("a", rank)
    assert f"crc32 {zlib.crc32(damaged):08x}" in error.got
    assert f"crc32 {made.crc32[record]:08x}" in error.want


def test_damage_elsewhere_is_not_blamed():
    rows = MadeModel()
    flat = Nest(0, 0, ((24, 1, 1),))
    rows.add("a", "F32", (24,), WHOLE, [(r, restrict(flat, low, low + 12)) for r, low in [(0, 0), (1, 12), (2, 0)]])
    change(rows, 1, np.zeros(24, np.float32), is_recorded=False)
    damaged = np.frombuffer(rows.records[2], np.float32).copy()
    damaged[3] = 99
    change(rows, 2, damaged)
    error = difference_of(rows, 2)
    assert type(error) is ContradictionError
    assert error.got == "1 of 12 elements differ, the first at elements 3-3, by at most 96"


def test_without_checksums_a_difference_is_all_that_can_be_said():
    made = halves(WHOLE, has_checksum=False)
    change(made, 2, np.zeros(12, np.float32))
    assert difference_of(made, 2).got == "11 of 12 elements differ, the first at element [0, 1], by at most 20"


@pytest.mark.parametrize("record", range(4))
def test_a_checksum_names_tensor_rank_file_and_place(tmp_path, record):
    made = MadeModel()
    rng = random.Random(1)
    add_random(made, rng.randint, "other", (3, 3), num_cuts=0, replicas=False)
    rows = [box_nest(((i, i + 1), (0, 6)), (3, 6)) for i in range(3)]
    pieces = [*((i, [row]) for i, row in enumerate(rows)), (7, [rows[1]])]
    made.add("a", "F32", (3, 6), WHOLE[:18], pieces)
    plan = make_plan(made.on_disk(tmp_path), lay_out(outputs_of(made)))
    error = checksum_error(plan, record + 1, 0xABC)
    rank, row = [(0, 0), (1, 1), (2, 2), (7, 1)][record]
    path = str(tmp_path / f"rank_{rank}")
    offset = int(plan.source.records.offset[record + 1])
    assert type(error) is CorruptError
    assert str(error) == f"a, rows {row}-{row}: checksum of rank {rank}'s {path} at byte {offset} is wrong"
    assert (error.tensor, error.rank, error.file, error.index_range) == ("a", rank, path, f"rows {row}-{row}")
    assert error.got == "crc32 00000abc of 24 bytes"
    assert error.want == f"crc32 {made.crc32[record + 1]:08x}, as recorded by their writer"
    assert f"rank {rank}" in error.next_step


def test_a_checksum_of_what_no_tensor_uses_names_the_file(tmp_path):
    made = MadeModel()
    add_random(made, random.Random(2).randint, "unused", (3,), num_cuts=0)
    add_random(made, random.Random(3).randint, "a", (3,), num_cuts=0)
    plan = make_plan(made.on_disk(tmp_path), lay_out(outputs_of(made)[1:]))
    error = checksum_error(plan, 0, 1)
    assert (error.tensor, error.rank, error.file) == (None, None, str(tmp_path / "rank_0"))


def test_an_overflow_names_the_value_and_both_types():
    plan = SimpleNamespace(output=SimpleNamespace(name="a", dtype="F16"), source_dtype="BF16")
    error = overflow_error(plan, 6, 1.5e30)
    assert type(error) is UsageError
    assert str(error) == "a: 1.5e+30 does not fit F16"
    assert (error.tensor, error.rank, error.got) == ("a", 6, "1.5e+30 in BF16 on rank 6")
    assert "bf16" in error.next_step
