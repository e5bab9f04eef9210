"""The language models of vision-language families as Megatron-core makes them, without a picture.

Megatron-Bridge's and mbridge's own modules around them need Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.oracle.megatron_cores import known, text
from tests.oracle.megatron_cores.core import Core

__all__ = ["CORES"]

_SECTIONS = {"mrope_section": [1, 1, 2]}


def _norm_behind(model: torch.nn.Module) -> None:
    """Norm what attention and block return, as mbridge's Glm4TransformerLayer."""
    config = model.config

    def norm_of(norm: torch.nn.Module) -> Any:
        return lambda module, inputs, output: (norm(output[0]), output[1])

    for layer in model.decoder.layers:
        for name, block in (("post_self_attn_layernorm", layer.self_attention), ("post_mlp_layernorm", layer.mlp)):
            norm = torch.nn.RMSNorm(config.hidden_size, config.layernorm_epsilon)
            layer.add_module(name, norm)
            block.register_forward_hook(norm_of(norm))


CORES = {
    "qwen2-5-vl": Core(_SECTIONS),
    "qwen3-vl": Core(_SECTIONS),
    "qwen3-vl-moe": Core({**_SECTIONS, **known.CORES["qwen3-moe"].options}),
    # Megatron's MultimodalRotaryEmbedding fails on interleaved pairs: a view of a transposed tensor.
    "glm4v": Core({"rotary_interleaved": True}, {"position_embedding_type": "rope"}, change=_norm_behind),
    "glm4v-moe": Core({**_SECTIONS, **known.CORES["glm4-moe"].options}),
    "mistral3": text.CORES["ministral3"],
    "internvl": known.CORES["qwen2"],
    "gemma3-vl": text.CORES["gemma3"],
}
