"""Vision towers of Megatron's layers, as mbridge makes them, from the tensors of Hugging Face's."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Tensors", "gemma_tower", "internvl_tower", "qwen_tower", "rename"]

Tensors = dict[str, torch.Tensor]


def rename(state: Tensors, prefixes: dict[str, str]) -> Tensors:
    """Return the tensors with other prefixes; names without one of them stay."""
    found = {}
    for name, tensor in state.items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        found[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    return found


def _by_head(parts: list[torch.Tensor], heads: int) -> torch.Tensor:
    """Return queries, keys and values of a head next to each other, as Megatron has them."""
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)


def qwen_tower(state: Tensors, config: Any) -> Tensors:
    """Return Qwen 2.5's tower as mbridge's Qwen2_5VisionModel has it."""
    names = {
        "visual.patch_embed.": "vision_model.patch_embed.",
        "visual.merger.ln_q.": "vision_model.decoder.final_layernorm.",
        "visual.merger.mlp.0.": "vision_model.projection.encoder.linear_fc1.",
        "visual.merger.mlp.2.": "vision_model.projection.encoder.linear_fc2.",
    }  # fmt: skip
    made = rename({name: tensor for name, tensor in state.items() if name.startswith(tuple(names))}, names)
    for i in range(config.depth):
        ours, its = f"visual.blocks.{i}", f"vision_model.decoder.layers.{i}"
        made[f"{its}.self_attention.linear_qkv.layer_norm_weight"] = state[f"{ours}.norm1.weight"]
        made[f"{its}.mlp.linear_fc1.layer_norm_weight"] = state[f"{ours}.norm2.weight"]
        for kind in ("weight", "bias"):
            parts = state[f"{ours}.attn.qkv.{kind}"].chunk(3)
            made[f"{its}.self_attention.linear_qkv.{kind}"] = _by_head([*parts], config.num_heads)
            made[f"{its}.self_attention.linear_proj.{kind}"] = state[f"{ours}.attn.proj.{kind}"]
            both = [state[f"{ours}.mlp.{part}_proj.{kind}"] for part in ("gate", "up")]
            made[f"{its}.mlp.linear_fc1.{kind}"] = torch.cat(both)
            made[f"{its}.mlp.linear_fc2.{kind}"] = state[f"{ours}.mlp.down_proj.{kind}"]
    return made


def internvl_tower(state: Tensors, config: Any) -> Tensors:
    """Return InternVL's tower and projection as mbridge's InternVLModel has them."""
    names = {
        "vision_tower.embeddings.cls_token": "vision_model.class_token",
        "vision_tower.embeddings.position_embeddings": "vision_model.position_embedding",
        "vision_tower.embeddings.patch_embeddings.projection.": "vision_model.conv1.",
        "multi_modal_projector.layer_norm.": "vision_projection.encoder.linear_fc1.layer_norm_",
        "multi_modal_projector.linear_1.": "vision_projection.encoder.linear_fc1.",
        "multi_modal_projector.linear_2.": "vision_projection.encoder.linear_fc2.",
    }
    made = rename({name: tensor for name, tensor in state.items() if name.startswith(tuple(names))}, names)
    for i in range(config.num_hidden_layers):
        ours, its = f"vision_tower.encoder.layer.{i}", f"vision_model.decoder.layers.{i}"
        for kind in ("weight", "bias"):
            made[f"{its}.self_attention.linear_qkv.layer_norm_{kind}"] = state[f"{ours}.layernorm_before.{kind}"]
            made[f"{its}.mlp.linear_fc1.layer_norm_{kind}"] = state[f"{ours}.layernorm_after.{kind}"]
            parts = [state[f"{ours}.attention.{part}_proj.{kind}"] for part in "qkv"]
            made[f"{its}.self_attention.linear_qkv.{kind}"] = _by_head(parts, config.num_attention_heads)
            made[f"{its}.self_attention.linear_proj.{kind}"] = state[f"{ours}.attention.projection_layer.{kind}"]
            for number in (1, 2):
                made[f"{its}.mlp.linear_fc{number}.{kind}"] = state[f"{ours}.mlp.fc{number}.{kind}"]
        for number in (1, 2):
            made[f"{its}.ls{number}"] = state[f"{ours}.lambda_{number}"]
    return made


def gemma_tower(tensors: Tensors, config: Any) -> Tensors:
    """Return the tensors of Megatron-Bridge's Gemma 3 as mbridge has them: a tower of Megatron's layers."""
    names = {
        "vision_tower.embeddings.patch_embedding.": "vision_model.conv1.",
        "vision_tower.embeddings.position_embedding.": "vision_model.position_embeddings.",
        "vision_tower.post_layernorm.": "vision_model.ln_post.",
        "multi_modal_projector.proj.": "vision_projection.mm_input_projection.",
        "multi_modal_projector.mm_soft_embed_norm.": "vision_projection.mm_input_projection.layer_norm_",
    }
    made: Tensors = {}
    for name, tensor in rename(tensors, names).items():
        name = name.replace("self_attention.linear_proj.post_layernorm", "post_attention_layernorm")
        name = name.replace("mlp.linear_fc2.post_layernorm", "post_feedforward_layernorm")
        if not name.startswith("vision_tower."):
            made[name] = tensor
    for i in range(config.num_hidden_layers):
        ours, its = f"vision_tower.encoder.layers.{i}", f"vision_model.decoder.layers.{i}"
        for kind in ("weight", "bias"):
            made[f"{its}.self_attention.linear_qkv.layer_norm_{kind}"] = tensors[f"{ours}.layer_norm1.{kind}"]
            made[f"{its}.mlp.linear_fc1.layer_norm_{kind}"] = tensors[f"{ours}.layer_norm2.{kind}"]
            parts = [tensors[f"{ours}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            made[f"{its}.self_attention.linear_qkv.{kind}"] = _by_head(parts, config.num_attention_heads)
            made[f"{its}.self_attention.linear_proj.{kind}"] = tensors[f"{ours}.self_attn.out_proj.{kind}"]
            for number in (1, 2):
                made[f"{its}.mlp.linear_fc{number}.{kind}"] = tensors[f"{ours}.mlp.fc{number}.{kind}"]
    return made
