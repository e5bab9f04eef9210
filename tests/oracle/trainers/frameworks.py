"""Training loops of other frameworks than transformers' Trainer: two steps each, then the framework's own save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader

from tests.oracle.save_torch_checkpointing import gather_objects
from tests.oracle.trainers.own_models import run_megatron, run_torchtitan

__all__ = ["LOOPS", "Trained", "gather_state"]

Batches = list[dict[str, torch.Tensor]]
Trained = tuple[nn.Module, dict[str, torch.Tensor]]
"""The model without wrappers, and its gathered state."""
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def run_accelerate(options: dict[str, Any], folder: Path, load: Callable[[], nn.Module], batches: Batches) -> Trained:
    """Train with a loop of one's own, and call save_state."""
    AcceleratorState._reset_state(reset_partial_state=True)
    if "fsdp" in options:
        plugin = FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False, **options["fsdp"]
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    else:
        config = {"zero_optimization": options["deepspeed"], "train_micro_batch_size_per_gpu": 1}
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = load()
    loader = DataLoader(batches, batch_size=1)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    for batch, _ in zip(loader, range(2), strict=False):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder))
    return accelerator.unwrap_model(model), accelerator.get_state_dict(model)


def run_lightning(options: dict[str, Any], folder: Path, load: Callable[[], nn.Module], batches: Batches) -> Trained:
    """Train with Lightning's Trainer, and let its callback save."""
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None

        def configure_model(self) -> None:
            if self.model is None:
                self.model = load()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Device(CPUAccelerator, CUDAAccelerator):  # both strategies ask for a GPU by its class and index
        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            return [torch.device("cpu", index) for index in range(devices)]

    begin = FullyShardedDataParallel.__init__

    def begin_on_cpu(self: Any, *args: Any, **settings: Any) -> None:
        begin(self, *args, **(settings | {"device_id": torch.device("cpu")}))

    FullyShardedDataParallel.__init__ = begin_on_cpu  # type: ignore[method-assign]
    strategy: Any
    if "fsdp" in options:
        policy = ModuleWrapPolicy(_layer_classes(load()))
        strategy = FSDPStrategy(auto_wrap_policy=policy, process_group_backend="gloo", **options["fsdp"])
    else:
        strategy = DeepSpeedStrategy(process_group_backend="gloo", logging_batch_size_per_gpu=1, **options["deepspeed"])
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="last", every_n_train_steps=2)
    trainer = pl.Trainer(
        accelerator=Device(),
        devices=2,
        strategy=strategy,
        max_steps=2,
        logger=False,
        callbacks=[checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(batches, batch_size=1))  # type: ignore[arg-type]
    wrapped = strategy.model
    if "fsdp" in options:
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            state = {name: tensor.detach().clone() for name, tensor in module.model.state_dict().items()}
        state = {name.replace("_fsdp_wrapped_module.", ""): tensor for name, tensor in state.items()}
    else:
        state = {name: tensor.detach().clone() for name, tensor in module.model.state_dict().items()}
    return module.model, state


def run_verl(options: dict[str, Any], folder: Path, load: Callable[[], nn.Module], batches: Batches) -> Trained:
    """Train with torch's FSDP alone, and save with verl's own manager."""
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = _shard(load(), options["fsdp"]["fsdp_version"])
    optimizer = _step(model, batches)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    manager = FSDPCheckpointManager(model, optimizer, scheduler, checkpoint_config=None)
    manager.save_checkpoint(str(folder), global_step=2)
    return _gather(model)


def run_torch_checkpointing(
    options: dict[str, Any], folder: Path, load: Callable[[], nn.Module], batches: Batches
) -> Trained:
    """Train with torch's FSDP2 alone, and save with torch_checkpointing."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    DefaultMetadataManager._all_gather_pickled_data = gather_objects
    model = _shard(load(), 2)
    optimizer = _step(model, batches)
    layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())
    config = CheckpointManager.Config.with_sync_save()
    config.items = {"model": ItemSpec(resharder=DefaultResharder(), **({"layout": layout} if options["files"] else {}))}
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)  # not every file system takes it
    manager = config.build()
    manager.save(str(folder), {"model": model.state_dict(), "step": 2, "optim": optimizer.state_dict()})
    manager.close()
    return _gather(model)


def _layer_classes(model: Any) -> set[type[nn.Module]]:
    return {type(part) for part in model.modules() if type(part).__name__ in model._no_split_modules}


def _shard(model: Any, version: int) -> nn.Module:
    """Return the model with every layer and the rest sharded over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    classes = _layer_classes(model)
    if version == 1:
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy(classes),
            device_mesh=mesh,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    for part in model.modules():
        if type(part) in classes:
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _step(model: nn.Module, batches: Batches) -> torch.optim.Optimizer:
    """Train two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        batch = batches[2 * step + dist.get_rank()]
        model(**{name: tensor[None] for name, tensor in batch.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _gather(model: nn.Module) -> Trained:
    plain = model.module if isinstance(model, FullyShardedDataParallel) else model
    return plain, gather_state(model)


def gather_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole state of a model that FSDP shards, on the first rank."""
    return get_model_state_dict(model, options=_WHOLE)


LOOPS = {
    "accelerate": run_accelerate,
    "lightning": run_lightning,
    "megatron": run_megatron,
    "torch_checkpointing": run_torch_checkpointing,
    "torchtitan": run_torchtitan,
    "verl": run_verl,
}
"""First word of an engine's name -> its loop. It trains, saves into a folder and returns what the ranks then hold."""
