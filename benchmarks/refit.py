"""Times `take_weights(...).update()` beside a bare copy of the bytes, and beside gather and broadcast.

Four trainer ranks hold a Llama shape in bf16, cut by FSDP over tensor parallelism or by FSDP alone; two engine ranks
hold it as tensor parallel engines do: fused, columns of some tensors. All six are one gloo world, which only the
baseline uses; xrank's two sides share a directory. A round runs all ways in turn: the update, with its confirmation; as
many bytes by process_vm_readv(2) in runs of 1 MiB, in as many threads; an all-gather of each tensor on the trainer's
ranks, which is what ``full_tensor()`` does, its broadcast to the engine's ranks, and their loader. A time is that of
the slower engine rank. docs/refit.md has the table. Quote the ratios: absolute times belong to one machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import xrank
from benchmarks.fused_engine import FusedEngine, Sizes, whole_shapes
from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.local_part import local_part
from xrank.lending.peer_memory import PeerMemory
from xrank.plan.executor import Budget

TRAINERS, ENGINES = 4, 2
_RUN_NBYTES = 1 << 20
CUTS = {"FSDP x TP": ((2, 2), ("dp", "tp")), "FSDP": ((4,), ("dp",))}


def trainer_layouts(cut: str, shapes: dict[str, tuple[int, ...]]) -> LayoutMap:
    """Return the layouts of the trainer's tensors."""
    grid, names = CUTS[cut]
    layouts = LayoutMap(DeviceMesh(grid, names))
    for name, shape in shapes.items():
        if len(shape) == 1:
            layouts[name] = "[h/~dp]"
        elif cut == "FSDP":
            layouts[name] = "[f/~dp, h]"
        elif "o_proj" in name or "down_proj" in name:
            layouts[name] = "[h/~dp, f/~tp]"
        else:
            layouts[name] = "[f/~tp/~dp, h]"
    return layouts


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20, help="10 make 0.96 GB, 20 make 1.9 GB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cuts", nargs="*", choices=CUTS, default=list(CUTS))
    arguments = parser.parse_args()
    print("| trainer | bytes moved / held | update | bare copy | copy / update | gather, broadcast, load | / update | "
          "planning | memory |")  # fmt: skip
    print("| --- " * 9 + "|", flush=True)
    for cut in arguments.cuts:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (cut, arguments.layers, arguments.rounds, folder), nprocs=TRAINERS + ENGINES)
            print(Path(f"{folder}/row").read_text(), flush=True)


def _rank(rank: int, cut: str, layers: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TRAINERS + ENGINES)
    trainers = dist.new_group(list(range(TRAINERS)))
    engines = dist.new_group(list(range(TRAINERS, TRAINERS + ENGINES)))
    sizes = Sizes(2048, 5632, 32_000, layers, 16, 8, 128)
    shapes = whole_shapes(sizes)
    if rank < TRAINERS:
        _train(rank, cut, shapes, trainers, rounds, folder)
    else:
        _serve(rank - TRAINERS, sizes, shapes, cut, engines, rounds, folder)
    dist.barrier()
    dist.destroy_process_group()


def _make_shard(rank: int, shapes: dict[str, tuple[int, ...]], layouts: LayoutMap) -> dict[str, torch.Tensor]:
    held = {}
    for name, shape in shapes.items():
        layout = layouts[name]
        part = local_part(layout, layout.device_mesh, layout.device_mesh.coordinate(rank), shape)
        assert part is not None
        held[name] = torch.randn(part.shape).to(torch.bfloat16) if len(shape) > 1 else torch.ones(part.shape).bfloat16()
    return held


def _train(rank: int, cut: str, shapes: Any, group: Any, rounds: int, folder: str) -> None:
    layouts = trainer_layouts(cut, shapes)
    held = _make_shard(rank, shapes, layouts)
    block = torch.ones(sum(t.nbytes for t in held.values()) // TRAINERS * 2, dtype=torch.uint8)
    with xrank.offer_weights(held, f"{folder}/address", layouts=layouts, group=group) as offer:
        offer.wait_for_takers(ENGINES)
        # For the bare copy: the address of memory to read, under the sign of a lender of its own.
        from xrank.lending.local_bytes import local_bytes
        from xrank.lending.memory_offer import MemoryOffer

        bare = MemoryOffer([local_bytes(block)], across_hosts=False)
        descriptions: list[Any] = [None] * (TRAINERS + ENGINES)
        dist.all_gather_object(descriptions, bare.describe())
        for step in range(rounds + 1):
            dist.barrier()
            offer.publish(step + 1)
            dist.barrier()
            dist.barrier()  # the bare copy is between these
            _broadcast_all(held, shapes, group)
        bare.close()


def _broadcast_all(held: Any, shapes: Any, group: Any) -> None:
    """Gather each matrix on the trainer's ranks, as ``full_tensor()`` does, and broadcast it from the first one."""
    for name, shape in shapes.items():
        whole = torch.empty(shape, dtype=torch.bfloat16)
        if len(shape) > 1:
            parts = [torch.empty_like(held[name]) for _ in range(TRAINERS)]
            dist.all_gather(parts, held[name], group=group)
            torch.cat([part.flatten() for part in parts], out=whole.view(-1))
        dist.broadcast(whole, 0)


def _serve(rank: int, sizes: Sizes, shapes: Any, cut: str, group: Any, rounds: int, folder: str) -> None:
    engine = FusedEngine(sizes, rank, ENGINES)
    for parameter in engine.parameters():
        parameter.data.fill_(1)  # its pages are there before memory is measured
    weights = xrank.take_weights(engine, f"{folder}/address", loader=engine.load_weights, group=group)
    descriptions: list[Any] = [None] * (TRAINERS + ENGINES)
    dist.all_gather_object(descriptions, None)
    nbytes = sum(p.nbytes for p in engine.parameters())
    copy = _bare_copies(descriptions[:TRAINERS], nbytes)
    times: dict[str, list[float]] = {"update": [], "copy": [], "broadcast": []}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan_seconds = growth = 0.0
    for step in range(rounds + 1):
        dist.barrier()
        report = weights.update()
        if step == 0:
            plan_seconds = report.plan_seconds
            growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
        dist.barrier()
        copied = _timed(copy)
        dist.barrier()
        began = time.monotonic()
        for name, shape in shapes.items():
            whole = torch.empty(shape, dtype=torch.bfloat16)
            dist.broadcast(whole, 0)
            engine.load_weights([(name, whole)])
        loaded = time.monotonic() - began
        if step:
            times["update"].append(report.seconds)
            times["copy"].append(copied)
            times["broadcast"].append(loaded)
    weights.close()
    rows: list[Any] = [None] * ENGINES
    dist.all_gather_object(rows, (times, plan_seconds, growth, report.moved_nbytes, report.nbytes), group=group)
    if rank == 0:
        _write_row(cut, rows, folder)


def _bare_copies(descriptions: list[Any], nbytes: int) -> Callable[[], None]:
    """Return a function that copies as many bytes from all trainers, in as many threads as an update has."""
    memories = [PeerMemory(d["pid"], d["nonce_address"], bytes.fromhex(d["nonce"])) for d in descriptions]
    target = np.ones(nbytes, np.uint8)
    share = nbytes // len(memories)
    jobs = []
    for i, (memory, description) in enumerate(zip(memories, descriptions, strict=True)):
        address, there = description["views"][0]
        for start in range(0, share, 8 * _RUN_NBYTES):
            runs = range(start, min(start + 8 * _RUN_NBYTES, share), _RUN_NBYTES)
            sizes = [min(_RUN_NBYTES, share - at) for at in runs]
            far = [(address + at % max(1, there - _RUN_NBYTES), n) for at, n in zip(runs, sizes, strict=True)]
            near = [(target.ctypes.data + i * share + at, n) for at, n in zip(runs, sizes, strict=True)]
            jobs.append((memory, np.array(far, np.uint64), np.array(near, np.uint64)))
    workers = Budget.from_memory(64_000_000, min(4, os.cpu_count() or 1)).workers

    def copy() -> None:
        left, lock = iter(jobs), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    job = next(left, None)
                if job is None:
                    return
                job[0].copy_spans(job[1], job[2])

        threads = [threading.Thread(target=work) for _ in range(workers - 1)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        assert target[0] == 1

    return copy


def _timed(function: Callable[[], None]) -> float:
    began = time.monotonic()
    function()
    return time.monotonic() - began


def _write_row(cut: str, rows: list[Any], folder: str) -> None:
    slowest = {name: [max(pair) for pair in zip(*(row[0][name] for row in rows), strict=True)] for name in rows[0][0]}
    best = {name: min(values) for name, values in slowest.items()}
    median = {name: statistics.median(values) for name, values in slowest.items()}
    moved, held = sum(row[3] for row in rows), sum(row[4] for row in rows)
    texts = [f"{1000 * best[name]:.0f} / {1000 * median[name]:.0f} ms" for name in slowest]
    Path(f"{folder}/row").write_text(
        f"| {cut} | {moved / held:.3f} of {held / 1e9:.2f} GB | {texts[0]} | {texts[1]} | "
        f"{best['copy'] / best['update']:.2f} / {median['copy'] / median['update']:.2f} | {texts[2]} | "
        f"{best['broadcast'] / best['update']:.1f} / {median['broadcast'] / median['update']:.1f} | "
        f"{max(row[1] for row in rows):.2f} s | {max(row[2] for row in rows):.0f} MB |"
    )


if __name__ == "__main__":
    main()
