"""Tiny live models, ways to shard them, and what an export of them must be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes}))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(4)
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=5))


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_experts": 6, "moe_intermediate_size": 24, "mlp_only_layers": [1], "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts))


def shard(model: Any, kind: str, world_size: int) -> Any:
    """Shard a Llama in place by torch's own means."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    names = {"fsdp": ("dp",), "tp": ("tp",), "fsdp tp": ("dp", "tp"), "hsdp": ("r", "dp")}[kind]
    shape = (world_size,) if len(names) == 1 else (world_size // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if "tp" in names:
        columns, rows = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
        plan: dict[str, Any] = {f"self_attn.{name}": ColwiseParallel() for name in columns}
        plan |= {f"self_attn.{name}": RowwiseParallel() for name in rows}
        plan |= {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"] if len(names) > 1 else mesh, plan)
    if kind != "tp":
        data = mesh["dp"] if kind == "fsdp tp" else mesh
        for layer in model.model.layers:
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return found


def assert_same_folder(got: Path, want: Path) -> None:
    """Check that two model folders hold the same tensors and the same configs."""
    ours, theirs = tensors_of(got), tensors_of(want)
    assert sorted(ours) == sorted(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
        assert ours[name].flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8)), name
    for name in ("config.json", "generation_config.json"):
        assert json.loads((got / name).read_text()) == json.loads((want / name).read_text())
