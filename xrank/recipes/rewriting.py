"""Rename and rearrange a source by a recipe, in either direction: nests are composed, no bytes are moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np

from xrank.errors import ContradictionError, LayoutError
from xrank.layout.binding import global_size, names_of_dim
from xrank.layout.nest_rows import join_rows
from xrank.layout.nests import Nest, swap
from xrank.plan.composition import compose
from xrank.plan.source import StoredModel, StoredShard
from xrank.recipes.matching import Match, active_rules, source_sides, target_sides
from xrank.recipes.pairing import Pairing, pair, reverse_pairing, single_tensors
from xrank.recipes.recipe import Rule
from xrank.recipes.recipe_file import find_rule

__all__ = ["join_shards", "move_shard", "rewrite_model"]


def rewrite_model(
    source: StoredModel, matched: Match, sizes: Mapping[str, int], flags: Mapping[str, bool]
) -> StoredModel:
    """Return the source with the names and tensors of the recipe's targets.

    Args:
        source: the source as read.
        matched: the match of the recipe with its names.
        sizes: all sizes of the recipe.
        flags: the model's flags, from config.json or the trainer's arguments.

    Raises:
        IncompleteError: the source lacks the elements of a required tensor.
        ContradictionError: a layer has tensors of two kinds of blocks.
        LayoutError: the two sides of a rule do not fit.
    """
    shards = {shard.name: shard for shard in source.shards}
    made: dict[str, list[StoredShard]] = {}
    dropped: dict[str, int] = {}
    notes = [("recipe", f"tensors are named and taken apart by the recipe {matched.recipe.name}")]
    for place, names in matched.used.items():
        wanted = set(names)
        for pairing in _pairings(matched, place, sizes):
            own = len(pairing.target.name.dims)
            rows = _count_padding(pairing, shards[names[0]].shape)
            for old, new, nest in single_tensors(pairing):
                if old in wanted:
                    made.setdefault(new, []).append(move_shard(shards[old], new, pairing.target_shape[own:], nest))
                    dropped.update({new: rows} if rows else {})
            if rows:
                notes.append(("padding-cut", f"{names[0]}: {rows:,} rows of padding"))
    order = _order(matched, sizes)
    _check_whole(source, matched, order, flags, made.keys())
    if matched.ignored:
        notes.append(("ignored", f"{len(matched.ignored)} tensors that are not part of the model are left out"))
    return replace(
        source,
        shards=tuple(join_shards(name, made[name]) for name in sorted(made, key=lambda name: order[name].at)),
        aliases=_new_aliases(source, matched, sizes),
        absent=(),
        recipe=matched.recipe.name,
        padding_dropped=dropped,
        notes=(*source.notes, *notes),
    )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A tensor that a recipe may produce."""

    rules: tuple[Rule, ...]
    layer: int | None
    """The first index in its name, if the name has dims."""
    at: tuple[int, int, int]
    """Sort key in the output: embeddings, layer after layer, the rest."""


def _order(matched: Match, sizes: Mapping[str, int]) -> dict[str, _Outcome]:
    """Return every name that the recipe may produce."""
    found: dict[str, _Outcome] = {}
    has_begun = False
    for number in active_rules(matched.recipe, matched.is_reversed):
        rule = matched.recipe.rules[number]
        for side in target_sides(rule, matched.is_reversed):
            has_begun = has_begun or bool(side.name.dims)
            # A size is unknown if no tensor has it: one name then stands for all that may be required.
            known = {**dict.fromkeys((size for dim in side.name.dims for size in names_of_dim(dim)), 1), **sizes}
            for at in product(*(range(global_size(dim, known)) for dim in side.name.dims)):
                name, layer = side.name.with_indices(*at), at[0] if at else None
                phase = 1 if at else (2 if has_begun else 0)
                before = found.get(name)
                if before is None:
                    found[name] = _Outcome((rule,), layer, (phase, layer or 0, number))
                elif rule not in before.rules:
                    found[name] = replace(before, rules=(*before.rules, rule))
    return found


def _pairings(matched: Match, place: tuple[int, int], sizes: Mapping[str, int]) -> Iterable[Pairing]:
    """Return the pairings from the names at a place of the recipe to their targets.

    Raises:
        LayoutError: the two sides of the rule do not fit; the error names the rule's line.
    """
    rule, form = matched.recipe.rules[place[0]], place[1]
    texts = {part: str(side) for part, side in rule.targets.items()}
    try:
        found = pair(str(rule.sources[0 if matched.is_reversed else form]), texts, sizes)
    except LayoutError as error:
        at = find_rule(matched.recipe, place[0])
        error.about(at, file=matched.recipe.name, next_step=f"correct the rule in {at}")
        raise
    return [reverse_pairing([*found.values()][form])] if matched.is_reversed else found.values()


def _count_padding(pairing: Pairing, shape: Sequence[int]) -> int:
    own = len(pairing.source.name.dims)
    return shape[0] - pairing.source_shape[own] if shape else 0


def move_shard(shard: StoredShard, name: str, shape: tuple[int, ...], *parts: Nest) -> StoredShard:
    """Return the pieces of a target that one source holds; `parts` map source addresses to target addresses."""
    nest = parts[0]
    # Most tensors are only renamed: composing the nests of all their pieces would give the same nests again.
    if len(parts) == 1 and nest.x == 0 == nest.y and nest.loops == ((prod(shard.shape), 1, 1),):
        return replace(shard, name=name, shape=shape)
    # Only what the parts cover remains: rows of padding and of the source's other parts drop out here.
    rows, nests = compose(shard.nests, tuple(map(swap, parts)))
    return StoredShard(name, shard.dtype, shape, shard.rank[rows], shard.record[rows], nests)


def join_shards(name: str, parts: Sequence[StoredShard]) -> StoredShard:
    """Return one shard with the pieces of all parts."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for other in parts[1:]:
        if other.dtype != first.dtype:
            raise ContradictionError(
                f"{name}: the tensors that it is made of differ in type",
                tensor=name,
                got=other.dtype,
                want=first.dtype,
                next_step="cast them in the trainer before they are saved",
            )
    rank, record = (np.concatenate([getattr(part, key) for part in parts]) for key in ("rank", "record"))
    return StoredShard(name, first.dtype, first.shape, rank, record, join_rows([part.nests for part in parts]))


def _check_whole(
    source: StoredModel,
    matched: Match,
    outcomes: Mapping[str, _Outcome],
    flags: Mapping[str, bool],
    made: Iterable[str],
) -> None:
    """Check that every required tensor was made."""
    there = set(made)
    groups: dict[int | None, set[str]] = {}
    for name in there:
        for rule in outcomes[name].rules:
            if rule.group is not None:
                groups.setdefault(outcomes[name].layer, set()).add(rule.group)
    for layer, found in groups.items():
        if len(found) > 1:
            raise ContradictionError(
                f"layer {layer} has tensors of {' and '.join(sorted(found))} blocks",
                file=source.path,
                want="one kind of block in each layer",
                next_step="check that the files are those of one model",
            )
    used = [matched.recipe.rules[number] for number, _ in matched.used]
    for (number, _), names in matched.used.items():
        flag = matched.recipe.rules[number].when
        if flag is not None and flags.get(flag) is False:
            raise ContradictionError(
                f"{names[0]} belongs to models with {flag}, and this model is not one",
                tensor=names[0],
                file=source.path,
                got=f"{len(names)} such tensors",
                want=f"none, because {flag} is false in config.json or the trainer's args",
                next_step="check that config.json is this model's",
            )
    # No flag of a used rule is false here (refused above), so the known flags cannot undo one that tensors raised.
    begun = {id(rule) for rule in used}
    flags = {**{rule.when: True for rule in used if rule.when is not None}, **flags}
    for name, outcome in outcomes.items():
        if name in there:
            continue
        if any(_needs(rule, flags, begun, groups, outcome.layer) for rule in outcome.rules):
            wanted = source_sides(outcome.rules[0], matched.is_reversed)[:3]
            raise ContradictionError(
                f"{name}: nothing in the source becomes it",
                tensor=name,
                file=source.path,
                got=f"no {' and no '.join(map(str, wanted))}",
                want=f"all that the recipe {matched.recipe.name} makes",
                next_step="check that the checkpoint is whole, and that config.json is this model's",
            )


def _needs(
    rule: Rule, flags: Mapping[str, bool], begun: set[int], groups: Mapping[int | None, set[str]], layer: int | None
) -> bool:
    """Return whether a model must have the tensors of a rule in that layer."""
    # A layer without any block needs those of every group, so that a wholly lost layer is noticed.
    if rule.group is not None and groups and rule.group not in groups.get(layer, {rule.group}):
        return False
    if rule.unless is not None:
        return not flags.get(rule.unless, True)
    if rule.when is not None:
        return flags.get(rule.when, False)
    return not rule.optional or id(rule) in begun  # optional tensors exist in all layers or in none


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
