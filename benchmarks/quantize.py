"""Times quantized gathers against a merge with llm-compressor behind it, and a plain one, for docs/benchmarks.md.

The source is a DCP checkpoint of a Llama-like model in bf16, saved by 8 ranks. Whole processes in shuffled rounds:
start, imports, planning, data. Beside wall-clock time stand the time of all processors and the largest peak of memory
of a process. Runs in ``make oracle``'s environment, which has llm-compressor. At last, how long the element conversions
alone take, of bands of 1 MB in memory. Quote the ratios.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_HERE = os.path.dirname(os.path.abspath(__file__))
_ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
_IGNORED = ["re:.*embed_tokens.*", "re:.*norm.*", "lm_head"]
_COMPRESS = """
import sys
from llmcompressor import model_free_ptq
model, out, scheme, *ignore = sys.argv[1:]
model_free_ptq(model, out, scheme=scheme, ignore=ignore, device="cpu")
"""
_TOOLS = ("merge", "merge + model_free_ptq", "xrank --quantize")
_SCHEMES = ("FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16")


@dataclass(frozen=True)
class Cost:
    """Wall time, processor time and peak memory of one process, or of several that ran one after another."""

    seconds: float = 0.0
    processor_seconds: float = 0.0
    peak_nbytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds,
            self.processor_seconds + other.processor_seconds,
            max(self.peak_nbytes, other.peak_nbytes),
        )


def main() -> None:
    """Run every case and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="/dev/shm", help="where the checkpoint and the outputs lie")
    parser.add_argument("--nbytes", type=int, default=2_000_000_000, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schemes", nargs="*", default=list(_SCHEMES), help="llm-compressor's names")
    parser.add_argument("--only", choices=("files", "elements"), help="one of the two tables")
    arguments = parser.parse_args()
    if arguments.only != "elements":
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="xrank-benchmark-") as folder:
            _time_files(folder, arguments.nbytes, arguments.rounds, arguments.schemes)
    if arguments.only != "files":
        _time_elements(arguments.nbytes, arguments.schemes)


def _time_files(folder: str, nbytes: int, rounds: int, schemes: Sequence[str]) -> None:
    source, base = os.path.join(folder, "source"), os.path.join(folder, "base")
    made = [sys.executable, os.path.join(_HERE, "made_checkpoints.py"), source, "dcp-2d", str(nbytes)]
    subprocess.run(made, check=True, capture_output=True, env=_ENVIRON)
    os.mkdir(base)
    # A process that has torch in memory lends its size to the peaks of its children.
    config = f"import json, made_checkpoints; print(json.dumps(made_checkpoints.config({nbytes})))"
    with open(os.path.join(base, "config.json"), "w", encoding="utf-8") as file:
        subprocess.run([sys.executable, "-c", config], check=True, stdout=file, cwd=_HERE)
    runs: dict[tuple[str, str], Callable[[str], Cost]] = {("", _TOOLS[0]): lambda out: _gather(source, base, out)}
    for scheme in schemes:
        if scheme in _SCHEMES[1:]:
            runs[scheme, _TOOLS[1]] = lambda out, scheme=scheme: _compress(source, base, out, scheme)
        runs[scheme, _TOOLS[2]] = lambda out, scheme=scheme: _gather(source, base, out, "--quantize", scheme)
    found: dict[tuple[str, str], list[Cost]] = {case: [] for case in runs}
    order = random.Random(0)
    for number in range(rounds + 1):  # the first round warms caches and is not counted
        for case in order.sample(list(runs), len(runs)):
            os.sync()
            out = os.path.join(folder, "out")
            cost = runs[case](out)
            for path in (out, f"{out}-plain"):
                shutil.rmtree(path, ignore_errors=True)
            if number:
                found[case].append(cost)
    print("| scheme | tool | s | processors, s | peak memory | x plain merge | times faster |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    plain = _median(found["", _TOOLS[0]], "seconds")
    for (scheme, tool), costs in found.items():
        seconds = _median(costs, "seconds")
        peers = found.get((scheme, _TOOLS[1])) if tool == _TOOLS[2] else None
        row = (
            scheme,
            tool,
            f"{seconds:.2f} ({min(each.seconds for each in costs):.2f}-{max(each.seconds for each in costs):.2f})",
            f"{_median(costs, 'processor_seconds'):.2f}",
            f"{max(each.peak_nbytes for each in costs) / 1e6:,.0f} MB",
            f"{seconds / plain:.2f}",
            f"{_median(peers, 'seconds') / seconds:.1f}" if peers else "",
        )
        print(f"| {' | '.join(row)} |", flush=True)


def _median(costs: Sequence[Cost], name: str) -> float:
    return statistics.median(getattr(each, name) for each in costs)


def _gather(source: str, base: str, out: str, *options: str) -> Cost:
    return _run([sys.executable, "-m", "xrank", "gather", source, "--out", out, "--base-model", base, *options])


def _compress(source: str, base: str, out: str, scheme: str) -> Cost:
    merged = _gather(source, base, f"{out}-plain")
    return merged + _run([sys.executable, "-W", "ignore", "-c", _COMPRESS, f"{out}-plain", out, scheme, *_IGNORED])


def _run(command: Sequence[str]) -> Cost:
    """Run a process and return what it took; its output is shown if it fails."""
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output, env=_ENVIRON)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.exit(output.read().decode(errors="replace")[-4000:])
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def _time_elements(nbytes: int, schemes: Sequence[str]) -> None:
    """Print how long the encodings take for a model's bytes, by one thread and by two."""
    import numpy as np

    from xrank.dtypes import numpy_dtype
    from xrank.engine import encodings

    shape = (128, 4096)
    generator = np.random.default_rng(0)
    bands = [generator.standard_normal(shape, np.float32).astype(numpy_dtype("BF16")) for _ in range(16)]
    count = nbytes // bands[0].nbytes
    print("| scheme | 1 thread, s | 2 threads, s | processors of the 2, s | GB/s of bf16 |")
    print("| --- | --- | --- | --- | --- |")
    for scheme in schemes:
        encoding = getattr(encodings, scheme)
        maximum = max(encoding.measure(band) for band in bands) if encoding.is_shared else None

        def encode(number: int) -> None:
            encoding.encode(bands[number % len(bands)], 0, shape, maximum)  # noqa: B023  called before the next scheme

        for number in range(len(bands)):
            encode(number)
        times = []
        for num_threads in (1, 2):
            started, spent = time.perf_counter(), time.process_time()
            with ThreadPoolExecutor(num_threads) as pool:
                for _ in pool.map(encode, range(count)):
                    pass
            times.append((time.perf_counter() - started, time.process_time() - spent))
        (one, _), (two, both) = times
        print(f"| {scheme} | {one:.2f} | {two:.2f} | {both:.2f} | {nbytes / two / 1e9:.2f} |", flush=True)


if __name__ == "__main__":
    main()
