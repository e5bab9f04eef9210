"""How a recipe fits a source: each rule that is wrong, each name that it does not know, each target that is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from xrank.decisions.recipe_choice import follow_recipe
from xrank.errors import LayoutError, XrankError
from xrank.plan.source import StoredModel
from xrank.recipes.layer_rules import place_names
from xrank.recipes.matching import Match, active_rules, match, source_sides
from xrank.recipes.pairing import pair
from xrank.recipes.recipe import Recipe
from xrank.recipes.recipe_file import find_rule
from xrank.recipes.rewriting import check_repeated
from xrank.recipes.sizes import solve_sizes

_Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class UnknownName:
    """Names that no rule of a recipe knows, equal but for their numbers."""

    first: str
    count: int
    nearest: str | None
    """The recipe's side with the most similar name."""


@dataclass(frozen=True, slots=True, eq=False)
class RecipeFit:
    """A recipe, held against the names and shapes of a source."""

    found: Match
    sizes: Mapping[str, int]
    """The sizes that config.json, the trainer's arguments and the shapes give; without those of wrong rules."""
    wrong: Mapping[_Place, XrankError]
    """Place of a rule, as in `Match.used` -> why its tensors do not fit it, or its sides do not fit each other."""
    unknown: tuple[UnknownName, ...]
    whole: XrankError | None = None
    """The error of the model as a whole, if each rule fits."""
    renamed: StoredModel | None = None
    """The source under the recipe's names, if all of it fits."""

    @property
    def places(self) -> dict[_Place, str]:
        """Place of a used rule -> the line of the recipe's file that has it."""
        return {at: find_rule(self.found.recipe, at[0]) for at in self.found.used}


def fit_recipe(recipe: Recipe, model: StoredModel, config: Mapping[str, Any] | None) -> RecipeFit:
    """Hold a recipe against a source, in the direction in which it knows more of its names.

    Args:
        recipe: the recipe.
        model: the source, under its own names.
        config: the model's config.json, if it is known.

    Raises:
        ContradictionError: config.json and the trainer's arguments disagree.
    """
    names = [shard.name for shard in model.shards]
    found = max((match(recipe, names, is_reversed=back) for back in (False, True)), key=lambda one: one.num_known)
    found, told = place_names(found, config, model.args, path=model.path)
    recipe = found.recipe
    shapes = {shard.name: shard.shape for shard in model.shards}
    places = list(found.used)
    # The shapes that are read first bind the sizes, so a wrong rule may put the blame on right ones behind it.
    solved = [_solve(found, shapes, told, order) for order in (places, places[::-1])]
    sizes, wrong = min(solved, key=lambda one: len(one[1]))
    for at in places:
        if at not in wrong:
            try:
                _pair_rule(found, at, sizes)
            except LayoutError as error:
                wrong[at] = error
    repeated = found.find_repeated()
    if repeated is not None:
        try:
            check_repeated(found)
        except LayoutError as error:
            wrong[repeated[1]] = error
    unknown = tuple(_group_unknown(found))
    if wrong or not found.fits:
        return RecipeFit(found, sizes, wrong, unknown)
    try:
        return RecipeFit(found, sizes, wrong, unknown, renamed=follow_recipe(model, found, config))
    except XrankError as error:
        return RecipeFit(found, sizes, wrong, unknown, whole=error)


def _solve(
    found: Match,
    shapes: Mapping[str, tuple[int, ...]],
    told: Mapping[str, tuple[int, str]],
    order: Sequence[_Place],
) -> tuple[dict[str, int], dict[_Place, XrankError]]:
    """Return the sizes of the rules that fit, and why the others do not: each conflict takes out one rule."""
    recipe, wrong = found.recipe, dict[_Place, XrankError]()
    while True:
        tensors = [
            (found.side_at(at), name, shapes[name]) for at in order if at not in wrong for name in found.used[at]
        ]
        try:
            return solve_sizes(recipe, told, tensors, is_reversed=found.is_reversed), wrong
        except XrankError as error:
            blamed = [at for at in order if at not in wrong and error.tensor in found.used[at]]
            if not blamed:
                raise
            wrong.update(dict.fromkeys(blamed, error))


def _pair_rule(found: Match, at: _Place, sizes: Mapping[str, int]) -> None:
    """Check that both sides of a rule have the same elements.

    Raises:
        LayoutError: they do not.
    """
    rule = found.recipe.rules[at[0]]
    source = rule.sources[0 if found.is_reversed else at[1]]
    targets = {part: str(side) for part, side in rule.targets.items()}
    pair(str(source), targets, sizes, makes_copies=rule.is_copy)


def _group_unknown(found: Match) -> Iterable[UnknownName]:
    recipe = found.recipe
    sides = [
        side
        for number in active_rules(recipe, found.is_reversed)
        for side in source_sides(recipe.rules[number], found.is_reversed)
    ]
    known = {side.name.with_indices(*(0 for _ in side.name.dims)): str(side) for side in reversed(sides)}
    kinds: dict[str, list[str]] = {}
    for name in found.unknown:
        kinds.setdefault(re.sub("[0-9]+", "0", name), []).append(name)
    for kind, names in kinds.items():
        near = get_close_matches(kind, known, n=1)
        yield UnknownName(names[0], len(names), known[near[0]] if near else None)
