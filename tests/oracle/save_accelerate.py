"""Lets the real accelerate save a model on every rank that torchrun starts: a file for each rank, or one file."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import save_fsdp_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

CASES = {
    "sharded": (1, "SHARDED_STATE_DICT"),
    "dtensor": (1, "SHARDED_STATE_DICT"),
    "fsdp2": (2, "SHARDED_STATE_DICT"),
    "local": (1, "LOCAL_STATE_DICT"),
    "full": (2, "FULL_STATE_DICT"),
}
"""How it is saved -> FSDP's version, and what accelerate calls it."""


def built() -> nn.Module:
    """Return the whole model, the same wherever it is made."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))


def main(folder: str, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    state = PartialState(cpu=True)
    for case in cases:
        version, kind = CASES[case]
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind, cpu_offload=False)
        mesh = init_device_mesh("cpu", (state.num_processes,), mesh_dim_names=("fsdp",))
        if version == 2:
            model = fully_shard(built(), mesh=mesh)
        else:
            device_mesh = mesh if case == "dtensor" else None
            model = FullyShardedDataParallel(
                built(), use_orig_params=True, device_mesh=device_mesh, device_id=torch.device("cpu")
            )
        save_fsdp_model(plugin, state, model, str(Path(folder, case)), use_dcp=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    # FSDP and accelerate hold the group beyond its end: a gloo thread that drops its last tensor while Python closes
    # aborts the process ("terminate called without an active exception").
    os._exit(0)
