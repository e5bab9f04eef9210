"""Rename and rearrange a source by a recipe, in either direction: nests are composed, no bytes are moved."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from xrank.engine.planner import compose
from xrank.errors import ContradictionError, LayoutError
from xrank.layout.local_part import global_size, names_of_dim
from xrank.layout.nest_table import join_rows
from xrank.layout.nests import Nest, swap
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.layout.tensor_name import TensorName
from xrank.recipes.recipe import Match, Recipe, Rule, active_rules, raised_flags, source_sides
from xrank.recipes.recipe_file import find_rule
from xrank.recipes.side import Pairing, Side, branches_of, pair, reverse_pairing, single_tensors
from xrank.recipes.sizes import check_counts
from xrank.recipes.terms import LayerChoice
from xrank.words import likewise_text, list_text

_CHECK_CONFIG = "check that config.json is this model's"

_Layers: TypeAlias = Mapping[str, Sequence[LayerChoice]]
"""Group -> the layers that have its blocks, by each origin."""

_Choice: TypeAlias = tuple[int | None, str]
"""A layer, and a choice between kinds of blocks."""


class Outcome(Struct, frozen=True):
    """A tensor that a recipe may produce."""

    rules: tuple[Rule, ...]
    layer: int | None
    """The first index in its name, if the name has dims."""
    at: tuple[int, int, int]
    """Sort key in the output: embeddings, layer after layer, the rest."""


def list_outcomes(matched: Match, sizes: Mapping[str, int]) -> dict[str, Outcome]:
    """Return every name that the recipe may produce."""
    check_counts(matched.recipe, sizes)
    found: dict[str, Outcome] = {}
    has_begun = False
    for number in active_rules(matched.recipe, matched.is_reversed):
        rule = matched.recipe.rules[number]
        targets = {"": rule.sources[0]} if matched.is_reversed else rule.targets
        for part, side in targets.items():
            has_begun = has_begun or bool(side.name.dims)
            # A size is unknown if no tensor has it: one name then stands for all that may be required.
            known = {**dict.fromkeys((size for dim in side.name.dims for size in names_of_dim(dim)), 1), **sizes}
            for at in _indices_of(side.name, part, known):
                name, layer = side.name.with_indices(*at), at[0] if at else None
                phase = 1 if at else (2 if has_begun else 0)
                before = found.get(name)
                if before is None:
                    found[name] = Outcome((rule,), layer, (phase, layer or 0, number))
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
    outcomes: Mapping[str, Outcome],
    made: Collection[str],
    flags: Mapping[str, bool],
    layers: _Layers,
) -> None:
    """Check that every tensor that the model must have was made, and no other."""
    # Stacks of layers that are numbered apart have one kind of block each, so backwards there is no choice.
    apart = _numbered_apart(matched.recipe) if matched.is_reversed else set()
    groups = _find_groups(path, outcomes, made, layers, apart)
    _check_flags(path, matched, flags)
    used = [matched.recipe.rules[number] for number, _ in matched.used]
    # No flag of a used rule is false here (refused above), so the known flags cannot undo one that tensors raised.
    begun = {id(rule) for rule in used}
    flags = {**dict.fromkeys(raised_flags(matched.recipe, matched.used), True), **flags}
    for name, outcome in outcomes.items():
        if name in made:
            continue
        if any(
            _needs(rule, flags, begun)
            and _is_beside(rule, groups, outcome.layer)
            and (
                id(rule) in begun
                if rule.group is not None and rule.choice in apart
                else _has_group(rule, matched.recipe, groups, layers, outcome.layer)
            )
            for rule in outcome.rules
        ):
            wanted = source_sides(outcome.rules[0], matched.is_reversed)[:3]
            got = f"no {' and no '.join(map(str, wanted))}"
            want = f"all that the recipe {matched.recipe.name} makes"
            step = "check that the checkpoint is whole, and that config.json is this model's"
            problem = f"{name}: nothing in the source becomes it"
            raise ContradictionError(problem, tensor=name, file=path, got=got, want=want, next_step=step)


def _numbered_apart(recipe: Recipe) -> set[str]:
    """Return the choices whose layers have other numbers on the other side."""
    return {
        rule.choice
        for rule in recipe.rules
        if rule.group is not None
        for side in rule.targets.values()
        if side.name.dims[:1] != rule.sources[0].name.dims[:1]
    }


def _check_flags(path: str, matched: Match, flags: Mapping[str, bool]) -> None:
    """Refuse tensors that only models with a flag have, if the flag is false."""
    for (number, _), names in matched.used.items():
        flag = matched.recipe.rules[number].when
        if flag is not None and flags.get(flag) is False:
            want = f"none, because {flag} is false in config.json or the trainer's args"
            problem = f"{names[0]} belongs to models with {flag}, and this model is not one"
            got, step = f"{len(names)} such tensors", _CHECK_CONFIG
            raise ContradictionError(problem, tensor=names[0], file=path, got=got, want=want, next_step=step)


def _find_groups(
    path: str, outcomes: Mapping[str, Outcome], made: Iterable[str], layers: _Layers, apart: Collection[str]
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
                step = "check that the files are those of one model"
                raise ContradictionError(problem, tensor=name, file=path, want="one kind of block", next_step=step)
    for (number, kind), (group, name) in found.items():
        rivals = [(rival, one) for rival in layers if rival.rpartition(".")[0] == kind for one in layers[rival]]
        for rival, choice in rivals:
            if number is not None and (number in choice) != (rival == group):
                problem = f"{name} is of the group {group}, which layer {number} lacks by {choice.origin}"
                got, want = f"{group} in layer {number}", f"{rival} in the {choice.text}"
                step = f"{_CHECK_CONFIG}, and that all files are of one model"
                raise ContradictionError(problem, tensor=name, file=path, got=got, want=want, next_step=step)
    return {at: group for at, (group, _) in found.items()}


def _has_group(
    rule: Rule,
    recipe: Recipe,
    groups: Mapping[_Choice, str],
    layers: _Layers,
    layer: int | None,
) -> bool:
    """Return whether a layer has, or must have, blocks of the rule's group."""
    if rule.group is None:
        return True
    if (layer, rule.choice) in groups:
        return groups[layer, rule.choice] == rule.group
    # A layer without any block needs those of every group that it may have, so that a wholly lost layer is noticed.
    rivals = {other.group for other in recipe.rules if other.group is not None and other.choice == rule.choice}
    due = {group for group in rivals for choice in layers.get(group, ()) if layer is not None and layer in choice}
    return rule.group in (due or rivals - layers.keys())


def _is_beside(rule: Rule, groups: Mapping[_Choice, str], layer: int | None) -> bool:
    return not rule.beside or any(groups.get((layer, group.rpartition(".")[0])) == group for group in rule.beside)


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
    layers: Mapping[str, Sequence[LayerChoice]],
) -> StoredModel:
    """Return the source with the names and tensors of the recipe's targets."""
    shards = {shard.name: shard for shard in source.shards}
    made: dict[str, tuple[tuple[int, ...], list[tuple[StoredShard, Nest]]]] = {}
    dropped: dict[str, int] = {}
    notes = [("recipe", f"tensors are named and taken apart by the recipe {matched.recipe.name}")]
    for place, names in matched.used.items():
        rule = matched.recipe.rules[place[0]]
        added = rule.add * (-1 if matched.is_reversed else 1)
        factor = 1 / rule.factor(sizes) if matched.is_reversed else rule.factor(sizes)
        if factor != 1.0:
            notes.append(("scaled", f"{names[0]}{likewise_text(names[1:], 3)}: multiplied by {factor:.9g}"))
        scaled = {name: _scale(shards[name], factor, added) for name in names}
        shape = shards[names[0]].shape
        for pairing in _pairings(matched, place, sizes):
            own = len(pairing.target.name.dims)
            rows = shape[0] - pairing.source_shape[len(pairing.source.name.dims)] if shape else 0
            for old, new, nest in single_tensors(pairing):
                if old in scaled:
                    made.setdefault(new, (pairing.target_shape[own:], []))[1].append((scaled[old], nest))
                    dropped.update({new: rows} if rows else {})
            if rows:
                notes.append(("padding-cut", f"{names[0]}: {rows:,} rows of padding"))
    order = list_outcomes(matched, sizes)
    check_whole(source.path, matched, order, made.keys(), flags, layers)
    notes += _describe_ignored(matched)
    return replace(
        source,
        shards=tuple(make_shard(name, *made[name]) for name in sorted(made, key=lambda name: order[name].at)),
        aliases=_new_aliases(source, matched, sizes),
        absent=(),
        recipe=matched.recipe.name,
        padding_dropped=dropped,
        notes=(*source.notes, *notes),
    )


def _pairings(matched: Match, place: tuple[int, int], sizes: Mapping[str, int]) -> Iterable[Pairing]:
    """Return the pairings from the names at a place of the recipe to their targets."""
    rule, form = matched.recipe.rules[place[0]], place[1]
    texts = {part: str(side) for part, side in rule.targets.items()}
    try:
        found = pair(str(rule.sources[0 if matched.is_reversed else form]), texts, sizes, makes_copies=rule.is_copy)
    except LayoutError as error:
        at = find_rule(matched.recipe, place[0])
        error.about(at, file=matched.recipe.name, next_step=f"correct the rule in {at}")
        raise
    return [reverse_pairing([*found.values()][form])] if matched.is_reversed else found.values()


def _describe_ignored(matched: Match) -> Iterable[tuple[str, str]]:
    """Yield notes on the tensors that the recipe leaves out."""
    dropped = matched.dropped
    others = [name for name in matched.ignored if name not in dropped]
    if others:
        yield "ignored", f"{list_text(others, 3)}: left out, because they are not part of the model"
    if dropped:
        kinds = " or ".join(matched.recipe.model_types)
        reason = f"because a model of {kinds} has no such tensor; its outputs can differ from the trainer's"
        yield "dropped", f"{list_text(dropped, 3)}: left out, although they were trained, {reason}"


def _scale(shard: StoredShard, factor: float, added: int) -> StoredShard:
    return replace(shard, factor=shard.factor * factor, added=shard.added + added)


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
        rows, table = compose(shard.nests, tuple(map(swap, nests)))
        made.append(
            replace(shard, name=name, shape=shape, rank=shard.rank[rows], record=shard.record[rows], nests=table)
        )
    whole, *others = made
    for other in others:
        if (other.dtype, other.factor, other.added) != (whole.dtype, whole.factor, whole.added):
            problem = f"{name}: the tensors that it is made of differ in type"
            got, want, step = other.dtype, whole.dtype, "cast them in the trainer before they are saved"
            raise ContradictionError(problem, tensor=name, got=got, want=want, next_step=step)
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
