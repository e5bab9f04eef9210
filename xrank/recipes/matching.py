"""Which recipe a source's names are of: every name known, and nothing missing that a model of the kind has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from xrank.recipes.recipe import Recipe, Rule
from xrank.recipes.side import Side

__all__ = ["Match", "active_rules", "ends", "froms", "is_required", "match"]


_Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Match:
    """How a recipe fits the names that a model has."""

    recipe: Recipe
    is_reversed: bool
    """From the recipe's targets to its sources."""
    used: Mapping[_Place, tuple[str, ...]]
    """(rule, which of its `froms`) -> names of it."""
    unknown: tuple[str, ...]
    """Names that no rule has, and that are not ignored."""
    ignored: tuple[str, ...]
    missing: tuple[str, ...]
    """Hugging Face's tensors, as the recipe has them, that none of the names becomes, or is."""

    @property
    def fits(self) -> bool:
        """Whether all names are known, and every kind of tensor is there."""
        return bool(self.used) and not self.unknown and not self.missing

    @property
    def num_known(self) -> int:
        """Names that a rule has."""
        return sum(map(len, self.used.values()))

    @property
    def knows_layers(self) -> bool:
        """Whether any name is one of many layers': single names, such as ``norm.weight``, are many frameworks'."""
        return any(self.recipe.rules[number].sources[0].name.dims for number, _ in self.used)


def froms(rule: Rule, is_reversed: bool) -> tuple[Side, ...]:
    """Return the sides of a rule whose names a model may have."""
    return tuple(rule.targets.values()) if is_reversed else rule.sources


def ends(rule: Rule, is_reversed: bool) -> tuple[Side, ...]:
    """Return the sides of a rule that its names become."""
    return rule.sources[:1] if is_reversed else tuple(rule.targets.values())


def is_required(rule: Rule) -> bool:
    """Say whether a model has a rule's tensors whatever its configuration says."""
    return not rule.optional and rule.unless is None and rule.when is None


@lru_cache(maxsize=64)
def active_rules(recipe: Recipe, is_reversed: bool) -> tuple[int, ...]:
    """Return the rules that count in a direction: where several sources become one target, back goes the first."""
    if not is_reversed:
        return tuple(range(len(recipe.rules)))
    found: list[int] = []
    taken: set[str] = set()
    for number, rule in enumerate(recipe.rules):
        texts = {str(side) for side in rule.targets.values()}
        if not texts <= taken:
            found.append(number)
            taken |= texts
    return tuple(found)


def match(recipe: Recipe, names: Iterable[str], *, is_reversed: bool = False) -> Match:
    """Return how a recipe fits these names: the training framework's, or, reversed, Hugging Face's."""
    kinds = _index(recipe, is_reversed)
    ignored = [re.compile(pattern) for pattern in recipe.ignored]
    used: dict[_Place, list[str]] = {}
    unknown: list[str] = []
    left_out: list[str] = []
    for name in names:
        places = [at for at, expression in kinds.get(_kind(name), ()) if re.fullmatch(expression, name)]
        for place in places:
            used.setdefault(place, []).append(name)
        if not places:
            (left_out if any(pattern.fullmatch(name) for pattern in ignored) else unknown).append(name)
    return Match(
        recipe,
        is_reversed,
        {place: tuple(used[place]) for place in sorted(used)},
        tuple(unknown),
        tuple(left_out),
        tuple(_missing(recipe, used, is_reversed)),
    )


@lru_cache(maxsize=64)
def _index(recipe: Recipe, is_reversed: bool) -> dict[str, list[tuple[_Place, str]]]:
    """Return kind of name -> the places it may have, and their expressions, of which few are ever compiled.

    A model has thousands of names of some dozen kinds.
    """
    found: dict[str, list[tuple[_Place, str]]] = {}
    for number in active_rules(recipe, is_reversed):
        for form, side in enumerate(froms(recipe.rules[number], is_reversed)):
            kind = _kind(side.name.at(*(0 for _ in side.name.dims)))
            found.setdefault(kind, []).append(((number, form), side.name.expression))
    return found


@lru_cache(maxsize=1 << 17)
def _kind(name: str) -> str:
    return re.sub(r"[0-9]+", "0", name)


def _missing(recipe: Recipe, used: Iterable[_Place], is_reversed: bool) -> list[str]:
    """Return the targets of rules that a model must have, and that none of the used rules makes, or has."""
    made: set[str] = set()
    for number, form in used:
        sides = froms(recipe.rules[number], True)
        made.update(map(str, sides[form : form + 1] if is_reversed else sides))
    groups = {rule.group for rule in recipe.rules if rule.group is not None}
    present = {recipe.rules[number].group for number, _ in used}
    raised = {recipe.rules[number].when for number, _ in used} - {None}
    wanted: list[str] = []
    for number in active_rules(recipe, is_reversed):
        rule = recipe.rules[number]
        is_due = is_required(rule) or rule.when in raised
        if is_due and (rule.group is None or rule.group in present or not groups & present):
            wanted += map(str, rule.targets.values())
    return [text for text in dict.fromkeys(wanted) if text not in made]
