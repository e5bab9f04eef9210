"""How gradients are kept and exchanged: Megatron's fields and defaults, checked, frozen, nothing global."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from xrank.errors import UsageError

__all__ = ["GradientConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientConfig:
    """How gradients are kept and exchanged. One object serves any number of plans: nobody changes it.

    Raises:
        UsageError: a value, or two together, mean nothing.
    """

    grad_reduce_in_fp32: bool = False
    """Gradients are added up and exchanged in float32, whatever the parameters' dtype."""
    overlap_grad_reduce: bool = False
    """A bucket leaves as soon as its gradients are there. False: each buffer is one bucket, which leaves at the end."""
    use_distributed_optimizer: bool = False
    """Each rank gets its shard of every bucket (reduce-scatter) and steps those; buckets are padded to equal shards."""
    overlap_param_gather: bool = False
    """Stepped parameters are gathered while the next forward runs, bucket by bucket."""
    align_param_gather: bool = False
    """The caller's schedule, not the end of the step, says when that gathering starts."""
    bucket_size: int | None = None
    """Elements from which on a bucket is closed. None: an eighth of what is exchanged, from 1 to 25 million."""
    average_in_collective: bool = False
    """The collective averages. False: gradients are divided before they are summed."""
    num_distributed_optimizer_instances: int = 1
    """Groups of ranks that each hold all shards: sums inside a group, then over the groups."""
    check_for_nan_in_grad: bool = False
    """Every bucket is looked at for NaN and infinity before it leaves; all ranks raise."""
    check_for_large_grads: bool = False
    """Gradients far out of the ordinary are warned of before they leave."""
    pad_buckets_for_high_nccl_busbw: bool = False
    """Buckets end at multiples of 65,536 elements."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """Refused when True: `grad_reduce_in_fp32` is as exact."""
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    """Refused when there are any: `grad_reduce_in_fp32` is as exact."""
    calculate_per_token_loss: bool = False
    """Losses are sums over tokens: nothing is divided before `finalize_model_grads` is told the number of tokens."""
    sequence_parallel: bool = True
    """Ranks along tp see other tokens of a sequence, so that the attribute ``sequence_parallel`` means a sum."""
    qk_layernorm: bool | None = None
    """Norms of queries and keys see only this rank's heads: those so named are summed along tp. None: not said, and
    a parameter of such a name is refused where it matters."""
    unused: Literal["zero", "error"] = "zero"
    """What a parameter without a gradient means at the end of a step: a gradient of zeros, or an error."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                # "false" of a file of settings would be true.
                raise UsageError(f"{field.name} is neither True nor False", got=repr(value), want="True or False")
        if self.bucket_size is not None:
            _check_count("bucket_size", self.bucket_size)
        _check_count("num_distributed_optimizer_instances", self.num_distributed_optimizer_instances)
        if self.unused not in ("zero", "error"):
            raise UsageError('unused is neither "zero" nor "error"', got=repr(self.unused), want='"zero" or "error"')
        if self.calculate_per_token_loss and self.average_in_collective:
            raise UsageError(
                "average_in_collective divides by the number of ranks, calculate_per_token_loss by that of tokens",
                got="both",
                want="one of them",
            )
        if self.num_distributed_optimizer_instances > 1:
            self._demand("num_distributed_optimizer_instances > 1", "use_distributed_optimizer")
        if self.overlap_param_gather:
            self._demand("overlap_param_gather", "use_distributed_optimizer")
        if self.align_param_gather:
            self._demand("align_param_gather", "overlap_param_gather")
        if self.pad_buckets_for_high_nccl_busbw:
            self._demand("pad_buckets_for_high_nccl_busbw", "use_distributed_optimizer")
        for name in ("reduce_scatter_with_fp32_accumulation", "param_name_patterns_for_fp32_local_accumulation"):
            if getattr(self, name):
                raise UsageError(
                    f"{name} is not offered",
                    got=f"{name}={getattr(self, name)!r}",
                    want="the default",
                    next_step="set grad_reduce_in_fp32=True, which keeps and sends float32",
                )

    def _demand(self, name: str, needed: str) -> None:
        if not getattr(self, needed):
            raise UsageError(
                f"{name} means nothing without {needed}",
                got=f"{needed}=False",
                want=f"{needed}=True",
                next_step=f"set {needed}=True, or leave the other out",
            )


def _check_count(name: str, value: object) -> None:
    # True is an int: Megatron takes bucket_size=True for 1.
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is no count", got=repr(value), want="an integer, 1 or more")
