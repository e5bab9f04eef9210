"""Tiny models of many families: each is made, trained and saved by transformers' own class of that family."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

__all__ = ["FAMILIES", "Family", "load_model", "make_batch", "write_base_model"]

VOCAB_SIZE = 131  # odd, so that two ranks hold different numbers of rows
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_VISION_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Family:
    """One model type with sizes so small that two steps of training take less than a second.

    Attributes:
        model_type: transformers' name of it.
        config: what is given to its config class.
        auto_class: the class of transformers that loads it.
        is_tied: whether its embedding and its head are one tensor unless a config states otherwise.
        can_tie: whether a config can state otherwise.
        layer_classes: modules that FSDP wraps, where the class lists others or none.
        lora_targets: modules that LoRA adapts.
        lora_parameters: fused experts that LoRA adapts besides.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    auto_class: str = "AutoModelForCausalLM"
    is_tied: bool = False
    can_tie: bool = True
    layer_classes: tuple[str, ...] = ()
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj", "down_proj")
    lora_parameters: tuple[str, ...] = ()


def _decoder(model_type: str, **more: Any) -> Family:
    """Return a decoder whose config has Llama's fields."""
    fields = {name: more.pop(name) for name in list(more) if name in Family.__dataclass_fields__}
    return Family(model_type, _SIZES | more, **fields)


_FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_ATTENTION = ("q_proj", "v_proj")

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        _decoder("llama"),
        _decoder("mistral"),
        _decoder("qwen2"),
        _decoder("qwen3", head_dim=32),
        _decoder("phi3", lora_targets=("qkv_proj", "down_proj")),
        _decoder("olmo2"),
        _decoder("granite"),
        _decoder("gemma2", head_dim=32, is_tied=True),
        _decoder("gemma3_text", head_dim=32, is_tied=True),
        _decoder("qwen3_moe", head_dim=32, **_EXPERTS, lora_targets=_ATTENTION, lora_parameters=_FUSED),
        _decoder("olmoe", num_experts=4, num_experts_per_tok=2, lora_targets=_ATTENTION, lora_parameters=_FUSED),
        _decoder(
            "mixtral", num_local_experts=4, num_experts_per_tok=2, lora_targets=_ATTENTION, lora_parameters=_FUSED
        ),
        _decoder("gpt_oss", head_dim=32, num_local_experts=4, num_experts_per_tok=2, lora_targets=_ATTENTION),
        _decoder(
            "glm4_moe",
            head_dim=32,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            lora_targets=_ATTENTION,
        ),
        _decoder(
            "deepseek_v3",
            num_key_value_heads=2,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            lora_targets=("q_a_proj", "kv_b_proj", "o_proj"),
        ),
        Family(
            "gpt2",
            {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}
            | {"bos_token_id": 1, "eos_token_id": 2},
            is_tied=True,
            lora_targets=("c_attn", "c_proj"),
        ),
        Family(
            "gpt_neox",
            {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
            | {"num_attention_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2},
            lora_targets=("query_key_value", "dense"),
        ),
        Family(
            "falcon",
            {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
            | {"max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2},
            is_tied=True,
            lora_targets=("query_key_value", "dense"),
        ),
        Family(
            "opt",
            {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2}
            | {"num_attention_heads": 2, "max_position_embeddings": 128, "word_embed_proj_dim": 64},
            is_tied=True,
            lora_targets=("q_proj", "v_proj"),
        ),
        Family(
            "mamba",
            {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4}
            | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
            is_tied=True,
            lora_targets=("in_proj", "x_proj"),
        ),
        Family(
            "bert",
            {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
            | {"num_attention_heads": 2, "max_position_embeddings": 64},
            auto_class="AutoModelForMaskedLM",
            is_tied=True,
            can_tie=False,
            layer_classes=("BertLayer",),  # its other class holds the tied embedding, which FSDP1 must not part
            lora_targets=("query", "value"),
        ),
        Family(
            "t5",
            {"vocab_size": VOCAB_SIZE, "d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2}
            | {"decoder_start_token_id": 0},
            auto_class="AutoModelForSeq2SeqLM",
            is_tied=True,
            lora_targets=("q", "v"),
        ),
        Family(
            "whisper",
            {"vocab_size": VOCAB_SIZE, "d_model": 64, "num_mel_bins": 8, "encoder_layers": 2, "decoder_layers": 2}
            | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 96}
            | {"decoder_ffn_dim": 96, "max_source_positions": 24, "max_target_positions": 32}
            | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 3},
            auto_class="AutoModelForSpeechSeq2Seq",
            is_tied=True,
            can_tie=False,
            lora_targets=("q_proj", "v_proj"),
        ),
        Family(
            "qwen2_5_vl",
            {
                "text_config": _SIZES
                | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
                "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
                | {"out_hidden_size": 64, "fullatt_block_indexes": [1]},
                "image_token_id": 120,
                "video_token_id": 121,
                "vision_start_token_id": 122,
                "vision_end_token_id": 123,
            },
            auto_class="AutoModelForImageTextToText",
        ),
        Family(
            "llava",
            {
                "text_config": {"model_type": "llama"} | _SIZES,
                "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
                | _VISION_TOWER,
                "image_token_id": 120,
            },
            auto_class="AutoModelForImageTextToText",
            layer_classes=("LlamaDecoderLayer", "CLIPEncoderLayer"),  # its own list has a class that it lacks
        ),
    )
}


def write_base_model(family: Family, folder: Path, *, is_tied: bool | None = None, dtype: str = "float32") -> None:
    """Write the folder that a user trains from: config.json and weights, as save_pretrained writes them.

    Args:
        family: which model.
        folder: where it is made.
        is_tied: whether embedding and head are one tensor; None: as the family has it.
        dtype: of all weights.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **family.config)
    if family.can_tie:
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = family.is_tied if is_tied is None else is_tied
    model = getattr(transformers, family.auto_class).from_config(config)
    with torch.no_grad():
        # Biases and norms begin as zeros and ones, which would hide one in another's place.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def load_model(family: Family, folder: Path, **options: Any) -> PreTrainedModel:
    """Return the model in a folder, as a user loads it."""
    return getattr(transformers, family.auto_class).from_pretrained(folder, **options)


def make_batch(family: Family, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return one training example of a family."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 100, (12,), generator=generator)
    if family.model_type == "whisper":
        return {"input_features": torch.randn(8, 48, generator=generator), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens.clone()}
