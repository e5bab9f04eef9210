"""Shapes that were inferred: proven by config.json's sizes, or refused with both tensors named."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from tests.recipes.made_checkpoints import FAMILIES, as_megatron, as_torchtitan, config_of, saved, tiny
from tests.sampled import sampled
from xrank.errors import ContradictionError, IncompleteError, LayoutError
from xrank.recipes.proofs import prove_family, prove_shapes

pytestmark = pytest.mark.timeout(120)

Shapes = dict[str, tuple[int, ...]]


@cache
def made(family: str) -> tuple[dict[str, Any], Shapes, Shapes]:
    """Return config.json, Hugging Face's shapes and Megatron's."""
    model = tiny(family)
    return config_of(model), shapes_of(saved(model)), shapes_of(as_megatron(model, vocab=48))


def shapes_of(tensors: dict[str, Any]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models_are_proven(family: str) -> None:
    config, shapes, megatron = made(family)
    recipe = f"megatron-{family.replace('_', '-')}"
    assert prove_shapes(shapes, config) == prove_shapes(megatron, config) == recipe
    for whole in (shapes, megatron):
        with pytest.raises(LayoutError, match="only from the existing pieces"):
            prove_shapes(whole)


def test_torchtitans_names_too() -> None:
    shapes = shapes_of(as_torchtitan(tiny("llama")))
    config = made("llama")[0]
    assert prove_shapes(shapes, config) == "torchtitan-llama3"
    small = shapes_of(as_torchtitan(tiny("llama", head_dim=4)))
    assert prove_shapes(small, {key: value for key, value in config.items() if key != "head_dim"})
    with pytest.raises(LayoutError, match="only from the existing pieces"):
        prove_shapes(shapes)
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
                prove_shapes(left)  # columns are whole
            with pytest.raises(IncompleteError, match=r"shorter than|no sizes solve"):
                prove_shapes(left, made(family)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_that_a_state_dict_lacks_is_seen(family: str) -> None:
    """Whole shapes are recorded there, but no list of the model's tensors."""
    config, shapes, _ = made(family)
    prove_family(shapes, config)
    for lost in shapes:
        with pytest.raises((IncompleteError, ContradictionError), match="no file holds any of"):
            prove_family(shapes.keys() - {lost}, config)
        with pytest.raises((IncompleteError, ContradictionError), match="no file holds any of"):
            prove_family({lost}, config)
    prove_family([*shapes, "model.layers.0.own.weight"], config)  # no recipe knows such a model
    prove_family(list(shapes)[1:], {**config, "model_type": "own"})


def test_both_tensors_are_named() -> None:
    shapes = made("llama")[1]
    with pytest.raises(IncompleteError) as caught:
        prove_shapes({**shapes, "model.norm.weight": (21,)})
    assert caught.value.tensor == "model.norm.weight"
    assert re.fullmatch(r"21 in dim 0 of model\.norm\.weight", str(caught.value.got))
    assert re.search(r"24 in dim \d of model\.", str(caught.value.want))


@pytest.mark.parametrize("family", sampled(FAMILIES, 8))
def test_every_dim_of_every_tensor_counts(family: str) -> None:
    config, shapes, _ = made(family)
    for name, shape in shapes.items():
        for dim, length in enumerate(shape):
            for other in {length - 1, length // 2}:
                with pytest.raises(IncompleteError):
                    prove_shapes({**shapes, name: (*shape[:dim], other, *shape[dim + 1 :])}, config)
            with pytest.raises((ContradictionError, IncompleteError)):
                prove_shapes({**shapes, name: (*shape[:dim], length + 1, *shape[dim + 1 :])}, config)


def test_what_is_seen_without_a_config() -> None:
    """Contradictions; rows of words that all end alike are not."""
    _, shapes, _ = made("qwen3")
    for name, shape in shapes.items():
        for dim, length in enumerate(shape):
            with pytest.raises(IncompleteError):
                prove_shapes({**shapes, name: (*shape[:dim], length - 1, *shape[dim + 1 :])})
    vocabulary = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (36, 24))
    with pytest.raises(LayoutError, match="only from the existing pieces"):
        prove_shapes({**shapes, **vocabulary})


@pytest.mark.parametrize("family", sampled(FAMILIES, 4))
def test_every_tensor_must_be_there(family: str) -> None:
    config, shapes, megatron = made(family)
    for whole in (shapes, megatron):
        for name in whole:
            left = {other: shape for other, shape in whole.items() if other != name}
            with pytest.raises((IncompleteError, ContradictionError), match="no file holds any of it"):
                prove_shapes(left, config)


def test_layers_that_config_counts_must_be_there() -> None:
    config, shapes, _ = made("llama")
    with pytest.raises(IncompleteError, match=r"model.layers.3.\S+: no file holds any of it"):
        prove_shapes(shapes, {**config, "num_hidden_layers": 4})
    with pytest.raises(ContradictionError, match=r"model.layers.2.\S+ is one of more than L = 2"):
        prove_shapes(shapes, {**config, "num_hidden_layers": 2})
    with pytest.raises(ContradictionError, match=r"longer than config\.json allows"):
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


def test_a_layer_with_neither_block() -> None:
    """Which layers have experts the names say; that each has these or a dense block is what there is to prove."""
    config, shapes, megatron = made("qwen3_moe")
    for whole in (shapes, megatron):
        left = {name: shape for name, shape in whole.items() if not re.search(r"layers\.2\.mlp\.", name)}
        with pytest.raises(IncompleteError, match="layer 2: no file holds any of dense or experts"):
            prove_shapes(left, config)


def test_names_that_no_recipe_knows_prove_nothing() -> None:
    config, shapes, _ = made("llama")
    assert prove_shapes({**shapes, "model.vision.weight": (3,)}, config) is None
    assert prove_shapes({"w": (8, 2)}) is None
    assert prove_shapes({}) is None
