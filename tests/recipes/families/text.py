"""The families of text models that Megatron-Bridge and mbridge convert beside those of `known`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.recipes.families.family import Family
from tests.recipes.families.known import DEEPSEEK, GLM, LATENT, SIGMOID, SIZES, without

if TYPE_CHECKING:
    import torch

__all__ = ["FAMILIES"]

_GEMMA = {**SIZES, "tie_word_embeddings": True}
_GEMMA_ARGS = {"apply_layernorm_1p": True, "swiglu": False, "gated_linear_unit": True}
_GEMMA2 = {
    **_GEMMA, "query_pre_attn_scalar": 8, "attn_logit_softcapping": None, "final_logit_softcapping": 3.0,
    "sliding_window": 64,
}  # fmt: skip
_GEMMA3 = {
    **_GEMMA, "query_pre_attn_scalar": 8, "sliding_window": 64,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
    },
}  # fmt: skip
_GPT_OSS = {
    **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64, "swiglu_limit": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
}  # fmt: skip
_OLMOE = {**without("head_dim", SIZES), "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}
_NEMOTRON = {
    **without("rms_norm_eps", SIZES), "norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5,
}  # fmt: skip
_MINISTRAL = {
    **SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "llama_4_scaling_beta": 0.1,
                                 "original_max_position_embeddings": 16384},
}  # fmt: skip


def _block(n_heads_in_group: int | None, ffn_mult: float | None) -> dict[str, Any]:
    return {
        "attention": {
            "n_heads_in_group": n_heads_in_group, "no_op": n_heads_in_group is None, "replace_with_linear": False
        },
        "ffn": {"ffn_mult": ffn_mult, "no_op": ffn_mult is None, "replace_with_linear": False},
    }  # fmt: skip


_NAS = {
    **SIZES, "model_type": "nemotron-nas", "num_hidden_layers": 4, "num_key_value_heads": None,
    "intermediate_size": None, "block_configs": [_block(3, 16.0), _block(None, 20.0), _block(1, None), _block(3, 20.0)],
}  # fmt: skip
"""As nvidia/Llama-3_3-Nemotron-Super-49B-v1's config.json: groups and widths by layer, layers without a block."""


def make_nas(config: Mapping[str, Any]) -> torch.nn.Module:
    """Return the model that DeciLM's own code makes of such a config.json, from transformers' modules of Llama."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    def config_of(block: dict[str, Any]) -> LlamaConfig:
        heads, mult = block["attention"]["n_heads_in_group"], block["ffn"]["ffn_mult"]
        kept = {key: value for key, value in config.items() if key not in ("block_configs", "model_type")}
        kept["num_key_value_heads"] = config["num_attention_heads"] // (heads or 1)
        kept["intermediate_size"] = -(-int(2 * (mult or 1) * config["hidden_size"] / 3) // 256) * 256
        return LlamaConfig(**kept, attn_implementation="eager")

    class Layer(torch.nn.Module):
        def __init__(self, block: dict[str, Any], number: int) -> None:
            super().__init__()
            its = config_of(block)
            if not block["attention"]["no_op"]:
                self.input_layernorm = llama.LlamaRMSNorm(its.hidden_size, its.rms_norm_eps)
                self.self_attn = llama.LlamaAttention(its, number)
            if not block["ffn"]["no_op"]:
                self.post_attention_layernorm = llama.LlamaRMSNorm(its.hidden_size, its.rms_norm_eps)
                self.mlp = llama.LlamaMLP(its)

        def forward(self, x: torch.Tensor, positions: Any, mask: torch.Tensor) -> torch.Tensor:
            if hasattr(self, "self_attn"):
                x = x + self.self_attn(self.input_layernorm(x), positions, mask)[0]
            return x + self.mlp(self.post_attention_layernorm(x)) if hasattr(self, "mlp") else x

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            its = config_of(config["block_configs"][0])
            self.model = torch.nn.Module()
            self.model.embed_tokens = torch.nn.Embedding(its.vocab_size, its.hidden_size)
            self.model.layers = torch.nn.ModuleList(
                Layer(block, number) for number, block in enumerate(config["block_configs"])
            )
            self.model.norm = llama.LlamaRMSNorm(its.hidden_size, its.rms_norm_eps)
            self.lm_head = torch.nn.Linear(its.hidden_size, its.vocab_size, bias=False)
            self.rotary = llama.LlamaRotaryEmbedding(its)

        def forward(self, tokens: torch.Tensor) -> Any:
            x = self.model.embed_tokens(tokens)
            length = tokens.shape[1]
            positions = self.rotary(x, torch.arange(length)[None])
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
            for layer in self.model.layers:
                x = layer(x, positions, mask)
            return type("Output", (), {"logits": self.lm_head(self.model.norm(x))})

    return Model().eval()


def make_mimo(config: Mapping[str, Any]) -> torch.nn.Module:
    """Return the model without its layers of further tokens: Qwen 2's."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    kept = {key: value for key, value in config.items() if key not in ("model_type", "num_nextn_predict_layers")}
    return Qwen2ForCausalLM(Qwen2Config(**kept)).eval()


_NEXT = {"num_nextn_predict_layers": 1}

FAMILIES = (
    Family(
        "deepseek-v3-mtp", {"model_type": "deepseek_v3", **DEEPSEEK, **_NEXT}, {**LATENT, **SIGMOID}, of="deepseek-v3"
    ),
    Family(
        "glm4-moe-mtp",
        {"model_type": "glm4_moe", **GLM, **_NEXT},
        {**SIGMOID, "qk_layernorm": True, "add_qkv_bias": True, "rotary_percent": 0.5},
        of="glm4-moe",
    ),
    Family("mimo", {"model_type": "mimo", **without("head_dim", SIZES), **_NEXT}, {"add_qkv_bias": True}, make_mimo),
    Family("nemotron-nas", _NAS, hugging_face=make_nas),
    Family("nemotron", {"model_type": "nemotron", **_NEMOTRON}, {
        "swiglu": False, "squared_relu": True, "normalization": "LayerNorm", "apply_layernorm_1p": True,
        "rotary_percent": 0.5,
    }),
    Family("gemma", {"model_type": "gemma", **_GEMMA}, _GEMMA_ARGS),
    Family("gemma2", {"model_type": "gemma2", **_GEMMA2}, _GEMMA_ARGS),
    Family("gemma3", {"model_type": "gemma3_text", **_GEMMA3}, {**_GEMMA_ARGS, "qk_layernorm": True}),
    Family("gpt-oss", {"model_type": "gpt_oss", **_GPT_OSS}, {
        "swiglu": False, "quick_geglu": True, "add_bias_linear": True, "softmax_type": "learnable",
        "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.5, "position_embedding_type": "yarn",
        "moe_ffn_hidden_size": 20, "window_size": [64, 0], "window_attn_skip_freq": 2,
    }),
    Family("olmoe", {"model_type": "olmoe", **_OLMOE}, {
        "qk_layernorm": True, "moe_ffn_hidden_size": 20, "moe_router_pre_softmax": True,
    }, num_ways=1),
    Family("ministral3", {"model_type": "ministral3", **_MINISTRAL}, {"position_embedding_type": "yarn"}),
)  # fmt: skip
