"""Trains a small model on ranks that torchrun starts, and saves its training state with the framework itself.

    torchrun --nproc-per-node 2 -m tests.oracle.save_training_states FOLDER CASE...

Beside each state lies ``expected.pt``: tensors, steps and options as the ranks hold them, which the framework itself
puts together.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

STEPS = 3
CASES = ("fsdp2", "fsdp2-flat", "fsdp2-amsgrad", "fsdp1", "fsdp1-flat", "accelerate", "trainer", "titan")
"""On two ranks."""
OF_FOUR = ("fsdp2", "fsdp2-tp", "fsdp2-tp-flat", "hsdp")


class Model(nn.Module):
    """A tied pair, a frozen layer, one that is never used, and sizes that 2 and 4 do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 5)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0) + 0.5)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.embed(input_ids)
        logits = self.head(self.frozen(hidden + self.down(functional.relu(self.up(hidden))))).flatten(0, 1)
        return {"loss": functional.cross_entropy(logits, input_ids.flatten()), "logits": logits}


class Untied(Model):
    """A model without a tied pair, which Trainer would save in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 11, bias=False)


def make_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups with other options."""
    named = [*model.named_parameters()]
    return [
        {"params": [p for n, p in named if "weight" in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "weight" not in n], "lr": 0.02},
    ]


def train(model: nn.Module, optimizer: Any, scheduler: Any, tp: int = 1) -> None:
    for step in range(STEPS):
        torch.manual_seed(10 * step + dist.get_rank() // tp)
        model(torch.randint(0, 11, (4, 3)))["loss"].backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def keep_expected(folder: Path, model: nn.Module, optimizer: Any) -> None:
    """Write what the ranks hold."""
    if isinstance(model, FullyShardedDataParallel):
        options = StateDictOptions(full_state_dict=True, cpu_offload=False)
        tensors, held = get_state_dict(model, optimizer, options=options)
        states = held["state"]
        groups = [(group["params"], group) for group in held["param_groups"]]
    else:
        names = {parameter: name for name, parameter in model.named_parameters()}
        tensors = {name: whole(tensor) for name, tensor in model.state_dict().items()}
        inner = getattr(optimizer, "optimizer", optimizer)
        states = {names[p]: {k: whole(v) for k, v in own.items()} for p, own in inner.state.items()}
        groups = [([names[p] for p in group["params"]], group) for group in inner.param_groups]
    options = [
        (list(own), {k: v for k, v in group.items() if k not in ("params", "param_names")}) for own, group in groups
    ]
    if dist.get_rank() == 0:
        torch.save({"tensors": dict(tensors), "states": dict(states), "groups": options}, folder / "expected.pt")
    dist.barrier()


def cut(case: str) -> nn.Module:
    torch.manual_seed(0)
    size, model = dist.get_world_size(), Model()
    if case.startswith("fsdp1"):
        mesh = init_device_mesh("cpu", (size,))
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(Untied(), use_orig_params=True, device_id=cpu, device_mesh=mesh)
    if case.startswith("fsdp2-tp"):
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])
    names = ("replicate", "shard") if case == "hsdp" else ("dp",)
    return fully_shard(
        model, mesh=init_device_mesh("cpu", (size // 2, 2) if case == "hsdp" else (size,), mesh_dim_names=names)
    )


def save_torch(folder: Path, case: str) -> None:
    model = cut(case)
    optimizer = torch.optim.AdamW(make_groups(model), lr=0.01, amsgrad=case.endswith("amsgrad"))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    train(model, optimizer, scheduler, tp=2 if "tp" in case else 1)
    options = StateDictOptions(flatten_optimizer_state_dict=case.endswith("flat"))
    own, moments = get_state_dict(model, optimizer, options=options)
    state = {"model": own, "optimizer": moments, "lr_scheduler": scheduler.state_dict()}
    dcp.save(state, checkpoint_id=folder / f"step-{STEPS}")
    keep_expected(folder, model, optimizer)


def save_accelerate(folder: Path, case: str) -> None:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from tests.oracle.trainers.train import allow_fsdp_on_cpu

    allow_fsdp_on_cpu()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_offload=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(make_groups(model), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train(model, optimizer, scheduler)
    accelerator.save_state(str(folder / "state"))
    keep_expected(folder, model, optimizer)


def save_trainer(folder: Path, case: str) -> None:
    from transformers import Trainer, TrainingArguments

    from tests.oracle.trainers.train import allow_fsdp_on_cpu

    allow_fsdp_on_cpu()
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        save_steps=STEPS,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        fsdp="full_shard",
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
    )
    data = [{"input_ids": torch.arange(3) + k, "labels": torch.arange(3) + k} for k in range(8)]
    model = Untied()
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    keep_expected(folder, trainer.model_wrapped, trainer.optimizer)


def save_titan(folder: Path, case: str) -> None:
    from tests.oracle.save_torchtitan import make_manager
    from tests.oracle.trainers.own_models import let_torchtitan_run_on_cpu

    let_torchtitan_run_on_cpu()
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    model = cut("fsdp2")
    groups = [
        ParamGroupConfig(pattern="weight", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01, "weight_decay": 0.1}),
        ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.02}),
    ]
    config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    optimizers = OptimizersContainer(config, model_parts=[model])
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizers.optimizers[0])
    train(model, optimizers, scheduler)
    manager = make_manager(model, None, folder / "native", interval=1)
    manager.states |= {"optimizer": optimizers, "train_state": {"step": STEPS, "ntokens_seen": 36}}
    manager.save(curr_step=STEPS)
    keep_expected(folder, model, optimizers.optimizers[0])


def main(folder: str, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for case in cases:
        place = Path(folder, case)
        place.mkdir(parents=True, exist_ok=True)
        {"accelerate": save_accelerate, "trainer": save_trainer, "titan": save_titan}.get(case, save_torch)(place, case)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    os._exit(0)  # as in save_accelerate.py
