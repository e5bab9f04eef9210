"""Ranks that do not do the same, on real ranks: one has no data, drops a step, or has another's plan. Nobody hangs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.gradients.wires import batch_of, loss_of, make_module, mean_gradients
from xrank.errors import GradientError
from xrank.gradients import (
    DistributedDataParallel,
    GradientConfig,
    GradientPlan,
    check_gradients,
    finalize_model_grads,
)
from xrank.layout import DeviceMesh

pytestmark = pytest.mark.timeout(90)

_OVERLAP = GradientConfig(overlap_grad_reduce=True, bucket_size=70)
_SHARDED = replace(_OVERLAP, use_distributed_optimizer=True)
_MESH = DeviceMesh((2,), ("dp",))


def _wrap(config: GradientConfig) -> DistributedDataParallel:
    module = make_module()
    return DistributedDataParallel(module, GradientPlan.from_module(module, _MESH, config))


def _backward(ddp: DistributedDataParallel, rank: int) -> None:
    loss_of(ddp(batch_of().chunk(2)[rank])).backward()


def _assert_right(ddp: DistributedDataParallel) -> None:
    for name, wanted in mean_gradients(make_module(), batch_of()).items():
        part = slice(*ddp.plan[name].owned)
        torch.testing.assert_close(
            ddp.main_grad(name).flatten()[part], wanted.flatten()[part], rtol=1e-5, atol=1e-7, msg=name
        )


@pytest.mark.ranks(2, timeout_seconds=60)
def test_gradients_of_plans_that_differ_are_not_checked(rank: int) -> None:
    module = make_module()
    module.norm.bias.requires_grad_(rank == 0)
    plan = GradientPlan.from_module(module, _MESH)
    with pytest.raises(GradientError, match="ranks 0 and 1 do not lay out the same gradients") as caught:
        check_gradients({name: torch.ones_like(one) for name, one in module.named_parameters()}, plan)
    assert caught.value.rank == 1 and "norm.bias" in f"{caught.value.got} {caught.value.want}"


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_plan_of_another_rank_is_refused_on_all_ranks(rank: int) -> None:
    module = make_module()
    plan = GradientPlan.from_module(module, _MESH, _SHARDED, rank=0)
    with pytest.raises(GradientError, match="rank 1 has the plan of rank 0") as caught:
        DistributedDataParallel(module, plan)
    assert caught.value.rank == 1
    with pytest.raises(GradientError, match="rank 1 has the plan of rank 0"):
        check_gradients({name: torch.ones_like(one) for name, one in module.named_parameters()}, plan)
    mesh = DeviceMesh((2,), ("dp" if rank == 0 else "tp",))
    with pytest.raises(GradientError, match="ranks 0 and 1 have different meshes") as caught:
        DistributedDataParallel(module, GradientPlan.from_module(module, mesh))
    assert (caught.value.got, caught.value.want) == ("on rank 1: tp=2", "as on rank 0: dp=2")


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_parameter_that_one_rank_froze_is_named(rank: int) -> None:
    module = make_module()
    module.layers[1].weight.requires_grad_(rank == 0)
    with pytest.raises(GradientError, match="do not lay out the same gradients") as caught:
        DistributedDataParallel(module, GradientPlan.from_module(module, _MESH))
    assert caught.value.want == "as on rank 0: layers.1.weight of shape (8, 8)"


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_rank_that_runs_no_forward_gets_the_parameters_that_others_wait_for(rank: int) -> None:
    # Nobody calls start_param_sync: the first forward would gather on one rank alone.
    for config in (_SHARDED, replace(_SHARDED, overlap_param_gather=True)):
        ddp = _wrap(config)
        for step in range(3):
            ddp.zero_grad_buffer()
            if rank == 0 or step != 1:
                _backward(ddp, rank)
            finalize_model_grads([ddp])
            for planned in ddp.plan.parameters:
                part = slice(*planned.owned)
                values = ddp.planned_parameters[planned.name].detach().view(-1)
                values[part] -= ddp.main_grad(planned.name).view(-1)[part]
        ddp.start_param_sync(force_sync=True)
        held = torch.cat([one.detach().flatten() for one in ddp.module.parameters()])
        others = [torch.empty_like(held) for _ in range(2)]
        dist.all_gather(others, held)
        assert torch.equal(*others)
        assert not torch.equal(held, torch.cat([one.detach().flatten() for one in make_module().parameters()]))


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_step_that_only_one_rank_began_is_dropped_by_all(rank: int) -> None:
    for config in (GradientConfig(), _OVERLAP, _SHARDED):
        ddp = _wrap(config)
        for who in (0, 1):
            if rank == who:
                _backward(ddp, rank)
            ddp.zero_grad_buffer(discard=True)
            _backward(ddp, rank)
            ddp.finish_grad_sync()
            _assert_right(ddp)
            ddp.zero_grad_buffer()


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_step_that_one_rank_drops_and_others_finish_is_an_error_there(rank: int) -> None:
    for config in (GradientConfig(), _OVERLAP, _SHARDED):
        ddp = _wrap(config)
        if rank == 0:
            _backward(ddp, rank)
            with pytest.raises(GradientError, match="rank 1 dropped this step") as caught:
                finalize_model_grads([ddp])
            assert caught.value.rank == 1
            ddp.zero_grad_buffer()
        else:  # its backward failed half way
            ddp.zero_grad_buffer(discard=True)
        _backward(ddp, rank)
        finalize_model_grads([ddp])
        _assert_right(ddp)
