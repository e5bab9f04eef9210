"""Gradients as callers give them: by name, or as the modules that hold them, with each rank's slices.

After a reduce-scatter a rank has only some elements of a gradient. They are the plan's ``owned``, unless another
wrapper cut its own buckets: Megatron's distributed optimizer cuts other slices than the plan where tp is longer than 1
(megatron/core/distributed/param_and_grad_buffer.py), and its modules show them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from xrank.errors import UsageError
from xrank.gradients.distributed_data_parallel import DistributedDataParallel
from xrank.gradients.plan import GradientPlan
from xrank.gradients.plan_maker import split_instances
from xrank.gradients.roles import local_of

Given: TypeAlias = "Mapping[str, Any] | torch.nn.Module | Sequence[torch.nn.Module]"

_PREFIX = "module."
"""Prefix that wrappers of modules put before names: torch's wrapper once, Megatron's once for each."""


@dataclass(frozen=True, slots=True)
class GivenGradients:
    """Gradients by the plan's names, and the slices that other wrappers cut."""

    named: Mapping[str, Any]
    slices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Name -> this rank's range of the flattened elements, where a module shows it."""
    num_instances: int | None = None
    """Number of instances of the distributed optimizer that cut these slices; None without it."""


def read_gradients(given: Given, plan: GradientPlan) -> GivenGradients:
    """Return gradients by the plan's names; unknown names stay.

    Args:
        given: gradients by name; or the module that holds them in ``main_grad`` or ``.grad``, wrapped or not, or its
            chunks.
        plan: this rank's plan.

    Raises:
        UsageError: a gradient lies in a buffer whose slices are unknown.
    """
    if isinstance(given, Mapping):
        return GivenGradients(rename_to_plan(given, plan))
    named: dict[str, Any] = {}
    slices: dict[str, tuple[int, int]] = {}
    num_instances = None
    for prefix, chunk in _list_chunks(given):
        if isinstance(chunk, DistributedDataParallel):
            for planned in chunk.plan.parameters:
                named[prefix + planned.name] = chunk.main_grad(planned.name)
                slices[prefix + planned.name] = planned.owned
            if chunk.config.use_distributed_optimizer:
                num_instances = chunk.config.num_distributed_optimizer_instances
            continue
        cut = dict(_find_megatron_slices(chunk))
        if cut:
            num_instances = getattr(chunk.ddp_config, "num_distributed_optimizer_instances", 1)
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                named[prefix + name] = getattr(parameter, "main_grad", parameter.grad)
                if cut:
                    slices[prefix + name] = cut[parameter]
    return GivenGradients(rename_to_plan(named, plan), rename_to_plan(slices, plan), num_instances)


def take_slices(plan: GradientPlan, given: GivenGradients) -> GradientPlan:
    """Return the plan with the slices that a module shows in the place of its own."""
    if not given.slices:
        return plan
    config = replace(
        plan.config,
        use_distributed_optimizer=given.num_instances is not None,
        num_distributed_optimizer_instances=given.num_instances or 1,
        overlap_param_gather=False,
        align_param_gather=False,
        pad_buckets_for_high_nccl_busbw=False,
        reduce_scatter_with_fp32_accumulation=False,
    )
    buffers = []
    for buffer in plan.buffers:
        shard_ranks, across_ranks = split_instances(buffer.ranks, buffer.rank, config)
        buffers.append(replace(buffer, shard_ranks=shard_ranks, across_ranks=across_ranks))
    parameters = tuple(replace(one, owned=given.slices.get(one.name, one.owned)) for one in plan.parameters)
    return replace(plan, config=config, buffers=tuple(buffers), parameters=parameters)


def find_foreign_view(given: GivenGradients, plan: GradientPlan) -> UsageError | None:
    """Return the error of a gradient that lies in a buffer at another place than the plan's; None without one.

    The buffer's own slices are then unknown: the plan's would compare elements that other ranks own. Call it for plans
    with the distributed optimizer.
    """
    for planned in plan.parameters:
        gradient = given.named.get(planned.name)
        if gradient is None or planned.name in given.slices or len(plan.buffers[planned.buffer].shard_ranks) == 1:
            continue
        local = local_of(gradient)
        is_view = local.untyped_storage().nbytes() > local.numel() * local.element_size()
        if is_view and local.storage_offset() != planned.offset:
            return UsageError(
                f"{planned.name}: its gradient lies in a buffer that the plan does not know, so the elements that "
                "this rank has after the reduce-scatter are unknown",
                tensor=planned.name,
                rank=plan.rank,
                got=f"a view of element {local.storage_offset()} on",
                want=f"the plan's place, element {planned.offset}; or the wrapped module, which shows its slices",
                next_step="give the wrapper itself, check_gradients(ddp, plan), in the place of a dict",
            )
    return None


def rename_to_plan(named: Mapping[str, Any], plan: GradientPlan) -> dict[str, Any]:
    """Return a mapping by the plan's names; unknown names stay."""
    found = {}
    frozen = {*plan.frozen}
    for name, value in named.items():
        inner = name
        while inner not in plan and inner not in frozen and inner.startswith(_PREFIX):
            inner = inner[len(_PREFIX) :]
        if inner in plan:
            found[plan[inner].name] = value
        else:
            found[inner if inner in frozen else name] = value
    return found


def _list_chunks(given: torch.nn.Module | Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    if isinstance(given, torch.nn.Module):
        return [("", given)]
    return [(f"{number}.", chunk) for number, chunk in enumerate(given)]


def _find_megatron_slices(chunk: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, tuple[int, int]]]:
    """Yield the parameters of Megatron's wrapper with the elements that this rank has after its reduce-scatter."""
    config: Any = getattr(chunk, "ddp_config", None)
    if not getattr(config, "use_distributed_optimizer", False):
        return
    wrapper: Any = chunk
    places: dict[torch.nn.Parameter, tuple[int, int]] = {}
    for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers):
        # (start, stop, id of the bucket), in elements of the buffer
        places |= {parameter: place[:2] for parameter, place in buffer.param_index_map.items()}
    for group in (*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups):
        rank, size = (
            group.intra_distributed_optimizer_instance_rank,
            group.intra_distributed_optimizer_instance_size,
        )
        for bucket in group.buckets:
            numel = bucket.grad_data.numel() // size
            first = bucket.offset + rank * numel
            for parameter in bucket.params:
                start, stop = places[parameter]
                low, high = max(start, first), min(stop, first + numel)
                yield parameter, (low - start, high - start) if low < high else (0, 0)
