"""Contiguous memory of gradients, and of the parameters that optimizer shards step, with views into it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils.dlpack import from_dlpack

from xrank.errors import GradientError, UsageError
from xrank.gradients.plan import GradientPlan, PlannedBucket, PlannedBuffer, PlannedParameter
from xrank.gradients.roles import local_of


class GradientBuffer:
    """The memory of one `PlannedBuffer`: gradients, and with the distributed optimizer also the parameters.

    Parameters that move into the buffer keep their values and stay the same objects; their old memory is freed. Views
    live as long as the buffer: `release` and `restore` free and allocate the memory below them.

    Args:
        plan: this rank's plan.
        planned: one of its buffers.
        parameters: parameters of the buffer by name, all on one device.

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
        """All parameters, laid out as their gradients; None if parameters stay in their own memory."""
        self._nbytes = self.data.untyped_storage().nbytes()
        self._gradients = {one.name: _view(self.data, one) for one in self.members}
        if plan.config.use_distributed_optimizer:
            self.parameter_data = torch.zeros(planned.numel, dtype=planned.dtype, device=device)
            for one in self.members:
                local = local_of(parameters[one.name])
                view = _view(self.parameter_data, one)
                view.copy_(local.detach())
                # torch.compile cannot trace DTensors whose local tensors share a storage, so each gets a storage of its
                # own over the same memory.
                shares = local is parameters[one.name] or local.device.type == "meta"
                # The Parameter object stays: optimizers and hooks that hold it see the moved values.
                local.data = view if shares or not view.numel() else from_dlpack(view)

    @property
    def is_released(self) -> bool:
        """Whether the memory of its gradients is freed."""
        return bool(self._nbytes) and not self.data.untyped_storage().nbytes()

    def gradient(self, name: str) -> torch.Tensor:
        """Return the view that is a parameter's ``main_grad``, in the shape of the local tensor.

        Raises:
            GradientError: the buffer is released, so that a read would touch freed memory.
        """
        self.demand(name)
        return self._gradients[name]

    def bucket(self, bucket: PlannedBucket) -> torch.Tensor:
        """Return the gradients of one of its buckets."""
        return self.data[bucket.start : bucket.stop]

    def is_here(self, planned: PlannedParameter, parameter: torch.nn.Parameter) -> bool:
        """Return whether a parameter is still in this buffer; True if parameters stay in their own memory."""
        if self.parameter_data is None:
            return True
        expected = self.parameter_data.data_ptr() + planned.offset * self.parameter_data.element_size()
        return not planned.numel or local_of(parameter).data_ptr() == expected

    def demand(self, name: str | None = None) -> None:
        """Check that the buffer has memory.

        Raises:
            GradientError: the buffer is released.
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
        """Free the memory of the gradients, and return its bytes; 0 if it was freed before."""
        if self.is_released:
            return 0
        # Resizing the storage keeps all views of it valid for `restore`; a new tensor would not.
        self.data.untyped_storage().resize_(0)
        return self._nbytes

    def restore(self) -> int:
        """Allocate memory again, filled with zeros, below the existing views, and return its bytes."""
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
