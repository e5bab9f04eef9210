"""Training states of torch DCP: nested and flattened, under other keys, of one process and of four ranks; refusals."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from tests.readers.dcp_checkpoints import CUTS, saved
from tests.readers.stored_tensors import read_moments, read_tensors
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UsageError, XrankError
from xrank.layout.training_state import TrainingState
from xrank.readers.training_states import read_training_state
from xrank.testing.rank_pool import RankPool


class Net(nn.Module):
    """A frozen layer, one that is never used, and a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.up = nn.Linear(3, 4)
        self.down = nn.Linear(4, 3)
        self.unused = nn.Linear(3, 2)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.down(self.up(self.embed(tokens)))))


def trained(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> tuple[Net, Any]:
    """Return a model and its optimizer of two groups, after two steps; one layer joins late."""
    torch.manual_seed(0)
    net, options = Net(), {"lr": 0.1, **options}
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim < 2]
    optimizer = kind([{"params": matrices, "lr": 0.05}, {"params": vectors}], **options)
    for step in range(2):
        net(torch.tensor([0, 1, 2, 4])).square().sum().backward()
        if step == 0:
            net.up.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def write(folder: Path, state: Any) -> Path:
    """Save from this process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def assert_holds(state: TrainingState, net: Net, optimizer: Any) -> None:
    """Check all tensors, steps and options against those in memory."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    moments = read_moments(state)
    assert set(moments) == {names[parameter] for parameter in optimizer.state}
    for parameter, own in optimizer.state.items():
        got = moments[names[parameter]]
        assert set(got) == set(own) - {"step"}
        assert all(torch.equal(got[kind], own[kind]) for kind in got), names[parameter]
        assert state.steps[names[parameter]] == float(own["step"])
    want = [
        ({names[p] for p in group["params"]}, {k: v for k, v in group.items() if k != "params"})
        for group in optimizer.param_groups
    ]
    assert [(set(group.parameters), dict(group.options)) for group in state.groups] == want
    tensors = read_tensors(state.stored, net.state_dict())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in net.state_dict().items())


def nested(net: nn.Module, optimizer: Any, *, flat: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    return get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "under",
    [
        lambda model, optimizer: {"model": model, "optimizer": optimizer},
        lambda model, optimizer: {"app": {"model": model, "optim": optimizer}},
        lambda model, optimizer: {"state": {"model": model, "optimizer": optimizer}},
        lambda model, optimizer: {**model, "optimizer": optimizer},
        lambda model, optimizer: {"model": model, **optimizer},
    ],
    ids=["usual", "app", "wrapped", "titan", "loose"],
)
def test_keys(tmp_path: Path, under: Callable[[Any, Any], Any], flat: bool) -> None:
    net, optimizer = trained()
    state = read_training_state(str(write(tmp_path / "step-2", under(*nested(net, optimizer, flat=flat)))))
    assert_holds(state, net, optimizer)
    assert state.optimizer == "AdamW"
    assert state.stored.aliases == {"head.weight": "embed.weight"}
    assert "unused.weight" in state.groups[0].parameters and "unused.weight" not in state.states
    assert (state.steps["up.weight"], state.steps["up.bias"]) == (1, 2)


@pytest.mark.parametrize("flat", [False, True])
def test_keys_that_a_planner_does_not_record(tmp_path: Path, flat: bool) -> None:
    net, optimizer = trained()
    model, moments = nested(net, optimizer, flat=flat)
    state = {**model, "optimizer": moments, "optimizer.kind": 3, "optimizer.kind.of": 4}
    for name in ("a", "b"):
        metadata = write(tmp_path / name, state) / ".metadata"
        content = pickle.loads(metadata.read_bytes())
        content.planner_data = None
        metadata.write_bytes(pickle.dumps(content))
        state.pop("optimizer.kind.of", None)
    assert_holds(read_training_state(str(tmp_path / "b")), net, optimizer)
    with pytest.raises(CorruptError, match=r"optimizer\.kind\.of lies in a value that is not a dict"):
        read_training_state(str(tmp_path / "a"))


@pytest.mark.parametrize(
    "options", [{"amsgrad": True}, {"lr": torch.tensor(0.1), "betas": (0.5, 0.75), "foreach": False}]
)
def test_options(tmp_path: Path, options: dict[str, Any]) -> None:
    net, optimizer = trained(torch.optim.Adam, **{"weight_decay": 0.5, **options})
    model, moments = nested(net, optimizer)
    state = read_training_state(str(write(tmp_path / "a", {"model": model, "optimizer": moments})))
    assert_holds(state, net, optimizer)
    assert state.optimizer == "Adam"


def test_equal_matrices_that_no_tie_explains(tmp_path: Path) -> None:
    """A frozen copy of what has changed since, and a frozen matrix of zeros beside a trained one."""
    net, optimizer = trained()
    with torch.no_grad():
        net.up.weight.zero_()
    model, moments = nested(net, optimizer)
    model |= {"copy": net.up.weight.clone(), "bias": net.up.bias.clone(), "near": net.embed.weight + 1}
    state = read_training_state(str(write(tmp_path / "a", {"model": model, "optimizer": moments})))
    assert state.stored.aliases == {"head.weight": "embed.weight"}


def test_values_beside_the_optimizer(tmp_path: Path) -> None:
    net, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, moments = nested(net, optimizer)
    saved_state = {
        "model": model,
        "optimizer": moments,
        "lr_scheduler": scheduler.state_dict(),
        "train_state": {"step": torch.tensor(2, dtype=torch.int32), "seen": [8, 16]},
        "rng": torch.get_rng_state(),
        "dataloader": {"dp_rank_0": Path("data")},
        "progress": Path("a/b"),
    }
    state = read_training_state(str(write(tmp_path / "a", saved_state)))
    assert state.values["lr_scheduler"] == scheduler.state_dict()
    assert state.values["train_state"] == {"seen": [8, 16]}
    assert state.others == ("train_state.step",)
    assert read_tensors(state.stored, state.others)["train_state.step"] == 2
    why = {each.name: each.why for each in state.left_out}
    assert why["rng"] == "random states of ranks"
    assert "data loaders" in why["dataloader.dp_rank_0"]
    assert "pathlib" in why["progress"]


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != "replicated"])
def test_moments_of_four_ranks(rank_pool: RankPool, tmp_path: Path, cut: str) -> None:
    """Each moment after one step with gradients of ones is the same number everywhere."""
    state = read_training_state(str(saved(rank_pool, tmp_path / "c", cut, "trainer")))
    moments = read_moments(state)
    assert moments and all(step == 1 for step in state.steps.values())
    shapes = {shard.name: shard.shape for shard in state.stored.shards}
    for name, own in moments.items():
        assert torch.equal(own["exp_avg"], torch.full(shapes[name], 0.1, dtype=own["exp_avg"].dtype)), name
        assert own["exp_avg_sq"].shape == shapes[name]
    assert "up.weight" in moments
    assert state.values == {"epoch": 3}
    assert [each.name for each in state.left_out] == ["rng.seed"]


class TestFoldersOfAccelerate:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        net, optimizer = trained()
        model, moments = nested(net, optimizer)
        place = tmp_path / "checkpoint-2"
        write(place / "pytorch_model_fsdp_0", {"model": model})
        write(place / "optimizer_0", {"optimizer": moments})
        torch.save(torch.optim.lr_scheduler.LinearLR(optimizer).state_dict(), place / "scheduler.pt")
        torch.save({"cpu": torch.get_rng_state()}, place / "rng_state_0.pth")
        (place / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
        return place

    def test_all_is_read(self, folder: Path) -> None:
        state = read_training_state(str(folder))
        assert_holds(state, *trained())
        assert state.values["lr_scheduler"]["last_epoch"] == 0
        assert state.values["global_steps"] == 2
        assert [(each.name, each.path) for each in state.left_out] == [
            (name, str(folder / name)) for name in ("rng_state_0.pth", "trainer_state.json")
        ]

    def test_the_models_folder_is_enough(self, folder: Path) -> None:
        assert read_training_state(str(folder / "pytorch_model_fsdp_0")).steps["up.bias"] == 2

    def test_an_optimizer_of_another_step(self, folder: Path) -> None:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": 4}))
        with pytest.raises(ContradictionError, match="a different step than the optimizer"):
            read_training_state(str(folder))

    def test_no_optimizer(self, folder: Path) -> None:
        shutil.rmtree(folder / "optimizer_0")
        with pytest.raises(IncompleteError, match="optimizer_0 is missing"):
            read_training_state(str(folder))


def changed(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> dict[str, Any]:
    """Return a state to save, of which the optimizer's part was changed."""
    model, moments = nested(*trained())
    change(moments["state"], moments["param_groups"][0])
    return {"model": model, "optimizer": moments}


FAULTS: dict[str, tuple[Callable[[Any, Any], Any], type[XrankError], str]] = {
    "muon": (lambda state, group: state["up.weight"].update(momentum_buffer=torch.ones(4, 3)), UsageError, "Muon"),
    "adafactor": (lambda state, group: state["up.weight"].update(row_var=torch.ones(4)), UsageError, "Adafactor"),
    "8-bit": (lambda state, group: state["up.weight"].update(state1=torch.ones(12)), UsageError, "8-bit"),
    "8-bit moments": (
        lambda state, group: state["up.weight"].update(exp_avg=torch.ones(4, 3).byte()), UsageError, "quantized moments"
    ),
    "an object": (lambda state, group: state["up.weight"].update(exp_avg=Path("a")), UsageError, "quantized moments"),
    "unheard of": (lambda state, group: state["up.weight"].update(shadow=torch.ones(4)), UsageError, "other than Adam"),
    "options of SGD": (lambda state, group: group.update(momentum=0.9), UsageError, "SGD"),
    "no eps": (lambda state, group: group.pop("eps"), UsageError, "other than Adam"),
    "three betas": (lambda state, group: group.update(betas=(0.9, 0.9, 0.9)), UsageError, "other than Adam"),
    "RAdam": (lambda state, group: group.pop("amsgrad"), UsageError, "RAdam"),
    "numbers": (lambda state, group: group.update(params=[0, 1]), UsageError, "numbers its parameters"),
    "an option of code": (lambda state, group: group.update(name=Path("a")), UsageError, "not a plain value"),
    "one moment": (lambda state, group: state["up.weight"].pop("exp_avg_sq"), IncompleteError, "lacks exp_avg_sq"),
    "no step": (lambda state, group: state["up.weight"].pop("step"), IncompleteError, "lacks step"),
    "half a step": (lambda state, group: state["up.weight"].update(step=torch.tensor(1.5)), CorruptError, "a count"),
    "a shape": (
        lambda state, group: state["up.weight"].update(exp_avg=torch.ones(3, 4)),
        ContradictionError,
        "does not have the parameter's shape",
    ),
    "amsgrad alone": (lambda state, group: group.update(amsgrad=True), IncompleteError, "lacks max_exp_avg_sq"),
    "no such tensor": (lambda state, group: group["params"].append("up"), ContradictionError, "not in the model"),
    "no group": (lambda state, group: group["params"].remove("up.weight"), ContradictionError, "no group"),
    "two groups": (lambda state, group: group["params"].append("up.bias"), CorruptError, "in two groups"),
    "no state": (lambda state, group: state.clear(), UsageError, "no step"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_refused(tmp_path: Path, fault: str) -> None:
    change, kind, message = FAULTS[fault]
    with pytest.raises(kind, match=message) as raised:
        read_training_state(str(write(tmp_path / "a", changed(change))))
    assert str(tmp_path / "a") in str(raised.value)
    assert raised.value.next_step


def test_no_optimizer_and_two(tmp_path: Path) -> None:
    model, moments = nested(*trained())
    with pytest.raises(UsageError, match="contains no optimizer"):
        read_training_state(str(write(tmp_path / "a", {"model": model})))
    with pytest.raises(UsageError, match="more than one optimizer") as raised:
        read_training_state(str(write(tmp_path / "b", {"model": model, "optim": {"a": moments, "b": moments}})))
    assert "optim.a" in str(raised.value.got) and "optim.b" in str(raised.value.got)


def test_a_whole_model_has_no_training_state(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="no training state"):
        read_training_state(str(tmp_path))
