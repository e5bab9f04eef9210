"""Checkpoints as torch_checkpointing 0.1.1 saves them, written by torch alone on real ranks.

The structure of metadata.pkl is that of its distributed_metadata.py and dtensor_metadata.py; tests/oracle compares with
the package itself.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from tests.readers.dcp_checkpoints import CUTS, built
from xrank.testing.rank_pool import RankPool

KINDS = ("pt", "pt with metadata", "safetensors with metadata", "safetensors")


def save(folder: str, cut: str, kind: str, item: str) -> None:
    """Save the model on every rank of a world.

    Args:
        folder: of the checkpoint.
        cut: a key of `CUTS`.
        kind: one of `KINDS`.
        item: the model's name among the items.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cut_model = CUTS[cut](built())
    state = cut_model.state_dict() if isinstance(cut_model, nn.Module) else cut_model
    suffix = kind.partition(" ")[0]
    if suffix == "pt":
        with open(f"{folder}/{item}_{rank}.pt", "wb") as stream:
            torch.save(state, stream)
    else:
        local = {n: (t.to_local() if isinstance(t, DTensor) else t).contiguous() for n, t in state.items()}
        save_file(local, f"{folder}/{item}_{rank}.safetensors")
    torch.save({"state": {0: {"exp_avg": torch.rand(2)}}}, f"{folder}/optim_{rank}.pt")
    torch.save(7, f"{folder}/step_{rank}.pt")
    saved: list[Any] = [None] * world_size
    dist.all_gather_object(saved, {name: describe(tensor, world_size) for name, tensor in state.items()})
    if rank == 0 and kind.endswith("metadata"):
        layouts = {r: None if suffix == "pt" else layout(f"{item}_{r}.safetensors") for r in range(world_size)}
        places = {json.dumps([name]): groups_of([own.get(name) for own in saved]) for name in state}
        own = {"nested_path_to_metadata": places, "rank_to_layout_info": layouts}
        content = {"metadata": {item: own}, "world_size": world_size, "version": "2.0"}
        Path(folder, "metadata.pkl").write_bytes(pickle.dumps(content))


def layout(path: str) -> dict[str, Any]:
    return {"file_path": path, "serialization_format": {"type": "SafetensorsSerialization"}}


def groups_of(saved: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Return each description with the ranks that have it."""
    groups: list[dict[str, Any]] = []
    for rank, own in enumerate(saved):
        group = next((one for one in groups if one["sharding_metadata"]["data"] == own), None)
        if own is not None and group is None:
            groups.append({"sharding_metadata": {"type": "DTensorShardingMetadata", "data": own}, "ranks": (rank,)})
        elif group is not None:
            group["ranks"] = (*group["ranks"], rank)
    return groups


def describe(tensor: torch.Tensor, world_size: int) -> dict[str, Any]:
    """Return the record of a tensor; a plain one counts as a replica on all ranks."""
    mesh_shape, ranks, names = (world_size,), tuple(range(world_size)), None
    placements: list[dict[str, Any]] = [{"type": "Replicate"}]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        mesh_shape, ranks, names = tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), mesh.mesh_dim_names
        placements = [describe_placement(placement) for placement in tensor.placements]
    return {
        "global_shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "stride": list(tensor.stride()),
        "mesh_spec": {"device_type": "cpu", "mesh_shape": mesh_shape, "mesh_data": ranks, "mesh_dim_names": names},
        "placements": placements,
    }


def describe_placement(placement: Any) -> dict[str, Any]:
    match type(placement).__name__:
        case "_StridedShard":
            return {"type": "StridedShard", "dim": placement.dim, "split_factor": placement.split_factor}
        case "Shard":
            return {"type": "Shard", "dim": placement.dim}
    return {"type": "Replicate"}


def saved(
    pool: RankPool,
    folder: Path,
    cut: str = "fsdp2",
    kind: str = "pt",
    *,
    num_ranks: int = 4,
    item: str = "model",
) -> Path:
    """Let real ranks save the model (`save`); return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pool.run(num_ranks, save, str(folder), cut, kind, item)
    return folder
