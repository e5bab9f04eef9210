"""Tiny models of transformers' under other frameworks' names, turned by plain torch code, one tensor at a time."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch

from xrank import NFSWorkspace

_SIZES = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 37, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT2 = {
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 19,
    "vocab_size": 37,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
_DEEPSEEK = {
    **{key: size for key, size in _SIZES.items() if key != "head_dim"},
    **_ROUTED,
    "num_key_value_heads": 6,
    "q_lora_rank": 18,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "mistral": {**_SIZES, "head_dim": 4},  # as hidden_size / num_attention_heads
    "qwen2": {key: size for key, size in _SIZES.items() if key != "head_dim"},
    "qwen3": _SIZES,
    "qwen3_moe": {
        **_SIZES,
        "num_experts": 4,
        "moe_intermediate_size": 12,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {
        **{key: size for key, size in _SIZES.items() if key != "head_dim"},
        "num_experts": 4,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    },
    "glm4_moe": {**_SIZES, **_ROUTED, "use_qk_norm": True},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v2_lite": {**_DEEPSEEK, "q_lora_rank": None},
    "mixtral": {**_SIZES, "num_local_experts": 4},
    "gpt2": _GPT2,
}

MIXED = ("qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v3", "deepseek_v2", "deepseek_v2_lite")
"""Families whose layers differ: some have experts."""

EXPERT_FORMS = ("te-grouped", "named", "stacked", "singletons", "grouped")
"""What Megatron-core writes experts as: grouped layers' own tensors, and torch_dist's."""


def tiny(family: str, **changes: Any) -> torch.nn.Module:
    """Return a model small enough for a test, of a seed of its own; heads, groups and widths all differ."""
    options = {**FAMILIES[family], **changes}
    options = {key: [*value] if isinstance(value, tuple) else value for key, value in options.items()}
    return tiny_of(family.removesuffix("_lite"), options)


def tiny_of(model_type: str, options: dict[str, Any]) -> torch.nn.Module:
    """Return a model of that type and config; all of its values differ."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **options)
    has_vision = "vision_config" in options
    kind = transformers.AutoModelForImageTextToText if has_vision else transformers.AutoModelForCausalLM
    model = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))  # norms are ones otherwise, and equal to each other
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape))
    return model.eval()


def tiny_llama(**changes: Any) -> torch.nn.Module:
    """Return a tiny Llama."""
    return tiny("llama", **changes)


def config_of(model: torch.nn.Module, **changes: Any) -> dict[str, Any]:
    """Return a model's config.json, in full, with these changes."""
    return {**json.loads(model.config.to_json_string(use_diff=False)), **changes}


def saved(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's tensors as transformers saves them: those of the Hub's files."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return safetensors.torch.load_file(Path(folder) / "model.safetensors")


def as_megatron(
    model: torch.nn.Module,
    *,
    vocab: int | None = None,
    te: bool = False,
    experts: str = "local_experts.{}.linear_fc{}.weight",
) -> dict[str, torch.Tensor]:
    """Return a model's tensors as Megatron-core's GPTModel has them.

    Args:
        model: of any family.
        vocab: rows of the padded vocabulary.
        te: Transformer Engine's names of norms, which belong to the linear layers after them.
        experts: the name of an expert's layer, by its number and 1 or 2.
    """
    if model.config.model_type == "gpt2":
        return _as_megatron_gpt2(model, vocab, te)
    return megatron_state(model.config, saved(model), vocab=vocab, te=te, experts=experts)


def megatron_state(
    config: Any,
    state: dict[str, torch.Tensor],
    *,
    vocab: int | None = None,
    te: bool = False,
    experts: str = "local_experts.{}.linear_fc{}.weight",
) -> dict[str, torch.Tensor]:
    """Return the tensors of a text model's files as Megatron-core's GPTModel has them; arguments as `as_megatron`."""
    groups = config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    made = {"embedding.word_embeddings.weight": _padded(state["model.embed_tokens.weight"], vocab)}
    if "lm_head.weight" in state:
        made["output_layer.weight"] = _padded(state["lm_head.weight"], vocab)
    made["decoder.final_layernorm.weight"] = state["model.norm.weight"]
    for i in range(config.num_hidden_layers):
        ours, its = f"model.layers.{i}", f"decoder.layers.{i}"
        attention, theirs = f"{ours}.self_attn", f"{its}.self_attention"
        for kind in ("weight", "bias"):
            if f"{attention}.kv_b_proj.{kind}" in state:
                made |= _latent_attention(state, attention, theirs, te)
            elif f"{attention}.q_proj.{kind}" in state:
                heads = [state[f"{attention}.{n}_proj.{kind}"].unflatten(0, (groups, -1, size)) for n in "qkv"]
                made[f"{theirs}.linear_qkv.{kind}"] = torch.cat(heads, dim=1).flatten(0, 2)
            if f"{attention}.o_proj.{kind}" in state:
                made[f"{theirs}.linear_proj.{kind}"] = state[f"{attention}.o_proj.{kind}"]
            if f"{ours}.mlp.gate_proj.{kind}" in state:
                both = [state[f"{ours}.mlp.{n}_proj.{kind}"] for n in ("gate", "up")]
                made[f"{its}.mlp.linear_fc1.{kind}"] = torch.cat(both)
                made[f"{its}.mlp.linear_fc2.{kind}"] = state[f"{ours}.mlp.down_proj.{kind}"]
        for n in "qk":
            if f"{attention}.{n}_norm.weight" in state:
                made[f"{theirs}.{n}_layernorm.weight"] = state[f"{attention}.{n}_norm.weight"]
        is_dense = f"{ours}.mlp.gate_proj.weight" in state
        is_latent = f"{attention}.kv_b_proj.weight" in state
        first = "self_attention.linear_qkv.layer_norm_weight" if te and not is_latent else "input_layernorm.weight"
        second = "mlp.linear_fc1.layer_norm_weight" if te and is_dense else "pre_mlp_layernorm.weight"
        made[f"{its}.{first}"] = state[f"{ours}.input_layernorm.weight"]
        made[f"{its}.{second}"] = state[f"{ours}.post_attention_layernorm.weight"]
        if not is_dense:
            made |= _experts(state, ours, its, experts)
    return made


def _latent_attention(state: dict[str, torch.Tensor], attention: str, theirs: str, te: bool) -> dict[str, torch.Tensor]:
    """Return the projections and norms of latents; all keep their rows."""
    names = {
        "q_proj": "linear_q_proj", "q_a_proj": "linear_q_down_proj", "q_b_proj": "linear_q_up_proj",
        "kv_a_proj_with_mqa": "linear_kv_down_proj", "kv_b_proj": "linear_kv_up_proj",
    }  # fmt: skip
    for n in ("q", "kv"):
        names[f"{n}_a_layernorm"] = f"linear_{n}_up_proj.layer_norm" if te else f"{n}_layernorm"
    found = {its: state.get(f"{attention}.{ours}.weight") for ours, its in names.items()}
    return {
        f"{theirs}.{its}_weight" if its.endswith("layer_norm") else f"{theirs}.{its}.weight": tensor
        for its, tensor in found.items()
        if tensor is not None
    }


def _experts(state: dict[str, torch.Tensor], ours: str, its: str, experts: str) -> dict[str, torch.Tensor]:
    is_mixtral = f"{ours}.block_sparse_moe.gate.weight" in state
    block = f"{ours}.block_sparse_moe" if is_mixtral else f"{ours}.mlp"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    made = {f"{its}.mlp.router.weight": state[f"{block}.gate.weight"]}
    for e in range(len(state[f"{block}.gate.weight"])):
        both = [state[f"{block}.experts.{e}.{n}.weight"] for n in (gate, up)]
        made[f"{its}.mlp.experts." + experts.format(e, 1)] = torch.cat(both)
        made[f"{its}.mlp.experts." + experts.format(e, 2)] = state[f"{block}.experts.{e}.{down}.weight"]
    for shared in ("shared_expert", "shared_experts"):
        if f"{block}.{shared}.{gate}.weight" in state:
            both = [state[f"{block}.{shared}.{n}.weight"] for n in (gate, up)]
            made[f"{its}.mlp.shared_experts.linear_fc1.weight"] = torch.cat(both)
            made[f"{its}.mlp.shared_experts.linear_fc2.weight"] = state[f"{block}.{shared}.{down}.weight"]
    for ours, theirs in (
        ("shared_expert_gate.weight", "shared_experts.gate_weight"),
        ("gate.e_score_correction_bias", "router.expert_bias"),
    ):
        if f"{block}.{ours}" in state:
            made[f"{its}.mlp.{theirs}"] = state[f"{block}.{ours}"]
    return made


def _as_megatron_gpt2(model: torch.nn.Module, vocab: int | None, te: bool) -> dict[str, torch.Tensor]:
    """Return a GPT-2's tensors: Conv1D turned, heads one after the other."""
    config, state = model.config, saved(model)
    made = {
        "embedding.word_embeddings.weight": _padded(state["transformer.wte.weight"], vocab),
        "embedding.position_embeddings.weight": state["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": state["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": state["transformer.ln_f.bias"],
    }
    for i in range(config.n_layer):
        ours, its = f"transformer.h.{i}", f"decoder.layers.{i}"
        for kind in ("weight", "bias"):
            norms = ("self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_")
            first, second = norms if te else ("input_layernorm.", "pre_mlp_layernorm.")
            made[f"{its}.{first}{kind}"] = state[f"{ours}.ln_1.{kind}"]
            made[f"{its}.{second}{kind}"] = state[f"{ours}.ln_2.{kind}"]
            q, k, v = _turned(state[f"{ours}.attn.c_attn.{kind}"]).unflatten(0, (3, config.n_head, -1))
            heads = [part for n in range(config.n_head) for part in (q[n], k[n], v[n])]
            made[f"{its}.self_attention.linear_qkv.{kind}"] = torch.cat(heads)
            made[f"{its}.self_attention.linear_proj.{kind}"] = _turned(state[f"{ours}.attn.c_proj.{kind}"])
            made[f"{its}.mlp.linear_fc1.{kind}"] = _turned(state[f"{ours}.mlp.c_fc.{kind}"])
            made[f"{its}.mlp.linear_fc2.{kind}"] = _turned(state[f"{ours}.mlp.c_proj.{kind}"])
    return made


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T if tensor.ndim == 2 else tensor


def _padded(rows: torch.Tensor, vocab: int | None) -> torch.Tensor:
    return torch.cat((rows, torch.full(((vocab or len(rows)) - len(rows), rows.shape[1]), 7.0)))


def stacked(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the same with those tensors in one whose names differ by the number after a prefix, as in torch_dist."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    made = {}
    for name, tensor in tensors.items():
        before, has, after = name.partition(prefix)
        number, _, kind = after.partition(".")
        if has:
            found.setdefault(before + prefix + kind, {})[int(number)] = tensor
        else:
            made[name] = tensor
    return made | {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in found.items()}


def as_grouped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return stacked experts as GroupedMLP has them, each matrix the other way round; in the shape it views them in."""
    names = {
        "experts.experts.linear_fc1.weight": "experts.weight1",
        "experts.experts.linear_fc2.weight": "experts.weight2",
    }
    made = {}
    for name, tensor in tensors.items():
        ours = next((theirs for theirs in names if theirs in name), None)
        made[name.replace(ours, names[ours]) if ours else name] = tensor.transpose(-1, -2) if ours else tensor
    return made


def as_singletons(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return gate and up in tensors of their own, as `singleton_local_shards` leaves them."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith("linear_fc1.weight") and "local_experts" not in name:
            made[f"{name}_w"], made[f"{name}_v"] = tensor.chunk(2)
        else:
            made[name] = tensor
    return made


def expert_forms(model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Return a model's tensors in all forms of experts but the local ones, by the form's name in `EXPERT_FORMS`."""
    named = as_megatron(model, experts="experts.{}.linear_fc{}.weight")
    whole = stacked(named, "mlp.experts.experts.")
    te_grouped = as_megatron(model, experts="linear_fc{1}.weight{0}")
    return dict(zip(EXPERT_FORMS, (te_grouped, named, whole, as_singletons(named), as_grouped(whole)), strict=True))


def as_maxtext(model: torch.nn.Module, *, is_scanned: bool, turns_pairs: bool) -> dict[str, torch.Tensor]:
    """Return a model's tensors under MaxText's names, without the leading ``params``.

    Args:
        model: of Llama's kind.
        is_scanned: whether layers are stacked along the second dim.
        turns_pairs: whether the rotary embedding turns neighboring elements.
    """
    state, size = saved(model), model.config.head_dim

    def heads(weight: torch.Tensor, *, is_rotated: bool) -> torch.Tensor:
        turned = weight.T.reshape(len(weight.T), -1, size)
        if is_rotated and turns_pairs:
            turned = torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(-2)
        return turned

    scale = size**0.5 if model.config.model_type != "qwen3" else 1.0
    layers = []
    for number in range(model.config.num_hidden_layers):
        own = {name.split(".", 3)[3]: one for name, one in state.items() if name.startswith(f"model.layers.{number}.")}
        attention = {
            "query.kernel": heads(own["self_attn.q_proj.weight"], is_rotated=True) / scale,
            "key.kernel": heads(own["self_attn.k_proj.weight"], is_rotated=True),
            "value.kernel": heads(own["self_attn.v_proj.weight"], is_rotated=False),
            "out.kernel": own["self_attn.o_proj.weight"].T.reshape(-1, size, len(own["self_attn.o_proj.weight"])),
        }
        for its, ours in (("query_norm.scale", "q_norm"), ("key_norm.scale", "k_norm")):
            if f"self_attn.{ours}.weight" in own:
                attention[its] = own[f"self_attn.{ours}.weight"]
        layers.append(
            {
                "pre_self_attention_layer_norm.scale": own["input_layernorm.weight"],
                **{f"self_attention.{name}": one for name, one in attention.items()},
                "post_self_attention_layer_norm.scale": own["post_attention_layernorm.weight"],
                "mlp.wi_0.kernel": own["mlp.gate_proj.weight"].T,
                "mlp.wi_1.kernel": own["mlp.up_proj.weight"].T,
                "mlp.wo.kernel": own["mlp.down_proj.weight"].T,
            }
        )
    made = {
        "token_embedder.embedding": state["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": state["model.norm.weight"],
        "decoder.logits_dense.kernel": state["lm_head.weight"].T,
    }
    for name in layers[0]:
        if is_scanned:
            made[f"decoder.layers.{name}"] = torch.stack([layer[name] for layer in layers], dim=1)
        else:
            made |= {f"decoder.layers_{number}.{name}": layer[name] for number, layer in enumerate(layers)}
    return {name: tensor.contiguous() for name, tensor in made.items()}


def as_torchtitan(model: torch.nn.Module, *, is_new: bool = False) -> dict[str, torch.Tensor]:
    """Return a Llama's tensors under Meta's names, the rows of wq and wk turned for rotary pairs side by side.

    Args:
        model: a Llama.
        is_new: whether the names are those of torchtitan 0.3.
    """
    config, state = model.config, dict(model.state_dict())
    names = {
        "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "model.layers": "layers",
    }  # fmt: skip
    if is_new:
        names["lm_head"] = "lm_head"
        names |= {f"self_attn.{each}_proj": f"attention.qkv_linear.w{each}" for each in "qkv"}
    made = {}
    for name, tensor in state.items():
        new = name
        for ours, theirs in names.items():
            new = new.replace(ours, theirs)
        if new.endswith(("wq.weight", "wk.weight")):
            heads = tensor.shape[0] // config.head_dim
            tensor = tensor.view(heads, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)
        made[new] = tensor
    return made


def leave(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object] | None = None) -> Path:
    """Leave whole tensors as the state of a world of one."""
    workspace = NFSWorkspace(folder, rank=0, world_size=1, run_id="run")
    workspace.write_configs_and_weights(config or {}, {name: t.contiguous() for name, t in tensors.items()})
    return folder
