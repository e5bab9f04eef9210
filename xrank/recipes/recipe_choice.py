"""Choose the recipe for a source, and rename and rearrange the source by it: nests are composed, no bytes are moved."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from xrank.engine.planner import Pieces, compose
from xrank.errors import ContradictionError, LayoutError, UsageError, XrankError, option
from xrank.layout.local_part import global_size
from xrank.layout.nest_table import join_rows
from xrank.layout.nests import Nest, swap
from xrank.layout.notation import size_names_of
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.layout.tensor_name import TensorName
from xrank.recipes.options import GatherOptions
from xrank.recipes.recipe import (
    Match,
    Pairing,
    Place,
    Recipe,
    Rule,
    Side,
    active_rules,
    branches_of,
    match,
    pair,
    raised_flags,
    reverse_pairing,
    single_tensors,
    source_sides,
    target_sides,
)
from xrank.recipes.recipe_file import (
    LayerChoice,
    find_rule,
    list_shipped_recipes,
    load_recipes_for,
    load_shipped_recipe,
    load_shipped_recipes,
    read_recipe,
)
from xrank.recipes.sizes import (
    check_counts,
    check_requirements,
    collect_flags,
    collect_layers,
    find_refused,
    find_unsaid,
    list_model_types,
    place_names,
    solve_sizes,
)
from xrank.storage import places
from xrank.words import likewise_text, list_text, nearest_text

_CHECK_CONFIG = "check that config.json is this model's"

_Layers: TypeAlias = Mapping[str, Sequence[LayerChoice]]
"""Group -> the layers that have its blocks, by each origin."""

_Choice: TypeAlias = tuple[int | None, str]
"""A layer, and a choice between kinds of blocks."""


class RecipeOutput(Struct, frozen=True):
    """A tensor that a recipe may produce."""

    rules: tuple[Rule, ...]
    layer: int | None
    """The first index in its name, if the name has dims."""
    at: tuple[int, int, int]
    """Sort key in the output: embeddings, layer after layer, the rest."""


def list_outcomes(matched: Match, sizes: Mapping[str, int]) -> dict[str, RecipeOutput]:
    """Return every name that the recipe may produce."""
    check_counts(matched.recipe, sizes)
    found: dict[str, RecipeOutput] = {}
    has_begun = False
    for number in active_rules(matched.recipe, matched.is_reversed):
        rule = matched.recipe.rules[number]
        targets = {"": rule.sources[0]} if matched.is_reversed else rule.targets
        for part, side in targets.items():
            has_begun = has_begun or bool(side.name.dims)
            # A size is unknown if no tensor has it: one name then stands for all that may be required.
            known = {**dict.fromkeys((size for dim in side.name.dims for size in size_names_of(dim)), 1), **sizes}
            for at in _indices_of(side.name, part, known):
                name, layer = side.name.with_indices(*at), at[0] if at else None
                phase = 1 if at else (2 if has_begun else 0)
                before = found.get(name)
                if before is None:
                    found[name] = RecipeOutput((rule,), layer, (phase, layer or 0, number))
                elif rule not in before.rules:
                    found[name] = replace(before, rules=(*before.rules, rule))
    return found


def _indices_of(name: TensorName, part: str, sizes: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    """Yield the indices in the names of a part's tensors: of all of them, if the name has no parts of its own."""
    shape = tuple(global_size(dim, sizes) for dim in name.dims)
    branches = {branch.key: branch for branch in branches_of(Side(name, ()), sizes)}
    branch = branches.get(part, branches.get(""))
    if branch is None:
        yield from product(*map(range, shape))
        return
    for steps in product(*(range(loop.count) for loop in branch.loops)):
        address = branch.start + sum(i * loop.stride for i, loop in zip(steps, branch.loops, strict=True))
        yield tuple(map(int, np.unravel_index(address, shape)))


def check_whole(
    path: str,
    matched: Match,
    outcomes: Mapping[str, RecipeOutput],
    made: Collection[str],
    flags: Mapping[str, bool],
    layers: _Layers,
) -> None:
    """Check that every tensor that the model must have was made, and no other."""
    # Stacks of layers that are numbered apart have one kind of block each, so backwards there is no choice.
    apart = {
        rule.choice
        for rule in (matched.recipe.rules if matched.is_reversed else ())
        if rule.group is not None
        for side in rule.targets.values()
        if side.name.dims[:1] != rule.sources[0].name.dims[:1]
    }
    groups = _find_groups(path, outcomes, made, layers, apart)
    for (number, _), names in matched.used.items():
        flag = matched.recipe.rules[number].when
        if flag is not None and flags.get(flag) is False:
            raise ContradictionError(
                f"{names[0]} belongs to models with {flag}, but this model is not one of them",
                tensor=names[0],
                file=path,
                got=f"{len(names)} such tensors",
                want=f"none, because {flag} is false in config.json or the trainer's args",
                next_step=_CHECK_CONFIG,
            )
    used = [matched.recipe.rules[number] for number, _ in matched.used]
    # No flag of a used rule is false here (refused above), so the known flags cannot undo one that tensors raised.
    begun = {id(rule) for rule in used}
    flags = {**dict.fromkeys(raised_flags(matched.recipe, matched.used), True), **flags}
    for name, outcome in outcomes.items():
        if name in made:
            continue
        if any(
            _needs(rule, flags, begun)
            and (
                not rule.beside
                or any(groups.get((outcome.layer, group.rpartition(".")[0])) == group for group in rule.beside)
            )
            and (
                id(rule) in begun
                if rule.group is not None and rule.choice in apart
                else _has_group(rule, matched.recipe, groups, layers, outcome.layer)
            )
            for rule in outcome.rules
        ):
            wanted = source_sides(outcome.rules[0], matched.is_reversed)[:3]
            got = f"no {' and no '.join(map(str, wanted))}"
            want = f"all tensors that the recipe {matched.recipe.name} makes"
            step = "check that the checkpoint is whole, and that config.json is this model's"
            problem = f"{name}: no tensor of the source maps to it"
            raise ContradictionError(problem, tensor=name, file=path, got=got, want=want, next_step=step)


def _find_groups(
    path: str, outcomes: Mapping[str, RecipeOutput], made: Iterable[str], layers: _Layers, apart: Collection[str]
) -> dict[_Choice, str]:
    """Return the group of each layer's blocks, for each choice."""
    found: dict[_Choice, tuple[str, str]] = {}  # with a tensor of the group
    for name in made:
        layer = outcomes[name].layer
        for rule in outcomes[name].rules:
            if rule.group is None or rule.choice in apart:
                continue
            other = found.setdefault((layer, rule.choice), (rule.group, name))[0]
            if other != rule.group:
                problem = f"layer {layer} has tensors of {' and '.join(sorted((other, rule.group)))} blocks"
                step = "check that all files belong to one model"
                raise ContradictionError(problem, tensor=name, file=path, want="one kind of block", next_step=step)
    for (number, kind), (group, name) in found.items():
        rivals = [(rival, one) for rival in layers if rival.rpartition(".")[0] == kind for one in layers[rival]]
        for rival, choice in rivals:
            if number is not None and (number in choice) != (rival == group):
                raise ContradictionError(
                    f"{name} is of the group {group}, which layer {number} lacks by {choice.origin}",
                    tensor=name,
                    file=path,
                    got=f"{group} in layer {number}",
                    want=f"{rival} in the {choice.text}",
                    next_step=f"{_CHECK_CONFIG}, and that all files belong to one model",
                )
    return {at: group for at, (group, _) in found.items()}


def _has_group(rule: Rule, recipe: Recipe, groups: Mapping[_Choice, str], layers: _Layers, layer: int | None) -> bool:
    """Return whether a layer has, or must have, blocks of the rule's group."""
    if rule.group is None:
        return True
    if (layer, rule.choice) in groups:
        return groups[layer, rule.choice] == rule.group
    # A layer without any block needs those of every group that it may have, so that a wholly lost layer is noticed.
    rivals = {other.group for other in recipe.rules if other.group is not None and other.choice == rule.choice}
    due = {group for group in rivals for choice in layers.get(group, ()) if layer is not None and layer in choice}
    return rule.group in (due or rivals - layers.keys())


def _needs(rule: Rule, flags: Mapping[str, bool], begun: set[int]) -> bool:
    """Return whether a model must have the tensors of a rule in a layer with blocks of its group."""
    if rule.within is not None and not flags.get(rule.within, False):
        return False
    if rule.unless is not None:
        return not flags.get(rule.unless, True)
    if rule.when is not None:
        return flags.get(rule.when, False)
    return not rule.optional or id(rule) in begun  # optional tensors exist in all layers or in none


def rewrite_model(
    source: StoredModel,
    matched: Match,
    sizes: Mapping[str, int],
    flags: Mapping[str, bool],
    layers: _Layers,
) -> StoredModel:
    """Return the source with the names and tensors of the recipe's targets."""
    shards = {shard.name: shard for shard in source.shards}
    made: dict[str, tuple[tuple[int, ...], list[tuple[StoredShard, Nest]]]] = {}
    dropped: dict[str, int] = {}
    notes = [("recipe", f"tensors are renamed and split by the recipe {matched.recipe.name}")]
    for place, names in matched.used.items():
        rule = matched.recipe.rules[place[0]]
        added = rule.add * (-1 if matched.is_reversed else 1)
        factor = 1 / rule.factor(sizes) if matched.is_reversed else rule.factor(sizes)
        if factor != 1.0:
            notes.append(("scaled", f"{names[0]}{likewise_text(names[1:], 3)}: multiplied by {factor:.9g}"))
        found = [shards[name] for name in names]
        scaled = {one.name: replace(one, factor=one.factor * factor, added=one.added + added) for one in found}
        shape = found[0].shape
        for pairing in _pairings(matched, place, sizes):
            own = len(pairing.target.name.dims)
            rows = shape[0] - pairing.source_shape[len(pairing.source.name.dims)] if shape else 0
            for old, new, nest in single_tensors(pairing):
                if old in scaled:
                    made.setdefault(new, (pairing.target_shape[own:], []))[1].append((scaled[old], nest))
                    dropped.update({new: rows} if rows else {})
            if rows:
                notes.append(("padding-cut", f"{names[0]}: {rows:,} rows of padding cut"))
    order = list_outcomes(matched, sizes)
    check_whole(source.path, matched, order, made.keys(), flags, layers)
    trained = matched.dropped
    if others := [name for name in matched.ignored if name not in trained]:
        notes.append(("ignored", f"{list_text(others, 3)}: left out, because they are not part of the model"))
    if trained:
        reason = f"because a model of {' or '.join(matched.recipe.model_types)} has no such tensor"
        text = f"{list_text(trained, 3)}: left out, although they were trained, {reason}"
        notes.append(("dropped", f"{text}; its outputs can differ from the trainer's"))
    return replace(
        source,
        shards=tuple(make_shard(name, *made[name]) for name in sorted(made, key=lambda name: order[name].at)),
        aliases=_new_aliases(source, matched, sizes),
        absent=(),
        recipe=matched.recipe.name,
        padding_dropped=dropped,
        notes=(*source.notes, *notes),
    )


def _pair(matched: Match, place: Place, sizes: Mapping[str, int]) -> list[Pairing]:
    """Return the pairings of the rule at a place of the recipe, from its sources to its targets."""
    rule = matched.recipe.rules[place[0]]
    source = rule.sources[0 if matched.is_reversed else place[1]]
    texts = {part: str(side) for part, side in rule.targets.items()}
    return [*pair(str(source), texts, sizes, makes_copies=rule.is_copy).values()]


def _pairings(matched: Match, place: Place, sizes: Mapping[str, int]) -> list[Pairing]:
    """Return the pairings from the names at a place of the recipe to their targets."""
    try:
        found = _pair(matched, place, sizes)
    except LayoutError as error:
        at = find_rule(matched.recipe, place[0])
        error.about(at, file=matched.recipe.name, next_step=f"correct the rule in {at}")
        raise
    return [reverse_pairing(found[place[1]])] if matched.is_reversed else found


def make_shard(name: str, shape: tuple[int, ...], parts: Iterable[tuple[StoredShard, Nest]]) -> StoredShard:
    """Return the tensor of a name and shape that parts of others make; nests map their addresses to its own.

    Recipes and transformers' conversions both end here.
    """
    by_source: dict[int, tuple[StoredShard, list[Nest]]] = {}
    for shard, nest in parts:
        by_source.setdefault(id(shard), (shard, []))[1].append(nest)
    made = []
    for shard, nests in by_source.values():
        first = nests[0]
        # Most tensors are only renamed: composing the nests of all their pieces would give the same nests again.
        if len(nests) == 1 and first.x == 0 == first.y and first.loops == ((prod(shard.shape), 1, 1),):
            made.append(replace(shard, name=name, shape=shape))
            continue
        # Only what the nests cover remains: rows of padding and of the source's other parts drop out here.
        rows, table = compose(Pieces(shard.nests.x, shard.nests), tuple(map(swap, nests)))
        made.append(
            replace(shard, name=name, shape=shape, rank=shard.rank[rows], record=shard.record[rows], nests=table)
        )
    whole, *others = made
    for other in others:
        if (other.dtype, other.factor, other.added) != (whole.dtype, whole.factor, whole.added):
            raise ContradictionError(
                f"{name}: the tensors that it is made of differ in type",
                tensor=name,
                got=other.dtype,
                want=whole.dtype,
                next_step="cast them in the trainer before they are saved",
            )
    if not others:
        return whole
    rank, record = (np.concatenate([getattr(part, key) for part in made]) for key in ("rank", "record"))
    return replace(whole, rank=rank, record=record, nests=join_rows([part.nests for part in made]))


def _new_aliases(source: StoredModel, matched: Match, sizes: Mapping[str, int]) -> dict[str, str]:
    """Return the tied names of the source under their new names; tensors that are split have no aliases."""
    tied = {*source.aliases, *source.aliases.values()}
    new_names: dict[str, str] = {}
    for place, names in matched.used.items():
        if tied.intersection(names) and len(matched.recipe.rules[place[0]].targets) == 1:
            for pairing in _pairings(matched, place, sizes):
                new_names.update((old, new) for old, new, _ in single_tensors(pairing) if old in tied)
    aliases = source.aliases.items()
    return {new_names[a]: new_names[b] for a, b in aliases if a in new_names and b in new_names}


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
        return _match_asked(source, asked, (False,))
    types = list_model_types(config)

    # Recipes that treat these names alike, such as Llama's and Gemma's, count as one: that without absent blocks, and
    # then the one for the trainer's arguments.
    def order(found: Match) -> tuple[int, bool, int]:
        groups = {rule.group for rule in found.recipe.rules}
        absent = groups - {found.recipe.rules[number].group for number, _ in found.used}
        return len(absent), find_refused(found.recipe.must, source.args) is not None, found.recipe.depth

    def find_different(fitting: Iterable[Match]) -> list[Match]:
        outcomes: dict[frozenset[object], Match] = {}
        for found in sorted(fitting, key=order):
            effect = frozenset((form, found.recipe.rules[number].outcome) for number, form in found.used)
            outcomes.setdefault(effect, found)
        return list(outcomes.values())

    if types:  # where one recipe of the model's type fits, no other is parsed, which takes longer than a small gather
        own = (match(recipe, names) for recipe in load_recipes_for(names, types))
        different = find_different(found for found in own if found.fits)
        if len(different) == 1:
            return different[0]
    is_megatron = source.format.startswith("megatron")
    # A recipe that knows no name neither fits nor is near; only an error about Megatron's names compares all recipes.
    matches = [match(recipe, names) for recipe in (load_shipped_recipes() if is_megatron else load_recipes_for(names))]
    fitting = [found for found in matches if found.fits]
    chosen = [found for found in fitting if not types or not types.isdisjoint(found.recipe.model_types)]
    different = find_different(chosen)
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
        problem = f"{source.path}: several recipes fit its names"
        raise UsageError(problem, file=source.path, got=got, want="one recipe", next_step=step)
    nearest = max(matches, key=lambda found: (found.num_known, -len(found.missing)), default=None)
    if nearest is None:
        return None
    # Near: half of the names are a recipe's, apart from a vision tower's, which are Hugging Face's own.
    telling, num_kept = nearest.num_telling, nearest.num_known - nearest.num_telling
    if is_megatron or (nearest.knows_layers and telling > 0 and 2 * telling >= len(names) - num_kept):
        raise _misfit(source, nearest, "no recipe fits its names")
    return None


def fits_any_recipe(source: StoredModel) -> bool:
    """Whether a shipped recipe knows all names as those of a training framework."""
    names = [shard.name for shard in source.shards]
    return bool(names) and any(match(recipe, names).fits for recipe in load_recipes_for(names))


def match_asked_recipe(source: StoredModel, asked: str | os.PathLike[str] | None) -> Match | None:
    """Return the match of a recipe with a source's names, in either direction; None where the names stay.

    Without a recipe, or with ``"none"``, the names stay.
    """
    return None if asked is None or asked == "none" else _match_asked(source, asked, (False, True))


def _match_asked(source: StoredModel, asked: str | os.PathLike[str], directions: Sequence[bool]) -> Match:
    recipe, names = load_recipe(os.fspath(asked)), [shard.name for shard in source.shards]
    matches = [match(recipe, names, is_reversed=is_reversed) for is_reversed in directions]
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
    names, patterns = [shard.name for shard in source.shards], found.recipe.keep_fp32
    if found.is_reversed:
        patterns = tuple(
            target_sides(found.recipe.rules[number], True)[0].name.expression
            for (number, _), old in found.used.items()
            if any(re.fullmatch(pattern, name) for pattern in patterns for name in old)
        )
    own = [pattern for pattern in patterns if any(re.fullmatch(pattern, name) for name in names)]
    return source, options.with_keep_fp32(own)


def find_padded_names(found: Match, model: StoredModel) -> frozenset[str]:
    """Return the names in which padding rows may follow, in a model that followed a recipe backwards."""
    if not found.is_reversed:
        return frozenset()
    sides = (side for number, _ in found.used for side in target_sides(found.recipe.rules[number], True))
    padded = {*found.recipe.padded}
    patterns = {
        side.name.expression for side in sides if side.dims and padded.intersection(size_names_of(side.dims[0]))
    }
    return frozenset(s.name for s in model.shards if any(re.fullmatch(pattern, s.name) for pattern in patterns))


def load_recipe(asked: str) -> Recipe:
    """Return the shipped recipe of that name, or the one in a file."""
    if asked in list_shipped_recipes():
        return load_shipped_recipe(asked)
    if os.path.isfile(asked):
        return read_recipe(asked)
    near = nearest_text(asked, list_shipped_recipes()) or "megatron-llama"
    is_folder = os.path.isdir(asked)
    problem = f"{asked} is a folder" if is_folder else f"no recipe is called {asked}, and there is no such file"
    want = f"a recipe's file, or a name such as {near}"
    step = f"run: xrank recipe list, or give {option('recipe', metavar='FILE')} a path"
    raise UsageError(problem, got=asked, want=want, next_step=step)


def _misfit(source: StoredModel, found: Match, problem: str) -> UsageError:
    wrong = []
    if found.unknown:
        wrong.append(f"{list_text(found.unknown)} unknown to {found.recipe.name}")
    if found.missing:
        wrong.append(f"nothing for {list_text(found.missing)} of {found.recipe.name}")
    name = found.recipe.name
    step = f"correct {name}; to list everything that does not fit, run: xrank recipe check {name} {source.path}"
    if name in list_shipped_recipes():
        step = f"give your own recipe with {option('recipe', metavar='FILE')}"
    known = [str(side) for rule in found.recipe.rules for side in source_sides(rule, found.is_reversed)[:1]]
    return UsageError(
        f"{source.path}: {problem}",
        tensor=found.unknown[0] if found.unknown else None,
        file=source.path,
        got="; ".join(wrong),
        want=f"names like {list_text(known, 3)}",
        next_step=f"{step}, or keep the names with {option('recipe', 'none')}",
    )


def _find_repeated(matched: Match) -> tuple[Place, LayoutError] | None:
    """Return the place of a rule that makes a tensor again, and the error about it; None if there is none.

    Rules that copy a tensor do not count. Backwards several rules may make parts of one tensor.
    """
    recipe = matched.recipe
    for name, (first, *others) in ({} if matched.is_reversed else matched.find_places()).items():
        second = next((at for at in others if at[0] != first[0]), None)
        if second is not None:
            ours, theirs = (find_rule(recipe, at[0]) for at in (first, second))
            got = f"{recipe.rules[first[0]].sources[0]} and {recipe.rules[second[0]].sources[0]}"
            return second, LayoutError(
                f"{theirs}: {name} has two rules",
                tensor=name,
                file=recipe.name,
                got=got,
                want="one rule",
                next_step=f"write one rule for those of {ours} and {theirs}",
            )
    return None


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
    repeated = _find_repeated(found)
    if repeated is not None:
        raise repeated[1]
    made = rewrite_model(source, found, sizes, flags, collect_layers(found.recipe, config, source.args))
    unsaid = find_unsaid(found.recipe, config, sizes) if config and not found.is_reversed else {}
    if unsaid:
        listed = list_text([f"{key} ({size})" for key, size in unsaid.items()], 9)
        text = f"config.json has no {listed}: transformers takes its own defaults instead"
        made = replace(made, notes=(*made.notes, ("config-keys", text)))
    return made


class UnknownName(Struct, frozen=True):
    """Names that no rule of a recipe knows, equal but for their numbers."""

    name: str
    """The first of them."""
    count: int
    nearest: str | None
    """The recipe's side with the most similar name."""


class RecipeFit(Struct, frozen=True, eq=False):
    """A recipe, held against the names and shapes of a source."""

    found: Match
    sizes: Mapping[str, int]
    """The sizes that config.json, the trainer's arguments and the shapes give; without those of wrong rules."""
    wrong: Mapping[Place, XrankError]
    """Place of a rule, as in `Match.used` -> why its tensors do not fit it, or its sides do not fit each other."""
    unknown: tuple[UnknownName, ...]
    whole: XrankError | None = None
    """The error of the model as a whole, if each rule fits."""
    renamed: StoredModel | None = None
    """The source under the recipe's names, if all of it fits."""

    @property
    def places(self) -> dict[Place, str]:
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
                _pair(found, at, sizes)
            except LayoutError as error:
                wrong[at] = error
    repeated = _find_repeated(found)
    if repeated is not None:
        wrong[repeated[0]] = repeated[1]
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
    order: Sequence[Place],
) -> tuple[dict[str, int], dict[Place, XrankError]]:
    """Return the sizes of the rules that fit, and why the others do not: each conflict takes out one rule."""
    recipe, wrong = found.recipe, dict[Place, XrankError]()
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


def _group_unknown(found: Match) -> Iterator[UnknownName]:
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
        near = nearest_text(kind, known)
        yield UnknownName(names[0], len(names), near and known[near])
