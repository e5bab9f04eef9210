"""The plan: who is copied, who is compared, and what the errors name."""

import random

import numpy as np
import pytest

from tests.engine.engine_cases import MadeModel, add_random, box_nest, lay_out, outputs_of, pairs_of
from xrank.engine import planner
from xrank.engine.planner import Copies, divide_replicas, make_plan
from xrank.errors import ContradictionError, IncompleteError, LayoutError, UsageError
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest
from xrank.layout.output_files import OutputTensor
from xrank.layout.stored_model import RecordTable, SourceFile, StoredModel, StoredShard

pytestmark = pytest.mark.quick

ROWS = [box_nest(((i, i + 1), (0, 3)), (4, 3)) for i in range(4)]


def divided(tmp_path, pieces, *, shape=(4, 3)):
    """Divide a tensor "a" of these (rank, nest) pieces, which need no bytes: nothing is read."""
    ranks = sorted({rank for rank, _ in pieces})
    files = tuple(SourceFile(str(tmp_path / f"rank_{rank}"), 100, 0, 0) for rank in ranks)
    record = int_array(ranks.index(rank) for rank, _ in pieces)
    shard = StoredShard(
        "a",
        "F32",
        shape,
        int_array(rank for rank, _ in pieces),
        record,
        NestTable.from_nests([nest for _, nest in pieces]),
    )
    numbers = np.arange(len(ranks))
    model = StoredModel("made", "made", files, RecordTable(numbers, numbers * 0, numbers * 0 + 100, numbers), (shard,))
    return divide_replicas(shard, model)


def rows_of(copies: Copies) -> list[tuple[int, int]]:
    """Return (rank, first address) of each piece."""
    return list(zip(copies.rank.tolist(), copies.nests.y.tolist(), strict=True))


def test_the_lowest_rank_is_copied_and_the_others_are_compared(tmp_path):
    pieces = [(rank, ROWS[i]) for rank, i in [(3, 0), (1, 0), (2, 0), (5, 1), (0, 2), (7, 1), (6, 3), (0, 3)]]
    copies, replicas = divided(tmp_path, pieces)
    assert rows_of(copies) == [(1, 0), (5, 3), (0, 6), (0, 9)]
    assert sorted(rows_of(replicas)) == [(2, 0), (3, 0), (6, 9), (7, 3)]
    assert replicas.nests.y.tolist() == sorted(replicas.nests.y.tolist())


def test_replicas_may_lie_otherwise_in_their_storages(tmp_path):
    whole = box_nest(((0, 4), (0, 3)), (4, 3))
    transposed = box_nest(((0, 4), (0, 3)), (4, 3), (1, 0))
    in_two_loops = Nest(7, 0, ((2, 6, 6), (6, 1, 1)))
    copies, replicas = divided(tmp_path, [(2, transposed), (0, in_two_loops), (1, whole)])
    assert rows_of(copies) == [(0, 0)]
    assert rows_of(replicas) == [(1, 0), (2, 0)]


def test_random_models_divide_into_one_cover_and_the_rest(tmp_path):
    rng = random.Random(20261112)
    for i in range(150):
        made = MadeModel()
        shape = [rng.randint(0, 6) if i % 7 == 0 else rng.randint(1, 6) for _ in range(rng.randint(0, 3))]
        add_random(made, rng.randint, "a", shape, num_cuts=5)
        model = made.in_memory()
        copies, replicas = divide_replicas(model.shards[0], model)
        assert len(copies) + len(replicas) == len(made.records)
        covered = [y for row in range(len(copies)) for y in pairs_of(copies.nests[row])[1].tolist()]
        assert sorted(covered) == list(range(int(np.prod(shape))))
        assert all(rank < 10 for rank in copies.rank)
        assert all(rank >= 10 for rank in replicas.rank)


def test_a_tensor_without_elements_needs_nothing(tmp_path):
    copies, replicas = divided(tmp_path, [], shape=(0, 3))
    assert len(copies) == len(replicas) == 0


def test_a_gap_names_its_rows_and_who_was_there(tmp_path):
    with pytest.raises(IncompleteError) as caught:
        divided(tmp_path, [(0, ROWS[0]), (1, ROWS[0]), (3, ROWS[3])])
    error = caught.value
    assert str(error) == "a, rows 1-2: no rank wrote these elements"
    assert (error.tensor, error.index_range, error.got) == ("a", "rows 1-2", "pieces of ranks 0-1, 3")


def test_a_gap_at_the_end_and_inside_a_row(tmp_path):
    with pytest.raises(IncompleteError) as caught:
        divided(tmp_path, [(0, ROWS[0]), (0, ROWS[1])])
    assert caught.value.index_range == "rows 2-3"
    with pytest.raises(IncompleteError) as caught:
        divided(tmp_path, [(0, box_nest(((0, 4), (0, 2)), (4, 3)))])
    assert caught.value.index_range.startswith("elements [0, 2] to")


def test_a_tensor_that_nobody_holds(tmp_path):
    with pytest.raises(IncompleteError) as caught:
        divided(tmp_path, [])
    assert (caught.value.index_range, caught.value.got) == ("the whole tensor", "no piece at all")


def test_an_overlap_names_ranks_and_files(tmp_path):
    half = box_nest(((1, 2), (0, 2)), (4, 3))
    with pytest.raises(ContradictionError) as caught:
        divided(tmp_path, [(i, row) for i, row in enumerate(ROWS)] + [(9, half)])
    error = caught.value
    assert str(error) == "a, from element [1, 0] on: held twice, by ranks 1, 9, in different parts"
    assert (error.tensor, error.rank, error.file) == ("a", 9, str(tmp_path / "rank_9"))
    assert error.got == f"rank 1 in {tmp_path / 'rank_1'}, rank 9 in {tmp_path / 'rank_9'}"
    assert error.index_range == "element [1, 0]"


@pytest.mark.parametrize("shape", [(12,), (4, 3), (2, 2, 3)])
@pytest.mark.parametrize(("start", "address"), [(11, 13), (20, 22), (-2, -2)])
def test_elements_outside_name_rank_and_file(tmp_path, shape, start, address):
    row = Nest(0, start, ((3, 1, 1),))
    with pytest.raises(ContradictionError, match="outside the tensor") as caught:
        divided(tmp_path, [(0, Nest(0, 0, ((12, 1, 1),))), (4, row)], shape=shape)
    error = caught.value
    assert (error.tensor, error.rank, error.file) == ("a", 4, str(tmp_path / "rank_4"))
    assert (error.got, error.want) == (f"address {address}", f"less than 12, the size of {list(shape)}")


def plan_of(made: MadeModel, outputs=None, **tied):
    outputs = outputs_of(made) if outputs is None else outputs
    return make_plan(made.in_memory(), lay_out(outputs), tied=tied or None)


def tied_model(*, shape=(4, 3), dtype="F32") -> MadeModel:
    made, whole = MadeModel(), random.Random(3).randbytes(48)
    made.add("a", "F32", (4, 3), np.frombuffer(whole, np.uint8), [(i, [row]) for i, row in enumerate(ROWS)])
    whole = np.frombuffer(whole, np.uint8)[: int(np.prod(shape)) * (4 if dtype == "F32" else 2)]
    flat = Nest(0, 0, ((int(np.prod(shape)), 1, 1),))
    made.add("b", dtype, shape, whole, [(0, [flat]), (1, [flat])])
    return made


def test_tied_tensors_are_compared_and_not_written():
    made = tied_model()
    plan = plan_of(made, outputs_of(made)[:1], a=["b"])
    (tensor,) = plan.tensors
    assert rows_of(tensor.copies) == [(0, 0), (1, 3), (2, 6), (3, 9)]
    assert rows_of(tensor.replicas) == [(0, 0), (1, 0)]
    assert tensor.replicas.record.tolist() == [4, 5]
    assert plan.nbytes == plan.files[0].output.nbytes


def test_a_tied_tensor_joins_the_replicas_there_are():
    made = tied_model()
    made.add("c", "F32", (4, 3), np.frombuffer(made.whole["a"], np.uint8), [(7, [row]) for row in ROWS])
    (tensor,) = plan_of(made, outputs_of(made)[1:2], b=["a", "c"]).tensors
    assert rows_of(tensor.copies) == [(0, 0)]
    assert sorted(rows_of(tensor.replicas)) == sorted(
        [(1, 0), *((i, 3 * i) for i in range(4)), *((7, 3 * i) for i in range(4))]
    )
    assert tensor.replicas.nests.y.tolist() == sorted(tensor.replicas.nests.y.tolist())


@pytest.mark.parametrize("kinds", [{"shape": (3, 4)}, {"shape": (3, 3)}, {"dtype": "BF16"}])
def test_tied_tensors_must_be_of_one_kind(kinds):
    made = tied_model(**kinds)
    with pytest.raises(ContradictionError, match="b is tied to a, but they differ in kind") as caught:
        plan_of(made, outputs_of(made)[:1], a=["b"])
    assert caught.value.tensor == "b"


def test_tied_tensors_are_proven_too():
    made = tied_model()
    made.add("c", "F32", (4, 3), np.frombuffer(made.whole["a"], np.uint8), [(0, [ROWS[0]])])
    with pytest.raises(IncompleteError, match=r"c, rows 1-3: no rank wrote these elements"):
        plan_of(made, outputs_of(made)[:1], a=["c"])


FLOATS = ("F64", "F32", "F16", "BF16")


@pytest.mark.parametrize("source", [*FLOATS, "I32", "BOOL", "C64", "F8_E4M3"])
@pytest.mark.parametrize("target", [*FLOATS, "U8", "F8_E5M2"])
def test_only_plain_floats_are_cast(source, target):
    made = MadeModel()
    add_random(made, random.Random(1).randint, "a", (2, 3), dtype=source, num_cuts=0)
    outputs = [OutputTensor("a", target, (2, 3))]
    if source in FLOATS and target in FLOATS:
        (tensor,) = plan_of(made, outputs).tensors
        assert (tensor.source_dtype, tensor.output.dtype) == (source, target)
        return
    with pytest.raises(UsageError, match=f"a: no cast from {source} to {target}") as caught:
        plan_of(made, outputs)
    assert (caught.value.tensor, caught.value.got) == ("a", source)


def test_a_refused_proof_is_passed_on(monkeypatch):
    def refuse(nests, num_elements):
        raise LayoutError("too many boxes")

    planner.divide_pieces.cache_clear()  # what other tests have proven is not proven again
    monkeypatch.setattr(planner, "find_fault", refuse)
    made = tied_model()
    with pytest.raises(LayoutError, match="too many boxes"):
        plan_of(made)
