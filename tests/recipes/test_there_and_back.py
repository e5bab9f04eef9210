"""Each recipe backwards and forwards again is the identity, at any sizes, element by element."""

from __future__ import annotations

import re
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampled import count_of
from xrank.layout.local_part import global_size
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest, addresses
from xrank.layout.notation import size_names_of
from xrank.layout.stored_model import RecordTable, StoredModel, StoredShard
from xrank.recipes.recipe import Recipe, active_rules, find_range, match, settle
from xrank.recipes.recipe_choice import rewrite_model
from xrank.recipes.recipe_file import load_shipped_recipes

RECIPES = {recipe.name: recipe for recipe in load_shipped_recipes()}
_FAR = 1 << 32
Flags = dict[str, bool]


def model_of(shapes: dict[str, tuple[int, ...]]) -> StoredModel:
    """Return tensors that are whole in a record each."""
    shards = tuple(
        StoredShard(
            name,
            "F32",
            shape,
            int_array([0]),
            int_array([i]),
            NestTable.from_nests([Nest(0, 0, ((prod(shape), 1, 1),))]),
        )
        for i, (name, shape) in enumerate(shapes.items())
    )
    nothing = int_array([])
    return StoredModel("test", "nowhere", (), RecordTable(nothing, nothing, nothing, nothing), shards)


def elements(shard: StoredShard) -> np.ndarray:
    """Return for each element of a tensor which record's which element it is; none twice, none left out."""
    found = np.full(prod(shard.shape), -1, dtype=np.int64)
    for i in range(len(shard.record)):
        x, y = np.array(addresses(shard.nests[i])).T
        assert (found[y] == -1).all() and len(np.unique(y)) == len(y)
        found[y] = int(shard.record[i]) * _FAR + x
    assert (found >= 0).all()
    return found


def hugging_face_shapes(
    recipe: Recipe, sizes: dict[str, int], flags: Flags, layer_groups: list[set[str]]
) -> dict[str, tuple[int, ...]]:
    found = {}
    for number in active_rules(recipe, True):
        rule = recipe.rules[number]
        if (rule.unless and flags.get(rule.unless)) or (rule.when and not flags.get(rule.when)):
            continue
        # Copies need not be in the files; test_resharded_families has them.
        if rule.is_copy or (rule.within and not flags.get(rule.within)):
            continue
        for side in rule.targets.values():
            for at in product(*(range(*find_range(dim, sizes)) for dim in side.name.dims)):
                kinds = {"mtp.experts"} if rule.choice == "mtp" else layer_groups[at[0]] if rule.group else set()
                if rule.group is None or rule.group in kinds:
                    found[side.name.with_indices(*at)] = tuple(global_size(dim, sizes) for dim in side.dims)
    return found


def is_copy(name: str, expressions: list[str]) -> bool:
    return any(re.fullmatch(expression, name) for expression in expressions)


@pytest.mark.parametrize("name", RECIPES)
@settings(max_examples=count_of(12), deadline=None)
@given(data=st.data())
def test_there_and_back(name: str, data: st.DataObject) -> None:
    recipe = RECIPES[name]
    names = {size for rule in recipe.rules for dim in rule.sources[0].all_dims for size in size_names_of(dim)}
    sizes = {size: recipe.sizes.get(size) or data.draw(st.integers(1, 3), label=size) for size in sorted(names)}
    flags = {
        flag: data.draw(st.booleans(), label=flag)
        for flag in sorted({flag for rule in recipe.rules for flag in (rule.unless, rule.when, rule.within) if flag})
    }
    choices: dict[str, list[str]] = {}
    for rule in recipe.rules:
        if rule.group and rule.choice != "mtp" and rule.group not in choices.setdefault(rule.choice, []):
            choices[rule.choice].append(rule.group)
    sizes["L"] = max(sizes.get("L", 1), len(recipe.needed))
    layer_groups = [{data.draw(st.sampled_from(groups)) for groups in choices.values()} for _ in range(sizes["L"])]
    for layer, needed in enumerate(recipe.needed):  # blocks that every model of the family has
        choice = next(groups for groups in choices.values() if needed in groups)
        layer_groups[layer] = (layer_groups[layer] - {*choice}) | {needed}
    model = model_of(hugging_face_shapes(recipe, sizes, flags, layer_groups))
    backwards = match(recipe, [shard.name for shard in model.shards], is_reversed=True)
    backwards = settle(backwards, sizes)
    assert backwards.fits
    theirs = rewrite_model(model, backwards, sizes, flags, {})
    forwards = match(recipe, [shard.name for shard in theirs.shards])
    assert forwards.fits
    back = rewrite_model(theirs, forwards, sizes, flags, {})
    expected = {shard.name: shard for shard in model.shards}
    copies = [side.name.expression for rule in recipe.rules if rule.is_copy for side in rule.targets.values()]
    made = [shard for shard in back.shards if shard.name in expected or not is_copy(shard.name, copies)]
    assert {shard.name for shard in made} == expected.keys()
    for shard in made:
        assert shard.shape == expected[shard.name].shape
        assert np.array_equal(elements(shard), elements(expected[shard.name]))
    for shard in theirs.shards:
        elements(shard)
