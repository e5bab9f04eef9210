"""Vision-language families: a language model of Megatron-core's beside a vision tower."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

from tests.recipes.families.family import Family, Shapes
from tests.recipes.made_checkpoints import tiny_of
from tests.recipes.made_vision import VISION_FAMILIES, as_megatron_vision

__all__ = ["FAMILIES"]

_SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_SIZES = {"num_hidden_layers": 2, "vocab_size": 48, "rms_norm_eps": 1e-6}
_MROPE = {"position_embedding_type": "mrope", "mrope_section": [1, 1, 2]}
_GLM_ROPE = {
    "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]
}  # fmt: skip
_MINISTRAL_ROPE = {
    "rope_type": "default", "rope_theta": 1000000.0, "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16384,
}  # fmt: skip
_GEMMA_ROPE = {
    kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
}
_GEMMA = {
    "query_pre_attn_scalar": 8, "sliding_window": 64, "tie_word_embeddings": True, "rope_parameters": _GEMMA_ROPE
}  # fmt: skip
_GEMMA_ARGS = {"apply_layernorm_1p": True, "swiglu": False, "gated_linear_unit": True, "qk_layernorm": True}


def _family(
    name: str, model_type: str, text: Mapping[str, Any], args: Mapping[str, Any], of: str | None = None,
    **options: Any,
) -> Family:  # fmt: skip
    """Return a family of tests/recipes/made_vision.py with other values of its text_config.

    Args:
        name: the family's name.
        model_type: as config.json has it.
        text: values of text_config.
        args: arguments of Megatron's.
        of: the family's name whose model has Hugging Face's own tower, where this one's is of Megatron's layers.
        options: other values of config.json.
    """
    config = {"model_type": model_type, "tie_word_embeddings": False, **copy.deepcopy(VISION_FAMILIES[model_type])}
    config["text_config"] = {**config["text_config"], **_SIZES, **copy.deepcopy(text)}
    config |= options
    return Family(name, config, args, tower=partial(_tower_shapes, model_type, config, of is None), of=of)


def _tower_shapes(model_type: str, config: Mapping[str, Any], is_kept: bool) -> Shapes:
    """Return the shapes of all that lies beside the language model."""
    options = copy.deepcopy({key: value for key, value in config.items() if key != "model_type"})
    tensors = as_megatron_vision(tiny_of(model_type, options), is_kept=is_kept)
    return {name: tuple(t.shape) for name, t in tensors.items() if not name.startswith("language_model.")}


FAMILIES = (
    _family("qwen2-5-vl", "qwen2_5_vl", {}, {**_MROPE, "add_qkv_bias": True}),
    _family("qwen3-vl", "qwen3_vl", {}, {**_MROPE, "qk_layernorm": True}),
    _family(
        "qwen3-vl-moe", "qwen3_vl_moe", {"mlp_only_layers": [0]},
        {**_MROPE, "qk_layernorm": True, "moe_router_pre_softmax": False},
    ),
    _family(
        "glm4v", "glm4v", {"rope_parameters": _GLM_ROPE},
        {**_MROPE, "mrope_section": [1, 1, 0], "add_qkv_bias": True, "rotary_interleaved": True, "rotary_percent": 0.5},
    ),
    _family(
        "glm4v-moe", "glm4v_moe", {"attention_bias": True, "routed_scaling_factor": 1.5},
        {**_SIGMOID, **_MROPE, "add_qkv_bias": True, "rotary_percent": 0.5},
    ),
    _family("mistral3", "mistral3", {"rope_parameters": _MINISTRAL_ROPE}, {"position_embedding_type": "yarn"}),
    _family("internvl", "internvl", {}, {"add_qkv_bias": True}),
    _family("gemma3-vl", "gemma3", _GEMMA, _GEMMA_ARGS, tie_word_embeddings=True),
    _family("gemma3-vl-layers", "gemma3", _GEMMA, _GEMMA_ARGS, "gemma3-vl", tie_word_embeddings=True),
)  # fmt: skip
