"""Quantizes a small Llama to int8 straight from the ranks that hold it, into a folder that inference engines load.

Each stage of the pipeline holds some of the layers, and tensor parallelism cuts their weights over the ranks of the
stage. Layer by layer, `get_tensors_parallel` brings the parts to the stage's first rank, which quantizes; then
`get_configs_parallel` brings the quantized layers of all stages to rank 0, which writes. No rank ever holds more than
one whole layer as it was trained.

    python examples/quantize_int8.py --out int8
    torchrun --nproc-per-node 4 examples/quantize_int8.py --out int8
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist

from xrank import get_configs_parallel, get_tensors_parallel, save_model

TP = 2
MAX_SHARD_SIZE = "200KB"  # so small that even this model takes several files
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
# How compressed-tensors, which transformers and vLLM use, calls what `quantize` makes: its preset INT8_W8A8 in
# https://github.com/vllm-project/compressed-tensors/blob/main/src/compressed_tensors/quantization/quant_scheme.py.
# The activations are the engine's affair: it quantizes them as they come.
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}
# Of each weight its shape [out, in], and the dimension that tensor parallelism cuts.
COLUMNWISE, ROWWISE, WHOLE = 0, 1, None
VOCAB, HIDDEN, MLP = CONFIG["vocab_size"], CONFIG["hidden_size"], CONFIG["intermediate_size"]
KV = HIDDEN // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
DECODER_LAYER = {
    "input_layernorm": ((HIDDEN,), WHOLE),
    "self_attn.q_proj": ((HIDDEN, HIDDEN), COLUMNWISE),
    "self_attn.k_proj": ((KV, HIDDEN), COLUMNWISE),
    "self_attn.v_proj": ((KV, HIDDEN), COLUMNWISE),
    "self_attn.o_proj": ((HIDDEN, HIDDEN), ROWWISE),
    "post_attention_layernorm": ((HIDDEN,), WHOLE),
    "mlp.gate_proj": ((MLP, HIDDEN), COLUMNWISE),
    "mlp.up_proj": ((MLP, HIDDEN), COLUMNWISE),
    "mlp.down_proj": ((HIDDEN, MLP), ROWWISE),
}
LAYERS = {
    "embedding": {"model.embed_tokens.weight": ((VOCAB, HIDDEN), COLUMNWISE)},
    **{
        f"layer {i}": {f"model.layers.{i}.{name}.weight": weight for name, weight in DECODER_LAYER.items()}
        for i in range(CONFIG["num_hidden_layers"])
    },
    "head": {"model.norm.weight": ((HIDDEN,), WHOLE), "lm_head.weight": ((VOCAB, HIDDEN), COLUMNWISE)},
}


@dataclass
class Int8Weight:
    """Stands for the weight [out, in] that is about ``values * scale``, with one scale for each row."""

    values: torch.Tensor
    scale: torch.Tensor


def new_layer(layer: str) -> dict[str, torch.Tensor]:
    """Return the whole weights of a layer, the same on every rank; they stand for what training made of them."""
    random = torch.Generator().manual_seed(list(LAYERS).index(layer))
    return {name: torch.randn(shape, generator=random) / HIDDEN**0.5 for name, (shape, _) in LAYERS[layer].items()}


def own_part(layer: str, tp_rank: int) -> dict[str, torch.Tensor]:
    """Return what one rank holds of a layer after training."""
    part = new_layer(layer)
    for name, (_, cut) in LAYERS[layer].items():
        if cut is not WHOLE:
            part[name] = part[name].chunk(TP, cut)[tp_rank].clone()
    return part


def join(layer: str, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the whole weights of a layer from the parts of its stage's ranks, which are in the order of the ranks."""
    return {
        name: parts[0][name] if cut is WHOLE else torch.cat([part[name] for part in parts], cut)
        for name, (_, cut) in LAYERS[layer].items()
    }


def quantize(name: str, weight: torch.Tensor) -> Int8Weight:
    """Return the int8 weight. It takes the whole weight, since a scale is that of a whole row."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    if not scale.isfinite().all():
        raise ValueError(f"{name} has values that are infinite or not a number")
    scale[scale == 0] = 1  # a row of zeros is one with any scale
    return Int8Weight((weight / scale).round().to(torch.int8), scale)


def write_model(weights: dict[str, torch.Tensor | Int8Weight], out: str) -> None:
    """Write the Hugging Face folder, which appears when it is complete."""
    tensors = {}
    for name, weight in weights.items():
        if isinstance(weight, Int8Weight):
            tensors[name], tensors[f"{name}_scale"] = weight.values, weight.scale
        else:
            tensors[name] = weight
    config = CONFIG | {"quantization_config": QUANTIZATION}
    save_model(tensors, out, config_overrides=config, max_shard_size=MAX_SHARD_SIZE)


def run_rank(rank: int, num_ranks: int, rendezvous: str, out: str) -> None:
    """Do what one rank does."""
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    stage, tp_rank = divmod(rank, TP)
    first, end = (len(LAYERS) * s // (num_ranks // TP) for s in (stage, stage + 1))  # stages may be of unequal length
    held = {layer: own_part(layer, tp_rank) for layer in list(LAYERS)[first:end]}
    num_bytes = sum(weight.nbytes for part in held.values() for weight in part.values())

    all_ranks, tp_ranks = range(num_ranks), range(stage * TP, (stage + 1) * TP)
    # Around everything: all ranks leave it together, when rank 0 has written, or all hear which rank failed.
    with get_configs_parallel(num_bytes, all_ranks, None, key="bytes held") as all_bytes:
        quantized = {}
        for layer, part in held.items():
            with get_tensors_parallel(part, tp_ranks, key=layer) as parts:
                if parts:  # on the first of tp_ranks; the others get an empty list
                    for name, weight in join(layer, parts).items():
                        quantized[name] = quantize(name, weight) if name.endswith("_proj.weight") else weight
        # Of all ranks and not only of those that quantized: then a failure of any rank ends the waiting here.
        with get_configs_parallel(quantized, all_ranks, None, key="quantized layers") as stages:
            if stages:
                write_model({name: weight for stage in stages for name, weight in stage.items()}, out)
    if rank == 0:
        print(f"gathered  {sum(all_bytes):,} bytes from {num_ranks} ranks (tp {TP} x pp {num_ranks // TP}) into {out}")
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and wait for them; or be one of them, where torchrun has started them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help=f"a multiple of {TP} (default: 4); torchrun says its own")
    parser.add_argument("--out", required=True, help="a new folder for the model")
    options = parser.parse_args()
    is_launched = dist.is_torchelastic_launched()
    num_ranks = int(os.environ["WORLD_SIZE"]) if is_launched else options.ranks
    if num_ranks < TP or num_ranks % TP:
        parser.error(f"{num_ranks} ranks are no multiple of {TP}")
    if os.path.exists(options.out):
        parser.error(f"{options.out} exists")
    if is_launched:
        run_rank(int(os.environ["RANK"]), num_ranks, "env://", options.out)
        return
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # saves gloo looking up the name of this host
    with tempfile.TemporaryDirectory() as folder:
        rank_arguments = (num_ranks, f"file://{folder}/rendezvous", options.out)
        torch.multiprocessing.spawn(run_rank, rank_arguments, nprocs=num_ranks)


if __name__ == "__main__":
    main()
