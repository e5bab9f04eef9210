"""Replicas that add up their gradients: as one process over the whole batch, however they are cut into buckets."""

from __future__ import annotations

import pytest
import torch

from tests.gradients.wires import batch_of, loss_of, make_module, mean_gradients
from xrank.gradients import DistributedDataParallel, GradientConfig, GradientPlan, mark
from xrank.layout.mesh import megatron_views

pytestmark = pytest.mark.timeout(90)


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
