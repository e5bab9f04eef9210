"""Llama, Qwen, Mistral, DeepSeek, GLM and GPT-2 as Megatron-core makes them."""

from __future__ import annotations

import torch

from tests.oracle.megatron_cores.core import Core

__all__ = ["CORES"]

_MIXED = {"moe_layer_freq": [0, 1], "moe_router_pre_softmax": True}
_DEEPSEEK_V3 = {
    **_MIXED, "moe_router_num_groups": 2, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5,
}  # fmt: skip
_DEEPSEEK_V2 = {**_MIXED, "moe_router_topk_scaling_factor": 2.5}

CORES = {
    "llama": Core(),
    "mistral": Core(),
    "qwen2": Core(),
    "qwen3": Core(),
    "mixtral": Core({"moe_router_pre_softmax": False, "moe_ffn_hidden_size": 20}),
    "qwen3-moe": Core({**_MIXED, "moe_router_pre_softmax": False, "moe_layer_freq": [0, 1]}),
    "qwen2-moe": Core({**_MIXED, "moe_shared_expert_gate": True}),
    "deepseek-v3": Core(_DEEPSEEK_V3),
    "deepseek-v2": Core(_DEEPSEEK_V2),
    "deepseek-v2-lite": Core({**_DEEPSEEK_V2, "q_lora_rank": None}),
    "glm4-moe": Core({**_MIXED, "moe_router_topk_scaling_factor": 1.5}),
    "gpt2": Core({"activation_func": torch.nn.functional.gelu}),
}
