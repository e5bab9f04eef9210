"""Save or load a debug model of torchtitan with its own checkpoint manager, on ranks of gloo that share it by FSDP2.

Usage: torchrun ... save_torchtitan.py save FAMILY FOLDER
       torchrun ... save_torchtitan.py load FAMILY FOLDER MODEL

``save`` writes FOLDER/native/step-1, and FOLDER/hf/step-1 by torchtitan's own adapter. ``load`` fills the model from
the Hugging Face folder MODEL and prints the tensors of the state that then differ from those of ``save``, as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.oracle.trainers.own_models import let_torchtitan_run_on_cpu

FLAVORS = {
    "llama3": ("llama3", "debugmodel"),
    "qwen3": ("qwen3", "debugmodel"),
    "qwen3-apart": ("qwen3", "debugmodel_non_fused_qkv"),
    "qwen3-moe": ("qwen3", "debugmodel_moe"),
    "deepseek-v3": ("deepseek_v3", "debugmodel"),
    "gpt-oss": ("gpt_oss", "debugmodel"),
    "flux": ("flux", "flux-debug"),
}
NUM_LAYERS = 2


def make_model(family: str) -> tuple[nn.Module, Any]:
    """Return a model of torchtitan's class, shared by all ranks, and its adapter."""
    package, flavor = FLAVORS[family]
    if family == "flux":  # data sets and encoders have no part in the checkpoint
        for name in ("flux_datasets", "model.autoencoder", "model.hf_embedder", "parallelize"):
            sys.modules[f"torchtitan.models.flux.{name}"] = MagicMock()
    spec = importlib.import_module(f"torchtitan.models.{package}").model_registry(flavor)
    config: Any = spec.model
    if family == "flux":
        config.double_blocks, config.single_blocks = config.double_blocks[:1], config.single_blocks[:2]
    else:
        config.layers = config.layers[:NUM_LAYERS]
    torch.manual_seed(0)  # the same values on all ranks
    model = config.build()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.normal_()
    blocks = [*model.double_blocks, *model.single_blocks] if family == "flux" else [*model.layers.values()]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh)
    return model, spec.state_dict_adapter(config, None)


def make_manager(model: nn.Module, adapter: Any, folder: Path, **options: Any) -> Any:
    """Return torchtitan's checkpoint manager for the model alone."""
    from torchtitan.components.checkpointer.dcp import CheckpointManager

    nothing: Any = None
    return CheckpointManager(
        CheckpointManager.Config(enable=True, folder=folder.name, **options),
        dataloader=None,
        model_parts=[model],
        optimizers=nothing,
        lr_schedulers=nothing,
        states={},
        sd_adapter=adapter,
        base_folder=str(folder.parent),
    )


def save(model: nn.Module, adapter: Any, folder: Path) -> None:
    for name in ("native", "hf"):
        options = {"last_save_in_hf": name == "hf", "last_save_model_only": True}
        make_manager(model, adapter, folder / name, **options).save(curr_step=1, last_step=True)


def load(model: nn.Module, adapter: Any, folder: Path, source: str) -> None:
    want = {name: gathered(tensor).clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    manager = make_manager(model, adapter, folder / "none", initial_load_path=source, initial_load_in_hf=True)
    assert manager.load()
    got = {name: gathered(tensor) for name, tensor in model.state_dict().items()}
    if dist.get_rank() == 0:
        print(json.dumps([name for name in want if not torch.equal(got[name], want[name])]))


def gathered(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


if __name__ == "__main__":
    let_torchtitan_run_on_cpu()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task, family, folder, *source = sys.argv[1:]
    made = make_model(family)
    {"save": save, "load": load}[task](*made, Path(folder), *source)
    dist.destroy_process_group()
