"""Gradients in contiguous memory, and their exchange: each bucket leaves once, in the order of ids, when it is full.

All ranks use the plan's order from the first batch on, whatever order their backwards take: a full bucket waits for
those before it. Nothing here raises while collectives are under way: see `BucketSync.faults`.

After a step of shards the next forward needs whole parameters (`ParameterGather`). All buckets are sent at once, in the
order in which a forward needs them, the last id first. Each module waits for its own parameters, and none runs with
those of the last step.

NaN and infinity are found on the rank that made them, before they are added to other ranks' gradients. The norm of a
bucket shows if any element is not finite; only then are its parameters checked. The norms of single gradients show
which micro-batch caused it; they stay on the gradients' device until a fault needs them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack
from torch.utils.hooks import RemovableHandle

from xrank.errors import GradientError
from xrank.gradients.faults import At, GradientFault, dump_faults, join_faults
from xrank.gradients.plan import GradientPlan, PlannedBucket, PlannedBuffer, PlannedParameter
from xrank.gradients.roles import local_of
from xrank.gradients.wire import GradientWire, Handle
from xrank.words import list_text


class GradientBuffer:
    """The memory of one `PlannedBuffer`: gradients, and with the distributed optimizer also the parameters.

    Views live as long as the buffer: `release` and `restore` free and allocate the memory below them.
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
            "its shards may have been updated by the optimizer since finish_grad_sync, but were not gathered",
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
        """Record the norm of one micro-batch's gradient, without a wait for the device; None if a kernel added it."""
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
        """Check a bucket before it leaves, and return its fault; `arrivals` counts the gradients of each parameter."""
        # This waits for the device once per bucket; the norms of single gradients are read only for a fault.
        norm = float(_norm(self._buffers[bucket.buffer].bucket(bucket)))
        # One subtraction covers both: inf - inf and NaN - NaN are NaN.
        if norm - norm == 0:  # finite
            largest = self._largest[bucket.id]
            if self._plan.config.check_for_large_grads and self._num_samples[bucket.id] < _NUM_SAMPLES:
                self._num_samples[bucket.id] += 1
                self._largest[bucket.id] = max(largest, norm)
            elif self._plan.config.check_for_large_grads and norm >= _LARGE * largest:
                _logger.warning(
                    "rank %d: the gradients of bucket %d (%s ...) have a norm of %.3g, %.0f times the largest of the "
                    "first %d steps",
                    self._plan.rank,
                    bucket.id,
                    bucket.names[0],
                    norm,
                    norm / largest if largest else float("inf"),
                    _NUM_SAMPLES,
                )
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
        return f"from the sum of {count} micro-batches, although each of them is finite"


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm. It is computed in float32 for float16, which may not hold the norm of finite elements."""
    norm: torch.Tensor
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float32 if tensor.dtype == torch.float16 else None)
    return norm


class _WideSum:
    """A reduce-scatter that adds up gradients of 16 bits in float32, and so rounds each sum once, not n - 1 times."""

    def __init__(self, shard: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...], wire: GradientWire) -> None:
        received = torch.empty_like(whole)
        self._shard, self._parts = shard, received.view(len(ranks), -1)
        self._handle = wire.all_to_all(received, whole, ranks)

    def wait(self) -> None:
        self._handle.wait()
        self._shard.copy_(self._parts.sum(0, dtype=torch.promote_types(self._shard.dtype, torch.float32)))


class BucketSync:
    """The exchange of gradients of one rank, one step after another.

    Call order in a step: `add_gradient` for each gradient, `start` any number of times, `finish` once, then `reset`.
    """

    def __init__(self, plan: GradientPlan, buffers: Sequence[GradientBuffer], wire: GradientWire) -> None:
        self.plan = plan
        self.faults: list[GradientFault] = []
        """Faults of this step so far; `finish` raises them on all ranks."""
        is_watched = plan.config.check_for_nan_in_grad or plan.config.check_for_large_grads
        self.watch = GradientWatch(plan, buffers) if is_watched else None
        self._buffers, self._wire = buffers, wire
        index_of = {parameter.name: index for index, parameter in enumerate(plan.parameters)}
        self._members = [[index_of[name] for name in bucket.names] for bucket in plan.buckets]
        self._prescales = [plan.buffers[parameter.buffer].prescale for parameter in plan.parameters]
        self._views = [buffers[one.buffer].gradient(one.name) for one in plan.parameters]
        self._handles: list[Handle] = []
        self.reset()

    def reset(self, *, lazily: bool = False) -> None:
        """Begin a step."""
        num_parameters = len(self.plan.parameters)
        self.arrivals = [0] * num_parameters
        """Number of gradients of each parameter in this step, in the order of the plan: one for each micro-batch that
        used it."""
        self.next_bucket = 0
        """Id of the bucket that leaves next; all buckets before it have left."""
        self.is_finished = False
        self._is_last = [False] * num_parameters
        self._is_scaled = [False] * num_parameters
        self._is_stale = [lazily] * num_parameters
        self._missing = [len(members) for members in self._members]
        self._late: set[int] = set()

    @property
    def has_begun(self) -> bool:
        """Whether any gradient arrived, or any bucket left, in this step."""
        return bool(self.next_bucket) or any(self.arrivals)

    def add_gradient(self, index: int, gradient: torch.Tensor | None, *, is_last: bool) -> None:
        """Add a gradient to its buffer, and send full buckets whose turn has come."""
        planned = self.plan.parameters[index]
        if self.is_finished or planned.bucket < self.next_bucket:
            self._note_late(index)
            return
        # Before the sum: this is only the gradient of this micro-batch.
        if self.watch is not None:
            self.watch.record(index, gradient, self.arrivals[index])
        is_leaving = is_last and self.plan.config.overlap_grad_reduce
        if gradient is None:
            if self._is_stale[index]:
                self.faults.append(
                    At(planned.name, self.plan.rank).fault(
                        f"on rank {self.plan.rank} a kernel added its gradient on top of the last step's",
                        "call zero_grad_buffer() without lazily: kernels that set grad_added_to_main_grad need zeros",
                    )
                )
        else:
            # Scale while adding: this saves a pass over the full bucket.
            if is_leaving and not self.arrivals[index]:
                self._is_scaled[index] = True
            view, scale = self._views[index], self._prescales[index] if self._is_scaled[index] else 1
            if not self._is_stale[index]:
                view.add_(gradient, alpha=scale)
            elif view.dtype == gradient.dtype:
                torch.mul(gradient, scale, out=view)
            else:
                # Scaled in the buffer's dtype, which is wider than the gradient's: its product is rounded once.
                view.copy_(gradient).mul_(scale)
            self._is_stale[index] = False
        self.arrivals[index] += 1
        # A second gradient outside of no_sync must not count towards the full bucket again.
        if not is_leaving or self._is_last[index]:
            return
        self._is_last[index] = True
        self._missing[planned.bucket] -= 1
        # A bucket that is full early waits: collectives of one group must run in one order on all ranks.
        while self.next_bucket < len(self._missing) and not self._missing[self.next_bucket]:
            self._send_next()

    def start(self) -> None:
        """Send every remaining bucket, full or not."""
        for buffer in self._buffers:
            buffer.demand()
        while self.next_bucket < len(self._members):
            self._send_next()

    def finish(self, more: Sequence[GradientFault] = ()) -> None:
        """Send all remaining buckets, wait for all, and raise the faults of any rank on all ranks."""
        if self.is_finished:
            late = min(self._late, default=None)
            name = self.plan.parameters[late or 0].name if self.plan.parameters else None
            raise At(name, self.plan.rank).error(
                "gradients of this step were exchanged already"
                + (", and a backward came after that" if late is not None else ""),
                "call zero_grad_buffer() at the start of every step, and finish_grad_sync() once",
            )
        self.start()
        if self.plan.config.unused == "error":
            rank = self.plan.rank
            self.faults += [
                At(planned.name, rank).fault(
                    f"rank {rank} computed no gradient in this step",
                    'use it in a micro-batch, freeze it before the plan is made, or set unused="zero"',
                )
                for planned, count in zip(self.plan.parameters, self.arrivals, strict=True)
                if not count
            ]
        # The flag travels behind the gradients: every rank runs all collectives, even one with faults. Ranks send the
        # texts of faults only after a flag was raised.
        faults, ranks = [*self.faults, *more], self.plan.all_ranks
        flag = torch.tensor([len(faults)], dtype=torch.int64, device=self._wire.device)
        flagged = self._wire.all_reduce(flag, ranks, "max")
        # Before the waits and faults: a gradient that comes from now on belongs to the next step.
        self.is_finished = True
        self.faults = []
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        # Sums run inside each instance of the distributed optimizer first; only then is a shard complete enough to sum
        # over the instances.
        handles = []
        for bucket in self.plan.buckets:
            buffer = self._buffers[bucket.buffer]
            if len(buffer.planned.across_ranks) > 1:
                start, stop = self.plan.shard(bucket)
                shard = _real(buffer.data[start:stop])
                handles.append(self._wire.all_reduce(shard, buffer.planned.across_ranks, buffer.planned.operation))
        for handle in handles:
            handle.wait()
        # The host reads the flag next: on an accelerator, too, it has to wait, or name a rank that has ended.
        getattr(flagged, "finish", flagged.wait)()
        if int(flag):
            # In the order of ranks, so that all ranks raise the same fault first.
            raise join_faults(text for _, text in sorted(self._wire.exchange(dump_faults(faults), ranks).items()))

    def _send_next(self) -> None:
        """Scale the next bucket, inspect it, and send it."""
        bucket = self.plan.buckets[self.next_bucket]
        self.next_bucket += 1
        buffer = self._buffers[bucket.buffer]
        planned, whole = buffer.planned, buffer.bucket(bucket)
        for index in self._members[bucket.id]:
            # No gradient came, so its place still has the last step's.
            if self._is_stale[index]:
                self._views[index].zero_()
        if planned.prescale != 1.0:
            # Parameters whose gradients were scaled while they were added must not be scaled again.
            members = self._members[bucket.id]
            left = [index for index in members if not self._is_scaled[index]]
            if len(left) == len(members):
                whole.mul_(planned.prescale)
            else:
                for index in left:
                    self._views[index].mul_(self._prescales[index])
        fault = None if self.watch is None else self.watch.inspect(bucket, self.arrivals)
        if fault is not None:
            self.faults.append(fault)
        if self.plan.config.use_distributed_optimizer:
            start, stop = self.plan.shard(bucket)
            shard = _real(buffer.data[start:stop])
            handle: Handle
            if self.plan.config.reduce_scatter_with_fp32_accumulation and len(planned.shard_ranks) > 1:
                handle = _WideSum(shard, _real(whole), planned.shard_ranks, self._wire)
            else:
                handle = self._wire.reduce_scatter(shard, _real(whole), planned.shard_ranks, planned.operation)
        else:
            handle = self._wire.all_reduce(_real(whole), planned.ranks, planned.operation)
        self._handles.append(handle)

    def _note_late(self, index: int) -> None:
        """Record a fault for a gradient that came too late. It is not added: its bucket may be under way."""
        if index in self._late:
            return
        self._late.add(index)
        planned, rank = self.plan.parameters[index], self.plan.rank
        if self.is_finished:
            fault = At(planned.name, rank).fault(
                f"rank {rank} computed a gradient after the step's gradients were exchanged",
                "call zero_grad_buffer() before the first backward of every step",
            )
        else:
            fault = At(planned.name, rank).fault(
                f"rank {rank} computed a gradient after its bucket {planned.bucket} was sent",
                "run all but the last micro-batch inside no_sync(), or set overlap_grad_reduce=False",
                f"gradient {self.arrivals[index] + 1} of the step, when {self.next_bucket} of {len(self._members)} "
                f"buckets were sent",
                "only the last backward of a step outside of no_sync(), with one gradient for each parameter",
            )
        self.faults.append(fault)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real numbers: some collectives reject complex dtypes."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


class GradientHooks:
    """Hooks that add each gradient of autograd to its buffer, and ``main_grad``, where kernels and readers find it."""

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
        # A weak reference: torch keeps these hooks where the garbage collector sees no cycle, so an unused wrapper
        # would stay alive with its buffers and process groups.
        reference = weakref.ref(self)

        def take_gradient(index: int, parameter: torch.Tensor) -> None:
            if (hooks := reference()) is not None:
                hooks.take_gradient(index, parameter)

        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(take_gradient, index))  # type: ignore[no-untyped-call]
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

    @torch.no_grad()
    def take_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Move a parameter's ``.grad`` into its buffer."""
        planned = self._plan.parameters[index]
        # Free .grad at once: torch would add the next micro-batch to it.
        gradient, parameter.grad = parameter.grad, None
        self._buffers[planned.buffer].demand(planned.name)
        is_added = getattr(parameter, "grad_added_to_main_grad", False)
        if gradient is None or (is_added and not getattr(parameter, "zero_out_wgrad", False)):
            self._sync.add_gradient(index, None, is_last=self.is_last_microbatch)
            return
        given, own = (list(getattr(one, "placements", ())) for one in (gradient, parameter))
        differing = []
        if given and own:
            # The dims of the mesh along which placements of the gradient and its parameter differ.
            pairs = zip(given, own, gradient.device_mesh.shape, strict=True)  # type: ignore[attr-defined]
            differing = [dim for dim, (one, other, length) in enumerate(pairs) if one != other and length > 1]
        foreign = [axis for dim in differing for axis in planned.placement_axes[dim] if axis in planned.axes]
        if foreign:
            rank, axis = self._plan.rank, foreign[0]
            # torch has scaled the gradient by its own rules, not by the plan's.
            self._sync.faults.append(
                At(planned.name, rank).fault(
                    f"on rank {rank} torch keeps its gradient as parts along {axis}, and would sum it itself",
                    f"leave {axis} out of the mesh of the activations: gradients along it are summed here",
                    f"activations that are DTensors along {axis}",
                )
            )
        # Partial sums stay partial along axes that finalize reduces later. Along other axes torch adds them up here.
        later = {axis for one in planned.later for axis in one.axes}
        wanted = list(given)
        for dim in differing:
            if not later.issuperset(planned.placement_axes[dim]):
                wanted[dim] = own[dim]
        if wanted != given:
            # A collective along the differing axes: all ranks along them come here, in the order of their backwards.
            gradient = gradient.redistribute(gradient.device_mesh, wanted)  # type: ignore[attr-defined]
        local: torch.Tensor = local_of(gradient)
        local = local if local.layout is torch.strided else local.to_dense()
        self._sync.add_gradient(index, local, is_last=self.is_last_microbatch)
