"""Times `export_model` beside a copy and what torch has: a full state dict on rank 0, DCP's Hugging Face writer.

Ranks hold a model as DTensors, cut over rows (FSDP2) or over rows and tensor parallel; round after round all take turns
to leave the whole of it in a folder on one disk, synced. ``cp`` copies the folder that was just exported. Memory is how
far a rank's resident set rose above what it was before, at its highest, the most of all ranks'. Quote the ratios:
absolute times belong to one machine and its noise.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NAMES = ("xrank", "cp", "full state dict", "DCP to HF")
LAYOUTS = ("FSDP2", "FSDP2 x TP")


def main() -> None:
    """Run every layout and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=22, help="of 88 MB each in bf16, with 262 MB beside them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--without", nargs="*", choices=NAMES[1:], default=[], help="what not to time")
    parser.add_argument("--folder", type=Path, help="on the disk to write to; the system's temporary one if left out")
    arguments = parser.parse_args()
    names = [name for name in NAMES if name not in arguments.without]
    print(f"| layout | {' | '.join(names)} | {' | '.join(f'{name} / xrank' for name in names[1:])} | memory, MB |")
    print("| --- " * (2 * len(names) + 1) + "|", flush=True)
    for layout in arguments.layouts:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            queue = mp.get_context("spawn").SimpleQueue()
            options = (layout, arguments.ranks, arguments.layers, arguments.rounds, names, folder, queue)
            mp.spawn(_be_rank, options, arguments.ranks)
            times, memory = queue.get()
        middle = {name: statistics.median(times[name]) for name in names}
        cells = [f"{middle[name]:.2f} s" for name in names]
        cells += [f"{middle[name] / middle['xrank']:.2f}" for name in names[1:]]
        grown = ", ".join(f"{name} {memory[name] / 1e6:,.0f}" for name in names if name != "cp")
        print(f"| {layout} | {' | '.join(cells)} | {grown} |", flush=True)


def _be_rank(
    rank: int, layout: str, num_ranks: int, layers: int, rounds: int, names: list[str], folder: str, queue: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    model = make_llama(layout, num_ranks, layers)
    out = Path(folder) / "out"
    ways: dict[str, Callable[[Path], None]] = {
        "xrank": lambda to: _export(model, to),
        "cp": lambda to: _copy(out, to),
        "full state dict": lambda to: _save_full(model, to),
        "DCP to HF": lambda to: _save_dcp(model, to),
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    memory = dict.fromkeys(names, 0)
    for number in range(rounds + 1):  # the first is to meet, and to make all modules known
        for name in names:
            to = out if name == "xrank" else Path(folder) / "other"
            before = reset_peak()
            dist.barrier()
            started = time.perf_counter()
            ways[name](to)
            dist.barrier()
            if number:
                times[name].append(time.perf_counter() - started)
            grown = torch.tensor(read_peak() - before)
            dist.all_reduce(grown, dist.ReduceOp.MAX)
            memory[name] = max(memory[name], int(grown))
            if rank == 0 and name != "xrank":
                shutil.rmtree(to)
                subprocess.run(["sync", "-f", folder], check=True)
        if rank == 0:
            shutil.rmtree(out)
            subprocess.run(["sync", "-f", folder], check=True)
        dist.barrier()
    if rank == 0:
        queue.put((times, memory))
    dist.destroy_process_group()


def make_llama(layout: str, num_ranks: int, layers: int) -> dict[str, torch.Tensor]:
    """Return a Llama's tensors, of hidden size 2,048, as this rank has them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape, names = ((num_ranks,), ("dp",)) if layout == "FSDP2" else ((num_ranks // 2, 2), ("dp", "tp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    sizes: dict[str, tuple[tuple[int, ...], int | None]] = {
        "model.embed_tokens.weight": ((32_000, 2048), 0),
        "model.norm.weight": ((2048,), None),
        "lm_head.weight": ((32_000, 2048), 0),
    }
    for i in range(layers):
        stem = f"model.layers.{i}"
        for name, rows, columns, dim in (
            ("self_attn.q_proj", 2048, 2048, 0),
            ("self_attn.k_proj", 256, 2048, 0),
            ("self_attn.v_proj", 256, 2048, 0),
            ("self_attn.o_proj", 2048, 2048, 1),
            ("mlp.gate_proj", 5632, 2048, 0),
            ("mlp.up_proj", 5632, 2048, 0),
            ("mlp.down_proj", 2048, 5632, 1),
        ):
            sizes[f"{stem}.{name}.weight"] = (rows, columns), dim
        for name in ("input_layernorm", "post_attention_layernorm"):
            sizes[f"{stem}.{name}.weight"] = (2048,), None
    model: dict[str, torch.Tensor] = {}
    made = torch.Generator().manual_seed(dist.get_rank())
    for name, (whole, dim) in sizes.items():
        placements: list[Any] = [Shard(0)]
        local = [whole[0] // shape[0], *whole[1:]]
        if len(shape) > 1:
            placements.append(Replicate() if dim is None else Shard(dim))
            if dim is not None:
                local[dim] //= 2
        part = torch.empty(local, dtype=torch.bfloat16)
        part.view(torch.int16).random_(0, 16_000, generator=made)
        if len(shape) > 1 and dim is None:
            part.fill_(1)  # a replica
        model[name] = DTensor.from_local(part, mesh, placements, run_check=False)
    return model


def _export(model: dict[str, torch.Tensor], to: Path) -> None:
    import xrank

    xrank.export_model(model, to, config_overrides={"model_type": "llama"})


def _copy(out: Path, to: Path) -> None:
    if dist.get_rank() == 0:
        subprocess.run(["cp", "-r", out, to], check=True)
        subprocess.run(["sync", "-f", to], check=True)


def _save_full(model: dict[str, torch.Tensor], to: Path) -> None:
    from safetensors.torch import save_file

    whole = {}
    for name, tensor in model.items():
        full = tensor.full_tensor()  # type: ignore[attr-defined]
        if dist.get_rank() == 0:
            whole[name] = full
    if dist.get_rank() == 0:
        to.mkdir()
        save_file(whole, to / "model.safetensors", metadata={"format": "pt"})
        subprocess.run(["sync", "-f", to], check=True)


def _save_dcp(model: dict[str, torch.Tensor], to: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(
        str(to), fqn_to_index_mapping=dict.fromkeys(model, 1), save_distributed=True, enable_consolidation=True
    )
    dcp.save(dict(model), storage_writer=writer)
    dist.barrier()
    if dist.get_rank() == 0:
        subprocess.run(["sync", "-f", to], check=True)


def reset_peak() -> int:
    """Let the highest resident set be counted anew; return what it is now."""
    Path("/proc/self/clear_refs").write_text("5")
    return read_peak()


def read_peak() -> int:
    """Return the highest resident set since then."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


if __name__ == "__main__":
    main()
