"""Trains a small model with a framework, 20 steps and a checkpoint by the framework's own means: run by torchrun.

    torchrun --nproc-per-node 2 -m tests.oracle.resume_training KIND FOLDER [CHECKPOINT]

With a checkpoint, the framework loads it by its own means first, and trains the next 20 steps. FOLDER gets
``checkpoint`` and ``result.pt``: the losses, and the whole weights at the end.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

NUM_STEPS, BATCH = 20, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Model(nn.Module):
    """A model with sizes that 2, 3 and 4 do not divide."""

    _no_split_modules: ClassVar = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 22)
        self.down = nn.Linear(22, 10, bias=False)
        self.head = nn.Linear(10, 13, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))
        return {"loss": nn.functional.cross_entropy(hidden, labels), "logits": hidden}


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a step's batch, which does not depend on the number of ranks."""
    ids = torch.randint(0, 13, (BATCH,), generator=torch.Generator().manual_seed(100 + step))
    share = BATCH // (dist.get_world_size() // TP)
    mine = slice(dist.get_rank() // TP * share, (dist.get_rank() // TP + 1) * share)
    return ids[mine], ((ids * 5 + 3) % 13)[mine]


TP = 1


def make_groups(model: nn.Module, num_groups: int) -> list[dict[str, Any]]:
    """Return the groups of parameters, by name as torchtitan has them."""
    named = [*model.named_parameters()]
    if num_groups == 1:
        return [{"params": named, "weight_decay": 0.1}]
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def make_optimizer(model: nn.Module, num_groups: int) -> tuple[torch.optim.Optimizer, Any]:
    """Return AdamW and its schedule."""
    optimizer = torch.optim.AdamW(make_groups(model, num_groups), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))


def average(loss: torch.Tensor) -> float:
    """Return the mean of a loss over all ranks."""
    value = loss.detach().clone().float()
    dist.all_reduce(value)
    return float(value / dist.get_world_size())


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().float().clone()


def shard(model: nn.Module, *, tp: int) -> nn.Module:
    """Cut a model by FSDP2, after tensor parallelism if `tp` is above 1."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def train_fsdp2(folder: Path, source: str | None, num_groups: int, tp: int = 1) -> dict[str, Any]:
    """torch's own loop, with get_state_dict and DCP."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = shard(Model(), tp=tp)
    optimizer, scheduler = make_optimizer(model, num_groups)
    first = 0
    if source is not None:
        own, moments = get_state_dict(model, optimizer)
        known = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
        # torchtitan keeps the number of steps alone.
        kept = {key: value for key, value in scheduler.state_dict().items() if f"lr_scheduler.{key}" in known}
        state = {"model": own, "optimizer": moments, "lr_scheduler": kept}
        dcp.load(state, checkpoint_id=source)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict({**scheduler.state_dict(), **state["lr_scheduler"]})
        scheduler._step_count = scheduler.last_epoch + 1
        first = NUM_STEPS
    losses = []
    for step in range(first, first + NUM_STEPS):
        optimizer.zero_grad()
        loss = model(*make_batch(step))["loss"]
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(average(loss))
    own, moments = get_state_dict(model, optimizer)
    dcp.save(
        {"model": own, "optimizer": moments, "lr_scheduler": scheduler.state_dict()},
        checkpoint_id=str(folder / "checkpoint"),
    )
    return {"losses": losses, "weights": {name: whole(tensor) for name, tensor in model.state_dict().items()}}


def train_deepspeed(folder: Path, source: str | None, num_groups: int, stage: int) -> dict[str, Any]:
    """DeepSpeed's engine; what `xrank` or ``ds_to_universal.py`` made is a folder with ``latest_universal``."""
    import deepspeed
    import deepspeed.comm.torch

    deepspeed.comm.torch.build_shm_op = lambda: None  # which compiles an operator
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = Model()
    optimizer, scheduler = make_optimizer(model, num_groups)
    is_universal = source is not None and Path(source, "latest_universal").exists()
    config = {
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # 1.0 otherwise
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "checkpoint": {"load_universal": is_universal},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    first = 0
    if source is not None:
        path, _ = engine.load_checkpoint(source)
        assert path is not None and engine.global_steps == NUM_STEPS
        first = NUM_STEPS
    losses = []
    for step in range(first, first + NUM_STEPS):
        loss = engine(*make_batch(step))["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(average(loss))
    engine.save_checkpoint(str(folder / "checkpoint"))
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            weights[name] = whole(parameter)
    return {"losses": losses, "weights": weights}


def let_accelerate_run_on_cpu() -> None:
    """Let accelerate take FSDP and DeepSpeed on ranks of gloo without accelerators."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def set_device(state: Any) -> None:
        state.device = torch.device("cpu")

    PartialState._prepare_backend = lambda *arguments, **options: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = set_device


def train_accelerate(folder: Path, source: str | None, num_groups: int, stage: int) -> dict[str, Any]:
    """accelerate with save_state and load_state: FSDP2, or DeepSpeed if `stage` is above 0."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    let_accelerate_run_on_cpu()
    options: dict[str, Any] = {"step_scheduler_with_optimizer": False}
    if stage:
        config = {
            "train_micro_batch_size_per_gpu": BATCH // int(os.environ["WORLD_SIZE"]),
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "checkpoint": {"load_universal": source is not None and Path(source, "latest_universal").exists()},
        }
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
    else:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
        )
    accelerator = Accelerator(**options)
    model = Model()
    optimizer, scheduler = make_optimizer(model, num_groups)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    first = 0
    if source is not None:
        accelerator.load_state(source)
        first = NUM_STEPS
    losses = []
    for step in range(first, first + NUM_STEPS):
        loss = model(*make_batch(step))["loss"]
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(average(loss))
    accelerator.save_state(str(folder / "checkpoint"))
    named = accelerator.unwrap_model(model).named_parameters()
    return {"losses": losses, "weights": {name: whole(tensor) for name, tensor in named}}


def train_trainer(folder: Path, source: str | None, num_groups: int) -> dict[str, Any]:
    """transformers' Trainer with FSDP2, and resume_from_checkpoint."""
    from torch.utils.data import Dataset, SequentialSampler
    from transformers import Trainer, TrainingArguments

    let_accelerate_run_on_cpu()
    first = NUM_STEPS if source is not None else 0
    batches = [torch.randint(0, 13, (BATCH,), generator=torch.Generator().manual_seed(100 + s)) for s in range(40)]
    ids = torch.cat(batches)

    class Rows(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(ids)

        def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
            return {"input_ids": ids[row], "labels": (ids[row] * 5 + 3) % 13}

    losses: list[float] = []

    class Recording(Trainer):
        def _get_train_sampler(self, *arguments: Any) -> SequentialSampler:
            return SequentialSampler(ids)

        def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
            loss = model(**inputs)["loss"]
            losses.append(average(loss))
            return loss

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=BATCH // int(os.environ["WORLD_SIZE"]),
        max_steps=first + NUM_STEPS,
        save_steps=NUM_STEPS,
        learning_rate=1e-2,
        weight_decay=0.1 if num_groups == 2 else 0.0,
        lr_scheduler_type="inverse_sqrt",
        warmup_steps=4,
        max_grad_norm=0.0,
        report_to=[],
        disable_tqdm=True,
        logging_steps=NUM_STEPS,
        fsdp="full_shard auto_wrap",
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["Block"], "state_dict_type": "SHARDED_STATE_DICT"},
    )
    model = Model()
    trainer = Recording(model=model, args=arguments, train_dataset=Rows())
    trainer.train(resume_from_checkpoint=source)
    return {"losses": losses, "weights": {name: whole(t) for name, t in trainer.model.named_parameters()}}


class TrainState:
    """torchtitan's counters (torchtitan/trainer.py)."""

    def __init__(self) -> None:
        self.step = self.ntokens_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def train_torchtitan(folder: Path, source: str | None, num_groups: int) -> dict[str, Any]:
    """torchtitan's optimizers, schedulers and checkpoint manager; the loop is this one."""
    from tests.oracle.trainers.own_models import let_torchtitan_run_on_cpu

    let_torchtitan_run_on_cpu()
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

    model, counters = shard(Model(), tp=1), TrainState()
    adam = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}
    patterns = [(".*", 0.1)] if num_groups == 1 else [(r"norm|bias$", 0.0), (".*", 0.1)]
    config = OptimizersContainer.Config(
        implementation="for-loop",
        param_groups=[
            ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**adam, "weight_decay": decay})
            for pattern, decay in patterns
        ],
    )
    optimizers = OptimizersContainer(config, model_parts=[model])
    schedulers = LRSchedulersContainer(optimizers, lambda step: 1 / (1 + 0.05 * step))
    manager = CheckpointManager(
        CheckpointManager.Config(
            enable=True,
            interval=NUM_STEPS,
            folder="checkpoint",
            initial_load_path=source,
            initial_load_model_only=False,
            last_save_model_only=False,
            exclude_from_loading=["dataloader"],
        ),
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": counters},
        sd_adapter=None,
        base_folder=str(folder),
    )
    if source is not None:
        assert manager.load()
        assert counters.step == NUM_STEPS
    losses = []
    for step in range(counters.step, counters.step + NUM_STEPS):
        optimizers.zero_grad()
        loss = model(*make_batch(step))["loss"]
        loss.backward()
        optimizers.step()
        schedulers.step()
        losses.append(average(loss))
    counters.step += NUM_STEPS
    manager.save(counters.step, last_step=True)
    return {"losses": losses, "weights": {name: whole(tensor) for name, tensor in model.state_dict().items()}}


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "fsdp2": train_fsdp2,
    "fsdp2-tp": lambda *arguments: train_fsdp2(*arguments, tp=2),
    "accelerate-fsdp2": lambda *arguments: train_accelerate(*arguments, stage=0),
    "accelerate-zero2": lambda *arguments: train_accelerate(*arguments, stage=2),
    "torchtitan": train_torchtitan,
    "trainer": train_trainer,
    "zero1": lambda *arguments: train_deepspeed(*arguments, stage=1),
    "zero2": lambda *arguments: train_deepspeed(*arguments, stage=2),
    "zero3": lambda *arguments: train_deepspeed(*arguments, stage=3),
}


def main(kind: str, folder: str, num_groups: str, source: str | None = None) -> None:
    global TP
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0 if source is None else 7)  # a resumed model starts with other values
    TP = 2 if kind.endswith("-tp") else 1
    if kind.startswith(("fsdp2", "t")):
        dist.init_process_group("gloo")
    made = KINDS[kind](Path(folder), source, int(num_groups))
    if dist.get_rank() == 0:
        torch.save(made, Path(folder) / "result.pt")
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed and FSDP hold their groups: a gloo thread may abort while Python closes
