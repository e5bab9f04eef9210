"""Modules as Megatron-core makes them on each rank, of plain torch: its names, and the attributes that it sets.

Values are cut by `tests.readers.made_megatron`, which asks no layout of xrank's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.readers.made_megatron import EXPERTS, Run, chunk_state
from xrank.dtypes import numpy_dtype
from xrank.layout import DeviceMesh, MeshViews
from xrank.layout.mesh import megatron_views
from xrank.layout.nests import addresses
from xrank.layout.stored_model import StoredModel
from xrank.readers.live.models import LiveModel, LocalModel, local_model, read_ranks

_COLUMN = (
    r".*(?:word_embeddings|output_layer|linear_qkv|linear_(?:q|kv)_(?:(?:up|down)_)?proj|linear_fc1"
    r"|local_experts\.\d+\.linear_fc1)\.(?:weight|bias)\d*"
)
_ROW = r".*(?:linear_proj|linear_fc2)\.weight\d*"


def mesh_of(run: Run) -> DeviceMesh | MeshViews:
    """Return where ranks stand; tensor parallel ones are neighbors, experts share ranks with data parallelism."""
    if run.etp is not None:
        return megatron_views(run.world, tp=run.tp, ep=run.ep, pp=run.pp, etp=run.etp)
    return DeviceMesh.parse_grid(f"pp={run.pp} dp={run.dp} ep={run.ep} tp={run.tp}")


def chunks_of(run: Run, model: Mapping[str, torch.Tensor], rank: int) -> list[torch.nn.Module]:
    """Return the chunks that a rank holds of a whole model."""
    tp, stage = rank % run.tp, rank // (run.tp * run.ep * run.dp)
    ep = rank // (run.etp or run.tp) % run.ep
    order = [(v, p) for v in range(len(run.chunks)) for p in range(run.pp)]
    made = []
    for chunk in range(len(run.chunks)):
        first = sum(run.chunks[v][p] for v, p in order[: order.index((chunk, stage))])
        made.append(module_of(chunk_state(run, dict(model), tp, stage, ep, chunk), run, first))
    return made


def module_of(state: Mapping[str, Any], run: Run, first_layer: int) -> torch.nn.Module:
    """Return a module with these tensors as parameters, marked as Megatron marks them."""
    root = torch.nn.Module()
    for name, value in state.items():
        if value is None:
            continue
        *path, last = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        if last == "expert_bias":
            owner.register_buffer(last, value)
            continue
        parameter = torch.nn.Parameter(value)
        owner.register_parameter(last, parameter)
        _mark(name, parameter, run)
        if found := re.fullmatch(r"decoder\.layers\.(\d+)\..*", name):
            root.get_submodule(f"decoder.layers.{found[1]}").layer_number = first_layer + int(found[1]) + 1
        if "experts.weight" in name:
            owner.num_local_experts = EXPERTS // run.ep
    return root


def _mark(name: str, parameter: torch.nn.Parameter, run: Run) -> None:
    dim = 0 if re.fullmatch(_COLUMN, name) else 1 if re.fullmatch(_ROW, name) else None
    if "experts.weight" in name:
        dim = 1 if name.endswith("1") else 0
    if dim is not None:
        stride = 2 if "linear_fc1" in name and run.gated else 1
        cut(parameter, dim, stride)
    if ".experts." in name:
        parameter.allreduce = run.ep == 1
    if run.tied and run.pp > 1 and name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        parameter.shared_embedding = True


def cut(parameter: torch.Tensor, dim: int, stride: int = 1) -> None:
    """Mark a parameter as Megatron's set_tensor_model_parallel_attributes does."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, stride


def read_locals(locals_: Sequence[LocalModel]) -> LiveModel:
    """Return the live model of all ranks."""
    return read_ranks([local.describe() for local in locals_])


def locals_of(run: Run, model: Mapping[str, torch.Tensor], **options: Any) -> list[LocalModel]:
    """Return what every rank of a run holds of a whole model."""
    options.setdefault("mesh", mesh_of(run))
    return [
        local_model(chunks if len(chunks) > 1 else chunks[0], rank=rank, world_size=run.world, **options)
        for rank in range(run.world)
        for chunks in [chunks_of(run, model, rank)]
    ]


def whole_tensors(
    stored: StoredModel, live: LiveModel, views: Sequence[Sequence[torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return every tensor, put together element by element; replicas must agree, and nothing may be left out."""
    made = {}
    for shard in stored.shards:
        kind = np.dtype(f"u{numpy_dtype(shard.dtype).itemsize}")
        whole = np.zeros(int(np.prod(shard.shape)), kind)
        seen = np.zeros(whole.shape, bool)
        for row in range(len(shard.record)):
            record = int(shard.record[row])
            view = views[live.rank[record]][live.view[record]].contiguous()
            held = view.reshape(-1).view(torch.uint8).numpy().view(kind)
            x, y = np.array(list(addresses(shard.nests[row]))).T
            assert np.array_equal(whole[y][seen[y]], held[x][seen[y]]), shard.name
            whole[y], seen[y] = held[x], True
        assert seen.all(), shard.name
        made[shard.name] = torch.from_numpy(whole.view(np.uint8)).view(_torch_dtype(shard.dtype)).view(shard.shape)
    return made


def _torch_dtype(name: str) -> torch.dtype:
    return {"BF16": torch.bfloat16, "F32": torch.float32}[name]


def config(**sizes: Any) -> SimpleNamespace:
    """Return the fields of Megatron's TransformerConfig for a run."""
    told = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1}
    return SimpleNamespace(**{**told, "expert_tensor_parallel_size": 1, "num_moe_experts": None, **sizes})
