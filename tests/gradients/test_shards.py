"""Owned slices that any optimizer of torch steps: after them all ranks hold what one process would."""

from __future__ import annotations

import pytest
import torch

from tests.gradients.wires import batch_of, loss_of, make_module
from xrank.errors import GradientError, UsageError
from xrank.gradients import DistributedDataParallel, GradientConfig, GradientPlan, ParameterShards
from xrank.gradients.shards import list_owned_slices
from xrank.layout import DeviceMesh

pytestmark = pytest.mark.timeout(90)

_SHARDED = GradientConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=70)


def _wrap(config: GradientConfig, dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
    module = make_module(dtype=dtype)
    return DistributedDataParallel(module, GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), config))


def _step(ddp: DistributedDataParallel, rank: int, dtype: torch.dtype = torch.float32) -> None:
    ddp.zero_grad_buffer()
    loss_of(ddp(batch_of().chunk(2)[rank].to(dtype))).backward()
    ddp.finish_grad_sync()


@pytest.mark.ranks(2, timeout_seconds=60)
def test_any_optimizer_steps_shards_as_one_process_does(rank: int) -> None:
    cases = [
        (lambda of: torch.optim.AdamW(of, lr=0.1), GradientConfig(), False),
        (lambda of: torch.optim.AdamW(of, lr=0.1), _SHARDED, False),
        (lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9), _SHARDED, True),
    ]
    for make, config, sets_to_none in cases:
        reference = make_module()
        expected = make(reference.parameters())
        ddp = _wrap(config)
        shards = ParameterShards(ddp)
        optimizer = make(shards.named_parameters())
        shards.attach(optimizer)
        for _ in range(3):
            expected.zero_grad()
            loss_of(reference(batch_of())).backward()
            expected.step()
            optimizer.zero_grad(set_to_none=sets_to_none)
            _step(ddp, rank)
            optimizer.step()
        for name, one in ddp.module.named_parameters():
            torch.testing.assert_close(one, reference.get_parameter(name), rtol=1e-4, atol=1e-5, msg=name)
    # Each element is stepped by one rank, and a shard is memory of the module.
    held = torch.tensor(sum(shard.numel() for shard in shards.parameters()))
    assert held < sum(one.numel() for one in reference.parameters())
    torch.distributed.all_reduce(held)
    assert held == sum(one.numel() for one in reference.parameters())
    name, shard = next((name, shard) for name, shard in shards.named_parameters() if shard.numel())
    whole = ddp.module.get_parameter(name)
    assert shard.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.ranks(2, timeout_seconds=60)
def test_narrow_parameters_are_stepped_in_wide_copies(rank: int) -> None:
    config = GradientConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    for told in (config, GradientConfig(grad_reduce_in_fp32=True)):
        ddp = _wrap(told, torch.bfloat16)
        shards = ParameterShards(ddp)
        optimizer = torch.optim.SGD(shards.parameters(), lr=1e-4)
        shards.attach(optimizer)
        before = {name: one.detach().clone() for name, one in ddp.module.named_parameters()}
        total = {name: torch.zeros_like(shard) for name, shard in shards.named_parameters()}
        for _ in range(8):
            _step(ddp, rank, torch.bfloat16)
            for name, one in shards.slices.items():
                total[name] += one.gradient()
            optimizer.step()
        for name, shard in shards.named_parameters():
            assert shard.dtype == torch.float32
            one = shards.slices[name]
            # Steps that bfloat16 would round away add up.
            torch.testing.assert_close(
                shard, one.take_from(before[name]).float() - 1e-4 * total[name], rtol=1e-6, atol=1e-7
            )
            assert torch.equal(one.values(), shard.to(torch.bfloat16))
        with torch.no_grad():
            for one in ddp.module.parameters():
                one.fill_(0.5)
        shards.refresh()
        assert all((shard == 0.5).all() for shard in shards.parameters())


@pytest.mark.ranks(2, timeout_seconds=60)
def test_steps_that_would_be_wrong_are_refused(rank: int) -> None:
    ddp = _wrap(_SHARDED)
    shards = ParameterShards([ddp])
    optimizer = torch.optim.SGD(shards.parameters(), lr=0.1)
    shards.attach(optimizer)
    before = [shard.detach().clone() for shard in shards.parameters()]
    ddp.zero_grad_buffer()
    loss_of(ddp(batch_of())).backward()
    with pytest.raises(GradientError, match=r"layers\.0\.weight: its gradient was not exchanged yet"):
        optimizer.step()
    assert all(map(torch.equal, shards.parameters(), before))
    ddp.finish_grad_sync()
    with pytest.raises(UsageError, match="a closure runs a backward"):
        optimizer.step(lambda: None)
    with pytest.raises(UsageError, match="not shards of these models"):
        shards.attach(torch.optim.SGD(ddp.module.parameters(), lr=0.1))
    ddp.release()
    with pytest.raises(GradientError, match="released"):
        optimizer.step()
    assert next(iter(list_owned_slices([ddp, ddp]))) == "0.layers.0.weight"


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_parameter_whose_data_was_replaced_is_not_stepped_in_vain(rank: int) -> None:
    for config in (GradientConfig(), _SHARDED):
        ddp = _wrap(config)
        shards = ParameterShards(ddp)
        optimizer = torch.optim.SGD(shards.named_parameters(), lr=0.1)
        shards.attach(optimizer)
        name = next(name for name, shard in shards.named_parameters() if shard.numel())
        parameter = ddp.module.get_parameter(name)
        parameter.data = parameter.data.clone()
        _step(ddp, rank)
        with pytest.raises(GradientError, match="would update the old memory of its shard") as raised:
            optimizer.step()
        assert raised.value.tensor == name
        if config is not _SHARDED:
            shards = ParameterShards(ddp)
            before = parameter.clone()
            optimizer = torch.optim.SGD(shards.named_parameters(), lr=0.1)
            shards.attach(optimizer)
            optimizer.step()
            assert not torch.equal(parameter, before)
