"""Vision-language families, from Megatron-Bridge's and mbridge's names to a folder that transformers loads."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.cli.bench import run as run_command
from tests.readers.made_megatron import Run, write_dist, write_legacy
from tests.recipes.made_checkpoints import config_of, leave, saved, stacked
from tests.recipes.made_vision import MEGATRON_TOWERS, VISION_EXPERTS, VISION_FAMILIES, as_megatron_vision, tiny_vision
from tests.recipes.test_model_families import ARGS, assert_equal
from xrank import gather_checkpoint

MIXED = VISION_EXPERTS
RENAMED = {"gemma3": "gemma3-vl"}

pytestmark = pytest.mark.timeout(120)


@cache
def model_of(family: str, **changes: Any) -> torch.nn.Module:
    return tiny_vision(family, **changes)


def gathered(folder: Path, tensors: dict[str, torch.Tensor], config: Any, **options: Any) -> dict[str, torch.Tensor]:
    gather_checkpoint(leave(folder / "ws", tensors, config), folder / "out", **options)
    return safetensors.torch.load_file(folder / "out" / "model.safetensors")


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_folder_that_transformers_loads(tmp_path: Path, family: str) -> None:
    import transformers

    model = model_of(family)
    source = leave(tmp_path / "ws", as_megatron_vision(model, vocab=48), config_of(model))
    report = gather_checkpoint(source, tmp_path / "out")
    assert report.source["recipe"] == f"megatron-{RENAMED.get(family, family).replace('_', '-')}"
    assert_equal(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), saved(model))
    loaded, told = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    tokens = torch.arange(3, 15).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)


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


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_transformer_engines_names_and_layers_in_one_tensor(tmp_path: Path, family: str) -> None:
    model = model_of(family)
    tensors = as_megatron_vision(model, te=True, is_kept=family not in MEGATRON_TOWERS)
    if family not in MIXED:  # of layers that differ there is no one tensor
        tensors = stacked(tensors, "language_model.decoder.layers.")
    if family in MEGATRON_TOWERS:
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


@pytest.mark.parametrize(
    ("family", "is_kept"), [*((family, family not in MEGATRON_TOWERS) for family in VISION_FAMILIES), ("gemma3", True)]
)
@pytest.mark.parametrize("write", [write_legacy, write_dist])
def test_checkpoints_of_many_ranks(tmp_path: Path, family: str, is_kept: bool, write: Any) -> None:
    changes = {"num_hidden_layers": 4}
    model = model_of(family, **changes)
    tensors = as_megatron_vision(model, vocab=40, is_kept=is_kept)
    config = config_of(model)
    has_experts = family in VISION_EXPERTS
    run = Run(tp=2, pp=2, ep=2 if has_experts else 1, chunks=((2, 2),), has_experts=has_experts)
    run = replace(run, args=args_of(config))
    if family in ("internvl", "gemma3"):
        run = replace(run, plain=("vision_",))
    write(tmp_path / "ckpt", run, tensors)
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(config))
    ended = run_command("gather", tmp_path / "ckpt", "--out", tmp_path / "out")
    assert ended.exit_code == 0, ended.stderr
    assert_equal(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), saved(model))


def args_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a run of a model with that config."""
    text = config["text_config"]
    args = {its: text[ours] for ours, its in ARGS.items() if ours in text}
    head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    args |= {"group_query_attention": True, "padded_vocab_size": 40, "vocab_size": 37, "kv_channels": head}
    if text["model_type"] == "gemma3_text":
        args |= {"swiglu": False, "gated_linear_unit": True, "apply_layernorm_1p": True, "qk_layernorm": True}
    return args | {"position_embedding_type": "mrope" if "mrope_section" in str(text) else "rope"}
