"""Times merges of sharded checkpoints against ``cp -r`` and the frameworks' own scripts, for docs/benchmarks.md.

Same bytes, whole processes in shuffled rounds: start, imports, metadata, data. Beside each process's time stands the
time of the function alone, without its imports. Runs in ``make oracle``'s environment, which has the peers. On disk
xrank's own syncs are on and ``cp -r`` is followed by ``sync -f``; the peers do not sync. Quote the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

_HERE = os.path.dirname(os.path.abspath(__file__))
_TIMED = """
import json, sys, time
{imports}
source, out = sys.argv[1:]
started = time.perf_counter()
{call}
seconds = time.perf_counter() - started
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("\\n" + json.dumps({{"seconds": seconds, "peak": peak}}))
"""
_COMMANDS: dict[str, tuple[str, ...]] = {"xrank": (), "xrank to bf16": ("--dtype", "bf16")}
"""What users type; the command itself says how long the function took."""
_TOOLS: dict[str, tuple[str, str]] = {
    "dcp_to_torch_save": (
        "import os\nfrom torch.distributed.checkpoint.format_utils import dcp_to_torch_save",
        'os.makedirs(out); dcp_to_torch_save(source, out + "/model.pt")',
    ),
    "accelerate merge_fsdp_weights": (
        "from accelerate.utils import merge_fsdp_weights",
        "merge_fsdp_weights(source, out)",
    ),
    "torch consolidator, 1 thread": (
        "import os\nfrom torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files",
        "os.makedirs(out); consolidate_safetensors_files(source, out, MAPPING, num_threads=1)",
    ),
    "torch consolidator, 2 threads": (
        "import os\nfrom torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files",
        "os.makedirs(out); consolidate_safetensors_files(source, out, MAPPING, num_threads=2)",
    ),
    "zero_to_fp32": (
        "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert",
        "convert(source, out, safe_serialization=True)",
    ),
    "verl's steps": (
        "import glob, os, re, torch\nimport torch.distributed.tensor\nfrom safetensors.torch import save_file",
        # verl/model_merger/fsdp_model_merger.py: load every rank, cast, concatenate, save; without building a model.
        """
files = sorted(glob.glob(source + "/*.pt"), key=lambda file: int(re.findall("rank_([0-9]+)", file)[0]))
ranks = [torch.load(file, weights_only=False, map_location="cpu") for file in files]
whole = {name: torch.cat([rank[name]._local_tensor.bfloat16() for rank in ranks]) for name in list(ranks[0])}
os.makedirs(out)
save_file(whole, out + "/model.safetensors")
""",
    ),
}
_CASES = {
    "dcp-rows": ("xrank", "dcp_to_torch_save", "accelerate merge_fsdp_weights"),
    "dcp-2d": ("xrank", "dcp_to_torch_save"),
    "hf-shards": ("xrank", "torch consolidator, 1 thread", "torch consolidator, 2 threads"),
    "verl": ("xrank", "verl's steps"),
    "zero3": ("xrank", "xrank to bf16", "zero_to_fp32"),
}


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="/dev/shm", help="where checkpoints and outputs lie")
    parser.add_argument("--nbytes", type=int, default=2_000_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(_CASES), choices=list(_CASES))
    parser.add_argument("--alone", action="store_true", help="xrank and cp, without the peers")
    arguments = parser.parse_args()
    durable = _file_system(arguments.folder) != "tmpfs"
    print("| case | tool | process, s | function, s | x cp | x xrank, process | function | peak memory |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in arguments.cases:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="xrank-benchmark-") as folder:
            tools = tuple(tool for tool in _CASES[case] if "xrank" in tool) if arguments.alone else _CASES[case]
            _run_case(case, tools, folder, arguments.nbytes, arguments.rounds, durable)


def _run_case(case: str, peers: Sequence[str], folder: str, nbytes: int, rounds: int, durable: bool) -> None:
    source, out = os.path.join(folder, "source"), os.path.join(folder, "out")
    made = [sys.executable, os.path.join(_HERE, "made_checkpoints.py"), source, case, str(nbytes)]
    subprocess.run(made, check=True, capture_output=True)
    tools = ("cp -r", *peers)
    processes: dict[str, list[float]] = {tool: [] for tool in tools}
    functions: dict[str, list[float]] = {tool: [] for tool in tools}
    peaks: dict[str, int] = {}
    order = random.Random(0)
    for number in range(rounds + 1):  # the first round warms caches and is not counted
        for tool in order.sample(tools, len(tools)):
            os.sync()
            started = time.perf_counter()
            seconds, peak = _run(tool, source, out, durable)
            spent = time.perf_counter() - started
            shutil.rmtree(out, ignore_errors=True)
            if number:
                processes[tool].append(spent)
                functions[tool].append(seconds or spent)
                peaks[tool] = max(peak, peaks.get(tool, 0))
    ours = tools[1]
    for tool in tools:
        process, function = statistics.median(processes[tool]), statistics.median(functions[tool])
        row = (
            case,
            tool,
            _spread(processes[tool]),
            f"{function:.2f}",
            f"{process / statistics.median(processes['cp -r']):.2f}",
            f"{process / statistics.median(processes[ours]):.1f}",
            f"{function / statistics.median(functions[ours]):.1f}",
            f"{peaks[tool] / 1e6:,.0f} MB" if peaks[tool] else "",
        )
        print(f"| {' | '.join(row)} |", flush=True)


def _run(tool: str, source: str, out: str, durable: bool) -> tuple[float | None, int]:
    if tool == "cp -r":
        sync = f" && sync -f {out}" if durable else ""
        subprocess.run(f"cp -r --reflink=never {source} {out}{sync}", shell=True, check=True)
        return None, 0
    if tool in _COMMANDS:
        command = [sys.executable, "-m", "xrank", "gather", source, "--out", out, "--json", *_COMMANDS[tool]]
        report = json.loads(_output_of(tool, command))
        return report["seconds"], report["peak_rss_nbytes"]
    imports, call = _TOOLS[tool]
    if "MAPPING" in call:
        sys.path.insert(0, _HERE)
        from made_checkpoints import shapes

        names = [name for name, _ in shapes(_source_nbytes(source))]
        call = call.replace("MAPPING", repr({name: 1 + 4 * i // len(names) for i, name in enumerate(names)}))
    script = _TIMED.format(imports=imports, call=call)
    lines = _output_of(tool, [sys.executable, "-W", "ignore", "-c", script, source, out]).strip().splitlines()
    told = json.loads(lines[-1])
    return told["seconds"], told["peak"]


def _output_of(tool: str, command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tool} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _source_nbytes(source: str) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(source))


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"


def _file_system(path: str) -> str:
    done = subprocess.run(["stat", "-f", "-c", "%T", path], check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
