"""Times `xrank delta apply` beside reading the base once, and beside a copy of it.

A Llama shape in bf16 is on disk, with one version in which a part of the values has changed by one unit in the last
place. In each round all ways run in turn, each as a command of its own, on one disk, synced; files are in the page
cache. "follow" applies the version to a model that the command itself has made. Quote the ratios.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import xrank

SHAPES = {"q": (2048, 1024), "k": (1024, 1024), "o": (1024, 2048), "gate": (3072, 1024), "down": (1024, 3072)}


def main() -> None:
    """Run all ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=39, help="of 23 MB each, with 311 MB beside them: 39 make 1.2 GB")
    parser.add_argument("--changed", type=float, default=0.02, help="part of the values that the version changes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--encoding", default="xor")
    parser.add_argument("--folder", type=Path, help="on the disk to write to; the system's temporary one if left out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        _measure(Path(folder), arguments)


def _measure(place: Path, arguments: argparse.Namespace) -> None:
    tensors = {"model.embed_tokens.weight": torch.randn(151936, 1024).bfloat16()}
    for layer in range(arguments.layers):
        for name, shape in SHAPES.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape).bfloat16()
    generator = np.random.default_rng(0)
    for name in ("base", "new", "newer"):
        (place / name).mkdir()
        save_file(tensors, place / name / "model.safetensors", {"format": "pt"})
        for tensor in tensors.values():
            bits = tensor.view(torch.int16).view(-1).numpy()
            bits[generator.random(len(bits), np.float32) < arguments.changed] ^= 1
    for number, (old, new) in enumerate((("base", "new"), ("new", "newer")), 1):
        xrank.make_delta(place / old, place / new, place / f"weight_v{number:06d}", encoding=arguments.encoding)
    (place / "deltas").mkdir()
    (place / "weight_v000001").rename(place / "deltas" / "weight_v000001")
    _rename_base(place / "weight_v000002", place / "deltas" / "weight_v000002")
    shutil.rmtree(place / "newer")
    base, deltas, out = (str(place / name) for name in ("base", "deltas", "out"))
    apply = [sys.executable, "-m", "xrank", "delta", "apply", base, deltas, "-o", out, "-q"]
    nothing = [sys.executable, "-m", "xrank", "delta", "inspect", deltas, "-q"]
    ways = {
        "cat base": ["sh", "-c", f"cat {base}/* > /dev/null"],
        "cp -r base": ["cp", "-r", base, str(place / "copy")],
        "start xrank": nothing,
        "apply": [*apply, "--version", "1"],
        "follow": apply,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds + 1):  # the first brings all files into the page cache
        for name, command in ways.items():
            subprocess.run(["sync", "-f", str(place)], check=True)
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if name == "cp -r base":
                subprocess.run(["sync", "-f", str(place)], check=True)
            if number:
                times[name].append(time.perf_counter() - started)
        for name in ("copy", "out"):
            shutil.rmtree(place / name)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{nbytes / 1e9:.2f} GB")
    print("| way | median | of cat | of cp |\n" + "| --- " * 4 + "|")
    middle = {name: statistics.median(own) for name, own in times.items()}
    for name, seconds in middle.items():
        print(
            f"| {name} | {seconds:.2f} s | {seconds / middle['cat base']:.1f} | {seconds / middle['cp -r base']:.2f} |"
        )


def _rename_base(version: Path, to: Path) -> None:
    """Move a version that is based on version 1; its writer has named version 0, as of any folder."""
    index = version / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"base_version": "000000"', '"base_version": "000001"'))
    version.rename(to)


if __name__ == "__main__":
    main()
