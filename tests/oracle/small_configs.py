"""Configs of a family's own small sizes, for those that no common sizes fit: lists for each layer, stages, ratios."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

__all__ = ["OWN", "tailor"]

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "depth")

_MIMI = {"upsample_groups": 64, "num_filters": 8, "codebook_dim": 16, "vector_quantization_hidden_dimension": 16}
_RESNET = {"model_type": "resnet", "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 32, 64], "embedding_size": 8}
_GEMMA3N = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [96] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 160,
    "hidden_size_per_layer_input": 16,
}
_GEMMA_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
_OCR_EXPERTS = {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPES = {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}
_LONG_AND_SHORT = (
    "vertical_long_to_small_conv", "horizontal_small_to_long_conv", "symmetric_conv_long",
)  # fmt: skip
_TEXT_DETECTOR = {
    "intraclass_block_config": {
        "reduce_channel": [1, 1, 0],
        "return_channel": [1, 1, 0],
        **{f"{kind}_{ratio}ratio": [3, 1, 1] for kind in _LONG_AND_SHORT for ratio in ("long", "mid", "short")},
    },
    "kernel_list": [3, 2, 2],
    "scale_factor_list": [1, 2, 4, 8],
}
_VIDEO = {"vision_config": {"architecture": "vit_pe_core_tiny_patch16_384"}}
_VIBE = {"depths": [1] * 4, "downsampling_ratios": [2, 2, 2], "num_filters": 8}
OWN: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 8},
    "beit": {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "cohere_compass": {"text_config": _ROPES},
    "cohere_compass_text": _ROPES,
    "conditional_detr": {"backbone_config": _RESNET},
    "cosmos3_edge": {"projector_hidden_size": 64, "text_config": {"rope_parameters": {"mrope_section": [4, 2, 2]}}},
    "csm": {"codec_config": _MIMI, "text_vocab_size": 160, "depth_decoder_config": {"backbone_hidden_size": 64}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2}},
    "deepseek_ocr2": {"text_config": _OCR_EXPERTS},
    "deepseek_ocr2_text": _OCR_EXPERTS,
    "deformable_detr": {"backbone_config": _RESNET},
    "detr": {"backbone_config": {**_RESNET, "out_indices": [1, 2, 3, 4]}, "encoder_attention_heads": 8},
    "diffusion_gemma": {"text_config": _GEMMA_EXPERTS},
    "diffusion_gemma_text": _GEMMA_EXPERTS,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "audio_config": {"adapter_out_dim": 64, "adapter_input_size": 64},
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "dpt": {"backbone_config": _RESNET, "is_hybrid": False},
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
    "gemma3n": {"text_config": _GEMMA3N, "vision_config": {"architecture": "resnet18"}},
    "gemma3n_text": _GEMMA3N,
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "4/8"},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "hiera": {"decoder_hidden_size": 64, "decoder_depth": 1, "decoder_num_heads": 4},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4},
    "hunyuan_vl": {"text_config": {"head_dim": 16}, "vision_config": {"out_hidden_size": 64, "text_hidden_size": 64}},
    "hunyuan_vl_text": {"head_dim": 16},
    "informer": {"prediction_length": 8},
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
    "ministral": {"head_dim": 16},
    "molmo2": {
        "adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": 64},
        "vision_config": {"image_size": [32, 32], "num_position_embeddings": 16},
    },
    "moshi": {"audio_encoder_config": _MIMI},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemo_speechlm": {"audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 64}}}},
    "nemotron": {"num_key_value_heads": 2},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "pe_audio_video": {"audio_video_config": {"video_config": _VIDEO}},
    "pe_audio_video_encoder": {"video_config": _VIDEO},
    "pe_video": {"video_config": _VIDEO},
    "pe_video_encoder": _VIDEO,
    "perceiver": {"num_cross_attention_heads": 1},
    "perception_lm": {"vision_config": {"architecture": "vit_tiny_patch16_224", "model_args": {"embed_dim": 192}}},
    "pp_ocrv5_server_det": _TEXT_DETECTOR,
    "pp_ocrv6_medium_det": _TEXT_DETECTOR,
    "qwen3_omni_moe": {
        "talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 48}},
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 48]},
    "sapiens2": {
        "head_config": {
            "upsample_out_channels": [16, 16],
            "conv_out_channels": [16],
            "scale_conv_out_channels": [8],
            "scale_final_hidden_sizes": [8, 8],
        },
    },
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "time_series_transformer": {"prediction_length": 8},
    "timm_backbone": {"backbone": "resnet18"},
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": _VIBE, "semantic_tokenizer_encoder_config": _VIBE},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
}
"""Model type -> values for its config, in the form of the config."""

_OF_CLASSES: dict[str, dict[str, Any]] = {
    "BayesianDetectorModel": {"watermarking_depth": 3},
    "BridgeTowerForContrastiveLearning": {"contrastive_hidden_size": 64, "logit_scale_init_value": 2.6},
    "EsmForProteinFolding": {
        "vocab_size": 33,
        "is_folding_model": True,
        "esmfold_config": {"fp16_esm": False},
        "vocab_list": ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"],
    },
    "Qwen3OmniMoeTalkerForConditionalGeneration": {
        "spatial_merge_size": 2,
        "text_config": {"shared_expert_intermediate_size": 48},
    },
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "ViltForImagesAndTextClassification": {"num_images": 2},
}
"""Class -> values for its config, beside those of its model type."""


def tailor(model_type: str, name: str, values: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Return a small config that is consistent in itself.

    Args:
        model_type: the type in config.json.
        name: the class.
        values: the config's values as its class makes them.
        small: the same with small sizes, which some keys contradict.
    """
    made = _cut(values, small)
    _merge(made, OWN.get(model_type, {}))
    _merge(made, _OF_CLASSES.get(name, {}))
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
