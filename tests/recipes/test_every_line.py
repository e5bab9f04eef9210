"""Every line of every recipe counts: all are used by some form of a model, and none can be changed unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, islice
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.recipes.families import Family, hybrid, text
from tests.recipes.families.forms import other_forms
from tests.recipes.made_checkpoints import (
    MIXED,
    as_maxtext,
    as_megatron,
    as_singletons,
    config_of,
    expert_forms,
    saved,
    tiny,
)
from tests.recipes.made_hybrids import HYBRID_FAMILIES, hybrid_forms
from tests.recipes.made_torchtitan import torchtitan_forms
from tests.recipes.made_vision import VISION_RECIPES, vision_forms
from tests.recipes.test_there_and_back import RECIPES, elements, model_of
from tests.sampled import sampled
from xrank.errors import UsageError, XrankError
from xrank.recipes.recipe import Recipe, Rule, match, parse_side
from xrank.recipes.recipe_choice import follow_recipe

pytestmark = pytest.mark.timeout(120)

Tensors = dict[str, torch.Tensor]
_BIASES = {"attention_bias": True, "mlp_bias": True}


def forms(name: str) -> Iterator[tuple[torch.nn.Module, Tensors]]:
    """Yield models, and their tensors in a trainer's forms."""
    family = name.removeprefix("megatron-").replace("-", "_")
    if name.startswith("maxtext"):
        # A head of 16 elements, as the query is divided by its root.
        model = tiny("llama" if "llama" in name else name.removeprefix("maxtext-"), head_dim=16)
        yield model, as_maxtext(model, is_scanned=True, turns_pairs=name.endswith("3.1"))
        yield model, as_maxtext(model, is_scanned=False, turns_pairs=name.endswith("3.1"))
        return
    model = tiny(family, **({"tie_word_embeddings": False} if family == "gpt2" else {}))
    if family == "gpt2":
        for te in (False, True):
            made = as_megatron(model, vocab=48, te=te)
            yield model, {**made, "output_layer.weight": saved(model)["lm_head.weight"]}
        return
    yield model, as_megatron(model, vocab=48)
    yield model, as_megatron(model, te=True)
    yield model, as_singletons(as_megatron(model))
    if family in ("llama", "qwen3", "qwen3_moe", "glm4_moe"):
        biased = tiny(family, **(_BIASES if family == "llama" else {"attention_bias": True}))
        yield biased, as_megatron(biased)
    if family in ("mixtral", *MIXED):
        for form, tensors in expert_forms(model).items():
            # The specification of latent attention keeps the norms' names.
            is_renamed = form == "named" and not family.startswith("deepseek")
            yield model, as_local_dist(tensors) if is_renamed else tensors


def as_local_dist(tensors: Tensors) -> Tensors:
    """Return norms as torch_dist has those of the local layer specification (gpt_layer_specs.py)."""
    names = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    made = {}
    for name, tensor in tensors.items():
        for ours, its in names.items():
            name = name.replace(ours, its)
        made[name] = tensor
    return made


@cache
def made(name: str) -> list[tuple[dict[str, Any], Tensors, Tensors]]:
    """Return for each form config.json, the tensors that transformers saves, and the trainer's."""
    if name.startswith("torchtitan-"):
        return list(torchtitan_forms(name.removeprefix("torchtitan-")))
    own = name.removeprefix("megatron-")
    if own.replace("-", "_") in HYBRID_FAMILIES:
        further = [family for family in hybrid.FAMILIES if family.of == own]
        return [*hybrid_forms(own), *(case for family in further for case in cases_of(name, family))]
    if own in VISION_RECIPES:
        return list(vision_forms(own))
    found = [case for family in text.FAMILIES if family.recipe == name for case in cases_of(name, family)]
    if any(family.recipe == name and family.of is None for family in text.FAMILIES):
        return found
    return [(config_of(model), saved(model), theirs) for model, theirs in forms(name)] + found


def cases_of(name: str, family: Family) -> list[tuple[dict[str, Any], Tensors, Tensors]]:
    """Return the forms of a family; test_megatron_logits proves what the recipe makes of the first."""
    theirs = {key: torch.from_numpy(array) for key, array in family.weights().items()}
    config = family.full_config()
    kept = [(config, form) for form in (theirs, *(other_forms(theirs) if family.of is None else ()))]
    if config.get("tie_word_embeddings"):
        head = {"output_layer.weight": theirs["embedding.word_embeddings.weight"] + 1}
        kept.append(({**config, "tie_word_embeddings": False}, {**theirs, **head}))
    return [(its, follow(RECIPES[name], its, theirs if its is config else form), form) for its, form in kept]


def is_right(recipe: Recipe, config: dict[str, Any], expected: Tensors, theirs: Tensors) -> bool:
    """Say whether the recipe makes what transformers saves."""
    try:
        found = follow(recipe, config, theirs)
    except XrankError:
        return False
    return found.keys() == expected.keys() and all(
        torch.allclose(found[name], t) if name.endswith("linear_attn.norm.weight") else torch.equal(found[name], t)
        for name, t in expected.items()
    )


def follow(recipe: Recipe, config: dict[str, Any], theirs: Tensors) -> Tensors:
    """Return what the recipe makes of a trainer's tensors."""
    found = match(recipe, theirs)
    if not found.fits:
        raise UsageError("the recipe does not fit", got=str((found.unknown, found.missing)))
    flat = [tensor.numpy().ravel() for tensor in theirs.values()]
    starts = np.cumsum([0, *map(len, flat)])
    values = np.concatenate(flat)
    model = follow_recipe(model_of({name: tuple(t.shape) for name, t in theirs.items()}), found, config)
    tensors = {}
    for shard in model.shards:
        at = elements(shard)
        made = torch.from_numpy(values[starts[at >> 32] + (at & 0xFFFFFFFF)].reshape(shard.shape))
        tensors[shard.name] = made * shard.factor + shard.added if (shard.factor, shard.added) != (1, 0) else made
    return tensors


@pytest.mark.parametrize("name", RECIPES)
def test_every_line_is_used_and_right(name: str) -> None:
    recipe, used = RECIPES[name], set[int]()
    for config, expected, theirs in made(name):
        used |= {number for number, _ in match(recipe, theirs).used}
        assert is_right(recipe, config, expected, theirs)
    unused = [str(rule.sources[0]) for number, rule in enumerate(recipe.rules) if number not in used]
    assert [text for text in unused if "local_experts" not in text and not is_repeated(text)] == []


def is_repeated(source: str) -> bool:
    """Return whether a rule is a copy of another, which [repeat] makes."""
    return ".transformer_layer." in source


def broken(recipe: Recipe) -> Iterator[tuple[str, set[int], Recipe]]:
    """Yield recipes in which two targets of one shape stand for each other, or a line is missing; and these lines."""
    own = [(number, rule) for number, rule in enumerate(recipe.rules) if not is_repeated(str(rule.sources[0]))]
    places = [(number, part, side) for number, rule in own for part, side in rule.targets.items()]
    for (a, first, left), (b, second, right) in combinations(places, 2):
        is_same_kind = left.dims == right.dims and len(left.name.dims) == len(right.name.dims)
        if str(left) != str(right) and is_same_kind:
            rules = list(recipe.rules)
            rules[a] = with_target(rules[a], first, right)
            rules[b] = with_target(rules[b], second, left)
            yield f"{left} and {right}", {a, b}, replace(recipe, rules=tuple(rules))
    for number, rule in own:
        others = recipe.rules[:number] + recipe.rules[number + 1 :]
        yield f"without {rule.sources[0]}", {number}, replace(recipe, rules=others)
        if len(rule.targets) > 1:
            parts = [*rule.targets]
            turned = dict(zip(parts, [rule.targets[part] for part in (*parts[1:], parts[0])], strict=True))
            if len({str(side) for side in turned.values()}) > 1:
                rules = [*recipe.rules]
                rules[number] = replace(rule, targets=turned)
                yield f"{rule.sources[0]} turned", {number}, replace(recipe, rules=tuple(rules))


def with_target(rule: Rule, part: str, side: Any) -> Rule:
    return replace(rule, targets={**rule.targets, part: side})


@pytest.mark.parametrize("name", sampled(RECIPES, 2))
def test_no_line_can_be_wrong_unnoticed(name: str, every: int) -> None:
    num_broken = 0
    used = [{number for number, _ in match(RECIPES[name], theirs).used} for _, _, theirs in made(name)]
    for what, lines, recipe in islice(broken(RECIPES[name]), 0, None, every):
        touched = [form for form, its in zip(made(name), used, strict=True) if its & lines]
        assert not all(is_right(recipe, *form) for form in touched), what
        num_broken += every
    assert num_broken > sum(not is_repeated(str(rule.sources[0])) for rule in RECIPES[name].rules)


def test_orders_within_a_tensor() -> None:
    recipe = RECIPES["megatron-llama"]
    for old, new in (
        ("[g <q: r d | k: d | v: d>, h]", "[<q: g r d | k: g d | v: g d>, h]"),
        ("[g <q: r d | k: d | v: d>, h]", "[g <q: r d | v: d | k: d>, h]"),
        ("[<gate: f | up: f>, h]", "[f <gate: 1 | up: 1>, h]"),
        ("[<gate: f | up: f>, h]", "[<up: f | gate: f>, h]"),
    ):
        rules = tuple(
            replace(rule, sources=(parse_side(str(rule.sources[0]).replace(old, new)),))
            if old in str(rule.sources[0])
            else rule
            for rule in recipe.rules
        )
        assert not is_right(replace(recipe, rules=rules), *made("megatron-llama")[0]), new
