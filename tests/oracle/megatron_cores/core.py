"""A model of Megatron-core on one CPU: its config, its modules, and what a trainer adds to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from tests.recipes.families import Family
from tests.recipes.families.family import NEXT, TOKENS, draw_weights

__all__ = ["Core", "run_core"]

_KEYS = {
    "num_layers": "num_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "ffn_hidden_size", "num_query_groups": "num_query_groups", "kv_channels": "kv_channels",
    "norm_epsilon": "layernorm_epsilon", "normalization": "normalization", "add_bias_linear": "add_bias_linear",
    "add_qkv_bias": "add_qkv_bias", "qk_layernorm": "qk_layernorm", "num_experts": "num_moe_experts",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size", "moe_router_topk": "moe_router_topk",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "moe_router_score_function": "moe_router_score_function",
    "moe_router_enable_expert_bias": "moe_router_enable_expert_bias", "moe_router_pre_softmax":
    "moe_router_pre_softmax", "multi_latent_attention": "multi_latent_attention", "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank", "qk_head_dim": "qk_head_dim", "qk_pos_emb_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim", "softmax_type": "softmax_type", "glu_linear_offset": "glu_linear_offset",
    "activation_func_clamp_value": "activation_func_clamp_value", "mtp_num_layers": "mtp_num_layers",
    "moe_router_topk_scaling_factor": "moe_router_topk_scaling_factor",
    "moe_router_num_groups": "moe_router_num_groups", "moe_router_group_topk": "moe_router_group_topk",
}  # fmt: skip
"""Megatron-LM's argument -> the field of Megatron-core's config (megatron/training/arguments.py:
core_transformer_config_from_args)."""
_SILU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
_EXPERTS = {"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none"}


@dataclass(frozen=True)
class Core:
    """How a family's model is made, beside its arguments.

    Args:
        options: fields of Megatron-core's config, over those that the family's arguments give.
        model: options of GPTModel.
        spec: makes the specification of the layers from the config; by default Megatron's own for mixed layers.
        make: makes the whole model from (family, config, options of GPTModel), where it is not GPTModel.
        change: changes the model before it runs, as a trainer's provider does.
        logits: changes the logits, as a trainer's output layer does.
        look: returns the features of a picture from the vision tower's tensors.
        is_zero_centered: whether norms store their weight minus 1, as Transformer Engine's zero-centered norms do.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    spec: Callable[[Any], Any] | None = None
    config: Callable[..., TransformerConfig] | None = None
    make: Callable[[Family, Any, dict[str, Any]], torch.nn.Module] | None = None
    change: Callable[[torch.nn.Module], None] | None = None
    logits: Callable[[torch.Tensor], torch.Tensor] | None = None
    look: Callable[[Mapping[str, torch.Tensor]], torch.Tensor] | None = None
    is_zero_centered: bool = False


def run_core(family: Family, core: Core) -> dict[str, Any]:
    """Return the shapes of a family's tensors, and the last logits after `TOKENS`."""
    args = family.full_args()
    options = {key: args[its] for its, key in _KEYS.items() if args.get(its) is not None}
    options |= _SILU if args["swiglu"] else {}
    options |= _EXPERTS if "num_experts" in args else {}
    is_latent = bool(args.get("multi_latent_attention"))
    if is_latent:
        options = {key: value for key, value in options.items() if key not in ("kv_channels", "num_query_groups")}
        options |= {"rope_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0}
    options |= core.options
    maker = core.config or (MLATransformerConfig if is_latent else TransformerConfig)
    config = maker(
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, perform_initialization=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False,
        **options,
    )  # fmt: skip
    found = core.spec(config) if core.spec else get_gpt_decoder_block_spec(
        config, False, normalization=config.normalization
    )  # fmt: skip
    gpt = {
        "vocab_size": args["padded_vocab_size"], "max_sequence_length": args.get("max_position_embeddings", 19),
        "rotary_percent": args["rotary_percent"], "rotary_base": int(args.get("rotary_base", 10000)),
        "position_embedding_type": args["position_embedding_type"].replace("yarn", "rope"),
        "share_embeddings_and_output_weights": not args["untie_embeddings_and_output_weights"], **core.model,
    }  # fmt: skip
    if config.mtp_num_layers:
        gpt["mtp_block_spec"] = get_gpt_mtp_block_spec(config, found, use_transformer_engine=False)
    model = (
        core.make(family, config, gpt) if core.make else GPTModel(config=config, transformer_layer_spec=found, **gpt)
    )
    model.eval()
    if core.change is not None:
        core.change(model)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    saved = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items() if name in saved}
    shapes = {family.prefix + name: shape for name, shape in shapes.items()}
    drawn = {name.removeprefix(family.prefix): torch.from_numpy(array) for name, array in draw_weights(shapes).items()}
    if core.is_zero_centered:
        drawn = {name: tensor + 1 if "norm.weight" in name else tensor for name, tensor in drawn.items()}
    model.load_state_dict(drawn, strict=False)
    tokens = torch.tensor([TOKENS])
    places = torch.arange(len(TOKENS))[None]
    if args["position_embedding_type"] == "mrope":  # of text: time, height and width are equal
        places = places.expand(3, 1, -1)
    later = torch.triu(torch.ones(1, 1, len(TOKENS), len(TOKENS), dtype=torch.bool), 1)
    # Megatron computes the logits of further tokens only for its loss, which overwrites them; the head has them first.
    heads: list[torch.Tensor] = []
    model.output_layer.register_forward_hook(
        lambda module, inputs, output: heads.append(output[0].transpose(0, 1).clone())
    )
    with torch.no_grad():
        model(tokens, places, later, labels=tokens if config.mtp_num_layers else None)
    logits = heads[-1][0, -1] if core.logits is None else core.logits(heads[-1][0, -1])
    tower = {} if family.tower is None else family.tower()
    shapes |= tower
    seen = {}
    if core.look is not None:
        with torch.no_grad():
            features = core.look({name: torch.from_numpy(array) for name, array in draw_weights(tower).items()})
        seen = {"features": _round(features.flatten())}
    found = {"shapes": shapes, "logits": _round(logits), **seen}
    return {**found, "next_logits": _round(heads[0][0, NEXT])} if config.mtp_num_layers else found


def _round(values: torch.Tensor) -> list[float]:
    return [round(value, 6) for value in values.tolist()]
