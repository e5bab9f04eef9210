"""What a reader is: how a source format is recognised, and described as a stored model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from xrank.layout import LayoutMap
from xrank.plan.source import StoredModel

__all__ = ["Hints", "Reader"]


@dataclass(frozen=True, slots=True)
class Hints:
    """What the caller knows that a source may not record."""

    layouts: LayoutMap | None = None
    """Layouts for tensors that record none."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Global shapes by name, of the base model; they may decide how a tensor without a layout was cut."""
    tied_to: Callable[[str], str | None] | None = None
    """Returns the name in `shapes` of the tensor that a name is another one of; the base model need not have both."""
    is_left_out: Callable[[str], bool] | None = None
    """Says whether the caller leaves a tensor out: such a one need not be placed."""
    needs_config: bool = True
    """Whether the source's own config will be used; where not, ranks may disagree about it."""
    needs_layouts: bool = False
    """Whether the model is to say how its ranks say that each tensor is cut (`StoredModel.layouts`)."""
    prove_shapes: Callable[[Mapping[str, tuple[int, ...]]], str | None] | None = None
    """Proves global shapes by name that a reader had to infer: the recipe that they fit, or None where none knows the
    names; raises where they contradict each other or the config (`xrank.recipes.shape_proof.prove_shapes`)."""


class Reader(Protocol):
    """Describes one source format from metadata alone.

    Call order: `recognise` for any path; `read` only where that returned None. Neither writes, imports the framework
    that wrote the source, or runs anything found in it. Readers hold no state; any thread may call them.
    """

    name: str
    """The format, as options and reports name it."""

    def recognise(self, path: str) -> str | None:
        """Return None if the path holds this format, otherwise the reason why not, in a few words."""

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor's bytes lie.

        Raises:
            IncompleteError: a rank or a file is missing.
            ContradictionError: parts disagree.
            CorruptError, UnsafeError: a file is damaged or hostile.
            LayoutError: how a tensor was cut is not known.
        """
