"""Vision-language families, from Megatron-Bridge's and mbridge's names to a folder that transformers loads."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.readers.made_megatron import Run, write_dist, write_legacy
from tests.recipes.made_checkpoints import config_of, leave, saved, stacked
from tests.recipes.made_vision import MEGATRON_TOWERS, VISION_FAMILIES, as_megatron_vision, tiny_vision
from tests.recipes.test_model_families import assert_equal
from xrank import gather_checkpoint

pytestmark = pytest.mark.timeout(120)


@cache
def model_of(family: str, **changes: Any) -> torch.nn.Module:
    return tiny_vision(family, **changes)


def gathered(folder: Path, tensors: dict[str, torch.Tensor], config: Any, **options: Any) -> dict[str, torch.Tensor]:
    gather_checkpoint(leave(folder / "ws", tensors, config), folder / "out", **options)
    return safetensors.torch.load_file(folder / "out" / "model.safetensors")


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_folder_of_transformers_keeps_its_names(tmp_path: Path, family: str) -> None:
    """Its vision tower has the names of the recipe's, which is no sign of Megatron, however deep the tower is."""
    whole = saved(model_of(family))
    tower = {name: tensor for name, tensor in whole.items() if "visual" in name or "vision" in name}
    for number, tensors in enumerate((whole, tower)):
        out = tmp_path / f"{number}.out"
        source = leave(tmp_path / str(number), tensors, config_of(model_of(family)) if tensors is whole else {})
        assert gather_checkpoint(source, out).source["recipe"] is None
        assert_equal(safetensors.torch.load_file(out / "model.safetensors"), tensors)


@pytest.mark.parametrize("family", MEGATRON_TOWERS)
def test_layers_in_one_tensor(tmp_path: Path, family: str) -> None:
    model = model_of(family)
    tensors = stacked(as_megatron_vision(model, te=True, is_kept=False), "language_model.decoder.layers.")
    tensors = stacked(tensors, "vision_model.decoder.layers.")
    assert_equal(gathered(tmp_path, tensors, config_of(model)), saved(model))


def test_the_hubs_layout_of_experts(tmp_path: Path) -> None:
    import transformers

    model = model_of("qwen3_vl_moe")
    found = gathered(tmp_path, as_megatron_vision(model), config_of(model), recipe="megatron-qwen3-vl-moe-hub")
    expected = {
        name: tensor.transpose(1, 2) if ".experts." in name else tensor for name, tensor in saved(model).items()
    }
    assert_equal(found, expected)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(3, 15).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("write", [write_legacy, write_dist])
def test_a_tower_of_megatrons_layers_cut_over_ranks(tmp_path: Path, write: Any) -> None:
    """The towers of the other families are in test_megatron_logits."""
    model = model_of("qwen2_5_vl", num_hidden_layers=4)
    config = config_of(model)
    args = {"group_query_attention": True, "padded_vocab_size": 40, "vocab_size": 37, "kv_channels": 8}
    args |= {"position_embedding_type": "mrope", "num_layers": 4, "hidden_size": 48, "ffn_hidden_size": 20}
    args |= {"num_attention_heads": 6, "num_query_groups": 2}
    run = Run(tp=2, pp=2, chunks=((2, 2),), args=args)
    write(tmp_path / "ckpt", run, as_megatron_vision(model, vocab=40, is_kept=False))
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(config))
    gather_checkpoint(tmp_path / "ckpt", tmp_path / "out")
    assert_equal(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), saved(model))
