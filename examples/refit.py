"""A trainer's ranks put each step into an engine of another job, which serves in between.

Two ranks train a model under FSDP2. Two other ranks serve it: each has half of the rows of the fused gate and up, and
half of the columns of down, and a loader as inference engines have. The jobs have no process group in common, only a
directory. After each step the engine's answer is compared with the trainer's.

    python examples/refit.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

import xrank

WIDTH, FFN, STEPS, RANKS = 32, 48, 3, 2
BATCH = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


class Model(nn.Module):
    """The model that is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(WIDTH, FFN, bias=False), nn.Linear(WIDTH, FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the answer."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class EngineRank(nn.Module):
    """One of the ranks that serve the model."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.start, self.half = rank * FFN // RANKS, FFN // RANKS
        self.gate_up = nn.Parameter(torch.zeros(2 * self.half, WIDTH), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(WIDTH, self.half), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy this rank's part of each tensor: xrank finds from this function what to read where."""
        for name, weight in weights:
            if name == "down.weight":
                self.down.data.copy_(weight.narrow(1, self.start, self.half))
            else:
                rows = self.gate_up.data.chunk(2)[name == "up.weight"]
                rows.copy_(weight.narrow(0, self.start, self.half))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the answer, which the ranks sum."""
        gate, up = (x @ self.gate_up.T).chunk(2, -1)
        answer = (nn.functional.silu(gate) * up) @ self.down.T
        dist.all_reduce(answer)
        return answer


def start(rank: int, store: str) -> None:
    """Join the job's own ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)


def train(rank: int, folder: str, wanted: mp.SimpleQueue) -> None:
    """Train, and publish each step."""
    start(rank, f"{folder}/trainer")
    model = fully_shard(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with xrank.offer_weights(model, f"{folder}/refit") as offer:
        offer.wait_for_takers(RANKS)
        for step in range(1, STEPS + 1):
            model(BATCH).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                answer = model(BATCH)
            model.reshard()  # FSDP2 keeps the root's whole parameters after a forward pass without a backward one
            if rank == 0:
                wanted.put(answer.tolist())
            offer.publish(step)  # returns when the engine has the weights
    dist.destroy_process_group()


def serve(rank: int, folder: str, wanted: mp.SimpleQueue) -> None:
    """Take each step, and answer."""
    start(rank, f"{folder}/engine")
    model = EngineRank(rank)
    with xrank.take_weights(model, f"{folder}/refit", loader=model.load_weights) as weights:
        for _ in range(STEPS):
            report = weights.update()
            answer = model(BATCH)
            if rank == 0:
                torch.testing.assert_close(answer, torch.tensor(wanted.get()))
                moved = f"{report.moved_nbytes:,} of {report.nbytes:,} bytes a rank"
                print(f"step {report.step}: the engine answers as the trainer does; {moved} were moved", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Run both jobs."""
    wanted = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [mp.spawn(job, (folder, wanted), nprocs=RANKS, join=False) for job in (train, serve)]
        for job in jobs:
            while not job.join():
                pass


if __name__ == "__main__":
    main()
