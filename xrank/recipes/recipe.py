"""Recipes as data: rules from a training framework's tensors to Hugging Face's, and what says the sizes in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xrank.recipes.side import Side

__all__ = ["Recipe", "Rule"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of one tensor of the source, or of many of one kind.

    Args:
        sources: the source as the file has it, then its stacked forms.
        targets: part of the source -> the tensor that it becomes; one entry for a source without parts.
        unless: a flag under which the source may lack the tensor.
        when: a flag under which a model has the tensor, and otherwise has not; all tensors of one flag go together.
        group: tensors of which a layer has one group or another, such as a dense and a sparse block.
        optional: whether a model may lack it.
    """

    sources: tuple[Side, ...]
    targets: Mapping[str, Side]
    unless: str | None = None
    when: str | None = None
    group: str | None = None
    optional: bool = False

    @property
    def outcome(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """What it does, as texts: rules of two recipes that do the same have the same."""
        return str(self.sources[0]), tuple((part, str(side)) for part, side in sorted(self.targets.items()))


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """A recipe file's content."""

    name: str
    framework: str
    rules: tuple[Rule, ...]
    model_types: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    keep_fp32: tuple[str, ...] = ()
    config: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Size or flag -> terms over config.json's keys, the first that is known counts."""
    args: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    must: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Key of the trainer's arguments -> the values it may have, where it is there."""
