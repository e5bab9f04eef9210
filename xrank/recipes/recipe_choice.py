"""The recipe for a source: the requested one, or the one that knows all of its names; and how well one fits."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from xrank.errors import LayoutError, UsageError, XrankError, option
from xrank.layout.local_part import names_of_dim
from xrank.layout.stored_model import StoredModel
from xrank.recipes.options import GatherOptions
from xrank.recipes.recipe import Match, Recipe, active_rules, match, source_sides, target_sides
from xrank.recipes.recipe_file import (
    find_rule,
    list_shipped_recipes,
    load_recipes_for,
    load_shipped_recipe,
    load_shipped_recipes,
    read_recipe,
)
from xrank.recipes.side import pair
from xrank.recipes.sizes import (
    check_requirements,
    collect_flags,
    collect_layers,
    is_refused,
    list_model_types,
    place_names,
    solve_sizes,
)
from xrank.storage import places
from xrank.words import list_text


def choose_recipe(
    source: StoredModel, config: Mapping[str, Any] | None, asked: str | os.PathLike[str] | None
) -> Match | None:
    """Return the match of the recipe that fits a source under training names; None where the names stay.

    `asked` is a shipped recipe's name, a file, ``"none"``, or None for the recipe that fits.
    """
    names = [shard.name for shard in source.shards]
    if asked == "none" or not names:
        return None
    if asked is not None:
        found = match(load_recipe(os.fspath(asked)), names)
        if not found.fits:
            raise _misfit(source, found, "the recipe does not fit")
        return found
    is_megatron = source.format.startswith("megatron")
    # A recipe that knows no name neither fits nor is near; only an error about Megatron's names compares all recipes.
    matches = [match(recipe, names) for recipe in (load_shipped_recipes() if is_megatron else load_recipes_for(names))]
    fitting = [found for found in matches if found.fits]
    types = list_model_types(config)
    chosen = [found for found in fitting if not types or not types.isdisjoint(found.recipe.model_types)]
    # Recipes that treat these names alike, such as Llama's and Gemma's, count as one: that without absent blocks, and
    # then the one for the trainer's arguments.
    ordered = sorted(
        chosen,
        key=lambda found: (
            _count_absent_groups(found),
            is_refused(found.recipe, source.args),
            found.recipe.depth,
        ),
    )
    different = list({_outcome(found): found for found in reversed(ordered)}.values())
    if len(different) == 1:
        return different[0]
    if fitting:
        recipes = [found.recipe for found in chosen or fitting]
        choose = f"choose {' or '.join(option('recipe', one.name) for one in recipes)} as the training was configured"
        if not chosen:  # other model types use the same names for other computations
            choose = f"give a recipe for this model as {option('recipe', metavar='FILE')}"
        says = f", and config.json says model_type {' and '.join(map(repr, sorted(types)))}" if types else ""
        got = f"names of {', '.join(f'{one.name} ({one.framework})' for one in recipes)}{says}"
        step = f"{choose}, or keep the names with {option('recipe', 'none')}"
        problem = f"{source.path}: which recipe its names are of is not clear"
        raise UsageError(problem, file=source.path, got=got, want="one recipe", next_step=step)
    nearest = max(matches, key=lambda found: (found.num_known, -len(found.missing)), default=None)
    is_near = nearest is not None and nearest.knows_layers and _counts_as_near(nearest, len(names))
    if nearest is not None and (is_near or is_megatron):
        raise _misfit(source, nearest, "no recipe fits its names")
    return None


def _counts_as_near(found: Match, num_names: int) -> bool:
    """Return whether half of the names are a recipe's, apart from a vision tower's, which are Hugging Face's own."""
    num_kept = found.num_known - found.num_telling
    return found.num_telling > 0 and 2 * found.num_telling >= num_names - num_kept


def fits_any_recipe(source: StoredModel) -> bool:
    """Whether a shipped recipe knows all names as those of a training framework."""
    names = [shard.name for shard in source.shards]
    return bool(names) and any(match(recipe, names).fits for recipe in load_recipes_for(names))


def match_asked_recipe(source: StoredModel, asked: str | os.PathLike[str] | None) -> Match | None:
    """Return the match of a recipe with a source's names, in either direction; None where the names stay.

    Without a recipe, or with ``"none"``, the names stay.
    """
    if asked is None or asked == "none":
        return None
    recipe, names = load_recipe(os.fspath(asked)), [shard.name for shard in source.shards]
    matches = [match(recipe, names, is_reversed=is_reversed) for is_reversed in (False, True)]
    found = next((found for found in matches if found.fits), None)
    if found is None:
        raise _misfit(source, max(matches, key=lambda found: found.num_known), "the recipe does not fit")
    return found


def apply_recipe(
    source: StoredModel, found: Match | None, config: Mapping[str, Any] | None, options: GatherOptions
) -> tuple[StoredModel, GatherOptions]:
    """Return the source renamed by `follow_recipe`, and options that keep its fp32 names; without a match, as given."""
    if found is None:
        return source, options
    source = follow_recipe(source, found, config)
    return source, options.with_keep_fp32(_names_in_fp32(found, source))


def _names_in_fp32(found: Match, model: StoredModel) -> tuple[str, ...]:
    """Return regular expressions for the names that a cast leaves alone, in a model that followed its recipe."""
    names = [shard.name for shard in model.shards]
    patterns = found.recipe.keep_fp32
    if found.is_reversed:
        patterns = tuple(
            target_sides(found.recipe.rules[number], True)[0].name.expression
            for (number, _), old in found.used.items()
            if any(re.fullmatch(pattern, name) for pattern in patterns for name in old)
        )
    return tuple(pattern for pattern in patterns if any(re.fullmatch(pattern, name) for name in names))


def find_padded_names(found: Match, model: StoredModel) -> frozenset[str]:
    """Return the names in which padding rows may follow, in a model that followed a recipe backwards."""
    if not found.is_reversed:
        return frozenset()
    sides = (side for number, _ in found.used for side in target_sides(found.recipe.rules[number], True))
    padded = {*found.recipe.padded}
    patterns = {side.name.expression for side in sides if side.dims and padded.intersection(names_of_dim(side.dims[0]))}
    return frozenset(s.name for s in model.shards if any(re.fullmatch(pattern, s.name) for pattern in patterns))


def _count_absent_groups(found: Match) -> int:
    groups = {rule.group for rule in found.recipe.rules}
    return len(groups - {found.recipe.rules[number].group for number, _ in found.used})


def _outcome(found: Match) -> frozenset[object]:
    return frozenset((form, found.recipe.rules[number].outcome) for number, form in found.used)


def load_recipe(asked: str) -> Recipe:
    """Return the shipped recipe of that name, or the one in a file."""
    if asked in list_shipped_recipes():
        return load_shipped_recipe(asked)
    if os.path.isfile(asked):
        return read_recipe(asked)
    from difflib import get_close_matches

    near = get_close_matches(asked, list_shipped_recipes(), n=1)
    is_folder = os.path.isdir(asked)
    problem = f"{asked} is a folder" if is_folder else f"no recipe is called {asked}, and it is not a file"
    want = f"a recipe's file, or a name such as {(*near, 'megatron-llama')[0]}"
    step = f"run: xrank recipe list, or give {option('recipe', metavar='FILE')} a path"
    raise UsageError(problem, got=asked, want=want, next_step=step)


def _misfit(source: StoredModel, found: Match, problem: str) -> UsageError:
    wrong = []
    if found.unknown:
        wrong.append(f"{list_text(found.unknown)} unknown to {found.recipe.name}")
    if found.missing:
        wrong.append(f"nothing for {list_text(found.missing)} of {found.recipe.name}")
    name = found.recipe.name
    own = f"correct {name}; to see all of its misfits, run: xrank recipe check {name} {source.path}"
    other = f"give a recipe of your own with {option('recipe', metavar='FILE')}"
    known = list_text(
        [str(side) for rule in found.recipe.rules for side in source_sides(rule, found.is_reversed)[:1]], 3
    )
    step = other if name in list_shipped_recipes() else own
    step = f"{step}, or keep the names with {option('recipe', 'none')}"
    tensor, want = found.unknown[0] if found.unknown else None, f"names like {known}"
    problem = f"{source.path}: {problem}"
    return UsageError(problem, tensor=tensor, file=source.path, got="; ".join(wrong), want=want, next_step=step)


def check_repeated(matched: Match) -> None:
    """Refuse a recipe with two rules for one tensor."""
    found = matched.find_repeated()
    if found is None:
        return
    first, second, name = found
    recipe = matched.recipe
    ours, theirs = (f"{find_rule(recipe, at[0])}" for at in (first, second))
    got = f"{recipe.rules[first[0]].sources[0]} and {recipe.rules[second[0]].sources[0]}"
    step = f"write one rule for those of {ours} and {theirs}"
    raise LayoutError(
        f"{theirs}: {name} has two rules", tensor=name, file=recipe.name, got=got, want="one rule", next_step=step
    )


def follow_recipe(source: StoredModel, found: Match, config: Mapping[str, Any] | None) -> StoredModel:
    """Return the source under the names of a recipe; config, arguments and shapes prove every size."""
    folder = source.path if places.is_folder(source.path) else os.path.dirname(source.path) or os.curdir
    check_requirements(found.recipe, config, None if found.is_reversed else source.args, folder)
    found, told = place_names(found, config, source.args, path=source.path, folder=folder)
    if not found.fits:
        raise _misfit(source, found, "the recipe does not fit")
    shapes = {shard.name: shard.shape for shard in source.shards}
    tensors = [(side, name, shapes[name]) for side, name in found.find_sides()]
    sizes = solve_sizes(found.recipe, told, tensors, is_reversed=found.is_reversed, folder=folder)
    flags = collect_flags(found.recipe, config, source.args)
    check_repeated(found)
    from xrank.recipes.rewriting import rewrite_model

    return rewrite_model(source, found, sizes, flags, collect_layers(found.recipe, config, source.args))


_Place = tuple[int, int]


class UnknownName(Struct, frozen=True):
    """Names that no rule of a recipe knows, equal but for their numbers."""

    first: str
    count: int
    nearest: str | None
    """The recipe's side with the most similar name."""


class RecipeFit(Struct, frozen=True, eq=False):
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
    """Hold a recipe against a source, in the direction in which it knows more of its names."""
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
    """Check that both sides of a rule have the same elements."""
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
        from difflib import get_close_matches

        near = get_close_matches(kind, known, n=1)
        yield UnknownName(names[0], len(names), known[near[0]] if near else None)
