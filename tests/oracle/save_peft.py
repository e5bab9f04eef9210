"""Adapters with PEFT's options, saved as ranks save them under DeepSpeed and FSDP2: run by torchrun.

    torchrun --nproc-per-node 2 -m tests.oracle.save_peft FOLDER KIND...

A kind's folder then holds ``ENGINE/whole``, the state of the whole model, and ``ENGINE/alone``: what Trainer saves of a
PeftModel, which is DeepSpeed's checkpoint without frozen parameters, or PEFT's own state dict in a DCP folder.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["ENGINES", "KINDS", "make_adapted", "make_base"]

ENGINES = ("zero2", "zero3", "fsdp2")
TARGETS = ["q_proj", "v_proj", "down_proj"]
# Options of PEFT; `adapter_name` is the adapter's, `tied` and `bias` the base model's.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "named": {"adapter_name": "stage2"},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    "one layer": {"layers_to_transform": [1]},
    "all but one": {"exclude_modules": ["model.layers.0.self_attn.q_proj"]},
    "bias lora_only": {"bias": "lora_only"},
    "bias all": {"bias": "all", "adapter_name": "stage2"},
    "bias all, saved": {"bias": "all", "modules_to_save": ["o_proj", "lm_head"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [3, 5, 7]}},
    "tokens of two": {"trainable_token_indices": {"embed_tokens": [3, 5, 7], "lm_head": [2]}, "adapter_name": "stage2"},
    "tokens, tied": {"trainable_token_indices": [3, 5], "tied": True},
    "saved": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "saved, tied": {"modules_to_save": ["embed_tokens"], "tied": True},
    "saved, both tied": {"modules_to_save": ["embed_tokens"], "tied": True, "ensure_weight_tying": True},
    "dora": {"use_dora": True, "adapter_name": "stage2"},
    "lora_bias": {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "embedding, tied": {"target_modules": ["embed_tokens", "v_proj"], "tied": True},
    "many": {
        "use_dora": True,
        "use_rslora": True,
        "bias": "all",
        "modules_to_save": ["lm_head"],
        "trainable_token_indices": {"embed_tokens": [0, 47]},
        "rank_pattern": {"v_proj": 2},
        "adapter_name": "stage2",
    },
}


def make_base(*, tied: bool = False) -> LlamaForCausalLM:
    """Return the base model, the same wherever it is made; its biases are not zeros."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_(std=0.1)
    return model.eval()


def make_adapted(kind: str) -> PeftModel:
    """Return a model whose adapter has been trained, as far as its values show."""
    options = dict(KINDS[kind])
    adapter, tied = options.pop("adapter_name", "default"), options.pop("tied", False)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **options})
    model = get_peft_model(make_base(tied=tied), config, adapter_name=adapter)
    random = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=random), alpha=0.1)
    return model.eval()


def save_zero(kind: str, stage: int, folder: Path) -> None:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = make_adapted(kind)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-3), config=config)
    engine.save_checkpoint(str(folder / "whole"))
    engine.save_checkpoint(str(folder / "alone"), exclude_frozen_parameters=True)
    engine.destroy()


def save_fsdp2(kind: str, folder: Path) -> None:
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model
    from torch.distributed.fsdp import fully_shard

    model = make_adapted(kind)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_offload=False)
    for name, adapter_only in (("whole", False), ("alone", True)):
        save_fsdp_model(plugin, PartialState(), model, str(folder / name), adapter_only=adapter_only)


def main(folder: str, *kinds: str) -> None:
    """Save each kind of adapter under each engine."""
    import deepspeed
    import deepspeed.comm.torch
    from accelerate import PartialState

    warnings.simplefilter("ignore")
    # Else DeepSpeed compiles an operator, for a minute.
    deepspeed.comm.torch.build_shm_op = lambda: None
    PartialState(cpu=True)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for kind in kinds:
        save_zero(kind, 2, Path(folder, kind, "zero2"))
        save_zero(kind, 3, Path(folder, kind, "zero3"))
        save_fsdp2(kind, Path(folder, kind, "fsdp2"))
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # DeepSpeed holds its groups: a gloo thread that drops its last tensor while Python closes aborts
