"""Tiny models of transformers' under other frameworks' names, turned by plain torch code, one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from xrank import NFSWorkspace


def tiny_llama(**changes: object) -> torch.nn.Module:
    """Return a Llama small enough for a test, of a seed of its own; heads, groups and widths all differ."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 6,
            "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 37, "tie_word_embeddings": False, **changes,
        }
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))  # norms are ones otherwise, and equal to each other
    return model.eval()


def as_megatron(model: torch.nn.Module, *, vocab: int | None = None, te: bool = False) -> dict[str, torch.Tensor]:
    """Return a Llama's tensors as Megatron-core's GPTModel has them; the vocabulary padded to `vocab` rows."""
    config, state = model.config, dict(model.state_dict())
    groups, size = config.num_key_value_heads, config.head_dim
    made = {}
    for name, theirs in (("embed_tokens", "embedding.word_embeddings"), ("lm_head", "output_layer")):
        key = f"model.{name}.weight" if name == "embed_tokens" else f"{name}.weight"
        if name == "lm_head" and config.tie_word_embeddings:
            continue
        rows = state[key]
        padding = torch.full(((vocab or len(rows)) - len(rows), rows.shape[1]), 7.0)
        made[f"{theirs}.weight"] = torch.cat((rows, padding))
    for i in range(config.num_hidden_layers):
        ours, its = f"model.layers.{i}", f"decoder.layers.{i}"
        q, k, v = (
            state[f"{ours}.self_attn.{n}_proj.weight"].reshape(groups, -1, size, config.hidden_size) for n in "qkv"
        )
        fused = torch.cat((q, k, v), dim=1).reshape(-1, config.hidden_size)
        gate, up = (state[f"{ours}.mlp.{n}_proj.weight"] for n in ("gate", "up"))
        norms = ("self_attention.linear_qkv", "mlp.linear_fc1") if te else ("input_layernorm", "pre_mlp_layernorm")
        suffix = "layer_norm_weight" if te else "weight"
        made |= {
            f"{its}.{norms[0]}.{suffix}": state[f"{ours}.input_layernorm.weight"],
            f"{its}.{norms[1]}.{suffix}": state[f"{ours}.post_attention_layernorm.weight"],
            f"{its}.self_attention.linear_qkv.weight": fused,
            f"{its}.self_attention.linear_proj.weight": state[f"{ours}.self_attn.o_proj.weight"],
            f"{its}.mlp.linear_fc1.weight": torch.cat((gate, up)),
            f"{its}.mlp.linear_fc2.weight": state[f"{ours}.mlp.down_proj.weight"],
        }
    return {**made, "decoder.final_layernorm.weight": state["model.norm.weight"]}


def stacked(tensors: dict[str, torch.Tensor], prefix: str = "decoder.layers.") -> dict[str, torch.Tensor]:
    """Return the same with all layers of a kind in one tensor, as Megatron-core's torch_dist has them."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    made = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            number, _, kind = name.removeprefix(prefix).partition(".")
            found.setdefault(prefix + kind, {})[int(number)] = tensor
        else:
            made[name] = tensor
    return made | {name: torch.stack([layers[i] for i in sorted(layers)]) for name, layers in found.items()}


def as_torchtitan(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a Llama's tensors under Meta's names, the rows of wq and wk turned for rotary pairs side by side."""
    config, state = model.config, dict(model.state_dict())
    names = {
        "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "model.layers": "layers",
    }  # fmt: skip
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
