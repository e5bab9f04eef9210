"""State dicts saved rank by rank, as verl and accelerate save them, written by torch on real ranks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from tests.readers.dcp_checkpoints import CUTS, Block, built
from xrank.testing.rank_pool import RankPool


def save_verl(folder: str, cut: str, as_stream: bool, prefix: str = "") -> None:
    """Save the model as verl/utils/checkpoint/fsdp_checkpoint_manager.py does, on every rank of a world.

    Args:
        folder: of the checkpoint.
        cut: a key of `CUTS`.
        as_stream: through an open file, whose name torch does not know.
        prefix: what a wrapper puts before each name.
    """
    warnings.simplefilter("ignore")  # of torch's own deprecations
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cut_model = CUTS[cut](built())
    state = cut_model.state_dict() if isinstance(cut_model, nn.Module) else cut_model
    # A buffer that sorts first, which verl's own merger takes for a model of one rank.
    state = {f"{prefix}{name}": value for name, value in {"a_buffer": torch.arange(5), **state}.items()}
    _write(state, f"{folder}/model_world_size_{world_size}_rank_{rank}.pt", as_stream)
    if rank == 0:
        Path(folder, "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world_size}))
        Path(folder, "huggingface").mkdir()
        Path(folder, "huggingface", "config.json").write_text('{"model_type": "none"}')


def _write(state: Any, path: str, as_stream: bool) -> None:
    if not as_stream:
        torch.save(state, path)
        return
    with open(path, "wb") as stream:
        torch.save(state, stream)


def save_accelerate(folder: str, kind: str, number: int) -> None:
    """Save the model as accelerate/utils/fsdp_utils.py: save_fsdp_model does without DCP, on every rank of a world.

    Args:
        folder: of the checkpoint.
        kind: ``sharded``, ``dtensor``, ``local`` (names kept), ``flat`` (names lost).
        number: of the model.
    """
    warnings.simplefilter("ignore")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)) if kind == "dtensor" else None
    options: dict[str, Any] = {"use_orig_params": kind != "flat", "device_mesh": mesh, "device_id": torch.device("cpu")}
    block = built()
    # One element type for each flat parameter, and one that is nested.
    block.norm = FullyShardedDataParallel(block.norm, **options)
    model = FullyShardedDataParallel(block, **options)
    chosen = StateDictType.LOCAL_STATE_DICT if kind in ("local", "flat") else StateDictType.SHARDED_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(model, chosen):
        state = model.state_dict()
    stem = "pytorch_model_fsdp" + (f"_{number}" if number or kind in ("sharded", "dtensor") else "")
    torch.save(state, f"{folder}/{stem}_rank{rank}.bin")


def verl(
    pool: RankPool,
    folder: Path,
    cut: str = "fsdp2",
    *,
    num_ranks: int = 4,
    as_stream: bool = False,
    prefix: str = "",
) -> Path:
    """Let real ranks save the model (`save_verl`); return the folder."""
    folder.mkdir(parents=True)
    pool.run(num_ranks, save_verl, str(folder), cut, as_stream, prefix)
    return folder


def accelerate(pool: RankPool, folder: Path, kind: str, *, num_ranks: int = 4, number: int = 0) -> Path:
    """Let real ranks save the model (`save_accelerate`); return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pool.run(num_ranks, save_accelerate, str(folder), kind, number)
    return folder


def base_model(folder: Path) -> Path:
    """Write the model as a base model's folder; other values, so that nothing can be taken from it."""
    folder.mkdir(parents=True)
    save_file({n: torch.zeros_like(t) for n, t in Block().state_dict().items()}, folder / "model.safetensors")
    return folder
