"""Contiguous memory of gradients, and of the parameters that shards of an optimizer step; views into it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from xrank.errors import GradientError, UsageError
from xrank.gradients.plans.placed_parameters import local_of
from xrank.gradients.plans.plan import GradientPlan, PlannedBucket, PlannedBuffer, PlannedParameter

__all__ = ["GradientBuffer"]


class GradientBuffer:
    """The memory of one `PlannedBuffer`: gradients, and with the distributed optimizer the parameters themselves.

    Parameters that move in here keep their values and stay the same objects; what was theirs is freed. Views live as
    long as the buffer: `release` and `restore` take memory from under them and put it back.

    Args:
        plan: of this rank.
        planned: one of its buffers.
        parameters: those of the buffer by name, all on one device.

    Raises:
        UsageError: parameters are on several devices.
    """

    def __init__(
        self, plan: GradientPlan, planned: PlannedBuffer, parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self.planned = planned
        self.members: tuple[PlannedParameter, ...] = tuple(plan[name] for name in parameters)
        device = _device(parameters)
        self.data: torch.Tensor = torch.zeros(planned.numel, dtype=planned.grad_dtype, device=device)
        """All gradients, padding included."""
        self.parameter_data: torch.Tensor | None = None
        """All parameters, laid out as their gradients; None where parameters stay where they are."""
        self._nbytes = self.data.untyped_storage().nbytes()
        self._gradients = {one.name: _view(self.data, one) for one in self.members}
        if plan.config.use_distributed_optimizer:
            self.parameter_data = torch.zeros(planned.numel, dtype=planned.dtype, device=device)
            for one in self.members:
                local = local_of(parameters[one.name])
                view = _view(self.parameter_data, one)
                view.copy_(local.detach())
                local.data = view

    @property
    def is_released(self) -> bool:
        """Whether the memory of its gradients is given back."""
        return bool(self._nbytes) and not self.data.untyped_storage().nbytes()

    def gradient(self, name: str) -> torch.Tensor:
        """Return the view that is a parameter's ``main_grad``, in the shape of the local tensor.

        Raises:
            GradientError: the buffer is released: a read would be of memory that is not there.
        """
        self.demand(name)
        return self._gradients[name]

    def bucket(self, bucket: PlannedBucket) -> torch.Tensor:
        """Return the gradients of one of its buckets."""
        return self.data[bucket.start : bucket.stop]

    def is_here(self, planned: PlannedParameter, parameter: torch.nn.Parameter) -> bool:
        """Say whether a parameter still is where it was put; True where none was."""
        if self.parameter_data is None:
            return True
        expected = self.parameter_data.data_ptr() + planned.offset * self.parameter_data.element_size()
        return not planned.numel or local_of(parameter).data_ptr() == expected

    def demand(self, name: str | None = None) -> None:
        """Refuse to go on without memory.

        Raises:
            GradientError: it is released.
        """
        if self.is_released:
            name = self.members[0].name if name is None else name
            raise GradientError(
                f"{name}: the memory of its gradient is released",
                tensor=name,
                rank=self.planned.rank,
                got=f"buffer {self.planned.id}, released",
                want="its memory",
                next_step="call restore() before the next backward",
            )

    def release(self) -> int:
        """Give the memory of the gradients back, and return its bytes; 0 if that was done before."""
        if self.is_released:
            return 0
        self.data.untyped_storage().resize_(0)
        return self._nbytes

    def restore(self) -> int:
        """Take memory again, filled with zeros, below the views that were there, and return its bytes."""
        if not self.is_released:
            return 0
        self.data.untyped_storage().resize_(self._nbytes)
        self.data.zero_()
        return self._nbytes


def _view(data: torch.Tensor, planned: PlannedParameter) -> torch.Tensor:
    return data[planned.offset : planned.offset + planned.numel].view(planned.shape)


def _device(parameters: Mapping[str, torch.nn.Parameter]) -> torch.device:
    found: dict[torch.device, str] = {local_of(parameter).device: name for name, parameter in parameters.items()}
    if len(found) > 1:
        (one, name), (other, other_name), *_ = found.items()
        raise UsageError(
            f"{other_name} is on {other} and {name} on {one}: their gradients cannot lie in one buffer",
            tensor=other_name,
            got=f"{other} and {one}",
            want="one device",
            next_step="move the module to one device before it is wrapped",
        )
    return next(iter(found))
