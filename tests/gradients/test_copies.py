"""Copies of wrapped modules, other wrappers, and values that are loaded where an optimizer steps copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

from tests.gradients.wires import RecordingWire, batch_of, loss_of, make_module
from xrank.errors import GradientError, UsageError
from xrank.gradients import (
    DistributedDataParallel,
    GradientConfig,
    GradientPlan,
    ParameterShards,
    finalize_model_grads,
)
from xrank.layout import DeviceMesh

pytestmark = pytest.mark.timeout(90)

_SHARDED = GradientConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=70)
_MESH = DeviceMesh((2,), ("dp",))


def test_a_plan_is_its_copies_and_the_wrapper_has_none() -> None:
    module = make_module()
    plan = GradientPlan.from_module(module, _MESH, _SHARDED, rank=0)
    assert pickle.loads(pickle.dumps(plan)) == plan == copy.deepcopy(plan)
    assert pickle.loads(pickle.dumps(plan.config)) == plan.config
    ddp = DistributedDataParallel(module, plan, wire=RecordingWire())
    with pytest.raises(UsageError, match="which cannot be copied"):
        copy.deepcopy(ddp)


def test_a_copy_of_the_module_waits_for_nothing_and_sends_nothing() -> None:
    module, wire = make_module(), RecordingWire()
    ddp = DistributedDataParallel(module, GradientPlan.from_module(module, _MESH, _SHARDED, rank=0), wire=wire)
    loss_of(ddp(batch_of())).backward()
    ddp.finish_grad_sync()  # the next forward gathers parameters that are still due
    average = copy.deepcopy(module)
    loss_of(average(batch_of())).backward()
    assert average.norm.weight.grad is not None
    assert not wire.buckets("all_gather")
    module(batch_of())
    assert len(wire.buckets("all_gather")) == len(ddp.plan.buckets)


def test_other_types_than_config_and_module_are_refused() -> None:
    with pytest.raises(UsageError, match="the config is not a GradientConfig") as caught:
        GradientPlan.from_module(make_module(), _MESH, {"overlap_grad_reduce": True}, rank=0)  # type: ignore[arg-type]
    assert caught.value.got == "dict"


@pytest.mark.ranks(2, timeout_seconds=60)
def test_values_that_are_loaded_or_broadcast_are_what_wide_copies_step(rank: int) -> None:
    module = make_module(dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(rank)
    config = GradientConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(module, GradientPlan.from_module(module, _MESH, config))
    shards = ParameterShards(ddp)
    optimizer = torch.optim.SGD(shards.parameters(), lr=0.0)
    shards.attach(optimizer)

    def assert_kept(expected: torch.nn.Module) -> None:
        ddp.zero_grad_buffer()
        loss_of(ddp(batch_of().bfloat16())).backward()
        finalize_model_grads([ddp])
        optimizer.step()
        for name, wanted in expected.named_parameters():
            assert torch.equal(module.get_parameter(name), wanted), name

    ddp.broadcast_params()
    assert_kept(make_module(dtype=torch.bfloat16))
    other = make_module(dtype=torch.bfloat16)
    with torch.no_grad():
        other.norm.weight.mul_(3)
    ddp.load_state_dict(other.state_dict())
    assert_kept(other)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_module_that_torch_wraps_and_tokens_that_are_no_number_are_refused(rank: int) -> None:
    module = torch.nn.parallel.DistributedDataParallel(make_module())
    with pytest.raises(UsageError, match="the module: torch's DistributedDataParallel wraps it"):
        DistributedDataParallel(module, GradientPlan.from_module(module, _MESH))
    module = make_module()
    plan = GradientPlan.from_module(module, _MESH, GradientConfig(calculate_per_token_loss=True))
    ddp = DistributedDataParallel(module, plan)
    with pytest.raises(GradientError, match="num_tokens of rank 1 is not a count") as caught:
        finalize_model_grads([ddp], num_tokens=torch.ones(1 + rank))
    assert caught.value.got == "a tensor of shape [2]"
    dist.barrier()
