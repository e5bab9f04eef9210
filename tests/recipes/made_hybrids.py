"""Tiny models of transformers' with state space mixers, under Megatron-core's names, turned by plain torch code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.recipes.made_checkpoints import as_grouped, config_of, megatron_state, saved, stacked, tiny_of
from tests.recipes.made_vision import split_gated

Tensors = dict[str, torch.Tensor]

_COMMON = {
    "hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 37, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    "moe_intermediate_size": 12, "num_experts_per_tok": 2,
}  # fmt: skip
HYBRID_FAMILIES: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        **_COMMON, "hybrid_override_pattern": "M*-EM*", "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2,
        "ssm_state_size": 5, "n_routed_experts": 4, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 16,
    },
    "qwen3_next": {
        **_COMMON, "num_hidden_layers": 4, "num_experts": 4, "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 8, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 6,
        "mlp_only_layers": [1],
    },
}  # fmt: skip


def tiny_hybrid(family: str, **changes: Any) -> torch.nn.Module:
    """Return a tiny model with values of a seed of its own."""
    return tiny_of(family, {**HYBRID_FAMILIES[family], **changes})


def as_megatron_hybrid(model: torch.nn.Module, *, vocab: int | None = None, **options: Any) -> Tensors:
    """Return a model's tensors as Megatron-core's MambaModel or GPTModel has them; `options` as `as_megatron`."""
    config, state = model.config, saved(model)
    if config.model_type == "nemotron_h":
        return _nemotron(config, state, vocab, options.get("experts", "local_experts.{}.linear_fc{}.weight"))
    made = megatron_state(config, state, vocab=vocab, **options)
    for i in range(config.num_hidden_layers):
        ours, its = f"model.layers.{i}", f"decoder.layers.{i}.self_attention"
        if f"{ours}.self_attn.q_proj.weight" in state:
            made[f"{its}.linear_qkv.weight"] = _gated_attention(config, state, f"{ours}.self_attn")
        else:
            own = _delta_net(config, state, f"{ours}.linear_attn")
            made |= {f"{its}.{name}": tensor for name, tensor in own.items()}
            norm = f"{its}.linear_qkv.layer_norm_weight"
            if norm in made:
                made[f"{its}.in_proj.layer_norm_weight"] = made.pop(norm)
    return made


def _gated_attention(config: Any, state: Tensors, ours: str) -> torch.Tensor:
    """Return queries, their gates, keys and values of each group, one after the other."""
    groups, size = config.num_key_value_heads, config.head_dim
    both = state[f"{ours}.q_proj.weight"].unflatten(0, (config.num_attention_heads, 2, size))
    found = []
    for group, heads in enumerate(both.chunk(groups)):
        found += [*heads[:, 0], *heads[:, 1]]
        found += [state[f"{ours}.{part}_proj.weight"].unflatten(0, (groups, size))[group] for part in "kv"]
    return torch.cat(found)


def _delta_net(config: Any, state: Tensors, ours: str) -> Tensors:
    heads, inner = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    rows = [config.linear_key_head_dim] * 2 + [inner * config.linear_value_head_dim] * 2
    projected = state[f"{ours}.in_proj_qkvz.weight"].unflatten(0, (heads, -1)).split(rows, dim=1)
    scalars = state[f"{ours}.in_proj_ba.weight"].unflatten(0, (heads, -1)).split(inner, dim=1)
    made = {name: state[f"{ours}.{name}"] for name in ("A_log", "dt_bias", "conv1d.weight", "out_proj.weight")}
    made["in_proj.weight"] = torch.cat([part.flatten(0, 1) for part in (*projected, *scalars)])
    return made | {"out_norm.weight": state[f"{ours}.norm.weight"] - 1}


def _nemotron(config: Any, state: Tensors, vocab: int | None, experts: str) -> Tensors:
    def padded(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows, torch.full(((vocab or len(rows)) - len(rows), rows.shape[1]), 7.0)))

    made = {
        "embedding.word_embeddings.weight": padded(state["backbone.embeddings.weight"]),
        "output_layer.weight": padded(state["lm_head.weight"]),
        "decoder.final_norm.weight": state["backbone.norm_f.weight"],
    }
    for i, kind in enumerate(config.layers_block_type):
        ours, its = f"backbone.layers.{i}", f"decoder.layers.{i}"
        own = {name.removeprefix(f"{ours}.mixer."): t for name, t in state.items() if name.startswith(f"{ours}.mixer.")}
        norm = "pre_mlp_layernorm.weight"
        if kind == "linear_attention":
            norm = "mixer.in_proj.layer_norm_weight"
            made |= {f"{its}.mixer.{name}": tensor for name, tensor in own.items()}
        elif kind == "full_attention":
            norm = "self_attention.linear_qkv.layer_norm_weight"
            shape = (config.num_key_value_heads, -1, config.head_dim)
            parts = [own[f"{part}_proj.weight"].unflatten(0, shape) for part in "qkv"]
            made[f"{its}.self_attention.linear_qkv.weight"] = torch.cat(parts, dim=1).flatten(0, 2)
            made[f"{its}.self_attention.linear_proj.weight"] = own["o_proj.weight"]
        elif kind == "mlp":
            norm = "mlp.linear_fc1.layer_norm_weight"
            made[f"{its}.mlp.linear_fc1.weight"], made[f"{its}.mlp.linear_fc2.weight"] = (
                own[f"{part}_proj.weight"] for part in ("up", "down")
            )
        else:
            made |= _squared_experts(own, f"{its}.mlp", experts)
        made[f"{its}.{norm}"] = state[f"{ours}.norm.weight"]
    return made


def _squared_experts(own: Tensors, its: str, experts: str) -> Tensors:
    made = {
        f"{its}.router.weight": own["gate.weight"],
        f"{its}.router.expert_bias": own["gate.e_score_correction_bias"],
    }
    for number, part in ((1, "up"), (2, "down")):
        made[f"{its}.shared_experts.linear_fc{number}.weight"] = own[f"shared_experts.{part}_proj.weight"]
        for e in range(len(own["gate.weight"])):
            made[f"{its}.experts." + experts.format(e, number)] = own[f"experts.{e}.{part}_proj.weight"]
    return made


def packed_rows(config: Any) -> dict[str, dict[str, int]]:
    """Return the rows of each projection in the tensors of a mixer that hold several."""
    if config.model_type == "nemotron_h":
        inner, state = config.mamba_num_heads * config.mamba_head_dim, config.n_groups * config.ssm_state_size
        rows = {"z": inner, "x": inner, "B": state, "C": state, "dt": config.mamba_num_heads}
        mixed = ("x", "B", "C")
    else:
        key = config.linear_num_key_heads * config.linear_key_head_dim
        value, heads = config.linear_num_value_heads * config.linear_value_head_dim, config.linear_num_value_heads
        rows = {"query": key, "key": key, "value": value, "z": value, "beta": heads, "alpha": heads}
        mixed = ("query", "key", "value")
    return {".in_proj.": rows, ".conv1d.": {part: rows[part] for part in mixed}}


def apart(tensors: Tensors, config: Any) -> Tensors:
    """Return a mixer's projections in tensors of their own, as torch_dist has them."""
    made = {}
    for name, tensor in tensors.items():
        rows = next((rows for own, rows in packed_rows(config).items() if own in name and "_weight" not in name), None)
        if rows is None:
            made[name] = tensor
            continue
        for part, one in zip(rows, tensor.split([*rows.values()]), strict=True):
            made[f"{name}.{part}"] = one
    return made


def hybrid_forms(name: str) -> Iterator[tuple[dict[str, Any], Tensors, Tensors]]:
    """Yield config.json, Hugging Face's tensors and Megatron's for each of the forms that a recipe knows."""
    model = tiny_hybrid(name.replace("-", "_"))
    config, expected = config_of(model), saved(model)
    is_next = name == "qwen3-next"
    for te in (False, True) if is_next else (True,):
        options = {"te": te} if is_next else {}
        tensors = as_megatron_hybrid(model, **options)
        yield config, expected, tensors
        yield config, expected, apart(tensors, model.config)
        named = as_megatron_hybrid(model, experts="experts.{}.linear_fc{}.weight", **options)
        yield config, expected, apart(named, model.config)
        yield config, expected, as_megatron_hybrid(model, experts="linear_fc{1}.weight{0}", **options)
    if is_next:
        named = as_megatron_hybrid(model, experts="experts.{}.linear_fc{}.weight")
        yield config, expected, split_gated(named)
        yield config, expected, as_grouped(stacked(named, "mlp.experts.experts."))
        local_norm = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        yield config, expected, {name.replace(*local_norm): tensor for name, tensor in named.items()}
    else:
        local = {"self_attention.linear_qkv.layer_norm_": "input_layernorm.", "mixer.in_proj.layer_norm_": "norm."}
        names = {"mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.", **local}
        renamed = {}
        for old, tensor in as_megatron_hybrid(model, vocab=48).items():
            for theirs, ours in names.items():
                old = old.replace(theirs, ours)
            renamed[old] = tensor
        yield config, expected, renamed
