"""A Llama in the attributes of other modules, saved by torch and DeepSpeed, and exported alive: run by torchrun.

    torchrun --nproc-per-node 2 -m tests.oracle.save_wrapped FOLDER

For each path of attributes the folder then holds a folder of each of `ENGINES`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import xrank

__all__ = ["ENGINES", "PATHS", "make_base"]

PATHS = ("llm", "backbone", "policy", "_forward_module", "net.model", "state.model.model")
ENGINES = ("dcp", "zero2", "zero3", "fsdp1", "torch_save", "live")


class Holder(torch.nn.Module):
    """A module that holds another one in an attribute."""

    def __init__(self, attribute: str, inner: torch.nn.Module) -> None:
        super().__init__()
        setattr(self, attribute, inner)
        self.attribute = attribute

    def forward(self, *args: object, **kwargs: object) -> object:
        return getattr(self, self.attribute)(*args, **kwargs)


def make_base() -> LlamaForCausalLM:
    """Return the model, the same wherever it is made."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=48, num_hidden_layers=2, tie_word_embeddings=False, **sizes))
    model.config.architectures = ["LlamaForCausalLM"]
    return model


def wrap(path: str) -> torch.nn.Module:
    """Return the model in modules whose attributes have these names."""
    module: torch.nn.Module = make_base()
    for attribute in reversed(path.split(".")):
        module = Holder(attribute, module)
    return module


def save_by_torch(folder: Path, path: str) -> None:
    """Save by FSDP2 with DCP, by FSDP1 as a full state, by `torch.save`, and by `xrank.export_model` of FSDP2."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

    module = wrap(path)
    if dist.get_rank() == 0:
        for engine in ENGINES:
            (folder / engine).mkdir(parents=True)
            make_base().config.save_pretrained(folder / engine)
        torch.save({"model": module.state_dict(), "step": 3}, folder / "torch_save" / "model.pt")
    dist.barrier()
    fully_shard(module)
    dcp.save({"model": module.state_dict()}, checkpoint_id=folder / "dcp")
    xrank.export_model(module, folder / "live" / "model")
    flat = FullyShardedDataParallel(wrap(path), device_id=torch.device("cpu"), use_orig_params=True)
    with FullyShardedDataParallel.state_dict_type(flat, StateDictType.FULL_STATE_DICT):
        state = flat.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, folder / "fsdp1" / "pytorch_model.bin")


def save_by_deepspeed(folder: Path, path: str, stage: int) -> None:
    """Save DeepSpeed's checkpoint of the module, which was not trained."""
    import deepspeed

    module = wrap(path)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    engine.save_checkpoint(str(folder / f"zero{stage}"), tag="global_step1")
    engine.destroy()


def main() -> None:
    """Save each path."""
    warnings.simplefilter("ignore")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.comm.torch

    # Else DeepSpeed compiles an operator, for a minute.
    deepspeed.comm.torch.build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for path in PATHS:
        save_by_torch(Path(sys.argv[1]) / path, path)
        for stage in (2, 3):
            save_by_deepspeed(Path(sys.argv[1]) / path, path, stage)


if __name__ == "__main__":
    main()
    os._exit(0)  # DeepSpeed holds its groups: a gloo thread that drops its last tensor while Python closes aborts
