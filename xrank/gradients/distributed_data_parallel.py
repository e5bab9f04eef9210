"""A module whose replicas add up their gradients, in contiguous buffers and as its `GradientPlan` says.

One step, on all ranks alike::

    ddp.zero_grad_buffer()
    with ddp.no_sync():
        for batch in all_but_the_last:
            loss(ddp(batch)).backward()
    loss(ddp(last)).backward()  # buckets leave while it runs
    ddp.finish_grad_sync()      # or finalize_model_grads([ddp]), which does this and what comes later
    ...                         # parameters are stepped with their main_grad
    ddp.start_param_sync()      # with the distributed optimizer: each rank stepped its shards alone
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from xrank.errors import GradientError, UsageError
from xrank.gradients.buffers.bucket_sync import BucketSync
from xrank.gradients.buffers.buffer import GradientBuffer
from xrank.gradients.buffers.local_gradients import foreign_axis, foreign_fault, local_gradient
from xrank.gradients.buffers.matched_parameters import matched_parameters, strangers
from xrank.gradients.buffers.nonfinite import watch
from xrank.gradients.buffers.parameter_gather import ParameterGather
from xrank.gradients.buffers.step_errors import dropped, never_exchanged, never_finalized
from xrank.gradients.config import GradientConfig
from xrank.gradients.plan_exchange import check_agreement, torch_wire
from xrank.gradients.plans.agreement import agreement_lines
from xrank.gradients.plans.marks import role_of
from xrank.gradients.plans.mesh_places import MeshPlace
from xrank.gradients.plans.placed_parameters import local_of
from xrank.gradients.plans.plan import GradientPlan
from xrank.gradients.wires.wire import Wire

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(torch.nn.Module):
    """A module with gradient buffers. What all ranks do together is said of each method; the rest is one rank's own.

    Each parameter gets ``main_grad``, a view of its place in a buffer, where gradients are added up; ``.grad`` is None
    after every backward. A kernel that adds to ``main_grad`` itself says so by ``grad_added_to_main_grad = True``.

    So torch's optimizers and `clip_grad_norm_` over the module's parameters find no gradient, and do nothing: give them
    those of `ParameterShards`, with the distributed optimizer or without. Ranks of the world that are not in the mesh
    call ``process_groups.make_groups(())`` while the others construct this.

    Args:
        module: this rank's module, or its chunks of one: those of the plan.
        plan: `GradientPlan.from_module` of it; all ranks of the mesh make theirs and construct this together.
        config: the plan's, which need not be said again.
        wire: what stands in for torch's process groups.

    Raises:
        UsageError: the module is not the plan's, a parameter has a gradient already, or there is no process group.
        GradientError: ranks do not lay out the same gradients; raised on all.
    """

    def __init__(
        self,
        module: torch.nn.Module | Sequence[torch.nn.Module],
        plan: GradientPlan,
        config: GradientConfig | None = None,
        *,
        wire: Wire | None = None,
    ) -> None:
        super().__init__()
        if config is not None and config != plan.config:
            raise UsageError(
                "the config is not that of the plan",
                got=repr(config),
                want=repr(plan.config),
                next_step="give the config to GradientPlan.from_module, and none here",
            )
        parameters = matched_parameters(module, plan)
        self.module = module if isinstance(module, torch.nn.Module) else torch.nn.ModuleList(module)
        self.plan = plan
        self.config = plan.config
        self.wire = torch_wire(plan) if wire is None else wire
        check_agreement(agreement_lines(plan), self.wire, plan)
        self.planned_parameters: Mapping[str, torch.nn.Parameter] = parameters
        """By name, in the order of the plan."""
        self.gradient_buffers = tuple(
            GradientBuffer(plan, buffer, {one.name: parameters[one.name] for one in plan.parameters if one.buffer == i})
            for i, buffer in enumerate(plan.buffers)
        )
        """One for each of the plan's buffers."""
        self.sync = BucketSync(plan, self.gradient_buffers, self.wire)
        watch(self.sync, self.gradient_buffers)
        self.later_is_due = False
        """Whether replicas are added up, and the later reductions of the plan are not made: no gradient may be used."""
        self.value_listeners: list[Callable[[], None]] = []
        """Called when parameters were given other values here, not by a step: what has copies takes them anew."""
        self._is_last_microbatch = True
        self._known = {id(parameter) for parameter in parameters.values()}
        self._give_main_grads()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters.values())
        ]
        self._gather = ParameterGather(plan, self.gradient_buffers, self.wire, self.module, parameters)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Run the module."""
        return self.module(*arguments, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add gradients up inside: for all micro-batches of a step but the last."""
        before = self._is_last_microbatch
        self._is_last_microbatch = False
        try:
            yield
        finally:
            self._is_last_microbatch = before

    def start_grad_sync(self) -> None:
        """Send all buckets that have not left, without waiting: for schedules that know that a backward has ended."""
        if not self.sync.is_finished:
            self._note_kernels()
            self.sync.start()

    def finish_grad_sync(self) -> None:
        """Wait until gradients are added up over all replicas; once in a step, on all ranks of the mesh.

        Where a plan has later reductions, as along tp, `finalize_model_grads` is what to call instead.
        With the distributed optimizer only the elements that the plan calls ``owned`` are right after it.

        Raises:
            GradientError: on all ranks, naming the parameter: a gradient came after its bucket had left, or not at all
                where that is an error, or belongs to no parameter of the plan. Or a second call in one step.
        """
        if not self.sync.is_finished:
            self._note_kernels()
        self.sync.finish(strangers(self.module, self.plan, self._known))
        self._gather.expect()
        self.later_is_due = any(planned.later for planned in self.plan.parameters)

    def zero_grad_buffer(self, *, discard: bool = False, lazily: bool = False) -> None:
        """Begin a step: all gradients are zeros.

        Args:
            lazily: save the pass over all buffers: the first gradient of a parameter replaces what it had, and those
                that get none are zeros after the exchange. Until then nothing else may read or write ``main_grad``;
                kernels that add to it are found, and named by `finish_grad_sync`.
            discard: gradients that were never exchanged are meant to be dropped. On all ranks of the mesh, then.

        Raises:
            GradientError: gradients came since the last call, and were never exchanged, or not along all axes: if
                parameters were stepped with them, replicas differ now.
        """
        if self.later_is_due and not discard:
            raise never_finalized(self.plan)
        self.later_is_due = False
        if discard and not self.sync.is_finished:
            # Where nothing has begun, too: the buckets of another rank may be under way. Whoever finishes the step
            # instead of dropping it hears of it; all others see what they expect, and drop what was wrong with it, too.
            self.sync.faults.append(dropped(self.plan.rank))
            with suppress(GradientError):
                self.sync.finish()
        elif self.sync.has_begun and not self.sync.is_finished:
            raise never_exchanged(self.plan, self.sync.arrivals)
        self._gather.catch_up()
        for buffer in self.gradient_buffers:
            buffer.demand()
            if not lazily:
                buffer.data.zero_()
        for parameter in self.planned_parameters.values():
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        self.sync.reset(lazily=lazily)

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients by a number."""
        for buffer in self.gradient_buffers:
            buffer.demand()
            buffer.data.mul_(factor)

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Give all replicas of each parameter, frozen ones too, the values of the first rank that holds it.

        On all ranks of the mesh.
        """
        place, handles = MeshPlace(self.plan.views, self.plan.rank), []
        for name, parameter in self.module.named_parameters():
            if name in self.plan:
                ranks = self.plan[name].ranks
            else:
                role = role_of(name, parameter, place, self.config)
                axes = [axis for axis in place.data_axes(role.is_expert) if axis not in role.sharded]
                ranks = place.ranks(axes, role.is_expert)
            local = local_of(parameter).data
            whole = local if local.is_contiguous() else local.contiguous()
            handles.append((self.wire.broadcast(whole, ranks), whole, local))
        for handle, whole, local in handles:
            handle.wait()
            if whole is not local:
                local.copy_(whole)
        self._tell_new_values()

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        """Gather the parameters that all ranks stepped their shards of; on all ranks. Nothing without shards.

        With ``overlap_param_gather`` this returns at once, and each module waits for its own parameters before it runs;
        of parameters that a module takes from another, it knows nothing: those need ``force_sync``.

        Args:
            force_sync: wait for all of them here, as is wanted before parameters are read by something else.

        Raises:
            GradientError: a parameter is no longer where it was put, so that its steps would be lost.
        """
        self._gather.start()
        if force_sync or not self.config.overlap_param_gather:
            self._gather.finish()

    def release(self) -> int:
        """Give the memory of all gradients back, as for a rollout, and return its bytes.

        ``main_grad`` is taken away until `restore`: it would read memory that is not there. Any other view does.

        Raises:
            GradientError: gradients are under way, or were never exchanged.
        """
        if self.sync.has_begun and not self.sync.is_finished:
            raise never_exchanged(self.plan, self.sync.arrivals)
        self._take_main_grads()
        return sum(buffer.release() for buffer in self.gradient_buffers)

    def restore(self) -> int:
        """Take the memory of gradients again, as zeros, begin a step, and return its bytes; views are valid again."""
        nbytes = sum(buffer.restore() for buffer in self.gradient_buffers)
        if nbytes:
            self._give_main_grads()
            self.zero_grad_buffer()
        return nbytes

    def unwrap(self) -> torch.nn.Module:
        """Return the module as one that was never wrapped, between two steps; this is of no more use then.

        Parameters that moved into buffers of shards stay there.

        Raises:
            GradientError: gradients were never exchanged, or stepped parameters not gathered.
        """
        if self.sync.has_begun and not self.sync.is_finished:
            raise never_exchanged(self.plan, self.sync.arrivals)
        self._gather.close()
        self._take_main_grads()
        while self._hooks:
            self._hooks.pop().remove()
        return self.module

    def main_grad(self, name: str) -> torch.Tensor:
        """Return a parameter's gradient in its buffer, by any of its names."""
        planned = self.plan[name]
        return self.gradient_buffers[planned.buffer].gradient(planned.name)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return the module's state, under the names that it has there.

        Raises:
            GradientError: parameters were stepped, and not gathered.
        """
        self._gather.demand()
        return self.module.state_dict(*arguments, **options)

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Load the module's state, under the names that it has there."""
        self._gather.finish()
        found = self.module.load_state_dict(*arguments, **options)
        self._tell_new_values()
        return found

    def __deepcopy__(self, memo: Any) -> Any:
        raise UsageError(
            "a wrapped module has buffers and process groups, of which there are no copies",
            got="copy.deepcopy of a DistributedDataParallel",
            want="of its module",
            next_step="copy .module, as for a moving average, and wrap the copy if its gradients are wanted",
        )

    def _tell_new_values(self) -> None:
        for listener in self.value_listeners:
            listener()

    def _give_main_grads(self) -> None:
        for name, parameter in self.planned_parameters.items():
            parameter.main_grad = self.main_grad(name)  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def _take_main_grads(self) -> None:
        for parameter in self.planned_parameters.values():
            if hasattr(parameter, "main_grad"):
                del parameter.main_grad

    def _note_kernels(self) -> None:
        """Count gradients that kernels added without autograd's knowing, so that no hook was called."""
        for index, parameter in enumerate(self.planned_parameters.values()):
            if getattr(parameter, "grad_added_to_main_grad", False) and not self.sync.arrivals[index]:
                self.sync.arrived(index, None, is_last=False)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # Weakly: torch keeps these hooks where the garbage collector sees no cycle, and a wrapper that nobody uses any
        # more would stay with its buffers and process groups.
        this = weakref.ref(self)

        def add(parameter: torch.Tensor) -> None:
            wrapper = this()
            if wrapper is not None:
                wrapper._take_gradient(index, parameter)

        return add

    @torch.no_grad()
    def _take_gradient(self, index: int, parameter: torch.Tensor) -> None:
        planned = self.plan.parameters[index]
        gradient, parameter.grad = parameter.grad, None
        self.gradient_buffers[planned.buffer].demand(planned.name)
        is_added = getattr(parameter, "grad_added_to_main_grad", False)
        if gradient is None or (is_added and not getattr(parameter, "zero_out_wgrad", False)):
            self.sync.arrived(index, None, is_last=self._is_last_microbatch)
            return
        axis = foreign_axis(gradient, parameter, planned)
        if axis is not None:
            self.sync.faults.append(foreign_fault(planned.name, axis, self.plan.rank))
        local = local_gradient(gradient, parameter, planned)
        self.sync.arrived(index, local, is_last=self._is_last_microbatch)
