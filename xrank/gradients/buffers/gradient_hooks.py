"""The way of gradients from autograd, or from kernels, into their buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from xrank.gradients.buffer import GradientBuffer
from xrank.gradients.buffers.bucket_sync import BucketSync
from xrank.gradients.buffers.local_gradients import find_foreign_axis, make_foreign_fault, take_local_gradient
from xrank.gradients.plan import GradientPlan


class GradientHooks:
    """Hooks that add each gradient of autograd to its buffer, and ``main_grad``, where kernels and readers find it.

    Args:
        plan: this rank's plan.
        parameters: its parameters by name, in the order of the plan.
        buffers: a buffer for each of the plan's.
        sync: the exchange that receives the gradients.
    """

    def __init__(
        self,
        plan: GradientPlan,
        parameters: Mapping[str, torch.nn.Parameter],
        buffers: Sequence[GradientBuffer],
        sync: BucketSync,
    ) -> None:
        self.is_last_microbatch = True
        """Whether gradients that come now may send their buckets."""
        self._plan, self._parameters, self._buffers, self._sync = plan, parameters, buffers, sync
        self.give_views()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters.values())
        ]

    def give_views(self) -> None:
        """Set ``main_grad`` of all parameters."""
        for planned, parameter in zip(self._plan.parameters, self._parameters.values(), strict=True):
            parameter.main_grad = self._buffers[planned.buffer].gradient(planned.name)  # type: ignore[attr-defined]
        self.forget_kernels()

    def take_views(self) -> None:
        """Delete ``main_grad`` of all parameters."""
        for parameter in self._parameters.values():
            if hasattr(parameter, "main_grad"):
                del parameter.main_grad

    def forget_kernels(self) -> None:
        """Begin a step: no kernel has added a gradient."""
        for parameter in self._parameters.values():
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def note_kernels(self) -> None:
        """Count gradients that kernels added outside of autograd, for which no hook ran."""
        for index, parameter in enumerate(self._parameters.values()):
            if getattr(parameter, "grad_added_to_main_grad", False) and not self._sync.arrivals[index]:
                self._sync.add_gradient(index, None, is_last=False)

    def remove(self) -> None:
        """Leave the parameters as they were."""
        self.take_views()
        while self._handles:
            self._handles.pop().remove()

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # A weak reference: torch keeps these hooks where the garbage collector sees no cycle, so an unused wrapper
        # would stay alive with its buffers and process groups.
        this = weakref.ref(self)

        def add(parameter: torch.Tensor) -> None:
            hooks = this()
            if hooks is not None:
                hooks._take_gradient(index, parameter)

        return add

    @torch.no_grad()
    def _take_gradient(self, index: int, parameter: torch.Tensor) -> None:
        planned = self._plan.parameters[index]
        # Free .grad at once: torch would add the next micro-batch to it.
        gradient, parameter.grad = parameter.grad, None
        self._buffers[planned.buffer].demand(planned.name)
        is_added = getattr(parameter, "grad_added_to_main_grad", False)
        if gradient is None or (is_added and not getattr(parameter, "zero_out_wgrad", False)):
            self._sync.add_gradient(index, None, is_last=self.is_last_microbatch)
            return
        axis = find_foreign_axis(gradient, parameter, planned)
        if axis is not None:
            self._sync.faults.append(make_foreign_fault(planned.name, axis, self._plan.rank))
        local = take_local_gradient(gradient, parameter, planned)
        self._sync.add_gradient(index, local, is_last=self.is_last_microbatch)
