"""One step's exchange without a module: additions, divisions, sent and shared buckets, and observers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.gradients.wires import RecordingWire
from xrank.errors import GradientError
from xrank.gradients import DistributedDataParallel, GradientConfig, GradientPlan, mark
from xrank.gradients.buckets import BucketSync, GradientBuffer
from xrank.gradients.faults import At, GradientFault
from xrank.gradients.plan import PlannedBucket
from xrank.layout import DeviceMesh
from xrank.layout.mesh import megatron_views

pytestmark = pytest.mark.timeout(60)


def _module(num_elements: int = 4, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    module = torch.nn.Module()
    for name in ("a", "b", "c"):
        module.register_parameter(name, torch.nn.Parameter(torch.ones(num_elements, dtype=dtype)))
    return module


def _make_sync(module: torch.nn.Module, mesh: object, **options: object) -> tuple[BucketSync, RecordingWire]:
    config = GradientConfig(**options)  # type: ignore[arg-type]
    plan = GradientPlan.from_module(module, mesh, config, rank=1)
    wire = RecordingWire()
    parameters = dict(module.named_parameters())
    buffers = [
        GradientBuffer(plan, one, {p.name: parameters[p.name] for p in plan.parameters if p.buffer == one.id})
        for one in plan.buffers
    ]
    return BucketSync(plan, buffers, wire), wire


def _gradient(sync: BucketSync, index: int) -> torch.Tensor:
    one = sync.plan.parameters[index]
    return sync._buffers[one.buffer].gradient(one.name)


@pytest.mark.parametrize("options", [{}, {"average_in_collective": True}, {"calculate_per_token_loss": True}])
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_the_same_gradient_comes_out_however_it_came_in(is_overlapped: bool, options: dict[str, bool]) -> None:
    sync, _ = _make_sync(
        _module(), DeviceMesh((3,), ("dp",)), overlap_grad_reduce=is_overlapped, bucket_size=8, **options
    )
    value = torch.tensor([1.0, -2.0, 3.0, 0.1])
    sync.add_gradient(0, value, is_last=False)
    sync.add_gradient(0, value, is_last=False)
    for index in (0, 1, 1):  # the second of b comes before its bucket is full
        sync.add_gradient(index, value, is_last=True)
    assert not sync.next_bucket
    sync.finish()
    factor = 3.0 if options.get("calculate_per_token_loss") else 1.0  # all three ranks have the same
    torch.testing.assert_close(_gradient(sync, 0), 3 * factor * value)
    torch.testing.assert_close(_gradient(sync, 1), 2 * factor * value)
    assert not _gradient(sync, 2).any()
    assert sync.arrivals == [3, 2, 0]


def test_shards_are_added_up_inside_an_instance_and_then_over_all() -> None:
    sync, wire = _make_sync(
        _module(300),
        DeviceMesh((4,), ("dp",)),
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=2,
        overlap_grad_reduce=True,
        bucket_size=300,
    )
    for index in (2, 1, 0):
        sync.add_gradient(index, torch.full((300,), 4.0), is_last=True)
    assert len(sync.plan.buckets) == 3
    assert [(sent.kind, sent.ranks) for sent in wire.sent] == [("reduce_scatter", (0, 1))] * 3
    sync.finish()
    across = [sent for sent in wire.sent if sent.kind == "all_reduce" and sent.how == "sum"]
    assert [sent.ranks for sent in across] == [(1, 3)] * 3
    for bucket, sent in zip(sync.plan.buckets, across, strict=True):
        start, stop = sync.plan.shard(bucket)
        assert (sent.start, sent.numel) == (start, stop - start)
    for index, planned in enumerate(sync.plan.parameters):
        owned = slice(*planned.owned)
        assert torch.equal(_gradient(sync, index)[owned], torch.full((300,), 4.0)[owned])
        assert _gradient(sync, index)[: planned.owned[0]].isnan().all()  # other ranks own the rest


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("is_wide", [False, True])
def test_old_gradients_are_replaced_when_zeroing_is_skipped(is_overlapped: bool, is_wide: bool) -> None:
    sync, _ = _make_sync(
        _module(dtype=torch.bfloat16),
        DeviceMesh((2,), ("dp",)),
        overlap_grad_reduce=is_overlapped,
        grad_reduce_in_fp32=is_wide,
    )
    value = torch.tensor([1.0, 2.0, -3.0, 0.5], dtype=torch.bfloat16)
    for _ in range(3):
        sync._buffers[0].data.fill_(float("nan"))
        sync.reset(lazily=True)
        sync.add_gradient(0, value, is_last=False)
        sync.add_gradient(0, value, is_last=True)
        sync.add_gradient(1, value, is_last=True)
        sync.finish()
        assert [_gradient(sync, index).tolist() for index in range(3)] == [
            (2 * value).tolist(),
            value.tolist(),
            [0.0] * 4,
        ]
    sync.reset(lazily=True)
    sync.add_gradient(1, None, is_last=True)
    with pytest.raises(GradientError, match="b: on rank 1 a kernel added its gradient on top of the last step's"):
        sync.finish()


def test_complex_gradients_travel_as_pairs() -> None:
    sync, wire = _make_sync(_module(dtype=torch.complex64), DeviceMesh((2,), ("dp",)))
    for index in range(3):
        sync.add_gradient(index, torch.full((4,), 1 + 2j), is_last=True)
    sync.finish()
    assert wire.sent[0].numel == 24
    assert torch.equal(_gradient(sync, 0), torch.full((4,), 1 + 2j))


def test_inspections_see_each_bucket_before_it_leaves_and_their_faults_are_raised_when_all_have_left() -> None:
    sync, wire = _make_sync(_module(), DeviceMesh((2,), ("dp",)), overlap_grad_reduce=True, bucket_size=4)
    seen = []

    def inspect(bucket: PlannedBucket, arrivals: list[int]) -> GradientFault | None:
        seen.append((bucket.id, len(wire.sent)))
        return At(bucket.names[0], 1).fault("it is odd", "see it") if bucket.id == 1 else None

    sync.watch = SimpleNamespace(record=lambda *arguments: None, inspect=inspect)  # type: ignore[assignment]
    for index in (2, 1, 0):
        sync.add_gradient(index, torch.ones(4), is_last=True)
    assert seen == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(GradientError, match="b: it is odd") as caught:
        sync.finish()
    assert caught.value.tensor == "b"
    assert not wire.outstanding
    sync.reset()
    sync.watch = None
    sync.finish()  # a fault is raised once


def test_a_plan_of_nothing_has_nothing_to_send() -> None:
    module = _module().requires_grad_(False)
    sync, wire = _make_sync(module, DeviceMesh((2,), ("dp",)))
    sync.finish()
    assert [sent.how for sent in wire.sent] == ["max"]


@pytest.mark.ranks(4)
def test_sums_of_16_bits_are_rounded_once(rank: int) -> None:
    module = torch.nn.Linear(16, 8, bias=False, dtype=torch.bfloat16)
    config = GradientConfig(use_distributed_optimizer=True, reduce_scatter_with_fp32_accumulation=True)
    ddp = DistributedDataParallel(module, GradientPlan.from_module(module, DeviceMesh((4,), ("dp",)), config))
    ddp.broadcast_params()
    # bfloat16 has no 257, and rounds 259 to 260: a sum that is rounded after each addend stays at 256.
    rows = torch.full((1, 16), 1024.0 if rank == 0 else 4.0, dtype=torch.bfloat16)
    ddp(rows).sum().backward()
    ddp.finish_grad_sync()
    start, stop = ddp.plan["weight"].owned
    owned = ddp.main_grad("weight").flatten()[start:stop]
    assert owned.numel() == 32 and owned.dtype == torch.bfloat16
    assert owned.unique().tolist() == [260.0]


def test_experts_are_divided_by_all_ranks_that_see_other_data_though_few_hold_them() -> None:
    for is_averaged in (False, True):
        module = _module()
        mark(module.b, expert=True)
        views = megatron_views(4, tp=1, ep=4)
        sync, wire = _make_sync(module, views, average_in_collective=is_averaged, overlap_grad_reduce=True)
        for index in range(3):
            sync.add_gradient(index, torch.full((4,), 8.0), is_last=True)
        sync.finish()
        # Four ranks hold a and c with the same gradient; b is on rank 1 alone.
        assert [_gradient(sync, index)[0].item() for index in range(3)] == [8.0, 2.0, 8.0]
        assert {sent.ranks for sent in wire.sent if sent.how != "max"} == {(0, 1, 2, 3), (1,)}
