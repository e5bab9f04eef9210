"""The work of the ranks of a trainer and of an engine in tests of refit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import xrank
from benchmarks.fused_engine import FusedEngine, Sizes, whole_shapes
from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.local_part import local_part
from xrank.layout.nests import addresses

SIZES = Sizes(hidden=64, ffn=96, vocab=99, layers=2, heads=4, kv_heads=2, head=16)


def whole_tensors(step: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return the whole model of a step: every element differs from that of other steps."""
    found = {}
    for number, (name, shape) in enumerate(whole_shapes(SIZES).items()):
        generator = torch.Generator().manual_seed(1000 * step + number)
        found[name] = (torch.rand(shape, generator=generator) + step).to(dtype)
    return found


def trainer_layouts() -> LayoutMap:
    """Return uneven FSDP over tensor parallelism, columns among them."""
    layouts = LayoutMap(DeviceMesh((2, 2), ("dp", "tp")))
    for name, shape in whole_shapes(SIZES).items():
        is_column = "o_proj" in name or "down_proj" in name
        layouts[name] = "[h/~dp]" if len(shape) == 1 else "[h/~dp, f/~tp]" if is_column else "[f/~tp/~dp, h]"
    return layouts


def part_of(whole: torch.Tensor, layout: Any, rank: int) -> torch.Tensor:
    """Return a rank's part of a tensor, element by element."""
    part = local_part(layout, layout.device_mesh, layout.device_mesh.coordinate(rank), tuple(whole.shape))
    flat, local = whole.flatten(), torch.zeros(part.shape, dtype=whole.dtype)
    for nest in part.nests:
        pairs = torch.tensor(list(addresses(nest)))
        local.view(-1)[pairs[:, 0]] = flat[pairs[:, 1]]
    return local


def shard(step: int, layouts: LayoutMap, rank: int) -> dict[str, torch.Tensor]:
    """Return a trainer rank's tensors of a step."""
    return {name: part_of(tensor, layouts[name], rank) for name, tensor in whole_tensors(step).items()}


def engine_of(step: int, rank: int, world_size: int) -> FusedEngine:
    """Return an engine rank that its own loader has filled."""
    engine = FusedEngine(SIZES, rank, world_size)
    engine.load_weights(whole_tensors(step).items())
    return engine


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Return whether two modules hold the same bits."""
    return all(x.equal(y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def train(folder: str, steps: int, num_takers: int, snapshot: bool = False) -> list[Any]:
    """Publish some steps, and change the weights in place between them."""
    rank, layouts, reports = dist.get_rank(), trainer_layouts(), []
    held = shard(1, layouts, rank)
    with xrank.offer_weights(held, folder, layouts=layouts, snapshot=snapshot) as offer:
        offer.wait_for_takers(num_takers, timeout_seconds=60)
        for step in range(1, steps + 1):
            for name, tensor in shard(step, layouts, rank).items():
                held[name].copy_(tensor)
            reports.append(offer.publish(step, timeout_seconds=60))
        if snapshot:
            wait_for_file(Path(folder) / "done")
    return reports


def serve_fused(folder: str, steps: int) -> list[Any]:
    """Take some steps by the engine's own loader, and compare with the result of the loader for whole tensors."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    engine, reports = FusedEngine(SIZES, rank, world_size), []
    engine.register_buffer("cache", torch.ones(3))
    with xrank.take_weights(engine, folder, loader=engine.load_weights) as weights:
        for step in range(1, steps + 1):
            report = weights.update(timeout_seconds=60)
            assert report.step == step == weights.step
            wanted = engine_of(step, rank, world_size)
            assert all(a.equal(b) for a, b in zip(engine.parameters(), wanted.parameters(), strict=True)), step
            reports.append(report)
    return reports


def wait_for_file(path: Path, seconds: float = 60.0, pause: float = 0.001) -> None:
    """Wait until a file is there."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(pause)
