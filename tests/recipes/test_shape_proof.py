"""Shapes that were inferred: proven by one set of sizes, or refused with both tensors named."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from made_checkpoints import FAMILIES, as_megatron, as_megatron_gpt2, as_torchtitan, saved, tiny

from xrank.errors import ContradictionError, IncompleteError
from xrank.recipes.shape_proof import prove_shapes

pytestmark = pytest.mark.timeout(120)

Shapes = dict[str, tuple[int, ...]]


@cache
def made(family: str) -> tuple[dict[str, Any], Shapes, Shapes]:
    """Return config.json, Hugging Face's shapes and Megatron's."""
    model = tiny(family)
    theirs = (as_megatron_gpt2 if family == "gpt2" else as_megatron)(model, vocab=48)
    return json.loads(model.config.to_json_string(use_diff=False)), shapes_of(saved(model)), shapes_of(theirs)


def shapes_of(tensors: dict[str, Any]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models_are_proven(family: str) -> None:
    config, shapes, megatron = made(family)
    recipe = f"megatron-{family.replace('_', '-')}"
    assert prove_shapes(shapes, config) == prove_shapes(megatron, config) == recipe
    assert prove_shapes(shapes) is not None and prove_shapes(megatron) is not None


def test_torchtitans_names_too() -> None:
    shapes = shapes_of(as_torchtitan(tiny("llama")))
    assert prove_shapes(shapes, made("llama")[0]) == prove_shapes(shapes) == "torchtitan-llama3"
    with pytest.raises(IncompleteError, match=r"norm.weight is shorter than"):
        prove_shapes({**shapes, "norm.weight": (21,)})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_last_rank_is_seen(family: str) -> None:
    for shapes in made(family)[1:]:
        for world_size in (2, 3, 4, 8):
            left = {}
            for name, (rows, *columns) in shapes.items():
                left[name] = (min(rows, -(-rows // world_size) * (world_size - 1)), *columns)
            with pytest.raises(IncompleteError, match=r"shorter than|no sizes solve"):
                prove_shapes(left)
            with pytest.raises(IncompleteError, match=r"shorter than|no sizes solve"):
                prove_shapes(left, made(family)[0])


def test_both_tensors_are_named() -> None:
    shapes = made("llama")[1]
    with pytest.raises(IncompleteError) as caught:
        prove_shapes({**shapes, "model.norm.weight": (21,)})
    assert caught.value.tensor == "model.norm.weight"
    assert re.fullmatch(r"21 in dim 0 of model\.norm\.weight", str(caught.value.got))
    assert re.search(r"24 in dim \d of model\.", str(caught.value.want))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_dim_of_every_tensor_counts(family: str) -> None:
    config, shapes, _ = made(family)
    for name, shape in shapes.items():
        for dim, length in enumerate(shape):
            for other in {length - 1, length // 2}:
                with pytest.raises(IncompleteError):
                    prove_shapes({**shapes, name: (*shape[:dim], other, *shape[dim + 1 :])}, config)
            with pytest.raises((ContradictionError, IncompleteError)):
                prove_shapes({**shapes, name: (*shape[:dim], length + 1, *shape[dim + 1 :])}, config)


def test_without_a_config_all_but_rows_that_nothing_else_says() -> None:
    _, shapes, _ = made("qwen3")
    for name, shape in shapes.items():
        for dim, length in enumerate(shape):
            with pytest.raises(IncompleteError):
                prove_shapes({**shapes, name: (*shape[:dim], length - 1, *shape[dim + 1 :])})
    vocabulary = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (36, 24))
    assert prove_shapes({**shapes, **vocabulary}) is not None  # as the promise says


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_must_be_there(family: str) -> None:
    config, shapes, megatron = made(family)
    for whole in (shapes, megatron):
        for name in whole:
            left = {other: shape for other, shape in whole.items() if other != name}
            try:
                recipe = prove_shapes(left, config)
            except IncompleteError:
                continue
            assert recipe is None, name  # a kind of tensor of which there is only one


def test_layers_that_config_counts_must_be_there() -> None:
    config, shapes, _ = made("llama")
    with pytest.raises(IncompleteError, match=r"model.layers.3.\S+: no file holds any of it"):
        prove_shapes(shapes, {**config, "num_hidden_layers": 4})
    with pytest.raises(ContradictionError, match=r"model.layers.2.\S+ is one of more than L = 2"):
        prove_shapes(shapes, {**config, "num_hidden_layers": 2})
    with pytest.raises(ContradictionError, match=r"longer than config\.json says"):
        prove_shapes(shapes, {**config, "vocab_size": 36})


def test_an_expert_fewer() -> None:
    config, shapes, megatron = made("mixtral")
    for whole, gate in ((shapes, "block_sparse_moe.gate"), (megatron, "mlp.router")):
        without = {name: shape for name, shape in whole.items() if not re.search(r"experts\.3\.", name)}
        with pytest.raises(IncompleteError, match=r"experts.3.\S+: no file holds any of it"):
            prove_shapes(without)
        rows = {name: (3, 24) if gate in name else shape for name, shape in whole.items()}
        with pytest.raises(IncompleteError, match=r"experts.3.\S+ is one of more than e = 3"):
            prove_shapes(rows)
    assert prove_shapes(shapes, config) == "megatron-mixtral"


def test_names_that_no_recipe_knows_prove_nothing() -> None:
    config, shapes, _ = made("llama")
    assert prove_shapes({**shapes, "model.vision.weight": (3,)}, config) is None
    assert prove_shapes({"w": (8, 2)}) is None
    assert prove_shapes({}) is None
