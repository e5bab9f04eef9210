"""Loops that are wrong, on real ranks: all ranks raise the same, naming the parameter, or the gradient is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gradients.wires import assert_raises_everywhere, batch_of, loss_of, make_module, mean_gradients
from xrank.gradients import DistributedDataParallel, GradientConfig, GradientPlan
from xrank.layout import DeviceMesh

pytestmark = pytest.mark.timeout(90)

_OVERLAP = GradientConfig(overlap_grad_reduce=True, bucket_size=70)
_SHARDED = GradientConfig(overlap_grad_reduce=True, bucket_size=70, use_distributed_optimizer=True)


def _wrap(config: GradientConfig, module: torch.nn.Module | None = None) -> DistributedDataParallel:
    module = make_module() if module is None else module
    return DistributedDataParallel(module, GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), config))


def _backward(ddp: DistributedDataParallel, rank: int, *, use_extra: bool = True) -> None:
    loss_of(ddp(batch_of().chunk(2)[rank], use_extra)).backward()


def _assert_right(ddp: DistributedDataParallel, factor: float = 1.0, **options: Any) -> None:
    for name, wanted in mean_gradients(make_module(), batch_of(), **options).items():
        owned = slice(*ddp.plan[name].owned)
        found, wanted = ddp.main_grad(name).flatten()[owned], wanted.flatten()[owned]
        torch.testing.assert_close(found, factor * wanted, rtol=1e-5, atol=1e-7, msg=name)


def _assert_next_step_is_right(ddp: DistributedDataParallel, rank: int) -> None:
    ddp.zero_grad_buffer()
    _backward(ddp, rank)
    ddp.finish_grad_sync()
    _assert_right(ddp)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_parameter_that_one_rank_does_not_use_blocks_no_rank(rank: int) -> None:
    ddp = _wrap(_OVERLAP)
    expected = torch.zeros(8, 8)
    module = make_module()
    loss_of(module(batch_of().chunk(2)[0])).backward()
    expected = module.extra.weight.grad / 2
    for _ in range(2):
        ddp.zero_grad_buffer()
        _backward(ddp, rank, use_extra=rank == 0)
        ddp.finish_grad_sync()
        torch.testing.assert_close(ddp.main_grad("extra.weight"), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_parameter_that_is_not_used_is_named_where_that_is_an_error(rank: int) -> None:
    ddp = _wrap(GradientConfig(overlap_grad_reduce=True, bucket_size=70, unused="error"))
    for missing in ((0, 1), (1,), (0,)):
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            _backward(ddp, rank, use_extra=False)
        _backward(ddp, rank, use_extra=rank not in missing)
        error = assert_raises_everywhere(ddp.finish_grad_sync)
        assert str(error) == f"extra.weight: rank {missing[0]} computed no gradient in this step"
        assert error.tensor == "extra.weight"
        assert error.rank == missing[0]
    _assert_next_step_is_right(ddp, rank)
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        _backward(ddp, rank)
    _backward(ddp, rank, use_extra=False)  # an earlier micro-batch used it
    ddp.finish_grad_sync()


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_second_backward_after_buckets_left_is_named_on_all_ranks(rank: int) -> None:
    for config in (_OVERLAP, _SHARDED):
        ddp = _wrap(config)
        for who in ((0, 1), (1,), (0,)):
            ddp.zero_grad_buffer()
            _backward(ddp, rank)
            if rank in who:
                _backward(ddp, rank)
            error = assert_raises_everywhere(ddp.finish_grad_sync)
            assert "computed a gradient after" in str(error)
            assert f"after its bucket {ddp.plan[error.tensor].bucket} was sent" in str(error)
            assert error.rank == who[0]
            assert "no_sync()" in str(error.next_step)
        ddp.zero_grad_buffer()
        _backward(ddp, rank)
        _backward(ddp, rank)
        ddp.zero_grad_buffer(discard=True)  # faults of a dropped step are dropped too
        _assert_next_step_is_right(ddp, rank)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_bucket_that_waits_for_an_unused_parameter_takes_a_second_backward_or_names_it(rank: int) -> None:
    # Bucket 0 has the parameter that is not used, so nothing leaves: the second backward is added, as it should be.
    ddp = _wrap(_OVERLAP)
    assert ddp.plan["extra.weight"].bucket == 0
    _backward(ddp, rank, use_extra=False)
    _backward(ddp, rank, use_extra=False)
    ddp.finish_grad_sync()
    _assert_right(ddp, 2.0, use_extra=False)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_second_finish_sums_nothing_twice(rank: int) -> None:
    for config in (GradientConfig(calculate_per_token_loss=True), _OVERLAP, _SHARDED):
        ddp = _wrap(config)
        _backward(ddp, rank)
        ddp.finish_grad_sync()
        error = assert_raises_everywhere(ddp.finish_grad_sync)
        assert str(error).startswith("layers.0.weight: gradients of this step were exchanged already")
        _assert_right(ddp, 2.0 if config.calculate_per_token_loss else 1.0)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_backward_between_steps_is_named_at_the_next_finish_on_all_ranks(rank: int) -> None:
    ddp = _wrap(_OVERLAP)
    for who in ((0, 1), (1,)):
        ddp.zero_grad_buffer()
        _backward(ddp, rank)
        ddp.finish_grad_sync()
        _assert_right(ddp)
        if rank in who:
            _backward(ddp, rank)
        _assert_right(ddp)  # exchanged gradients do not change
        ddp.zero_grad_buffer()
        _backward(ddp, rank)
        error = assert_raises_everywhere(ddp.finish_grad_sync)
        assert f"rank {who[0]} computed a gradient after the step's gradients were exchanged" in str(error)
        assert error.tensor in ddp.plan
    _assert_next_step_is_right(ddp, rank)
    _backward(ddp, rank)  # a step without zero_grad_buffer
    error = assert_raises_everywhere(ddp.finish_grad_sync)
    assert "and a backward came after that" in str(error)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_step_that_was_never_finished_is_named_or_dropped_on_purpose(rank: int) -> None:
    for config in (GradientConfig(), _OVERLAP, _SHARDED):
        ddp = _wrap(config)
        _backward(ddp, rank)
        error = assert_raises_everywhere(ddp.zero_grad_buffer)
        assert str(error) == "layers.0.weight: its gradients of this step were never exchanged"
        assert_raises_everywhere(ddp.release)
        ddp.zero_grad_buffer(discard=True)
        _assert_next_step_is_right(ddp, rank)
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            _backward(ddp, rank)
        ddp.zero_grad_buffer(discard=True)
        assert not any(buffer.data.any() for buffer in ddp.gradient_buffers)
        _assert_next_step_is_right(ddp, rank)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_parameters_that_came_after_the_plan_are_named(rank: int) -> None:
    module = make_module()
    module.extra.weight.requires_grad_(False)
    ddp = _wrap(_OVERLAP, module)
    _backward(ddp, rank)
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    if rank == 1:
        module.extra.weight.requires_grad_(True)
    _backward(ddp, rank)
    error = assert_raises_everywhere(ddp.finish_grad_sync)
    assert str(error) == "extra.weight: it needs a gradient on rank 1, and was frozen or absent when the plan was made"
    module.extra.weight.requires_grad_(False)
    module.norm.register_parameter("adapter", torch.nn.Parameter(torch.ones(2)))
    ddp.zero_grad_buffer()
    _backward(ddp, rank)
    assert assert_raises_everywhere(ddp.finish_grad_sync).tensor == "norm.adapter"


@pytest.mark.ranks(2, timeout_seconds=60)
def test_modules_that_differ_between_ranks_are_refused_before_a_gradient_travels(rank: int) -> None:
    wider = make_module()
    if rank == 1:
        wider.extra = torch.nn.Linear(8, 9, bias=False)
    error = assert_raises_everywhere(lambda: _wrap(_OVERLAP, wider))
    assert "ranks 0 and 1 do not lay out the same gradients" in str(error)

    swapped = torch.nn.Module()
    for name in ("a", "b") if rank == 0 else ("b", "a"):
        swapped.register_parameter(name, torch.nn.Parameter(torch.ones(4)))
    error = assert_raises_everywhere(lambda: _wrap(_OVERLAP, swapped))
    assert "b of shape (4,)" in str(error.want) + str(error.got)

    # Two buffers, each laid out alike, whose buckets would leave in another order.
    mixed = torch.nn.Module()
    for name in ("a32", "b16", "c32") if rank == 0 else ("a32", "c32", "b16"):
        dtype = torch.bfloat16 if "16" in name else torch.float32
        mixed.register_parameter(name, torch.nn.Parameter(torch.ones(4, dtype=dtype)))
    config = GradientConfig(overlap_grad_reduce=True, bucket_size=4)
    error = assert_raises_everywhere(lambda: _wrap(config, mixed))
    assert "buckets are sent in the order" in str(error.want)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_parameter_that_is_not_used_has_a_gradient_of_zeros_in_the_first_batch_and_in_later_ones(rank: int) -> None:
    for config in (_OVERLAP, GradientConfig(), _SHARDED):
        ddp = _wrap(config)
        for _ in range(2):
            ddp.zero_grad_buffer()
            _backward(ddp, rank, use_extra=False)
            ddp.finish_grad_sync()
            _assert_right(ddp, use_extra=False)
        _assert_next_step_is_right(ddp, rank)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_two_backwards_are_added_up_where_nothing_leaves_early(rank: int) -> None:
    ddp = _wrap(GradientConfig())
    _backward(ddp, rank)
    _backward(ddp, rank)
    ddp.finish_grad_sync()
    _assert_right(ddp, 2.0)
