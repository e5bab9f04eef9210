"""Rename and rearrange a source by a recipe, in either direction: nests are composed, no bytes are moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from xrank.errors import ContradictionError, LayoutError
from xrank.layout.nest_table import join_rows
from xrank.layout.nests import Nest, swap
from xrank.plan.planner import compose
from xrank.plan.source import StoredModel, StoredShard
from xrank.recipes.layer_choice import LayerChoice
from xrank.recipes.matching import Match
from xrank.recipes.outcomes import check_whole, list_outcomes
from xrank.recipes.pairing import Pairing, pair, reverse_pairing, single_tensors
from xrank.recipes.recipe_file import find_rule
from xrank.words import likewise_text, list_text


def rewrite_model(
    source: StoredModel,
    matched: Match,
    sizes: Mapping[str, int],
    flags: Mapping[str, bool],
    layers: Mapping[str, Sequence[LayerChoice]],
) -> StoredModel:
    """Return the source with the names and tensors of the recipe's targets.

    Args:
        source: the source as read.
        matched: the match of the recipe with its names.
        sizes: all sizes of the recipe.
        flags: the model's flags, from config.json or the trainer's arguments.
        layers: group -> the layers that have its blocks, by each origin.

    Raises:
        IncompleteError: the source lacks the elements of a required tensor.
        ContradictionError: a layer has tensors of two kinds of blocks, or of another kind than `layers` gives it.
        LayoutError: the two sides of a rule do not fit.
    """
    check_repeated(matched)
    shards = {shard.name: shard for shard in source.shards}
    made: dict[str, list[StoredShard]] = {}
    dropped: dict[str, int] = {}
    notes = [("recipe", f"tensors are named and taken apart by the recipe {matched.recipe.name}")]
    for place, names in matched.used.items():
        wanted = set(names)
        rule = matched.recipe.rules[place[0]]
        added = rule.add * (-1 if matched.is_reversed else 1)
        factor = 1 / rule.factor(sizes) if matched.is_reversed else rule.factor(sizes)
        if factor != 1.0:
            notes.append(("scaled", f"{names[0]}{likewise_text(names[1:], 3)}: multiplied by {factor:.9g}"))
        for pairing in _pairings(matched, place, sizes):
            own = len(pairing.target.name.dims)
            rows = _count_padding(pairing, shards[names[0]].shape)
            for old, new, nest in single_tensors(pairing):
                if old in wanted:
                    shard = move_shard(shards[old], new, pairing.target_shape[own:], nest)
                    made.setdefault(new, []).append(
                        replace(shard, factor=shard.factor * factor, added=shard.added + added)
                    )
                    dropped.update({new: rows} if rows else {})
            if rows:
                notes.append(("padding-cut", f"{names[0]}: {rows:,} rows of padding"))
    order = list_outcomes(matched, sizes)
    check_whole(source.path, matched, order, made.keys(), flags, layers)
    notes += _describe_ignored(matched)
    return replace(
        source,
        shards=tuple(join_shards(name, made[name]) for name in sorted(made, key=lambda name: order[name].at)),
        aliases=_new_aliases(source, matched, sizes),
        absent=(),
        recipe=matched.recipe.name,
        padding_dropped=dropped,
        notes=(*source.notes, *notes),
    )


def check_repeated(matched: Match) -> None:
    """Refuse a recipe with two rules for one tensor.

    Raises:
        LayoutError: there are such rules; the error names both lines.
    """
    found = matched.find_repeated()
    if found is None:
        return
    first, second, name = found
    recipe = matched.recipe
    raise LayoutError(
        f"{find_rule(recipe, second[0])}: {name} has two rules",
        tensor=name,
        file=recipe.name,
        got=f"{recipe.rules[first[0]].sources[0]} and {recipe.rules[second[0]].sources[0]}",
        want="one rule for each tensor of the source",
        next_step=f"write one rule for those of {find_rule(recipe, first[0])} and {find_rule(recipe, second[0])}",
    )


def _pairings(matched: Match, place: tuple[int, int], sizes: Mapping[str, int]) -> Iterable[Pairing]:
    """Return the pairings from the names at a place of the recipe to their targets.

    Raises:
        LayoutError: the two sides of the rule do not fit; the error names the rule's line.
    """
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
    return replace(shard, name=name, shape=shape, rank=shard.rank[rows], record=shard.record[rows], nests=nests)


def join_shards(name: str, parts: Sequence[StoredShard]) -> StoredShard:
    """Return one shard with the pieces of all parts."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for other in parts[1:]:
        if (other.dtype, other.factor, other.added) != (first.dtype, first.factor, first.added):
            raise ContradictionError(
                f"{name}: the tensors that it is made of differ in type",
                tensor=name,
                got=other.dtype,
                want=first.dtype,
                next_step="cast them in the trainer before they are saved",
            )
    rank, record = (np.concatenate([getattr(part, key) for part in parts]) for key in ("rank", "record"))
    return replace(first, name=name, rank=rank, record=record, nests=join_rows([part.nests for part in parts]))


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
