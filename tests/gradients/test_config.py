import pickle
from dataclasses import FrozenInstanceError, fields

import pytest

from xrank.errors import UsageError
from xrank.gradients import GradientConfig


def test_defaults_are_megatrons():
    told = {field.name: getattr(GradientConfig(), field.name) for field in fields(GradientConfig)}
    assert told == {
        "grad_reduce_in_fp32": False,
        "overlap_grad_reduce": False,
        "use_distributed_optimizer": False,
        "overlap_param_gather": False,
        "align_param_gather": False,
        "bucket_size": None,
        "average_in_collective": False,
        "num_distributed_optimizer_instances": 1,
        "check_for_nan_in_grad": False,
        "check_for_large_grads": False,
        "pad_buckets_for_high_nccl_busbw": False,
        "reduce_scatter_with_fp32_accumulation": False,
        "calculate_per_token_loss": False,
        "sequence_parallel": True,
        "qk_layernorm": None,
        "unused": "zero",
    }


def test_is_immutable():
    config = GradientConfig(bucket_size=100, unused="error")
    assert config == GradientConfig(bucket_size=100, unused="error") and hash(config) == hash(
        pickle.loads(pickle.dumps(config))
    )
    with pytest.raises(FrozenInstanceError):
        config.bucket_size = None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_size": True}, "bucket_size is not a count"),
        ({"bucket_size": 0}, "bucket_size is not a count"),
        ({"bucket_size": 2.5e7}, "bucket_size is not a count"),
        ({"num_distributed_optimizer_instances": 0}, "num_distributed_optimizer_instances is not a count"),
        ({"num_distributed_optimizer_instances": 2}, "has no effect without use_distributed_optimizer"),
        ({"overlap_param_gather": True}, "has no effect without use_distributed_optimizer"),
        ({"pad_buckets_for_high_nccl_busbw": True}, "has no effect without use_distributed_optimizer"),
        ({"use_distributed_optimizer": True, "align_param_gather": True}, "has no effect without overlap_param_gather"),
        ({"average_in_collective": True, "calculate_per_token_loss": True}, "by that of tokens"),
        ({"reduce_scatter_with_fp32_accumulation": True}, "has no effect without use_distributed_optimizer"),
        (
            {
                "reduce_scatter_with_fp32_accumulation": True,
                "use_distributed_optimizer": True,
                "average_in_collective": True,
            },
            "sums gradients itself",
        ),
        ({"overlap_grad_reduce": "false"}, "overlap_grad_reduce must be True or False"),
        ({"sequence_parallel": 1}, "sequence_parallel must be True or False"),
        ({"unused": "ignore"}, "unused must be"),
    ],
)
def test_invalid_values_are_refused(options, message):
    with pytest.raises(UsageError, match=message) as caught:
        GradientConfig(**options)
    assert caught.value.next_step


def test_megatrons_other_combinations_are_taken():
    GradientConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        align_param_gather=True,
        num_distributed_optimizer_instances=2,
        pad_buckets_for_high_nccl_busbw=True,
        average_in_collective=True,
        bucket_size=40_000_000,
    )
