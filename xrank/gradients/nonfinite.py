"""NaN and infinity in gradients, found on the rank that made them, before they are added to other ranks' gradients.

The norm of a bucket shows if any element is not finite; only then are its parameters checked. The norms of single
gradients show which micro-batch caused it; they stay on the gradients' device until a fault needs them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from xrank.gradients.buffer import GradientBuffer
from xrank.gradients.faults import At, GradientFault
from xrank.gradients.plan import GradientPlan, PlannedBucket
from xrank.words import list_text

_logger = logging.getLogger(__name__)

_NUM_SAMPLES = 100
"""Steps that define an ordinary gradient: megatron/core/rerun_state_machine.py:is_unexpectedly_large."""
_LARGE = 10.0
"""Multiple of the largest norm of those steps; as in megatron/core/distributed/param_and_grad_buffer.py."""


def first_nonfinite(tensor: torch.Tensor) -> tuple[tuple[int, ...], str] | None:
    """Return the index of the first element that is NaN or infinite, and its value; None if all are finite."""
    is_bad = ~tensor.isfinite().flatten()
    if not bool(is_bad.any()):
        return None
    # torch has no argmax of bools.
    flat = int(is_bad.to(torch.uint8).argmax())
    place, rest = [], flat
    for length in reversed(tensor.shape):
        rest, index = divmod(rest, length)
        place.append(index)
    return tuple(reversed(place)), str(tensor.flatten()[flat].item())


class GradientWatch:
    """The norms of one rank's gradients, in search of NaN, infinity and large values."""

    def __init__(self, plan: GradientPlan, buffers: Sequence[GradientBuffer]) -> None:
        self._plan, self._buffers = plan, buffers
        self._index_of = {parameter.name: index for index, parameter in enumerate(plan.parameters)}
        self._norms: list[torch.Tensor] = []
        """Norm of each parameter's gradient, one tensor per micro-batch; -1 where a kernel added it unseen."""
        self._largest = [0.0] * len(plan.buckets)
        self._num_samples = [0] * len(plan.buckets)

    def record(self, index: int, gradient: torch.Tensor | None, microbatch: int) -> None:
        """Record the norm of a gradient, without waiting for the device.

        Args:
            index: index of the parameter in the plan.
            gradient: only the gradient of this micro-batch; None if a kernel has already added it.
            microbatch: number of the micro-batch in the step, from 0, among those that used the parameter.
        """
        if not self._plan.config.check_for_nan_in_grad:
            return
        if microbatch == len(self._norms):
            device = gradient.device if gradient is not None else None
            self._norms.append(torch.zeros(len(self._plan.parameters), device=device))
        if gradient is None:
            self._norms[microbatch][index] = -1
        else:
            self._norms[microbatch][index] = _norm(gradient)

    def inspect(self, bucket: PlannedBucket, arrivals: Sequence[int]) -> GradientFault | None:
        """Check a bucket before it leaves, and return its fault.

        Args:
            bucket: the bucket.
            arrivals: number of gradients of each parameter in this step.
        """
        # This waits for the device once per bucket; the norms of single gradients are read only for a fault.
        norm = float(_norm(self._buffers[bucket.buffer].bucket(bucket)))
        # One subtraction covers both: inf - inf and NaN - NaN are NaN.
        if norm - norm == 0:  # finite
            self._warn_if_large(bucket, norm)
            return None
        if not self._plan.config.check_for_nan_in_grad:
            return None
        # All elements may be finite if only the norm was too large for its dtype.
        gradients = ((name, self._buffers[bucket.buffer].gradient(name)) for name in bucket.names)
        bad = [(name, found) for name, one in gradients if (found := first_nonfinite(one)) is not None]
        if not bad:
            return None
        (name, (place, value)), *others = bad
        where = f"element {list(place)}" if place else "its element"
        got = f"{value} at {where} of the local shape {list(self._plan[name].shape)}"
        if others:
            got += f", and likewise in {list_text([other for other, _ in others])} of the same bucket"
        rank, origin = self._plan.rank, self._describe_origin(self._index_of[name], arrivals)
        return At(name, rank).fault(
            f"its gradient on rank {rank} is {value} at {where}, in bucket {bucket.id}, {origin}",
            "check that rank's data; zero_grad_buffer() on all ranks begins a new step",
            got,
        )

    def _describe_origin(self, index: int, arrivals: Sequence[int]) -> str:
        count = arrivals[index]
        norms = [float(self._norms[microbatch][index]) for microbatch in range(min(count, len(self._norms)))]
        first = next((number for number, norm in enumerate(norms, 1) if norm - norm != 0), None)
        if first is not None:
            return f"from micro-batch {first} of the {count} that used it"
        # The mark of a gradient that a kernel added: no norm of it exists.
        if any(norm < 0 for norm in norms):
            return f"from a kernel, in one of {count} micro-batches"
        return f"from the sum of {count} micro-batches, each of which is finite"

    def _warn_if_large(self, bucket: PlannedBucket, norm: float) -> None:
        if not self._plan.config.check_for_large_grads:
            return
        largest = self._largest[bucket.id]
        if self._num_samples[bucket.id] < _NUM_SAMPLES:
            self._num_samples[bucket.id] += 1
            self._largest[bucket.id] = max(largest, norm)
        elif norm >= _LARGE * largest:
            _logger.warning(
                "rank %d: the gradients of bucket %d (%s ...) have a norm of %.3g, %.0f times the largest of the first "
                "%d steps",
                self._plan.rank,
                bucket.id,
                bucket.names[0],
                norm,
                norm / largest if largest else float("inf"),
                _NUM_SAMPLES,
            )


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm. It is computed in float32 for float16, which may not hold the norm of finite elements."""
    norm: torch.Tensor
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float32 if tensor.dtype == torch.float16 else None)
    return norm
