"""Times `get_tensors_parallel` against gloo's own gathers, and prints the README's table.

All run in the same processes in turn, after one uncounted round; a call's time is the first rank's, from the call to
the end of the body. Quote the ratios: absolute times belong to one machine and its noise. With nvidia-modelopt
installed, its function of the same name is timed beside ours.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from xrank.gather.parallel import get_tensors_parallel

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "64 MB": 1 << 26}


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    print("| ranks, size | xrank first | xrank | gloo gather | gather_object | modelopt | ratio to the fastest other |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for world_size in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (world_size, f"{folder}/store", arguments.rounds), nprocs=world_size)


def _rank(rank: int, world_size: int, store: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    peers: dict[str, Callable[[torch.Tensor], object]] = {"gloo gather": _gather, "gather_object": _gather_object}
    with suppress(ImportError):
        from modelopt.torch.export.distribute import get_tensors_parallel as modelopts

        def modelopt(tensor: torch.Tensor) -> None:
            with modelopts(tensor, list(range(world_size))):
                pass

        peers["modelopt"] = modelopt
    for label, nbytes in SIZES.items():
        tensor = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        first = _timed(_xrank, tensor)
        count = rounds if nbytes < 1 << 24 else max(5, rounds // 3)
        times: dict[str, list[float]] = {"xrank": []} | {name: [] for name in peers}
        for number in range(count + 1):
            for name, function in (("xrank", _xrank), *peers.items()):
                seconds = _timed(function, tensor)
                if number:
                    times[name].append(seconds)
        if rank == 0:
            medians = {name: statistics.median(values) for name, values in times.items()}
            ratio = min(medians[name] for name in peers) / medians["xrank"]
            cells = [first, *(medians.get(n) for n in ("xrank", "gloo gather", "gather_object", "modelopt"))]
            shown = " | ".join("-" if cell is None else _time_text(cell) for cell in cells)
            print(f"| {world_size}, {label} | {shown} | {ratio:.1f} |", flush=True)
    dist.destroy_process_group()


def _timed(function: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    dist.barrier()
    started = time.perf_counter()
    function(tensor)
    return time.perf_counter() - started


def _xrank(tensor: torch.Tensor) -> None:
    with get_tensors_parallel(tensor, list(range(dist.get_world_size()))):
        pass


def _gather(tensor: torch.Tensor) -> None:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(tensor, parts)


def _gather_object(tensor: torch.Tensor) -> None:
    dist.gather_object(tensor, [None] * dist.get_world_size() if dist.get_rank() == 0 else None)


def _time_text(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
