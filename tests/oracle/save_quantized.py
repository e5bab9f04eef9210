"""Saves the models of `quantized_models` as four ranks hold them, and exports them quantized: run by torchrun.

    torchrun --nproc-per-node 4 -m tests.oracle.save_quantized FOLDER MODEL[,SCHEME...]...

FOLDER then has for each model ``dcp``, saved by torch of FSDP2 over tensor or expert parallelism, ``zero3``, saved by
DeepSpeed, and ``live/SCHEME``, exported by xrank from the ranks of the first.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import xrank
from tests.oracle.quantized_models import KEPT, make_model

_CUTS = {
    r"\.experts\.\w+$": 0,
    r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj|q_b_proj|kv_b_proj)\.weight$": 0,
    r"\.(o_proj|down_proj)\.weight$": 1,
}
"""Expression of names -> the dim that the second axis cuts; of experts that is their number, as in torchtitan."""


def shard(model: torch.nn.Module) -> torch.nn.Module:
    """Cut a model by FSDP2 over tensor parallelism, or over expert parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, parameter in list(model.named_parameters()):
        dim = next((dim for expression, dim in _CUTS.items() if re.search(expression, name)), None)
        if dim is not None:
            module, _, own = name.rpartition(".")
            part = distribute_tensor(parameter.data, mesh["tp"], [Shard(dim)])
            model.get_submodule(module).register_parameter(own, torch.nn.Parameter(part))
    for module in model.modules():
        for layer in module if isinstance(module, torch.nn.ModuleList) else ():
            fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def save_zero3(model: torch.nn.Module, folder: Path) -> None:
    """Partition a model by ZeRO-3, and save it."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.save_checkpoint(str(folder))
    engine.destroy()


def main(root: Path, *models: str) -> None:
    """Save and export all models."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Else DeepSpeed compiles an operator, for a minute.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    transformers.logging.set_verbosity_error()
    for model in models:
        name, *schemes = model.split(",")
        save_zero3(make_model(name), root / name / "zero3")
        sharded = shard(make_model(name))
        dcp.save({"model": sharded.state_dict()}, checkpoint_id=root / name / "dcp")
        for scheme in schemes:
            out = root / name / "live" / scheme
            xrank.export_model(sharded, out, quantize=scheme, quantize_ignore=KEPT.get(name, ()))
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    os._exit(0)  # DeepSpeed holds its groups: a gloo thread that drops its last tensor while Python closes aborts
