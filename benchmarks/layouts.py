"""Times `xrank layout check` on made models of up to a million shards: a table of docs/benchmarks.md.

Each row is a process of its own, from its start to its end, with its peak of resident memory: it reads a layout file
that tells every tensor's sizes, compiles what each rank holds and proves it. No two tensors have one shape, and no two
ranks hold the same part, so nothing is found in a memo: every tensor is cut by tensor parallelism and again by FSDP. A
third has dims that neither divides, a tenth is fused (qkv, gate and up). The rows of 1,024 ranks differ in the number
of tensors alone and show what a shard costs; with fewer ranks it costs more, as part of the work is per tensor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_PARAMETERS = 1_007_000_000
"""Of a tensor, about: of a thousand, more than 10**12."""

SIZES = ((128, 8, 10), (128, 8, 100), (128, 8, 1000), (16, 8, 1000), (4, 4, 1000))
"""(dp, tp, tensors) of each row."""


def main() -> None:
    """Run every size and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest is shown")
    rounds = parser.parse_args().rounds
    print("| ranks | tensors | parameters | shards | whole process | check alone | a shard | peak memory |")
    print("| --- " * 8 + "|")
    for dp, tp, num_tensors in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "layouts.toml")
            file.write_text(layout_file(dp, tp, num_tensors))
            seconds, inner, peak_nbytes, num_parameters = min(checked(file) for _ in range(rounds))
        num_shards = dp * tp * num_tensors
        print(
            f"| {dp * tp:,} | {num_tensors:,} | {num_parameters / 1e12:.2f} T | {num_shards:,} | {seconds:.2f} s "
            f"| {inner:.2f} s | {inner / num_shards * 1e6:.1f} us | {peak_nbytes / 1e6:.0f} MB |",
            flush=True,
        )


def layout_file(dp: int, tp: int, num_tensors: int) -> str:
    """Return the layout file of a model: a rule for each tensor, which tells its shape."""
    rules = [f'"layers.{i}.weight" = "{layout(i)}"' for i in range(num_tensors)]
    return "\n".join(["[mesh]", f'grid = "dp={dp} tp={tp}"', "", "[tensors]", *rules, ""])


def layout(i: int) -> str:
    """Return the layout of a made tensor, whose shape no other has."""
    is_uneven = i % 3 == 1
    cut, more = ("/~", 3) if is_uneven else ("/", 0)
    other = 16_384 + 8 * i - more
    rows = round(NUM_PARAMETERS / other / 8192) * 8192
    if i % 20 == 0:
        return f"[({rows // 1024 + more}{cut}tp <q: 6 128 | k: 128 | v: 128>)/~dp, {other}]"
    if i % 10 == 0:
        return f"[<gate: {rows // 2 + more}{cut}tp | up: {rows // 2 + more}{cut}tp>/~dp, {other}]"
    if i % 2:
        return f"[{rows + more}{cut}tp{cut}dp, {other}]"
    return f"[{rows + more}{cut}dp, {other}{cut}tp]"


def checked(file: Path) -> tuple[float, float, int, int]:
    """Check a file in a cold process; return its seconds, those of the check, its peak memory and the parameters."""
    command = [sys.executable, "-m", "xrank", "layout", "check", str(file), "--json"]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    seconds = time.perf_counter() - started
    report = json.loads(done.stdout)
    if not report["exit_code"] == done.returncode == 0:
        sys.exit(f"the check failed: {report['error']}")
    # The process's own: wait4 also counts the program that started it.
    return seconds, report["seconds"], report["peak_rss_nbytes"], report["plan"]["num_parameters"]


if __name__ == "__main__":
    main()
