"""Torch DCP checkpoints of a small model, written by torch on real ranks; each must gather to the model as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from xrank.testing.rank_pool import RankPool
from xrank.testing.reader_contract import WholeTensor, whole


class Block(nn.Module):
    """Every kind of cut: even and uneven rows, columns, vectors, ranks that have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)  # 3, 3, 3, 1 rows over 4 ranks
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.odd = nn.Linear(6, 5)  # 2, 2, 1, 0
        self.norm = nn.LayerNorm(6, dtype=torch.bfloat16)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mask", torch.arange(6) % 2 == 0)


def built(seed: int = 0) -> Block:
    """Return the whole model, the same wherever it is made."""
    torch.manual_seed(seed)
    block = Block()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    return block


def expected(seed: int = 0) -> dict[str, WholeTensor]:
    """Return what a gather must give."""
    return {name: whole(tensor) for name, tensor in built(seed).state_dict().items()}


def _fsdp(block: Block) -> Block:
    return fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _tensor_parallel(block: Block, mesh: Any) -> Block:
    return parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _tp(block: Block) -> Block:
    return _tensor_parallel(block, init_device_mesh("cpu", (dist.get_world_size(),)))


def _fsdp_tp(block: Block) -> Block:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(_tensor_parallel(block, mesh["tp"]), mesh=mesh["dp"])


def _hsdp(block: Block) -> Block:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(block, mesh=mesh)


def _replicated(block: Block) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor, mesh, [Replicate()]) if name.startswith("up") else tensor
        for name, tensor in block.state_dict().items()
    }


def _even(block: Block) -> dict[str, Any]:
    """Pieces of one size on every rank, other ones for each seed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.rand(8, 4), mesh, [Shard(0)])}


def _constant(block: Block) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])}


def _fsdp1_local(block: Block) -> dict[str, Any]:
    model = FullyShardedDataParallel(block.float(), use_orig_params=True, device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return model.state_dict()


CUTS: dict[str, Callable[[Block], Any]] = {
    "fsdp2": _fsdp,
    "tp": _tp,
    "fsdp2 x tp": _fsdp_tp,
    "hsdp": _hsdp,
    "replicated": _replicated,
}
"""How the model may be cut."""
_OTHERS: dict[str, Callable[[Block], Any]] = {"even": _even, "constant": _constant, "fsdp1 local": _fsdp1_local}


def save(folder: str, cut: str, nesting: str, seed: int, writing: Mapping[str, Any]) -> None:
    """Save the model, on every rank of a world.

    Args:
        folder: of the checkpoint; accelerate's nesting makes its two folders in it.
        cut: a key of `CUTS` or of `_OTHERS`.
        nesting: ``flat``; ``model``; ``trainer``, with optimizer and counters beside; ``accelerate``.
        seed: of the model.
        writing: more for `FileSystemWriter`.
    """
    warnings.simplefilter("ignore")  # of torch's own deprecations
    cut_model = (CUTS | _OTHERS)[cut](built(seed))
    states = get_model_state_dict(cut_model) if isinstance(cut_model, nn.Module) else cut_model

    def write(into: str, states: Any) -> None:
        dcp.save(states, storage_writer=FileSystemWriter(into, **writing))

    if nesting == "flat":
        write(folder, states)
    elif nesting == "model":
        write(folder, {"model": states})
    elif nesting == "accelerate":
        # accelerate/utils/fsdp_utils.py: save_fsdp_model, save_fsdp_optimizer
        write(f"{folder}/pytorch_model_fsdp_0", {"model": states})
        write(f"{folder}/optimizer_0", {"optimizer": _optimizer_state(cut_model)})
    else:
        write(folder, {"model": states, "optim": _optimizer_state(cut_model), "epoch": 3, "rng": {"seed": [1, 2]}})


def _optimizer_state(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if isinstance(p, DTensor)], lr=0.0)  # moves nothing
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return get_optimizer_state_dict(model, optimizer)


def saved(
    pool: RankPool, folder: Path, cut: str, nesting: str = "model", *, num_ranks: int = 4, seed: int = 0, **writing: Any
) -> Path:
    """Let real ranks save the model (`save`); return the folder."""
    pool.run(num_ranks, save, str(folder), cut, nesting, seed, writing)
    return folder
