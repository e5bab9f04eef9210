"""Times reshards of a training state against ``cp`` of its bytes and DeepSpeed's ``ds_to_universal``; interleaved.

Needs DeepSpeed (`make oracle` makes an environment with it). A real engine of ZeRO trains one step on ranks of gloo and
saves. Every run is a process of its own.

    .venv-oracle/bin/python benchmarks/reshard_state.py --folder /mnt/disk --nbytes 4000000000
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

_XRANK = [sys.executable, "-m", "xrank", "reshard"]
_WIDTH = 2048
_BYTES_A_PARAMETER = 12
"""A master and two moments in fp32; the bf16 copy of stages 1 and 2 is not converted."""


def main() -> None:
    """Run all rounds and print the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    parser.add_argument("--nbytes", type=int, default=2_000_000_000, help="bytes of masters and moments")
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    num_layers = max(1, arguments.nbytes // (_BYTES_A_PARAMETER * _WIDTH * _WIDTH))
    if arguments.train is not None:
        _train(arguments.train, num_layers, arguments.stage)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="xrank-benchmark-") as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        _run([*launch, str(arguments.ranks), __file__, "--train", folder, *sys.argv[1:]])
        _measure(folder, num_layers * _BYTES_A_PARAMETER * _WIDTH * _WIDTH, arguments.rounds)


def _train(folder: str, num_layers: int, stage: int) -> None:
    """Train one step on the ranks that torchrun started, and save."""
    import deepspeed
    import deepspeed.comm.torch
    import torch

    deepspeed.comm.torch.build_shm_op = lambda: None  # which compiles an operator
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(num_layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, _WIDTH, dtype=torch.bfloat16)).float().square().sum())
    engine.step()
    engine.save_checkpoint(os.path.join(folder, "checkpoint"))
    torch.distributed.barrier()
    os._exit(0)  # DeepSpeed holds its groups


def _measure(folder: str, nbytes: int, rounds: int) -> None:
    source, out, own = (os.path.join(folder, name) for name in ("checkpoint", "out", "own"))
    step = os.path.join(source, "global_step1")
    copied = [os.path.join(step, name) for name in os.listdir(step) if name.endswith("optim_states.pt")]
    converter = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    sides: dict[str, list[str]] = {
        "cp of the optimizer's files": ["cp", *copied, out],
        "reshard --to deepspeed-universal": [*_XRANK, source, "--to", "deepspeed-universal", "-o", own, "--json"],
        "reshard --to dcp": [*_XRANK, source, "--to", "dcp", "--optimizer", "AdamW", "-o", own, "--json"],
        "ds_to_universal": [*converter, "--input_folder", step, "--output_folder", os.path.join(own, "step")],
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    memory: dict[str, int] = {}
    for _ in range(rounds):
        for side in random.sample([*sides], len(sides)):
            for place in (out, own):
                shutil.rmtree(place, ignore_errors=True)
            os.mkdir(out)
            os.sync()
            started = time.monotonic()
            printed = _run(sides[side])
            # cp and torch leave their files in the page cache; xrank has synced its files to the disk.
            os.sync()
            times[side].append(time.monotonic() - started)
            if printed.startswith("{"):
                memory[side] = json.loads(printed)["peak_rss_nbytes"]
    base = statistics.median(times["cp of the optimizer's files"])
    print(f"{nbytes:,} bytes of masters and moments, {rounds} rounds")
    print("| what | median, s | best, s | MB/s | speed to cp | peak memory, MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for side, found in times.items():
        median = statistics.median(found)
        peak = f"{memory[side] / 1e6:.0f}" if side in memory else ""
        print(
            f"| {side} | {median:.2f} | {min(found):.2f} | {nbytes / median / 1e6:.0f} | {base / median:.2f} | {peak} |"
        )


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
