"""When buckets leave and in which order, seen by a wire that records and does nothing until it is waited for."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.gradients.wires import RecordingWire, batch_of, loss_of, make_module, mean_gradients
from xrank.errors import GradientError
from xrank.gradients import DistributedDataParallel, GradientConfig, GradientPlan
from xrank.layout import DeviceMesh

pytestmark = pytest.mark.timeout(60)

_OVERLAP = GradientConfig(overlap_grad_reduce=True, bucket_size=100)


def _wrap(
    config: GradientConfig, module: torch.nn.Module | None = None
) -> tuple[DistributedDataParallel, RecordingWire]:
    module = make_module() if module is None else module
    plan = GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), config, rank=1)
    wire = RecordingWire()
    return DistributedDataParallel(module, plan, wire=wire), wire


def _plan(ddp: DistributedDataParallel) -> list[tuple[int, int]]:
    return [(bucket.start, bucket.numel) for bucket in ddp.plan.buckets]


def _watch(x: torch.Tensor, wire: RecordingWire) -> tuple[torch.Tensor, list[int]]:
    """Return a batch whose gradient a backward makes last, and the buckets under way at that time."""
    seen: list[int] = []
    x = x.clone().requires_grad_()
    x.register_hook(lambda _: seen.append(len(wire.outstanding)))
    return x, seen


@pytest.mark.parametrize("is_sharded", [False, True])
def test_buckets_leave_in_order_while_the_first_backward_still_runs(is_sharded: bool) -> None:
    config = GradientConfig(overlap_grad_reduce=True, bucket_size=70, use_distributed_optimizer=is_sharded)
    ddp, wire = _wrap(config)
    assert len(ddp.plan.buckets) >= 4
    for batch in range(3):
        wire.sent.clear()
        x, seen = _watch(batch_of(), wire)
        ddp.zero_grad_buffer()
        loss_of(ddp(x)).backward()
        # All but the last are on their way before the input's gradient is made; batch 1 as any other.
        assert seen and seen[0] >= len(ddp.plan.buckets) - 1, batch
        kind = "reduce_scatter" if is_sharded else "all_reduce"
        assert wire.buckets(kind) == _plan(ddp)
        assert len(wire.outstanding) == len(ddp.plan.buckets)
        ddp.finish_grad_sync()
        assert not wire.outstanding
        assert wire.buckets(kind) == _plan(ddp)


def test_buckets_leave_one_by_one_each_when_its_last_gradient_is_there() -> None:
    ddp, wire = _wrap(_OVERLAP)
    left: list[tuple[str, int]] = []
    for name, parameter in ddp.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: left.append((name, len(wire.sent))))
    loss_of(ddp(batch_of())).backward()
    arrived: set[str] = set()
    for name, num_sent in left:
        arrived.add(name)
        full = 0
        while full < len(ddp.plan.buckets) and arrived.issuperset(ddp.plan.buckets[full].names):
            full += 1
        assert num_sent == full, name
    assert [b > a for (_, a), (_, b) in pairwise(left)].count(True) >= 2
    ddp.finish_grad_sync()


def test_modules_that_run_in_another_order_than_registered_change_no_order() -> None:
    class Backwards(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):  # so the backward comes to the first registered first
                x = torch.tanh(layer(x))
            return x

    torch.manual_seed(3)
    module = Backwards()
    expected = mean_gradients(module, batch_of())
    module.zero_grad()
    ddp, wire = _wrap(GradientConfig(overlap_grad_reduce=True, bucket_size=72), module)
    assert len(ddp.plan.buckets) == 4
    loss_of(ddp(batch_of())).backward()
    assert wire.buckets() == _plan(ddp)
    ddp.finish_grad_sync()
    for name, wanted in expected.items():
        torch.testing.assert_close(ddp.main_grad(name), wanted, rtol=1e-6, atol=1e-7)


def test_nothing_leaves_inside_no_sync() -> None:
    ddp, wire = _wrap(_OVERLAP)
    with ddp.no_sync():
        loss_of(ddp(batch_of())).backward()
        with ddp.no_sync():
            loss_of(ddp(batch_of())).backward()
        loss_of(ddp(batch_of())).backward()
    assert not wire.sent
    loss_of(ddp(batch_of())).backward()
    assert wire.buckets() == _plan(ddp)
    ddp.finish_grad_sync()
    expected = mean_gradients(make_module(), batch_of())
    for name, wanted in expected.items():
        torch.testing.assert_close(ddp.main_grad(name), 4 * wanted, rtol=1e-5, atol=1e-6)


def test_without_overlap_a_buffer_leaves_whole_and_at_the_end() -> None:
    ddp, wire = _wrap(GradientConfig())
    loss_of(ddp(batch_of())).backward()
    assert not wire.sent
    ddp.finish_grad_sync()
    assert wire.buckets() == _plan(ddp) == [(0, sum(one.numel() for one in ddp.module.parameters()))]


def test_kernels_that_autograd_does_not_know_of_count_as_gradients() -> None:
    for lazily in (False, True):
        ddp, _ = _wrap(GradientConfig(overlap_grad_reduce=True, bucket_size=70, unused="error"))
        extra = ddp.module.extra.weight
        ddp.zero_grad_buffer(lazily=lazily)
        loss_of(ddp(batch_of(), use_extra=False)).backward()
        extra.main_grad.add_(2.0)
        extra.grad_added_to_main_grad = True
        if lazily:
            with pytest.raises(GradientError, match=r"extra\.weight: on rank 1 a kernel added"):
                ddp.finish_grad_sync()
            continue
        ddp.finish_grad_sync()
        assert torch.equal(extra.main_grad, torch.full((8, 8), 2.0))
        ddp.zero_grad_buffer()
        extra.grad_added_to_main_grad = True  # and with a hook: what autograd brings is a stand-in
        loss_of(ddp(batch_of())).backward()
        ddp.finish_grad_sync()
        assert not extra.main_grad.any()
        ddp.zero_grad_buffer()
        extra.grad_added_to_main_grad = extra.zero_out_wgrad = True  # zero_out_wgrad overrules it
        loss_of(ddp(batch_of())).backward()
        ddp.finish_grad_sync()
        assert extra.main_grad.any()


def test_start_grad_sync_sends_all_without_waiting() -> None:
    ddp, wire = _wrap(_OVERLAP)
    with ddp.no_sync():
        loss_of(ddp(batch_of())).backward()
    ddp.start_grad_sync()
    ddp.start_grad_sync()
    assert wire.buckets() == _plan(ddp)
    assert len(wire.outstanding) == len(ddp.plan.buckets)
    ddp.finish_grad_sync()
    ddp.start_grad_sync()
    assert wire.buckets() == _plan(ddp)


def test_stepped_parameters_are_sent_in_the_order_of_the_forward_and_awaited_one_by_one() -> None:
    config = GradientConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=70
    )
    ddp, wire = _wrap(config)
    loss_of(ddp(batch_of())).backward()
    ddp.finish_grad_sync()
    wire.sent.clear()
    ddp.start_param_sync()
    assert wire.buckets("all_gather") == _plan(ddp)[::-1]
    assert len(wire.outstanding) == len(ddp.plan.buckets)
    outstanding: list[int] = []
    for layer in ddp.module.layers:
        layer.register_forward_hook(lambda *_: outstanding.append(len(wire.outstanding)))
    ddp(batch_of())
    assert outstanding == [3, 2, 1]
    assert not wire.outstanding
    assert len(wire.buckets("all_gather")) == len(ddp.plan.buckets)


def test_parameters_that_were_not_gathered_cannot_run_or_be_saved() -> None:
    config = GradientConfig(use_distributed_optimizer=True, overlap_param_gather=True, align_param_gather=True)
    ddp, wire = _wrap(config)
    loss_of(ddp(batch_of())).backward()
    ddp.finish_grad_sync()
    with pytest.raises(GradientError, match=r"layers\.0\.weight: its shards may have been updated"):
        ddp(batch_of())  # the schedule decides when they are gathered
    with pytest.raises(GradientError, match="were not gathered"):
        ddp.state_dict()
    ddp.start_param_sync()
    assert ddp.state_dict().keys() == ddp.module.state_dict().keys()
    assert not wire.outstanding

    ddp, wire = _wrap(GradientConfig(use_distributed_optimizer=True))
    loss_of(ddp(batch_of())).backward()
    ddp.finish_grad_sync()
    ddp(batch_of())  # who forgot start_param_sync has it done before the forward
    assert wire.buckets("all_gather") == _plan(ddp)
    assert not wire.outstanding
