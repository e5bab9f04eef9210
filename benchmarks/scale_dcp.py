"""Makes a folder of torch's distributed checkpoints of a large model, and times its dry run.

``python -m benchmarks.scale_dcp FOLDER --model qwen3-30b`` is a Qwen3-30B-A3B-like model, cut by FSDP2 over 64 ranks.
``deepseek-v3`` has that model's names and sizes: its experts are dealt to 64 groups of 4 ranks, which cut each, and all
else is cut over 256. torch's planner makes each rank's plan and the metadata, in a fake process group; items are
archives as `torch.save` writes them, with holes for their payloads. The folders take 5 and 2 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks import scale_verl
from benchmarks.scale_verl import time_dry_runs
from xrank.readers.records import compute_repeated_crc32

Shapes = Iterator[tuple[str, tuple[int, ...], int | None]]
"""Name and shape of each tensor, and the number of an expert."""
NUM_EXPERTS, NUM_EXPERT_RANKS = 256, 64


def qwen3_30b(num_layers: int) -> Shapes:
    """Yield Qwen3-30B-A3B's tensors."""
    yield from ((name, shape, None) for name, shape in scale_verl.shapes(num_layers))


def deepseek_v3(num_layers: int) -> Shapes:
    """Yield DeepSeek-V3's tensors, without those for the prediction of more tokens."""
    hidden, vocabulary = 7168, 129280
    yield "model.embed_tokens.weight", (vocabulary, hidden), None
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}self_attn.q_a_proj.weight", (1536, hidden), None
        yield f"{prefix}self_attn.q_a_layernorm.weight", (1536,), None
        yield f"{prefix}self_attn.q_b_proj.weight", (24576, 1536), None
        yield f"{prefix}self_attn.kv_a_proj_with_mqa.weight", (576, hidden), None
        yield f"{prefix}self_attn.kv_a_layernorm.weight", (512,), None
        yield f"{prefix}self_attn.kv_b_proj.weight", (32768, 512), None
        yield f"{prefix}self_attn.o_proj.weight", (hidden, 16384), None
        yield f"{prefix}input_layernorm.weight", (hidden,), None
        yield f"{prefix}post_attention_layernorm.weight", (hidden,), None
        if layer < 3:
            parts: list[tuple[str, int, int | None]] = [("mlp.", 18432, None)]
        else:
            yield f"{prefix}mlp.gate.weight", (NUM_EXPERTS, hidden), None
            yield f"{prefix}mlp.gate.e_score_correction_bias", (NUM_EXPERTS,), None
            parts = [("mlp.shared_experts.", 2048, None)]
            parts += [(f"mlp.experts.{expert}.", 2048, expert) for expert in range(NUM_EXPERTS)]
        for part, intermediate, expert in parts:
            yield f"{prefix}{part}gate_proj.weight", (intermediate, hidden), expert
            yield f"{prefix}{part}up_proj.weight", (intermediate, hidden), expert
            yield f"{prefix}{part}down_proj.weight", (hidden, intermediate), expert
    yield "model.norm.weight", (hidden,), None
    yield "lm_head.weight", (vocabulary, hidden), None


MODELS = {"qwen3-30b": (qwen3_30b, 48, 64), "deepseek-v3": (deepseek_v3, 61, 256)}
"""Its tensors, layers, and ranks."""


class _Parts:
    """A stream to which torch saves, and that keeps what lies around skipped payloads."""

    def __init__(self) -> None:
        self.nbytes, self.parts = 0, [(0, b"")]

    def write(self, data: bytes) -> int:
        at, before = self.parts[-1]
        if at + len(before) == self.nbytes:
            self.parts[-1] = (at, before + bytes(data))
        else:
            self.parts.append((self.nbytes, bytes(data)))
        self.nbytes += len(data)
        return len(data)

    def seek(self, nbytes: int, whence: int) -> None:
        assert whence == os.SEEK_CUR
        self.nbytes += nbytes

    def flush(self) -> None:
        pass

    def set_checksum(self, nbytes: int) -> None:
        """Record the checksum of so many zeros, as those in the hole are: torch records 0 for a payload it skips."""
        crc32 = compute_repeated_crc32(b"\0", nbytes).to_bytes(4, "little")
        at, tail = self.parts[-1]
        entry = tail.index(b"PK\1\2", tail.index(b"archive/data/0") - 46)
        for place in (tail.index(b"PK\7\10") + 4, entry + 16):
            tail = tail[:place] + crc32 + tail[place + 4 :]
        self.parts[-1] = at, tail


def make(folder: str, model: str, num_ranks: int, num_layers: int) -> None:
    """Write the folder of all ranks."""
    # Imported here alone, in a process of its own: the peak memory of a dry run counts that of its parent.
    from dataclasses import replace

    import torch
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import StorageMeta

    os.makedirs(folder)
    if model == "qwen3-30b":
        with open(os.path.join(folder, "config.json"), "w", encoding="ascii") as file:
            json.dump(scale_verl.config(num_layers), file, indent=2)
    plans = [_plan(model, num_ranks, num_layers, rank) for rank in range(num_ranks)]
    plans, metadata = create_default_global_save_plan(plans)
    archives: dict[tuple[torch.Size, torch.dtype], _Parts] = {}
    places = {}
    for rank, plan in enumerate(plans):
        name, at = f"__{rank}_0.distcp", 0
        with open(os.path.join(folder, name), "wb", buffering=0) as file:
            # Texts of its own, as they come out of the pickle of results that the rank sent.
            indexes = pickle.loads(pickle.dumps([item.index for item in plan.items]))
            for item, index in zip(plan.items, indexes, strict=True):
                kind = (item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype)
                if kind not in archives:
                    archives[kind] = _Parts()
                    with torch.serialization.skip_data():
                        torch.save(torch.empty(kind[0], dtype=kind[1]), archives[kind])
                    archives[kind].set_checksum(kind[0].numel() * kind[1].itemsize)
                archive = archives[kind]
                for offset, content in archive.parts:
                    os.pwrite(file.fileno(), content, at + offset)
                places[index] = _StorageInfo(name, at, archive.nbytes)
                at += archive.nbytes
    fqns = {name: (name,) for name in metadata.state_dict_metadata}
    storage = StorageMeta(checkpoint_id=folder, save_id="0" * 8)
    metadata = replace(metadata, planner_data=fqns, storage_data=places, storage_meta=storage)
    metadata.version = CURRENT_DCP_VERSION
    with open(os.path.join(folder, ".metadata"), "wb") as file:
        pickle.dump(metadata, file)


def _plan(model: str, num_ranks: int, num_layers: int, rank: int) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    all_ranks = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("fsdp",))
    num_expert_ranks = min(NUM_EXPERT_RANKS, num_ranks)
    by_expert = init_device_mesh(
        "cpu", (num_expert_ranks, num_ranks // num_expert_ranks), mesh_dim_names=("ep", "efsdp")
    )
    state = {}
    for name, shape, expert in MODELS[model][0](num_layers):
        if expert is not None and expert // (NUM_EXPERTS // num_expert_ranks) != by_expert.get_local_rank("ep"):
            continue
        mesh = all_ranks if expert is None else by_expert["efsdp"]
        most = -(-shape[0] // mesh.size())
        rows = max(0, min(most, shape[0] - most * mesh.get_local_rank()))
        whole = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        part = torch.empty((rows, *shape[1:]), dtype=torch.bfloat16)
        state[name] = DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    plan = create_default_local_save_plan(state, is_coordinator=rank == 0)
    dist.destroy_process_group()
    return plan


def main() -> None:
    """Make the folder unless it is there, and time its dry runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="which is kept; made if it is missing")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int, default=3, help="of dry runs")
    given = parser.parse_args()
    _, num_layers, num_ranks = MODELS[given.model]
    if not os.path.exists(given.folder):
        with ProcessPoolExecutor(1) as pool:
            pool.submit(make, given.folder, given.model, given.ranks or num_ranks, given.layers or num_layers).result()
    time_dry_runs(given.folder, given.rounds)


if __name__ == "__main__":
    main()
