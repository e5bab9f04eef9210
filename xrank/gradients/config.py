"""Storage and exchange of gradients: Megatron's fields and defaults, checked and frozen."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from xrank.errors import UsageError

_NEEDED = {
    "num_distributed_optimizer_instances": "use_distributed_optimizer",
    "overlap_param_gather": "use_distributed_optimizer",
    "align_param_gather": "overlap_param_gather",
    "pad_buckets_for_high_nccl_busbw": "use_distributed_optimizer",
    "reduce_scatter_with_fp32_accumulation": "use_distributed_optimizer",
}
"""A field -> the field without which it has no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientConfig:
    """Storage and exchange of gradients. One object serves any number of plans.

    Raises:
        UsageError: a value, or a combination of two, is invalid.

    Example:
        >>> from xrank.gradients import GradientConfig
        >>> GradientConfig(overlap_grad_reduce=True).bucket_size is None
        True
    """

    grad_reduce_in_fp32: bool = False
    """Add up and exchange gradients in float32, whatever the parameters' dtype."""
    overlap_grad_reduce: bool = False
    """Send a bucket as soon as its gradients are there. False: each buffer is one bucket, sent at the end."""
    use_distributed_optimizer: bool = False
    """Give each rank its shard of every bucket (reduce-scatter) to step; buckets are padded to equal shards."""
    overlap_param_gather: bool = False
    """Gather stepped parameters while the next forward runs, bucket by bucket."""
    align_param_gather: bool = False
    """Start that gathering by the caller's schedule, not at the end of the step."""
    bucket_size: int | None = None
    """Number of elements that closes a bucket. None: an eighth of the exchanged elements, from 1 to 25 million."""
    average_in_collective: bool = False
    """Average in the collective. False: divide gradients before they are summed."""
    num_distributed_optimizer_instances: int = 1
    """Number of groups of ranks that each hold all shards: sums run inside a group, then over the groups."""
    check_for_nan_in_grad: bool = False
    """Check every bucket for NaN and infinity before it leaves; all ranks raise."""
    check_for_large_grads: bool = False
    """Warn of gradients far above earlier ones before they leave."""
    pad_buckets_for_high_nccl_busbw: bool = False
    """End buckets at multiples of 65,536 elements."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """Send gradients of 16 bits, and add up those of all ranks in float32: half the bytes of `grad_reduce_in_fp32`.
    Each sum over ranks is rounded once; sums over micro-batches stay in 16 bits."""
    calculate_per_token_loss: bool = False
    """Losses are sums over tokens: only `finalize_model_grads` divides, by its number of tokens."""
    sequence_parallel: bool = True
    """Ranks along tp see other tokens of a sequence, so that the attribute ``sequence_parallel`` requires a sum."""
    qk_layernorm: bool | None = None
    """Norms of queries and keys see only this rank's heads, so parameters with such names are summed along tp. None:
    unknown, and such a parameter raises where the answer matters."""
    unused: Literal["zero", "error"] = "zero"
    """Meaning of a parameter without a gradient at the end of a step: a gradient of zeros, or an error."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                # bool("false") would be True.
                raise UsageError(f"{field.name} must be True or False", got=repr(value), want="True or False")
        if self.bucket_size is not None:
            _check_count("bucket_size", self.bucket_size)
        _check_count("num_distributed_optimizer_instances", self.num_distributed_optimizer_instances)
        if self.unused not in ("zero", "error"):
            raise UsageError('unused must be "zero" or "error"', got=repr(self.unused), want='"zero" or "error"')
        if self.calculate_per_token_loss and self.average_in_collective:
            text = "average_in_collective divides by the number of ranks, calculate_per_token_loss by that of tokens"
            raise UsageError(text, got="both", want="one of them")
        for field in fields(self):
            needed, value = _NEEDED.get(field.name), getattr(self, field.name)
            if needed is not None and value != field.default and not getattr(self, needed):
                step = f"set {needed}=True, or omit the other"
                raise UsageError(f"{field.name}={value} has no effect without {needed}=True", next_step=step)
        instances = self.num_distributed_optimizer_instances
        if self.reduce_scatter_with_fp32_accumulation and (self.average_in_collective or instances > 1):
            raise UsageError(
                "reduce_scatter_with_fp32_accumulation sums gradients itself, in a single instance",
                got=f"average_in_collective={self.average_in_collective}, {instances} instances",
                want="False and 1",
            )


def _check_count(name: str, value: object) -> None:
    # True is an int: Megatron reads bucket_size=True as 1.
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is not a count", got=repr(value), want="an integer, 1 or more")
