"""Megatron-core's ShardedTensors by stand-ins with the same attributes, both ways."""

from math import prod
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.layout.cut_layouts import cases, elements
from xrank.errors import ContradictionError, IncompleteError, LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.local_part import local_part
from xrank.layout.nests import Nest, addresses
from xrank.layout.notation import LayoutTree, Where
from xrank.layout.terms.sharded_tensor import ShardedTensorData, from_sharded_tensor, to_sharded_tensors

GRID = DeviceMesh((2, 2), ("dp", "tp"))


def shard(local, *rank_offsets, replica_id=0, prepend=0, **besides):
    """Return a shard as ``ShardedTensor.from_rank_offsets`` computes it from (axis, fragment, fragments)."""
    whole, offset, fragments = [1] * prepend + list(local), [0] * (prepend + len(local)), [1] * (prepend + len(local))
    for axis, place, count in rank_offsets:
        size = whole[axis]
        whole[axis], offset[axis], fragments[axis] = count * size, place * size, count
    said = {"key": "w", "local_shape": tuple(local), "global_shape": tuple(whole), "global_offset": tuple(offset)}
    said |= {"axis_fragmentations": tuple(fragments), "replica_id": replica_id, "prepend_axis_num": prepend}
    return SimpleNamespace(**said | {"allow_shape_mismatch": False, "flattened_range": None} | besides)


def box(low, high, shape, replica_id=0, **besides):
    """Return a shard of an irregular grid."""
    local = tuple(b - a for a, b in zip(low, high, strict=True))
    said = {"key": "w", "local_shape": local, "global_shape": shape, "global_offset": low, "axis_fragmentations": None}
    said |= {"replica_id": replica_id, "prepend_axis_num": 0, "allow_shape_mismatch": False, "flattened_range": None}
    return SimpleNamespace(**said | besides)


def held(placed):
    """Return per rank the global addresses of its shards, one after another."""
    return {
        rank: [y for part in parts for nest in part.nests for _, y in sorted(addresses(nest))]
        for rank, parts in placed.parts.items()
    }


@settings(deadline=None)
@given(cases(kinds=("/", "/~")))
def test_there_and_back_every_rank_holds_the_same(case):
    layout, mesh, shape = case
    told = to_sharded_tensors(layout, mesh, shape, "w")
    placed = from_sharded_tensor(told, mesh)
    theirs = elements(layout, mesh, shape)
    assert held(placed) == {rank: ys for rank, (_, ys) in theirs.items()}
    assert {rank: parts[0].shape for rank, parts in placed.parts.items()} == {r: s for r, (s, _) in theirs.items()}
    assert placed.layout is not None and elements(placed.layout, mesh, shape) == theirs
    # Which axes hold replicas is not to be seen where nothing is cut, or only ranks without elements differ.
    if prod(shape) and all(0 not in local for local, _ in theirs.values()):
        assert to_sharded_tensors(placed.layout, mesh, shape, "w") == told


@settings(deadline=None)
@given(cases(kinds=("/", "/~")), st.integers(0, 3))
def test_prepended_axes_are_told_shard_by_shard(case, count):
    layout, mesh, shape = case
    count = min(count, len(shape))
    told = to_sharded_tensors(layout, mesh, shape, "w", prepend_axis_num=count)
    theirs = elements(layout, mesh, shape)
    for rank, shards in told.items():
        local = theirs[rank][0]
        assert len(shards) == prod(local[:count])
        assert all(one.local_shape == local[count:] and one.prepend_axis_num == count for one in shards)
    if not any(told.values()):
        return
    placed = from_sharded_tensor(told, mesh)
    assert held(placed) == {rank: ys for rank, (_, ys) in theirs.items()}
    if placed.layout is None:
        # Ranks that hold nothing, for more than one reason: a rank past the end of one dim or another says neither.
        assert not all(told.values()) and count > 1
        return
    assert {r: ys for r, (_, ys) in elements(placed.layout, mesh, shape).items()} == held(placed)


@settings(deadline=None)
@given(cases(kinds=("/", "/~"), pieces=(1, 2, 3)))
def test_packed_pieces_there_and_back(case):
    layout, mesh, shape = case
    told = to_sharded_tensors(layout, mesh, shape, "w")
    placed = from_sharded_tensor(told, mesh)
    theirs = elements(layout, mesh, shape)
    assert {rank: sorted(ys) for rank, ys in held(placed).items()} == {r: sorted(ys) for r, (_, ys) in theirs.items()}
    if placed.layout is not None:
        assert {r: ys for r, (_, ys) in elements(placed.layout, mesh, shape).items()} == {
            rank: ys for rank, (_, ys) in theirs.items()
        }
    else:
        assert any(0 in local for local, _ in theirs.values())  # whose parts some ranks hold nothing of


def test_column_and_row_parallel_weights():
    def of_rank(rank, axis):
        dp, tp = divmod(rank, 2)
        return shard((3, 4), (axis, tp, 2), replica_id=(0, 0, dp))

    columns = from_sharded_tensor({rank: of_rank(rank, 0) for rank in range(4)}, GRID)
    assert (columns.key, columns.shape, str(columns.layout)) == ("w", (6, 4), "[d0/tp, d1]")
    assert columns.parts[3][0].shape == (3, 4) and columns.parts[3][0].nests == (Nest(0, 12, ((12, 1, 1),)),)
    rows = from_sharded_tensor({rank: [of_rank(rank, 1)] for rank in range(4)}, GRID)
    assert str(rows.layout) == "[d0, d1/tp]"


def test_layers_and_experts_are_prepended_axes():
    """Two stages of two layers each, columns over tp: a rank has a shard for each of its layers."""
    mesh = DeviceMesh((2, 2), ("pp", "tp"))

    def of_rank(rank):
        pp, tp = divmod(rank, 2)
        return [shard((3, 4), (0, 2 * pp + i, 4), (1, tp, 2), prepend=1) for i in range(2)]

    told = {rank: of_rank(rank) for rank in range(4)}
    placed = from_sharded_tensor(told, mesh)
    assert placed.shape == (4, 6, 4) and str(placed.layout) == "[d0/pp, d1/tp, d2]"
    assert [part.shape for part in placed.parts[3]] == [(3, 4), (3, 4)]
    assert placed.parts[3][1].nests == (Nest(0, 3 * 24 + 12, ((12, 1, 1),)),)
    back = to_sharded_tensors(placed.layout, mesh, placed.shape, "w", prepend_axis_num=1)
    assert [vars(one) for one in told[2]] == [{n: getattr(o, n) for n in vars(told[2][0])} for o in back[2]]


def test_stages_that_interleave_are_explicit_parts():
    """Virtual stages: stage 0 has layers 0 and 2, which is no cut by one axis."""
    told = {rank: [shard((3,), (0, rank + 2 * i, 4), prepend=1) for i in range(2)] for rank in range(2)}
    placed = from_sharded_tensor(told, DeviceMesh((2,), ("pp",)))
    assert placed.layout is None
    assert held(placed) == {0: [0, 1, 2, 6, 7, 8], 1: [3, 4, 5, 9, 10, 11]}


def test_gate_and_up_are_two_shards_of_doubled_fragments():
    """As apply_swiglu_sharded_factory builds them: a rank's part of each half."""
    told = {tp: [shard((2, 3), (0, tp, 4)), shard((2, 3), (0, tp + 2, 4))] for tp in range(2)}
    mesh = DeviceMesh((2,), ("tp",))
    placed = from_sharded_tensor(told, mesh)
    assert held(placed) == {0: [*range(6), *range(12, 18)], 1: [*range(6, 12), *range(18, 24)]}
    assert str(placed.layout) == "[2 d0/tp, d1]"
    assert {rank: ys for rank, (_, ys) in elements(placed.layout, mesh, (8, 3)).items()} == held(placed)
    for text in ("[2 f/tp, h]", "[<gate: f/tp | up: f/tp>, h]"):
        back = to_sharded_tensors(TensorLayout.parse(text), mesh, (8, 3), "w")
        assert [vars(one) for one in told[1]] == [{n: getattr(o, n) for n in vars(told[1][0])} for o in back[1]]


def test_pieces_that_are_not_alike_are_explicit_parts():
    """A rank's shards of a fused tensor in another order, or of unequal pieces."""
    mesh = DeviceMesh((2,), ("tp",))
    qkv = {
        tp: [box((2 * tp,), (2 * tp + 2,), (8,)), box((4 + tp,), (5 + tp,), (8,)), box((6 + tp,), (7 + tp,), (8,))]
        for tp in range(2)
    }
    assert from_sharded_tensor(qkv, mesh).layout is None
    crossed = {0: [shard((1,), (0, 0, 4)), shard((1,), (0, 3, 4))], 1: [shard((1,), (0, 1, 4)), shard((1,), (0, 2, 4))]}
    assert from_sharded_tensor(crossed, mesh).layout is None


def test_parts_of_any_sizes_are_explicit_and_ranks_may_hold_nothing():
    told = {0: box((0,), (1,), (6,)), 1: box((1,), (6,), (6,)), 2: box((6,), (6,), (6,))}
    placed = from_sharded_tensor(told, DeviceMesh((3,), ("dp",)))
    assert str(placed.layout) == "[d0/dp{1,5,0}]" and held(placed) == {0: [0], 1: [1, 2, 3, 4, 5], 2: []}
    chunks = {0: box((0,), (2,), (4,)), 1: box((2,), (4,), (4,)), 2: box((0,), (0,), (4,))}
    assert str(from_sharded_tensor(chunks, DeviceMesh((3,), ("dp",))).layout) == "[d0/~dp]"


def test_without_a_mesh_or_with_ranks_of_another_there_is_no_layout():
    told = {tp: shard((3,), (0, tp, 2)) for tp in range(2)}
    assert from_sharded_tensor(told).layout is None
    assert from_sharded_tensor(told, GRID).layout is None  # as of one stage of a pipeline
    assert held(from_sharded_tensor(told)) == {0: [0, 1, 2], 1: [3, 4, 5]}


def test_the_order_of_cuts_is_found():
    """tp cuts first although dp is the outer axis."""
    told = {rank: shard((2,), (0, (rank % 2) * 2 + rank // 2, 4)) for rank in range(4)}
    assert str(from_sharded_tensor(told, GRID).layout) == "[d0/tp/dp]"


def test_a_padded_vocabulary_is_called_so():
    told = {tp: shard((4, 2), (0, tp, 2), allow_shape_mismatch=True) for tp in range(2)}
    placed = from_sharded_tensor(told)
    assert placed.may_be_padded and placed.shape == (8, 2)
    assert not from_sharded_tensor({0: shard((4, 2))}).may_be_padded


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (shard((4,), flattened_range=slice(0, 2)), "range of flattened data"),
        (SimpleNamespace(key="w", data=None, replica_id=0), "is not a box of a tensor"),
        (shard((4,), global_offset=(1,)), "not within 0 to 4"),
        (shard((2,), (0, 0, 2), global_offset=(1,)), "offset 1 is not a multiple of the size 2"),
        (shard((2,), global_shape=(5,)), "1 fragments of 2 do not make 5"),
        (shard((2,), global_shape=(2, 2)), "different numbers of dims"),
        (shard((2,), axis_fragmentations=(1, 1)), "different numbers of dims"),
        (shard((2,), prepend_axis_num=1), "different numbers of dims"),
        (box((3,), (6,), (5,)), "3 to 6 is not within 0 to 5"),
    ],
)
def test_shards_that_contradict_themselves_are_refused(one, message):
    with pytest.raises(LayoutError, match=message) as info:
        from_sharded_tensor({7: one})
    assert info.value.rank == 7


@pytest.mark.parametrize(
    ("besides", "name"),
    [
        ({"key": "v"}, "key"),
        ({"axis_fragmentations": None}, "axis_fragmentations"),
        ({"allow_shape_mismatch": True}, "allow_shape_mismatch"),
        ({"local_shape": (4,), "global_shape": (8,), "global_offset": (4,)}, "global_shape"),
        ({"local_shape": (), "prepend_axis_num": 1, "axis_fragmentations": (4,)}, "prepend_axis_num"),
        ({"local_shape": (1,), "axis_fragmentations": (4,)}, "axis_fragmentations"),
    ],
)
def test_shards_that_disagree_are_refused(besides, name):
    first = shard((2,), (0, 0, 2))
    other = SimpleNamespace(**vars(shard((2,), (0, 1, 2))) | besides)
    with pytest.raises(ContradictionError, match=f"ranks 0 and 1 have shards with different {name}"):
        from_sharded_tensor({0: first, 1: other})


def test_dtypes_that_disagree_are_refused():
    told = {tp: shard((2,), (0, tp, 2), dtype=dtype) for tp, dtype in enumerate(["torch.bfloat16", "torch.float32"])}
    with pytest.raises(ContradictionError, match="several dtypes"):
        from_sharded_tensor(told)


def test_main_replicas_that_overlap_are_refused():
    with pytest.raises(ContradictionError, match="main replicas of ranks 0 and 3 overlap"):
        from_sharded_tensor({0: shard((2,), (0, 0, 2)), 1: shard((2,), (0, 1, 2)), 3: shard((2,), (0, 0, 2))})
    with pytest.raises(ContradictionError, match="main replicas of ranks 0 and 1 overlap") as info:
        from_sharded_tensor({0: box((0, 0), (4, 3), (4, 6)), 1: box((2, 2), (4, 6), (4, 6))})
    assert info.value.got == "rank 0: [0:4, 0:3], rank 1: [2:4, 2:6]"


def test_main_replicas_that_leave_a_gap_are_refused():
    with pytest.raises(IncompleteError, match="hold 2 of 4 elements"):
        from_sharded_tensor({0: shard((2,), (0, 0, 2))})
    with pytest.raises(IncompleteError, match="hold 0 of 2 elements"):
        from_sharded_tensor({0: shard((2,), replica_id=(0, 1))})
    with pytest.raises(IncompleteError, match="no shard is given"):
        from_sharded_tensor({0: []})


def test_a_replica_of_no_main_part_is_refused():
    told = {0: box((0,), (4,), (4,)), 1: box((0,), (2,), (4,), replica_id=1)}
    with pytest.raises(ContradictionError, match="rank 1's replica equals no main replica"):
        from_sharded_tensor(told)


@settings(deadline=None)
@given(cases(kinds=("/", "/~")), st.data())
def test_any_shard_left_out_or_told_twice_is_noticed(case, data):
    layout, mesh, shape = case
    told = to_sharded_tensors(layout, mesh, shape, "w")
    mains = [rank for rank, (one,) in told.items() if one.is_main and prod(one.local_shape)]
    if not mains:
        return
    rank = data.draw(st.sampled_from(mains))
    with pytest.raises(IncompleteError):
        from_sharded_tensor({**told, rank: (replace(told[rank][0], replica_id=1),)})
    with pytest.raises(ContradictionError):
        from_sharded_tensor({**told, 1000: told[rank]})


def test_numbers_of_an_uneven_grid():
    told = to_sharded_tensors(TensorLayout.parse("[f/~tp, h]"), GRID, (3, 2), "w")
    assert told[1] == (ShardedTensorData("w", (1, 2), (3, 2), (2, 0), None),)
    assert told[3] == (ShardedTensorData("w", (1, 2), (3, 2), (2, 0), None, replica_id=1),)


@pytest.mark.parametrize(
    ("text", "shape", "count", "message"),
    [
        ("[f/tp, h]", (3, 2), 0, "is not divisible"),
        ("[f/tp, h]", (4,), 0, "does not fit the shape"),
        ("[f/ep, h]", (4, 2), 0, "Invalid axis names"),
        ("[f/tp, h]", (4, 2), 3, "3 axes cannot be prepended"),
    ],
)
def test_what_no_sharded_tensor_says_is_refused(text, shape, count, message):
    with pytest.raises(LayoutError, match=message):
        to_sharded_tensors(TensorLayout.parse(text), GRID, shape, prepend_axis_num=count)


@settings(deadline=None)
@given(cases(kinds=("/", "/~"), pieces=(1, 2)), st.integers(0, 2), st.data())
def test_tensors_of_some_ranks_there_and_back(case, count, data):
    cut, mesh, shape = case
    free = [axis for axis in mesh.axis_names if not any(axis in axes for axes in cut.axes)]
    where = []
    for axis in free:
        first = data.draw(st.integers(0, mesh.axis_length(axis) - 1))
        where.append(Where(axis, first, data.draw(st.integers(first, mesh.axis_length(axis) - 1))))
    layout = TensorLayout.from_tree(LayoutTree(cut.dims, where=tuple(where)), mesh)
    told = to_sharded_tensors(layout, mesh, shape, "w", prepend_axis_num=min(count, len(shape)))
    parts = {rank: local_part(layout, mesh, mesh.coordinate(rank), shape) for rank in mesh.ranks}
    assert all(not told[rank] for rank, part in parts.items() if part is None)
    if not any(told.values()):
        return
    placed = from_sharded_tensor(told, mesh)
    theirs = {r: sorted(y for n in p.nests for _, y in addresses(n)) if p else [] for r, p in parts.items()}
    assert {rank: sorted(ys) for rank, ys in held(placed).items()} == theirs
    if placed.layout is None:
        # Ranks are empty for several reasons, or have pieces of what is told shard by shard.
        assert count or any(part is not None and 0 in part.shape for part in parts.values())
        return
    back = {rank: local_part(placed.layout, mesh, mesh.coordinate(rank), shape) for rank in mesh.ranks}
    assert {r: sorted(y for n in p.nests for _, y in addresses(n)) if p else [] for r, p in back.items()} == theirs
    if count == 0:  # otherwise an empty part and no part look alike
        assert {rank: part is None for rank, part in back.items()} == {r: part is None for r, part in parts.items()}


def test_where_is_said_and_read():
    mesh = DeviceMesh((3, 2, 2), ("pp", "dp", "tp"))
    layout = TensorLayout.parse("[f/tp, h] where pp=1..2", mesh)
    told = to_sharded_tensors(layout, mesh, (4, 3), "w")
    assert [len(told[rank]) for rank in mesh.ranks] == [0] * 4 + [1] * 8
    # The main replicas are the first of those that hold the tensor.
    assert [rank for rank, shards in told.items() if shards and shards[0].is_main] == [4, 5]
    assert [told[rank][0].replica_id for rank in (4, 6, 8, 10)] == [0, 1, 2, 3]
    placed = from_sharded_tensor(told, mesh)
    assert str(placed.layout) == "[d0/tp, d1] where pp=1..2"
    # Ranks that are no range of any axis are no layout's.
    assert from_sharded_tensor({**told, 5: ()} | {9: (replace(told[9][0], replica_id=0),)}, mesh).layout is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[f/tp, h] sum(dp)", r"cannot express 'sum\(dp\)'"),
        ("[f/tp{1,3}, h]", "have no such split"),
        ("[f/=tp, h]", "have no such split"),
        ("[(2 f/tp)/dp, h]", "is not a single size"),
    ],
)
def test_what_sharded_tensors_cannot_say_is_refused_by_name(text, message):
    with pytest.raises(LayoutError, match=message) as info:
        to_sharded_tensors(TensorLayout.parse(text), GRID, (4, 2))
    assert text in info.value.message
