"""Makes a folder as verl leaves it of a Qwen3-30B-A3B-like model on many ranks, and times its dry run.

Each rank's file is torch's own `torch.save` of DTensors cut by FSDP2, whose process group is torch's fake one, so that
one process writes all ranks. Payloads are zeros and become holes: files have their true sizes and checksums, and take a
page or two for each tensor. The folder of 64 ranks takes 5.3 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

_ROOMY = """
import os, runpy, sys
os.statvfs = lambda path: os.statvfs_result((4096, 4096, *[1 << 40] * 6, 0, 255))
sys.argv[0] = "xrank"
runpy.run_module("xrank", run_name="__main__", alter_sys=True)
"""
"""xrank on a disk with room for the output, as a dry run asks for it."""
HIDDEN, INTERMEDIATE, VOCABULARY, EXPERTS = 2048, 768, 151936, 128
HEADS, GROUPS, HEAD_SIZE = 32, 4, 128


def shapes(num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every tensor's name and shape, of the experts one by one."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}self_attn.q_proj.weight", (HEADS * HEAD_SIZE, HIDDEN)
        yield f"{prefix}self_attn.k_proj.weight", (GROUPS * HEAD_SIZE, HIDDEN)
        yield f"{prefix}self_attn.v_proj.weight", (GROUPS * HEAD_SIZE, HIDDEN)
        yield f"{prefix}self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_SIZE)
        yield f"{prefix}self_attn.q_norm.weight", (HEAD_SIZE,)
        yield f"{prefix}self_attn.k_norm.weight", (HEAD_SIZE,)
        yield f"{prefix}mlp.gate.weight", (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            yield f"{prefix}mlp.experts.{expert}.gate_proj.weight", (INTERMEDIATE, HIDDEN)
            yield f"{prefix}mlp.experts.{expert}.up_proj.weight", (INTERMEDIATE, HIDDEN)
            yield f"{prefix}mlp.experts.{expert}.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield f"{prefix}input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def config(num_layers: int) -> dict[str, object]:
    """Return the model's config.json."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": HEAD_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": INTERMEDIATE,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": GROUPS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
    }


class SparseFile:
    """A file to which torch saves, where long zeros become holes."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "wb", buffering=1 << 16)  # noqa: SIM115

    def write(self, data: bytes) -> int:
        """Write bytes, or leave a hole for them."""
        if len(data) > 4096 and bytes(len(data)) == data:
            self._file.seek(len(data), os.SEEK_CUR)
            return len(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Write the buffered bytes."""
        self._file.flush()

    def close(self) -> None:
        """Close the file, whose last bytes are no zeros."""
        self._file.close()


def make(folder: str, num_ranks: int, num_layers: int) -> None:
    """Write the folder of all ranks."""
    # Imported here alone, in a process of its own: the peak memory of a dry run counts that of its parent.
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.makedirs(os.path.join(folder, "huggingface"))
    with open(os.path.join(folder, "huggingface", "config.json"), "w", encoding="ascii") as file:
        json.dump(config(num_layers), file, indent=2)
    with open(os.path.join(folder, "fsdp_config.json"), "w", encoding="ascii") as file:
        json.dump({"FSDP_version": 2, "world_size": num_ranks}, file, indent=4)
    for rank in range(num_ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("fsdp",))
        state = {}
        for name, shape in shapes(num_layers):
            rows, *others = shape
            assert rows % num_ranks == 0, f"{name} of {rows} rows"
            part = torch.zeros((rows // num_ranks, *others), dtype=torch.bfloat16)
            whole = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            state[name] = DTensor.from_local(
                part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        file = SparseFile(os.path.join(folder, f"model_world_size_{num_ranks}_rank_{rank}.pt"))
        torch.save(state, file)
        file.close()
        dist.destroy_process_group()


def main() -> None:
    """Make the folder unless it is there, and time its dry runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="which is kept; made if it is missing")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3, help="of dry runs")
    given = parser.parse_args()
    if not os.path.exists(given.folder):
        with ProcessPoolExecutor(1) as pool:
            pool.submit(make, given.folder, given.ranks, given.layers).result()
    time_dry_runs(given.folder, given.rounds)


def time_dry_runs(folder: str, rounds: int) -> None:
    """Print what dry runs of a folder take."""
    command = [sys.executable, "-c", _ROOMY, "gather", folder, "--out", f"{folder}-out", "--dry-run", "-q"]
    seconds, processor, peaks = [], [], []
    for _ in range(rounds):
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        assert status == 0
        seconds.append(time.perf_counter() - started)
        processor.append(usage.ru_utime + usage.ru_stime)
        peaks.append(usage.ru_maxrss * 1024 / 1e6)
    if rounds:
        print(f"dry run: {statistics.median(seconds):.1f} s ({min(seconds):.1f}-{max(seconds):.1f}), "
              f"{statistics.median(processor):.1f} s of processors, {max(peaks):.0f} MB at most")  # fmt: skip


if __name__ == "__main__":
    main()
