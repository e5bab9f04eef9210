"""A module whose replicas add up their gradients in contiguous buffers, by its `GradientPlan`.

One step, on all ranks alike::

    ddp.zero_grad_buffer()
    with ddp.no_sync():
        for batch in all_but_the_last:
            loss(ddp(batch)).backward()
    loss(ddp(last)).backward()  # buckets leave while it runs
    ddp.finish_grad_sync()      # or finalize_model_grads([ddp]), which also makes the later reductions
    ...                         # step the parameters with their main_grad
    ddp.start_param_sync()      # with the distributed optimizer: each rank stepped only its shards

Before any gradient travels, ranks check once that they all lay out the same gradients: they compare digests of lines of
text, and after a difference the lines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from xxhash import xxh128_hexdigest

from xrank.errors import GradientError, UsageError
from xrank.gradients.buckets import BucketSync, GradientBuffer, GradientHooks, ParameterGather
from xrank.gradients.config import GradientConfig
from xrank.gradients.faults import At, GradientFault
from xrank.gradients.optimizers import watch_optimizers
from xrank.gradients.plan import GradientPlan, Modules, PlannedBuffer, iter_parameters, list_later
from xrank.gradients.roles import MeshPlace, local_of, role_of
from xrank.gradients.wire import GradientWire, make_wire


def connect_ranks(plan: GradientPlan, wire: GradientWire | None) -> GradientWire:
    """Return the wire of a plan's ranks, torch's if None, after a check that the plans of all ranks fit together.

    All ranks of the world call this together, as `make_wire`, and raise the same errors.
    """
    everyone = plan.all_ranks
    if wire is None:
        wire = make_wire(plan.groups())
        grids = " and ".join(mesh.grid for mesh in (plan.views.main, *(mesh for _, mesh in plan.views.others)))
        texts = wire.exchange(json.dumps([plan.rank, grids]), everyone)
        places = {rank: json.loads(text) for rank, text in sorted(texts.items())}
        first = min(places)  # all ranks compare with the lowest one, so that all name the same pair
        for rank, (planned_rank, found) in places.items():
            if planned_rank != rank:
                raise At(rank=rank).error(
                    f"rank {rank} has the plan of rank {planned_rank}, which owns different elements",
                    "let every rank make its own plan, GradientPlan.from_module without rank=",
                )
            if found != places[first][1]:
                raise At(rank=rank).error(
                    f"ranks {first} and {rank} have different meshes",
                    "make the same mesh on all ranks",
                    f"on rank {rank}: {found}",
                    f"as on rank {first}: {places[first][1]}",
                )
    lines = agreement_lines(plan)
    mine = {}
    for ranks, found in lines.items():
        # The order in which buckets leave among these ranks. Ids would also count buckets of other sets.
        buffers = [buffer.id for buffer in plan.buffers if buffer.ranks == ranks]
        order = " ".join(
            f"{buffers.index(bucket.buffer)}.{plan.buffers[bucket.buffer].buckets.index(bucket.id)}"
            for bucket in plan.buckets
            if bucket.buffer in buffers
        )
        mine[" ".join(map(str, ranks))] = [*found, f"buckets are sent in the order {order} (buffer.bucket)"]
    digests = {key: xxh128_hexdigest("\n".join(found).encode()) for key, found in mine.items()}
    received = {rank: json.loads(text) for rank, text in wire.exchange(json.dumps(digests), everyone).items()}
    for key in sorted({key for digests in received.values() for key in digests}):
        among = [int(rank) for rank in key.split()]
        if len({received[rank].get(key) for rank in among}) == 1:
            continue
        # Lines are long: ranks send them only to name a difference.
        texts = wire.exchange(json.dumps(mine.get(key, [])), everyone)
        check_lines({rank: json.loads(texts[rank]) for rank in among})
        raise At().error(
            f"ranks {among} do not lay out the same gradients", "give all ranks the same module, plan and config"
        )
    return wire


def buffer_lines(plan: GradientPlan, buffer: PlannedBuffer) -> list[str]:
    """Return the lines that must be equal on all replicas of a buffer, parameters first: a difference names one."""
    names = [name for bucket_id in buffer.buckets for name in plan.buckets[bucket_id].names]
    how = f"{buffer.operation}, divided by {buffer.divisor}, among ranks {list(buffer.ranks)}"
    lines = [f"{name} of shape {plan[name].shape}" for name in names]
    lines.append(f"a buffer of {buffer.numel} elements of {buffer.grad_dtype} for {buffer.dtype}: {how}")
    for bucket_id in buffer.buckets:
        bucket = plan.buckets[bucket_id]
        lines.append(f"a bucket of elements {bucket.start} to {bucket.stop}, {bucket.numel_unpadded} of them used")
        lines += (f"{name} at element {plan[name].offset}" for name in bucket.names)
    return lines


def agreement_lines(plan: GradientPlan) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Return the lines that must be equal among each set of ranks that this rank exchanges gradients with.

    They omit the name of a table, because each stage has its own.
    """
    lines: dict[tuple[int, ...], list[str]] = {}
    for buffer in plan.buffers:
        # A buffer on one rank is not exchanged, so nothing has to agree.
        if len(buffer.ranks) > 1:
            lines.setdefault(buffer.ranks, [str(plan.config)]).extend(buffer_lines(plan, buffer))
    for parameter, later in list_later(plan.parameters):
        # Ranks along tp, or the stages that share a table, exchange equal parts.
        name = parameter.name if later.kind == "tensor" else f"a {later.kind} parameter"
        start, stop = parameter.owned
        elements = f"elements {start} to {stop} of shape {parameter.shape} in {parameter.grad_dtype}"
        lines.setdefault(later.ranks, []).append(f"{name}, {later.operation} over {later.axes}: {elements}")
    return {ranks: tuple(found) for ranks, found in lines.items()}


def check_lines(lines: Mapping[int, Sequence[str]]) -> None:
    """Compare the lines of one set of ranks, by rank; raise the first difference between two."""
    first, *others = sorted(lines)
    for other in others:
        for mine, theirs in zip_longest(lines[first], lines[other], fillvalue="nothing more"):
            if mine != theirs:
                raise At(rank=other).error(
                    f"ranks {first} and {other} do not lay out the same gradients",
                    "make the same module with the same marks and GradientConfig on all of them",
                    f"on rank {other}: {theirs}",
                    f"as on rank {first}: {mine}",
                )


_CHUNK = 1 << 20
"""Elements that are summed at once, to bound memory."""
_PRIME = 2_147_483_647


def _match_parameters(module: Modules, plan: GradientPlan) -> dict[str, torch.nn.Parameter]:
    """Return the module's parameters by their names in the plan, in its order; or raise where they differ."""
    for part in [module] if isinstance(module, torch.nn.Module) else module:
        for name, inner in part.named_modules():
            if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
                raise At(name or "the module", plan.rank).usage_error(
                    "torch's DistributedDataParallel wraps it, and both would reduce gradients",
                    "make the plan and the wrapper from its .module",
                )
    found = dict(iter_parameters(module))
    matched = {}
    for planned in plan.parameters:
        parameter, at = found.get(planned.name), At(planned.name, plan.rank)
        local = None if parameter is None else local_of(parameter)
        got = "none" if local is None else f"{tuple(local.shape)} in {local.dtype}"
        want = f"{planned.shape} in {planned.dtype}"
        if parameter is None or local is None or got != want:
            raise at.usage_error("it differs from the plan", _PLAN_AGAIN, got, want)
        if not parameter.requires_grad:
            raise at.usage_error("it is frozen, but the plan expects its gradient", _PLAN_AGAIN)
        if hasattr(parameter, "main_grad"):
            raise at.usage_error(
                "it has a main_grad already: two hooks would take the gradient from each other",
                "call unwrap() of the DistributedDataParallel that it has",
            )
        if parameter.grad is not None:
            raise at.usage_error(
                "it has a gradient already, which would be added to the next",
                "set .grad to None before the module is wrapped",
            )
        matched[planned.name] = parameter
    for name, parameter in found.items():
        if parameter.requires_grad and name not in plan:
            raise At(name, plan.rank).usage_error("it needs a gradient, and is not in the plan", _PLAN_AGAIN)
    return matched


_PLAN_AGAIN = "make the plan from the wrapped module in its current state"


@torch.no_grad()
def _compare_first_values(
    parameters: Mapping[str, torch.nn.Parameter], plan: GradientPlan, wire: GradientWire
) -> list[GradientFault]:
    """Return a fault for each parameter whose values differ between replicas; all ranks call this together."""
    faults = []
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for planned in plan.parameters:
        if len(planned.ranks) > 1:
            by_ranks.setdefault(planned.ranks, []).append(planned.name)
    for ranks, names in by_ranks.items():
        own = torch.tensor([_digest(local_of(parameters[name])) for name in names], dtype=torch.int64)
        bounds = torch.cat([own, ~own]).to(wire.device)  # the maximum of ~x is ~ of the minimum of x
        wire.all_reduce(bounds, ranks, "max").wait()
        for name, high, low in zip(names, bounds[: len(names)].tolist(), (~bounds[len(names) :]).tolist(), strict=True):
            if high != low:
                faults.append(
                    At(name, plan.rank).fault(
                        f"replicas on ranks {list(ranks)} have different values before the first step",
                        "call broadcast_params() on all ranks after the module is wrapped",
                        f"digests {low} to {high}",
                    )
                )
    return faults


def _digest(tensor: torch.Tensor) -> int:
    """Return a sum of the tensor's bytes, each with a weight of its place."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_meta:
        return 0
    flat = flat.view(torch.uint8) if flat.element_size() % 4 else flat.view(torch.int32)
    found = 0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + part.numel(), device=part.device) % 65_521 + 1
        found = (found * 31 + int((part % 65_537 * weights).sum())) % _PRIME
    return found


class DistributedDataParallel(torch.nn.Module):
    """A module with gradient buffers. Docstrings name the methods that all ranks call together.

    Each parameter gets ``main_grad``, a view of its place in a buffer, where gradients are accumulated; ``.grad`` is
    None after every backward. A kernel that adds to ``main_grad`` itself sets ``grad_added_to_main_grad = True``.

    So torch's optimizers and `clip_grad_norm_` find no gradients on the module's parameters. Give them the parameters
    of `ParameterShards`, with or without the distributed optimizer. Ranks of the world outside of the mesh call
    ``xrank.gradients.wire.make_wire(())`` while the others construct this.

    Args:
        module: this rank's module, or its chunks of a module, as in the plan.
        plan: `GradientPlan.from_module` of the module; all ranks of the mesh make theirs and construct this together.
        config: the plan's config; may be omitted.
        wire: replacement of torch's process groups.

    Raises:
        UsageError: the module differs from the plan, a parameter already has a gradient, or there is no process group.
        GradientError: the layouts of ranks differ; raised on all ranks.

    Example:
        >>> from xrank.gradients import DistributedDataParallel, GradientPlan
        >>> from xrank.layout import DeviceMesh
        >>> module = torch.nn.Linear(2, 1)  # in a process group of one rank
        >>> ddp = DistributedDataParallel(module, GradientPlan.from_module(module, DeviceMesh((1,), ("dp",))))
        >>> ddp(torch.ones(1, 2)).sum().backward()
        >>> ddp.main_grad("weight").tolist()
        [[1.0, 1.0]]
    """

    def __init__(
        self,
        module: Modules,
        plan: GradientPlan,
        config: GradientConfig | None = None,
        *,
        wire: GradientWire | None = None,
    ) -> None:
        super().__init__()
        if config is not None and config != plan.config:
            raise UsageError(
                "the config is not that of the plan",
                got=repr(config),
                want=repr(plan.config),
                next_step="give the config to GradientPlan.from_module, and omit it here",
            )
        parameters = _match_parameters(module, plan)
        self.module = module if isinstance(module, torch.nn.Module) else torch.nn.ModuleList(module)
        self.plan = plan
        self.config = plan.config
        # Before buffers and hooks: if plans differ, all ranks raise and the module is as it was.
        self.wire = connect_ranks(plan, wire)
        self.planned_parameters: Mapping[str, torch.nn.Parameter] = parameters
        """Parameters by name, in the order of the plan."""
        self.gradient_buffers = tuple(
            GradientBuffer(plan, buffer, {one.name: parameters[one.name] for one in plan.parameters if one.buffer == i})
            for i, buffer in enumerate(plan.buffers)
        )
        """A buffer for each of the plan's buffers."""
        self.sync = BucketSync(plan, self.gradient_buffers, self.wire)
        self.later_is_due = False
        """Whether replicas are added up but later reductions are not made yet: gradients must not be used."""
        self.value_listeners: list[Callable[[], None]] = []
        """Called when parameters get new values here, not by a step: holders of copies refresh them."""
        self._is_first_step = True
        self._known = {id(parameter) for parameter in parameters.values()}
        self._hooks = GradientHooks(plan, parameters, self.gradient_buffers, self.sync)
        watch_optimizers()
        self._gather = ParameterGather(plan, self.gradient_buffers, self.wire, self.module, parameters)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Run the module."""
        return self.module(*arguments, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients inside: for all micro-batches of a step but the last."""
        before = self._hooks.is_last_microbatch
        self._hooks.is_last_microbatch = False
        try:
            yield
        finally:
            self._hooks.is_last_microbatch = before

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of this object, or else of the module, such as ``generate``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def start_grad_sync(self) -> None:
        """Send all remaining buckets, without waiting: for schedules that know when a backward has ended."""
        if not self.sync.is_finished:
            self._hooks.note_kernels()
            self.sync.start()

    def finish_grad_sync(self) -> None:
        """Wait until gradients are summed over all replicas; once per step, on all ranks of the mesh.

        If the plan has later reductions, as along tp, call `finalize_model_grads` instead. With the distributed
        optimizer only the elements in ``owned`` are right after it.

        Raises:
            GradientError: on all ranks, naming the parameter: a gradient was computed after its bucket was sent, or is
                missing with ``unused="error"``; its parameter is not in the plan, or was frozen since; or, in the first
                step,
            replicas have different values. Or this is the second call of the step.
        """
        rank = self.plan.rank
        faults = [
            At(name, rank).fault(
                f"it needs a gradient on rank {rank}, and was frozen or absent when the plan was made",
                "call unwrap(), then make the plan and the DistributedDataParallel again",
            )
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and id(parameter) not in self._known
        ]
        faults += [
            At(name, rank).fault(
                f"it was frozen on rank {rank} after the plan was made, and optimizers still step it",
                "call unwrap(), freeze it, then make plan, DistributedDataParallel and optimizer again",
            )
            for name, parameter in self.planned_parameters.items()
            if not parameter.requires_grad
        ]
        if not self.sync.is_finished:
            self._hooks.note_kernels()
        self._exchange(faults)
        self._gather.expect()
        self.later_is_due = any(planned.later for planned in self.plan.parameters)

    def zero_grad_buffer(self, *, discard: bool = False, lazily: bool = False) -> None:
        """Begin a step: all gradients are zeros.

        Args:
            lazily: skip zeroing the buffers: the first gradient of a parameter replaces the old one, and parameters
                without a gradient are zeroed at the exchange. Until then nothing else may read or write ``main_grad``;
                `finish_grad_sync` reports kernels that added to it.
            discard: drop gradients that were never exchanged; on all ranks of the mesh.

        Raises:
            GradientError: gradients since the last call were never exchanged, or not along all axes: if the optimizer
                has used them, replicas now differ.
        """
        if self.later_is_due and not discard:
            planned = next(planned for planned in self.plan.parameters if planned.later)
            later = planned.later[0]
            axes = " and ".join(later.axes)
            raise At(planned.name, self.plan.rank).error(
                f"its gradients of this step were added up over replicas, and not along {axes}",
                "call finalize_model_grads, not finish_grad_sync, or zero_grad_buffer(discard=True) on all ranks",
                want=f"and a {later.operation} over ranks {list(later.ranks)}: {later.reason}",
            )
        self.later_is_due = False
        if discard and not self.sync.is_finished:
            # Buckets of other ranks may be under way even if this rank has sent none, so it takes part in the exchange.
            # A rank that finishes the step instead receives this fault; the others suppress it with all other faults.
            rank = self.plan.rank
            text = f"rank {rank} dropped this step by zero_grad_buffer(discard=True), and other ranks exchange it"
            self.sync.faults.append(At(rank=rank).fault(text, "skip the step on all ranks, or on none"))
            with suppress(GradientError):
                self._exchange([])
        else:
            self._check_exchanged()
        self._gather.catch_up()
        for buffer in self.gradient_buffers:
            buffer.demand()
            if not lazily:
                buffer.data.zero_()
        self._hooks.forget_kernels()
        self.sync.reset(lazily=lazily)

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients by a number."""
        for buffer in self.gradient_buffers:
            buffer.demand()
            buffer.data.mul_(factor)

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Send the values of the first rank to all replicas of each parameter, frozen ones too; on all ranks."""
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
        self._notify_listeners()

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        """Gather the parameters after all ranks have updated their shards; on all ranks. Without shards, do nothing.

        With ``overlap_param_gather`` this returns at once, and each module waits for its own parameters before it runs.
        A module that uses parameters of another module does not wait for those: it needs ``force_sync``.

        Args:
            force_sync: wait for all parameters here, as needed before other code reads parameters.

        Raises:
            GradientError: a parameter is no longer in its buffer, so its updates would be lost.
        """
        self._gather.start()
        if force_sync or not self.config.overlap_param_gather:
            self._gather.finish()

    def release(self) -> int:
        """Free the memory of all gradients, as for a rollout, and return its bytes.

        This deletes ``main_grad`` until `restore`: it would read freed memory. Any other view does.

        Raises:
            GradientError: gradients are being exchanged, or were never exchanged.
        """
        self._check_exchanged()
        self._hooks.take_views()
        return sum(buffer.release() for buffer in self.gradient_buffers)

    def restore(self) -> int:
        """Allocate the memory of gradients as zeros, begin a step, and return its bytes. Views are valid again."""
        nbytes = sum(buffer.restore() for buffer in self.gradient_buffers)
        if nbytes:
            self._hooks.give_views()
            self.zero_grad_buffer()
        return nbytes

    def unwrap(self) -> torch.nn.Module:
        """Return the module as before wrapping, between two steps; do not use this object afterwards.

        Parameters that moved into buffers of shards stay there. Compiled graphs are dropped (``torch.compiler.reset``).

        Raises:
            GradientError: gradients were never exchanged, or updated parameters were not gathered.
        """
        self._check_exchanged()
        self._gather.close()
        self._hooks.remove()
        # torch 2.10 would run this wrapper's graphs for the next wrapper, whose parameters may be frozen otherwise.
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        return self.module

    def main_grad(self, name: str) -> torch.Tensor:
        """Return a parameter's gradient in its buffer, by any of its names."""
        planned = self.plan[name]
        return self.gradient_buffers[planned.buffer].gradient(planned.name)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return the module's state, under the module's own names.

        Raises:
            GradientError: stepped parameters were not gathered.
        """
        self._gather.demand()
        return self.module.state_dict(*arguments, **options)

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Load the module's state, under the module's own names."""
        self._gather.finish()
        # Buckets under way have landed: they would overwrite loaded values.
        found = self.module.load_state_dict(*arguments, **options)
        self._notify_listeners()
        return found

    def __deepcopy__(self, memo: Any) -> Any:
        raise At().usage_error(
            "a DistributedDataParallel has buffers and process groups, which cannot be copied",
            "copy .module, as for a moving average, and wrap the copy if its gradients are wanted",
        )

    def _exchange(self, faults: list[GradientFault]) -> None:
        """Finish the exchange; in the first step, compare the values of replicas too."""
        if self._is_first_step and not self.sync.is_finished:
            self.sync.start()
            faults = faults + _compare_first_values(self.planned_parameters, self.plan, self.wire)
        self.sync.finish(faults)
        self._is_first_step = False  # after a fault of any rank all of them compare again

    def _check_exchanged(self) -> None:
        if self.sync.has_begun and not self.sync.is_finished:
            found = zip(self.plan.parameters, self.sync.arrivals, strict=True)
            name = next((planned.name for planned, count in found if count), self.plan.parameters[0].name)
            raise At(name, self.plan.rank).error(
                "its gradients of this step were never exchanged",
                "call finish_grad_sync or finalize_model_grads, or zero_grad_buffer(discard=True) on all ranks",
            )

    def _notify_listeners(self) -> None:
        for listener in self.value_listeners:
            listener()


Models: TypeAlias = DistributedDataParallel | Sequence[DistributedDataParallel]
"""One model, or several: the chunks of a virtual pipeline."""


def list_models(models: Models) -> list[DistributedDataParallel]:
    """Return the models in a list."""
    return [models] if isinstance(models, torch.nn.Module) else [*models]
