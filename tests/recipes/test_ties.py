"""The names that share one tensor, as transformers' classes list them and as configs declare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from tests.cli.bench import run
from xrank import export_model
from xrank.commands.gather import gather_checkpoint
from xrank.recipes.ties import declares_ties, embedding_of, find_class_ties, find_config_ties

WHISPER = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}
MAMBA = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
QWEN_VL = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
T5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}
BERT = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "is_tied"),
    [
        (None, None),
        ({}, None),
        ({"model_type": "toy"}, None),
        ({"model_type": "gemma2"}, True),
        ({"model_type": "llama"}, False),
        ({"model_type": "llama", **TIED}, True),
        ({"model_type": "toy", "text_config": TIED}, True),
        (WHISPER, True),
        ({**WHISPER, **UNTIED}, False),
        ({**WHISPER, "tie_word_embeddings": "yes"}, True),
        (LLAVA, False),
        ({**LLAVA, "text_config": TIED}, True),
        ({**LLAVA, **UNTIED, "text_config": TIED}, True),
        # Gemma 3 goes by the key at its top alone.
        ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": UNTIED}, True),
        # T5 overrides a false key, and unties what differs: v1.1 has a head of its own.
        ({**T5, **UNTIED}, False),
        ({"architectures": "LlamaForCausalLM"}, None),
    ],
)
def test_what_a_config_declares(config: dict[str, Any] | None, is_tied: bool | None) -> None:
    assert declares_ties(config) is is_tied


@pytest.mark.parametrize(
    ("config", "pairs"),
    [
        (WHISPER, {"proj_out.weight": "model.decoder.embed_tokens.weight"}),
        (MAMBA, {"lm_head.weight": "backbone.embeddings.weight"}),
        ({**LLAVA, **TIED}, {"lm_head.weight": "model.language_model.embed_tokens.weight"}),
        ({**QWEN_VL, **TIED}, {"lm_head.weight": "model.language_model.embed_tokens.weight"}),
        (
            T5,
            {
                "encoder.embed_tokens.weight": "shared.weight",
                "decoder.embed_tokens.weight": "shared.weight",
                "lm_head.weight": "shared.weight",
            },
        ),
        (
            BERT,
            {
                "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
                "cls.predictions.decoder.bias": "cls.predictions.bias",
            },
        ),
    ],
    ids=lambda value: value["architectures"][0] if "architectures" in value else "",
)
def test_ties_of_classes(config: dict[str, Any], pairs: dict[str, str]) -> None:
    names = {*pairs, *pairs.values(), "model.norm.weight"}
    assert find_class_ties(names, config) == find_config_ties(names, config) == pairs
    assert find_class_ties({"model.norm.weight"}, config) == {}
    assert find_class_ties(names, {**config, **UNTIED}) == {}
    name, target = next(iter(pairs.items()))
    assert embedding_of(name, names, config) == target
    assert embedding_of(target, names, config) is None


def test_a_class_that_ties_nothing_goes_before_its_config() -> None:
    config = {"architectures": ["BigBirdPegasusForCausalLM"], "model_type": "bigbird_pegasus", **TIED}
    names = {"lm_head.weight", "model.decoder.embed_tokens.weight"}
    assert find_config_ties(names, config) == find_class_ties(names, config) == {}
    assert find_config_ties(names, {**config, "architectures": ["Other"]}) != {}


def test_a_model_inside_a_model_goes_by_its_own_config() -> None:
    head, embedding = "language_model.lm_head.weight", "language_model.model.decoder.embed_tokens.weight"
    for text, expected in ((TIED, {head: embedding}), (UNTIED, {})):
        config = {"architectures": ["Blip2ForConditionalGeneration"], "text_config": {"model_type": "opt", **text}}
        assert find_class_ties({head, embedding}, config) == expected


def test_other_names_than_in_memory_have_the_only_head_and_embedding() -> None:
    names = {"lm_head.weight", "model.embed_tokens.weight"}  # as the Hub has them
    assert find_config_ties(names, {**QWEN_VL, **TIED}) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert find_config_ties({*names, "other.embed_tokens.weight"}, {**QWEN_VL, **TIED}) == {}


@pytest.mark.parametrize("held", [("proj_out.weight", "model.decoder.embed_tokens.weight"), ("proj_out.weight",)])
def test_a_tied_tensor_is_written_once_under_the_name_that_save_pretrained_gives(
    tmp_path: Path, held: tuple[str, ...]
) -> None:
    source, base = tmp_path / "source", tmp_path / "base"
    weight = torch.rand(6, 4)
    others = {"model.decoder.embed_positions.weight": torch.rand(3, 4), "model.decoder.norm.weight": torch.rand(4)}
    saved = {"model.decoder.embed_tokens.weight": weight, **others}
    for folder, tensors in (
        (source, {**dict.fromkeys(held, weight), **others}),
        (base, saved),
    ):
        folder.mkdir()
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(WHISPER))
    for options in ({}, {"base_model": base}):
        gather_checkpoint(source, tmp_path / "out", overwrite=True, **options)
        found = load_file(tmp_path / "out/model.safetensors")
        assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
    assert run("verify", source, "--against", tmp_path / "out").exit_code == 0
    assert run("inspect", source, "--base-model", base).exit_code == 0


def test_a_head_keeps_its_name_among_names_of_the_hub(tmp_path: Path) -> None:
    weight = torch.rand(6, 4)
    tensors = {
        "lm_head.weight": weight,
        "model.embed_tokens.weight": weight.clone(),
        "model.norm.weight": torch.rand(4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    # A family without a recipe, which would miss the layers.
    family = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_VL, **TIED, **family}))
    gather_checkpoint(tmp_path, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == tensors.keys() - {"lm_head.weight"}


def test_values_that_differ_are_not_dropped(tmp_path: Path) -> None:
    tensors = {"proj_out.weight": torch.rand(6, 4), "model.decoder.embed_tokens.weight": torch.rand(6, 4)}
    tensors |= {"model.decoder.embed_positions.weight": torch.rand(3, 4), "model.decoder.norm.weight": torch.rand(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(WHISPER))
    ended = run("gather", tmp_path, "--out", tmp_path / "out")
    assert ended.exit_code == 4 and "proj_out.weight" in ended.stderr


class Detector(torch.nn.Module):
    """Heads of two layers that are one, also in the decoder, as Grounding DINO has them."""

    _tied_weights_keys = {r"head\.(?!0)\d+": "head.0", "decoder.head": "head"}  # noqa: RUF012 -- as transformers' classes

    def __init__(self) -> None:
        super().__init__()
        self.decoder = torch.nn.Module()
        self.head = torch.nn.ModuleList([torch.nn.Linear(3, 2)] * 2)
        self.decoder.head = self.head
        self.config = PretrainedConfig()


def test_the_name_that_a_live_module_keeps(tmp_path: Path) -> None:
    model = Detector()
    assert next(iter(model.state_dict())) == "decoder.head.0.weight"
    export_model(model, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == {"head.0.weight", "head.0.bias"}
    assert torch.equal(written["head.0.weight"], model.head[1].weight)
