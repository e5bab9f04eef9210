"""Contiguous memory of gradients, and of the parameters that optimizer shards step; and the parameters' gathering.

After a step of shards the next forward needs whole parameters. All buckets are sent at once, in the order in which a
forward needs them, the last id first. Modules may run in any order: each waits for its own parameters, and none runs
with those of the last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack
from torch.utils.hooks import RemovableHandle

from xrank.errors import GradientError
from xrank.gradients.faults import At
from xrank.gradients.plan import GradientPlan, PlannedBucket, PlannedBuffer, PlannedParameter
from xrank.gradients.roles import local_of
from xrank.gradients.wire import GradientWire, Handle


class GradientBuffer:
    """The memory of one `PlannedBuffer`: gradients, and with the distributed optimizer also the parameters.

    Parameters that move into the buffer keep their values and stay the same objects; their old memory is freed. Views
    live as long as the buffer: `release` and `restore` free and allocate the memory below them.
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
        """Return the view that is a parameter's ``main_grad``, in the shape of the local tensor."""
        self.demand(name)
        return self._gradients[name]

    def bucket(self, bucket: PlannedBucket) -> torch.Tensor:
        """Return the gradients of one of its buckets."""
        return self.data[bucket.start : bucket.stop]

    def demand(self, name: str | None = None) -> None:
        """Check that the buffer has memory."""
        if self.is_released:
            name = self.members[0].name if name is None else name
            text = f"the memory of its gradient, buffer {self.planned.id}, is released"
            raise At(name, self.planned.rank).error(text, "call restore() before the next backward")

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
        raise At(other_name).usage_error(
            f"it is on {other}, and {name} on {one}: their gradients cannot be in one buffer",
            "move the module to one device before it is wrapped",
        )
    return next(iter(found))


class ParameterGather:
    """The parameters of one module: gathered, due for gathering, or under way."""

    def __init__(
        self,
        plan: GradientPlan,
        buffers: Sequence[GradientBuffer],
        wire: GradientWire,
        module: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
    ) -> None:
        self._plan, self._buffers, self._wire, self._parameters = plan, buffers, wire, parameters
        self._is_sharded = plan.config.use_distributed_optimizer and bool(plan.parameters)
        self._is_expected = False
        self._handles: dict[int, Handle] = {}
        self._hooks: list[RemovableHandle] = []
        if not self._is_sharded:
            return
        names = {id(parameter): name for name, parameter in parameters.items()}
        for part in module.modules():
            held = [names[id(one)] for one in part.parameters(recurse=False) if id(one) in names]
            if held:
                self._hooks.append(part.register_forward_pre_hook(_WaitHook(self, held)))

    def expect(self) -> None:
        """Mark parameters as due for gathering: gradients are ready, so the optimizer steps now."""
        self._is_expected = self._is_sharded

    def start(self) -> None:
        """Send all buckets, unless that was done since the parameters were stepped."""
        if not self._is_sharded:
            return
        # Collectives of the last step must have written before the next ones read the same memory.
        self.finish()
        # Before anything is sent: a parameter outside of the buffer would keep its old values without an error.
        for planned in self._plan.parameters:
            data = self._buffers[planned.buffer].parameter_data
            assert data is not None
            place = data.data_ptr() + planned.offset * data.element_size()
            if planned.numel and local_of(self._parameters[planned.name]).data_ptr() != place:
                raise At(planned.name, self._plan.rank).error(
                    "its data was replaced, and is no longer in the buffer that shards are gathered into",
                    "move and cast modules before they are wrapped; copy into parameters, do not replace",
                )
        # From here on modules wait for the handles instead of raising.
        self._is_expected = False
        for bucket in reversed(self._plan.buckets):
            buffer = self._buffers[bucket.buffer]
            start, stop = self._plan.shard(bucket)
            data = buffer.parameter_data
            assert data is not None
            data = torch.view_as_real(data) if data.is_complex() else data
            whole, shard = data[bucket.start : bucket.stop], data[start:stop]
            ranks = buffer.planned.shard_ranks
            self._handles[bucket.id] = self._wire.all_gather(whole.reshape(-1), shard.reshape(-1), ranks)

    def catch_up(self) -> None:
        """Send buckets that are still due when a step begins: on all ranks, even if only some run a forward."""
        if self._is_expected and not self._plan.config.align_param_gather:
            self.start()
            if not self._plan.config.overlap_param_gather:
                self.finish()

    def finish(self) -> None:
        """Wait for all buckets under way."""
        for bucket in sorted(self._handles, reverse=True):
            self._handles.pop(bucket).wait()

    def close(self) -> None:
        """Remove the hooks from the modules."""
        self.demand()
        while self._hooks:
            self._hooks.pop().remove()

    def demand(self) -> None:
        """Wait for buckets under way, and check that no parameter is due."""
        if self._is_expected:
            raise self._make_ungathered_error(self._plan.parameters[0].name)
        self.finish()

    def wait_for(self, names: Sequence[str]) -> None:
        """Wait for parameters, before a module runs."""
        if self._is_expected and self._plan.config.align_param_gather:
            raise self._make_ungathered_error(names[0])
        self.catch_up()
        for bucket in sorted({self._plan[name].bucket for name in names}, reverse=True):
            if bucket in self._handles:
                self._handles.pop(bucket).wait()

    def _make_ungathered_error(self, name: str) -> GradientError:
        return At(name, self._plan.rank).error(
            "its shards may have been stepped since finish_grad_sync, and were not gathered",
            "call start_param_sync(force_sync=True) on all ranks after the optimizer's step",
        )


class _WaitHook:
    """Makes a module wait for its parameters. A copy of the module, as for a moving average, does not wait."""

    def __init__(self, gather: ParameterGather | None, names: Sequence[str]) -> None:
        self._gather, self._names = gather, names

    def __call__(self, module: torch.nn.Module, arguments: Any) -> None:
        if self._gather is not None:
            self._gather.wait_for(self._names)

    def __reduce__(self) -> tuple[Any, ...]:
        return _WaitHook, (None, ())
