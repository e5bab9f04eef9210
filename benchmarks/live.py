"""Times `get_tensors_parallel` beside ModelOpt's function of that name and what torch has, for docs/benchmarks.md.

Each case has processes of its own. There each function is called once (the first call, in which ours meets, and both
make their memory), then all in turn, round after round; a round is some calls in a row, as in a merge, and a time the
first rank's for one of them. The floor is one copy of what every other rank sends, into memory of its own that is warm,
all at once: the slowest of them. Memory is how far the first rank's resident set grew in the first call, as a multiple
of what the others sent. Of the many small tensors ours gathers a dict; others gather each by itself, of which a few
are timed. Quote the ratios: absolute times belong to one machine and its noise. ModelOpt is there in the environment of
`make oracle`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from xrank.workspace.parallel import get_tensors_parallel

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "64 MB": 1 << 26, "512 MB": 1 << 29}
MANY = "10,000 x 1 KB"
NUM_MANY = 10_000
NAMES = ("xrank", "ModelOpt", "gloo gather", "gather_object", "mp queue", "floor")
HEADS = ("ranks, size", "xrank first, steady", "ModelOpt first, steady", "gloo", "object", "queue",
         "ModelOpt / xrank", "copy / xrank")  # fmt: skip
"""The columns of the docs' table; ratios of minima and memory follow it."""
_MAX_NBYTES = 2 << 30
"""Of all ranks' tensors together: ModelOpt's first rank takes two of each."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row: `count` tensors of `nbytes` from each of `world_size` ranks."""

    world_size: int
    size: str

    @property
    def nbytes(self) -> int:
        """Bytes of one tensor."""
        return SIZES.get(self.size, 1 << 10)

    @property
    def count(self) -> int:
        """How many tensors a rank has."""
        return NUM_MANY if self.size == MANY else 1

    @property
    def num_calls(self) -> int:
        """Calls of a round: the ranks leave the barrier before it up to half a millisecond apart."""
        return 30 if self.nbytes <= 1 << 20 else 3 if self.nbytes <= 1 << 26 else 1


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--sizes", nargs="*", choices=[*SIZES, MANY], default=[*SIZES, MANY])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without", nargs="*", choices=NAMES[1:], default=[], help="what not to time")
    arguments = parser.parse_args()
    print(f"| {' | '.join(HEADS)} |")
    print("| --- " * len(HEADS) + "|", flush=True)
    rows: list[list[str]] = []
    for world_size in arguments.ranks:
        for case in (Case(world_size, size) for size in arguments.sizes):
            if case.nbytes * world_size > _MAX_NBYTES or (case.size == MANY and world_size > 2):
                continue
            with tempfile.TemporaryDirectory() as folder:
                queue = mp.get_context("spawn").SimpleQueue()
                options = (case, f"{folder}/store", arguments.rounds, arguments.without, queue)
                mp.spawn(_rank, options, nprocs=world_size)
                rows.append(Path(f"{folder}/row").read_text().split("\n"))
                print(rows[-1][0], flush=True)
    for notes in zip(*(row[1:] for row in rows), strict=True):
        print("\n- " + "; ".join(filter(None, notes)))


def _rank(rank: int, case: Case, store: str, rounds: int, without: list[str], queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.world_size)
    functions = {name: f for name, f in _functions(case, queue).items() if name not in without}
    first, growth = {}, {}
    for name, function in functions.items():
        growth[name], first[name] = _first_call(function)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds if case.num_calls > 1 else -(-rounds // 3)):
        for name, function in functions.items():
            # A dict is one call, however many it holds.
            calls = 1 if case.count > 1 and name in ("xrank", "floor") else case.num_calls
            times[name].append(_timed(function, calls))
    floors: list[Any] = [None] * case.world_size
    dist.all_gather_object(floors, statistics.median(times.get("floor", [0.0])))
    if rank == 0:
        Path(store).with_name("row").write_text("\n".join(_row(case, first, times, max(floors[1:]), growth)))
    dist.barrier()
    dist.destroy_process_group()


def _functions(case: Case, queue: Any) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name: each gathers this rank's tensors, or one of many."""
    rank, ranks = dist.get_rank(), list(range(case.world_size))
    tensor = torch.randint(0, 255, (case.nbytes,), dtype=torch.uint8)
    mine: Any = tensor if case.count == 1 else {f"layers.{i}.weight": tensor.clone() for i in range(case.count)}
    warm = torch.ones(case.nbytes * case.count, dtype=torch.uint8)
    whole = tensor.repeat(case.count)

    def xrank() -> None:
        with get_tensors_parallel(mine, ranks):
            pass

    functions: dict[str, Callable[[], object]] = {"xrank": xrank}
    with suppress(ImportError):
        from modelopt.torch.export.distribute import get_tensors_parallel as modelopts

        def modelopt() -> None:
            with modelopts(tensor, ranks):
                pass

        functions["ModelOpt"] = modelopt

    def gather() -> None:
        dist.gather(tensor, [torch.empty_like(tensor) for _ in ranks] if rank == 0 else None)

    def gather_object() -> None:
        dist.gather_object(tensor, [None] * case.world_size if rank == 0 else None)

    def pass_on() -> None:
        if rank == 0:
            for _ in ranks[1:]:
                queue.get()
        else:
            queue.put(tensor.clone())  # what was sent once lies in shared memory, and would cost nothing any more

    def copy() -> None:
        if rank:
            warm.copy_(whole)

    return functions | {"gloo gather": gather, "gather_object": gather_object, "mp queue": pass_on, "floor": copy}


def _row(
    case: Case, first: dict[str, float], times: dict[str, list[float]], floor: float, growth: dict[str, int]
) -> list[str]:
    """Return a case's row, its ratio of minima, and its memory; times of one tensor count as often as its tensors."""
    factor = {name: 1 if name in ("xrank", "floor") else case.count for name in times}
    medians = {name: statistics.median(values) * factor[name] for name, values in times.items()}
    minima = {name: min(values) * factor[name] for name, values in times.items()}
    title = f"{case.world_size}, {case.size}"
    cells = [title]
    for name in NAMES[:2]:
        known = [medians] if case.count > 1 and name != "xrank" else [first, medians]
        cells.append(", ".join(_time_text(figures.get(name)) for figures in known))
    cells += [_time_text(medians.get(name)) for name in NAMES[2:5]]
    ratios = [figures["ModelOpt"] / figures["xrank"] for figures in (first, medians, minima) if "ModelOpt" in figures]
    cells.append(", ".join(f"{ratio:.1f}" for ratio in ratios[1 if case.count > 1 else 0 : 2]))
    is_large = case.nbytes * case.count * (case.world_size - 1) >= 1 << 26
    cells.append(f"{floor / medians['xrank']:.2f}" if is_large and floor else "")
    sent = case.nbytes * (case.world_size - 1)
    multiples = [f"{name} {growth[name] / sent:.1f}" for name in NAMES[:2] if name in growth]
    return [
        f"| {' | '.join(cells)} |",
        f"{title}: {ratios[2]:.1f} x by minima" if ratios else "",
        f"{title}: memory {', '.join(multiples)} of the sent bytes" if is_large and case.count == 1 else "",
    ]


def _timed(function: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds of one of some calls in a row."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - started) / calls


def _first_call(function: Callable[[], object]) -> tuple[int, float]:
    """Return by how much the peak of this process' memory then is above what it had before, and the seconds."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak begins anew
    before = _status_nbytes("VmRSS")
    seconds = _timed(function)
    return _status_nbytes("VmHWM") - before, seconds


def _status_nbytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _time_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
