"""FSDP2 over a dim of packed pieces: one pair of placements that torch and transformers give several contents.

Who cut the tensor is not to be seen in it, so it is refused, and the notation says what placements do not. Where FSDP2
cuts another dim than the packed one, all agree.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.layout.cut_layouts import elements
from xrank.errors import LayoutError
from xrank.layout import TensorLayout
from xrank.layout.terms.tensors import describe_mesh, from_placements, to_placements


def fsdp2_over_packed(torch_mesh, weight, dim):
    """Return a weight as transformers' packed_colwise and fully_shard leave it: tp cuts halves of a dim, dp rows."""
    module = torch.nn.Module()
    packed = [_StridedShard(dim, split_factor=2)]
    module.weight = torch.nn.Parameter(distribute_tensor(weight, torch_mesh["tp"], packed, src_data_rank=None))
    fully_shard(module, mesh=torch_mesh["dp"])
    return module.weight


def rows_loaded_by_transformers(placements, torch_mesh, rank, shape):
    """Return the rows that transformers reads from a file for this rank's part of a parameter."""
    utils = pytest.importorskip("transformers.distributed.sharding_utils")
    place = dict(zip(("dp", "tp"), divmod(rank, torch_mesh.size(1)), strict=True))
    param = SimpleNamespace(device_mesh=torch_mesh, placements=placements, ndim=len(shape), shape=torch.Size(shape))
    assert list(torch_mesh.get_coordinate()) == list(place.values())
    whole = torch.arange(shape[0], dtype=torch.float32).reshape(shape)
    return utils.DtensorShardOperation(param).shard_tensor(whole).flatten().tolist()


@pytest.mark.ranks(4)
def test_one_pair_of_placements_has_several_contents(rank):
    torch_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = describe_mesh(torch_mesh)
    whole = torch.arange(16.0).reshape(16, 1)
    weight = fsdp2_over_packed(torch_mesh, whole, 0)
    placements = (_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2))
    assert weight.placements == placements
    # FSDP2 cuts what a tp rank holds of both halves by chunks; the notation says so.
    by_fsdp2 = weight.to_local().flatten().tolist()
    assert by_fsdp2 == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]][rank]
    assert by_fsdp2 == elements(TensorLayout.parse("[(2 f/tp)/dp, 1]"), mesh, (16, 1))[rank][1]
    # torch distributes other rows under the same placements, and transformers loads others again.
    by_torch = distribute_tensor(whole, torch_mesh, placements, src_data_rank=None).to_local().flatten().tolist()
    assert by_torch == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]][rank]
    by_transformers = rows_loaded_by_transformers(placements, torch_mesh, rank, (16, 1))
    assert by_transformers == [[0, 2, 8, 10], [1, 3, 9, 11], [4, 6, 12, 14], [5, 7, 13, 15]][rank]
    # And full_tensor puts the tensor together wrongly: where all of them mend this, it can be said.
    assert not torch.equal(weight.full_tensor(), whole)
    with pytest.raises(LayoutError, match="split it in different ways") as info:
        from_placements(mesh, weight.placements, 2)
    assert "'(2 d0/~tp)/~dp'" in info.value.next_step
    with pytest.raises(LayoutError, match="is not a single size"):
        to_placements(TensorLayout.parse("[(2 f/tp)/dp, h]"), mesh)


@pytest.mark.ranks(4)
def test_experts_packed_in_one_dim_and_cut_in_another_are_read(rank):
    """transformers' gate_up_proj [experts, 2 f, h]: FSDP2 cuts the experts, tensor parallelism the halves."""
    torch_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = describe_mesh(torch_mesh)
    for shape in ((2, 8, 3), (3, 4, 1), (1, 4, 2)):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        weight = fsdp2_over_packed(torch_mesh, whole, 1)
        assert weight.placements == (Shard(0), _StridedShard(1, split_factor=2))
        layout = from_placements(mesh, weight.placements, 3)
        assert str(layout) == "[d0/~dp, 2 d1/~tp, d2]"
        local = weight.to_local()
        assert (tuple(local.shape), local.flatten().tolist()) == elements(layout, mesh, shape)[rank]
        assert to_placements(layout, mesh, shape) == weight.placements
        assert torch.equal(weight.full_tensor(), whole)
