"""Feeds a model from the ranks that train it to an engine in another process; no rank ever holds more than its part.

FSDP2 cuts every parameter over the ranks. `iter_model` gives rank 0 one whole tensor after another, and rank 0 passes
them on to an engine, which loads each as it comes, as the `load_weights` of inference engines do. The ranks go on
training meanwhile only when all have left the loop.

    python examples/feed_engine.py
    torchrun --nproc-per-node 2 examples/feed_engine.py
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable
from multiprocessing import Queue

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from xrank import iter_model

MAX_IN_FLIGHT = 4  # tensors on their way to the engine
BATCH = torch.linspace(-1, 1, 3 * 7 * 64).view(3, 7, 64)


def new_model() -> nn.Module:
    """Return a small transformer, the same on every rank; a seed stands for what training made of it."""
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=176, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=3)


def load_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy weights into a model as they come, and return their names."""
    places, loaded = model.state_dict(), set()
    for name, weight in weights:
        places[name].copy_(weight)
        loaded.add(name)
    return loaded


def run_engine(weights: Queue, answers: Queue) -> None:
    """Be an engine: take a model, and answer."""
    model = new_model().eval()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    loaded = load_weights(model, iter(weights.get, None))
    with torch.no_grad():
        answers.put((len(loaded), model(BATCH).numpy()))


def run_rank(rank: int, num_ranks: int, rendezvous: str) -> None:
    """Do what one rank does."""
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    whole = new_model().eval()
    model = new_model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    if rank == 0:
        start = torch.multiprocessing.get_context("spawn")
        weights, answers = start.Queue(MAX_IN_FLIGHT), start.Queue()
        engine = start.Process(target=run_engine, args=(weights, answers), daemon=True)
        engine.start()
    # A `with`, so that all ranks hear of it if the engine cannot be fed.
    with iter_model(model, max_memory="4MB") as tensors:
        for name, tensor in tensors:  # on the other ranks there are none
            weights.put((name, tensor), timeout=60)
    if rank == 0:
        weights.put(None)
        count, answer = answers.get(timeout=60)
        with torch.no_grad():
            wanted = whole(BATCH)
        verdict = "as" if torch.equal(torch.from_numpy(answer), wanted) else "otherwise than"
        print(f"fed  {count} tensors of {num_ranks} ranks to an engine, which answers {verdict} the whole model does")
        engine.join()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and wait for them; or be one of them, where torchrun has started them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=3, help="how many to start (default: 3); torchrun says its own")
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
        return
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # saves gloo looking up the name of this host
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, f"file://{folder}/rendezvous")
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
