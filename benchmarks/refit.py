"""Times `take_weights(...).update()` beside bare copies of the same bytes, and beside other ways to feed an engine.

Four trainer ranks hold a Llama shape in bf16, cut by FSDP over tensor parallelism or by FSDP alone; two engine ranks
hold it as tensor parallel engines do: fused, columns of some tensors. All six are one gloo world, which only the other
ways use; xrank's two sides share a directory. A round runs all ways in turn, and a time is that of the slower engine
rank:

- update: with its checks and the trainer's confirmation; then as if the trainer were on another host, over sockets;
- proof: an update with the proof that digests are equal on both sides;
- update and proof from publish on: the trainer's ranks digest what they lend before engines may read;
- bare copy: each engine rank reads half of each of the trainer's tensors by process_vm_readv(2), in runs of 1 MiB, into
  memory of torch, in as many threads as an update has;
- gather: an all-gather of each tensor on the trainer's ranks, which is what ``full_tensor()`` does, its gloo broadcast
  from the first rank to the engine's ranks, and their loader;
- iter_model: the same broadcast and loader, with whole tensors of `xrank.iter_model` on the first rank;
- Mooncake, with ``--mooncake``, the folder of its Python package: the runs of the bare copy by its transfer engine over
  TCP.

docs/refit.md has the table. Quote the ratios: absolute times belong to one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
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
from xrank.engine.executor import Budget
from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.local_part import local_part
from xrank.ranks.loans import MemoryOffer, PeerMemory
from xrank.ranks.memory import local_bytes

TRAINERS, ENGINES = 4, 2
_RUN_NBYTES = 1 << 20
_CALL_RUNS = 8
CUTS = {"FSDP x TP": ((2, 2), ("dp", "tp")), "FSDP": ((4,), ("dp",))}
WAYS = ("update", "copy", "proof", "sockets", "gather", "iter_model", "mooncake")
_FROM_PUBLISH = {"update": "update from publish on", "proof": "proof from publish on"}


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
    """Run all cases and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20, help="10 make 1.1 GB, 20 make 2.15 GB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--slow-rounds", type=int, default=3, help="rounds that run all ways; others: update, copy and proof"
    )
    parser.add_argument("--cuts", nargs="*", choices=CUTS, default=list(CUTS))
    parser.add_argument("--mooncake", help="folder of the Python package mooncake")
    arguments = parser.parse_args()
    for cut in arguments.cuts:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (cut, arguments, folder), nprocs=TRAINERS + ENGINES)
            print(Path(f"{folder}/table").read_text(), flush=True)


def _rank(rank: int, cut: str, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["XRANK_WORKSPACE"] = folder
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TRAINERS + ENGINES)
    trainers = dist.new_group(list(range(TRAINERS)))
    engines = dist.new_group(list(range(TRAINERS, TRAINERS + ENGINES)))
    fed = dist.new_group([0, *range(TRAINERS, TRAINERS + ENGINES)])
    sizes = Sizes(2048, 5632, 32_000, arguments.layers, 16, 8, 128)
    if rank < TRAINERS:
        _train(rank, cut, whole_shapes(sizes), trainers, fed, arguments, folder)
    else:
        _serve(rank - TRAINERS, sizes, cut, engines, fed, arguments, folder)
    dist.barrier()
    dist.destroy_process_group()


def _rounds(arguments: argparse.Namespace) -> list[tuple[str, ...]]:
    """Return the ways of each round; the first round is not counted."""
    every = WAYS if arguments.mooncake else WAYS[:-1]
    return [every] + [every if i < arguments.slow_rounds else WAYS[:3] for i in range(arguments.rounds)]


def _make_shard(rank: int, shapes: dict[str, tuple[int, ...]], layouts: LayoutMap) -> dict[str, torch.Tensor]:
    held = {}
    for name, shape in shapes.items():
        layout = layouts[name]
        part = local_part(layout, layout.device_mesh, layout.device_mesh.coordinate(rank), shape)
        assert part is not None
        held[name] = torch.randn(part.shape).to(torch.bfloat16) if len(shape) > 1 else torch.ones(part.shape).bfloat16()
    return held


def _train(rank: int, cut: str, shapes: Any, group: Any, fed: Any, arguments: argparse.Namespace, folder: str) -> None:
    layouts = trainer_layouts(cut, shapes)
    held = _make_shard(rank, shapes, layouts)
    near = xrank.offer_weights(held, f"{folder}/near", layouts=layouts, group=group)
    proven = xrank.offer_weights(held, f"{folder}/proven", layouts=layouts, group=group, proof=True)
    far = xrank.offer_weights(held, f"{folder}/far", layouts=layouts, group=group)
    if rank == 0:
        _move_away(Path(folder) / "far" / "trainer.json")
    bare = MemoryOffer([local_bytes(tensor) for tensor in held.values()], across_hosts=False)
    mooncake = _start_mooncake(arguments.mooncake)
    if mooncake is not None:
        for tensor in held.values():
            assert mooncake.register_memory(tensor.data_ptr(), tensor.nbytes) == 0
    description = bare.describe() | {"mooncake": mooncake and f"127.0.0.1:{mooncake.get_rpc_port()}"}
    dist.all_gather_object([None] * (TRAINERS + ENGINES), description)
    near.wait_for_takers(ENGINES)
    proven.wait_for_takers(ENGINES)
    far.wait_for_takers(ENGINES)
    for step, ways in enumerate(_rounds(arguments)):
        for way in ways:
            dist.barrier()
            if way == "update":
                near.publish(step)
            elif way == "proof":
                proven.publish(step)
            elif way == "sockets":
                far.publish(step)
            elif way == "gather":
                _send_gathered(rank, held, shapes, group, fed)
            elif way == "iter_model":
                with xrank.iter_model(held, layouts=layouts, group=group) as tensors:
                    for (name, whole), expected in zip(tensors, shapes, strict=rank == 0):
                        assert name == expected
                        dist.broadcast(whole, 0, group=fed)
            dist.barrier()
    for offer in (near, proven, far, bare):
        offer.close()


def _move_away(file: Path) -> None:
    """Change the trainer's registration so that its ranks seem to be on another host, and are read over sockets."""
    registration = json.loads(file.read_text())
    for part in registration["parts"]:
        part["offer"]["space"] = "another host"
    file.write_text(json.dumps(registration))


def _start_mooncake(folder: str | None) -> Any:
    if folder is None:
        return None
    sys.path.append(folder)
    from mooncake.engine import TransferEngine  # type: ignore[import-not-found,unused-ignore]

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


def _send_gathered(rank: int, held: Any, shapes: Any, group: Any, fed: Any) -> None:
    """Gather each tensor on the trainer's ranks, as ``full_tensor()`` does, and broadcast it from the first one."""
    for name, shape in shapes.items():
        whole = torch.empty(shape, dtype=torch.bfloat16)
        if len(shape) > 1:
            parts = [torch.empty_like(held[name]) for _ in range(TRAINERS)]
            dist.all_gather(parts, held[name], group=group)
            torch.cat([part.flatten() for part in parts], out=whole.view(-1))
        if rank == 0:
            dist.broadcast(whole, 0, group=fed)


def _serve(rank: int, sizes: Sizes, cut: str, group: Any, fed: Any, arguments: argparse.Namespace, folder: str) -> None:
    engine, shapes = FusedEngine(sizes, rank, ENGINES), whole_shapes(sizes)
    for parameter in engine.parameters():
        parameter.data.fill_(1)  # its pages are there before memory is measured
    near = xrank.take_weights(engine, f"{folder}/near", loader=engine.load_weights, group=group)
    proven = xrank.take_weights(engine, f"{folder}/proven", loader=engine.load_weights, group=group, proof=True)
    far = xrank.take_weights(engine, f"{folder}/far", loader=engine.load_weights, group=group)
    takers = {"update": near, "proof": proven, "sockets": far}
    descriptions: list[Any] = [None] * (TRAINERS + ENGINES)
    dist.all_gather_object(descriptions, None)
    target = torch.ones(sum(p.nbytes for p in engine.parameters()), dtype=torch.uint8)
    calls = _cut_calls(rank, descriptions[:TRAINERS], target)
    mooncake = _start_mooncake(arguments.mooncake)
    if mooncake is not None:
        assert mooncake.register_memory(target.data_ptr(), target.nbytes) == 0
    run: dict[str, Callable[[], object]] = {
        "copy": lambda: _copy_bare(calls, descriptions),
        "mooncake": lambda: _copy_by_mooncake(mooncake, calls, descriptions),
        "gather": lambda: _load_broadcast(engine, shapes, fed),
        "iter_model": lambda: _load_broadcast(engine, shapes, fed),
    }
    times: dict[str, list[float]] = {way: [] for way in (*WAYS, *_FROM_PUBLISH.values())}
    facts = {"held": sum(p.nbytes for p in engine.parameters())}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for step, ways in enumerate(_rounds(arguments)):
        for way in ways:
            dist.barrier()
            if way in takers:
                began = time.monotonic()
                report = takers[way].update()
                seconds = report.seconds
                if step and way in _FROM_PUBLISH:
                    times[_FROM_PUBLISH[way]].append(time.monotonic() - began)
                if way == "update":
                    facts["moved"] = report.moved_nbytes
                    if not step:
                        facts["first"] = report.plan_seconds + report.seconds
                        facts["plan"] = report.plan_seconds
                        facts["growth"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
            else:
                began = time.monotonic()
                run[way]()
                seconds = time.monotonic() - began
            if step:
                times[way].append(seconds)
            dist.barrier()
    for taker in takers.values():
        taker.close()
    rows: list[Any] = [None] * ENGINES
    dist.all_gather_object(rows, (times, facts), group=group)
    if rank == 0:
        Path(f"{folder}/table").write_text(_format_table(cut, rows))


_Call = tuple[int, Any, Any]
"""A trainer rank, and rows of (address, bytes) there and here."""


def _cut_calls(rank: int, descriptions: list[Any], target: torch.Tensor) -> list[_Call]:
    """Return the calls that fill `target` with this rank's half of each tensor of all trainer ranks."""
    by_trainer: list[list[_Call]] = []
    address, end = target.data_ptr(), target.data_ptr() + target.nbytes
    for number, description in enumerate(descriptions):
        there: list[tuple[int, int]] = []
        for start, nbytes in description["views"]:
            half = nbytes // ENGINES
            there += [(start + rank * half + i, min(_RUN_NBYTES, half - i)) for i in range(0, half, _RUN_NBYTES)]
        calls = []
        for i in range(0, len(there), _CALL_RUNS):
            spans = np.array(there[i : i + _CALL_RUNS], np.uint64)
            here = spans.copy()
            here[:, 0] = address + np.cumsum(spans[:, 1]) - spans[:, 1]
            address += int(spans[:, 1].sum())
            calls.append((number, spans, here))
        by_trainer.append(calls)
    assert address <= end
    turns = max(map(len, by_trainer))
    return [calls[turn] for turn in range(turns) for calls in by_trainer if turn < len(calls)]


def _copy_bare(calls: list[_Call], descriptions: list[Any]) -> None:
    memories = [PeerMemory(d["pid"], d["nonce_address"], bytes.fromhex(d["nonce"])) for d in descriptions[:TRAINERS]]
    _share(calls, lambda call: memories[call[0]].copy_spans(call[1], call[2]))


def _copy_by_mooncake(engine: Any, calls: list[_Call], descriptions: list[Any]) -> None:
    def copy(call: _Call) -> None:
        number, there, here = call
        code = engine.batch_transfer_sync_read(
            descriptions[number]["mooncake"], here[:, 0].tolist(), there[:, 0].tolist(), there[:, 1].tolist()
        )
        assert code == 0, code

    _share(calls, copy)


def _share(calls: list[_Call], copy: Callable[[_Call], object]) -> None:
    """Make all calls, in as many threads as an update has."""
    left, lock = iter(calls), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                call = next(left, None)
            if call is None:
                return
            copy(call)

    workers = Budget.from_memory(64_000_000, min(4, os.cpu_count() or 1)).workers
    threads = [threading.Thread(target=work) for _ in range(workers - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()


def _load_broadcast(engine: FusedEngine, shapes: dict[str, tuple[int, ...]], fed: Any) -> None:
    for name, shape in shapes.items():
        whole = torch.empty(shape, dtype=torch.bfloat16)
        dist.broadcast(whole, 0, group=fed)
        engine.load_weights([(name, whole)])


def _format_table(cut: str, rows: list[Any]) -> str:
    lines = []
    held, moved = (sum(row[1][name] for row in rows) for name in ("held", "moved"))
    most = {name: max(row[1][name] for row in rows) for name in ("first", "plan", "growth")}
    lines.append(
        f"{cut}: moved / held {moved / held:.4f} of {held / 1e9:.2f} GB; first update {most['first']:.2f} s, "
        f"{most['plan']:.2f} s of it planning; memory {most['growth']:.0f} MB; load {os.getloadavg()[0]:.1f}"
    )
    lines.append("| way | best | median | best / best update | median / median update |\n" + "| --- " * 5 + "|")
    slowest = {
        way: [max(pair) for pair in zip(*(row[0][way] for row in rows), strict=True)]
        for way, values in rows[0][0].items()
        if values
    }
    update = slowest["update"]
    for way, values in slowest.items():
        best, median = min(values), statistics.median(values)
        ratios = f"{best / min(update):.2f} | {median / statistics.median(update):.2f}"
        lines.append(f"| {way} | {1000 * best:.0f} ms | {1000 * median:.0f} ms | {ratios} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
