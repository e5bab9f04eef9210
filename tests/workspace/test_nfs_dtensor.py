"""What FSDP2, tensor parallelism and both leave, put together again from the files and their records alone."""

import pytest
import torch

from xrank.errors import XrankError
from xrank.formats.rank_state import RankRecord
from xrank.formats.torch_archive import read_archive
from xrank.layout.local_part import local_part
from xrank.layout.mesh import DeviceMesh
from xrank.layout.nests import addresses
from xrank.layout.tensor_layout import TensorLayout
from xrank.storage.places import state_file_name
from xrank.workspace.nfs import NFSWorkspace


def model(width=10):
    torch.manual_seed(3)
    # 10 and 6 rows over 4 ranks: uneven, with an empty part on the last one.
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 6))


def put_together(path, world_size):
    """Return the global tensors, every element by the plain meaning of the layouts."""
    whole, left = {}, {}
    for rank in range(world_size):
        reader = NFSWorkspace(path, rank=0, world_size=world_size, run_id="run")
        config, weights = reader.read_configs_and_weights_from_rank(rank)
        assert config == {"rank": rank}
        text = read_archive(str(path / state_file_name(rank))).value["xrank"]
        record = RankRecord.from_json(text, file="x")
        assert set(record.tensors) == set(weights)
        for name, local in weights.items():
            tensor = record.tensors[name]
            names, shape, ranks = record.meshes[tensor.mesh]
            mesh = DeviceMesh(shape, names, ranks)
            part = local_part(TensorLayout.parse(tensor.layout), mesh, mesh.coordinate(rank), tensor.shape)
            assert part.shape == tuple(local.shape), (name, rank)
            flat = whole.setdefault(name, torch.full((torch.Size(tensor.shape).numel(),), float("nan")))
            left[name] = tensor.shape
            for nest in part.nests:
                for x, y in addresses(nest):
                    flat[y] = local.view(-1)[x]
    return {name: flat.view(left[name]) for name, flat in whole.items()}


def check(module, tmp_path, rank, world_size, reference):
    import torch.distributed as dist

    workspace = NFSWorkspace(tmp_path, run_id="run")
    assert (workspace.rank, workspace.world_size) == (rank, world_size)
    workspace.write_configs_and_weights({"rank": rank}, module.state_dict(), step=1)
    dist.barrier()
    found = put_together(tmp_path, world_size)
    dist.barrier()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert len(found) == 4


@pytest.mark.ranks(4)
@pytest.mark.parametrize("width", [8, 10, 3])
def test_fsdp2(tmp_path, rank, world_size, width):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = model(width)
    fully_shard(module, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    check(module, tmp_path, rank, world_size, model(width))


@pytest.mark.ranks(4)
def test_tensor_parallel(tmp_path, rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    module = model(8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    workspace = NFSWorkspace(tmp_path, run_id="run")
    weights = module.state_dict()
    assert weights["0.weight"].to_local().shape == (4, 8)
    workspace.write_configs_and_weights({"rank": rank}, weights)
    record = RankRecord.from_json(read_archive(str(tmp_path / state_file_name(rank))).value["xrank"], file="x")
    # A slice of the mesh is the ranks of this rank's own row: each dp row is a mesh of its own.
    assert record.meshes[0] == (("tp",), (2,), (0, 1) if rank < 2 else (2, 3))
    check(module, tmp_path, rank, world_size, model(8))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("width", [8, 10])
def test_fsdp2_over_tensor_parallel(tmp_path, rank, world_size, width):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    module = model(width)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    check(module, tmp_path, rank, world_size, model(width))


@pytest.mark.ranks(2)
def test_partial_sums_are_refused_by_name(tmp_path, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    partial = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(XrankError, match=r"layers\.0\.w") as caught:
        NFSWorkspace(tmp_path, run_id="run").write_configs_and_weights({}, {"layers.0.w": partial})
    assert caught.value.tensor == "layers.0.w"
    assert not (tmp_path / state_file_name(rank)).exists()


@pytest.mark.ranks(2)
def test_a_rank_outside_the_mesh_leaves_nothing_of_the_tensor(tmp_path, rank):
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = TorchMesh("cpu", [1])
    tensor = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    workspace = NFSWorkspace(tmp_path, run_id="run")
    workspace.write_configs_and_weights({}, {"w": tensor, "own": torch.ones(1)})
    _, weights = workspace.read_configs_and_weights_from_rank(rank)
    assert sorted(weights) == (["own", "w"] if rank == 1 else ["own"])
