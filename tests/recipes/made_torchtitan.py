"""Tiny models under torchtitan's names, turned by plain torch code: names of torchtitan 0.3 and of 0.2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from tests.recipes.made_checkpoints import as_torchtitan, config_of, saved, tiny

State = dict[str, torch.Tensor]

_NAMES = {
    "model.embed_tokens.": "tok_embeddings.", "model.norm.": "norm.", "model.layers.": "layers.",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn.": "attention.",
    "attention.q_proj": "attention.wq", "attention.k_proj": "attention.wk", "attention.v_proj": "attention.wv",
    "attention.o_proj": "attention.wo", "kv_a_proj_with_mqa": "wkv_a", "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "wkv_b", "q_a_proj": "wq_a", "q_a_layernorm": "q_norm", "q_b_proj": "wq_b",
    "mlp.shared_experts.gate_proj": "moe.shared_experts.w1", "mlp.shared_experts.up_proj": "moe.shared_experts.w3",
    "mlp.shared_experts.down_proj": "moe.shared_experts.w2", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias", "mlp.router.": "moe.router.gate.",
    "mlp.experts.gate_up_proj_bias": "moe.experts.mlp1_bias", "mlp.experts.gate_up_proj": "moe.experts.mlp1_weight",
    "mlp.experts.down_proj_bias": "moe.experts.mlp2_bias", "mlp.experts.down_proj": "moe.experts.mlp2_weight",
    "lm_head.": "output.",
}  # fmt: skip
_NEW = {
    "attention.wq.": "attention.qkv_linear.wq.", "attention.wk.": "attention.qkv_linear.wk.",
    "attention.wv.": "attention.qkv_linear.wv.", "output.": "lm_head.", "moe.expert_bias": "moe.expert_bias_E",
    "moe.experts.w1": "moe.routed_experts.inner_experts.w1_EFD",
    "moe.experts.w2": "moe.routed_experts.inner_experts.w2_EDF",
    "moe.experts.w3": "moe.routed_experts.inner_experts.w3_EFD",
    "moe.experts.mlp1_weight": "moe.routed_experts.inner_experts.mlp1_weight_EGD",
    "moe.experts.mlp1_bias": "moe.routed_experts.inner_experts.mlp1_bias_EG",
    "moe.experts.mlp2_weight": "moe.routed_experts.inner_experts.mlp2_weight_EDF",
    "moe.experts.mlp2_bias": "moe.routed_experts.inner_experts.mlp2_bias_ED",
}  # fmt: skip

_GPT_OSS = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 37,
    "max_position_embeddings": 64,
}  # fmt: skip


def tiny_gpt_oss() -> torch.nn.Module:
    """Return a tiny GPT-OSS whose values all differ."""
    import transformers

    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**_GPT_OSS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model


TORCHTITAN_RECIPES = ("qwen3", "qwen3-moe", "deepseek-v3", "gpt-oss", "llama3", "llama4", "flux")


def torchtitan_forms(name: str) -> Iterator[tuple[dict[str, Any], State, State]]:
    """Yield config.json, the tensors of Hugging Face's files, and torchtitan's, for the recipe of that name."""
    if name == "llama3":
        model = tiny("llama")
        yield config_of(model), saved(model), as_torchtitan(model)
        yield config_of(model), saved(model), newer(as_torchtitan(model))
    elif name == "llama4":
        yield LLAMA4, llama4(), as_llama4(llama4())
    elif name == "flux":
        yield FLUX, flux(), as_flux(flux())
    else:
        family = name.replace("-", "_")
        changes: list[dict[str, Any]] = [{}, {"q_lora_rank": None}] if family == "deepseek_v3" else [{}]
        for change in changes:
            model = tiny_gpt_oss() if family == "gpt_oss" else tiny(family, **change)
            old, config = as_titan(saved(model)), config_of(model)
            yield config, saved(model), old
            yield config, saved(model), newer(old, is_latent=family == "deepseek_v3")


def as_titan(state: State) -> State:
    """Return tensors under the names of torchtitan 0.2; experts in one tensor, those of GPT-OSS the other way round."""
    made: State = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in state.items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if found is not None:
            kind = {"gate": "w1", "up": "w3", "down": "w2"}[found[3]]
            experts.setdefault(f"layers.{found[1]}.moe.experts.{kind}", {})[int(found[2])] = tensor
            continue
        is_turned = tensor.ndim == 3 and "mlp.experts." in name
        for old, new in _NAMES.items():
            name = name.replace(old, new)
        made[name] = tensor.transpose(1, 2) if is_turned else tensor
    return made | {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}


def newer(state: State, *, is_latent: bool = False) -> State:
    """Return the tensors of torchtitan 0.2 under the names of 0.3; latent attention kept its names."""
    made = {}
    for name, tensor in state.items():
        for old, new in _NEW.items():
            if not (is_latent and "qkv_linear" in new):
                name = name.replace(old, new) if not name.endswith("_E") else name
        made[name] = tensor
    return made


LLAMA4 = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "num_hidden_layers": 3, "hidden_size": 12, "intermediate_size": 10,
        "intermediate_size_mlp": 14, "vocab_size": 17, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 4, "num_local_experts": 3, "interleave_moe_layer_step": 2, "moe_layers": [1],
    },
}  # fmt: skip


def _random(shapes: dict[str, tuple[int, ...]]) -> State:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def llama4() -> State:
    """Return the tensors of a tiny language model of Llama 4: one layer of experts between two dense ones."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (17, 12), "norm.weight": (12,)}
    for layer in range(3):
        rest: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (24, 12), "self_attn.k_proj.weight": (8, 12),
            "self_attn.v_proj.weight": (8, 12), "self_attn.o_proj.weight": (12, 24), "input_layernorm.weight": (12,),
            "post_attention_layernorm.weight": (12,),
        }  # fmt: skip
        if layer == 1:
            rest |= {
                "feed_forward.router.weight": (3, 12), "feed_forward.experts.gate_up_proj": (3, 12, 20),
                "feed_forward.experts.down_proj": (3, 10, 12),
                "feed_forward.shared_expert.gate_proj.weight": (10, 12),
                "feed_forward.shared_expert.up_proj.weight": (10, 12),
                "feed_forward.shared_expert.down_proj.weight": (12, 10),
            }  # fmt: skip
        else:
            rest |= {
                "feed_forward.gate_proj.weight": (14, 12), "feed_forward.up_proj.weight": (14, 12),
                "feed_forward.down_proj.weight": (12, 14),
            }  # fmt: skip
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in rest.items()}
    whole = {f"language_model.model.{name}": shape for name, shape in shapes.items()}
    return _random(whole | {"language_model.lm_head.weight": (17, 12)})


def as_llama4(state: State) -> State:
    """Return Llama 4's tensors under torchtitan's names."""
    made: State = {}
    for name, tensor in state.items():
        name = name.removeprefix("language_model.")
        for old, new in {**_NAMES, "feed_forward.": "mlp."}.items() if "experts." not in name else ():
            name = name.replace(old, new) if old != "feed_forward." else name
        name = name.replace("model.layers.", "layers.").replace("feed_forward.router", "moe.router.gate")
        name = name.replace("feed_forward.shared_expert.", "moe.shared_experts.")
        for old, new in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
            name = name if "experts." in name and "shared" not in name else name.replace(old, new)
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.transpose(1, 2).chunk(2, dim=1)
            layer = name.split(".")[1]
            made |= {f"layers.{layer}.moe.experts.w1": gate, f"layers.{layer}.moe.experts.w3": up}
        elif name.endswith("experts.down_proj"):
            made[f"layers.{name.split('.')[1]}.moe.experts.w2"] = tensor.transpose(1, 2)
        else:
            made[name] = tensor
    return made


FLUX = {
    "_class_name": "FluxTransformer2DModel", "num_layers": 2, "num_single_layers": 3, "num_attention_heads": 3,
    "attention_head_dim": 4, "in_channels": 5, "out_channels": None, "joint_attention_dim": 7,
    "pooled_projection_dim": 6,
}  # fmt: skip
_FLUX_PARTS = {
    "transformer_blocks.{}.norm1.linear": ("double_blocks.{}.img_mod.lin", 72, 12),
    "transformer_blocks.{}.norm1_context.linear": ("double_blocks.{}.txt_mod.lin", 72, 12),
    "transformer_blocks.{}.attn.to_out.0": ("double_blocks.{}.img_attn.proj", 12, 12),
    "transformer_blocks.{}.attn.to_add_out": ("double_blocks.{}.txt_attn.proj", 12, 12),
    "transformer_blocks.{}.ff.net.0.proj": ("double_blocks.{}.img_mlp.0", 48, 12),
    "transformer_blocks.{}.ff.net.2": ("double_blocks.{}.img_mlp.2", 12, 48),
    "transformer_blocks.{}.ff_context.net.0.proj": ("double_blocks.{}.txt_mlp.0", 48, 12),
    "transformer_blocks.{}.ff_context.net.2": ("double_blocks.{}.txt_mlp.2", 12, 48),
    "single_transformer_blocks.{}.norm.linear": ("single_blocks.{}.modulation.lin", 36, 12),
    "single_transformer_blocks.{}.proj_out": ("single_blocks.{}.linear2", 12, 60),
    "x_embedder": ("img_in", 12, 5), "context_embedder": ("txt_in", 12, 7), "proj_out": ("final_layer.linear", 5, 12),
    "norm_out.linear": ("final_layer.adaLN_modulation.1", 24, 12),
    "time_text_embed.text_embedder.linear_1": ("vector_in.in_layer", 12, 6),
    "time_text_embed.text_embedder.linear_2": ("vector_in.out_layer", 12, 12),
    "time_text_embed.timestep_embedder.linear_1": ("time_in.in_layer", 12, 256),
    "time_text_embed.timestep_embedder.linear_2": ("time_in.out_layer", 12, 12),
}  # fmt: skip
_FLUX_NORMS = {
    "transformer_blocks.{}.attn.norm_q": "double_blocks.{}.img_attn.norm.query_norm",
    "transformer_blocks.{}.attn.norm_k": "double_blocks.{}.img_attn.norm.key_norm",
    "transformer_blocks.{}.attn.norm_added_q": "double_blocks.{}.txt_attn.norm.query_norm",
    "transformer_blocks.{}.attn.norm_added_k": "double_blocks.{}.txt_attn.norm.key_norm",
    "single_transformer_blocks.{}.attn.norm_q": "single_blocks.{}.norm.query_norm",
    "single_transformer_blocks.{}.attn.norm_k": "single_blocks.{}.norm.key_norm",
}
_FLUX_FUSED = {
    "double_blocks.{}.img_attn.qkv": [f"transformer_blocks.{{}}.attn.to_{n}" for n in "qkv"],
    "double_blocks.{}.txt_attn.qkv": [f"transformer_blocks.{{}}.attn.add_{n}_proj" for n in "qkv"],
    "single_blocks.{}.linear1": [
        *(f"single_transformer_blocks.{{}}.attn.to_{n}" for n in "qkv"), "single_transformer_blocks.{}.proj_mlp",
    ],
}  # fmt: skip


def _flux_layers(name: str) -> list[str]:
    count = 1 if "{}" not in name else 3 if name.startswith("single") else 2
    return [name.format(i) for i in range(count)]


def flux() -> State:
    """Return the tensors of a tiny transformer of Flux, under diffusers' names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (_, rows, columns) in _FLUX_PARTS.items():
        for one in _flux_layers(name):
            shapes |= {f"{one}.weight": (rows, columns), f"{one}.bias": (rows,)}
    for names in _FLUX_FUSED.values():
        for name in names:
            rows = 48 if "mlp" in name else 12
            for one in _flux_layers(name):
                shapes |= {f"{one}.weight": (rows, 12), f"{one}.bias": (rows,)}
    shapes |= {f"{one}.weight": (4,) for name in _FLUX_NORMS for one in _flux_layers(name)}
    return _random(shapes)


def as_flux(state: State) -> State:
    """Return Flux's tensors under torchtitan's names."""
    made: State = {}
    names = {old: new for old, (new, _, _) in _FLUX_PARTS.items()} | _FLUX_NORMS
    for old, new in names.items():
        for kind in ("weight", "bias") if old in _FLUX_PARTS else ("weight",):
            for theirs, ours in zip(_flux_layers(old), _flux_layers(new), strict=True):
                tensor = state[f"{theirs}.{kind}"]
                made[f"{ours}.{kind}"] = torch.cat(tensor.chunk(2)[::-1]) if old == "norm_out.linear" else tensor
    for new, parts in _FLUX_FUSED.items():
        for kind in ("weight", "bias"):
            for layer, ours in enumerate(_flux_layers(new)):
                made[f"{ours}.{kind}"] = torch.cat([state[f"{part.format(layer)}.{kind}"] for part in parts])
    return made
