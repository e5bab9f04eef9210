"""The exchanges after a step's last backward: each gradient is added up over all ranks that have a part of it.

The order is that of megatron/core/distributed/finalize_model_grads.py: replicas; embedders of all stages; copies along
tp; the word table, then the position table; biases of routers; and the number of tokens, which divides all gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from xrank.errors import GradientError, UsageError
from xrank.gradients.distributed_data_parallel import DistributedDataParallel, Models, list_models
from xrank.gradients.faults import At, GradientFault
from xrank.gradients.plan import LATER_KINDS, LaterReduction, Operation
from xrank.gradients.roles import MeshPlace
from xrank.gradients.wire import GradientWire, Handle

ReductionKind: TypeAlias = Literal["data", "conditional", "tensor", "word", "position", "router", "tokens"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """One collective of this rank with others.

    Example:
        >>> from xrank.gradients import Reduction
        >>> Reduction("data", "sum", ("dp",), (0, 1), ("weight",), numel=2).ranks
        (0, 1)
    """

    kind: ReductionKind
    """In order of execution: replicas, embedders of all stages, copies along tp, tables, routers, tokens."""
    operation: Operation
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    """Ranks that took part, this rank among them, ascending; two or more."""
    names: tuple[str, ...]
    """Names of parameters, or of router modules. With several models, each starts with the model's number."""
    numel: int
    """Elements that each rank sent."""


_TABLES = ("word", "position")
"""Tables are large and few: each is sent from its buffer without a copy."""


@dataclass(frozen=True, slots=True)
class _LaterPart:
    """The elements of one gradient that this rank exchanges: all of them, or the owned ones."""

    chunk: int
    name: str
    gradient: torch.Tensor
    """A flat view of the buffer."""
    later: LaterReduction
    wire: GradientWire


class LaterSync:
    """The later reductions of one step on one rank."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._num_chunks = len(chunks)
        self._parts: list[_LaterPart] = []
        for number, chunk in enumerate(chunks):
            for planned in chunk.plan.parameters:
                gradient = chunk.main_grad(planned.name).view(-1)[slice(*planned.owned)]
                for later in planned.later:
                    self._parts.append(_LaterPart(number, planned.name, gradient, later, chunk.wire))
        self.faults: list[GradientFault] = []
        """Faults that all ranks must receive before `run`."""
        self._copies: dict[str, list[_LaterPart]] = {}
        for part in self._parts:
            if part.later.kind == "conditional":
                # A copy's name, without the number of its chunk.
                is_several = isinstance(chunks[part.chunk].module, torch.nn.ModuleList)
                name = part.name.partition(".")[2] if is_several else part.name
                self._copies.setdefault(name, []).append(part)
        rank = chunks[0].plan.rank
        for first, *others in self._copies.values():
            self.faults += (
                At(other.name, rank).fault(
                    f"its shapes in chunks {first.chunk} and {other.chunk} of rank {rank} differ",
                    "rename parameters that are not copies, or do not mark them over_pp",
                    f"{other.gradient.numel()} elements",
                    f"{first.gradient.numel()}, as in its other copy {first.name}",
                )
                for other in others
                if other.gradient.shape != first.gradient.shape
            )

    def number(self, chunk: int, names: Iterable[str]) -> tuple[str, ...]:
        """Return names as a `Reduction` contains them: several chunks put the chunk's number before."""
        return tuple(f"{chunk}.{name}" for name in names) if self._num_chunks > 1 else tuple(names)

    def run(self) -> list[Reduction]:
        """Run the reductions, on all ranks alike, and return them."""
        done: list[Reduction] = []
        for kind in LATER_KINDS:
            # In Megatron's order: sums that are nested otherwise round otherwise.
            parts = [part for part in self._parts if part.later.kind == kind]
            if kind != "conditional":
                done += self._reduce(parts)
                continue
            # Embedders that all chunks of all stages have: every chunk of this rank has a part of the gradient, and one
            # sum over all stages then serves all copies.
            for first, *others in self._copies.values():
                for other in others:
                    first.gradient.add_(other.gradient)
            done += self._reduce([first for first, *_ in self._copies.values()])
            for first, *others in self._copies.values():
                for other in others:
                    other.gradient.copy_(first.gradient)
        return done

    def _reduce(self, parts: Sequence[_LaterPart]) -> list[Reduction]:
        """Reduce parts with the same operation and ranks as one flat tensor; reduce tables one by one."""
        groups: dict[tuple[object, ...], list[_LaterPart]] = {}
        for number, part in enumerate(parts):
            later = part.later
            alone = number if later.kind in _TABLES else -1  # tables get a collective of their own
            # Sums before averages, then by ranks: all ranks use one order, so that no two wait for each other.
            key = later.operation != "sum", later.ranks, later.axes, str(part.gradient.dtype), alone
            groups.setdefault(key, []).append(part)
        sent: list[tuple[Handle, torch.Tensor, list[_LaterPart]]] = []
        done = []
        for _, members in sorted(groups.items()):
            members = [member for member in members if member.gradient.numel()]
            if not members:
                continue  # this rank's shards have no elements of these, nor have those of the ranks in the set
            later = members[0].later
            whole = members[0].gradient if len(members) == 1 else torch.cat([one.gradient for one in members])
            wanted = torch.view_as_real(whole).view(-1) if whole.is_complex() else whole
            sent.append((members[0].wire.all_reduce(wanted, later.ranks, later.operation), whole, members))
            names = tuple(name for one in members for name in self.number(one.chunk, [one.name]))
            done.append(Reduction(later.kind, later.operation, later.axes, later.ranks, names, whole.numel()))
        for handle, whole, members in sent:
            handle.wait()
            # A single gradient was reduced in place; several were copied into one tensor, and are copied back.
            if len(members) > 1:
                sizes = [one.gradient.numel() for one in members]
                for one, reduced in zip(members, torch.split(whole, sizes), strict=True):
                    one.gradient.copy_(reduced)
        return done


@dataclass(frozen=True, slots=True)
class _Router:
    name: str
    bias: torch.Tensor
    counts: torch.Tensor
    rate: float | None
    is_frozen: bool
    """Whether it has parameters, all of them frozen."""


class RouterBiases:
    """The routers of one rank in one step. Gradients do not move their biases, by which they pick idle experts.

    megatron/core/transformer/moe/moe_utils.py:get_updated_expert_bias; after arXiv 2408.15664.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._chunks = chunks
        self._routers: list[_Router] = []
        for number, chunk in enumerate(chunks):
            for name, module in chunk.module.named_modules():
                bias, counts = (getattr(module, key, None) for key in ("expert_bias", "local_tokens_per_expert"))
                if isinstance(bias, torch.Tensor) and isinstance(counts, torch.Tensor):
                    config, own = getattr(module, "config", None), [*module.parameters()]
                    rate = getattr(
                        config, "moe_router_bias_update_rate", getattr(module, "expert_bias_update_rate", None)
                    )
                    is_frozen = bool(own) and not any(parameter.requires_grad for parameter in own)
                    full = f"{number}.{name}" if len(chunks) > 1 else name
                    self._routers.append(_Router(full, bias, counts, None if rate is None else float(rate), is_frozen))
        self.faults = [
            At(router.name, chunks[0].plan.rank).fault(
                "the rate at which its expert_bias moves is unknown",
                "set config.moe_router_bias_update_rate or expert_bias_update_rate on the module; 1e-3 is Megatron's",
            )
            for router in self._routers
            if router.rate is None and not router.is_frozen
        ]

    def run(self) -> list[Reduction]:
        """Move the biases, and reset the counts for the next step; on all ranks alike."""
        done = self._move() if self._routers else []
        for router in self._routers:
            router.counts.zero_()
        for chunk in self._chunks:
            for module in chunk.module.modules():
                # Megatron resets this with the counts, at the end of a step (finalize_model_grads.py).
                reset = getattr(module, "reset_global_aux_loss_tracker", None)
                if callable(reset):
                    reset()
        return done

    def _move(self) -> list[Reduction]:
        first = self._chunks[0]
        place = MeshPlace(first.plan.views, first.plan.rank)
        axes = tuple(axis for axis in place.dense.axis_names if axis in {"tp", *place.data_axes(False)})
        ranks = first.plan.ranks_along(*axes)
        # Counts of frozen routers travel too: this rank does not know the frozen routers of other ranks.
        total = torch.cat([router.counts.flatten().to(first.wire.device) for router in self._routers])
        done = []
        if len(ranks) > 1:
            first.wire.all_reduce(total, ranks, "sum").wait()
            axes = tuple(axis for axis in axes if place.dense.axis_length(axis) > 1)
            names = tuple(router.name for router in self._routers)
            done.append(Reduction("router", "sum", axes, ranks, names, total.numel()))
        parts = torch.split(total, [router.counts.numel() for router in self._routers])
        for router, counts in zip(self._routers, parts, strict=True):
            if not router.is_frozen and router.rate is not None:
                counts = counts.view(router.bias.shape).to(router.bias.device)
                mean = counts.sum(-1, keepdim=True) / counts.shape[-1]
                # Only the sign of the difference counts, so that the step does not depend on the number of tokens.
                router.bias.add_(torch.sign(mean - counts) * router.rate)
        return done


@torch.no_grad()
def finalize_model_grads(models: Models, num_tokens: torch.Tensor | float | None = None) -> list[Reduction]:
    """Sum every gradient over all ranks that have a part of it: once per step, after its last backward.

    All ranks of the mesh call this instead of `DistributedDataParallel.finish_grad_sync`, and raise the faults of any
    rank together. With the distributed optimizer only the elements in a plan's ``owned`` are right after it. Routers,
    which are modules with ``expert_bias`` and ``local_tokens_per_expert`` as in Megatron, get the bias of the next step
    at their rate ``config.moe_router_bias_update_rate`` or ``expert_bias_update_rate``; frozen routers keep it.

    Args:
        models: the rank's model, or its chunks of a virtual pipeline, each wrapped separately.
        num_tokens: number of tokens of this rank's batch that count in the loss, over all micro-batches; with
            ``calculate_per_token_loss``. Only the last stage's number is used. It is not changed.

    Returns:
        The exchanges in order. Sets of one rank need no exchange and are omitted.

    Raises:
        GradientError: this step's gradients were exchanged already; a gradient is late, missing or not finite, if these
            are errors; ``num_tokens`` is missing, or gradients were divided already.
        UsageError: the models are not wrapped, or not on one mesh.

    Example:
        >>> from xrank.gradients import finalize_model_grads
        >>> ddp(torch.ones(1, 2)).sum().backward()  # ddp: a module on one rank, as in DistributedDataParallel
        >>> finalize_model_grads([ddp])  # one rank exchanges nothing
        []
    """
    chunks = list_models(models)
    strange = next((chunk for chunk in chunks if not isinstance(chunk, DistributedDataParallel)), None)
    if not chunks or strange is not None:
        raise At().usage_error(
            "models must be wrapped before their gradients are finalized",
            "wrap it: DistributedDataParallel(module, GradientPlan.from_module(module, mesh))",
            type(strange).__name__ if chunks else "no model",
        )
    first = chunks[0]
    for chunk in chunks:
        if (chunk.plan.views, chunk.config) != (first.plan.views, first.config):
            raise UsageError(
                "chunks of one model must be on one mesh, with one config",
                got=f"{chunk.plan.views.main.grid!r} with {chunk.config!r}",
                want=f"{first.plan.views.main.grid!r} with {first.config!r}",
            )
    for chunk in chunks:
        if chunk.sync.is_finished:
            name = chunk.plan.parameters[0].name if chunk.plan.parameters else None
            raise At(name, chunk.plan.rank).error(
                "gradients of this step were exchanged already",
                "call zero_grad_buffer() at the start of every step, and only finalize_model_grads at its end",
                "finalize_model_grads after it, or after finish_grad_sync",
                "finalize_model_grads once in a step: a second sum would count every replica twice",
            )
    later, routers = LaterSync(chunks), RouterBiases(chunks)
    # These faults travel with the first chunk's flag: raised here, they would leave other ranks waiting.
    first.sync.faults += [*_token_faults(first, num_tokens), *later.faults, *routers.faults]
    # All chunks finish before a fault of any is raised: the other ranks wait for every chunk's exchange.
    errors = []
    for chunk in chunks:
        try:
            chunk.finish_grad_sync()
        except GradientError as error:
            errors.append(error)
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"also: {other}")
        raise errors[0]
    done = [
        Reduction("data", buffer.operation, buffer.axes, buffer.ranks, later.number(number, bucket.names), bucket.numel)
        for number, chunk in enumerate(chunks)
        for bucket in chunk.plan.buckets
        if len((buffer := chunk.plan.buffers[bucket.buffer]).ranks) > 1
    ]
    done += later.run()
    for chunk in chunks:
        # Set after all reductions: an error before leaves the gradients marked as unusable.
        chunk.later_is_due = False
    done += routers.run()
    if first.config.calculate_per_token_loss:
        done += _divide_by_tokens(chunks, num_tokens)
    return done


def _token_faults(chunk: DistributedDataParallel, num_tokens: torch.Tensor | float | None) -> list[GradientFault]:
    rank = chunk.plan.rank
    at = At(rank=rank)
    if not chunk.config.calculate_per_token_loss:
        if num_tokens is None:
            return []
        text = f"rank {rank} gives num_tokens, and its gradients were divided by the number of ranks already"
        return [at.fault(text, "set GradientConfig(calculate_per_token_loss=True), or omit num_tokens")]
    if not _is_last_stage(chunk):
        return []
    if num_tokens is None:
        text = f"rank {rank} gives no num_tokens, but calculate_per_token_loss=True divides gradients by it"
        return [at.fault(text, "on the last stage, give num_tokens: the number of counted tokens in the rank's batch")]
    got = None
    if isinstance(num_tokens, torch.Tensor) and num_tokens.numel() != 1:
        got = f"a tensor of shape {list(num_tokens.shape)}"
    else:
        try:
            number = _number(num_tokens)
            got = None if math.isfinite(number) and number >= 0 else repr(number)
        except (TypeError, ValueError, OverflowError):
            got = f"{type(num_tokens).__name__} {str(num_tokens)[:50]}"
    return [] if got is None else [at.fault(f"num_tokens of rank {rank} is not a count", "give one number", got)]


def _divide_by_tokens(
    chunks: Sequence[DistributedDataParallel], num_tokens: torch.Tensor | float | None
) -> list[Reduction]:
    """Divide all gradients by the number of tokens that the last stages of all replicas saw."""
    first = chunks[0]
    own = _number(num_tokens) if num_tokens is not None and _is_last_stage(first) else 0.0
    # float64 holds every count, and is one dtype for ranks that count in integers and ranks that do not.
    total = torch.tensor(own, dtype=torch.float64, device=first.wire.device)
    done = []
    data_axes = MeshPlace(first.plan.views, first.plan.rank).data_axes(False)
    # Other stages count 0, so that the sum over pp spreads the last stage's count; then replicas add theirs.
    for axes, ranks in ((("pp",), first.plan.ranks_along("pp")), (data_axes, first.plan.data_ranks)):
        if len(ranks) > 1:
            first.wire.all_reduce(total, ranks, "sum").wait()
            done.append(Reduction("tokens", "sum", axes, ranks, (), 1))
    # Without tokens all gradients are zero: divide by one.
    scale = torch.where(total > 0, total, 1.0).to(torch.float32).reciprocal()
    for chunk in chunks:
        chunk.scale_gradients(scale)
    return done


def _is_last_stage(chunk: DistributedDataParallel) -> bool:
    place = MeshPlace(chunk.plan.views, chunk.plan.rank)
    return place.stage() == len(chunk.plan.ranks_along("pp")) - 1


def _number(num_tokens: torch.Tensor | float) -> float:
    return float(num_tokens.item() if isinstance(num_tokens, torch.Tensor) else num_tokens)
