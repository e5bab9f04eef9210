"""Norms, clipping, scaling and groups over ranks: those of one process that holds the whole model."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from tests.gradients.parallel_models import Place, Stage, place_of, reference_gradients, run_microbatch, take_batch
from tests.gradients.wires import batch_of, loss_of, make_module
from xrank.errors import GradientError, UsageError
from xrank.gradients import (
    DistributedDataParallel,
    GradientConfig,
    GradientPlan,
    GradScaler,
    ParameterShards,
    clip_grad_norm,
    finalize_model_grads,
    grad_norm,
)
from xrank.gradients.wire import make_wire
from xrank.layout import DeviceMesh

pytestmark = pytest.mark.timeout(120)

_CUTS: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}, {"cp": 2, "ep": 4}, {"tp": 2, "ep": 4}]


def _id(sizes: dict[str, int]) -> str:
    return "x".join(f"{axis}{length}" for axis, length in sizes.items())


def _finalized(place: Place, **options: Any) -> DistributedDataParallel:
    model = Stage(place, torch.float64)
    plan = GradientPlan.from_module(model, place.views, GradientConfig(qk_layernorm=True, **options))
    ddp = DistributedDataParallel(model, plan)
    ddp.zero_grad_buffer()
    run_microbatch(ddp, place, take_batch(place), by_tokens=False, share=1.0)
    finalize_model_grads(ddp)
    return ddp


@pytest.mark.ranks(4, timeout_seconds=90)
@pytest.mark.parametrize("sizes", _CUTS, ids=_id)
def test_the_norm_is_that_of_one_process(rank: int, world_size: int, sizes: dict[str, int]) -> None:
    place = place_of(rank, world_size, **sizes)
    gradients = list(reference_gradients()[0].values())
    for options in ({}, {"use_distributed_optimizer": True, "bucket_size": 64}):
        ddp = _finalized(place, **options)
        for norm_type in (2.0, 1.0, math.inf):
            norms = torch.stack([torch.linalg.vector_norm(one, norm_type) for one in gradients])
            wanted = torch.linalg.vector_norm(norms, norm_type).float()
            torch.testing.assert_close(grad_norm(ddp, norm_type=norm_type), wanted, rtol=1e-5, atol=0)
        before = grad_norm(ddp)
        assert clip_grad_norm(ddp, float(before) / 4) == before
        torch.testing.assert_close(grad_norm(ddp), before / 4, rtol=1e-4, atol=0)
        clip_grad_norm(ddp, float(before))  # a smaller norm stays
        torch.testing.assert_close(grad_norm(ddp), before / 4, rtol=1e-4, atol=0)


def _wrap(module: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    config = GradientConfig(bucket_size=70, **options)
    return DistributedDataParallel(module, GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), config))


def _backward(ddp: DistributedDataParallel, rank: int, scaler: GradScaler | None = None) -> None:
    ddp.zero_grad_buffer()
    loss = loss_of(ddp(batch_of().chunk(2)[rank]))
    (loss if scaler is None else scaler.scale(loss)).backward()
    finalize_model_grads(ddp)


@pytest.mark.ranks(2, timeout_seconds=60)
@pytest.mark.parametrize("sharded", [False, True])
def test_an_infinity_on_one_rank_skips_the_step_on_all(rank: int, sharded: bool) -> None:
    ddp = _wrap(make_module(), use_distributed_optimizer=sharded)
    shards = ParameterShards(ddp)
    optimizer = torch.optim.SGD(shards.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    with pytest.raises(UsageError, match="no attached shards"):
        scaler.unscale_(optimizer)
    shards.attach(optimizer)
    reference = make_module()
    stepped = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        _backward(ddp, rank, scaler)
        if step == 1 and rank == 1:
            name = next(name for name, one in shards.slices.items() if one.gradient().numel())
            shards.slices[name].gradient().view(-1)[0] = math.inf
        before = {name: one.clone() for name, one in ddp.module.state_dict().items()}
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert all(one.equal(before[name]) for name, one in ddp.module.state_dict().items())
            assert scaler.get_scale() == 4.0
            continue
        stepped.zero_grad()
        loss_of(reference(batch_of())).backward()
        stepped.step()
        for name, one in ddp.module.state_dict().items():
            torch.testing.assert_close(one, reference.state_dict()[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_optimizers_that_would_change_nothing_are_named(rank: int) -> None:
    ddp = _wrap(make_module(), use_distributed_optimizer=True)
    _backward(ddp, rank)
    with pytest.raises(UsageError, match="has its gradient in main_grad"):
        torch.optim.SGD(ddp.module.parameters(), lr=0.1).step()
    shards = ParameterShards(ddp)
    forgotten = torch.optim.SGD(shards.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"layers\..*: its shard has no gradient") as caught:
        forgotten.step()
    assert "attach" in str(caught.value.next_step)
    with pytest.raises(UsageError, match="is not one that these models train"):
        shards.map_groups(make_module().parameters())
    shards.attach(forgotten)
    before = {name: one.clone() for name, one in ddp.module.state_dict().items()}
    forgotten.step()
    assert all(not one.equal(before[name]) for name, one in ddp.module.state_dict().items())
    torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1).step()  # other optimizers are left alone


@pytest.mark.ranks(2, timeout_seconds=60)
def test_replicas_that_start_differently_and_late_freezing_are_named(rank: int) -> None:
    module = make_module()
    with torch.no_grad():
        module.layers[1].bias[2] += rank
    ddp = _wrap(module)
    with pytest.raises(GradientError, match=r"layers\.1\.bias: replicas on ranks \[0, 1\] have different values"):
        _backward(ddp, rank)
    with pytest.raises(GradientError, match=r"layers\.1\.bias: replicas on ranks"):
        _backward(ddp, rank)  # going on without the advice changes nothing
    ddp.broadcast_params()
    _backward(ddp, rank)
    assert ddp.extra is ddp.module.extra  # attributes of the module
    ddp.module.norm.weight.requires_grad_(rank == 0)
    with pytest.raises(GradientError, match=r"norm\.weight: it was frozen on rank 1 after the plan was made"):
        _backward(ddp, rank)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_copies_that_drift_apart_are_not_counted_in_silence(rank: int) -> None:
    """Without a mark, ranks along tp may hold parts or copies: almost equal norms are an error."""
    module = copy.deepcopy(make_module())
    plan = GradientPlan.from_module(module, DeviceMesh((2,), ("tp",)))
    ddp = DistributedDataParallel(module, plan)
    ddp.zero_grad_buffer()
    loss_of(ddp(batch_of())).backward()
    finalize_model_grads(ddp)
    wanted = torch.linalg.vector_norm(torch.cat([ddp.main_grad(one.name).flatten() for one in plan.parameters]))
    torch.testing.assert_close(grad_norm(ddp), wanted)
    ddp.main_grad("extra.weight").mul_(1 + 1e-6 * rank)
    with pytest.raises(GradientError, match=r"extra\.weight: it is unknown whether ranks .* hold parts or copies"):
        grad_norm(ddp)


@pytest.mark.ranks(3)
def test_new_groups_have_the_timeout_of_the_world(rank: int) -> None:
    pair = (0, 1)
    groups = make_wire([pair] if rank in pair else []).groups
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout for group in groups.values()]
    assert len(timeouts) >= 1 + (rank in pair) and len(set(timeouts)) == 1


@pytest.mark.ranks(2, timeout_seconds=60)
def test_groups_follow_the_parameters_own_shapes(rank: int) -> None:
    ddp, whole = _wrap(make_module(), use_distributed_optimizer=True), make_module()

    def groups_of(module: torch.nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": [one for one in module.parameters() if one.ndim >= 2], "weight_decay": 0.5},
            {"params": [one for one in module.parameters() if one.ndim < 2], "weight_decay": 0.0},
        ]

    shards = ParameterShards(ddp)
    optimizer = torch.optim.AdamW(shards.map_groups(groups_of(ddp.module)), lr=0.01)
    shards.attach(optimizer)
    stepped = torch.optim.AdamW(groups_of(whole), lr=0.01)
    for _ in range(2):
        _backward(ddp, rank)
        optimizer.step()
        stepped.zero_grad()
        loss_of(whole(batch_of())).backward()
        stepped.step()
    for name, one in ddp.module.state_dict().items():
        torch.testing.assert_close(one, whole.state_dict()[name], rtol=1e-4, atol=1e-6, msg=name)
    with pytest.raises(UsageError, match="is not one that these models train"):
        shards.map_groups(whole.parameters())
