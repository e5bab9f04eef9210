"""Makes the checkpoints the benchmarks merge: a Llama-like model in bf16 over 8 real ranks, saved by torch itself.

``zero3`` is laid out as DeepSpeed does (deepspeed/utils/zero_to_fp32.py reads it), with fp32 masters and no Adam.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

WORLD_SIZE = 8
KINDS = ("dcp-rows", "dcp-2d", "hf-shards", "verl", "zero3")
_HIDDEN, _INTERMEDIATE, _VOCABULARY = 2048, 6144, 50257
_LAYER_NBYTES = 2 * (2 * _HIDDEN * _HIDDEN + 2 * _HIDDEN * 512 + 3 * _HIDDEN * _INTERMEDIATE)


def shapes(nbytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every tensor's name and shape, of about that many bytes in bf16."""
    yield "model.embed_tokens.weight", (_VOCABULARY, _HIDDEN)
    for i in range(max(1, round((nbytes - 4 * _VOCABULARY * _HIDDEN) / _LAYER_NBYTES))):
        prefix = f"model.layers.{i}."
        yield f"{prefix}self_attn.q_proj.weight", (_HIDDEN, _HIDDEN)
        yield f"{prefix}self_attn.k_proj.weight", (512, _HIDDEN)
        yield f"{prefix}self_attn.v_proj.weight", (512, _HIDDEN)
        yield f"{prefix}self_attn.o_proj.weight", (_HIDDEN, _HIDDEN)
        yield f"{prefix}mlp.gate_proj.weight", (_INTERMEDIATE, _HIDDEN)
        yield f"{prefix}mlp.up_proj.weight", (_INTERMEDIATE, _HIDDEN)
        yield f"{prefix}mlp.down_proj.weight", (_HIDDEN, _INTERMEDIATE)
        yield f"{prefix}input_layernorm.weight", (_HIDDEN,)
        yield f"{prefix}post_attention_layernorm.weight", (_HIDDEN,)
    yield "model.norm.weight", (_HIDDEN,)
    yield "lm_head.weight", (_VOCABULARY, _HIDDEN)


def config(nbytes: int) -> dict[str, object]:
    """Return the model's config.json, which proves the shapes where a format records none."""
    return {
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": sum(name.endswith("q_proj.weight") for name, _ in shapes(nbytes)),
        "vocab_size": _VOCABULARY,
        "tie_word_embeddings": False,
    }


def _bits(count: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers that are cheap to make and no two ranks' alike; finite, so that casts work."""
    made = torch.empty(count, dtype=dtype)
    made.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).random_(
        0x3C00, 0x3FFF if dtype == torch.bfloat16 else 0x3C00FFFF, generator=torch.Generator().manual_seed(seed)
    )
    return made


def _rank(rank: int, store: str, path: str, kind: str, nbytes: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    torch.set_num_threads(1)
    two = kind == "dcp-2d"
    mesh = init_device_mesh("cpu", (4, 2) if two else (8,), mesh_dim_names=("fsdp", "tp") if two else ("fsdp",))
    state = {}
    for seed, (name, shape) in enumerate(shapes(nbytes)):
        whole = _bits(torch.Size(shape).numel(), seed, torch.bfloat16).view(shape)
        into = name.endswith(("o_proj.weight", "down_proj.weight"))
        placements = [Shard(0), Shard(1 if into and len(shape) > 1 else 0)] if two else [Shard(0)]
        if two and len(shape) == 1:
            placements = [Shard(0), torch.distributed.tensor.Replicate()]
        state[name] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        del whole
    if kind == "verl":
        os.makedirs(path, exist_ok=True)
        torch.save(state, os.path.join(path, f"model_world_size_{WORLD_SIZE}_rank_{rank}.pt"))
    elif kind == "hf-shards":
        mapping = {name: 1 + 4 * i // len(state) for i, name in enumerate(state)}
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, mapping, save_distributed=True))
        if rank == 0:
            with open(os.path.join(path, "config.json"), "w", encoding="ascii") as file:
                json.dump(config(nbytes), file)
    else:
        dcp.save(state, checkpoint_id=path)
    dist.barrier()
    dist.destroy_process_group()


def _zero3(path: str, nbytes: int) -> None:
    tag = os.path.join(path, "global_step1")
    os.makedirs(tag)
    with open(os.path.join(path, "latest"), "w", encoding="ascii") as file:
        file.write("global_step1")
    sizes = {name: torch.Size(shape) for name, shape in shapes(nbytes)}
    for rank in range(WORLD_SIZE):
        prefix = os.path.join(tag, f"zero_pp_rank_{rank}_mp_rank_00_")
        model = {
            "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in sizes},
            "param_shapes": [sizes],
            "buffer_names": [],
            "shared_params": {},
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "ds_version": "0.19.8",
        }
        torch.save(model, f"{prefix}model_states.pt")
        count = sum(-(-size.numel() // WORLD_SIZE) for size in sizes.values())
        flat = _bits(count, rank, torch.float32)
        states = {"optimizer_state_dict": {"zero_stage": 3, "partition_count": WORLD_SIZE, "fp32_flat_groups": [flat]}}
        torch.save(states, os.path.join(tag, f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


def make(path: str, kind: str, nbytes: int) -> None:
    """Write a checkpoint of about `nbytes` of bf16 weights."""
    if kind == "zero3":
        _zero3(path, nbytes)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(os.path.join(folder, "store"), path, kind, nbytes), nprocs=WORLD_SIZE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("nbytes", type=int)
    arguments = parser.parse_args()
    make(arguments.path, arguments.kind, arguments.nbytes)
