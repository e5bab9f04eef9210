"""Placements against torch itself, in one process: a fake process group of any size, one rank after another.

The only file that uses torch's private names for this.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh
from xrank.layout.local_part import infer_shape, local_part
from xrank.layout.nests import addresses
from xrank.layout.terms import describe_mesh, from_placements


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


def test_meshes_are_described_with_and_without_names(fake_rank):
    fake_rank(0, 4)
    assert describe_mesh(init_device_mesh("cpu", (2, 2))) == DeviceMesh((2, 2), ("a0", "a1"))
    turned = torch.distributed.DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("dp", "tp"))
    assert describe_mesh(turned) == DeviceMesh((2, 2), ("dp", "tp"), [3, 1, 2, 0])
    assert describe_mesh(turned["tp"]).axis_names == ("tp",)


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
    with pytest.raises(LayoutError, match="does not divide by"):
        local_part(layout, mesh, mesh.coordinate(0), (9, 1))
    thin = DeviceMesh((2, 1, 2), ("a", "b", "c"))
    assert str(from_placements(thin, (_StridedShard(0, split_factor=2), Shard(0), Shard(0)), 1)) == "[d0/~b/~c/~a]"


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ((Shard(0), _StridedShard(0, split_factor=2)), "counts 1 parts"),
        ((_StridedShard(0, split_factor=3), _StridedShard(0, split_factor=2)), "cut in one way or another"),
        ((_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2)), "cut in one way or another"),
        ((_StridedShard(0, split_factor=4), Shard(0)), "counts 4 parts"),
        ((Partial("max"), Shard(0)), "not addends of a sum"),
        ((Replicate(), Partial("avg")), "not addends of a sum"),
        ((Replicate(), _MaskPartial(offset_shape=torch.Size((4, 2)))), "not addends of a sum"),
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
    with pytest.raises(LayoutError, match="do not rise"):
        from_placements(mesh, [Shard(0)], 2)
    assert str(from_placements(mesh, [Replicate()], 2)) == "[d0, d1]"
    transposed = DeviceMesh((2, 2), ("dp", "tp"), (0, 2, 1, 3))
    assert str(from_placements(transposed, [Shard(0), Shard(1)], 2)) == "[d0/~dp, d1/~tp]"
