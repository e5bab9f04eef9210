"""Gradients and optimizer states of real ranks in real workspaces: gathered whole, and cut again for other ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.gradients.cut_modules import SHAPES, backward, cut_module, whole_tensors
from xrank.commands.gather import gather_checkpoint
from xrank.commands.reshard import reshard_checkpoint
from xrank.errors import ContradictionError, GradientError, LayoutError, UsageError, XrankError
from xrank.gradients import (
    DistributedDataParallel,
    GradientConfig,
    GradientPlan,
    ParameterShards,
    export_gradients,
    export_optimizer_shards,
    finalize_model_grads,
    load_optimizer_shards,
    mark,
)
from xrank.layout import DeviceMesh, LayoutMap, MeshViews
from xrank.layout.mesh import megatron_views
from xrank.workspace.nfs import NFSWorkspace

pytestmark = pytest.mark.timeout(90)

_SHARDED = GradientConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=40)
_CONFIGS = {
    "whole": GradientConfig(),
    "sharded": _SHARDED,
    "instances": GradientConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=2),
}
_RUN = "run-1"


def _step(
    mesh: DeviceMesh | MeshViews, rank: int, config: GradientConfig
) -> tuple[DistributedDataParallel, ParameterShards, torch.optim.Optimizer]:
    """Return a module after its gradients of one step were exchanged; `_take` steps it."""
    at = (mesh.main if isinstance(mesh, MeshViews) else mesh).coordinate(rank)
    place, length = at.get("tp", 0), (mesh.main if isinstance(mesh, MeshViews) else mesh).shape[-1]
    length = length if "tp" in at else 1
    module = cut_module(place, length)
    ddp = DistributedDataParallel(module, GradientPlan.from_module(module, mesh, config))
    shards = ParameterShards(ddp)
    optimizer = torch.optim.AdamW(shards.named_parameters(), lr=0.1)
    shards.attach(optimizer)
    return ddp, shards, optimizer


def _backward(ddp: DistributedDataParallel, rank: int, seed: int) -> None:
    """Give each replica its own multiple of a gradient, 1 on average."""
    main = ddp.plan.views.main
    at = main.coordinate(rank)
    replicas = ddp.plan.data_ranks
    factor = 2 * (replicas.index(rank) + 1) / (len(replicas) + 1)
    gradients = {name: one * factor for name, one in whole_tensors(seed).items()}
    ddp.zero_grad_buffer()
    length = main.axis_length("tp") if "tp" in at else 1
    backward(ddp.module, gradients, at.get("tp", 0), length)
    ddp.finish_grad_sync()


def _leave(folder: Path, rank: int, world_size: int, tensors: dict[str, torch.Tensor], layouts: LayoutMap) -> None:
    workspace = NFSWorkspace(folder, rank=rank, world_size=world_size, run_id=_RUN)
    workspace.write_configs_and_weights({"model_type": "test"}, tensors, layouts=layouts)
    dist.barrier()


def _gather_on_first(rank: int, act: Callable[[], object]) -> None:
    """Let rank 0 do something, and the others wait."""
    if rank == 0:
        act()
    dist.barrier()


def _gather(rank: int, source: Path, out: Path) -> dict[str, torch.Tensor]:
    _gather_on_first(rank, functools.partial(gather_checkpoint, source, out, recipe="none"))
    return load_file(out / "model.safetensors")


def _compute_expected(num_steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return parameters and states of one process after some steps."""
    parameters = {name: torch.nn.Parameter(one) for name, one in whole_tensors().items()}
    optimizer = torch.optim.AdamW(parameters.items(), lr=0.1)
    for seed in range(num_steps):
        for name, one in whole_tensors(10 + seed).items():
            parameters[name].grad = one
        optimizer.step()
    states = {
        f"state.{name}.{key}": value for name in SHAPES for key, value in optimizer.state[parameters[name]].items()
    }
    return {name: one.detach() for name, one in parameters.items()}, states


def _assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.ranks(4, timeout_seconds=60)
@pytest.mark.parametrize("case", _CONFIGS)
def test_gradients_of_ranks_are_gathered_whole(rank: int, world_size: int, tmp_path: Path, case: str) -> None:
    # Three ways to factor the ranks: replicas beside tp, outside of it, and over two axes.
    meshes = {
        "whole": DeviceMesh((2, 2), ("dp", "tp")),
        "sharded": DeviceMesh((2, 2), ("tp", "dp"), [0, 2, 1, 3]),
        "instances": megatron_views(4, cp=2),
    }
    ddp, _, _ = _step(meshes[case], rank, _CONFIGS[case])
    with pytest.raises(GradientError, match="column: its gradient was not exchanged yet"):
        export_gradients(ddp)
    _backward(ddp, rank, 10)
    tensors, layouts = export_gradients(ddp)
    num_elements = sum(one.numel() for one in tensors.values())
    if case != "whole":
        assert num_elements < sum(one.numel() for one in ddp.module.parameters())
        # Padding is in the buffers alone.
        total = torch.tensor(num_elements)
        dist.all_reduce(total)
        assert total == (2 if case == "instances" else 1) * sum(
            torch.Size(shape).numel() * (2 if name in ("norm", "scale") and case == "sharded" else 1)
            for name, shape in SHAPES.items()
        )
    _leave(tmp_path / "states", rank, world_size, tensors, layouts)
    _assert_close(_gather(rank, tmp_path / "states", tmp_path / "model"), whole_tensors(10))


@pytest.mark.ranks(4, timeout_seconds=60)
def test_optimizer_states_go_on_with_other_numbers_of_replicas(rank: int, world_size: int, tmp_path: Path) -> None:
    ddp, _, optimizer = _step(DeviceMesh((2, 2), ("dp", "tp")), rank, _SHARDED)
    _backward(ddp, rank, 10)
    optimizer.step()
    tensors, layouts = export_optimizer_shards(optimizer, ddp)
    _leave(tmp_path / "states", rank, world_size, tensors, layouts)
    parameters, states = _compute_expected(1)
    _assert_close(_gather(rank, tmp_path / "states", tmp_path / "model"), parameters | states)
    _gather_on_first(
        rank,
        lambda: gather_checkpoint(tmp_path / "states", tmp_path / "weights", recipe="none", exclude=[r"state\..*"]),
    )
    assert load_file(tmp_path / "weights" / "model.safetensors").keys() == parameters.keys()

    # Four replicas of the whole model take over what two of two halves left, and take the same next step.
    ddp, shards, optimizer = _step(DeviceMesh((4,), ("dp",)), rank, _SHARDED)
    tensors, layouts = export_optimizer_shards(optimizer, ddp)
    assert not optimizer.state and tensors.keys() == SHAPES.keys()
    _gather_on_first(rank, lambda: layouts.write(tmp_path / "four.toml"))
    _gather_on_first(rank, lambda: reshard_checkpoint(tmp_path / "states", tmp_path / "four.toml", tmp_path / "four"))
    read = NFSWorkspace(tmp_path / "four", rank=rank, world_size=4, run_id=_RUN)
    _, tensors = read.read_configs_and_weights_from_rank(rank)
    assert tensors is not None
    with pytest.raises(UsageError, match="column: the states have no values of it"):
        load_optimizer_shards(optimizer, ddp, {})
    load_optimizer_shards(optimizer, ddp, tensors)
    shards.take_parameters()
    ddp.start_param_sync(force_sync=True)
    _assert_close(dict(ddp.module.named_parameters()), parameters)
    _backward(ddp, rank, 11)
    optimizer.step()
    tensors, layouts = export_optimizer_shards(optimizer, ddp)
    _leave(tmp_path / "later", rank, world_size, tensors, layouts)
    parameters, states = _compute_expected(2)
    later = _gather(rank, tmp_path / "later", tmp_path / "later-model")
    _assert_close(later, parameters | states)
    dist.barrier()
    # Resharding changes no bit of the exported states.
    resharded = _gather(rank, tmp_path / "four", tmp_path / "four-model")
    first = load_file(tmp_path / "model" / "model.safetensors")
    assert resharded.keys() == first.keys() and all(torch.equal(resharded[name], first[name]) for name in first)


@pytest.mark.ranks(4, timeout_seconds=60)
def test_stages_and_experts_have_names_of_the_whole_model(rank: int, world_size: int, tmp_path: Path) -> None:
    """Two stages of two replicas, whose ranks hold an expert each; one table is held by both stages."""
    stage, replica = divmod(rank, 2)
    module = torch.nn.Module()
    values = {"layer": 10.0 + stage, "expert": 20.0 + rank, "table": 30.0}
    for name, value in values.items():
        module.register_parameter(name, torch.nn.Parameter(torch.full((5,), value)))
    mark(module.expert, expert=True)
    mark(module.table, tied="word")
    plan = GradientPlan.from_module(module, megatron_views(4, pp=2, ep=2), _SHARDED)
    ddp = DistributedDataParallel(module, plan)
    shards = ParameterShards(ddp)
    optimizer = torch.optim.SGD(shards.named_parameters(), lr=1.0)

    def names(name: str) -> str:
        return {"layer": f"layers.{stage}.w", "expert": f"layers.{stage}.experts.{replica}.w", "table": "table"}[name]

    tensors, layouts = export_optimizer_shards(optimizer, ddp, names=names)
    _leave(tmp_path / "states", rank, world_size, tensors, layouts)
    expected = {"layers.0.w": 10, "layers.1.w": 11, "table": 30}
    expected |= {f"layers.{number // 2}.experts.{number % 2}.w": 20 + number for number in range(4)}
    _assert_close(
        _gather(rank, tmp_path / "states", tmp_path / "model"),
        {name: torch.full((5,), float(value)) for name, value in expected.items()},
    )
    # A table whose stages were not added up yet cannot be exported.
    ddp.finish_grad_sync()
    with pytest.raises(GradientError, match=r"layer: its gradient was not exchanged yet"):
        export_gradients(ddp)
    ddp.zero_grad_buffer(discard=True)
    finalize_model_grads([ddp])
    assert export_gradients(ddp)[0].keys() == values.keys()
    # Without names, two tensors are called "layer": nothing is merged of them.
    tensors, layouts = export_optimizer_shards(optimizer, ddp)
    _leave(tmp_path / "states", rank, world_size, tensors, layouts)

    def assert_refused() -> None:
        with pytest.raises(XrankError, match=r"(layer|expert): ranks") as caught:
            gather_checkpoint(tmp_path / "states", tmp_path / "none", recipe="none")
        assert isinstance(caught.value, ContradictionError)

    _gather_on_first(rank, assert_refused)
    with pytest.raises(UsageError, match="w: two tensors have this name"):
        export_optimizer_shards(optimizer, ddp, names=lambda name: "w")


@pytest.mark.ranks(2, timeout_seconds=60)
def test_cuts_come_from_dtensors_or_are_given(rank: int, world_size: int, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    whole = torch.arange(42.0).view(6, 7)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    module = torch.nn.Module()
    module.placed = torch.nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
    module.given = torch.nn.Parameter(whole[:, :6].chunk(2, 1)[rank].contiguous())
    config = GradientConfig(use_distributed_optimizer=True)
    ddp = DistributedDataParallel(module, GradientPlan.from_module(module, mesh, config))
    ddp.zero_grad_buffer()
    placed = DTensor.from_local(whole.chunk(2)[rank], mesh["tp"], [Shard(0)])
    ((module.placed * placed).to_local().sum() + (module.given * module.given).sum() / 2).backward()
    ddp.finish_grad_sync()
    own = LayoutMap()
    own["given"] = "[h, f/tp]"
    tensors, layouts = export_gradients(ddp, layouts=own)
    assert str(layouts["placed"]) == "[6/~tp, 7]" and str(layouts["given"]) == "[6, 6/tp]"
    _leave(tmp_path / "states", rank, world_size, tensors, layouts)
    found = _gather(rank, tmp_path / "states", tmp_path / "model")
    _assert_close(found, {"placed": whole, "given": whole[:, :6].contiguous()})


@pytest.mark.ranks(4, timeout_seconds=60)
def test_slices_without_a_layout_are_refused_by_name(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = torch.nn.Module()
    module.uneven = torch.nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh["tp"], [Shard(0)]))
    ddp = DistributedDataParallel(module, GradientPlan.from_module(module, mesh, _SHARDED))
    ddp.finish_grad_sync()
    with pytest.raises(LayoutError, match="uneven: ranks along tp hold parts of different sizes"):
        export_gradients(ddp)
    module = cut_module(rank % 2, 2)
    module.row.partition_dim = -1
    ddp = DistributedDataParallel(module, GradientPlan.from_module(module, mesh, _SHARDED))
    ddp.finish_grad_sync()
    with pytest.raises(LayoutError, match="row: it is split along tp, and the dim is unknown"):
        export_gradients(ddp)
    with pytest.raises(UsageError, match=r"column: the optimizer steps a tensor of .* not a shard"):
        export_optimizer_shards(torch.optim.SGD(module.parameters(), lr=1.0), ddp)
    optimizer = torch.optim.Adafactor(cut_module(0, 1).parameters())
    with pytest.raises(UsageError, match=r"^the optimizer steps a tensor of .* not a shard"):
        export_optimizer_shards(optimizer, ddp)
