"""The exchange of one step's gradients: each bucket leaves once, in the order of ids, as soon as it is full.

All ranks use the plan's order from the first batch on, whatever order their backwards take: a full bucket waits for
those before it. Nothing here raises while collectives are under way: see `BucketSync.faults`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from xrank.errors import GradientError
from xrank.gradients.buffer import GradientBuffer
from xrank.gradients.faults import At, GradientFault
from xrank.gradients.nonfinite import GradientWatch
from xrank.gradients.plan import GradientPlan, PlannedBucket, PlannedParameter
from xrank.gradients.roles import local_of
from xrank.gradients.wire import FaultFlag, GradientWire, Handle


class _WideSum:
    """A reduce-scatter that sends gradients in their own dtype and adds them up in float32.

    Each sum is rounded once. A collective's own sum of n gradients of 16 bits is rounded up to n - 1 times.
    """

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
        self._ranks = tuple(sorted(plan.views.main.ranks))
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
                        f"on rank {self.plan.rank} a kernel added its gradient to that of the last step",
                        "call zero_grad_buffer() without lazily: kernels that set grad_added_to_main_grad need zeros",
                    )
                )
        else:
            # Scale while adding: this saves a pass over the full bucket.
            if is_leaving and not self.arrivals[index]:
                self._is_scaled[index] = True
            self._add(index, gradient)
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
            raise self._make_repeat_error()
        self.start()
        if self.plan.config.unused == "error":
            rank = self.plan.rank
            self.faults += [
                At(planned.name, rank).fault(
                    f"no gradient came on rank {rank} in this step",
                    'use it in a micro-batch, freeze it before the plan is made, or set unused="zero"',
                )
                for planned, count in zip(self.plan.parameters, self.arrivals, strict=True)
                if not count
            ]
        # The flag travels behind the gradients: every rank runs all collectives, even a rank that has faults.
        flag = FaultFlag([*self.faults, *more], self._wire, self._ranks)
        # Before the waits and faults: a gradient that comes from now on belongs to the next step.
        self.is_finished = True
        self.faults = []
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        self._add_instances()
        flag.raise_if_any()

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        view, scale = self._views[index], self._prescales[index] if self._is_scaled[index] else 1
        if not self._is_stale[index]:
            view.add_(gradient, alpha=scale)
        elif view.dtype == gradient.dtype:
            torch.mul(gradient, scale, out=view)
        else:
            # Scaled in the buffer's dtype, which is wider than the gradient's: its product is rounded once.
            view.copy_(gradient).mul_(scale)
        self._is_stale[index] = False

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
            self._scale(bucket, whole)
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

    def _scale(self, bucket: PlannedBucket, whole: torch.Tensor) -> None:
        # Parameters whose gradients were scaled while they were added must not be scaled again.
        members = self._members[bucket.id]
        left = [index for index in members if not self._is_scaled[index]]
        if len(left) == len(members):
            whole.mul_(self.plan.buffers[bucket.buffer].prescale)
            return
        for index in left:
            self._views[index].mul_(self._prescales[index])

    def _add_instances(self) -> None:
        """Add up the shards of all instances of the distributed optimizer."""
        # Sums run inside each instance first; only then is a shard complete enough to sum over the instances.
        handles = []
        for bucket in self.plan.buckets:
            buffer = self._buffers[bucket.buffer]
            if len(buffer.planned.across_ranks) > 1:
                start, stop = self.plan.shard(bucket)
                shard = _real(buffer.data[start:stop])
                handles.append(self._wire.all_reduce(shard, buffer.planned.across_ranks, buffer.planned.operation))
        for handle in handles:
            handle.wait()

    def _note_late(self, index: int) -> None:
        """Record a fault for a gradient that came too late. It is not added: its bucket may be under way."""
        if index in self._late:
            return
        self._late.add(index)
        planned, rank = self.plan.parameters[index], self.plan.rank
        if self.is_finished:
            fault = At(planned.name, rank).fault(
                f"a gradient came on rank {rank} after the step's gradients were exchanged",
                "call zero_grad_buffer() before the first backward of every step",
            )
        else:
            fault = At(planned.name, rank).fault(
                f"a gradient came on rank {rank} after its bucket {planned.bucket} had left",
                "run all but the last micro-batch inside no_sync(), or set overlap_grad_reduce=False",
                f"gradient {self.arrivals[index] + 1} of the step, when {self.next_bucket} of {len(self._members)} "
                "buckets had left",
                "one backward outside of no_sync() in a step, the last, which comes to each parameter once",
            )
        self.faults.append(fault)

    def _make_repeat_error(self) -> GradientError:
        late = min(self._late, default=None)
        name = self.plan.parameters[late or 0].name if self.plan.parameters else None
        why = ", and a backward came after that" if late is not None else ""
        return At(name, self.plan.rank).error(
            f"gradients of this step were exchanged already{why}",
            "call zero_grad_buffer() at the start of every step, and finish_grad_sync() once",
        )


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
        hooks = weakref.ref(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(_take_gradient, hooks, index))  # type: ignore[no-untyped-call]
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
        differing = _find_differing(gradient, parameter)
        foreign = [axis for dim in differing for axis in planned.placement_axes[dim] if axis in planned.axes]
        if foreign:
            rank, axis = self._plan.rank, foreign[0]
            # torch has scaled the gradient by its own rules, not by the plan's.
            fault = At(planned.name, rank).fault(
                f"on rank {rank} torch keeps its gradient as parts along {axis}, and would add it up by itself",
                f"leave {axis} out of the mesh of the activations: gradients along it are added up here",
                f"activations that are DTensors along {axis}",
            )
            self._sync.faults.append(fault)
        local = _take_local(gradient, parameter, planned, differing)
        self._sync.add_gradient(index, local, is_last=self.is_last_microbatch)


def _take_gradient(hooks: weakref.ref[GradientHooks], index: int, parameter: torch.Tensor) -> None:
    found = hooks()
    if found is not None:
        found.take_gradient(index, parameter)


def _find_differing(gradient: Any, parameter: Any) -> list[int]:
    """Return the dims of the mesh along which placements of a gradient and its parameter differ."""
    if not hasattr(gradient, "placements") or not hasattr(parameter, "placements"):
        return []
    pairs = zip(gradient.placements, parameter.placements, gradient.device_mesh.shape, strict=True)
    return [dim for dim, (own, its, length) in enumerate(pairs) if own != its and length > 1]


def _take_local(gradient: Any, parameter: Any, planned: PlannedParameter, differing: Sequence[int]) -> torch.Tensor:
    """Return a gradient as a strided tensor with the placements of its parameter's local tensor.

    Partial sums stay partial along axes that finalize reduces later. Along other axes torch adds them up here.
    """
    later = {axis for one in planned.later for axis in one.axes}
    wanted = list(getattr(gradient, "placements", ()))
    for dim in differing:
        if not later.issuperset(planned.placement_axes[dim]):
            wanted[dim] = parameter.placements[dim]
    if wanted and wanted != list(gradient.placements):
        # A collective along the differing axes: all ranks along them come here, in the order of their backwards.
        gradient = gradient.redistribute(gradient.device_mesh, wanted)
    local: torch.Tensor = local_of(gradient)
    return local if local.layout is torch.strided else local.to_dense()
