"""What happens to one gradient, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.words import join_words, ranks_text

if TYPE_CHECKING:
    from xrank.gradients.plans.plan import GradientPlan, LaterReduction, PlannedParameter

__all__ = ["explain_frozen", "explain_parameter"]


def explain_frozen(name: str) -> str:
    """Return what happens to the gradient of a parameter that has none."""
    return f"{name} is frozen: it has no gradient, no place in a buffer, and is never exchanged."


def explain_parameter(plan: GradientPlan, parameter: PlannedParameter) -> str:
    """Return in plain sentences what happens to a parameter's gradient on the plan's rank, and why."""
    sentences = [_replicas(plan, parameter), *(_later(later) for later in parameter.later), _place(plan, parameter)]
    if parameter.reasons:
        sentences.append(f"This is known because {join_words(parameter.reasons)}.")
    if parameter.aliases:
        sentences.append(f"It is also called {join_words(parameter.aliases)}.")
    return " ".join(sentences)


def _replicas(plan: GradientPlan, parameter: PlannedParameter) -> str:
    shape = f"[{', '.join(map(str, parameter.shape))}]"
    kept = _dtype(parameter.dtype)
    if parameter.grad_dtype != parameter.dtype:
        kept += f", its gradient {_dtype(parameter.grad_dtype)}"
    kind = "an expert's parameter" if plan.buffers[parameter.buffer].is_expert else "a parameter"
    start = f"{parameter.name} is {kind} of shape {shape} in {kept}."
    if len(parameter.ranks) == 1:
        added = f"Rank {plan.rank} holds the only copy, so its gradient is not added up with others"
    else:
        along = join_words(parameter.axes)
        added = f"Its gradients on {ranks_text(parameter.ranks)}, replicas along {along}, are added up"
    return f"{start} {added}{_divided(plan, parameter)}."


def _divided(plan: GradientPlan, parameter: PlannedParameter) -> str:
    if plan.config.calculate_per_token_loss:
        return "; finalize_model_grads divides by the number of tokens"
    if parameter.divisor == 1:
        return ""
    if parameter.divisor == len(parameter.ranks):
        return f" and divided by {parameter.divisor}"
    word = "but" if len(parameter.ranks) == 1 else "and"
    return f" {word} divided by {parameter.divisor}, the number of ranks that see different data"


def _later(later: LaterReduction) -> str:
    verb = "summed" if later.operation == "sum" else "averaged"
    ranks = ranks_text(later.ranks)
    return f"Later it is {verb} over {ranks} along {join_words(later.axes)}, because {later.reason}."


def _place(plan: GradientPlan, parameter: PlannedParameter) -> str:
    at = _elements(parameter.offset, parameter.offset + parameter.numel)
    where = f"It lies in bucket {parameter.bucket} of {len(plan.buckets)}, {at} of buffer {parameter.buffer}"
    if not plan.config.use_distributed_optimizer:
        return f"{where}."
    start, stop = parameter.owned
    if (start, stop) == (0, parameter.numel):
        return f"{where}, and rank {plan.rank} owns all of it."
    owners = plan.owners(parameter.name)
    if len(owners) == 1:
        return f"{where}, and rank {owners[0]} owns all of it."
    mine = f"{_elements(start, stop)} of it" if stop > start else "none of it"
    return f"{where}. {ranks_text(owners).capitalize()} own shards of it: rank {plan.rank} owns {mine}."


def _elements(start: int, stop: int) -> str:
    if stop - start < 2:
        return f"element {start}" if stop > start else "no element"
    return f"elements {start} to {stop - 1}"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
