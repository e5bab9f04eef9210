"""Times gathers as they grow, beside torch's own way and `cat`, for docs/benchmarks.md; draws the growth as an SVG.

Every run is a process of its own on tmpfs. `peers` are many small tensors beside `torch.load` of the same files,
`torch.cat` and `save_file` in one process, all in turn, in shuffled rounds. `tensors`, `pieces` and `ranks` grow one
number at a time: a straight line is fitted to the processor time, since other work on the machine changes that least.
`bytes`, `verify` and `processes` are of gigabytes. One core is a process that `taskset` keeps on it, since xrank takes
a worker for each core that it may use. The states of 64 x 10,000 take 2.7 GB, for their alignment.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_XRANK = [sys.executable, "-m", "xrank"]
_ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

_Size = tuple[int, int, int]
"""Ranks, tensors and bytes of a model whose tensors are cut by rows over all ranks."""
_BYTES: list[_Size] = [(8, 160, gb * 10**9) for gb in (1, 2, 4, 8)]
_PEERS: list[_Size] = [(8, 10_000, 10_000_000), (64, 10_000, 10_000_000), (256, 160, 20_000_000)]


@dataclass(frozen=True)
class Growth:
    """A number that grows, with the others as they are.

    Args:
        one: one unit of it.
        label: of the axis.
        sizes: of the models.
        count: of a model's units.
    """

    one: str
    label: str
    sizes: Sequence[_Size]
    count: Callable[[_Size], int]


_GROWTH = {
    "tensors": Growth(
        "tensor of 8 pieces",
        "tensors, on 8 ranks (10 MB)",
        [(8, count, 10_000_000) for count in (500, 2_500, 5_000, 7_500, 10_000)],
        lambda size: size[1],
    ),
    "pieces": Growth(
        "piece",
        "pieces of 1,000 tensors (10 MB)",
        [(ranks, 1_000, 10_000_000) for ranks in (8, 24, 40, 56, 72)],
        lambda size: size[0] * size[1],
    ),
    "ranks": Growth(
        "rank with 10 pieces",
        "ranks, of 10 tensors (10 MB)",
        [(ranks, 10, 10_000_000) for ranks in (8, 64, 128, 192, 256)],
        lambda size: size[0],
    ),
}
_PARTS = ("peers", *_GROWTH, "bytes", "verify", "processes")

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
_TORCH = """
import os, sys, torch
from safetensors.torch import save_file
source, out, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
states = [torch.load(f"{source}/rank_{rank}_state.pth")["weight"] for rank in range(ranks)]
os.mkdir(out)
save_file({name: torch.cat([state[name] for state in states]) for name in states[0]}, f"{out}/model.safetensors")
"""
_COMPARE = """
import sys, torch
from safetensors.torch import load_file
one, other = (load_file(f"{path}/model.safetensors") for path in sys.argv[1:])
assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
"""


@dataclass(frozen=True)
class Run:
    """Wall time and processor time of a process in seconds, and its peak memory in MB."""

    seconds: float
    processor: float
    megabytes: float


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)}; all if none is named")
    parser.add_argument("--folder", default="/dev/shm", help="on tmpfs, with room for twice the largest model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peers", nargs="+", default=[f"{size[0]}x{size[1]}" for size in _PEERS], metavar="RANKSxTENSORS"
    )
    parser.add_argument("--picture", help="SVG to write of tensors, pieces and ranks")
    given = parser.parse_args()
    unknown = [part for part in given.parts if part not in _PARTS]
    if unknown:
        parser.error(f"no part is called {unknown[0]}")
    parts = given.parts or _PARTS
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="xrank-growth-") as folder:
        if "peers" in parts:
            _print_peers(folder, given.rounds, [size for size in _PEERS if f"{size[0]}x{size[1]}" in given.peers])
        grown = [growth for name, growth in _GROWTH.items() if name in parts]
        timed = [_time_sizes(folder, given.rounds, growth.sizes) for growth in grown]
        if "bytes" in parts:
            _print_bytes(folder, given.rounds)
        if "verify" in parts:
            _print_verify(folder, given.rounds)
        if "processes" in parts:
            _print_processes(folder, given.rounds)
        lines = [_print_line(growth, runs) for growth, runs in zip(grown, timed, strict=True)]
    if given.picture and lines:
        with open(given.picture, "w", encoding="utf-8") as file:
            file.write(_draw(lines))


# ---- beside torch's own way


def _print_peers(folder: str, rounds: int, sizes: Sequence[_Size]) -> None:
    print(
        "| ranks x tensors | xrank | torch | ratio (of processor time) | peak memory: xrank, torch |\n"
        + "| --- " * 5
        + "|"
    )
    sources = {size: _make(folder, size) for size in sizes}
    runs: dict[tuple[_Size, str], list[Run]] = {(size, tool): [] for size in sizes for tool in ("xrank", "torch")}
    outs = {turn: os.path.join(folder, f"out-{turn[0]}-{turn[1]}") for turn in runs}
    for _ in range(rounds):
        for turn in random.sample([*runs], len(runs)):
            (size, tool), out = turn, outs[turn]
            shutil.rmtree(out, ignore_errors=True)
            torch = [sys.executable, "-W", "ignore", "-c", _TORCH, sources[size], out, str(size[0])]
            runs[turn].append(_run(torch if tool == "torch" else [*_XRANK, "gather", sources[size], "-o", out, "-q"]))
    for size in sizes:
        ours, theirs = runs[size, "xrank"], runs[size, "torch"]
        _run([sys.executable, "-c", _COMPARE, outs[size, "xrank"], outs[size, "torch"]])
        ratio, of_processors = (_median(ours, by) / _median(theirs, by) for by in ("seconds", "processor"))
        peaks = ", ".join(f"{max(run.megabytes for run in each):,.0f} MB" for each in (ours, theirs))
        row = (
            f"{size[0]:,} x {size[1]:,}",
            _spread(ours),
            _spread(theirs),
            f"{ratio:.2f} ({of_processors:.2f})",
            peaks,
        )
        print(f"| {' | '.join(row)} |", flush=True)
        shutil.rmtree(sources[size])


# ---- as one number grows


@dataclass(frozen=True)
class Line:
    """Processor seconds by a number of units, and the line through them."""

    growth: Growth
    counts: Sequence[int]
    seconds: Sequence[float]
    slope: float
    start: float

    @property
    def words(self) -> str:
        """The slope in words."""
        return f"{_in_words(self.slope)} for each {self.growth.one}"


def _time_sizes(folder: str, rounds: int, sizes: Sequence[_Size]) -> list[Run]:
    """Return the medians of gathers of these sizes, taken in turn."""
    sources = {size: os.path.join(folder, f"{size[0]}x{size[1]}") for size in sizes}
    for size, source in sources.items():
        os.rename(_make(folder, size), source)
    runs: dict[_Size, list[Run]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in random.sample([*sizes], len(sizes)):
            runs[size].append(_time_gather(sources[size], os.path.join(folder, "out")))
    for source in sources.values():
        shutil.rmtree(source)
    return [
        Run(_median(each, "seconds"), _median(each, "processor"), max(run.megabytes for run in each))
        for each in runs.values()
    ]


def _print_line(growth: Growth, runs: Sequence[Run]) -> Line:
    import numpy as np  # after the runs: the peak memory of a process counts its parent's

    counts, seconds = [growth.count(size) for size in growth.sizes], [run.processor for run in runs]
    slope, start = np.polyfit(counts, seconds, 1)
    memory = np.polyfit(counts, [run.megabytes for run in runs], 1)[0]
    off = max(abs(start + slope * count - each) / each for count, each in zip(counts, seconds, strict=True))
    line = Line(growth, counts, seconds, float(slope), float(start))
    print(f"\n{growth.label}: {line.words}, {1e3 * memory:.2f} KB, after {start:.2f} s; at most {100 * off:.0f} % off")
    print("| count | seconds | of processors | peak memory |\n| --- | --- | --- | --- |")
    for count, run in zip(counts, runs, strict=True):
        print(f"| {count:,} | {run.seconds:.2f} | {run.processor:.2f} | {run.megabytes:,.0f} MB |", flush=True)
    return line


def _in_words(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


_STYLE = """text{font:12px system-ui,sans-serif;fill:#57606a}.title{font-weight:600;fill:#24292f}
.axis{stroke:#8c959f}.grid{stroke:#8c959f;stroke-opacity:.25}.line{stroke:#0072b2;stroke-width:2}.point{fill:#d55e00}
@media (prefers-color-scheme:dark){text{fill:#9198a1}.title{fill:#e6edf3}.line{stroke:#56b4e9}.point{fill:#e69f00}}"""
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 290, 260, 44, 44, 46
"""Sizes of a panel, and of the margins around its axes, in pixels."""


def _draw(lines: Sequence[Line]) -> str:
    """Return an SVG with a panel for each line, whose colors follow the reader's light or dark theme."""
    panels = "".join(f'<g transform="translate({_WIDTH * k},0)">{_panel(line)}</g>\n' for k, line in enumerate(lines))
    what = "; ".join(f"{line.growth.label}: {line.words}" for line in lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH * len(lines)} {_HEIGHT}" role="img">\n'
        f"<title>Processor time of whole gathers. {escape(what)}</title>\n<style>{_STYLE}</style>\n{panels}</svg>\n"
    )


def _panel(line: Line) -> str:
    most_x, step_x = _round_up(max(line.counts))
    most_y, step_y = _round_up(max(line.seconds))

    def x(count: float) -> str:
        return f"{_LEFT + count / most_x * (_WIDTH - _LEFT - 20):.1f}"

    def y(seconds: float) -> str:
        return f"{_HEIGHT - _BOTTOM - seconds / most_y * (_HEIGHT - _BOTTOM - _TOP):.1f}"

    ground, right = y(0), x(most_x)
    parts = [f'<text class="title" x="{_LEFT}" y="16">{escape(line.words)}</text>']
    parts += [f'<text x="{_LEFT}" y="34">processor time, s</text>']
    for k in range(1, round(most_y / step_y) + 1):
        parts += [f'<line class="grid" x1="{x(0)}" y1="{y(k * step_y)}" x2="{right}" y2="{y(k * step_y)}"/>']
        parts += [f'<text x="{_LEFT - 6}" y="{y(k * step_y)}" dy="4" text-anchor="end">{k * step_y:g}</text>']
    for k in range(round(most_x / step_x) + 1):
        place = f'x="{x(k * step_x)}" y="{_HEIGHT - _BOTTOM + 17}"'
        parts += [f'<text {place} text-anchor="middle">{k * step_x:,.0f}</text>']
    middle = (_LEFT + _WIDTH - 20) / 2
    parts += [f'<text x="{middle:g}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(line.growth.label)}</text>']
    parts += [f'<path class="axis" fill="none" d="M{x(0)} {y(most_y)}V{ground}H{right}"/>']
    last = max(line.counts)
    ends = f'x1="{x(0)}" y1="{y(line.start)}" x2="{x(last)}" y2="{y(line.start + line.slope * last)}"'
    parts += [f'<line class="line" {ends}/>']
    places = zip(line.counts, line.seconds, strict=True)
    parts += [f'<circle class="point" cx="{x(count)}" cy="{y(seconds)}" r="4"/>' for count, seconds in places]
    return "".join(parts)


def _round_up(most: float) -> tuple[float, float]:
    """Return the end of an axis up to `most`, and the step of its labels: 1, 2 or 5 times a power of ten."""
    step = next(step for power in range(-3, 9) for step in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)
                if 4 * step >= most)  # fmt: skip
    return step * -(-most // step), step


# ---- of gigabytes


def _print_bytes(folder: str, rounds: int) -> None:
    print("\n| ranks x tensors, GB | seconds | more a GB | peak memory |\n| --- | --- | --- | --- |")
    least: Run | None = None
    for size in _BYTES:
        (run,) = _time_sizes(folder, rounds, [size])
        gigabytes = size[2] / 1e9
        more = "" if least is None else f"{(run.seconds - least.seconds) / (gigabytes - 1):.2f} s"
        least = least or run
        row = (f"{size[0]} x {size[1]}, {gigabytes:g}", f"{run.seconds:.2f}", more, f"{run.megabytes:.0f} MB")
        print(f"| {' | '.join(row)} |", flush=True)


def _print_verify(folder: str, rounds: int) -> None:
    source, out = _make(folder, _BYTES[2]), os.path.join(folder, "out")
    _run([*_XRANK, "gather", source, "--out", out, "-q"])
    shutil.rmtree(source)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(_run([*_XRANK, "verify", out, "-q"]))
        theirs.append(_run(["sh", "-c", f"cat {out}/*.safetensors > /dev/null"]))
    shutil.rmtree(out)
    print(f"\nverify of 4 GB: {_spread(ours)}; cat: {_spread(theirs)}; {_ratio(ours, theirs)}", flush=True)


def _print_processes(folder: str, rounds: int) -> None:
    source, out = _make(folder, _BYTES[2]), os.path.join(folder, "out")
    gather = ["gather", source, "--out", out, "-q"]
    pinned = 'exec taskset -c "$LOCAL_RANK" "$0" -m xrank "$@"'
    together = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    one, two = [], []
    for _ in range(rounds):
        one.append(_run(["taskset", "-c", "0", *_XRANK, *gather]))
        shutil.rmtree(out)
        two.append(_run([*together, "sh", "-c", pinned, sys.executable, *gather]))
        shutil.rmtree(out)
    shutil.rmtree(source)
    start = _run([*together, "true"]).seconds
    print(f"\n4 GB, one process on one core: {_spread(one)}; torchrun of two: {_spread(two)}, of which torchrun's own "
          f"start {start:.2f}; {_ratio(one, two)}", flush=True)  # fmt: skip


# ---- processes


def _make(folder: str, size: _Size) -> str:
    source = os.path.join(folder, "workspace-" + "-".join(map(str, size)))
    _run([sys.executable, "-c", _MAKE, source, *map(str, size)])
    return source


def _time_gather(source: str, out: str) -> Run:
    run = _run([*_XRANK, "gather", source, "--out", out, "-q"])
    shutil.rmtree(out)
    return run


def _run(command: Sequence[str]) -> Run:
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=_ENVIRON)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"status {status} of {' '.join(command)[:500]}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)


def _median(runs: Sequence[Run], by: str = "seconds") -> float:
    return statistics.median(getattr(run, by) for run in runs)


def _spread(runs: Sequence[Run]) -> str:
    return f"{_median(runs):.2f} s ({min(run.seconds for run in runs):.2f}-{max(run.seconds for run in runs):.2f})"


def _ratio(a: Sequence[Run], b: Sequence[Run]) -> str:
    bests = min(run.seconds for run in a) / min(run.seconds for run in b)
    return f"ratio of medians {_median(a) / _median(b):.2f} (of bests {bests:.2f})"


if __name__ == "__main__":
    main()
