"""Times a signed gather against an unsigned one, and against one that ``model_signing sign`` follows; interleaved.

Needs ``xrank[sign]`` and the command of the package model-signing 1.1. Every run is a process of its own.
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
from collections.abc import Callable

_HERE = os.path.dirname(os.path.abspath(__file__))
_XRANK = [sys.executable, "-m", "xrank"]


def main() -> None:
    """Run all rounds and print a row of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    parser.add_argument("--nbytes", type=int, default=2_000_000_000, help="size of the model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model-signing", default="model_signing", help="the command")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="xrank-benchmark-") as folder:
        times = _measure(folder, arguments.nbytes, arguments.rounds, arguments.model_signing)
    plain, signed, after = (statistics.median(times[side]) for side in ("plain", "signed", "after"))
    best = {side: min(found) for side, found in times.items()}
    print("| gather, s | signed, s | model_signing after it, s | to unsigned (of bests) | to model_signing |")
    print("| --- | --- | --- | --- | --- |")
    print(
        f"| {plain:.2f} | {signed:.2f} | {after:.2f} | {signed / plain:.2f} ({best['signed'] / best['plain']:.2f}) "
        f"| {signed / after:.2f} ({best['signed'] / best['after']:.2f}) |"
    )


def _measure(folder: str, nbytes: int, rounds: int, model_signing: str) -> dict[str, list[float]]:
    source, out, key = (os.path.join(folder, name) for name in ("workspace", "out", "key.pem"))
    _run([sys.executable, os.path.join(_HERE, "made_workspace.py"), source, "rows", str(nbytes)])
    subprocess.run(
        ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key], check=True, capture_output=True
    )
    gather = [*_XRANK, "gather", source, "--out", out, "--quiet"]
    sign = [model_signing, "sign", "key", out, "--signature", f"{out}.sig", "--private_key", key]
    sides: dict[str, Callable[[], None]] = {
        "plain": lambda: _run(gather),
        "signed": lambda: _run([*gather, "--sign", key]),
        "after": lambda: (_run(gather), _run(sign))[0],
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in random.sample([*sides], len(sides)):
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            started = time.monotonic()
            sides[side]()
            times[side].append(time.monotonic() - started)
    return times


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
