"""Configs of a family's own small sizes, for those that no common sizes fit: lists for each layer, stages, ratios."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

__all__ = ["tailor"]

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "depth")

_MIMI = {"upsample_groups": 64, "num_filters": 8, "codebook_dim": 16, "vector_quantization_hidden_dimension": 16}
_RESNET = {"model_type": "resnet", "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 32, 64], "embedding_size": 8}
_VIBE = {"depths": [1] * 4, "downsampling_ratios": [2, 2, 2], "num_filters": 8}
_OWN: dict[str, dict[str, Any]] = {
    "beit": {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
    "conditional_detr": {"backbone_config": _RESNET},
    "cosmos3_edge": {"projector_hidden_size": 64, "text_config": {"rope_parameters": {"mrope_section": [4, 2, 2]}}},
    "csm": {"codec_config": _MIMI, "text_vocab_size": 160, "depth_decoder_config": {"backbone_hidden_size": 64}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}},
    "deformable_detr": {"backbone_config": _RESNET},
    "detr": {"backbone_config": {**_RESNET, "out_indices": [1, 2, 3, 4]}, "encoder_attention_heads": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "audio_config": {"adapter_out_dim": 64, "adapter_input_size": 64},
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    },
    "emu3": {
        "vocabulary_map": {"<|extra_200|>": 1, "<image>": 2, "<|visual token 000000|>": 3},
        "vq_config": {"base_channels": 32},
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [48, 32],
            "moe_k": 2,
            "rope_parameters": {"mrope_section": [3, 3, 2]},
        },
    },
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 160,
        "hidden_size_per_layer_input": 16,
    },
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4},
    "hunyuan_vl": {"text_config": {"head_dim": 16}, "vision_config": {"out_hidden_size": 64, "text_hidden_size": 64}},
    "inkling2": {
        "text_config": {"n_routed_experts": 4, "unpadded_vocab_size": 150},
        "vision_config": {"text_hidden_size": 64, "projection_hidden_dim": 96},
    },
    "kyutai_speech_to_text": {"codec_config": _MIMI},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lw_detr": {
        "backbone_config": {"image_size": 64, "num_windows": 4, "num_windows_side": 2},
        "num_feature_levels": 1,
        "projector_scale_factors": [1.0],
    },
    "molmo2": {
        "adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": 64},
        "vision_config": {"image_size": [32, 32], "num_position_embeddings": 16},
    },
    "nemo_speechlm": {"audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 64}}}},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_omni_moe": {
        "talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 48}},
    },
    "sapiens2": {
        "head_config": {
            "upsample_out_channels": [16, 16],
            "conv_out_channels": [16],
            "scale_conv_out_channels": [8],
            "scale_final_hidden_sizes": [8, 8],
        },
    },
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": _VIBE, "semantic_tokenizer_encoder_config": _VIBE},
}
"""Model type -> values for its config, in the form of the config."""


def tailor(model_type: str, values: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Return a small config that is consistent in itself.

    Args:
        model_type: the type in config.json.
        values: the config's values as its class makes them.
        small: the same with small sizes, which some keys contradict.
    """
    made = _cut(values, small)
    _merge(made, _OWN.get(model_type, {}))
    return made


def _cut(values: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Return the small config with lists of as many entries as layers, and ids inside the vocabulary."""
    made = dict(copy.deepcopy(small))
    key = next((key for key in _LAYERS if isinstance(values.get(key), int)), None)
    before, after = (values[key], small[key]) if key else (0, 0)
    if "out_features" in made and key:  # decoders take the features of four layers
        before, after = values[key], 4
        made[key] = after
        count = len(made["out_features"] or [1])
        made["out_features"] = [f"stage{number}" for number in range(after - count + 1, after + 1)]
        for stages in ("stage_names", "out_indices"):
            made.pop(stages, None)
    vocabulary = made.get("vocab_size")
    for name, value in made.items():
        if isinstance(value, dict) and value.keys() and all(each.isdigit() for each in value):
            made[name] = {each: inner for each, inner in value.items() if int(each) < after}
        elif isinstance(value, dict):
            made[name] = _cut(values[name], value)
        elif isinstance(value, list) and len(value) == before > 0:
            made[name] = value[:after]
        elif name.endswith("token_id") and isinstance(value, int) and isinstance(vocabulary, int):
            made[name] = min(value, vocabulary - 1)
    return made


def _merge(made: dict[str, Any], own: Mapping[str, Any]) -> None:
    for name, value in own.items():
        is_inner = isinstance(value, dict) and isinstance(made.get(name), dict) and "model_type" not in value
        if is_inner:
            _merge(made[name], value)
        else:
            made[name] = value
