"""Memory of gradients: views in the plan's places, padding that stays zero, and what release gives back."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
import torch

from tests.gradients.wires import RecordingWire, batch_of, loss_of, make_module
from xrank.errors import GradientError, UsageError
from xrank.gradients import DistributedDataParallel, GradientConfig, GradientPlan
from xrank.layout import DeviceMesh

pytestmark = pytest.mark.timeout(60)


def _wrap(module: torch.nn.Module, **options: object) -> DistributedDataParallel:
    config = GradientConfig(**options)  # type: ignore[arg-type]
    plan = GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), config, rank=0)
    return DistributedDataParallel(module, plan, wire=RecordingWire())


def _fill(ddp: DistributedDataParallel) -> None:
    loss_of(ddp(batch_of().to(next(ddp.module.parameters()).dtype))).backward()


def test_main_grads_are_disjoint_views_in_the_order_of_the_plan() -> None:
    ddp = _wrap(make_module())
    (buffer,) = ddp.gradient_buffers
    spans = []
    for name, parameter in ddp.module.named_parameters():
        assert parameter.main_grad.shape == parameter.shape
        assert parameter.main_grad.untyped_storage().data_ptr() == buffer.data.untyped_storage().data_ptr()
        assert parameter.main_grad.storage_offset() == ddp.plan[name].offset
        spans.append((parameter.main_grad.storage_offset(), parameter.numel()))
    assert spans == sorted(spans, reverse=True)  # the last registered first
    assert all(start + numel == last for (last, _), (start, numel) in pairwise(spans))
    assert buffer.data.numel() == sum(parameter.numel() for parameter in ddp.module.parameters())


def test_parameters_move_into_their_buffer_and_keep_their_values() -> None:
    module, like = make_module(), make_module()
    before = dict(module.named_parameters())
    ddp = _wrap(module, use_distributed_optimizer=True)
    (buffer,) = ddp.gradient_buffers
    for name, parameter in module.named_parameters():
        assert parameter is before[name]
        assert torch.equal(parameter, like.get_parameter(name))
        assert parameter.data_ptr() == buffer.parameter_data[ddp.plan[name].offset :].data_ptr()
    assert buffer.data.numel() > sum(parameter.numel() for parameter in module.parameters())
    buffer.parameter_data.zero_()
    assert not any(parameter.any() for parameter in module.parameters())


def test_release_gives_all_bytes_back_and_views_survive() -> None:
    ddp = _wrap(make_module())
    _fill(ddp)
    ddp.finish_grad_sync()
    (buffer,) = ddp.gradient_buffers
    view = ddp.module.extra.weight.main_grad
    nbytes = 4 * buffer.data.numel()
    assert ddp.release() == nbytes
    assert buffer.data.untyped_storage().nbytes() == 0
    assert ddp.release() == 0
    # A read of memory that is not there would end the process.
    assert not hasattr(ddp.module.extra.weight, "main_grad")
    for call in (
        lambda: ddp.main_grad("extra.weight"),
        ddp.finish_grad_sync,
        ddp.zero_grad_buffer,
        lambda: ddp.scale_gradients(2.0),
        lambda: _fill(ddp),
    ):
        with pytest.raises(GradientError, match=r"released|exchanged already"):
            call()
    ddp(batch_of())  # a rollout needs no gradient
    assert ddp.restore() == nbytes
    assert ddp.restore() == 0
    assert ddp.module.extra.weight.main_grad is view
    assert not view.any()
    _fill(ddp)
    ddp.finish_grad_sync()
    assert view.any()


def test_parameters_that_cannot_be_wrapped_are_refused_by_name() -> None:
    module = make_module()
    plan = GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), rank=0)
    with pytest.raises(UsageError, match="config is not that of the plan"):
        DistributedDataParallel(module, plan, GradientConfig(unused="error"), wire=RecordingWire())
    for change, name in (
        (lambda one: one.extra.requires_grad_(False), "extra.weight"),
        (lambda one: one.extra.register_parameter("bias", torch.nn.Parameter(torch.ones(8))), "extra.bias"),
        (lambda one: one.norm.bfloat16(), "norm.weight"),
        (lambda one: loss_of(one(batch_of())).backward(), "layers.0.weight"),
        (lambda one: delattr(one, "extra"), "extra.weight"),
    ):
        other = make_module()
        change(other)
        with pytest.raises(UsageError, match=name.replace(".", r"\.")) as caught:
            DistributedDataParallel(other, plan, wire=RecordingWire())
        assert caught.value.tensor == name
    elsewhere = make_module()
    elsewhere.norm.to("meta")
    with pytest.raises(UsageError, match=r"norm\.bias: it is on meta"):
        DistributedDataParallel(elsewhere, plan, wire=RecordingWire())


def test_a_parameter_whose_data_was_replaced_is_not_gathered_silently() -> None:
    ddp = _wrap(make_module(), use_distributed_optimizer=True)
    ddp.module.norm.weight.data = torch.ones(8)
    with pytest.raises(GradientError, match=r"norm\.weight: its data was replaced"):
        ddp.start_param_sync()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_module_is_wrapped_once_and_as_before_when_it_is_unwrapped(is_sharded: bool) -> None:
    module = make_module()
    ddp = _wrap(module, use_distributed_optimizer=is_sharded)
    with pytest.raises(UsageError, match=r"layers\.0\.weight: it has a main_grad already"):
        _wrap(module)
    _fill(ddp)
    with pytest.raises(GradientError, match="never exchanged"):
        ddp.unwrap()
    ddp.finish_grad_sync()
    ddp.start_param_sync()
    assert ddp.unwrap() is module
    loss_of(module(batch_of())).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())
    module.zero_grad()
    again = _wrap(module)
    _fill(again)
    again.finish_grad_sync()
    assert module.extra.weight.main_grad.any()
    assert not again.sync.faults


@pytest.mark.parametrize("is_sharded", [False, True])
def test_an_unused_wrapper_frees_its_memory_and_groups(is_sharded: bool) -> None:
    ddp = _wrap(make_module(), use_distributed_optimizer=is_sharded)
    _fill(ddp)
    ddp.finish_grad_sync()
    gone = [weakref.ref(one) for one in (ddp, ddp.wire, ddp.sync, *ddp.gradient_buffers)]
    del ddp
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


def test_a_module_whose_wrapper_is_gone_has_gradients_as_any_other() -> None:
    module = make_module()
    _fill(_wrap(module))
    gc.collect()
    loss_of(module(batch_of())).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())


def test_frozen_parameters_take_no_memory_and_get_no_gradient() -> None:
    module = make_module()
    module.layers.requires_grad_(False)
    ddp = _wrap(module)
    _fill(ddp)
    ddp.finish_grad_sync()
    assert not hasattr(module.layers[0].weight, "main_grad")
    assert ddp.gradient_buffers[0].data.numel() == 8 + 8 + 64
    assert module.extra.weight.main_grad.any()
