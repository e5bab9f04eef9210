"""Replicas that add up their gradients: as one process over the whole batch, however they are cut into buckets."""

from __future__ import annotations

import pytest
import torch

from tests.gradients.wires import batch_of, loss_of, make_module, mean_gradients
from xrank.gradients import DistributedDataParallel, GradientConfig, GradientPlan, mark
from xrank.layout import DeviceMesh
from xrank.layout.mesh import megatron_views

pytestmark = pytest.mark.timeout(90)

_CONFIGS = [
    GradientConfig(),
    GradientConfig(overlap_grad_reduce=True, bucket_size=200),
    GradientConfig(overlap_grad_reduce=True, bucket_size=200, average_in_collective=True),
    GradientConfig(use_distributed_optimizer=True),
    GradientConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=200),
    GradientConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        bucket_size=200,
        num_distributed_optimizer_instances=2,
    ),
]


def _step(ddp: DistributedDataParallel, rank: int, world_size: int, num_microbatches: int) -> None:
    """Run a step over this rank's part of the batch."""
    own = batch_of().chunk(world_size)[rank].chunk(num_microbatches)
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        for part in own[:-1]:
            (loss_of(ddp(part)) / num_microbatches).backward()
    (loss_of(ddp(own[-1])) / num_microbatches).backward()
    ddp.finish_grad_sync()


def _take_owned(ddp: DistributedDataParallel, name: str) -> slice:
    return slice(*ddp.plan[name].owned)


@pytest.mark.ranks(4, timeout_seconds=60)
def test_every_way_gives_the_gradient_of_the_whole_batch(rank: int, world_size: int) -> None:
    expected = mean_gradients(make_module(), batch_of())
    for config in _CONFIGS:
        for num_microbatches in (1, 2):
            module = make_module()
            plan = GradientPlan.from_module(module, DeviceMesh((4,), ("dp",)), config)
            ddp = DistributedDataParallel(module, plan)
            for _ in range(3):  # the first batch takes the path of all others
                _step(ddp, rank, world_size, num_microbatches)
                for name, wanted in expected.items():
                    part = _take_owned(ddp, name)
                    found = ddp.main_grad(name).flatten()[part]
                    # Sums in another order: some processors' kernels differ by 1.6e-7 here.
                    torch.testing.assert_close(found, wanted.flatten()[part], rtol=1e-5, atol=1e-6, msg=name)
                    assert module.get_parameter(name).grad is None


@pytest.mark.ranks(2, timeout_seconds=60)
def test_shards_that_each_rank_steps_alone_are_the_module_of_one_process(rank: int, world_size: int) -> None:
    reference = make_module()
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)
    history = []
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(reference(batch_of())).backward()
        optimizer.step()
        history.append({name: one.detach().clone() for name, one in reference.named_parameters()})
    for overlap in (False, True):
        config = GradientConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=overlap, bucket_size=70
        )
        module = make_module()
        ddp = DistributedDataParallel(module, GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), config))
        shards = {}
        for name, parameter in module.named_parameters():
            if ddp.plan[name].owned != (0, 0):
                shards[name] = torch.nn.Parameter(parameter.detach().flatten()[_take_owned(ddp, name)])
        assert len(shards) < len(ddp.plan.parameters)
        optimizer = torch.optim.Adam(shards.values(), lr=0.1)
        for expected in history:
            _step(ddp, rank, world_size, 1)
            for name, shard in shards.items():
                shard.grad = ddp.main_grad(name).flatten()[_take_owned(ddp, name)]
            optimizer.step()
            ddp.start_param_sync()
            if expected is history[-1]:
                ddp.start_param_sync(force_sync=True)
                for name, wanted in expected.items():
                    torch.testing.assert_close(module.get_parameter(name), wanted, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_replicas_get_the_values_of_the_first(rank: int) -> None:
    module = make_module()
    module.norm.requires_grad_(False)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(rank)
        module.extra.weight.data = module.extra.weight.t()  # not contiguous
    mark(module.layers[0].weight, expert=True)
    views = megatron_views(2, ep=2)
    ddp = DistributedDataParallel(module, GradientPlan.from_module(module, views))
    ddp.broadcast_params()
    expected = make_module()
    for name, parameter in expected.named_parameters():
        wanted = parameter.t() if name == "extra.weight" else parameter
        # An expert is a rank's own.
        assert torch.equal(module.get_parameter(name), wanted + rank if name == "layers.0.weight" else wanted), name


@pytest.mark.ranks(2, timeout_seconds=60)
def test_gradients_of_tensor_parallel_dtensors_are_those_of_the_whole_module(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.norm = torch.nn.LayerNorm(8)
            self.up = torch.nn.Linear(8, 16)
            self.down = torch.nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(self.norm(x))))

    x = batch_of().view(2, 8, 8)
    expected = mean_gradients(Block(), x)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for options in ({}, {"use_distributed_optimizer": True}):
        module = Block()
        ways = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
        parallelize_module(module, mesh["tp"], ways)
        ddp = DistributedDataParallel(module, GradientPlan.from_module(module, mesh, GradientConfig(**options)))
        for _ in range(2):
            ddp.zero_grad_buffer()
            loss_of(ddp(x)).backward()
            ddp.finish_grad_sync()
            for name, wanted in expected.items():
                parameter = module.get_parameter(name)
                found = DTensor.from_local(ddp.main_grad(name), parameter.device_mesh, parameter.placements)
                torch.testing.assert_close(found.full_tensor(), wanted, rtol=1e-5, atol=1e-6, msg=name)
