"""Gathering of stepped parameters: each rank stepped its shards, and the next forward needs whole parameters.

All buckets are sent at once, in the order in which a forward needs them, the last id first. Modules may run in any
order: each waits for its own parameters, and none runs with those of the last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from xrank.errors import GradientError
from xrank.gradients.buffers.buffer import GradientBuffer
from xrank.gradients.plan import GradientPlan
from xrank.gradients.wire import GradientWire, Handle


class ParameterGather:
    """The parameters of one module: gathered, due for gathering, or under way.

    Args:
        plan: this rank's plan; without the distributed optimizer all methods do nothing.
        buffers: a buffer for each of the plan's.
        wire: collectives between the ranks of the plan.
        module: module whose submodules wait for their parameters.
        parameters: parameters by name.
    """

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
        """Send all buckets, unless that was done since the parameters were stepped.

        Raises:
            GradientError: a parameter has left its buffer.
        """
        if not self._is_sharded:
            return
        # Collectives of the last step must have written before the next ones read the same memory.
        self.finish()
        # Before anything is sent: a parameter outside of the buffer would keep its old values without an error.
        self._check_places()
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
        """Remove the hooks from the modules.

        Raises:
            GradientError: as `demand`.
        """
        self.demand()
        while self._hooks:
            self._hooks.pop().remove()

    def demand(self) -> None:
        """Wait for buckets under way, and check that no parameter is due.

        Raises:
            GradientError: parameters were stepped and not gathered.
        """
        if self._is_expected:
            raise self._make_ungathered_error(self._plan.parameters[0].name)
        self.finish()

    def wait_for(self, names: Sequence[str]) -> None:
        """Wait for parameters, before a module runs.

        Raises:
            GradientError: parameters are due, and ``align_param_gather`` leaves their gathering to the caller.
        """
        if self._is_expected and self._plan.config.align_param_gather:
            raise self._make_ungathered_error(names[0])
        self.catch_up()
        for bucket in sorted({self._plan[name].bucket for name in names}, reverse=True):
            if bucket in self._handles:
                self._handles.pop(bucket).wait()

    def _check_places(self) -> None:
        for planned in self._plan.parameters:
            if not self._buffers[planned.buffer].is_here(planned, self._parameters[planned.name]):
                raise GradientError(
                    f"{planned.name}: it is no longer in the buffer that shards are gathered into",
                    tensor=planned.name,
                    rank=self._plan.rank,
                    got="a parameter whose data was replaced",
                    want="data that is changed in place",
                    next_step="move and cast modules before they are wrapped; copy into parameters, do not replace",
                )

    def _make_ungathered_error(self, name: str) -> GradientError:
        return GradientError(
            f"{name}: its shards may have been stepped, and were not gathered",
            tensor=name,
            rank=self._plan.rank,
            got="no start_param_sync since finish_grad_sync",
            want="start_param_sync on all ranks after the optimizer's step",
            next_step="call start_param_sync(force_sync=True) on all ranks",
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
