"""Small modules in all kinds of cuts, for tests that fill them, and the file that they are filled from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from xrank.commands import load
from xrank.engine.buffers import FileSource

CUTS = ("plain", "rows", "columns and rows", "both", "replicated rows")


class Block(nn.Module):
    """Even and uneven rows over four ranks, columns, vectors, ranks that have nothing, a tie, buffers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)  # 3, 3, 3, 1
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.odd = nn.Linear(8, 5)  # 2, 2, 1, 0
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("rope", torch.ones(4), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.down(self.up(hidden))).sum() + self.odd(hidden).sum()


def weights() -> dict[str, torch.Tensor]:
    """Return what a file holds: each element its own value, the tie under one name."""
    found, first = {}, 1
    for name, tensor in Block().state_dict().items():
        if name != "head.weight":
            found[name] = torch.arange(first, first + tensor.numel()).view(tensor.shape).to(tensor.dtype)
            first += tensor.numel()
    return found


def left(folder: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    """Leave a model folder of these tensors."""
    folder.mkdir()
    save_file(dict(tensors or weights()), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def cut(how: str, *, device: str = "cpu") -> Block:
    """Return a module of zeros, cut over four ranks."""
    with torch.device(device):
        block = Block()
    if how == "rows":
        fully_shard(block, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    if how in ("columns and rows", "both"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if how == "both":
            fully_shard(block, mesh=mesh["dp"])
    if how == "replicated rows":
        fully_shard(block, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard")))
    if device != "meta":
        with torch.no_grad():
            for tensor in (*block.parameters(), *block.buffers()):
                tensor.zero_()
    return block


def assert_loaded(module: nn.Module, expected: Mapping[str, torch.Tensor] | None = None) -> None:
    """Compare a module's whole tensors; every rank calls it."""
    expected = dict(expected or weights())
    expected.setdefault("head.weight", expected["embed.weight"])
    state = module.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert whole.dtype == tensor.dtype and torch.equal(whole, expected[name].to(whole.dtype)), name


def is_zero(module: nn.Module) -> bool:
    """Say whether nothing was written to what this rank holds of a module."""
    tensors = (t.to_local() if isinstance(t, DTensor) else t for t in module.state_dict().values())
    return not any(tensor.any() for tensor in tensors)


@contextmanager
def watched_reads(watch: Callable[[int], None]) -> Iterator[None]:
    """Call `watch` with the bytes of each read of a load in the body, after it; its threads do."""

    class Watched(FileSource):
        def read_into(self, record: int, start: int, into: memoryview) -> None:
            super().read_into(record, start, into)
            watch(len(into))

    with patch.object(load, "open_source", Watched):
        yield
