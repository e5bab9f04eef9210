"""Gradient buffers lie as Megatron-core lays them out: the same offsets, buckets and padding, element for element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xrank.gradients.plan import lay_out

buffers = pytest.importorskip("megatron.core.distributed.param_and_grad_buffer")
distributed = pytest.importorskip("megatron.core.distributed")


class Group:
    """What a buffer asks of a process group when it is laid out: its size."""

    def __init__(self, size: int) -> None:
        self.num_ranks = size

    def size(self) -> int:
        return self.num_ranks


class Groups:
    tp = Group(1)
    dp_cp = Group(1)


@pytest.fixture(autouse=True)
def megatron_on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(buffers, "log_on_each_pipeline_stage", lambda *args, **kwargs: None)


parameters = st.lists(st.tuples(st.integers(1, 900), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(parameters, st.none() | st.integers(1, 1500), st.integers(1, 9), st.booleans(), st.booleans())
def test_buffers_lie_as_megatrons(told, bucket_size, num_ranks, is_sharded, is_wide):
    numels = tuple(numel for numel, _ in told)
    is_tied = tuple(tied for _, tied in told)
    made = [torch.nn.Parameter(torch.zeros(numel)) for numel in numels]
    for parameter, tied in zip(made, is_tied, strict=True):
        parameter.shared_embedding = tied
    config = distributed.DistributedDataParallelConfig(
        use_distributed_optimizer=is_sharded, pad_buckets_for_high_nccl_busbw=is_wide
    )
    names = {parameter: str(number) for number, parameter in enumerate(made)}
    theirs = buffers._ParamAndGradBuffer(
        config,
        torch.float32,
        torch.float32,
        list(made),
        Group(num_ranks),
        bucket_size,
        names,
        1.0,
        list(range(len(made))),
        False,
        Groups,
    )

    # Without shards, a tied table shares its bucket: Megatron's condition, and the planner's.
    alone = tuple(tied and is_sharded for tied in is_tied)
    offsets, buckets = lay_out(numels, alone, bucket_size, num_ranks if is_sharded else 0, is_wide)
    assert offsets == tuple(theirs.param_index_map[parameter][0] for parameter in made)
    assert [(bucket.start, bucket.stop) for bucket in buckets] == [tuple(at) for at in theirs.bucket_indices]
    assert buckets[-1].stop == theirs.numel
    for bucket, other in zip(buckets, theirs.buckets, strict=True):
        assert [str(index) for index in bucket.members] == [names[parameter] for parameter in other.params_list]
