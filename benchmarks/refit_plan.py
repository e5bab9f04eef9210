"""Times the plan of one engine rank for a mixture of experts with 1T parameters, from 256 trainer ranks into 128.

The trainer cuts experts by expert parallelism over FSDP and the other tensors by FSDP; the engine has an equal share of
the experts on each rank, and tensor parallelism in groups of 8. The trainer's registration is made first, of memory
that nothing touches. The work of the first update before bytes move is timed: reading the registration, composing the
layouts, the proof that each element of each tensor is written once, and the runs of bytes. docs/refit.md has the
figures.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import asdict

from xrank import dtypes
from xrank.engine.replicas import spread_copies
from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.local_part import local_part
from xrank.readers.live.models import local_model
from xrank.recipes.found_source import OwnConfig
from xrank.refit.directory import RankRegistration, read_trainer_model
from xrank.refit.targets import ModuleTarget, Runs, cut_calls, find_runs, join_runs

HIDDEN, FFN, DENSE_FFN, EXPERTS, VOCAB, HEADS = 7168, 2048, 18432, 384, 163_840, 64 * 128


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the model."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for i in range(layers):
        at = f"model.layers.{i}"
        found |= {f"{at}.self_attn.{name}_proj.weight": (HEADS, HIDDEN) for name in "qkv"}
        found |= {f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS), f"{at}.input_layernorm.weight": (HIDDEN,)}
        found[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
        for expert in range(EXPERTS if i else 0):
            its = f"{at}.mlp.experts.{expert}"
            found |= {f"{its}.{name}_proj.weight": (FFN, HIDDEN) for name in ("gate", "up")}
            found[f"{its}.down_proj.weight"] = (HIDDEN, FFN)
        if not i:
            found |= {f"{at}.mlp.{name}_proj.weight": (DENSE_FFN, HIDDEN) for name in ("gate", "up")}
            found[f"{at}.mlp.down_proj.weight"] = (HIDDEN, DENSE_FFN)
        else:
            found[f"{at}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
    return found


def trainer_layouts(names: dict[str, tuple[int, ...]]) -> LayoutMap:
    """Return FSDP of 4 within expert parallelism of 64; the other tensors are cut over all 256."""
    layouts = LayoutMap(DeviceMesh((64, 4), ("ep", "fsdp")))
    for name, shape in names.items():
        if ".experts." in name:
            place = int(name.split(".")[5]) * 64 // EXPERTS
            layouts[name] = f"[f/fsdp, h] where ep={place}"
        else:
            layouts[name] = "[f/~ep/~fsdp, h]" if len(shape) == 2 else "[f/~ep/~fsdp]"
    return layouts


def engine_layouts(names: dict[str, tuple[int, ...]]) -> LayoutMap:
    """Return 3 experts on each of 128 ranks, and groups of 8 with tensor parallelism."""
    layouts = LayoutMap(DeviceMesh((16, 8), ("dp", "tp")))
    for name, shape in names.items():
        if ".experts." in name:
            rank = int(name.split(".")[5]) * 128 // EXPERTS
            layouts[name] = f"[f, h] where dp={rank // 8}, tp={rank % 8}"
        elif len(shape) == 1 or "mlp.gate." in name:
            layouts[name] = "[f, h]" if len(shape) == 2 else "[f]"
        else:
            layouts[name] = "[h, f/tp]" if "o_proj" in name or "down_proj" in name else "[f/tp, h]"
    return layouts


def held_by(rank: int, layouts: LayoutMap, names: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return the tensors of a rank, of memory that nothing touches."""
    mesh, held = layouts.device_mesh, {}
    assert mesh is not None
    at = mesh.coordinate(rank)
    for name, shape in names.items():
        layout = layouts[name]
        part = None if layout is None else local_part(layout, mesh, at, shape)
        if part is not None:
            held[name] = torch.empty(part.shape, dtype=torch.bfloat16)
    return held


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--registration", type=Path, help="file that keeps the trainer's registration between two runs")
    arguments = parser.parse_args()
    names = shapes(arguments.layers)
    if arguments.registration is None or not arguments.registration.exists():
        content = _make_registration(names)
        if arguments.registration is not None:
            arguments.registration.write_text(json.dumps(content))
            print("the registration is written; run the command again")
            return
    layouts = engine_layouts(names)
    target = ModuleTarget(held_by(5, layouts, names), layouts, None, 5, 128)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    if arguments.registration is not None:
        content = json.loads(arguments.registration.read_text())
    model = read_trainer_model(RankRegistration("", content, "registration"))
    read = time.process_time()
    plan = spread_copies(target.plan(model).plan, 5)
    planned = time.process_time()
    parts: dict[int, list[Runs]] = {}
    for one in plan.tensors:
        width = dtypes.dtype(one.output.dtype).nbytes
        holder = model.live.rank[one.copies.record]
        for rank in np.unique(holder).tolist():
            parts.setdefault(rank, []).append(find_runs(one.copies.nests.take(np.flatnonzero(holder == rank)), width))
    num_calls = sum(len(list(cut_calls(join_runs(its)))) for its in parts.values())
    ended = time.process_time()
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
    pieces = sum(len(one.copies) for one in plan.tensors)
    total = sum(torch.Size(shape).numel() for shape in names.values())
    print(
        f"{total / 1e12:.2f}T parameters, {len(names):,} tensors; a rank holds {len(plan.files):,} tensors, "
        f"{plan.nbytes / 1e9:.1f} GB, of {len(parts)} ranks in {pieces:,} pieces, {num_calls:,} calls: "
        f"{ended - started:.1f} s of one core ({read - started:.1f} the registration, "
        f"{planned - read:.1f} the proven plan, "
        f"{ended - planned:.1f} the runs), {growth:.0f} MB"
    )


def _make_registration(names: dict[str, tuple[int, ...]]) -> dict[str, object]:
    layouts = trainer_layouts(names)
    parts = []
    for rank in range(256):
        local = local_model(held_by(rank, layouts, names), layouts=layouts, rank=rank, world_size=256)
        parts.append({"model": local.describe(), "own": asdict(OwnConfig()), "offer": {}})
    return {
        "ranks": list(range(256)),
        "parts": parts,
        "recipe": "none",
        "aliases": {},
        "config": None,
        "names": [],
        "dropped": [],
    }


if __name__ == "__main__":
    main()
