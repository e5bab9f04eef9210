"""Layouts of the whole notation through real files: states that a gather reads, and reshards to any other and back."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.layout.shaped_layouts import is_held_once, shaped_case
from tests.sampled import sampled
from xrank import NFSWorkspace, gather_checkpoint, reshard_checkpoint
from xrank.layout import LayoutMap
from xrank.layout.local_part import local_part
from xrank.layout.nests import addresses

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)


def made_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=torch.Generator().manual_seed(seed))
    return data.to(torch.uint8).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def local_tensors(tensors, layouts, rank):
    """Return what a rank holds, element by element; pads are zeros."""
    held = {}
    for name, tensor in tensors.items():
        layout = layouts[name]
        mesh = layout.device_mesh
        part = local_part(layout, mesh, mesh.coordinate(rank), tensor.shape) if rank in mesh else None
        if part is None:
            continue
        nbytes = tensor.dtype.itemsize
        whole, local = raw(tensor), bytearray(math.prod(part.shape) * nbytes)
        for nest in part.nests:
            for x, y in addresses(nest):
                local[x * nbytes : (x + 1) * nbytes] = whole[y * nbytes : (y + 1) * nbytes]
        as_bytes = torch.frombuffer(local, dtype=torch.uint8) if local else torch.empty(0, dtype=torch.uint8)
        held[name] = as_bytes.view(tensor.dtype).view(part.shape)
    return held


def drawn_layouts(rng, shapes, axis):
    """Return layouts of these tensors on one mesh, and the number of its ranks."""
    mesh = shaped_case(rng.randint, (), axis)[0]
    layouts = LayoutMap(mesh)
    for name, shape in shapes.items():
        layout = shaped_case(rng.randint, shape, axis, mesh)[1]
        while not is_held_once(mesh, layout, shape):
            layout = shaped_case(rng.randint, shape, axis, mesh)[1]
        layouts[name] = layout
    return layouts, mesh.size


def facts(tensors):
    return {name: (tensor.dtype, tensor.shape, raw(tensor)) for name, tensor in tensors.items()}


def states_of(folder: Path, world_size: int):
    paths = [folder / f"rank_{rank}_state.pth" for rank in range(world_size)]
    return [facts(torch.load(path, weights_only=True)["weight"]) for path in paths]


@pytest.mark.parametrize("seed", sampled(range(40), 4))
def test_shards_in_files_are_gathered_and_moved_and_moved_back(seed, tmp_path):
    rng = random.Random(seed)
    tensors = {}
    for i in range(rng.randint(1, 4)):
        shape = tuple(rng.choice([6, 8, 5, 7, 12, 2, 3, 1, 0]) for _ in range(rng.randint(min(i, 1), 3)))
        tensors[f"t{i}"] = made_tensor(rng.choice(DTYPES), shape, i)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    (here, world_size), (there, other_size) = (drawn_layouts(rng, shapes, axis) for axis in "ab")
    for rank in range(world_size):
        workspace = NFSWorkspace(tmp_path / "a", rank=rank, world_size=world_size, run_id="run")
        workspace.write_configs_and_weights({}, local_tensors(tensors, here, rank), layouts=here)
    gather_checkpoint(tmp_path / "a", tmp_path / "model")
    assert facts(load_file(tmp_path / "model" / "model.safetensors")) == facts(tensors)
    reshard_checkpoint(tmp_path / "a", there, tmp_path / "b")
    cut = [facts(local_tensors(tensors, there, rank)) for rank in range(other_size)]
    assert states_of(tmp_path / "b", other_size) == cut
    reshard_checkpoint(tmp_path / "b", here, tmp_path / "c")
    assert states_of(tmp_path / "c", world_size) == states_of(tmp_path / "a", world_size)
