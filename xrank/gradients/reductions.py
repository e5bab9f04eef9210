"""One exchange of a step, as `finalize_model_grads` tells of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from xrank.gradients.plans.plan import Operation

__all__ = ["Reduction", "ReductionKind"]

ReductionKind: TypeAlias = Literal["data", "conditional", "tensor", "word", "position", "router", "tokens"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """What one rank exchanged with others, in one collective."""

    kind: ReductionKind
    """In the order in which they come: replicas, embedders of all stages, copies along tp, tables, routers, tokens."""
    operation: Operation
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    """Those that took part, this rank among them, ascending; two or more."""
    names: tuple[str, ...]
    """Of parameters, or of modules for routers. Of several models, they start with the model's number."""
    numel: int
    """Elements that each rank gave."""
