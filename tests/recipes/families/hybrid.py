"""Families with state space mixers beside attention."""

from __future__ import annotations

from tests.recipes.families.family import Family
from tests.recipes.made_hybrids import HYBRID_FAMILIES

__all__ = ["FAMILIES"]

_QWEN3_NEXT = {"model_type": "qwen3_next", **HYBRID_FAMILIES["qwen3_next"], "vocab_size": 48, "rms_norm_eps": 1e-6}
_QWEN3_NEXT_ARGS = {
    "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4, "apply_layernorm_1p": True, "qk_layernorm": True, "rotary_percent": 0.25,
    "attention_output_gate": True, "moe_router_pre_softmax": False,
}  # fmt: skip

FAMILIES = (
    Family("nemotron-h", {
        "model_type": "nemotron_h", **HYBRID_FAMILIES["nemotron_h"], "vocab_size": 48, "layer_norm_epsilon": 1e-5,
        "routed_scaling_factor": 2.5,
    }, {
        "num_layers": 6, "hybrid_override_pattern": "M*-EM*", "mamba_num_heads": 4, "mamba_head_dim": 6,
        "mamba_num_groups": 2, "mamba_state_dim": 5, "swiglu": False, "squared_relu": True, "norm_epsilon": 1e-5,
        "position_embedding_type": "none", "moe_shared_expert_intermediate_size": 16,
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    }),
    Family("qwen3-next", _QWEN3_NEXT, _QWEN3_NEXT_ARGS),
    Family("qwen3-next-mtp", _QWEN3_NEXT, {**_QWEN3_NEXT_ARGS, "mtp_num_layers": 1}, of="qwen3-next"),
)  # fmt: skip
