"""Layers of different sizes: config.json counts them, so that a lost last layer is seen in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.families import FAMILIES
from tests.recipes.made_checkpoints import leave
from xrank import gather_checkpoint
from xrank.errors import ContradictionError, IncompleteError
from xrank.recipes.proofs import prove_family
from xrank.recipes.recipe import Match, match
from xrank.recipes.recipe_file import load_shipped_recipe
from xrank.recipes.sizes import place_names

FAMILY = FAMILIES["nemotron-nas"]
CONFIG = FAMILY.full_config()


def names_of(*, is_reversed: bool) -> list[str]:
    if not is_reversed:
        return list(FAMILY.weights())
    assert FAMILY.hugging_face is not None
    model: torch.nn.Module = FAMILY.hugging_face(CONFIG)
    return list(model.state_dict())


def placed(names: list[str], config: dict[str, Any], *, is_reversed: bool) -> Match:
    return place_names(match(load_shipped_recipe(FAMILY.recipe), names, is_reversed=is_reversed), config, None)[0]


def without_last_layer(names: list[str]) -> list[str]:
    kept = [name for name in names if "layers.3." not in name]
    assert len(kept) < len(names)
    return kept


def test_gather_without_the_last_layer_is_refused(tmp_path: Path) -> None:
    weights = {name: torch.from_numpy(array) for name, array in FAMILY.weights().items()}
    whole = leave(tmp_path / "whole", weights, CONFIG)
    assert gather_checkpoint(whole, tmp_path / "out").source["recipe"] == FAMILY.recipe
    part = leave(tmp_path / "part", {name: weights[name] for name in without_last_layer(list(weights))}, CONFIG)
    with pytest.raises(ContradictionError, match=r"layers\.3\."):
        gather_checkpoint(part, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("is_reversed", [False, True])
def test_layer_beyond_those_of_config_is_refused(is_reversed: bool) -> None:
    names = names_of(is_reversed=is_reversed)
    with pytest.raises(ContradictionError, match=r"layers\.3\..* belongs to a layer after the 3 of config.json"):
        placed(names, {**CONFIG, "num_hidden_layers": 3}, is_reversed=is_reversed)


def test_model_that_lacks_its_last_layer_is_refused() -> None:
    names = names_of(is_reversed=True)
    prove_family(names, CONFIG)
    with pytest.raises(IncompleteError, match=r"layers\.3\."):
        prove_family(without_last_layer(names), CONFIG)
