"""A training loop as users write it equals one process: over dp x tp, with and without the distributed optimizer.

AdamW with groups, clipping, GradScaler, a schedule, accumulation, parameters that are frozen and unfrozen on the way,
compiled modules. test_exported_slices.py goes on from a checkpoint with another number of replicas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from xrank.commands.reshard import reshard_checkpoint
from xrank.errors import UsageError
from xrank.gradients import (
    DistributedDataParallel,
    GradientConfig,
    GradientPlan,
    GradScaler,
    ParameterShards,
    clip_grad_norm,
    export_optimizer_shards,
    finalize_model_grads,
    load_optimizer_shards,
)
from xrank.gradients.optimizers import _STATES, list_states, watch_optimizers
from xrank.layout import DeviceMesh
from xrank.workspace.nfs import NFSWorkspace

pytestmark = pytest.mark.timeout(300)

_WIDTH, _ROWS, _STEPS = 8, 16, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(_WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _batch(step: int) -> torch.Tensor:
    return torch.randn(_ROWS, _WIDTH, generator=torch.Generator().manual_seed(100 + step))


def _loss(out: torch.Tensor) -> torch.Tensor:
    return (out * torch.linspace(-1, 2, 3)).sin().sum(-1).mean()


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in learning if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in learning if one.ndim < 2], "weight_decay": 0.0},
    ]


def _freeze(module: nn.Module, phase: int) -> None:
    """The embedding learns from the second phase on only."""
    module.embed.requires_grad_(phase > 0)


def _train_alone() -> dict[str, torch.Tensor]:
    model = Model()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for phase in range(2):
        _freeze(model, phase)
        optimizer = torch.optim.AdamW(_groups(model), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
        for step in range(_STEPS):
            optimizer.zero_grad()
            for rows in _batch(phase * _STEPS + step).chunk(2):
                scaler.scale(_loss(model(rows)) / 2).backward()
            if step == 2:
                model.head.bias.grad[0] = torch.inf  # the scaler skips this step
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
    return {name: one.detach() for name, one in model.named_parameters()}


def _wholes(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in model.named_parameters()}
    return {name: one.detach().clone() for name, one in found.items()}


def _cut(model: nn.Module, mesh: Any) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)


def _train(rank: int, num_tensor_ranks: int, config: GradientConfig, *, compiled: bool) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (4 // num_tensor_ranks, num_tensor_ranks), mesh_dim_names=("dp", "tp"))
    model = Model()
    _cut(model, mesh)
    place, num_replicas = mesh["dp"].get_local_rank(), mesh["dp"].size()
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for phase in range(2):
        _freeze(model, phase)
        ddp = DistributedDataParallel(model, GradientPlan.from_module(model, mesh, config))
        shards = ParameterShards(ddp)
        optimizer = torch.optim.AdamW(shards.map_groups(_groups(model)), lr=1e-2)
        shards.attach(optimizer)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
        run = torch.compile(ddp, backend="aot_eager") if compiled else ddp
        for step in range(_STEPS):
            ddp.zero_grad_buffer()
            first, last = _batch(phase * _STEPS + step).chunk(2)
            with ddp.no_sync():
                scaler.scale(_loss(run(first.chunk(num_replicas)[place])) / 2).backward()
            scaler.scale(_loss(run(last.chunk(num_replicas)[place])) / 2).backward()
            finalize_model_grads(ddp)
            if step == 2 and rank == 0:
                start, stop = ddp.plan["head.bias"].owned
                ddp.main_grad("head.bias")[start:stop] = torch.inf
            scaler.unscale_(optimizer)
            clip_grad_norm(ddp, 0.5, error_if_nonfinite=False)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        ddp.unwrap()
    return _wholes(model)


@pytest.mark.ranks(4, timeout_seconds=250)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_users_loop_equals_one_process(rank: int, compiled: bool) -> None:
    wanted = _train_alone()
    ways = [(2, False), (2, True), (1, True), (4, False)]
    for num_tensor_ranks, sharded in ways[:2] if compiled else ways:  # compiling takes seconds for each
        config = GradientConfig(use_distributed_optimizer=sharded)
        found = _train(rank, num_tensor_ranks, config, compiled=compiled)
        for name, one in wanted.items():
            off = float((found[name] - one).abs().max())
            assert off < 2e-5, f"{name} on tp {num_tensor_ranks}, sharded {sharded}: {off}"


@pytest.mark.ranks(2, timeout_seconds=60)
def test_optimizers_that_cannot_step_parts_are_refused_by_name(rank: int) -> None:
    for sharded in (False, True):
        module = nn.Linear(4, 4, bias=False)
        config = GradientConfig(use_distributed_optimizer=sharded)
        mesh = DeviceMesh((2,), ("dp",))
        ddp = DistributedDataParallel(module, GradientPlan.from_module(module, mesh, config))
        shards = ParameterShards(ddp)
        for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
            with pytest.raises(UsageError, match=f"{kind.__name__} cannot step shards"):
                shards.attach(kind(list(shards.parameters())))
        shards.attach(torch.optim.AdamW([{"params": shards.named_parameters()}], lr=0.0))
        unlisted = _ByElement(shards.parameters(), lr=0.1)
        adafactor = torch.optim.Adafactor(shards.parameters())
        if sharded:
            refusal = "weight: {}, and this rank holds a part"
            with pytest.raises(
                UsageError, match=refusal.format("Adafactor updates each element from other elements of .*")
            ):
                shards.attach(adafactor)
            with pytest.raises(UsageError, match="weight: Adafactor updates"):
                adafactor.step()
            with pytest.raises(UsageError, match="weight: Adafactor updates"):
                shards.attach(adafactor, elementwise=True)
            for kind in (_ByElement, _OwnStep):
                refused = refusal.format(f"{kind.__name__} may not update each element independently")
                with pytest.raises(UsageError, match=refused):
                    shards.attach(kind(shards.parameters(), lr=0.1))
            shards.attach(unlisted, elementwise=True)
            continue
        shards.attach(unlisted)
        shards.attach(adafactor)
        alone = nn.Linear(4, 4, bias=False)
        alone.load_state_dict(module.state_dict())
        rows = torch.arange(8.0).view(2, 4)
        ddp(rows[rank : rank + 1]).sin().mean().backward()
        finalize_model_grads(ddp)
        adafactor.step()
        alone(rows).sin().mean().backward()
        torch.optim.Adafactor(alone.parameters()).step()
        torch.testing.assert_close(module.weight, alone.weight)


class _ByElement(torch.optim.Optimizer):
    """An optimizer of another library, whose class is unknown."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None: ...


class _OwnStep(torch.optim.SGD):
    """A subclass of a listed optimizer with another step."""

    def step(self, closure: Any = None) -> None: ...


_SETTINGS: list[tuple[Any, dict[str, Any]]] = [
    *((kind, {}) for kind in _STATES),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
]


@pytest.mark.parametrize(("kind", "settings"), _SETTINGS)
def test_states_before_the_first_step_are_those_that_it_makes(kind: Any, settings: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = kind([parameter], lr=0.1, **settings)
    expected = list_states(optimizer, optimizer.param_groups[0])
    parameter.grad = torch.ones(2, 3)
    optimizer.step()
    made = {key: state for key, state in optimizer.state[parameter].items() if state is not None}
    assert expected == {key: bool(state.ndim) for key, state in made.items()}


def test_states_of_an_unlisted_optimizer_are_those_of_its_steps() -> None:
    optimizer = _ByElement([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))], lr=0.1)
    (group,) = optimizer.param_groups
    with pytest.raises(UsageError, match="the states of _ByElement are unknown before its first step"):
        list_states(optimizer, group)
    watch_optimizers()
    for parameter in group["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert list_states(optimizer, group) == {}  # it makes none
    optimizer.state[group["params"][1]] = {"average": torch.ones(3), "count": torch.tensor(1), "none": None}
    assert list_states(optimizer, group) == {"average": True, "count": False}


class _Run:
    """A model in training on one mesh, up to any step."""

    def __init__(self, num_tensor_ranks: int) -> None:
        self.mesh = init_device_mesh("cpu", (4 // num_tensor_ranks, num_tensor_ranks), mesh_dim_names=("dp", "tp"))
        model = Model()
        _cut(model, self.mesh)
        config = GradientConfig(use_distributed_optimizer=True)
        self.ddp = DistributedDataParallel(model, GradientPlan.from_module(model, self.mesh, config))
        self.shards = ParameterShards(self.ddp)
        self.optimizer = torch.optim.AdamW(self.shards.map_groups(_groups(model)), lr=1e-2)
        self.shards.attach(self.optimizer)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, _STEPS)
        self.scaler = GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def train(self, start: int, stop: int) -> None:
        place, num_replicas = self.mesh["dp"].get_local_rank(), self.mesh["dp"].size()
        for step in range(start, stop):
            self.ddp.zero_grad_buffer()
            self.scaler.scale(_loss(self.ddp(_batch(step).chunk(num_replicas)[place]))).backward()
            finalize_model_grads(self.ddp)
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm(self.ddp, 0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()


@pytest.mark.ranks(4, timeout_seconds=120)
def test_a_loop_goes_on_from_a_checkpoint_with_other_numbers_of_replicas(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    def save(folder: str, tensors: dict[str, torch.Tensor], layouts: Any) -> None:
        workspace = NFSWorkspace(tmp_path / folder, rank=rank, world_size=world_size, run_id="run")
        workspace.write_configs_and_weights({"model_type": "test"}, tensors, layouts=layouts)
        dist.barrier()

    whole = _Run(1)
    whole.train(0, _STEPS)
    wanted = _wholes(whole.ddp.module)

    first = _Run(1)
    first.train(0, 3)
    save("states", *export_optimizer_shards(first.optimizer, first.ddp))
    second = _Run(2)
    _, layouts = export_optimizer_shards(second.optimizer, second.ddp)  # no step needed
    if rank == 0:
        layouts.write(tmp_path / "two.toml")
        reshard_checkpoint(tmp_path / "states", tmp_path / "two.toml", tmp_path / "two")
    dist.barrier()
    read = NFSWorkspace(tmp_path / "two", rank=rank, world_size=world_size, run_id="run")
    _, tensors = read.read_configs_and_weights_from_rank(rank)
    load_optimizer_shards(second.optimizer, second.ddp, tensors)
    second.shards.take_parameters()
    second.schedule.load_state_dict(first.schedule.state_dict())
    for group, other in zip(second.optimizer.param_groups, first.optimizer.param_groups, strict=True):
        group["lr"] = other["lr"]
    second.scaler.load_state_dict(first.scaler.state_dict())
    second.train(3, _STEPS)
    found = _wholes(second.ddp.module)
    for name, one in wanted.items():
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=2e-6, msg=name)
