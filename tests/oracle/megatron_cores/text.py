"""Nemotron, Gemma, GPT-OSS, OLMoE, Ministral and Llama-Nemotron as Megatron-core and Megatron-Bridge make them."""

from __future__ import annotations

import json
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig

from tests.oracle.megatron_cores.core import Core
from tests.recipes.families import FAMILIES

__all__ = ["CORES"]


def _square_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _scale_embedding(model: torch.nn.Module) -> None:
    """As Megatron-Bridge's EmbeddingScalingMixin."""
    scale = model.config.hidden_size**0.5
    model.embedding.register_forward_hook(lambda module, inputs, output: output * scale)


class _NormedRowParallelLinear(RowParallelLinear):
    """Norms its output, as Megatron-Bridge's TERowParallelLinearLayerNorm."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = torch.nn.RMSNorm(output_size, config.layernorm_epsilon)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(x)
        return self.post_layernorm(output), bias


def _norms_behind(config: Any) -> Any:
    spec = get_gpt_decoder_block_spec(config, False, normalization=config.normalization)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.linear_proj = _NormedRowParallelLinear
        layer.submodules.mlp.submodules.linear_fc2 = _NormedRowParallelLinear
    return spec


class _NormOfAllHeads(torch.nn.RMSNorm):
    """As the norms of Megatron-Bridge's OLMoESelfAttention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(-2)).view_as(x)


def _norm_all_heads(model: torch.nn.Module) -> None:
    config = model.config
    for layer in model.decoder.layers:
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_query_groups)):
            norm = _NormOfAllHeads(heads * config.kv_channels, config.layernorm_epsilon)
            setattr(layer.self_attention, f"{name}_layernorm", norm)


def _make_heterogeneous(**options: Any) -> HeterogeneousTransformerConfig:
    """Return the config with the blocks of each layer, which Megatron reads from a config.json."""
    content = json.dumps(FAMILIES["nemotron-nas"].full_config())
    return HeterogeneousTransformerConfig(heterogeneous_layers_config_encoded_json=content, **options)


_GEMMA = {"gated_linear_unit": True, "activation_func": _gelu}

_MIXED = {"moe_layer_freq": [0, 1], "moe_router_pre_softmax": True}

CORES = {
    "deepseek-v3-mtp": Core(_MIXED),
    "glm4-moe-mtp": Core(_MIXED),
    "mimo": Core(),
    "nemotron-nas": Core(spec=get_gpt_heterogeneous_layer_spec, config=_make_heterogeneous),
    "nemotron": Core({"activation_func": _square_relu}, is_zero_centered=True),
    "gemma": Core(_GEMMA, change=_scale_embedding, is_zero_centered=True),
    "gemma2": Core(
        _GEMMA,
        spec=_norms_behind,
        change=_scale_embedding,
        logits=lambda logits: 3.0 * torch.tanh(logits / 3.0),
        is_zero_centered=True,
    ),
    "gemma3": Core(_GEMMA, spec=_norms_behind, change=_scale_embedding, is_zero_centered=True),
    "gpt-oss": Core({"gated_linear_unit": True, "activation_func": quick_gelu}, model={"rotary_base": 150000}),
    "olmoe": Core(change=_norm_all_heads),
    "ministral3": Core(model={"rotary_base": 1000000}),
}
