"""Times gathers as they grow, `verify` beside `cat`, and two processes beside one, for docs/benchmarks.md.

Every run is a process of its own on tmpfs. Growth is of one dimension at a time, from 8 ranks, 160 tensors and 1 GB.
The seconds of the smallest run are taken off before they are divided: they are mostly the start. One core is a
process that `taskset` keeps on it, since xrank takes a worker for each core that it may use.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

_XRANK = [sys.executable, "-m", "xrank"]
_ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
_GROWTH = {
    "GB": [(8, 160, gb * 10**9) for gb in (1, 2, 4, 8)],
    "1,000 tensors": [(8, number, 10_000_000) for number in (100, 1_000, 10_000)],
    "1,000 shards": [(ranks, 160, 20_000_000) for ranks in (8, 64, 256)],
}
_MAKE = """
import sys, torch
from xrank import NFSWorkspace
from xrank.layout import DeviceMesh, LayoutMap
path, ranks, tensors, nbytes = sys.argv[1], *map(int, sys.argv[2:])
layouts = LayoutMap(DeviceMesh((ranks,), ("dp",)))
layouts[r"layers\\.[0-9]+\\.weight"] = "[d0/~dp, d1]"
columns = max(1, nbytes // (2 * ranks * tensors))
for rank in range(ranks):
    parts = (torch.full((1, columns), rank + i % 7, dtype=torch.bfloat16) for i in range(tensors))
    weights = {f"layers.{i}.weight": part for i, part in enumerate(parts)}
    workspace = NFSWorkspace(path, rank=rank, world_size=ranks, run_id="growth")
    workspace.write_configs_and_weights({"model_type": "made"}, weights, layouts=layouts)
"""


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="/dev/shm", help="on tmpfs, with room for twice the largest model")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="xrank-growth-") as folder:
        _print_growth(folder, given.rounds)
        _print_verify(folder, given.rounds)
        _print_processes(folder, given.rounds)


def _print_growth(folder: str, rounds: int) -> None:
    print("| grown | ranks x tensors, MB | seconds | more a unit | peak memory |\n| --- | --- | --- | --- | --- |")
    for unit, sizes in _GROWTH.items():
        least: tuple[float, float] | None = None
        for ranks, tensors, nbytes in sizes:
            source, out = _make(folder, ranks, tensors, nbytes), os.path.join(folder, "out")
            peaks: list[int] = []
            seconds = statistics.median(_time_gather(source, out, peaks) for _ in range(rounds))
            units = {"GB": nbytes / 1e9, "1,000 tensors": tensors / 1e3, "1,000 shards": ranks * tensors / 1e3}[unit]
            more = "" if least is None else f"{1e3 * (seconds - least[0]) / (units - least[1]):.0f} ms"
            least = least or (seconds, units)
            row = (unit, f"{ranks:,} x {tensors:,}, {nbytes / 1e6:,.0f}", f"{seconds:.2f}", more)
            print(f"| {' | '.join(row)} | {max(peaks) / 1e6:.0f} MB |", flush=True)
            shutil.rmtree(source)


def _print_verify(folder: str, rounds: int) -> None:
    source, out = _make(folder, 8, 160, 4 * 10**9), os.path.join(folder, "out")
    _run([*_XRANK, "gather", source, "--out", out, "-q"])
    shutil.rmtree(source)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(_time([*_XRANK, "verify", out, "-q"]))
        theirs.append(_time(["sh", "-c", f"cat {out}/*.safetensors > /dev/null"]))
    shutil.rmtree(out)
    print(f"verify of 4 GB: {_spread(ours)}; cat: {_spread(theirs)}; {_ratio(ours, theirs)}", flush=True)


def _print_processes(folder: str, rounds: int) -> None:
    source, out = _make(folder, 8, 160, 4 * 10**9), os.path.join(folder, "out")
    gather = ["gather", source, "--out", out, "-q"]
    pinned = 'exec taskset -c "$LOCAL_RANK" "$0" -m xrank "$@"'
    together = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    one, two = [], []
    for _ in range(rounds):
        one.append(_time(["taskset", "-c", "0", *_XRANK, *gather]))
        shutil.rmtree(out)
        two.append(_time([*together, "sh", "-c", pinned, sys.executable, *gather]))
        shutil.rmtree(out)
    start = _time([*together, "true"])
    print(f"4 GB, one process on one core: {_spread(one)}; torchrun of two: {_spread(two)}, of which torchrun's own "
          f"start {start:.2f}; {_ratio(one, two)}", flush=True)  # fmt: skip


def _make(folder: str, ranks: int, tensors: int, nbytes: int) -> str:
    source = os.path.join(folder, "workspace")
    _run([sys.executable, "-c", _MAKE, source, str(ranks), str(tensors), str(nbytes)])
    return source


def _time_gather(source: str, out: str, peaks: list[int]) -> float:
    started = time.perf_counter()
    done = _run([*_XRANK, "gather", source, "--out", out, "--json"])
    seconds = time.perf_counter() - started
    peaks.append(json.loads(done)["peak_rss_nbytes"])
    shutil.rmtree(out)
    return seconds


def _time(command: Sequence[str]) -> float:
    started = time.perf_counter()
    _run(command)
    return time.perf_counter() - started


def _run(command: Sequence[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, env=_ENVIRON).stdout


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"


def _ratio(a: Sequence[float], b: Sequence[float]) -> str:
    return f"ratio of medians {statistics.median(a) / statistics.median(b):.2f} (of bests {min(a) / min(b):.2f})"


if __name__ == "__main__":
    main()
