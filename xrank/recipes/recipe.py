"""Recipes as data: rules from the tensors of a training framework to Hugging Face's, and the keys of their sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod, sqrt

from xrank.recipes.side import Side

_SIZE = r"(?:[A-Za-z_]\w*|[1-9][0-9]{0,8})"
_ROOT = re.compile(rf"sqrt\(({_SIZE}(?: {_SIZE}){{0,7}})\)")


def size_texts(times: str) -> tuple[str, ...]:
    """Return the sizes in ``sqrt(SIZE SIZE ...)``; none if the text is not of this form."""
    found = _ROOT.fullmatch(times)
    return () if found is None else tuple(found[1].split())


@dataclass(frozen=True, slots=True)
class Rule:
    """One source tensor, or many of one kind, and the tensors that they become.

    Args:
        sources: the source as the file writes it, then its stacked forms.
        targets: part of the source -> the tensor that it becomes; one entry for a source without parts.
        unless: a flag; if it is true, the source may lack the tensor.
        when: a flag; a model has the tensor exactly if it is true. A model has all tensors of one flag or none.
        group: the kind of block, such as dense or sparse, that the tensor belongs to; each layer has one kind. Where
            layers have several choices, the text before a dot names the choice: ``mixer.attention``, ``mlp.dense``.
        optional: whether a model may lack the tensor.
        add: a number that is added to the source's values, and backwards taken from the target's.
        times: the root of a product of sizes, ``sqrt(n d)``, by which values are multiplied, and backwards divided.
        beside: groups; backwards, where several sources become the target, the rule is for layers with their blocks.
    """

    sources: tuple[Side, ...]
    targets: Mapping[str, Side]
    unless: str | None = None
    when: str | None = None
    group: str | None = None
    optional: bool = False
    beside: tuple[str, ...] = ()
    add: int = 0
    times: str | None = None
    within: str | None = None
    """A flag that only tensors raise: the rule's tensors exist in models with the stack of layers of this name."""
    is_copy: bool = False
    """Whether the targets are copies of what another rule makes of the source."""
    line: str | None = None
    """The source in the recipe's file, of a rule for one layer."""

    def factor(self, sizes: Mapping[str, int]) -> float:
        """Return the number that `times` stands for; 1 without it."""
        texts = size_texts(self.times) if self.times is not None else ()
        return sqrt(prod(int(text) if text.isdecimal() else sizes[text] for text in texts))

    @property
    def choice(self) -> str:
        """The choice between kinds of blocks that the group belongs to; empty if there is only one, or no group."""
        return (self.group or "").rpartition(".")[0]

    @property
    def outcome(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The rule as texts, equal for rules of two recipes with the same effect."""
        targets = tuple((part, str(side)) for part, side in sorted(self.targets.items()))
        if self.add:
            targets += (("add", str(self.add)),)
        return str(self.sources[0]), targets if self.times is None else (*targets, ("times", self.times))


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """The content of a recipe file."""

    name: str
    framework: str
    rules: tuple[Rule, ...]
    model_types: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    keep_fp32: tuple[str, ...] = ()
    config: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Size, flag, group or fact -> terms over the keys of config.json; the first known term counts."""
    args: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    """Groups that some layers of every model have."""
    must: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Key of the trainer's arguments -> the values it may have, if it is present."""
    must_config: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """The same of the keys of config.json."""
    dropped: tuple[str, ...] = ()
    """Patterns of names of trained tensors that the target model lacks a place for."""
    by_layer: tuple[str, ...] = ()
    """Sizes and flags that each layer has of its own."""
    depth: int = 0
    """Number of recipes that it extends, one after the other."""
