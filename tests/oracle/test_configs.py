"""Every config of transformers, PEFT and ModelOpt between two ranks: it arrives as it was, or is refused by name."""

from __future__ import annotations

import json

import pytest
import torch

from tests.oracle.config_classes import NOT_MADE, REFUSED, is_same, make_model_configs, make_other_configs
from xrank import get_configs_parallel
from xrank.errors import RankFailedError, UsageError
from xrank.ranks.exchange import pack

pytestmark = pytest.mark.timeout(600)  # both ranks import a thousand modules

NUM_MODEL_CONFIGS = 800
"""The least number of classes; there are 831 in transformers 5.23."""


@pytest.mark.ranks(2, timeout_seconds=550)
def test_every_models_config_arrives_as_it_was_sent(rank, tmp_path):
    num_saved = num_made = 0
    for name, config in make_model_configs():
        num_made += 1
        with get_configs_parallel(config, [0, 1], None, key=name) as gathered:
            pass
        for came in gathered:  # on rank 0: its own, and rank 1's, which was made in the same way
            assert came is not config and type(came) is type(config), name
            assert is_same(vars(came), vars(config)), name
            assert came.to_dict() == config.to_dict(), name
        if gathered and saved_text(config, tmp_path / "sent") is not None:
            num_saved += 1
            assert saved_text(gathered[1], tmp_path / "came") == saved_text(config, tmp_path / "sent"), name
    assert num_made >= NUM_MODEL_CONFIGS and (rank == 1 or num_saved > 0.9 * num_made)


def saved_text(config, folder) -> str | None:
    """Return the config.json that transformers saves; None for a class whose own defaults it refuses to save."""
    try:
        config.save_pretrained(folder)
    except Exception as error:
        assert "alidation" in f"{type(error).__name__} {error}", error
        return None
    return (folder / "config.json").read_text()


@pytest.mark.ranks(2, timeout_seconds=550)
def test_every_other_config_arrives_as_it_was_sent_or_is_refused_by_name(rank):
    refused = set()
    for name, config in make_other_configs():
        kind = type(config).__name__
        try:
            pack(config)
        except UsageError as error:
            refused.add(kind)
            assert kind in REFUSED and "cannot be sent" in str(error), name
            continue
        with get_configs_parallel(config, [0, 1], None, key=name) as gathered:
            pass
        for came in gathered:
            assert is_same(came, config), name
    assert refused == REFUSED.keys()
    assert not refused & NOT_MADE.keys()


@pytest.mark.ranks(2, timeout_seconds=100)
def test_a_refused_config_is_named_on_both_ranks(rank):
    from transformers import GenerationConfig

    expected = pytest.raises((UsageError, RankFailedError), match=r"GenerationConfig, which cannot be sent")
    with expected as raised, get_configs_parallel([GenerationConfig()] if rank else None, [0, 1], None):
        pass
    assert raised.type is (UsageError if rank else RankFailedError)
    with get_configs_parallel(GenerationConfig().to_dict(), [0, 1], None) as gathered:
        pass
    assert all(came == GenerationConfig().to_dict() for came in gathered)


@pytest.mark.ranks(2, timeout_seconds=100)
def test_the_config_of_a_live_model_arrives_with_what_it_was_loaded_with(rank, tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    own = tmp_path / f"rank-{rank}"
    own.mkdir()
    extras = {"auto_map": {"AutoConfig": "a.B"}, "note_of_mine": [1], "dtype": "bfloat16"}
    text = LlamaConfig(**small, vocab_size=16).to_dict() | extras
    (own / "config.json").write_text(json.dumps(text))
    config = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(own)).config
    with get_configs_parallel(config, [0, 1], None) as gathered:
        for came in gathered:
            assert came.auto_map == {"AutoConfig": "a.B"} and came.note_of_mine == [1]
            assert came.dtype == torch.bfloat16
            assert AutoModelForCausalLM.from_config(came).num_parameters() > 0
