"""The names of one Megatron model with other layers and in other checkpoints, made of those of its local layers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

__all__ = ["as_transformer_engine", "other_forms"]

Tensors = dict[str, torch.Tensor]
_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")


def other_forms(tensors: Tensors) -> Iterator[Tensors]:
    """Yield the tensors under Transformer Engine's names, then with other names of experts, and of norms behind."""
    yield _fuse_norms(tensors)
    if any("post_layernorm" in name for name in tensors):
        yield {_name_norms_behind(name): tensor for name, tensor in tensors.items()}
    if any(".experts." in name for name in tensors):
        yield _rename_experts(tensors, r"\1\3.\4\2")
        named = _rename_experts(tensors, r"\1experts.\2.\3.\4")
        yield _fuse_norms(named, is_everywhere=True)
        yield _split_projections(named)
        if not any(name.endswith("linear_fc1.bias") for name in tensors):
            yield _join_experts(named)
    else:
        yield _split_projections(tensors)


def as_transformer_engine(tensors: Tensors) -> Tensors:
    """Return the tensors under the names of Transformer Engine's layers, experts grouped."""
    return _rename_experts(_fuse_norms(tensors), r"\1\3.\4\2")


def _fuse_norms(tensors: Tensors, *, is_everywhere: bool = False) -> Tensors:
    """Return norms as parts of the linear layers after them, where Transformer Engine fuses the two.

    torch_dist writes the local layers' norms so everywhere (gpt_layer_specs.py: sharded_state_dict_keys_map).
    """
    found = {}
    for name, tensor in tensors.items():
        before, _, kind = name.rpartition("_layernorm.")
        layer, _, norm = before.rpartition(".")
        latent = f"{before.removesuffix(norm)}linear_{norm}_up_proj"
        if norm in ("q", "kv") and f"{latent}.weight" in tensors:
            name = f"{latent}.layer_norm_{kind}"
        if norm == "input" and f"{layer}.self_attention.linear_qkv.weight" in tensors:
            name = f"{layer}.self_attention.linear_qkv.layer_norm_{kind}"
        if norm == "pre_mlp" and (is_everywhere or f"{layer}.mlp.linear_fc1.weight" in tensors):
            name = f"{layer}.mlp.linear_fc1.layer_norm_{kind}"
        found[name] = tensor
    return found


def _name_norms_behind(name: str) -> str:
    """Return mbridge's name of a norm that Megatron-Bridge has within the linear layer before it."""
    name = name.replace("self_attention.linear_proj.post_layernorm", "post_attention_layernorm")
    return name.replace("mlp.linear_fc2.post_layernorm", "post_feedforward_layernorm")


def _rename_experts(tensors: Tensors, name: str) -> Tensors:
    return {_EXPERT.sub(name, old): tensor for old, tensor in tensors.items()}


def _split_projections(tensors: Tensors) -> Tensors:
    """Return gate and up in tensors of their own, as `singleton_local_shards` leaves them."""
    found = {}
    for name, tensor in tensors.items():
        down = tensors.get(name.replace("linear_fc1.bias", "linear_fc1.weight").replace("linear_fc1", "linear_fc2"))
        is_gated = "linear_fc1." in name and down is not None and len(tensor) == 2 * down.shape[1]
        if is_gated and name.endswith((".weight", ".bias")):
            found[f"{name}_w"], found[f"{name}_v"] = tensor.chunk(2)
        else:
            found[name] = tensor
    return found


def _join_experts(tensors: Tensors) -> Tensors:
    """Return GroupedMLP's tensors, each matrix the other way round, in the shape that it views them in."""
    found: Tensors = {}
    lists: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        expert = re.fullmatch(r"(.*\.experts\.)experts\.\d+\.linear_fc([12])\.weight", name)
        if expert is None:
            found[name] = tensor
        else:
            lists.setdefault(f"{expert[1]}weight{expert[2]}", []).append(tensor.T)
    return found | {name: torch.stack(each) for name, each in lists.items()}
