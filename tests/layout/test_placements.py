"""Placements against torch itself, in one process: a fake process group of any size, one rank after another.

The only file that uses torch's private names for this.
"""

import itertools
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh
from xrank.layout.local_part import infer_shape, local_part
from xrank.layout.nests import Nest, addresses
from xrank.layout.terms.tensors import describe_mesh, from_placements


def held(layout, mesh: DeviceMesh, rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the global addresses that a rank holds, in its local shape."""
    part = local_part(layout, mesh, mesh.coordinate(rank), shape)
    pairs = sorted(pair for nest in part.nests for pair in addresses(nest))
    assert [x for x, _ in pairs] == list(range(len(pairs)))
    return torch.tensor([y for _, y in pairs], dtype=torch.int64).reshape(part.shape)


def cut_by_torch(tensor: torch.Tensor, mesh: DeviceMesh, placements, rank: int) -> torch.Tensor:
    """Return a rank's local tensor as torch's own placements cut it, from the first mesh axis to the last."""
    for placement, place, length in zip(placements, mesh.coordinate(rank).values(), mesh.shape, strict=True):
        if not placement.is_replicate():
            pieces, _ = placement._split_tensor(tensor, length, with_padding=False)
            tensor = pieces[place]
    return tensor


def random_case(rng: random.Random, even: bool):
    """Return a mesh, placements that a chain of cuts makes, and a shape; strided shards only where even."""
    lengths = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    mesh = DeviceMesh(lengths, [f"m{i}" for i in range(len(lengths))])
    ndim = rng.randint(1, 3)
    placements: list = [Replicate()] * len(lengths)
    orders: list[list[int]] = [[] for _ in range(ndim)]
    for i in range(len(lengths)):
        if rng.random() < 0.75:
            dim = rng.randrange(ndim)
            orders[dim].append(i)
    for dim, order in enumerate(orders):
        if even:
            rng.shuffle(order)
        for position, i in enumerate(order):
            # The parts made before by later axes: what torch's split factor counts.
            factor = 1
            for j in order[:position]:
                factor *= lengths[j] if j > i else 1
            placements[i] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
    shape = [rng.randint(1, 3) if even else rng.randint(0, 9) for _ in range(ndim)]
    if even:
        for dim, order in enumerate(orders):
            for i in order:
                shape[dim] *= lengths[i]
    return mesh, placements, tuple(shape), orders


@pytest.mark.parametrize("even", [True, False])
def test_every_rank_holds_the_elements_that_torch_gives_it(even):
    rng = random.Random(7)
    for _ in range(250):
        mesh, placements, shape, orders = random_case(rng, even)
        layout = from_placements(mesh, placements, len(shape))
        assert [set(axes) for axes in layout.axes] == [{f"m{i}" for i in order} for order in orders]
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        coordinates = {rank: list(mesh.coordinate(rank).values()) for rank in mesh.ranks}
        for rank in mesh.ranks:
            mine = held(layout, mesh, rank, shape)
            theirs = cut_by_torch(whole, mesh, placements, rank)
            assert mine.shape == theirs.shape and torch.equal(mine, theirs), (mesh, placements, shape, rank)
            local, offset = _compute_local_shape_and_global_offset(shape, mesh.shape, coordinates[rank], placements)
            assert tuple(mine.shape) == local
            if mine.numel():
                first = torch.tensor(torch.unravel_index(mine.flatten()[0], shape)).tolist()
                assert tuple(first) == offset
        shapes = {rank: tuple(held(layout, mesh, rank, shape).shape) for rank in mesh.ranks}
        assert infer_shape(layout, mesh, shapes) == shape


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


def test_under_a_process_group_shapes_and_offsets_are_torchs(fake_rank):
    rng = random.Random(11)
    for _ in range(12):
        mesh, placements, shape, _ = random_case(rng, even=rng.random() < 0.5)
        for rank in rng.sample(mesh.ranks, min(3, mesh.size)):
            fake_rank(rank, mesh.size)
            torch_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axis_names)
            assert describe_mesh(torch_mesh) == mesh
            assert list(torch_mesh.get_coordinate()) == list(mesh.coordinate(rank).values())
            mine = held(from_placements(describe_mesh(torch_mesh), placements, len(shape)), mesh, rank, shape)
            local, offset = compute_local_shape_and_global_offset(shape, torch_mesh, placements)
            assert tuple(mine.shape) == local
            if mine.numel():
                first = torch.tensor(torch.unravel_index(mine.flatten()[0], shape)).tolist()
                assert tuple(first) == offset


def test_meshes_are_described_with_and_without_names(fake_rank):
    fake_rank(0, 4)
    assert describe_mesh(init_device_mesh("cpu", (2, 2))) == DeviceMesh((2, 2), ("a0", "a1"))
    turned = torch.distributed.DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("dp", "tp"))
    assert describe_mesh(turned) == DeviceMesh((2, 2), ("dp", "tp"), [3, 1, 2, 0])
    assert describe_mesh(turned["tp"]).axis_names == ("tp",)


def test_example_2_fsdp2_over_tp():
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    layout = from_placements(mesh, (_StridedShard(0, split_factor=2), Shard(0)), 2)
    assert str(layout) == "[d0/~tp/~dp, d1]" and layout.device_mesh == mesh
    assert local_part(layout, mesh, mesh.coordinate(1), (8, 3)).nests == (Nest(0, 12, ((6, 1, 1),)),)
    assert str(from_placements(mesh, (Shard(0), Shard(0)), 1)) == "[d0/~dp/~tp]"
    assert str(from_placements(mesh, (Shard(-1), Replicate()), 2)) == "[d0, d1/~dp]"
    assert str(from_placements(mesh, (Replicate(), Replicate()), 0)) == "[]"


def test_uneven_fsdp2_over_tp_is_torch_chunk_twice():
    for (dp, tp), n in itertools.product([(2, 2), (3, 2), (2, 3), (4, 3)], range(30)):
        mesh = DeviceMesh((dp, tp), ("dp", "tp"))
        layout = from_placements(mesh, (_StridedShard(0, split_factor=tp), Shard(0)), 1)
        for rank in mesh.ranks:
            at = mesh.coordinate(rank)
            local = torch.arange(n)
            for axis, length in (("tp", tp), ("dp", dp)):
                chunks = torch.chunk(local, length)
                local = chunks[at[axis]] if at[axis] < len(chunks) else local[:0]
            assert torch.equal(held(layout, mesh, rank, (n,)), local)


def test_where_torchs_own_uneven_strided_cut_differs_the_local_shapes_do():
    """DTensor's own redistribute cuts strided dims otherwise than FSDP2's chunks: that must never pass unseen."""
    differ = 0
    for (dp, tp), n in itertools.product([(2, 2), (3, 2), (2, 3), (4, 3), (2, 4), (5, 5)], range(40)):
        mesh = DeviceMesh((dp, tp), ("dp", "tp"))
        placements = (_StridedShard(0, split_factor=tp), Shard(0))
        layout = from_placements(mesh, placements, 1)
        theirs = {rank: cut_by_torch(torch.arange(n), mesh, placements, rank) for rank in mesh.ranks}
        if all(torch.equal(theirs[rank], held(layout, mesh, rank, (n,))) for rank in mesh.ranks):
            continue
        differ += 1
        with pytest.raises(LayoutError):
            infer_shape(layout, mesh, {rank: tuple(local.shape) for rank, local in theirs.items()})
    assert differ


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        ((_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), Shard(0)), "[d0/c/b/a, d1]"),
        ((_StridedShard(0, split_factor=6), Shard(0), Shard(0)), "[d0/b/c/a, d1]"),
        ((Shard(0), _StridedShard(0, split_factor=2), Shard(0)), "[d0/a/c/b, d1]"),
    ],
)
def test_a_strided_cut_among_three_of_one_dim_must_be_even(placements, text):
    """Uneven, torch's cut and chunks can have the same local shapes and other elements."""
    mesh = DeviceMesh((2, 3, 2), ("a", "b", "c"))
    layout = from_placements(mesh, placements, 2)
    assert str(layout) == text
    with pytest.raises(LayoutError, match="is not divisible by"):
        local_part(layout, mesh, mesh.coordinate(0), (9, 1))
    thin = DeviceMesh((2, 1, 2), ("a", "b", "c"))
    assert str(from_placements(thin, (_StridedShard(0, split_factor=2), Shard(0), Shard(0)), 1)) == "[d0/~b/~c/~a]"


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ((Shard(0), _StridedShard(0, split_factor=2)), "counts 1 parts"),
        ((_StridedShard(0, split_factor=3), _StridedShard(0, split_factor=2)), "split it in different ways"),
        ((_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2)), "split it in different ways"),
        ((_StridedShard(0, split_factor=4), Shard(0)), "counts 4 parts"),
        ((Partial("max"), Shard(0)), "not partial sums"),
        ((Replicate(), Partial("avg")), "not partial sums"),
        ((Replicate(), _MaskPartial(offset_shape=torch.Size((4, 2)))), "not partial sums"),
        ((Shard(2), Replicate()), "a dim that the tensor does not have"),
        ((Shard(-3), Replicate()), "a dim that the tensor does not have"),
        ((Shard(0),), "not one for each axis"),
        ((Shard(0), Shard(0), Shard(0)), "not one for each axis"),
    ],
)
def test_what_no_layout_says_is_refused(placements, message):
    with pytest.raises(LayoutError, match=message):
        from_placements(DeviceMesh((2, 2), ("dp", "tp")), placements, 2)


def test_an_unknown_placement_is_refused():
    ragged = SimpleNamespace(is_shard=lambda: False, is_partial=lambda: False, is_replicate=lambda: False)
    with pytest.raises(LayoutError, match="a layout cannot express"):
        from_placements(DeviceMesh((2,), ("dp",)), (ragged,), 1)


def test_a_strided_shard_that_calls_itself_a_shard_is_told_apart():
    old = type("_StridedShard", (), {"dim": 0, "split_factor": 2, "is_shard": lambda self: True})()
    assert str(from_placements(DeviceMesh((2, 2), ("dp", "tp")), (old, Shard(0)), 1)) == "[d0/~tp/~dp]"


def test_torch_is_not_imported():
    code = "import sys, xrank.layout.terms; assert not {'torch', 'jax', 'keras'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_order_of_cuts_that_placements_do_not_show(fake_rank):
    """A DTensorSpec's shard_order: dim 0 is cut by the second mesh axis first, so the ranks' offsets interleave."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    fake_rank(1, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    meta = TensorMeta(torch.Size((8, 3)), (3, 1), torch.float32)
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
    layout = from_placements(describe_mesh(mesh), spec.placements, 2, spec.shard_order)
    assert str(layout) == "[d0/~b/~a, d1]"
    rows = [held(layout, describe_mesh(mesh), rank, (8, 3))[:, 0].tolist() for rank in range(4)]
    assert rows == [[0, 3], [12, 15], [6, 9], [18, 21]]


def test_a_cut_along_ranks_that_do_not_rise_is_refused():
    """On such a mesh torch's full_tensor() and its own offsets disagree, so no layout would be the right one."""
    mesh = DeviceMesh((4,), ("dp",), (2, 1, 0, 3))
    with pytest.raises(LayoutError, match="are not ascending"):
        from_placements(mesh, [Shard(0)], 2)
    assert str(from_placements(mesh, [Replicate()], 2)) == "[d0, d1]"
    transposed = DeviceMesh((2, 2), ("dp", "tp"), (0, 2, 1, 3))
    assert str(from_placements(transposed, [Shard(0), Shard(1)], 2)) == "[d0/~dp, d1/~tp]"
