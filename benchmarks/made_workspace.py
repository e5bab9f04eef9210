"""Makes the workspaces the benchmarks gather: Llama-like shapes, random bytes, shards as FSDP and TP leave them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from xrank import NFSWorkspace
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.local_part import local_part

MESHES = {
    "rows": DeviceMesh((8,), ("dp",)),
    "columns": DeviceMesh((4, 2), ("dp", "tp")),
    "small": DeviceMesh((8,), ("dp",)),
}
"""Rows: FSDP2 alone. Columns: FSDP over tensor parallel, 2-D shards. Small: 10 MB in rows."""

_HIDDEN, _INTERMEDIATE = 2048, 8192
_LAYER_NBYTES = 2 * (4 * _HIDDEN * _HIDDEN + 3 * _HIDDEN * _INTERMEDIATE)


def tensors(kind: str, num_layers: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield (name, global shape, layout) of every tensor."""
    if kind == "small":
        yield from ((f"layers.{i}.weight", (1000, 500), "[d0/~dp, d1]") for i in range(10))
        return
    out = "[d0/~dp, d1]" if kind == "rows" else "[d0/~tp/~dp, d1]"
    into = "[d0/~dp, d1]" if kind == "rows" else "[d0/~dp, d1/~tp]"
    for i in range(num_layers):
        prefix = f"model.layers.{i}."
        for name in ("q", "k", "v"):
            yield f"{prefix}self_attn.{name}_proj.weight", (_HIDDEN, _HIDDEN), out
        yield f"{prefix}self_attn.o_proj.weight", (_HIDDEN, _HIDDEN), into
        for name in ("gate", "up"):
            yield f"{prefix}mlp.{name}_proj.weight", (_INTERMEDIATE, _HIDDEN), into if kind == "columns" else out
        yield f"{prefix}mlp.down_proj.weight", (_HIDDEN, _INTERMEDIATE), into
        yield f"{prefix}input_layernorm.weight", (_HIDDEN,), "[d0/~dp]"


def make(path: str, kind: str, nbytes: int) -> None:
    """Write 8 ranks' states of about `nbytes` in all."""
    num_layers = max(1, round(nbytes / _LAYER_NBYTES))
    mesh = MESHES[kind]
    layouts = LayoutMap(mesh)
    for name, _, layout in tensors(kind, num_layers):
        layouts[name] = layout
    for rank in range(8):
        generator = torch.Generator().manual_seed(rank)
        weights = {}
        for name, shape, layout in tensors(kind, num_layers):
            part = local_part(TensorLayout.parse(layout), mesh, mesh.coordinate(rank), shape)
            bits = torch.randint(-(2**63), 2**63 - 1, (-(-_count(part.shape) // 4),), generator=generator)
            weights[name] = bits.view(torch.bfloat16)[: _count(part.shape)].reshape(part.shape)
        if kind == "columns":
            # Norms are cut over dp alone: both tp ranks hold the same, as in a real model.
            generator = torch.Generator().manual_seed(1000 + mesh.coordinate(rank)["dp"])
            for name, tensor in weights.items():
                if tensor.dim() == 1:
                    weights[name] = torch.randn(tensor.shape, generator=generator).bfloat16()
        workspace = NFSWorkspace(path, rank=rank, world_size=8, run_id="benchmark")
        workspace.write_configs_and_weights({"model_type": "made"}, weights, layouts=layouts)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("kind", choices=MESHES)
    parser.add_argument("nbytes", type=int)
    arguments = parser.parse_args()
    make(arguments.path, arguments.kind, arguments.nbytes)
