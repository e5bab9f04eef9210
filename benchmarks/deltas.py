"""Times deltas of a live model beside a whole export, and beside slime's way: gather each tensor, then compare it.

Ranks hold a Llama shape in bf16 as DTensors, cut by FSDP2 x TP. In each round 2 % of the values change by one unit in
the last place, and all ways run in turn on one disk, synced:

- whole: `export_model`;
- delta: `export_model(delta_from=...)`, of the last round's whole export;
- publish: `offer_weights(deltas=...)`, against the copies that the ranks keep of the last step;
- gathered: ``full_tensor()`` of each tensor, which the first rank compares with a copy of the whole last step and
  compresses, in as many threads as there are cores, and writes by safetensors, synced.

Memory is how far a rank's resident set rose in a round above what it was before, the most of all ranks'; the copies of
the last step are there before. CPU is the processor time of all ranks. Quote the ratios: absolute times belong to one
machine and its noise.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.export import make_llama, read_peak, reset_peak

NAMES = ("whole", "delta", "publish", "gathered")


def main() -> None:
    """Run all ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=11, help="of 88 MB each, with 262 MB beside them: 11 make 1.2 GB")
    parser.add_argument("--changed", type=float, default=0.02, help="part of the values that change in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to write to; the system's temporary one if left out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_be_rank, (arguments, folder, queue), arguments.ranks)
        times, cpu, memory, nbytes = queue.get()
    middle = {name: statistics.median(times[name]) for name in NAMES}
    print("| way | median | of whole | CPU | bytes of whole | memory, MB |\n" + "| --- " * 6 + "|")
    for name in NAMES:
        time_ratio, size_ratio = middle[name] / middle["whole"], nbytes[name] / nbytes["whole"]
        own = f"{statistics.median(cpu[name]):.2f} s | {size_ratio:.3f} | {memory[name] / 1e6:,.0f} |"
        print(f"| {name} | {middle[name]:.2f} s | {time_ratio:.2f} | {own}")


def _be_rank(rank: int, arguments: argparse.Namespace, folder: str, queue: Any) -> None:
    import xrank

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=arguments.ranks)
    place, model = Path(folder), make_llama("FSDP2 x TP", arguments.ranks, arguments.layers)
    config = {"config_overrides": {"model_type": "llama"}}
    offer = xrank.offer_weights(model, place / "refit", deltas=place / "published")
    snapshot: dict[str, torch.Tensor] = {}
    xrank.export_model(model, place / "weight_v000000", **config)
    offer.publish(0)
    _save_gathered(model, snapshot, None)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    cpu: dict[str, list[float]] = {name: [] for name in NAMES}
    memory, nbytes = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
    for number in range(1, arguments.rounds + 2):  # the first is to meet, and to make all modules known
        _train(model, number, arguments.changed)
        last, whole = (place / f"weight_v{n:06d}" for n in (number - 1, number))
        outs = {
            "delta": place / "delta" / whole.name,
            "publish": place / "published" / whole.name,
            "gathered": place / "gathered",
            "whole": whole,
        }
        ways: dict[str, Callable[[], object]] = {
            "delta": partial(xrank.export_model, model, outs["delta"], delta_from=last, **config),
            "publish": partial(offer.publish, number),
            "gathered": partial(_save_gathered, model, snapshot, outs["gathered"]),
            "whole": partial(xrank.export_model, model, outs["whole"], **config),
        }
        for name, run in ways.items():
            if rank == 0:
                subprocess.run(["sync", "-f", folder], check=True)
            dist.barrier()
            before = reset_peak()
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            run()
            spent = torch.tensor(time.process_time() - used)
            dist.barrier()
            seconds = time.perf_counter() - started
            dist.all_reduce(spent)
            if number > 1:
                times[name].append(seconds)
                cpu[name].append(float(spent))
            grown = torch.tensor(read_peak() - before)
            dist.all_reduce(grown, dist.ReduceOp.MAX)
            memory[name] = max(memory[name], int(grown) if number > 1 else 0)
            nbytes[name] = sum(path.stat().st_size for path in outs[name].iterdir())
        dist.barrier()
        if rank == 0:
            for old in (last, outs["delta"], outs["gathered"]):
                shutil.rmtree(old)
        dist.barrier()
    offer.close()
    if rank == 0:
        queue.put((times, cpu, memory, nbytes))
    dist.destroy_process_group()


def _train(model: dict[str, torch.Tensor], number: int, part: float) -> None:
    """Change some values by one unit in the last place; replicas alike."""
    for place, tensor in enumerate(model.values()):
        local = tensor.to_local().view(torch.int16).view(-1)  # type: ignore[attr-defined]
        seed = torch.Generator().manual_seed(1000 * number + place)
        at = torch.randint(0, local.numel(), (int(part * local.numel()),), generator=seed)
        local[at] += torch.where(torch.randint(0, 2, at.shape, generator=seed) > 0, 1, -1).short()


def _save_gathered(model: dict[str, torch.Tensor], snapshot: dict[str, torch.Tensor], to: Path | None) -> None:
    import xxhash
    import zstandard
    from safetensors.torch import save_file

    made: dict[str, tuple[torch.Tensor, str]] = {}

    def compare(name: str, whole: torch.Tensor) -> None:
        if name in snapshot:
            new, old = (one.view(torch.uint8).view(-1).numpy() for one in (whole, snapshot[name]))
            changed = np.bitwise_xor(new.view(np.uint16), old.view(np.uint16)).view(np.uint8)
            if changed.any():
                frame = zstandard.ZstdCompressor(level=1).compress(changed.data)
                digest = xxhash.xxh3_128_hexdigest(new.data)
                made[name] = torch.frombuffer(bytearray(frame), dtype=torch.uint8), digest
        snapshot[name] = whole

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        started = []
        for name, tensor in model.items():
            whole = tensor.full_tensor()  # type: ignore[attr-defined]
            if dist.get_rank() == 0:
                started.append(pool.submit(compare, name, whole))
        for one in started:
            one.result()
    if to is not None and dist.get_rank() == 0:
        to.mkdir()
        path = to / "model-00000-of-00001.safetensors"
        save_file(
            {name: body for name, (body, _) in made.items()}, path, {name: text for name, (_, text) in made.items()}
        )
        with open(path, "rb+") as file:
            os.fsync(file.fileno())


if __name__ == "__main__":
    main()
