"""Checks gradients from any framework: replicas must agree, and must equal the gradients of one process.

Replicas that agree may all be wrong: if half of the batch was never added up, it is missing on each of them. So give a
reference, the gradients of one process over the whole batch, wherever the model is small enough.

After a reduce-scatter a rank has only some elements of a gradient. They are the plan's ``owned``, unless another
wrapper cut its own buckets: Megatron's distributed optimizer cuts other slices than the plan where tp is longer than 1
(megatron/core/distributed/param_and_grad_buffer.py), and its modules show them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, product
from math import prod
from typing import Any, Literal, TypeAlias

import torch
from xxhash import xxh128_hexdigest

from xrank.errors import GradientError, UsageError
from xrank.gradients.buckets import first_nonfinite
from xrank.gradients.config import GradientConfig
from xrank.gradients.distributed_data_parallel import DistributedDataParallel, connect_ranks
from xrank.gradients.faults import At
from xrank.gradients.plan import GradientPlan, PlannedParameter, list_later, split_instances
from xrank.gradients.roles import EXPERT_DATA_AXES, MeshPlace, local_of
from xrank.gradients.wire import GradientWire
from xrank.layout.local_part import local_part
from xrank.layout.terms.tensors import describe_mesh, from_placements
from xrank.ranks.memory import row_major_bytes
from xrank.words import first_lines, join_words, ranks_text

FindingKind: TypeAlias = Literal["nonfinite", "missing", "unknown", "shape", "replicas", "tied", "scale", "reference"]
Comparable: TypeAlias = tuple[torch.Tensor, torch.Tensor, float]
"""The flat elements of a gradient and of its reference that this rank compares, and the largest allowed difference."""

_ORDER = ("nonfinite", "missing", "unknown", "shape", "scale", "replicas", "tied", "reference")
_MAX_SHOWN = 20
_MAX_COMPARED = 64
"""Gradients of one set of ranks whose values are compared or added up; further findings have no explanation."""
_FACTOR_TOLERANCE = 0.02
"""Allowed difference of a ratio from a product of lengths, relative to the product."""
_DTYPE_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""Tolerance by dtype, relative to a parameter's largest element. In 100 right runs of a small transformer, cut along
every axis, rounding errors reached 4e-6 in float32 and 6e-2 in bfloat16. A wrong factor is off by 0.25 or more."""
_SHARE_OF_ALL = 1e-2
"""Share of the tolerance that is relative to the largest element of all parameters, so that a gradient of zeros may
have rounding errors."""


@dataclass(frozen=True, slots=True)
class GradientFinding:
    """A wrong gradient."""

    kind: FindingKind
    """``scale``: a multiple of the reference; ``reference``: another difference from it; ``tied``: tables of stages."""
    name: str
    ranks: tuple[int, ...]
    """Ranks where it was found; for ``replicas`` and ``tied``, all ranks that should hold the same gradient."""
    message: str
    """Text without the name and the ranks."""
    difference: float | None = None
    """Largest difference between two elements that should be equal."""
    factor: float | None = None
    """Gradient divided by reference, for ``scale``."""

    def __str__(self) -> str:
        return f"{self.name}: on {ranks_text(self.ranks)} {self.message}"


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Result of `check_gradients`, with the same findings on all ranks.

    Example:
        >>> from xrank.gradients import GradientCheck
        >>> bool(GradientCheck(rank=0, num_checked=2, findings=()))
        True
    """

    rank: int
    num_checked: int
    """Number of gradients of this rank."""
    findings: tuple[GradientFinding, ...]
    """Findings of all ranks, the most informative kind first."""

    @property
    def is_right(self) -> bool:
        """Whether all gradients are right."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.is_right

    def __str__(self) -> str:
        if self.is_right:
            return f"{self.num_checked} gradients of rank {self.rank} are right"
        return "\n".join(first_lines([str(finding) for finding in self.findings], _MAX_SHOWN))

    def raise_if_wrong(self) -> None:
        """Raise a `GradientError` with the first finding as its message and the others as notes, on all ranks alike."""
        if self.is_right:
            return
        first, *others = self.findings
        step = "read the finding for each gradient, and correct the step that reduces it"
        error = GradientError(str(first), tensor=first.name, rank=first.ranks[0], next_step=step)
        for line in first_lines([f"also: {other}" for other in others], _MAX_SHOWN - 1):
            error.add_note(line)
        raise error


def find_unowned(plan: GradientPlan, wire: GradientWire) -> list[GradientFinding]:
    """Return a finding for each parameter with elements that no rank owns and no optimizer steps; on all ranks."""
    sets: dict[tuple[int, ...], list[str]] = {}
    for planned in plan.parameters:
        # Without the distributed optimizer each rank has to own whole parameters, and need not ask the others.
        ranks = plan.buffers[planned.buffer].shard_ranks if plan.config.use_distributed_optimizer else (plan.rank,)
        sets.setdefault(ranks, []).append(planned.name)
    findings = []
    for ranks, names in sorted(sets.items()):
        texts = wire.exchange(json.dumps([plan[name].owned for name in names]), ranks)
        for name, *slices in zip(names, *map(json.loads, texts.values()), strict=True):
            covered = 0
            for start, stop in sorted(slices):
                covered = max(covered, stop) if start <= covered else covered
            if covered < plan[name].numel:
                message = f"no rank has element {covered} after the exchange, so no optimizer updates it"
                findings.append(GradientFinding("missing", name, ranks, message))
    return findings


def compare_replicas(
    owned: Mapping[str, torch.Tensor | None], plan: GradientPlan, wire: GradientWire
) -> list[GradientFinding]:
    """Return where owned elements differ that should be equal, None if no gradient came; the same on all ranks."""
    digests = {name: _digest(tensor) for name, tensor in owned.items()}
    findings: list[GradientFinding] = []
    sets: dict[tuple[tuple[int, ...], FindingKind, tuple[str, ...]], list[str]] = {}
    for planned in plan.parameters:
        buffer = plan.buffers[planned.buffer]
        same = buffer.across_ranks if plan.config.use_distributed_optimizer else planned.ranks
        if len(same) > 1:
            sets.setdefault((same, "replicas", planned.axes), []).append(planned.name)
    for planned, later in list_later(plan.parameters):
        as_kind: FindingKind = "tied" if later.kind in ("word", "position") else "replicas"
        sets.setdefault((later.ranks, as_kind, later.axes), []).append(planned.name)
    # All ranks use one order: a rank is in several sets, and each set waits for all of its ranks.
    for (ranks, kind, axes), names in sorted(sets.items()):
        own = [digests.get(name, "missing") for name in names]
        # One digest for all gradients of the set; each one's own travels only after a difference.
        digest_by_rank = wire.exchange(xxh128_hexdigest("\n".join(own).encode()), ranks)
        if len(set(digest_by_rank.values())) == 1:
            continue
        texts = wire.exchange(json.dumps([names, own]), ranks)
        names_of_first, _ = json.loads(texts[ranks[0]])  # each stage has its own name for a table
        known = {rank: json.loads(texts[rank])[1] for rank in ranks}
        num_compared = 0
        for place, name in enumerate(names):
            by_rank = {rank: known[rank][place] for rank in ranks}
            if len(set(by_rank.values())) == 1 or "missing" in by_rank.values():
                continue  # the rank without the gradient reports it
            difference, at, tensor = None, None, owned.get(name)
            is_comparable = len({text.rpartition(" ")[0] for text in by_rank.values()}) == 1
            if is_comparable and tensor is not None and num_compared < _MAX_COMPARED:
                num_compared += 1
                difference, at = _find_largest_difference(tensor, ranks, wire)
                if difference == 0:
                    continue  # only the signs of zeros differ
            message = _describe_difference(by_rank, axes, difference, at)
            findings.append(GradientFinding(kind, names_of_first[place], ranks, message, difference))
    return findings


def _digest(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none came"
    return f"{tensor.numel()} of {tensor.dtype} {xxh128_hexdigest(row_major_bytes(tensor).data)}"


def _find_largest_difference(tensor: torch.Tensor, ranks: tuple[int, ...], wire: GradientWire) -> tuple[float, int]:
    """Return the largest difference of an element between ranks, and the element's index."""
    values = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor
    # Two maxima give the spread of each element over the ranks: max(x) + max(-x).
    high = values.to(wire.device, torch.float64)
    # Elements that are not finite are other findings; here they would hide the rest.
    high = torch.nan_to_num(high, nan=0.0, posinf=0.0, neginf=0.0)
    low = -high
    for handle in [wire.all_reduce(high, ranks, "max"), wire.all_reduce(low, ranks, "max")]:
        handle.wait()
    spread = high.add_(low)
    at = int(spread.argmax())
    return float(spread[at]), at // 2 if tensor.is_complex() else at


def _describe_difference(
    by_rank: Mapping[int, str], axes: Sequence[str], difference: float | None, at: int | None
) -> str:
    groups: dict[str, list[int]] = {}
    for rank, text in by_rank.items():
        groups.setdefault(text, []).append(rank)
    if len(groups) == len(by_rank):
        how = "each rank has a different value"
    else:
        how = "; ".join(f"{ranks_text(ranks)} have one and the same" for ranks in groups.values() if len(ranks) > 1)
        alone = [ranks[0] for ranks in groups.values() if len(ranks) == 1]
        if alone:
            how += f", {ranks_text(alone)} another"
    if len({text.rpartition(" ")[0] for text in groups}) > 1:
        return f"copies along {join_words(axes)} differ: {how} ({' or '.join(sorted(groups))})"
    by = "" if difference is None else f", by up to {difference:.3g} at element {at} of those that are compared"
    return f"copies along {join_words(axes)} are not equal{by}: {how}"


def compare_with_reference(
    gradients: Mapping[str, Any], reference: Mapping[str, Any], plan: GradientPlan, tolerance: float | None
) -> tuple[list[GradientFinding], dict[str, Comparable]]:
    """Return where this rank's gradients differ from those of one process, and what was compared."""
    findings: list[GradientFinding] = []
    compared: dict[str, Comparable] = {}
    judged: list[str] = []
    known = [one for one in reference.values() if one is not None and bool(one.isfinite().all())]
    largest = max((float(one.abs().max()) for one in known if one.numel()), default=0.0)
    for name, gradient in gradients.items():
        planned, ranks = plan[name], (plan.rank,)
        if name not in reference:
            message = "the reference has no gradient of this name"
            findings.append(GradientFinding("missing", name, ranks, message))
            continue
        wanted = _find_local_reference(reference[name], gradient, planned)
        if wanted is None:
            got = f"{list(planned.shape)}, and the reference of {list(reference[name].shape)}"
            message = f"it is of the local shape {got}, and no placement defines this rank's part"
            findings.append(GradientFinding("shape", name, ranks, message))
            continue
        bad = first_nonfinite(wanted)
        if bad is not None:
            message = f"the reference is {bad[1]} at element {list(bad[0])}, so nothing can be compared with it"
            findings.append(GradientFinding("nonfinite", name, ranks, message))
            continue
        local = torch.zeros(planned.shape, dtype=planned.dtype) if gradient is None else local_of(gradient)
        part = slice(*planned.owned)
        if bool(wanted.reshape(-1)[part].any()):
            judged.append(name)
        dtypes = {planned.dtype, wanted.dtype, local.dtype}
        allowed = max(_DTYPE_TOLERANCES.get(one, 1e-4) for one in dtypes) if tolerance is None else tolerance
        # The largest element of the whole parameter: small elements of a slice have the rounding errors of the others.
        own = float(wanted.abs().max()) if wanted.numel() else 0.0
        bound = allowed * (own + _SHARE_OF_ALL * largest)
        wide = torch.complex128 if local.is_complex() else torch.float64
        mine = local.reshape(-1)[part].to(wide)
        expected = wanted.reshape(-1)[part].to(mine.device, wide)
        if not mine.is_complex():
            compared[name] = mine, expected, bound
        found = _find_difference(mine, expected, bound, planned, plan)
        if found is not None:
            findings.append(found)
    return _summarize_factors(findings, plan, judged), compared


def _find_difference(
    found: torch.Tensor, wanted: torch.Tensor, bound: float, planned: PlannedParameter, plan: GradientPlan
) -> GradientFinding | None:
    if not found.numel():
        return None
    off = (found - wanted).abs()
    difference = float(off.max())
    if not difference > bound:  # also if it is a NaN, which another check reports
        return None
    # The least-squares factor: a gradient that equals it times the reference is only scaled.
    norm = float(torch.linalg.vector_norm(wanted))
    ratio = float((found.conj() * wanted).sum().real) / norm**2 if norm else 0.0
    if ratio > 0 and float((found - ratio * wanted).abs().max()) <= ratio * bound:
        message = describe_factor(ratio, plan, planned)
        return GradientFinding("scale", planned.name, (plan.rank,), message, difference, ratio)
    if not bool(found.any()):
        message = "it is zero, and that of one process is not"
    else:
        relative = difference / max(float(wanted.abs().max()), 1e-300)
        message = (
            f"it differs from that of one process by up to {relative:.3g} of the largest element, most at element "
            f"{int(off.argmax())} of those that are compared"
        )
        if planned.later:
            axes = dict.fromkeys(axis for later in planned.later for axis in later.axes)
            verbs = join_words(f"{later.operation} along {join_words(later.axes)}" for later in planned.later)
            message += f"; without the later {verbs} of the plan, it is only a part along {join_words(axes)}"
    return GradientFinding("reference", planned.name, (plan.rank,), message, difference)


def _find_local_reference(reference: Any, gradient: Any, planned: PlannedParameter) -> torch.Tensor | None:
    """Return this rank's part of a reference; None if its placement is unknown."""
    if reference is None:
        return torch.zeros(planned.shape, dtype=planned.dtype)
    whole: torch.Tensor = local_of(reference)
    if not hasattr(gradient, "placements") or tuple(whole.shape) != tuple(gradient.shape):
        return whole if tuple(whole.shape) == planned.shape else None
    if any(placement.is_partial() for placement in gradient.placements):
        return None
    mesh = describe_mesh(gradient.device_mesh)
    layout = from_placements(mesh, gradient.placements, whole.ndim)
    at = dict(zip(mesh.axis_names, gradient.device_mesh.get_coordinate(), strict=True))
    part = local_part(layout, mesh, at, tuple(whole.shape))
    assert part is not None  # placements have no "where"
    found, flat = whole.new_zeros(part.shape), whole.contiguous().view(-1)
    for nest in part.nests:
        counts, steps, whole_steps = zip(*nest.loops, strict=True) if nest.loops else ((), (), ())
        found.view(-1).as_strided(counts, steps, nest.x).copy_(flat.as_strided(counts, whole_steps, nest.y))
    return found


def find_factors(ratio: float, plan: GradientPlan, planned: PlannedParameter) -> tuple[str, ...]:
    """Return the products, or else quotients (``dp/edp``), of lengths of the fewest axes that equal the ratio.

    The parameter's own mesh comes before all others.
    """
    place = MeshPlace(plan.views, plan.rank)
    own_mesh = place.mesh(plan.buffers[planned.buffer].is_expert)
    exchanged = [*planned.axes, *(axis for later in planned.later for axis in later.axes)]
    for meshes in ((own_mesh,), (own_mesh, place.dense, *(mesh for _, mesh in plan.views.others))):
        lengths: dict[str, int] = {}
        for mesh in meshes:
            for axis in mesh.axis_names:
                if mesh.axis_length(axis) > 1:
                    lengths.setdefault(axis, mesh.axis_length(axis))
        # Axes of the parameter's exchanges come first.
        lengths = {axis: lengths[axis] for axis in (*exchanged, *lengths) if axis in lengths}
        for count in range(1, len(lengths) + 1):
            # A missing division and a division too many have inverse ratios and the same axis.
            factor = max(ratio, 1 / ratio)
            found = tuple(
                " x ".join(chosen)
                for chosen in combinations(lengths, count)
                if abs(factor / prod(lengths[axis] for axis in chosen) - 1) <= _FACTOR_TOLERANCE
            )
            if not found and len(meshes) > 1:
                found = _find_quotients(ratio, lengths, count)
            if found:
                return found
    return ()


def _find_quotients(ratio: float, lengths: Mapping[str, int], count: int) -> tuple[str, ...]:
    found = []
    for chosen in combinations(lengths, count):
        for is_above in product((True, False), repeat=count):
            above = [axis for axis, above in zip(chosen, is_above, strict=True) if above]
            below = [axis for axis in chosen if axis not in above]
            quotient = prod(lengths[axis] for axis in above) / prod(lengths[axis] for axis in below)
            if above and below and abs(ratio / quotient - 1) <= _FACTOR_TOLERANCE:
                text = " x ".join(below)
                found.append((chosen, f"{' x '.join(above)}/{text if len(below) == 1 else f'({text})'}"))
    # Experts have other replicas than dense weights: to divide by the one number for the other is the usual mistake.
    usual = tuple(text for chosen, text in found if all(axis in EXPERT_DATA_AXES for axis in chosen))
    return usual or tuple(text for _, text in found)


def describe_factor(ratio: float, plan: GradientPlan, planned: PlannedParameter) -> str:
    """Return a sentence on a gradient that is a multiple of its reference."""
    axes = find_factors(ratio, plan, planned)
    times = f"{ratio:.4g} times" if ratio > 1 else f"1/{1 / ratio:.4g} of"
    start = f"it is {times} that of one process"
    if not axes:
        return f"{start}, which is not the length of an axis: check the numbers of micro-batches and tokens"
    alternatives = " or ".join(axes)
    if "/" in alternatives:
        return f"{start}, which is {alternatives}: it was divided by one of them, and the other is right"
    why = (
        "a division by it is missing, or a sum was made twice"
        if ratio > 1
        else "it was divided once too often, or not summed"
    )
    return f"{start}, as many as ranks along {alternatives}: {why}"


def _summarize_factors(
    findings: Sequence[GradientFinding], plan: GradientPlan, judged: Sequence[str]
) -> list[GradientFinding]:
    """Replace findings of one factor by one, where all judged gradients of a kind have it."""
    # The kinds of gradients that one mistake scales alike, the largest first.
    kinds = [("all gradients", list(judged))]
    for title, is_expert in (("all gradients of experts", True), ("all gradients of dense weights", False)):
        kinds.append((title, [name for name in judged if plan.buffers[plan[name].buffer].is_expert == is_expert]))
    for kind, title in (("tensor", "all copies along tp"), ("conditional", "all copies along pp")):
        kinds.append((title, [name for name in judged if any(later.kind == kind for later in plan[name].later)]))
    left = list(findings)
    for title, members in kinds:
        scaled = {one.name: one for one in left if one.kind == "scale" and one.name in members}
        factors = [one.factor for one in scaled.values() if one.factor is not None]
        if len(members) < 2 or len(factors) < len(members) or max(factors) > min(factors) * (1 + _FACTOR_TOLERANCE):
            continue
        # The median has the smallest error of rounding.
        factor = sorted(factors)[len(factors) // 2]
        first = scaled[members[0]]
        message = describe_factor(factor, plan, plan[first.name])
        difference = max(one.difference or 0.0 for one in scaled.values())
        summary = replace(first, name=title, message=message, difference=difference, factor=factor)
        left = [summary, *(one for one in left if one.name not in scaled or one.kind != "scale")]
    return left


def explain_missing_sums(
    findings: Sequence[GradientFinding], compared: Mapping[str, Comparable], plan: GradientPlan, wire: GradientWire
) -> list[GradientFinding]:
    """Return the findings, with the missing exchange where one explains a difference; on all ranks together."""
    wrong = {one.name for one in findings if one.kind == "reference" and one.name in compared}
    hints: dict[str, str] = {}
    # Sets of ranks with their axes and the parameters of which they should hold the same; all ranks use one order.
    place = MeshPlace(plan.views, plan.rank)
    sets: dict[tuple[tuple[int, ...], tuple[str, ...]], list[str]] = {}
    for planned in plan.parameters:
        if len(planned.tensor_ranks) > 1 and planned.is_cut_over_tp is not True:
            axis = place.tensor_axis(plan.buffers[planned.buffer].is_expert)
            sets.setdefault((planned.tensor_ranks, (axis,)), []).append(planned.name)
        if len(planned.ranks) > 1 and not plan.config.use_distributed_optimizer:
            sets.setdefault((planned.ranks, planned.axes), []).append(planned.name)
    for (ranks, axes), names in sorted(sets.items()):
        own = {name: [compared[name][0].numel(), name in wrong] for name in names if name in compared}
        # Ranks along tp may hold other parameters, so only those that all of them compare are added up.
        texts = wire.exchange(json.dumps(own if wrong & own.keys() else None), ranks)
        if all(text == "null" for text in texts.values()):
            continue
        tables = [json.loads(text) for text in wire.exchange(json.dumps(own), ranks).values()]
        shared = [name for name in tables[0] if len({table.get(name, [-1])[0] for table in tables}) == 1]
        chosen = [name for name in shared if any(table[name][1] for table in tables)]
        for name in sorted(chosen)[:_MAX_COMPARED]:
            gradient, wanted, bound = compared[name]
            total = gradient.to(wire.device, torch.float64, copy=True)
            wire.all_reduce(total, ranks, "sum").wait()
            total, along = total.to(wanted.device), join_words(axes)
            if name not in wrong or not total.numel():
                continue
            if float((total - wanted).abs().max()) <= len(ranks) * bound:
                hints[name] = f"; its sum along {along} is right: that sum is missing"
            elif float((total / len(ranks) - wanted).abs().max()) <= bound:
                hints[name] = f"; its mean along {along} is right: that mean is missing"
    return [
        replace(one, message=one.message + hints[one.name]) if one.kind == "reference" and one.name in hints else one
        for one in findings
    ]


Given: TypeAlias = "Mapping[str, Any] | torch.nn.Module | Sequence[torch.nn.Module]"

_GIVE_WRAPPER = "give the wrapper itself, check_gradients(ddp, plan), instead of a dict, on all ranks"
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
    config = GradientConfig(
        use_distributed_optimizer=given.num_instances is not None,
        num_distributed_optimizer_instances=given.num_instances or 1,
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
    everyone = plan.all_ranks
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
    texts = wire.exchange(json.dumps([asdict(finding) for finding in findings]), everyone)
    # Findings of all ranks that differ only in ranks become one.
    merged: dict[tuple[str, ...], GradientFinding] = {}
    for rank in everyone:
        for values in json.loads(texts[rank]):
            finding = GradientFinding(**{**values, "ranks": tuple(values["ranks"])})
            key = finding.kind, finding.name, finding.message
            ranks = set(finding.ranks) | set(merged[key].ranks if key in merged else ())
            merged[key] = replace(merged.get(key, finding), ranks=tuple(sorted(ranks)))
    ordered = sorted(merged.values(), key=lambda one: (_ORDER.index(one.kind), one.ranks, one.name))
    return GradientCheck(plan.rank, len(gradients), tuple(ordered))


def _check_views(given: GivenGradients, plan: GradientPlan, wire: GradientWire) -> None:
    """Raise on all ranks if a gradient is in a buffer that the plan does not know, whose slices are thus unknown."""
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
                f"its gradient is a view of element {local.storage_offset()} of a buffer that the plan does not know",
                _GIVE_WRAPPER,
                want=f"element {planned.offset}, as in the plan",
            )
            break
    texts = wire.exchange("" if error is None else error.message, plan.all_ranks)
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
    findings += (
        GradientFinding("unknown", name, (plan.rank,), "it is not a parameter of the plan")
        for name in given
        if name not in plan and name not in plan.frozen
    )
    return matched
