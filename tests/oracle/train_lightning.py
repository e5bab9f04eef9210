"""Trains a small Llama with Lightning's Trainer, two steps in one of its ways to save, and leaves its checkpoints.

    python tests/oracle/train_lightning.py FOLDER CASE

Beside Lightning's ``checkpoints`` lies ``expected``: what `save_pretrained` writes of the whole weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm.torch
import lightning
import lightning.pytorch.strategies.deepspeed as deepspeed_strategy
import torch
from deepspeed.utils import safe_get_full_fp32_param
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from xrank.integrations.lightning import XrankCallback

CASES = {
    "file": False,
    "tied": True,
    "averaged": False,
    "fsdp": False,
    "fsdp2": True,
    "fsdp2-full": False,
    "deepspeed2": False,
    "deepspeed3": True,
}
"""Name -> whether the embeddings are tied."""


class Wrapper(lightning.LightningModule):
    """A LightningModule as users write it: the model is an attribute."""

    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = case
        self.save_hyperparameters({"lr": 1e-3, "name": Path("llama")})
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": CASES[case]}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))

    def configure_model(self) -> None:
        """Shard the model, where the strategy leaves that to the module."""
        if self.case.startswith("fsdp2"):
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Expected(Callback):
    """Writes the whole weights after the last step, as the ranks themselves put them together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Collect the weights on all ranks, and write them on the first."""
        model = pl_module.model
        if pl_module.case == "fsdp":
            with FullyShardedDataParallel.summon_full_params(trainer.strategy.model, writeback=False):
                state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        elif pl_module.case.startswith("deepspeed"):
            state = {name: safe_get_full_fp32_param(tensor) for name, tensor in model.named_parameters()}
        else:
            state = {
                name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
                for name, tensor in model.state_dict().items()
            }
        if trainer.is_global_zero:
            whole = LlamaForCausalLM(model.config)
            names = [name.replace("_fsdp_wrapped_module.", "") for name in state]
            missing = whole.load_state_dict(dict(zip(names, state.values(), strict=True)), strict=False).missing_keys
            assert set(missing) <= ({"lm_head.weight"} if CASES[pl_module.case] else set()), missing
            whole.save_pretrained(self.folder)


def allow_cpu() -> None:
    """Let the strategies run on CPUs, which Lightning refuses; what they save does not depend on the device."""
    accelerator_connector._AcceleratorConnector._check_strategy_and_fallback = lambda self: None
    deepspeed_strategy.CUDAAccelerator = CPUAccelerator
    deepspeed_strategy._validate_device_index_selection = lambda devices: None
    shard, initialize = FullyShardedDataParallel.__init__, deepspeed.initialize

    def shard_on_cpu(self: Any, *args: Any, **options: Any) -> None:
        shard(self, *args, **{**options, "device_id": torch.device("cpu")})

    def initialize_rank(*, args: Any, **options: Any) -> Any:
        args.device_rank = int(os.environ.get("LOCAL_RANK", "0"))
        return initialize(args=args, **options)

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # needs a compiler
    FullyShardedDataParallel.__init__ = shard_on_cpu
    deepspeed.initialize = initialize_rank


def main(folder: str, case: str) -> None:
    allow_cpu()
    place = Path(folder, case)
    options: dict[str, Any] = {
        "fsdp": lambda: {"strategy": FSDPStrategy(state_dict_type="sharded"), "devices": 2},
        "fsdp2": lambda: {"strategy": ModelParallelStrategy(), "devices": 2},
        "fsdp2-full": lambda: {"strategy": ModelParallelStrategy(save_distributed_checkpoint=False), "devices": 2},
        "deepspeed2": lambda: {"strategy": DeepSpeedStrategy(stage=2), "devices": 2},
        "deepspeed3": lambda: {"strategy": DeepSpeedStrategy(stage=3), "devices": 2},
    }.get(case, dict)()
    callbacks: list[Callback] = [Expected(place / "expected")]
    if case not in ("fsdp", "averaged"):
        callbacks.append(XrankCallback(place / "models"))
    if case == "averaged":
        callbacks.append(WeightAveraging())
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        default_root_dir=place,
        logger=False,
        enable_progress_bar=False,
        callbacks=callbacks,
        **options,
    )
    tokens = torch.randint(0, 64, (8, 8), generator=torch.Generator().manual_seed(0))
    trainer.fit(Wrapper(case), torch.utils.data.DataLoader(tokens, batch_size=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # gloo's threads may abort the process while Python closes
