"""Times whole gathers against ``cp -r`` of the same bytes, interleaved, and prints docs/benchmarks.md's table.

Every run is a process of its own, from the shell's view: start, imports, planning, data, commit. On disk both sides are
durable: xrank syncs what it writes, ``cp -r`` is followed by ``sync -f``; it copies even where it could share blocks.
Rounds are shuffled; outputs are removed outside the clock. Quote the ratios: absolute times belong to one machine and
its noise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

_HERE = os.path.dirname(os.path.abspath(__file__))
_XRANK = [sys.executable, "-m", "xrank"]
_ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Bytecode is kept between runs, as in any installation."""


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="/dev/shm", help="a folder on tmpfs")
    parser.add_argument("--disk", default=".", help="a folder on the disk to measure")
    parser.add_argument("--nbytes", type=int, default=2_000_000_000, help="size of the model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("memory", "disk"), help="only rows of this place, without the small ones")
    arguments = parser.parse_args()
    print(f"{_machine()}, disk {_file_system(arguments.disk)}; {arguments.rounds} rounds")
    print("| case | xrank, s | cp, s | ratio of medians (of bests) | peak memory |\n| --- | --- | --- | --- | --- |")
    places = {"memory": ("tmpfs", arguments.memory), "disk": ("disk", arguments.disk)}
    for place, parent in places.values() if arguments.only is None else [places[arguments.only]]:
        for kind in ("rows", "columns"):
            with tempfile.TemporaryDirectory(dir=parent, prefix="xrank-benchmark-") as folder:
                _against_cp(f"{kind}, {place}", folder, kind, arguments.nbytes, arguments.rounds, place == "disk")
    if arguments.only is not None:
        return
    with tempfile.TemporaryDirectory(dir=arguments.disk, prefix="xrank-benchmark-") as folder:
        larger = 4 * arguments.nbytes
        _against_cp(f"columns, {larger / 1e9:.0f} GB, disk", folder, "columns", larger, min(3, arguments.rounds), True)
        _small_runs(folder, arguments.rounds)


def _against_cp(case: str, folder: str, kind: str, nbytes: int, rounds: int, durable: bool) -> None:
    source, out = os.path.join(folder, "workspace"), os.path.join(folder, "out")
    _make(source, kind, nbytes)
    peaks: list[int] = []

    def gather() -> None:
        done = subprocess.run(
            [*_XRANK, "gather", "--workspace", source, "--out", out, "--json"],
            check=True,
            capture_output=True,
            env=_ENVIRON,
        )
        peaks.append(json.loads(done.stdout)["peak_rss_nbytes"])

    def copy() -> None:
        sync = f" && sync -f {out}" if durable else ""
        subprocess.run(f"cp -r --reflink=never {source} {out}{sync}", shell=True, check=True)

    times = _interleaved([gather, copy], out, rounds)
    ours, theirs = times
    ratio = statistics.median(ours) / statistics.median(theirs)
    best = min(ours) / min(theirs)
    print(
        f"| {case} | {_spread(ours)} | {_spread(theirs)} | {ratio:.2f} ({best:.2f}) | {max(peaks) / 1e6:.0f} MB |",
        flush=True,
    )


def _interleaved(actions: Sequence[Callable[[], None]], out: str, rounds: int) -> list[list[float]]:
    """Return the seconds of each action in every round; one round more, uncounted, comes first."""
    times: list[list[float]] = [[] for _ in actions]
    order = random.Random(0)
    for number in range(rounds + 1):
        for index in order.sample(range(len(actions)), len(actions)):
            os.sync()
            started = time.perf_counter()
            actions[index]()
            seconds = time.perf_counter() - started
            shutil.rmtree(out, ignore_errors=True)
            if number:
                times[index].append(seconds)
    return times


def _small_runs(folder: str, rounds: int) -> None:
    source, out = os.path.join(folder, "small"), os.path.join(folder, "out")
    subprocess.run([sys.executable, os.path.join(_HERE, "made_workspace.py"), source, "small", "0"], check=True)
    gather, show_help = _interleaved(
        [
            lambda: subprocess.run(
                [*_XRANK, "gather", source, "--out", out, "-q"], check=True, capture_output=True, env=_ENVIRON
            ),
            lambda: subprocess.run([*_XRANK, "--help"], check=True, capture_output=True, env=_ENVIRON),
        ],  # type: ignore[list-item]
        out,
        rounds,
    )
    print(f"| 10 MB, from the shell, disk | {_spread(gather)} | | | |")
    print(f"| `xrank --help` | {_spread(show_help)} | | | |")


def _make(path: str, kind: str, nbytes: int) -> None:
    subprocess.run([sys.executable, os.path.join(_HERE, "made_workspace.py"), path, kind, str(nbytes)], check=True)
    os.sync()


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"


def _machine() -> str:
    with open("/proc/cpuinfo", encoding="ascii") as file:
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "?")
    with open("/proc/meminfo", encoding="ascii") as file:
        memory = int(file.readline().split()[1]) / 2**20
    kernel = ".".join(platform.release().split(".")[:2])
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, Linux {kernel}, Python {platform.python_version()}"


def _file_system(path: str) -> str:
    done = subprocess.run(["stat", "-f", "-c", "%T", path], check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
