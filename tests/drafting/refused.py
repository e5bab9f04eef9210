"""Sources that no recipe of xrank knows: models of transformers, renamed and fused in ways of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

State = dict[str, torch.Tensor]

GPT_OSS = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 37,
    "max_position_embeddings": 64,
}  # fmt: skip


def tiny_gpt_oss() -> torch.nn.Module:
    """Return a tiny GPT-OSS whose values all differ."""
    import transformers

    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**GPT_OSS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """Return q, k and v in one tensor, group after group."""
    parts = [one.unflatten(0, (groups, -1)) for one in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def as_megatron_gpt_oss(state: State) -> State:
    """Return GPT-OSS as Megatron-core has it: fused heads, experts apart, gate before up."""
    made: State = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for layer in range(3):
        old, new = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for kind in ("weight", "bias"):
            heads = [state[f"{old}self_attn.{n}_proj.{kind}"] for n in "qkv"]
            made[f"{new}self_attention.linear_qkv.{kind}"] = grouped(*heads, groups=2)
            made[f"{new}self_attention.linear_proj.{kind}"] = state[f"{old}self_attn.o_proj.{kind}"]
            made[f"{new}mlp.router.{kind}"] = state[f"{old}mlp.router.{kind}"]
        made[f"{new}self_attention.core_attention.softmax_offset"] = state[f"{old}self_attn.sinks"]
        made[f"{new}self_attention.linear_qkv.layer_norm_weight"] = state[f"{old}input_layernorm.weight"]
        made[f"{new}pre_mlp_layernorm.weight"] = state[f"{old}post_attention_layernorm.weight"]
        experts = f"{old}mlp.experts."
        for expert in range(4):
            both = state[f"{experts}gate_up_proj"][expert].T
            made[f"{new}mlp.experts.linear_fc1.weight{expert}"] = torch.cat([both[::2], both[1::2]])
            bias = state[f"{experts}gate_up_proj_bias"][expert]
            made[f"{new}mlp.experts.linear_fc1.bias{expert}"] = torch.cat([bias[::2], bias[1::2]])
            made[f"{new}mlp.experts.linear_fc2.weight{expert}"] = state[f"{experts}down_proj"][expert].T
            made[f"{new}mlp.experts.linear_fc2.bias{expert}"] = state[f"{experts}down_proj_bias"][expert]
    return made


def layers_of(state: State, text: str) -> list[torch.Tensor]:
    """Return the tensors of one kind, layer by layer."""
    return [state[f"model.layers.{layer}.{text}.weight"] for layer in range(3)]


def as_stacks(state: State) -> State:
    """Return Llama as JAX programs keep it: layers in one tensor, kernels transposed, heads as a dim."""
    turned = {text: torch.stack([one.T for one in layers_of(state, text)]) for text in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj",
    )}  # fmt: skip
    return {
        "token_embedder.embedding": state["model.embed_tokens.weight"],
        "decoder.norm.scale": state["model.norm.weight"],
        "decoder.logits.kernel": state["lm_head.weight"].T,
        "decoder.blocks.pre_attention.scale": torch.stack(layers_of(state, "input_layernorm")),
        "decoder.blocks.pre_ffw.scale": torch.stack(layers_of(state, "post_attention_layernorm")),
        "decoder.blocks.query.kernel": turned["self_attn.q_proj"].unflatten(2, (6, 8)),
        "decoder.blocks.key.kernel": turned["self_attn.k_proj"].unflatten(2, (2, 8)),
        "decoder.blocks.value.kernel": turned["self_attn.v_proj"].unflatten(2, (2, 8)),
        "decoder.blocks.out.kernel": turned["self_attn.o_proj"].unflatten(1, (6, 8)),
        "decoder.blocks.wi.kernel": torch.stack([turned["mlp.gate_proj"], turned["mlp.up_proj"]], dim=1),
        "decoder.blocks.wo.kernel": turned["mlp.down_proj"],
    }


def as_interleaved(state: State) -> State:
    """Return Llama with q, k, v in one kernel after another, gate and up in turns, and rotary pairs side by side."""
    made: State = {
        "wte": state["model.embed_tokens.weight"],
        "ln_f": state["model.norm.weight"],
        "head": state["lm_head.weight"],
    }
    for layer in range(3):
        old = f"model.layers.{layer}."
        heads = [state[f"{old}self_attn.{n}_proj.weight"] for n in "qkv"]
        sided = [one.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2) for one in heads[:2]]
        both = [state[f"{old}mlp.{n}_proj.weight"] for n in ("up", "gate")]
        made[f"h.{layer}.attn.w"] = torch.cat([heads[2], *sided])
        made[f"h.{layer}.attn.o"] = state[f"{old}self_attn.o_proj.weight"]
        made[f"h.{layer}.ffn.in"] = torch.stack(both, dim=1).flatten(0, 1).T
        made[f"h.{layer}.ffn.out"] = state[f"{old}mlp.down_proj.weight"]
        made[f"h.{layer}.ln.0"] = state[f"{old}input_layernorm.weight"]
        made[f"h.{layer}.ln.1"] = state[f"{old}post_attention_layernorm.weight"]
    return made


def as_fused_experts(state: State) -> State:
    """Return Qwen 3 MoE with each layer's experts in one tensor, gate and up beside each other."""
    made: State = {}
    for name, tensor in state.items():
        if ".experts." not in name:
            made[name.replace("model.layers", "blocks").replace("self_attn", "attn")] = tensor
    for layer in (0, 2):
        old = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([state[f"{old}{i}.{kind}_proj.weight"] for i in range(4)]) for kind in ("gate", "up", "down")
        )
        made[f"blocks.{layer}.moe.w13"] = torch.cat([gate, up], dim=1)
        made[f"blocks.{layer}.moe.w2"] = down.transpose(1, 2)
    return made


def trained(state: State, is_frozen: Callable[[str], bool] = lambda name: False, **options: Any) -> State:
    """Return a state after some training: each value changes by a few per cent, but for frozen tensors."""
    torch.manual_seed(1)
    step = options.get("step", 0.05)
    return {
        name: tensor if is_frozen(name) else tensor + step * tensor.std() * torch.randn(tensor.shape)
        for name, tensor in state.items()
    }
