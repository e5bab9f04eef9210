"""Predicts an export of eight ranks from smaller ones, makes it, and prints both: a row of docs/benchmarks.md.

Gloo ranks on this machine hold a Llama cut in three ways: over rows (FSDP), over rows and tensor parallel, and tensor
parallel with replicas. Rates are fitted by least squares to exports of a few layers of each; those of the larger model
are predicted from its layout file alone, then measured. Rounds take turns through all models, and the fastest of each
counts. Rates belong to one machine and one number of ranks on it: what is fitted here says nothing about another.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from xrank.commands.export import export_model
from xrank.engine.holdings import compute_shapes
from xrank.layout import LayoutMap
from xrank.layout.local_part import local_part
from xrank.virtual.simulation.simulation import simulate
from xrank.virtual.simulation.traffic import Sample, fit_rates, predict

GRIDS = {"FSDP": "dp={n} tp=1", "FSDP x TP": "dp={half} tp=2", "TP, replicas": "ddp=2 tp={half}"}


def main() -> None:
    """Measure, fit, predict and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--small", type=int, nargs="*", default=[1, 3, 6], help="layers that rates are fitted to")
    parser.add_argument("--large", type=int, default=24, help="layers of what is predicted, of 19 MB each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to write to; the system's temporary one if left out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        cases = [(name, layers) for layers in (*arguments.small, arguments.large) for name in GRIDS]
        files = [_layout_file(Path(folder), name, layers, arguments.ranks) for name, layers in cases]
        queue = mp.get_context("fork").SimpleQueue()  # torch is imported once for all
        options = (arguments.ranks, files, arguments.rounds, folder, queue)
        mp.start_processes(_be_rank, options, arguments.ranks, start_method="fork")
        seconds = queue.get()
        traffic = [simulate(file, "export").traffic for file in files]
    num_small = len(cases) - len(GRIDS)
    rates = fit_rates([Sample(*pair) for pair in zip(traffic[:num_small], seconds, strict=False)])
    print(f"fitted  {rates.to_dict()}")
    print("| layout | layers | exported | predicted | measured | predicted / measured |\n" + "| --- " * 6 + "|")
    for number, ((name, layers), moved, took) in enumerate(zip(cases, traffic, seconds, strict=True)):
        told = predict(moved, rates, None).seconds
        what = f"{name}{' (fitted)' if number < num_small else ''}"
        nbytes = int(moved.total("written_nbytes").sum())
        print(f"| {what} | {layers} | {nbytes / 1e6:.0f} MB | {told:.2f} s | {took:.2f} s | {told / took:.2f} |")


def _layout_file(folder: Path, name: str, layers: int, ranks: int) -> str:
    """Write the layout file of a Llama of hidden size 1,024."""
    grid = GRIDS[name].format(n=ranks, half=ranks // 2)
    rows = "/~dp" if " dp=" in f" {grid}" else ""
    block = {
        **dict.fromkeys(("q", "k", "v", "gate", "up"), f"[{{rows}}/tp{rows}, 1024]"),
        **dict.fromkeys(("o", "down"), f"[1024{rows}, {{rows}}/tp]"),
    }
    lines = ["[mesh]", f'grid = "{grid}"', "", "[tensors]", f'"embed" = "[16000/tp{rows}, 1024]"', '"norm" = "[1024]"']
    for layer in range(layers):
        for each, layout in block.items():
            lines.append(f'"layers.{layer}.{each}" = "{layout.format(rows=1024 if each in "qkvo" else 2816)}"')
    file = folder / f"{len(lines)}-{rows.strip('/~')}-{grid.replace(' ', '-')}.toml"
    file.write_text("\n".join([*lines, ""]))
    return str(file)


def _be_rank(rank: int, num_ranks: int, files: list[str], rounds: int, folder: str, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    times: list[list[float]] = [[] for _ in files]
    for number in range(rounds + 1):  # the first is to meet, and to make all modules known
        for file, own in zip(files, times, strict=True):
            layouts, model = _held(file, rank)
            dist.barrier()
            started = time.perf_counter()
            export_model(model, Path(folder) / "out", layouts=layouts, recipe="none")
            dist.barrier()
            if number:
                own.append(time.perf_counter() - started)
            if rank == 0:
                shutil.rmtree(Path(folder) / "out")
                subprocess.run(["sync", "-f", folder], check=True)
            dist.barrier()
    if rank == 0:
        queue.put([min(own) for own in times])
    dist.destroy_process_group()


def _held(file: str, rank: int) -> tuple[LayoutMap, dict[str, torch.Tensor]]:
    """Return the layouts in a file, and what a rank holds by them: equal values, so that replicas agree."""
    layouts = LayoutMap.read(file)
    mesh, model = layouts.device_mesh, {}
    assert mesh is not None
    for name, shape in compute_shapes(layouts)[0].items():
        layout = layouts[name]
        assert layout is not None
        part = local_part(layout, mesh, mesh.coordinate(rank), shape)
        assert part is not None
        model[name] = torch.full(part.shape, 0.5, dtype=torch.bfloat16)
    return layouts, model


if __name__ == "__main__":
    main()
