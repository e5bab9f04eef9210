"""Weights drawn by name, so that two programs have the same without a file; sizes of models that Megatron-core runs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

LOGITS = Path(__file__).with_name("megatron_logits.json")
"""By family: the shapes of Megatron-core 0.16.1's tensors, and what its forward pass says after `TOKENS`."""
TOKENS = (3, 1, 4, 15, 9, 2, 6)
SIZES = {
    "num_hidden_layers": 2, "vocab_size": 48, "hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2_MOE_SIZES = {
    **{key: size for key, size in SIZES.items() if key != "head_dim"},
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 16,
    "mlp_only_layers": [0],
}  # fmt: skip
DEEPSEEK_SIZES = {
    **{key: size for key, size in SIZES.items() if key != "head_dim"}, "num_key_value_heads": 6,
    "q_lora_rank": 18, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
GLM_SIZES = {
    **SIZES, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True,
}  # fmt: skip
GPT2_SIZES = {
    "n_layer": 2, "vocab_size": 48, "n_embd": 24, "n_head": 6, "n_inner": 92, "n_positions": 19,
    "activation_function": "gelu",
}  # fmt: skip


def weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return numbers between -0.8 and 0.8, others for each name."""
    found = {}
    for name, shape in shapes.items():
        drawn = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()))).random(tuple(shape))
        found[name] = (drawn * 1.6 - 0.8).astype(np.float32)
    return found


def recorded() -> dict[str, dict[str, object]]:
    """Return what `LOGITS` holds."""
    return json.loads(LOGITS.read_text())
