"""Checks gradients from any framework: replicas must agree, and must equal the gradients of one process.

Replicas that agree may all be wrong: if half of the batch was never added up, it is missing on each of them. So give a
reference, the gradients of one process over the whole batch, wherever the model is small enough.

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
from xrank.gradients.agreement import connect_ranks
from xrank.gradients.comparisons import (
    GradientCheck,
    GradientFinding,
    compare_replicas,
    compare_with_reference,
    encode_findings,
    explain_missing_sums,
    find_unowned,
    merge_findings,
)
from xrank.gradients.distributed_data_parallel import DistributedDataParallel
from xrank.gradients.faults import At
from xrank.gradients.nonfinite import first_nonfinite
from xrank.gradients.plan import GradientPlan, split_instances
from xrank.gradients.roles import local_of
from xrank.gradients.wire import GradientWire

Given: TypeAlias = "Mapping[str, Any] | torch.nn.Module | Sequence[torch.nn.Module]"

_GIVE_WRAPPER = "give the wrapper itself, check_gradients(ddp, plan), in the place of a dict, on all ranks"
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
    """Return gradients by the plan's names; unknown names stay."""
    if isinstance(given, Mapping):
        return GivenGradients(rename_to_plan(given, plan))
    named: dict[str, Any] = {}
    slices: dict[str, tuple[int, int]] = {}
    num_instances = None
    chunks = {"": given} if isinstance(given, torch.nn.Module) else {f"{i}.": chunk for i, chunk in enumerate(given)}
    for prefix, chunk in chunks.items():
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
        rank = group.intra_distributed_optimizer_instance_rank
        size = group.intra_distributed_optimizer_instance_size
        for bucket in group.buckets:
            numel = bucket.grad_data.numel() // size
            first = bucket.offset + rank * numel
            for parameter in bucket.params:
                start, stop = places[parameter]
                low, high = max(start, first), min(stop, first + numel)
                yield parameter, (low - start, high - start) if low < high else (0, 0)


@torch.no_grad()
def check_gradients(
    named_gradients: Given,
    plan: GradientPlan,
    *,
    reference: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    wire: GradientWire | None = None,
) -> GradientCheck:
    """Check the gradients that all ranks have after a step's last exchange; on all ranks of the mesh.

    With a distributed optimizer, only the elements that each rank owns are checked: those of Megatron's own buckets if
    its wrapper is given, else those of the plan. A parameter of the plan that the mapping lacks is a finding. None
    means that no gradient came, which is right if none came on any replica. Frozen parameters are skipped. Nothing is
    changed.

    Args:
        named_gradients: the module that holds them in ``main_grad`` or ``.grad``: this package's wrapper, Megatron's
            ``DistributedDataParallel``, one that ``fully_shard`` changed, or any other; or its chunks. Or gradients by
            parameter name, with or without ``module.`` of wrappers before it, such as DeepSpeed's
            ``safe_get_full_grad``; local tensors or DTensors.
        plan: this rank's plan, from the module of these gradients: ``GradientPlan.from_module(module, mesh)``.
        reference: gradients of one process for the whole batch, by the names of this rank, each of the shape of the
            local tensor, or of the whole tensor for DTensors. Names of other ranks may be in it.
        tolerance: allowed difference from the reference, relative to the parameter's largest element in it; by dtype
            when None: 1e-4 for float32, 0.1 for 16 bits. Check in float32 to find small errors.
        wire: replacement of torch's process groups.

    Raises:
        GradientError: the plans of two ranks do not fit together; the same on all ranks.
        UsageError: torch.distributed is not initialized, and `wire` is None; or gradients in a dict are in a buffer
            with slices that the plan does not know: on all ranks.

    Example:
        >>> from xrank.gradients import check_gradients
        >>> ddp(torch.ones(1, 2)).sum().backward()  # ddp: a module on one rank, as in DistributedDataParallel
        >>> ddp.finish_grad_sync()
        >>> check_gradients(ddp, ddp.plan).is_right
        True
    """
    wire = connect_ranks(plan, wire)
    everyone = tuple(sorted(plan.views.main.ranks))
    given = read_gradients(named_gradients, plan)
    _check_views(given, plan, wire)
    plan = take_slices(plan, given)
    findings = find_unowned(plan, wire)
    gradients = _match_gradients(given.named, plan, findings)
    for name, gradient in gradients.items():
        found = None if gradient is None else first_nonfinite(local_of(gradient))
        if found is not None:
            place, value = found
            message = f"it is {value} at element {list(place)}, in bucket {plan[name].bucket}"
            findings.append(GradientFinding("nonfinite", name, (plan.rank,), message))
    # Outside of the owned elements a reduce-scatter leaves partial sums.
    owned = {
        name: None if one is None else local_of(one).reshape(-1)[slice(*plan[name].owned)]
        for name, one in gradients.items()
    }
    findings += compare_replicas(owned, plan, wire)
    if reference is not None:
        differences, compared = compare_with_reference(gradients, rename_to_plan(reference, plan), plan, tolerance)
        findings += explain_missing_sums(differences, compared, plan, wire)
    texts = wire.exchange(encode_findings(findings), everyone)
    return GradientCheck(plan.rank, len(gradients), merge_findings(texts[rank] for rank in everyone))


def _check_views(given: GivenGradients, plan: GradientPlan, wire: GradientWire) -> None:
    """Raise on all ranks if a rank has a gradient whose place in a buffer is not the plan's.

    The buffer's own slices are then unknown: the plan's would compare elements that other ranks own.
    """
    if not plan.config.use_distributed_optimizer:
        return
    error: UsageError | None = None
    for planned in plan.parameters:
        gradient = given.named.get(planned.name)
        if gradient is None or planned.name in given.slices or len(plan.buffers[planned.buffer].shard_ranks) == 1:
            continue
        local = local_of(gradient)
        is_view = local.untyped_storage().nbytes() > local.numel() * local.element_size()
        if is_view and local.storage_offset() != planned.offset:
            error = At(planned.name, plan.rank).usage_error(
                f"its gradient is a view of element {local.storage_offset()} of a buffer that the plan does not know, "
                "so the elements that this rank has are unknown",
                _GIVE_WRAPPER,
                want=f"element {planned.offset}, as in the plan",
            )
            break
    texts = wire.exchange("" if error is None else error.message, tuple(sorted(plan.views.main.ranks)))
    if error is not None:
        raise error
    for rank, text in sorted(texts.items()):
        if text:
            raise UsageError(text, rank=rank, next_step=_GIVE_WRAPPER)


def _match_gradients(
    given: Mapping[str, Any], plan: GradientPlan, findings: list[GradientFinding]
) -> dict[str, torch.Tensor | None]:
    """Return the gradients of the plan's parameters, in its order, and append a finding for each mismatch."""
    matched: dict[str, torch.Tensor | None] = {}
    for planned in plan.parameters:
        if planned.name not in given:
            message = "there is no gradient of this name, though it is in the plan"
            findings.append(GradientFinding("missing", planned.name, (plan.rank,), message))
            continue
        gradient = given[planned.name]
        local = None if gradient is None else local_of(gradient)
        if local is not None and tuple(local.shape) != planned.shape:
            message = f"its gradient is of shape {list(local.shape)}, and the parameter of {list(planned.shape)}"
            findings.append(GradientFinding("shape", planned.name, (plan.rank,), message))
            continue
        matched[planned.name] = gradient
    known = {planned.name for planned in plan.parameters} | {*plan.frozen}
    findings += (
        GradientFinding("unknown", name, (plan.rank,), "it is not a parameter of the plan")
        for name in given
        if name not in known
    )
    return matched
