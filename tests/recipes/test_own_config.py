"""Configs of live modules, as ranks send them to each other."""

from __future__ import annotations

import json

import pytest
import torch
from msgspec.structs import asdict

from xrank.errors import CorruptError
from xrank.recipes.found_source import OwnConfig, choose_config, read_own_config
from xrank.storage.entries import Entry

pytestmark = pytest.mark.quick

FULL = OwnConfig({"hidden_sizes": [8, 4]}, "{}", None, ("a",), ("b",), ("c", "d"), is_loaded=True)


def sent(config: OwnConfig) -> OwnConfig:
    """Return a config after its way through JSON."""
    return OwnConfig.from_entry(Entry.parse(json.dumps(asdict(config)), CorruptError))


@pytest.mark.parametrize("config", [OwnConfig(), FULL])
def test_a_config_that_was_sent_is_the_same(config: OwnConfig) -> None:
    assert sent(config) == config


def test_the_first_rank_with_a_config_decides() -> None:
    other = OwnConfig({"hidden_sizes": [8, 5]})
    ranks = [sent(one) for one in (OwnConfig(), FULL, FULL, other)]
    assert choose_config(ranks) == (FULL, {3: other})
    assert choose_config([OwnConfig(), OwnConfig()]) == (OwnConfig(), {})


def test_an_empty_place_for_a_wrapped_module_is_no_wrapper() -> None:
    class Config:
        architectures: list[str]

        def to_json_string(self) -> str:
            return json.dumps(vars(self))

    class Model(torch.nn.Module):
        config = Config()

    model = Model()
    model.register_module("module", None)
    assert read_own_config(model).config == {"architectures": ["Model"]}
    wrapper = torch.nn.Module()
    wrapper.module = model
    assert read_own_config(wrapper).config == {"architectures": ["Model"]}
