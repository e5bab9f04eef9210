"""Plain sentences about the gradient of one parameter."""

from __future__ import annotations

from collections.abc import Sequence

from xrank.gradients.config import GradientConfig
from xrank.gradients.plans.plan_entries import LaterReduction, PlannedBuffer, PlannedParameter
from xrank.words import join_words, ranks_text


def explain_frozen(name: str) -> str:
    """Return the sentence for a parameter without a gradient."""
    return f"{name} is frozen: it has no gradient, no place in a buffer, and is never exchanged."


def explain_parameter(
    parameter: PlannedParameter,
    buffer: PlannedBuffer,
    config: GradientConfig,
    num_buckets: int,
    owners: Sequence[int],
) -> str:
    """Return plain sentences on the exchanges of a parameter's gradient on the plan's rank, with their reasons.

    Args:
        parameter: the parameter.
        buffer: its buffer.
        config: the plan's.
        num_buckets: number of buckets in the plan.
        owners: ranks that own elements of the parameter.
    """
    sentences = [
        _explain_replicas(parameter, buffer, config),
        *map(_explain_later, parameter.later),
        _explain_place(parameter, buffer, config, num_buckets, owners),
    ]
    if parameter.reasons:
        sentences.append(f"This is known because {join_words(parameter.reasons)}.")
    if parameter.aliases:
        sentences.append(f"It is also called {join_words(parameter.aliases)}.")
    return " ".join(sentences)


def _explain_replicas(parameter: PlannedParameter, buffer: PlannedBuffer, config: GradientConfig) -> str:
    shape = f"[{', '.join(map(str, parameter.shape))}]"
    kept = _dtype(parameter.dtype)
    if parameter.grad_dtype != parameter.dtype:
        kept += f", its gradient {_dtype(parameter.grad_dtype)}"
    kind = "an expert's parameter" if buffer.is_expert else "a parameter"
    start = f"{parameter.name} is {kind} of shape {shape} in {kept}."
    if len(parameter.ranks) == 1:
        added = f"Rank {buffer.rank} holds the only copy, so its gradient is not added up with others"
    else:
        along = join_words(parameter.axes)
        added = f"Its gradients on {ranks_text(parameter.ranks)}, replicas along {along}, are added up"
    return f"{start} {added}{_explain_divisor(parameter, config)}."


def _explain_divisor(parameter: PlannedParameter, config: GradientConfig) -> str:
    if config.calculate_per_token_loss:
        return "; finalize_model_grads divides by the number of tokens"
    if parameter.divisor == 1:
        return ""
    if parameter.divisor == len(parameter.ranks):
        return f" and divided by {parameter.divisor}"
    word = "but" if len(parameter.ranks) == 1 else "and"
    return f" {word} divided by {parameter.divisor}, the number of ranks that see different data"


def _explain_later(later: LaterReduction) -> str:
    verb = "summed" if later.operation == "sum" else "averaged"
    ranks, axes = ranks_text(later.ranks), join_words(later.axes)
    return f"Later it is {verb} over {ranks} along {axes}, because {later.reason}."


def _explain_place(
    parameter: PlannedParameter, buffer: PlannedBuffer, config: GradientConfig, num_buckets: int, owners: Sequence[int]
) -> str:
    at = _list_elements(parameter.offset, parameter.offset + parameter.numel)
    where = f"It lies in bucket {parameter.bucket} of {num_buckets}, {at} of buffer {parameter.buffer}"
    if not config.use_distributed_optimizer:
        return f"{where}."
    start, stop = parameter.owned
    if (start, stop) == (0, parameter.numel):
        return f"{where}, and rank {buffer.rank} owns all of it."
    if len(owners) == 1:
        return f"{where}, and rank {owners[0]} owns all of it."
    mine = f"{_list_elements(start, stop)} of it" if stop > start else "none of it"
    return f"{where}. {ranks_text(owners).capitalize()} own shards of it: rank {buffer.rank} owns {mine}."


def _list_elements(start: int, stop: int) -> str:
    if stop - start < 2:
        return f"element {start}" if stop > start else "no element"
    return f"elements {start} to {stop - 1}"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
