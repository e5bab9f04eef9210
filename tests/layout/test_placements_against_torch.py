"""Placements against real torch, both ways: its offsets under a fake process group, its DTensors on four real ranks.

Where torch contradicts itself, the elements that its DTensors really hold decide, and what they do not decide is
refused:

- A ``_StridedShard`` on one mesh axis holds a set of ranges, of which the offset helper tells the first element alone;
  as a range it would be wrong.
- A dim of several pieces that two axes cut: FSDP2 cuts it one way, transformers and ``distribute_tensor`` another, and
  ``full_tensor`` is wrong; refused both ways (test_packed_over_fsdp2.py).
- On a mesh that was flattened before, ``full_tensor`` of an uneven dim cut by two axes is wrong, and that of a strided
  shard an AssertionError; so no mesh is flattened here.
- Uneven dims cut by a strided shard: ``distribute_tensor`` from one rank fails, without one it cuts each of the parts
  by chunks, and FSDP2 over TP cuts the local tensor by chunks, under the same placements. `from_placements` reads them
  as FSDP2's, the only ones that training leaves, and `infer_shape` refuses local shapes that are not; `to_placements`
  refuses where the two differ.
"""

import itertools
import operator
import random
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.layout.cut_layouts import cases, elements
from tests.sampled import count_of
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.terms.tensors import describe_mesh, from_placements, to_placements


def cut_by_torch(shape, mesh, placements):
    """Return every rank's local shape and the global addresses there, as torch's own placements cut an arange."""
    held = {}
    for rank in mesh.ranks:
        tensor = torch.arange(prod(shape)).reshape(shape)
        for placement, place, length in zip(placements, mesh.coordinate(rank).values(), mesh.shape, strict=True):
            if not placement.is_replicate():
                tensor = placement._split_tensor(tensor, length, with_padding=False)[0][place]
        held[rank] = (tuple(tensor.shape), tensor.flatten().tolist())
    return held


@settings(deadline=None)
@given(cases(kinds=("/",)))
def test_even_layouts_are_said_as_torch_cuts_them(case):
    layout, mesh, shape = case
    placements = to_placements(layout, mesh)
    assert cut_by_torch(shape, mesh, placements) == elements(layout, mesh, shape)
    back = from_placements(mesh, placements, len(shape))
    assert elements(back, mesh, shape) == elements(layout, mesh, shape)
    assert to_placements(back, mesh, shape) == placements == to_placements(layout, mesh, shape)


@settings(deadline=None)
@given(cases(kinds=("/~",), in_mesh_order=True))
def test_chunks_in_the_meshs_order_are_said_as_torch_cuts_them(case):
    layout, mesh, shape = case
    placements = to_placements(layout, mesh)
    assert not any(isinstance(placement, _StridedShard) for placement in placements)
    assert cut_by_torch(shape, mesh, placements) == elements(layout, mesh, shape)
    assert from_placements(mesh, placements, len(shape)).axes == layout.axes


@settings(deadline=None)
@given(cases(kinds=("/", "/~")))
def test_chunks_in_another_order_are_said_or_refused_as_torch_cuts_them(case):
    layout, mesh, shape = case
    held = elements(layout, mesh, shape)
    try:
        placements = to_placements(layout, mesh, shape)
    except LayoutError:
        # What would have been said, had nobody looked: the same order of cuts, called even.
        called_even = TensorLayout.parse(str(layout).replace("~", ""), mesh)
        assert cut_by_torch(shape, mesh, to_placements(called_even, mesh)) != held
    else:
        assert cut_by_torch(shape, mesh, placements) == held


def test_uneven_dims_in_another_order_are_refused_where_torch_cuts_otherwise():
    refused = said = 0
    for dp, tp, size in itertools.product(range(1, 5), range(1, 4), range(26)):
        mesh = DeviceMesh((dp, tp), ("dp", "tp"))
        layout = TensorLayout.parse("[f/~tp/~dp]", mesh)
        placements = (_StridedShard(0, split_factor=tp) if tp > 1 else Shard(0), Shard(0))
        if cut_by_torch((size,), mesh, placements) == elements(layout, mesh, (size,)):
            assert to_placements(layout, mesh, (size,)) == placements
            said += 1
        else:
            refused += 1
            with pytest.raises(LayoutError, match="torch's own split"):
                to_placements(layout, mesh, (size,))
    assert said > 200 and refused > 10, (said, refused)


@pytest.fixture
def fake_rank():
    """Become a rank of a world that is not there."""

    def become(rank: int, world_size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def random_placements(rng, lengths, ndim):
    """Return any placements: shards of any dim, strided ones by any factor that lengths make, whether sound or not."""
    factors = sorted({1, 2, *lengths, *(a * b for a in lengths for b in lengths)})
    kinds = [lambda: Replicate(), lambda: Shard(rng.randrange(ndim)), lambda: Shard(rng.randrange(ndim))]
    if rng.random() < 0.5:
        kinds.append(lambda: _StridedShard(rng.randrange(ndim), split_factor=rng.choice(factors)))
    return tuple(rng.choice(kinds)() for _ in lengths)


def test_offsets_and_elements_are_torchs_over_hundreds_of_random_placements():
    """Whatever is not refused is as torch has it: shape, first element, and all elements where the dims are even."""
    rng = random.Random(23)
    read = refused = uneven = strided = 0
    for _ in range(count_of(600)):
        lengths = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
        mesh = DeviceMesh(lengths, [f"m{i}" for i in range(len(lengths))])
        ndim = rng.randint(1, 3)
        placements = random_placements(rng, lengths, ndim)
        even = rng.random() < 0.5
        shape = tuple(rng.randint(0, 2) * mesh.size if even else rng.randint(0, 9) for _ in range(ndim))
        is_strided = any(isinstance(placement, _StridedShard) for placement in placements)
        try:
            layout = from_placements(mesh, placements, ndim)
            held = elements(layout, mesh, shape)
        except LayoutError:
            assert is_strided  # plain shards and replicas are never refused
            refused += 1
            continue
        read += 1
        strided += is_strided
        uneven += not even
        theirs = cut_by_torch(shape, mesh, placements)
        if is_strided and theirs != held:
            # Uneven FSDP2 over TP, as said above; never passed on as these placements.
            with pytest.raises(LayoutError, match="torch's own split"):
                to_placements(layout, mesh, shape)
            continue
        assert held == theirs, (mesh, placements, shape)
        for rank in mesh.ranks:
            place = list(mesh.coordinate(rank).values())
            local, offset = _compute_local_shape_and_global_offset(shape, lengths, place, placements)
            assert held[rank][0] == local
            if held[rank][1]:
                assert tuple(int(i) for i in torch.unravel_index(torch.tensor(held[rank][1][0]), shape)) == offset
    found = (read, refused, uneven, strided)
    assert all(map(operator.gt, found, map(count_of, (300, 30, 100, 20)))), found


def test_a_layout_gives_the_shapes_and_offsets_of_a_real_mesh(fake_rank):
    rng = random.Random(5)
    for _ in range(10):
        lengths = tuple(rng.randint(1, 3) for _ in range(3))
        rank = rng.randrange(prod(lengths))
        fake_rank(rank, prod(lengths))
        torch_mesh = init_device_mesh("cpu", lengths, mesh_dim_names=("a", "b", "c"))
        mesh = describe_mesh(torch_mesh)
        order = rng.sample(["a", "b", "c"], 3)
        layout = TensorLayout.parse(f"[f/{order[0]}/{order[1]}, h/{order[2]}]", mesh)
        shape = (2 * prod(lengths), 3 * prod(lengths))
        local, offset = compute_local_shape_and_global_offset(shape, torch_mesh, to_placements(layout, mesh))
        mine = elements(layout, mesh, shape)[rank]
        assert (mine[0], mine[1][0]) == (local, offset[0] * shape[1] + offset[1])


def test_packed_gate_and_up():
    """A strided shard that no later axis explains: a rank holds its part of each half, a set of ranges."""
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    placements = (Replicate(), _StridedShard(0, split_factor=2))
    layout = from_placements(mesh, placements, 2)
    assert str(layout) == "[2 d0/~tp, d1]"
    assert [ys for _, ys in elements(layout, mesh, (8, 1)).values()] == [[0, 1, 4, 5], [2, 3, 6, 7]] * 2
    for text in ("[<gate: f/tp | up: f/tp>, h]", "[2 f/tp, h]", "[<gate: f/~tp | up: f/~tp>, h]"):
        assert to_placements(TensorLayout.parse(text), mesh) == placements
    # As a range torch's own helper would have it overlap: (4, offset 0) and (4, offset 2) of 8 rows.
    ranges = [_compute_local_shape_and_global_offset((8,), (2,), [tp], placements[1:]) for tp in range(2)]
    assert ranges == [((4,), (0,)), ((4,), (2,))]
    with pytest.raises(LayoutError, match="makes dim 0"):  # torch's halves of 7 rows are 4 and 3
        elements(layout, mesh, (7, 1))


@settings(deadline=None)
@given(cases(kinds=("/", "/~"), most_axes=1, pieces=(1, 2, 3)))
def test_packed_pieces_are_said_as_torch_cuts_them(case):
    layout, mesh, shape = case
    placements = to_placements(layout, mesh)
    assert cut_by_torch(shape, mesh, placements) == elements(layout, mesh, shape)
    back = from_placements(mesh, placements, len(shape))
    assert elements(back, mesh, shape) == elements(layout, mesh, shape)
    assert to_placements(back, mesh, shape) == placements


CASES = [
    ("[f/dp, h]", (6, 3)),
    ("[f/~dp, h/~tp]", (5, 3)),
    ("[f/~dp/~tp]", (7,)),
    ("[f/~dp/~tp, h]", (5, 2)),
    ("[f/tp/dp, h]", (8, 3)),
    ("[h, f/tp/dp]", (3, 4)),
    ("[f/~tp, h]", (1, 2)),
    ("[f, h]", (2, 2)),
    ("[2 f/tp, h]", (8, 3)),
    ("[<gate: f/~dp | up: f/~dp>, h]", (6, 2)),
    ("[<gate: f/dp | up: f/dp>, h/~tp]", (8, 3)),
    ("[3 f/tp, h/dp]", (12, 2)),
]


@pytest.mark.ranks(4)
def test_real_dtensors_hold_the_elements_that_the_layout_says(rank, world_size):
    torch_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = describe_mesh(torch_mesh)
    for text, shape in CASES:
        layout = TensorLayout.parse(text, mesh)
        whole = torch.arange(prod(shape)).reshape(shape)
        # From no rank, as transformers does: from one, torch refuses uneven pieces.
        source = None if "~" in text and "gate" in text else 0
        placements = to_placements(layout, mesh, shape)
        tensor = distribute_tensor(whole, torch_mesh, placements, src_data_rank=source)
        mine = elements(layout, mesh, shape)[rank]
        assert (tuple(tensor.to_local().shape), tensor.to_local().flatten().tolist()) == mine, text
        assert torch.equal(tensor.full_tensor(), whole), text
        back = from_placements(mesh, tensor.placements, len(shape))
        assert elements(back, mesh, shape)[rank] == mine, text


def random_dtensor_case(rng, lengths):
    """Return placements that `distribute_tensor` takes, and a shape, which strided shards cut evenly."""
    ndim = rng.randint(1, 3)
    orders = [[] for _ in range(ndim)]
    for i in rng.sample(range(len(lengths)), len(lengths)):
        if rng.random() < 0.8:
            orders[rng.randrange(ndim)].append(i)
    placements, shape = [Replicate()] * len(lengths), []
    for dim, order in enumerate(orders):
        for count, i in enumerate(order):
            factor = prod(lengths[before] for before in order[:count] if before > i)
            placements[i] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
        # Beside another strided dim torch 2.13 fails to gather packed pieces: a RuntimeError.
        is_packed = len(order) == 1 == max(map(len, orders)) and rng.random() < 0.6
        if is_packed:
            placements[order[0]] = _StridedShard(dim, split_factor=rng.randint(2, 3))
        parts = prod(lengths[i] for i in order)
        strided = any(isinstance(placements[i], _StridedShard) for i in order)
        shape.append(6 * parts * rng.randint(0, 2) if strided else rng.randint(0, 9))
    return tuple(placements), tuple(shape)


@pytest.mark.ranks(8)
@pytest.mark.parametrize("lengths", [(8,), (2, 4), (4, 2), (2, 2, 2)], ids=str)
def test_real_dtensors_over_random_placements(rank, lengths):
    """Read, held, gathered, and said again: as torch does it on eight processes."""
    torch_mesh = init_device_mesh("cpu", lengths, mesh_dim_names=[f"m{i}" for i in range(len(lengths))])
    mesh = describe_mesh(torch_mesh)
    rng = random.Random(str(lengths))
    kinds = {"strided": 0, "uneven": 0, "empty": 0}
    for _ in range(60):
        placements, shape = random_dtensor_case(rng, lengths)
        whole = torch.arange(prod(shape)).reshape(shape)
        is_strided = any(isinstance(placement, _StridedShard) for placement in placements)
        tensor = distribute_tensor(whole, torch_mesh, placements, src_data_rank=None if is_strided else 0)
        layout = from_placements(mesh, tensor.placements, len(shape))
        held = elements(layout, mesh, shape)
        assert (tuple(tensor.to_local().shape), tensor.to_local().flatten().tolist()) == held[rank], (placements, shape)
        local, offset = compute_local_shape_and_global_offset(shape, torch_mesh, placements)
        assert local == held[rank][0]
        if held[rank][1]:
            assert tuple(int(i) for i in torch.unravel_index(torch.tensor(held[rank][1][0]), shape)) == tuple(offset)
        assert torch.equal(tensor.full_tensor(), whole)
        again = distribute_tensor(whole, torch_mesh, to_placements(layout, mesh, shape), src_data_rank=None)
        assert torch.equal(again.to_local(), tensor.to_local())
        kinds["strided"] += is_strided
        kinds["uneven"] += len({local for local, _ in held.values()}) > 1
        kinds["empty"] += 0 in local
    assert kinds["strided"] >= 10 and kinds["uneven"] >= 5, kinds


@pytest.mark.ranks(4)
def test_addends_are_torchs_partial_sums(rank):
    torch_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = describe_mesh(torch_mesh)
    # As torch itself leaves them: rows times columns, both cut by the dim that is summed over.
    rows = distribute_tensor(torch.arange(12.0).reshape(3, 4), torch_mesh, [Replicate(), Shard(1)])
    columns = distribute_tensor(torch.ones(4, 5), torch_mesh, [Replicate(), Shard(0)])
    product = rows @ columns
    layout = from_placements(mesh, product.placements, 2)
    assert str(layout) == "[d0, d1] sum(tp)" and layout.device_mesh == mesh
    for text, placements in (
        ("[f, h] sum(tp)", (Replicate(), Partial())),
        ("[f/~dp, h] sum(tp)", (Shard(0), Partial("sum"))),
        ("[f] sum(tp) sum(dp)", (Partial(), Partial())),
        ("[f, 2 h/tp] sum(dp)", (Partial(), _StridedShard(1, split_factor=2))),
    ):
        layout = TensorLayout.parse(text, mesh)
        assert to_placements(layout, mesh) == placements
        back = from_placements(mesh, placements, len(layout.dims))
        assert set(back.tree.sums) == set(layout.tree.sums) and to_placements(back, mesh) == placements
        # Added up over the axes of the sums, the parts that the layout says are the tensor.
        shape = tuple(torch.Size([4, 4])[: len(layout.dims)])
        whole = torch.arange(prod(shape)).reshape(shape)
        share = 1 + mesh.coordinate(rank)[layout.tree.sums[0]]
        local_shape, held = elements(back, mesh, shape)[rank]
        local = (whole.flatten()[held] * share).reshape(local_shape)
        tensor = DTensor.from_local(local, torch_mesh, placements, shape=shape, stride=whole.stride())
        # Shares 1 and 2 along one of the axes; along the others both hold the same addend.
        factor = 3 * 2 ** (len(layout.tree.sums) - 1)
        assert torch.equal(tensor.full_tensor(), whole * factor), text


@pytest.mark.ranks(4)
def test_uneven_fsdp2_over_tp_holds_chunks_of_chunks(rank, world_size):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = describe_mesh(torch_mesh)
    for size in range(1, 10):
        module = torch.nn.Linear(1, size, bias=False)
        module.weight.data = torch.arange(size, dtype=torch.float32).reshape(size, 1)
        parallelize_module(module, torch_mesh["tp"], ColwiseParallel())
        fully_shard(module, mesh=torch_mesh["dp"])
        placements = module.weight.placements
        layout = from_placements(mesh, placements, 2)
        assert str(layout) == "[d0/~tp/~dp, d1]"
        local = module.weight.to_local()
        assert (tuple(local.shape), local.flatten().tolist()) == elements(layout, mesh, (size, 1))[rank]


def test_an_uneven_strided_dim_is_cut_in_two_ways(fake_rank):
    """The contradiction itself: one pair of placements and seven rows, cut by DTensor and by chunks of chunks."""
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    mesh = DeviceMesh((3, 2), ("dp", "tp"))
    layout = from_placements(mesh, placements, 1)
    by_chunks = elements(layout, mesh, (7,))
    by_dtensor = {}
    for rank in mesh.ranks:
        fake_rank(rank, mesh.size)
        torch_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axis_names)
        local = distribute_tensor(torch.arange(7), torch_mesh, placements, src_data_rank=None).to_local()
        by_dtensor[rank] = (tuple(local.shape), local.tolist())
    assert [held for _, held in by_chunks.values()] == [[0, 1], [4], [2, 3], [5], [], [6]]
    assert [held for _, held in by_dtensor.values()] == [[0, 1], [4], [2, 3], [5], [6], []]
    with pytest.raises(LayoutError, match="torch's own split"):
        to_placements(layout, mesh, (7,))


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("[f/~tp/~dp, h]", None, "depends on its size"),
        ("[f/~tp/dp, h]", None, "depends on its size"),
        ("[f/~tp/~dp, h]", (7, 1), "torch's own split"),
        ("[f/tp/dp, h]", (8, 1), "is not divisible"),
        ("[f/tp, h]", (4,), "does not fit the shape"),
        ("[5/tp, h]", (6, 1), "does not fit the shape"),
        ("[f/ep, h]", None, "Invalid axis names"),
        ("[f/=tp, h]", None, "have no such split"),
        ("[f/tp%8, h]", None, "have no such split"),
        ("[f/tp{3,5}, h]", None, "have no such split"),
        ("[2 f/dp/tp]", None, "split it in different ways"),
        ("[<q: f/tp | k: g/tp>, h]", None, r"<q: f/tp \| k: g/tp> is not a single size"),
        ("[<gate: f | up: f>/tp, h]", None, "is not a single size"),
        ("[g f/tp, h]", None, r"g f/tp is not a single size"),
        ("[pad(v, 4)/tp, h]", None, r"pad\(v, 4\)/tp is not a single size"),
        ("[f/tp, h] where dp=0", None, "cannot express 'where dp=0'"),
        ("[f/tp, h] sum(dp) where dp=0", None, "two roles"),
        ("[f/tp, h] in wide", None, "no view 'wide'"),
        ("[(2 f/tp)/dp, h]", None, r"\(2 f/tp\)/dp is not a single size"),
        ("flat(w [4, 3])/dp", None, "clauses besides its dims"),
    ],
)
def test_what_no_placements_say_is_refused(text, shape, message):
    mesh = DeviceMesh((3, 2), ("dp", "tp"))
    with pytest.raises(LayoutError, match=message):
        to_placements(TensorLayout.parse(text), mesh, shape)


def test_another_mesh_and_ranks_that_do_not_rise_are_refused():
    layout = TensorLayout.parse("[f/dp, h]", DeviceMesh((2,), ("dp",)))
    with pytest.raises(LayoutError, match="Cannot override device mesh"):
        to_placements(layout, DeviceMesh((4,), ("dp",)))
    turned = DeviceMesh((2,), ("dp",), (1, 0))
    with pytest.raises(LayoutError, match="are not ascending"):
        to_placements(TensorLayout.parse("[f/dp, h]"), turned)
    assert to_placements(TensorLayout.parse("[f, h]"), turned) == (Replicate(),)


def test_example_2_and_the_order_of_the_mesh():
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    assert to_placements(TensorLayout.parse("[f/tp/dp, h]"), mesh) == (_StridedShard(0, split_factor=2), Shard(0))
    assert to_placements(TensorLayout.parse("[f/~dp/~tp, h]"), mesh) == (Shard(0), Shard(0))
    assert to_placements(TensorLayout.parse("[h, f/tp]"), mesh) == (Replicate(), Shard(1))
