"""One exchange of a step, as `finalize_model_grads` reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from xrank.gradients.plan import Operation

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
