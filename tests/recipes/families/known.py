"""The families of Llama, Qwen, Mistral, DeepSeek, GLM and GPT-2."""

from __future__ import annotations

from tests.recipes.families.family import Family

__all__ = ["DEEPSEEK", "FAMILIES", "GLM", "LATENT", "SIGMOID", "SIZES", "without"]

SIZES = {
    "num_hidden_layers": 2, "vocab_size": 48, "hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip


def without(key: str, sizes: dict[str, object]) -> dict[str, object]:
    """Return sizes without one of them."""
    return {name: size for name, size in sizes.items() if name != key}


_PLAIN = without("head_dim", SIZES)
_QWEN2_MOE = {
    **_PLAIN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 16, "mlp_only_layers": [0],
}  # fmt: skip
_QWEN3_MOE = {
    **SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [0],
    "norm_topk_prob": True,
}  # fmt: skip
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK = {
    **_PLAIN, **_ROUTED, "num_key_value_heads": 6, "q_lora_rank": 18, "kv_lora_rank": 14, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 5, "n_group": 2, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
GLM = {
    **SIZES, **_ROUTED, "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True,
}  # fmt: skip
_GPT2 = {
    "n_layer": 2, "vocab_size": 48, "n_embd": 24, "n_head": 6, "n_inner": 92, "n_positions": 19,
    "activation_function": "gelu", "tie_word_embeddings": True,
}  # fmt: skip
_QWEN3_MOE_ARGS = {"qk_layernorm": True, "moe_router_pre_softmax": False}
_QWEN2_MOE_ARGS = {"add_qkv_bias": True, "moe_router_pre_softmax": True}
LATENT = {"multi_latent_attention": True, "group_query_attention": False, "qk_layernorm": True}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}

FAMILIES = (
    Family("llama", {"model_type": "llama", **SIZES}),
    Family("mistral", {"model_type": "mistral", **SIZES}),
    Family("qwen2", {"model_type": "qwen2", **_PLAIN}, {"add_qkv_bias": True}),
    Family("qwen3", {"model_type": "qwen3", **SIZES}, {"qk_layernorm": True}),
    Family("mixtral", {
        "model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }),
    Family("qwen3-moe", {"model_type": "qwen3_moe", **_QWEN3_MOE}, _QWEN3_MOE_ARGS),
    Family("qwen2-moe", {"model_type": "qwen2_moe", **_QWEN2_MOE}, _QWEN2_MOE_ARGS),
    Family("deepseek-v3", {"model_type": "deepseek_v3", **DEEPSEEK}, {**LATENT, **SIGMOID}),
    Family("deepseek-v2", {"model_type": "deepseek_v2", **DEEPSEEK}, LATENT),
    Family("deepseek-v2-lite", {"model_type": "deepseek_v2", **DEEPSEEK, "q_lora_rank": None}, LATENT),
    Family(
        "glm4-moe",
        {"model_type": "glm4_moe", **GLM},
        {**SIGMOID, "qk_layernorm": True, "add_qkv_bias": True, "rotary_percent": 0.5},
    ),
    Family(
        "gpt2",
        {"model_type": "gpt2", **_GPT2},
        {
            "swiglu": False, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
            "add_bias_linear": True, "add_qkv_bias": True, "group_query_attention": False,
        },
    ),
)  # fmt: skip
