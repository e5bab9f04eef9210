"""NaN and infinity: every rank reports the rank, bucket, parameter, element and micro-batch, and none hangs."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

from tests.gradients.test_finalize import assert_raises_everywhere
from tests.gradients.wires import RecordingWire, make_module
from xrank.errors import GradientError
from xrank.gradients import DistributedDataParallel, GradientConfig, GradientPlan, finalize_model_grads
from xrank.gradients.buckets import first_nonfinite
from xrank.layout import DeviceMesh

pytestmark = pytest.mark.timeout(90)

_NAN, _INF = float("nan"), float("inf")


def test_the_first_bad_element_is_found_in_any_shape() -> None:
    tensor = torch.zeros(3, 4, 5)
    assert first_nonfinite(tensor) is None
    tensor[2, 0, 1] = _NAN
    assert first_nonfinite(tensor) == ((2, 0, 1), "nan")
    tensor[1, 3, 4] = -_INF
    assert first_nonfinite(tensor) == ((1, 3, 4), "-inf")
    assert first_nonfinite(tensor.transpose(0, 2)) == ((1, 0, 2), "nan")
    assert first_nonfinite(torch.tensor(_INF)) == ((), "inf")
    assert first_nonfinite(torch.zeros(0, 3)) is None
    assert first_nonfinite(torch.tensor([1, complex(0, _NAN)])) == ((1,), "nanj")


def _step(
    ddp: DistributedDataParallel, spoils: dict[int, dict[str, tuple[tuple[int, ...], float]]], num_microbatches: int = 3
) -> None:
    """Run backwards in which every gradient is 1, with given exceptions: micro-batch -> name, index, value."""
    ddp.zero_grad_buffer()
    for number in range(1, num_microbatches + 1):
        loss = torch.zeros(())
        for name, parameter in ddp.module.named_parameters():
            factor = torch.ones_like(parameter)
            if name in spoils.get(number, {}):
                place, value = spoils[number][name]
                factor[place] = value
            loss = loss + (parameter * factor).sum()
        if number < num_microbatches:
            with ddp.no_sync():
                loss.backward()
        else:
            loss.backward()


@pytest.mark.ranks(4, timeout_seconds=60)
def test_every_rank_raises_the_same_and_the_next_step_is_right(rank: int) -> None:
    for options in (
        {},
        {"overlap_grad_reduce": True},
        {"overlap_grad_reduce": True, "use_distributed_optimizer": True},
    ):
        module = make_module()
        config = GradientConfig(check_for_nan_in_grad=True, bucket_size=70, **options)
        mesh = DeviceMesh((2, 2), ("dp", "tp"))
        ddp = DistributedDataParallel(module, GradientPlan.from_module(module, mesh, config))
        name = "layers.1.weight"
        bucket = ddp.plan[name].bucket
        assert (bucket > 0) == bool(options)
        # Only rank 3 has it, and no rank along tp or dp waits for it.
        _step(ddp, {2: {name: ((3, 5), _NAN)}} if rank == 3 else {})
        error = assert_raises_everywhere(lambda ddp=ddp: finalize_model_grads(ddp))
        assert str(error) == (
            f"{name}: its gradient on rank 3 is nan at element [3, 5], in bucket {bucket}, from micro-batch 2 of the 3 "
            "that used it"
        )
        assert (error.rank, error.tensor) == (3, name)
        # Infinities of two ranks and several parameters: the lowest rank's first, others as notes.
        spoils = {1: {"layers.2.bias": ((7,), _INF)}, 3: {"layers.2.weight": ((0, 1), _NAN)}}
        _step(ddp, spoils if rank in (1, 2) else {})
        error = assert_raises_everywhere(lambda ddp=ddp: finalize_model_grads(ddp))
        assert error.rank == 1
        assert "layers.2.bias: its gradient on rank 1 is inf at element [7]" in str(error)
        assert "from micro-batch 1 of the 3" in str(error)
        is_same = ddp.plan["layers.2.weight"].bucket == ddp.plan["layers.2.bias"].bucket
        assert error.got == "inf at element [7] of the local shape [8]" + (
            ", and likewise in layers.2.weight of the same bucket" if is_same else ""
        )
        assert is_same or options
        assert any("layers.2.bias: its gradient on rank 2 is inf" in note for note in error.__notes__)
        _step(ddp, {})
        finalize_model_grads(ddp)
        owned = slice(*ddp.plan[name].owned)
        assert (ddp.main_grad(name).flatten()[owned] == 3).all()


@pytest.mark.ranks(2, timeout_seconds=60)
def test_overflowing_sums_and_adding_kernels_are_distinguished(rank: int) -> None:
    module = make_module(dtype=torch.float16)
    plan = GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), GradientConfig(check_for_nan_in_grad=True))
    ddp = DistributedDataParallel(module, plan)
    large = {number: {"layers.0.weight": ((0, 0), 30000.0)} for number in (1, 2)}
    _step(ddp, large)  # the norm of the bucket overflows float16 and no element does
    finalize_model_grads(ddp)
    large[3] = {"layers.0.weight": ((0, 0), 30000.0)}
    _step(ddp, large if rank else {})
    error = assert_raises_everywhere(lambda: finalize_model_grads(ddp))
    assert str(error).endswith("from the sum of 3 micro-batches, although each of them is finite")
    ddp.zero_grad_buffer()
    weight = module.layers[0].weight
    (weight * 1.0).sum().backward()
    weight.main_grad[4, 4] = _NAN
    weight.grad_added_to_main_grad = True
    (weight * 1.0).sum().backward()
    error = assert_raises_everywhere(lambda: finalize_model_grads(ddp))
    assert "on rank 0 is nan at element [4, 4]" in str(error)
    assert str(error).endswith("from a kernel, in one of 2 micro-batches")


def test_a_finite_gradient_whose_norm_float16_cannot_hold_is_not_blamed() -> None:
    module = make_module(dtype=torch.float16)
    config = GradientConfig(check_for_nan_in_grad=True)
    plan = GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), config, rank=0)
    ddp = DistributedDataParallel(module, plan, wire=RecordingWire())
    weight = module.layers[0].weight
    with ddp.no_sync():
        (weight * 9000).sum().backward()  # 64 elements: 8 times as much
    (weight * _NAN).sum().backward()
    with pytest.raises(GradientError, match="from micro-batch 2 of the 2 that used it"):
        finalize_model_grads(ddp)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_nothing_is_checked_unless_configured(rank: int) -> None:
    module = make_module()
    ddp = DistributedDataParallel(module, GradientPlan.from_module(module, DeviceMesh((2,), ("dp",))))
    _step(ddp, {1: {"norm.bias": ((1,), _NAN)}} if rank else {})
    finalize_model_grads(ddp)
    found = first_nonfinite(module.norm.bias.main_grad)
    assert found == ((1,), "nan")
    assert dist.get_world_size() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_of_any_dtype_are_compared(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    module = make_module(dtype=dtype)
    config = GradientConfig(check_for_large_grads=True)
    plan = GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), config, rank=0)
    ddp = DistributedDataParallel(module, plan, wire=RecordingWire())
    weight = module.layers[0].weight
    with caplog.at_level(logging.WARNING, "xrank"):
        for factor in (*[100.0] * 100, 20_000.0):
            ddp.zero_grad_buffer()
            (weight * factor).sum().backward()
            finalize_model_grads(ddp)
    assert [message.split(" have ")[1] for message in caplog.messages] == [
        "a norm of 8e+04, 200 times the largest of the first 100 steps"
    ]


def test_a_gradient_far_larger_than_those_before_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    module = make_module()
    config = GradientConfig(check_for_large_grads=True)
    plan = GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), config, rank=0)
    ddp = DistributedDataParallel(module, plan, wire=RecordingWire())
    with caplog.at_level(logging.WARNING, "xrank"):
        _step(ddp, {1: {"norm.bias": ((1,), 1e6)}}, 1)
        finalize_model_grads(ddp)
        for _ in range(99):
            _step(ddp, {}, 1)
            finalize_model_grads(ddp)
        _step(ddp, {1: {"norm.bias": ((1,), 9e6)}}, 1)
        finalize_model_grads(ddp)
        assert not caplog.messages
        _step(ddp, {1: {"norm.bias": ((1,), 1.1e7)}}, 1)
        finalize_model_grads(ddp)
    assert len(caplog.messages) == 1
    assert "rank 0: the gradients of bucket 0 (extra.weight ...) have a norm of 5.5e+06, 11 times" in caplog.messages[0]
    _step(ddp, {1: {"norm.bias": ((1,), _NAN)}}, 1)
    finalize_model_grads(ddp)  # a warning is all that was asked for
