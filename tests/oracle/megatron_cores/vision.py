"""The language models of vision-language families as Megatron-core makes them, and Gemma 3's vision tower.

Megatron-Bridge's and mbridge's own modules around them need Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import avg_pool2d, gelu, rms_norm

from tests.oracle.megatron_cores import known, text
from tests.oracle.megatron_cores.core import Core
from tests.recipes.families.family import PICTURE, draw_weights

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


def _look(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Run Megatron's Siglip, and what mbridge's Gemma3MultiModalProjector computes of its output."""
    torch.Tensor.cuda = lambda self: self
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=12, add_qkv_bias=True,
        activation_func=partial(gelu, approximate="tanh"), layernorm_epsilon=1e-6, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, masked_softmax_fusion=False, bias_dropout_fusion=False,
        bias_activation_fusion=False, apply_rope_fusion=False,
    )  # fmt: skip
    spec = get_vit_layer_with_local_spec()
    spec.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    size = PICTURE[-1]
    model = CLIPViTModel(
        config, spec, ln_post_impl=WrappedTorchNorm, add_class_token=False, class_token_len=0, patch_dim=2, img_h=size,
        img_w=size, model_subtype="siglip",
    ).eval()  # fmt: skip
    names = {
        "vision_model.": "", "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }  # fmt: skip
    own = {name: tensor for name, tensor in tensors.items() if name.startswith("vision_model.")}
    for theirs, local in names.items():
        own = {name.replace(theirs, local): tensor for name, tensor in own.items()}
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert not unexpected and all("_extra_state" in name for name in missing)
    picture = torch.from_numpy(draw_weights({"picture": PICTURE})["picture"])
    seen = model(picture).transpose(1, 2).unflatten(2, (size // 2, size // 2))
    pooled = avg_pool2d(seen, 2).flatten(2).transpose(1, 2)
    norm = tensors["vision_projection.mm_input_projection.layer_norm_weight"] + 1
    normed = rms_norm(pooled, norm.shape, norm, config.layernorm_epsilon)
    return normed @ tensors["vision_projection.mm_input_projection.weight"].T


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
    "gemma3-vl-layers": replace(text.CORES["gemma3"], look=_look),
}
