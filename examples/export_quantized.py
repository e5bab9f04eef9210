"""Quantizes a sharded model to fp8 or int8 while it is exported; no rank ever holds more than one whole weight.

The weights of a small Llama are cut over data and tensor parallel ranks, as FSDP2 and tensor parallelism leave them.
`export_model` gives each whole weight to one of the ranks, which quantizes it, and all write to the files of one folder
for Hugging Face's loaders, whose config.json tells engines how to read it.

    python examples/export_quantized.py --format fp8 --out fp8
    torchrun --nproc-per-node 4 examples/export_quantized.py --format int8 --out int8
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from xrank import export_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
VOCAB, HIDDEN, MLP = CONFIG["vocab_size"], CONFIG["hidden_size"], CONFIG["intermediate_size"]
LAYER = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    **{f"model.layers.{i}.{name}.weight": shape for i in range(3) for name, shape in LAYER.items()},
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
}
ROWWISE = ("o_proj.weight", "down_proj.weight")  # tensor parallelism cuts their inputs, and all others' outputs

# Element type, its largest value, and what compressed-tensors, which transformers and vLLM use, calls the result: its
# presets FP8_DYNAMIC and INT8_W8A8 in
# https://github.com/vllm-project/compressed-tensors/blob/main/src/compressed_tensors/quantization/quant_scheme.py.
FORMATS = {
    "fp8": (torch.float8_e4m3fn, 448.0, "float", "float-quantized"),
    "int8": (torch.int8, 127.0, "int", "int-quantized"),
}


def weight(name: str) -> torch.Tensor:
    """Return a whole weight, the same on every rank; it stands for what training made of it."""
    random = torch.Generator().manual_seed(list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=random) / HIDDEN**0.5


def quantize(tensor: torch.Tensor, dtype: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales: about ``values * scale`` is the weight [out, in]; each row has a scale."""
    scale = tensor.abs().amax(dim=1, keepdim=True).float() / largest
    scale = scale.where(scale != 0, 1)  # a row of zeros is one with any scale
    values = tensor / scale
    return (values.round() if dtype == torch.int8 else values).to(dtype), scale


def export_quantized(kind: str, out: str) -> None:
    """Export this rank's part of the model, together with all other ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))

    def cut(name: str) -> DTensor | torch.Tensor:
        if len(SHAPES[name]) == 1:
            return weight(name)  # every rank has it whole
        return distribute_tensor(weight(name), mesh, [Shard(0), Shard(1 if name.endswith(ROWWISE) else 0)])

    model = {name: cut(name) for name in SHAPES}
    dtype, largest, type_name, format_name = FORMATS[kind]

    def transform(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        # It is first called without values, with tensors on the meta device: what it returns follows from shapes alone.
        if not name.endswith("_proj.weight"):
            return {name: tensor}
        values, scale = quantize(tensor, dtype, largest)
        return {name: values, f"{name}_scale": scale}

    scheme = {"num_bits": 8, "type": type_name, "symmetric": True}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": scheme | {"strategy": "channel", "dynamic": False},
                "input_activations": scheme | {"strategy": "token", "dynamic": True},
            }
        },
    }
    report = export_model(
        model, out, transform=transform, config_overrides=CONFIG | {"quantization_config": quantization}
    )
    if dist.get_rank() == 0:
        print(f"wrote  {report.num_tensors} tensors, {report.nbytes:,} bytes, of {mesh.size()} ranks into {out}")


def run_rank(rank: int, num_ranks: int, rendezvous: str, kind: str, out: str) -> None:
    """Do what one rank does."""
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    export_quantized(kind, out)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and wait for them; or be one of them, where torchrun has started them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="how many to start (default: 4); torchrun says its own")
    parser.add_argument("--format", choices=FORMATS, default="fp8", help="of the quantized weights (default: fp8)")
    parser.add_argument("--out", required=True, help="a new folder for the model")
    options = parser.parse_args()
    is_launched = dist.is_torchelastic_launched()
    num_ranks = int(os.environ["WORLD_SIZE"]) if is_launched else options.ranks
    if num_ranks < 2 or num_ranks % 2:
        parser.error(f"{num_ranks} ranks are not an even number")
    if is_launched:
        run_rank(int(os.environ["RANK"]), num_ranks, "env://", options.format, options.out)
        return
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # saves gloo looking up the name of this host
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, f"file://{folder}/rendezvous", options.format, options.out)
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=num_ranks)


if __name__ == "__main__":
    main()
