"""The ranks of a trainer whose weights a real engine takes: FSDP2 or Megatron's names, and a model of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import xrank

__all__ = ["KINDS", "QUANTIZATIONS", "TRAINERS", "Trainer", "locate_trained", "make_model", "save_model"]

_SIZES = {
    "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 130, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SIZES),
    "tied": ("qwen3", {**_SIZES, "tie_word_embeddings": True}),
    "moe": ("qwen3_moe", {**_SIZES, **_EXPERTS}),
    "int8": ("llama", _SIZES),
    "w8a8": ("llama", _SIZES),
    "fp8": ("llama", _SIZES),
}
QUANTIZATIONS = {"w8a8": xrank.Quantization("int8", "channel"), "fp8": xrank.Quantization("fp8", "channel")}
"""Kind -> the quantization that the trainer's ranks make of the weights that move."""
TRAINERS = {"fsdp-4": 4, "fsdp-8": 8, "megatron-4": 4, "megatron-8": 8}
"""Trainer -> number of ranks. fsdp: FSDP2 over tensor parallelism, or over expert parallelism for a model with
experts; megatron: Megatron's names, TP2 x PP2, or EP2 x PP2 for a model with experts, and data parallelism."""


def make_model(kind: str, step: int) -> Any:
    """Return the whole model of a step; each step's values are of a seed of its own."""
    import transformers

    model_type, sizes = KINDS[kind]
    torch.manual_seed(100 + step)
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.05 + ("norm" in name))
    return model


def locate_trained(kind: str, step: int, root: Path) -> Path:
    """Return the folder of the model that the trainer holds at a step, with whole values."""
    return root / (f"{kind}-trained" if kind in QUANTIZATIONS else kind) / str(step)


def save_model(kind: str, step: int, root: Path) -> None:
    """Write the model of a step below `root` / kind for engines, quantized from the whole tensors if the kind is."""
    import json
    import shutil

    from safetensors.torch import load_file, save_file

    folder, trained = root / kind / str(step), locate_trained(kind, step, root)
    make_model(kind, step).save_pretrained(trained)
    if kind not in QUANTIZATIONS:
        return
    shutil.copytree(trained, folder)
    quantization = QUANTIZATIONS[kind]
    file, config_file = folder / "model.safetensors", folder / "config.json"
    whole = load_file(file)
    made = {new: tensor for name in whole for new, tensor in quantization(name, whole[name]).items()}
    save_file(made, file, {"format": "pt"})
    # The format of compressed-tensors, as llm-compressor writes it for its schemes W8A8 and FP8_DYNAMIC.
    common = {"num_bits": 8, "type": "int" if quantization.dtype == "int8" else "float", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel", "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
    }
    config = json.loads(config_file.read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": f"{common['type']}-quantized",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }
    config_file.write_text(json.dumps(config))


class Trainer:
    """A rank's part of the model; `root` has the folders of `save_model`."""

    def __init__(self, kind: str, trainer: str, root: Path) -> None:
        self._kind, self._root, self._rank = kind, root, dist.get_rank()
        self._is_megatron = trainer.startswith("megatron")
        whole = make_model(kind, 0)
        if self._is_megatron:
            from tests.readers.made_megatron import Run
            from tests.workspace.made_modules import mesh_of

            run = {"moe": Run(pp=2, ep=2, chunks=((1, 1),))}.get(kind, Run(tp=2, pp=2, chunks=((1, 1),)))
            run = type(run)(**{**vars(run), "dp": TRAINERS[trainer] // 4, "tied": kind == "tied"})
            self._run, self.mesh = run, mesh_of(run)
            self.model: Any = self._chunks(whole, 0)
        else:
            self.model, self.mesh = _shard(whole, kind), None

    def set_step(self, step: int) -> None:
        """Change the weights in place to those of a step."""
        whole = make_model(self._kind, step)
        if self._is_megatron:
            for old, new in zip(self.model, self._chunks(whole, step), strict=True):
                for a, b in zip(old.parameters(), new.parameters(), strict=True):
                    a.data.copy_(b.data)
            return
        state = whole.state_dict()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.to_local().copy_(_local_part(state[name], parameter))

    def _chunks(self, whole: Any, step: int) -> list[Any]:
        from safetensors.torch import load_file

        from tests.recipes.made_checkpoints import megatron_state
        from tests.workspace.made_modules import chunks_of

        state = load_file(locate_trained(self._kind, step, self._root) / "model.safetensors")
        named = megatron_state(whole.config, state, vocab=256)
        named = {name: tensor.to(torch.bfloat16) for name, tensor in named.items()}  # rows of padding are fp32 there
        return chunks_of(self._run, named, self._rank)


def _local_part(whole: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return the part of a whole tensor that a DTensor holds here, cut as torch says it."""
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    mesh, placements = parameter.device_mesh, parameter.placements
    if not any(isinstance(placement, _StridedShard) for placement in placements):
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
    for dim in reversed(range(mesh.ndim)):  # FSDP cuts what tensor parallelism has cut
        placement = placements[dim]
        if isinstance(placement, (Shard, _StridedShard)):
            parts, at = whole.chunk(mesh.size(dim), placement.dim), mesh.get_local_rank(dim)
            whole = parts[at] if at < len(parts) else whole.narrow(placement.dim, 0, 0)  # fewer rows than ranks
    return whole


def _shard(model: Any, kind: str) -> Any:
    """Cut a model by FSDP2 over tensor parallelism, or over expert parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    plan: dict[str, Any] = {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    plan["self_attn.o_proj"] = RowwiseParallel()
    if kind != "moe":
        plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        plan["mlp.down_proj"] = RowwiseParallel()
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        if kind == "moe":  # the second axis is the experts', as in torchtitan
            experts = layer.mlp.experts
            for name, parameter in list(experts.named_parameters()):
                part = distribute_tensor(parameter.data, mesh["tp"], [Shard(0)])
                experts.register_parameter(name, torch.nn.Parameter(part))
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])
