"""Trains a small model with Keras' distribution API on torch, and compares it with the same model in one process.

The lines of `distribute` are those of Keras' documentation (keras.distribution.ModelParallel). Only the rules differ:
they name torch's parameters, whose dims are (out, in).

    python examples/model_parallel.py
    python examples/model_parallel.py --ranks 4 --shape 1 4
    torchrun --nproc-per-node 8 examples/model_parallel.py
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from xrank.distribution import (
    DeviceMesh,
    LayoutMap,
    ModelParallel,
    initialize,
    list_devices,
    set_distribution,
)

STEPS, BATCH = 3, 16


class Model(nn.Module):
    """A block of two dense layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.dense_1, self.dense_2 = nn.Linear(32, 128), nn.Linear(128, 32)
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, length, words]."""
        x = self.embed(tokens)
        return self.head(x + self.dense_2(nn.functional.gelu(self.dense_1(self.norm(x)))))


def distribute(shape: tuple[int, ...]) -> ModelParallel:
    """Return the distribution, in Keras' lines."""
    devices = list_devices()
    device_mesh = DeviceMesh(shape=shape, axis_names=("batch", "model"), devices=devices)
    layout_map = LayoutMap(device_mesh)
    layout_map["dense_1.weight"] = ("model", None)
    layout_map["dense_1.bias"] = ("model",)
    layout_map["dense_2.weight"] = (None, "model")
    layout_map["(embed|head).weight"] = ("model", None)
    distribution = ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    set_distribution(distribution)
    return distribution


def train(model: nn.Module, data: DataLoader) -> torch.Tensor:
    """Take some steps and return the mean loss of each; torch's usual loop, without a word about ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for tokens, targets in data:
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def run_rank(shape: tuple[int, ...]) -> None:
    """Do what one rank does, once the process group has started."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (STEPS * BATCH, 9), generator=random)
    data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=BATCH)

    torch.manual_seed(1)
    whole = Model()
    whole_losses = train(whole, data)

    distribution = distribute(shape)
    torch.manual_seed(1)
    model = Model()
    losses = train(model, distribution.distribute_dataset(data))
    set_distribution(None)

    dist.all_reduce(losses)  # each rank's loss is that of its own part of the batch
    losses /= dist.get_world_size()
    torch.testing.assert_close(losses, whole_losses)
    furthest = max(
        (parameter.full_tensor() - other).abs().max().item()
        for parameter, other in zip(model.parameters(), whole.parameters(), strict=True)
    )
    if furthest > 1e-4:
        raise SystemExit(f"the models differ by {furthest:g}")
    if dist.get_rank() == 0:
        for name, parameter in model.named_parameters():
            local = tuple(parameter.to_local().shape)
            print(f"{name:15} {tuple(parameter.shape)!s:10} on each rank {local!s:10} {parameter.placements}")
        print(f"losses  {', '.join(f'{loss:.4f}' for loss in losses)}: those of one process")
        print(f"after {STEPS} steps no parameter differs from one process' by more than 1e-4")


def start_rank(rank: int, num_ranks: int, address: str, shape: tuple[int, ...]) -> None:
    """Be one of the ranks that `main` starts."""
    initialize(address, num_ranks, rank)
    run_rank(shape)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and wait for them; or be one of them, where torchrun has started them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="default: 4; torchrun says its own")
    parser.add_argument("--shape", type=int, nargs=2, help="the mesh, batch x model (default: 2 and the rest)")
    options = parser.parse_args()
    is_launched = dist.is_torchelastic_launched()
    num_ranks = int(os.environ["WORLD_SIZE"]) if is_launched else options.ranks
    shape = tuple(options.shape or (2, num_ranks // 2))
    if prod(shape) != num_ranks:
        parser.error(f"a mesh of {shape[0]} x {shape[1]} has not {num_ranks} ranks")
    torch.set_num_threads(1)
    if is_launched:
        initialize()
        run_rank(shape)
        dist.destroy_process_group()
        return
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # saves gloo looking up the name of this host
    with socket.create_server(("localhost", 0)) as free:
        address = f"localhost:{free.getsockname()[1]}"
    torch.multiprocessing.spawn(start_rank, (num_ranks, address, shape), nprocs=num_ranks)


if __name__ == "__main__":
    main()
