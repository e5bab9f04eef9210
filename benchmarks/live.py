"""Times `get_tensors_parallel` beside ModelOpt's function of that name and gloo's own gathers: the README's table.

Each case has processes of its own. There each function is called once (the first call, in which ours meets, and both
make their memory), then all in turn, round after round; a round is some calls in a row, as in a merge, and a time the
first rank's for one of them. Memory is how far the first rank's resident set grew in the first call, as a multiple of
what the others sent. Quote the ratios: absolute times belong to one machine and its noise. ModelOpt is there in the
environment of `make oracle`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from xrank.gather.parallel import get_tensors_parallel

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "64 MB": 1 << 26}
NAMES = ("xrank", "ModelOpt", "gloo gather", "gather_object")


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 8])
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    shown = " | ".join(f"{name} first | {name}" for name in NAMES[:2])
    print(f"| ranks, size | {shown} | gloo gather | gather_object | ModelOpt / xrank, first | steady | memory |")
    print("| --- " * 10 + "|")
    for world_size in arguments.ranks:
        for size in arguments.sizes:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(_rank, (world_size, f"{folder}/store", size, arguments.rounds), nprocs=world_size)


def _rank(rank: int, world_size: int, store: str, size: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    functions: dict[str, Callable[[torch.Tensor], object]] = {"xrank": _xrank}
    with suppress(ImportError):
        from modelopt.torch.export.distribute import get_tensors_parallel as modelopts

        def modelopt(tensor: torch.Tensor) -> None:
            with modelopts(tensor, list(range(world_size))):
                pass

        functions["ModelOpt"] = modelopt
    functions |= {"gloo gather": _gather, "gather_object": _gather_object}
    tensor = torch.randint(0, 255, (SIZES[size],), dtype=torch.uint8)
    first, growth = {}, {}
    for name, function in functions.items():
        growth[name], first[name] = _first_call(function, tensor)
    # The ranks leave the barrier before a round up to half a millisecond apart: short calls are many, then.
    calls = 3 if SIZES[size] >= 1 << 24 else 30
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(_timed(function, tensor, calls))
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in times.items()}
        cells = [f"{world_size}, {size}"]
        for name in NAMES[:2]:
            cells += [_time_text(first.get(name)), _time_text(medians.get(name))]
        cells += [_time_text(medians[name]) for name in NAMES[2:]]
        for figures in (first, medians):
            cells.append(f"{figures['ModelOpt'] / figures['xrank']:.1f}" if "ModelOpt" in figures else "-")
        sent = SIZES[size] * (world_size - 1)
        multiples = [f"{growth[name] / sent:.1f}" for name in NAMES[:2] if name in growth]
        cells.append(", ".join(multiples) if sent >= 1 << 26 else "-")
        print(f"| {' | '.join(cells)} |", flush=True)
    dist.destroy_process_group()


def _timed(function: Callable[[torch.Tensor], object], tensor: torch.Tensor, calls: int = 1) -> float:
    """Return the seconds of one of some calls in a row."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        function(tensor)
    return (time.perf_counter() - started) / calls


def _first_call(function: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> tuple[int, float]:
    """Return by how much the peak of this process' memory then is above what it had before, and the seconds."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak begins anew
    before = _status_nbytes("VmRSS")
    seconds = _timed(function, tensor)
    return _status_nbytes("VmHWM") - before, seconds


def _status_nbytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _xrank(tensor: torch.Tensor) -> None:
    with get_tensors_parallel(tensor, list(range(dist.get_world_size()))):
        pass


def _gather(tensor: torch.Tensor) -> None:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(tensor, parts)


def _gather_object(tensor: torch.Tensor) -> None:
    dist.gather_object(tensor, [None] * dist.get_world_size() if dist.get_rank() == 0 else None)


def _time_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
