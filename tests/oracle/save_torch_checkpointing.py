"""Lets the real torch_checkpointing save a model on every rank that torchrun starts, in each of its layouts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

CASES: dict[str, dict[str, Any]] = {
    "pt": {},
    "pt with metadata": {"resharder": DefaultResharder()},
    "safetensors": {
        "resharder": DefaultResharder(),
        "layout": LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization()),
    },
    "folders": {
        "resharder": DefaultResharder(),
        "layout": LayoutInfo("rank_{rank}/weights.safetensors", SafetensorsSerialization()),
    },
    "without metadata": {"layout": LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())},
}
"""How the model is saved."""
CUTS = ("fsdp2", "tp", "fsdp2 x tp", "hsdp")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6, bias=False)
        self.norm = nn.LayerNorm(6, dtype=torch.bfloat16)
        self.register_buffer("steps", torch.tensor(3))


def cut_model(cut: str) -> nn.Module:
    """Return the model, cut over four ranks."""
    model = Net()
    match cut:
        case "fsdp2":
            return fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
        case "hsdp":
            return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model if cut == "tp" else fully_shard(model, mesh=mesh["dp"])


def gather_objects(self: object, data: Any, process_group: Any = None) -> dict[int, Any]:
    """Do on CPUs what its own method does by way of CUDA tensors."""
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, process_group)
    return dict(enumerate(found))


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    DefaultMetadataManager._all_gather_pickled_data = gather_objects
    for cut in CUTS:
        model = cut_model(cut)
        items = {"model": model.state_dict(), "step": 7, "optim": torch.optim.AdamW(model.parameters()).state_dict()}
        for case, spec in CASES.items():
            config = CheckpointManager.Config.with_sync_save()
            config.items = {"model": ItemSpec(**spec)}
            # Not every file system takes its direct I/O.
            config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
            manager = config.build()
            manager.save(str(Path(folder, cut, case, "step_7")), items)
            manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # gloo's threads may outlive the group and abort the process while Python closes
