"""Recipes of models whose layers differ in size: each layer gets rules, sizes and flags of its own.

by_layer = ["r", "f"]            in the recipe's file
"decoder.layers.{L}.mlp.linear_fc2.weight [h, f]"  ->  "decoder.layers.7.mlp.linear_fc2.weight [h, f_7]"
r = "block_configs.*.attention.n_heads_in_group"   ->  r_7 = "block_configs.7.attention.n_heads_in_group"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from xrank.errors import ContradictionError
from xrank.layout.notation import render_dim
from xrank.recipes.matching import Match, settle
from xrank.recipes.recipe import Recipe, Rule
from xrank.recipes.side import Side, parse_side
from xrank.recipes.sizes import collect_sizes


def place_names(
    found: Match,
    config: Mapping[str, Any] | None,
    args: Mapping[str, Any] | None,
    *,
    path: str = "the source",
    folder: str = "the source's folder",
) -> tuple[Match, dict[str, tuple[int, str]]]:
    """Return the match with rules for each layer and each name at its own place, and the sizes that are known.

    Args:
        found: a match of a recipe as its file has it.
        config: the content of config.json.
        args: the trainer's arguments.
        path: the source, for errors.
        folder: as `collect_sizes`.

    Raises:
        ContradictionError: the source has more layers than config.json or the arguments count; see `collect_sizes`.
    """
    found = _spread_layers(found, config, args, path)
    told = collect_sizes(found.recipe, config, args, folder)
    return settle(found, {size: number for size, (number, _) in told.items()}), told


def _spread_layers(found: Match, config: Mapping[str, Any] | None, args: Mapping[str, Any] | None, path: str) -> Match:
    """Return the match with a rule for each layer; the same match, if all layers of its recipe have the same sizes."""
    recipe = found.recipe
    if not recipe.by_layer:
        return found
    places = {at: _layer_dim(recipe.rules[at[0]]) is not None for at in found.used}
    indices = {
        name: (found.side_at(at).name.indices(name) or (0,))[0]
        for at, names in found.used.items()
        if places[at]
        for name in names
    }
    count = 1 + max(indices.values(), default=-1)
    dim = next(dim for dim in map(_layer_dim, recipe.rules) if dim is not None)
    told, origin = collect_sizes(recipe, config, args).get(dim, (count, ""))
    if told < count:
        last = max(indices, key=lambda name: indices[name])
        raise ContradictionError(
            f"{last} belongs to a layer beyond the {told} of {origin}",
            tensor=last,
            file=path,
            got=f"{count} layers",
            want=f"{told} layers, as in {origin}",
            next_step="check that config.json is this model's",
        )
    spread, numbers = _spread(recipe, told)
    used: dict[tuple[int, int], tuple[str, ...]] = {}
    for (number, form), names in found.used.items():
        for name in names:
            at = (numbers[number, indices[name] if places[number, form] else None], form)
            used[at] = (*used.get(at, ()), name)
    return replace(found, recipe=spread, used=dict(sorted(used.items())))


def _layer_dim(rule: Rule) -> str | None:
    """Return the size that counts layers in the names of a rule; None if its tensors lie in no layer."""
    dims = rule.sources[0].name.dims
    return render_dim(dims[0]) if dims else None


@lru_cache(maxsize=8)
def _spread(recipe: Recipe, count: int) -> tuple[Recipe, dict[tuple[int, int | None], int]]:
    """Return the recipe with rules for so many layers, and (number of a rule, layer) -> number of its own rule."""
    layered = [number for number, rule in enumerate(recipe.rules) if _layer_dim(rule) is not None]
    order: list[tuple[int, int | None]] = []
    for number in range(len(recipe.rules)):
        if number == layered[0]:  # layer after layer, as files list them
            order += [(each, layer) for layer in range(count) for each in layered]
        if number not in layered:
            order.append((number, None))
    rules = [
        recipe.rules[number] if layer is None else _rule_of(recipe.rules[number], layer, recipe.by_layer)
        for number, layer in order
    ]
    terms = [
        {key: texts for key, texts in table.items() if key not in recipe.by_layer}
        | {
            f"{key}_{layer}": tuple(text.replace(".*.", f".{layer}.") for text in table[key])
            for layer in range(count)
            for key in recipe.by_layer
            if key in table
        }
        for table in (recipe.config, recipe.args)
    ]
    spread = replace(recipe, rules=tuple(rules), config=terms[0], args=terms[1], by_layer=())
    return spread, {at: number for number, at in enumerate(order)}


def _rule_of(rule: Rule, layer: int, by_layer: tuple[str, ...]) -> Rule:
    def side_of(side: Side) -> Side:
        name, _, dims = str(side).partition(" ")
        name = re.sub(r"\{[^}]*\}", str(layer), name, count=1)
        # A part's name may be a size's, too.
        dims = re.sub(rf"\b({'|'.join(by_layer)})\b(?!:)", rf"\g<1>_{layer}", dims)
        return parse_side(f"{name} {dims}")

    def flag_of(flag: str | None) -> str | None:
        return f"{flag}_{layer}" if flag in by_layer else flag

    return replace(
        rule,
        sources=(side_of(rule.sources[0]),),
        targets={part: side_of(side) for part, side in rule.targets.items()},
        when=flag_of(rule.when),
        unless=flag_of(rule.unless),
        line=str(rule.sources[0]),
    )
