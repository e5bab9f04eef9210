"""The exchanges after a step's last backward: each gradient is added up over all ranks that have a part of it.

The order is that of megatron/core/distributed/finalize_model_grads.py: replicas; embedders of all stages; copies along
tp; the word table, then the position table; biases of routers; and the number of tokens, which divides all gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from xrank.errors import GradientError, UsageError
from xrank.gradients.distributed_data_parallel import DistributedDataParallel
from xrank.gradients.later_sync import LaterSync
from xrank.gradients.mesh_places import MeshPlace
from xrank.gradients.reductions import Reduction
from xrank.gradients.router_bias import RouterBiases
from xrank.gradients.wire import GradientFault

__all__ = ["Reduction", "finalize_model_grads"]

_Models: TypeAlias = DistributedDataParallel | Sequence[DistributedDataParallel]


@torch.no_grad()
def finalize_model_grads(models: _Models, num_tokens: torch.Tensor | float | None = None) -> list[Reduction]:
    """Add up every gradient over all ranks that have a part of it: once per step, after its last backward.

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
        GradientError: this step's gradients were exchanged already; a gradient came too late, is missing or is not
            finite, where these are errors; ``num_tokens`` is missing, or gradients were divided already.
        UsageError: the models are not wrapped, or not on one mesh.

    Example:
        >>> from xrank.gradients import finalize_model_grads
        >>> ddp(torch.ones(1, 2)).sum().backward()  # ddp: a module on one rank, as in DistributedDataParallel
        >>> finalize_model_grads([ddp])  # one rank exchanges nothing
        []
    """
    chunks = _chunks(models)
    for chunk in chunks:
        if chunk.sync.is_finished:
            raise _make_repeat_error(chunk)
    first = chunks[0]
    later, routers = LaterSync(chunks), RouterBiases(chunks)
    # These faults travel with the first chunk's flag: raised here, they would leave other ranks waiting.
    first.sync.faults += [*_token_faults(first, num_tokens), *later.faults, *routers.faults]
    _finish(chunks)
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


def _chunks(models: _Models) -> list[DistributedDataParallel]:
    chunks = [models] if isinstance(models, torch.nn.Module) else [*models]
    strange = next((chunk for chunk in chunks if not isinstance(chunk, DistributedDataParallel)), None)
    if not chunks or strange is not None:
        raise UsageError(
            "models must be wrapped before their gradients are finalized",
            got=type(strange).__name__ if chunks else "no model",
            want="a DistributedDataParallel of xrank.gradients, or several",
            next_step="wrap it: DistributedDataParallel(module, GradientPlan.from_module(module, mesh))",
        )
    first = chunks[0]
    for chunk in chunks:
        if (chunk.plan.views, chunk.config) != (first.plan.views, first.config):
            raise UsageError(
                "chunks of one model must be on one mesh, with one config",
                got=f"{chunk.plan.views.main.grid!r} with {chunk.config!r}",
                want=f"{first.plan.views.main.grid!r} with {first.config!r}",
            )
    return chunks


def _make_repeat_error(chunk: DistributedDataParallel) -> GradientError:
    name = chunk.plan.parameters[0].name if chunk.plan.parameters else None
    return GradientError(
        f"{name or 'a model without gradients'}: gradients of this step were exchanged already",
        tensor=name,
        rank=chunk.plan.rank,
        got="finalize_model_grads after it, or after finish_grad_sync",
        want="finalize_model_grads once in a step: a second sum would count every replica twice",
        next_step="call zero_grad_buffer() at the start of every step, and finalize_model_grads alone at its end",
    )


def _finish(chunks: Sequence[DistributedDataParallel]) -> None:
    """Finish all chunks, then raise the faults of any: the other ranks wait for every chunk's exchange."""
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


def _token_faults(chunk: DistributedDataParallel, num_tokens: torch.Tensor | float | None) -> list[GradientFault]:
    rank = chunk.plan.rank
    if not chunk.config.calculate_per_token_loss:
        if num_tokens is None:
            return []
        return [
            GradientFault(
                f"rank {rank} gives num_tokens, and its gradients were divided by the number of ranks already",
                rank,
                got=f"num_tokens={num_tokens!r} and calculate_per_token_loss=False",
                want="one division",
                next_step="set GradientConfig(calculate_per_token_loss=True), or omit num_tokens",
            )
        ]
    if not _is_last_stage(chunk):
        return []
    if num_tokens is None:
        return [
            GradientFault(
                f"rank {rank} gives no num_tokens, and its gradients are not divided otherwise",
                rank,
                got="num_tokens=None and calculate_per_token_loss=True",
                want="the tokens of this rank's batch that count in the loss",
                next_step="give num_tokens on the last stage, on each rank its own number",
            )
        ]
    if isinstance(num_tokens, torch.Tensor) and num_tokens.numel() != 1:
        got = f"a tensor of shape {list(num_tokens.shape)}"
        return [GradientFault(f"num_tokens of rank {rank} is not a count", rank, got=got, want="one number")]
    try:
        number = _number(num_tokens)
    except (TypeError, ValueError, OverflowError):
        got = f"{type(num_tokens).__name__} {str(num_tokens)[:50]}"
        return [GradientFault(f"num_tokens of rank {rank} is not a count", rank, got=got, want="one number")]
    if math.isfinite(number) and number >= 0:
        return []
    return [GradientFault(f"num_tokens of rank {rank} is not a count", rank, got=repr(number), want="0 or more")]


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
