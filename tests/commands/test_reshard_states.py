"""Training states in other forms: torch loads them, their files have the values, bad sources are refused."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import xrank
from tests.cli.bench import run
from tests.commands.forked_ranks import forked_ranks
from tests.readers import test_dcp_states
from tests.storage.gathered import EXTRA
from tests.storage.kill_points import kill_points
from xrank.errors import ContradictionError, CorruptError, IncompleteError, LayoutError, UsageError, XrankError
from xrank.formats.dcp_metadata import read_metadata
from xrank.layout import DeviceMesh, LayoutMap
from xrank.recipes import state_targets


class Net(test_dcp_states.Net):
    """A frozen layer, one that is never used, a tied pair, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))


def train(seed: int = 0, kind: Any = torch.optim.AdamW, dtype: Any = torch.float32, **options: Any) -> tuple[Any, ...]:
    """Return a model, its optimizer of two groups and its schedule, after two steps."""
    torch.manual_seed(seed)
    net = Net().to(dtype)
    used = [parameter for name, parameter in net.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in used if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in used if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(2):
        net(torch.tensor([0, 1, 2, 4])).square().sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return net, optimizer, schedule


LOOSE = StateDictOptions(strict=False)
"""Parameters that were never stepped have no state."""


def save(folder: Path, net: nn.Module, optimizer: Any, schedule: Any, **more: Any) -> Path:
    model, moments = get_state_dict(net, optimizer)
    state = {"model": model, "optimizer": moments, "lr_scheduler": schedule.state_dict(), **more}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def load(folder: Path) -> tuple[Any, ...]:
    """Return what torch loads of a folder into a model with other values."""
    net, optimizer, schedule = train(seed=9)
    model, moments = get_state_dict(net, optimizer)
    state = {"model": model, "optimizer": moments, "lr_scheduler": schedule.state_dict()}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=LOOSE)
    schedule.load_state_dict(state["lr_scheduler"])
    return net, optimizer, schedule


def assert_equal(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and torch.equal(got, want)
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            assert_equal(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert type(got) is type(want) and len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_equal(one, other)
    else:
        assert type(got) is type(want) and got == want


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "step-2", *train())


def layouts_of(*rules: str) -> LayoutMap:
    layouts = LayoutMap(DeviceMesh((2,), ("r",)))
    for rule in rules:
        name, layout = rule.split(" ", 1)
        layouts[name] = layout
    return layouts


WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "whole": ({}, 1),
    "rows": ({"dp": 2}, 2),
    "grid": ({"dp": 3, "tp": 2}, 6),
    "layout": ({}, 2),
}


@pytest.mark.parametrize("way", WAYS)
def test_torch_loads_the_same_state(source: Path, tmp_path: Path, way: str) -> None:
    options, num_files = WAYS[way]
    layouts = layouts_of(r".*weight [a, b/~r]", r".*bias|table [a]") if way == "layout" else None
    report = xrank.reshard_checkpoint(source, layouts, tmp_path / "out", to="dcp", **options)
    assert len(list((tmp_path / "out").glob("__*.distcp"))) == num_files
    assert_equal([one.state_dict() for one in load(tmp_path / "out")], [one.state_dict() for one in train()])
    assert report.proof["coverage"] == "proven"
    # xrank reads what it wrote, and writes it likewise.
    xrank.reshard_checkpoint(tmp_path / "out", None, tmp_path / "again", to="dcp")
    assert_equal([one.state_dict() for one in load(tmp_path / "again")], [one.state_dict() for one in train()])


def test_large_tensors_become_several_items(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_targets, "_BLOCK_NBYTES", 24)
    monkeypatch.setattr(state_targets, "_FILE_NBYTES", 100)
    xrank.reshard_checkpoint(source, None, tmp_path / "out", to="dcp")
    metadata = read_metadata(str(tmp_path / "out" / ".metadata"))
    assert metadata.tensors["model.embed.weight"].offsets.tolist() == [[0, 0], [2, 0], [4, 0]]
    assert len(metadata.files) > 3
    assert_equal([one.state_dict() for one in load(tmp_path / "out")], [one.state_dict() for one in train()])


def test_amsgrad_keeps_its_third_moment(tmp_path: Path) -> None:
    source = save(tmp_path / "a", *train(amsgrad=True))
    xrank.reshard_checkpoint(source, None, tmp_path / "out", to="dcp")
    names = read_metadata(str(tmp_path / "out" / ".metadata")).tensors
    assert "optimizer.state.up.weight.max_exp_avg_sq" in names
    with pytest.raises(UsageError, match="max_exp_avg_sq, which a universal checkpoint cannot contain"):
        xrank.reshard_checkpoint(source, None, tmp_path / "u", to="deepspeed-universal")
    assert not (tmp_path / "u").exists()


def test_torchtitans_names(source: Path, tmp_path: Path) -> None:
    report = xrank.reshard_checkpoint(source, None, tmp_path / "out", to="torchtitan")
    metadata = read_metadata(str(tmp_path / "out" / ".metadata"))
    assert {"up.weight", "head.weight", "table", "optimizer.state.up.weight.exp_avg"} <= metadata.tensors.keys()
    assert {"optimizer.param_groups.up.bias.weight_decay", "lr_scheduler.last_epoch", "train_state.step"} <= set(
        metadata.byte_items
    )
    assert "exclude_from_loading" in dict(report.notes)["data-loader"]
    xrank.reshard_checkpoint(tmp_path / "out", None, tmp_path / "again", to="dcp")
    found = load_optimizer(tmp_path / "again")
    assert_equal(found, load_optimizer(source))


def test_masters_and_layouts_under_torchtitans_names(source: Path, tmp_path: Path) -> None:
    xrank.reshard_checkpoint(source, None, tmp_path / "u", to="deepspeed-universal")
    layouts = layouts_of(r"up.weight [a/~r, b]", r"(?!up).*weight [a, b]", r".*bias|table [a]")
    xrank.reshard_checkpoint(tmp_path / "u", layouts, tmp_path / "out", to="torchtitan")
    tensors = read_metadata(str(tmp_path / "out" / ".metadata")).tensors
    for name in ("up.weight", "optimizer.state.up.weight.exp_avg_sq"):
        assert tensors[name].sizes.tolist() == [[2, 3], [2, 3]]
    assert tensors["down.weight"].sizes.tolist() == [[3, 4]]


def load_optimizer(folder: Path) -> Any:
    net, optimizer, _ = train(seed=9)
    model, moments = get_state_dict(net, optimizer)
    state = {"model": model, "optimizer": moments}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state


def test_accelerates_folders(source: Path, tmp_path: Path) -> None:
    xrank.reshard_checkpoint(source, None, tmp_path / "a" / "checkpoint-2", to="accelerate")
    made = tmp_path / "a" / "checkpoint-2"
    net, optimizer, schedule = train(seed=9)
    model, moments = get_state_dict(net, optimizer)
    for name, state in (("pytorch_model_fsdp_0", {"model": model}), ("optimizer_0", {"optimizer": moments})):
        with warnings.catch_warnings(action="ignore"):
            dcp.load(state, storage_reader=FileSystemReader(made / name), no_dist=True)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=moments, options=LOOSE)
    for name in ("scheduler.pt", "scheduler.bin"):
        schedule.load_state_dict(torch.load(made / name, weights_only=True))
    assert_equal([each.state_dict() for each in (net, optimizer, schedule)], [each.state_dict() for each in train()])
    # Files next to the model and the optimizer are copied.
    (made / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
    (made / "rng_state_0.pth").write_bytes(b"any")
    report = xrank.reshard_checkpoint(made, None, tmp_path / "b", to="accelerate")
    assert (tmp_path / "b" / "rng_state_0.pth").read_bytes() == b"any"
    assert report.output["companions"] == ["rng_state_0.pth", "trainer_state.json"]
    report = xrank.reshard_checkpoint(made, None, tmp_path / "c", to="dcp")
    assert ("left-out", "left out: rng_state_0.pth (random states of ranks)") in report.notes


def test_damage_in_the_optimizer_is_found_by_verify_and_a_deep_inspection(source: Path, tmp_path: Path) -> None:
    xrank.reshard_checkpoint(source, None, tmp_path / "made", to="accelerate")
    made = tmp_path / "checkpoint-2"
    shutil.copytree(tmp_path / "made", made, ignore=shutil.ignore_patterns("xrank_manifest.json"))
    good = xrank.verify_model(made)
    count = good.proof.num_optimizer_tensors
    assert good.ok and count == 10 and f"{count} tensors of the optimizer, too" in run("verify", made).stdout
    assert f"AdamW: {count} tensors" in run("inspect", made).stdout
    (file,) = (made / "optimizer_0").glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.index(next(iter(train()[1].state.values()))["exp_avg"].numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    bad = xrank.verify_model(made)
    assert isinstance(bad.fault, CorruptError) and bad.fault.file == str(file)
    assert xrank.inspect(made).details["optimizer"]["problem"] is None  # it reads metadata alone
    assert "checksum" in xrank.inspect(made, deep=True).details["optimizer"]["problem"]
    assert xrank.gather_checkpoint(made, tmp_path / "model").ok
    file.unlink()
    lost = xrank.verify_model(made)
    assert lost.ok and any(text.startswith("the optimizer was not read: ") for _, text in lost.notes)


REST = ("table", "frozen.weight", "frozen.bias")
"""Tensors that no optimizer trains."""


def test_the_files_of_a_universal_checkpoint(source: Path, tmp_path: Path) -> None:
    report = xrank.reshard_checkpoint(source, None, tmp_path / "out", to="deepspeed-universal", tag="step2")
    net, optimizer, schedule = train()
    assert (tmp_path / "out" / "latest_universal").read_text() == "step2"
    folder = tmp_path / "out" / "step2"
    names = {parameter: name for name, parameter in net.named_parameters()}
    stepped = {names[parameter] for parameter in optimizer.state}
    assert {path.name for path in (folder / "zero").iterdir()} == {
        *stepped,
        "unused.weight",
        "unused.bias",
        "optimizer_state.pt",
    }
    for parameter, own in optimizer.state.items():
        for kind, tensor in (
            ("fp32", parameter.detach()),
            ("exp_avg", own["exp_avg"]),
            ("exp_avg_sq", own["exp_avg_sq"]),
        ):
            got = torch.load(folder / "zero" / names[parameter] / f"{kind}.pt", weights_only=True)
            assert_equal(got, {"param": tensor})
        assert_equal(torch.load(folder / "zero" / names[parameter] / "step.pt", weights_only=True), own["step"])
    assert sorted(os.listdir(folder / "zero" / "unused.bias")) == ["fp32.pt"]
    saved = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)
    assert [group["weight_decay"] for group in saved["param_groups"]] == [0.1, 0.0]
    assert saved["optimizer_state_dict"]["state"][0]["step"] == 2
    for name in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):
        states = torch.load(folder / f"{name}_model_states.pt", weights_only=True)
        assert_equal(states["module"], {name: net.state_dict()[name] for name in REST})
        assert states["shared_params"] == {"head.weight": "embed.weight"}
        assert states["global_steps"] == 2
        assert states["lr_scheduler"] == schedule.state_dict()
        assert [list(group) for group in states["param_shapes"]][1] == ["up.bias", "down.bias", "unused.bias"]
    notes = dict(report.notes)
    assert notes["never-stepped"].startswith("unused.")
    assert "frozen.bias, frozen.weight" in notes["not-trained"]
    assert "ZeRO-3 gives all parameters those of the first group" in notes["groups"]


def test_a_universal_checkpoint_becomes_the_state_again(source: Path, tmp_path: Path) -> None:
    xrank.reshard_checkpoint(source, None, tmp_path / "u", to="deepspeed-universal")
    report = xrank.reshard_checkpoint(tmp_path / "u", None, tmp_path / "out", to="dcp")
    assert "masters" in dict(report.notes)
    net, optimizer, _ = train()
    metadata = read_metadata(str(tmp_path / "out" / ".metadata"))
    # Parameters without a state have none in the universal one either, so torch is asked for the others.
    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for name, parameter in net.named_parameters():
        if parameter in optimizer.state:
            state["optimizer"]["state"][name] = {k: torch.zeros_like(v) for k, v in optimizer.state[parameter].items()}
            state["model"][name] = torch.zeros_like(parameter)
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, storage_reader=FileSystemReader(tmp_path / "out"), no_dist=True)
    for name, parameter in net.named_parameters():
        if parameter in optimizer.state:
            assert_equal(state["optimizer"]["state"][name], dict(optimizer.state[parameter]))
            assert_equal(state["model"][name], parameter.detach())
    assert "optimizer.state.unused.bias.exp_avg" not in metadata.tensors


def test_bf16_parameters_become_masters(tmp_path: Path) -> None:
    net, optimizer, schedule = train(dtype=torch.bfloat16)
    source = save(tmp_path / "a", net, optimizer, schedule)
    report = xrank.reshard_checkpoint(source, None, tmp_path / "u", to="deepspeed-universal")
    assert report.output["cast"]["up.weight"] == "BF16 -> F32"
    assert dict(report.notes)["masters"].endswith("their values become the masters")
    got = torch.load(tmp_path / "u" / "global_step2" / "zero" / "up.weight" / "fp32.pt", weights_only=True)["param"]
    assert_equal(got, net.up.weight.detach().float())
    moment = torch.load(tmp_path / "u" / "global_step2" / "zero" / "up.weight" / "exp_avg.pt", weights_only=True)[
        "param"
    ]
    assert_equal(moment, optimizer.state[net.up.weight]["exp_avg"].float())


SPLIT = """
[tensors]
"norm.weight [h]" = "n.weight [h]"
"norm.bias [h]" = "n.bias [h]"

[tensors."qkv.weight [<q: r | k: r | v: r>, h]".to]
q = "q.weight [r, h]"
k = "k.weight [r, h]"
v = "v.weight [r, h]"
"""
FACTOR = '"norm.weight [h]" = { to = "n.weight [h]", add = 1 }'


def test_a_recipe_splits_the_moments_as_the_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.ModuleDict({"qkv": nn.Linear(3, 6, bias=False), "norm": nn.LayerNorm(3)})
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net["qkv"](net["norm"](torch.ones(2, 3) * torch.arange(3))).square().sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    source = save(tmp_path / "a", net, optimizer, schedule)
    recipe = tmp_path / "split.toml"
    recipe.write_text(SPLIT)
    xrank.reshard_checkpoint(source, None, tmp_path / "out", to="deepspeed-universal", recipe=recipe)
    zero = tmp_path / "out" / "global_step1" / "zero"
    own = optimizer.state[net["qkv"].weight]
    for number, part in enumerate(("q", "k", "v")):
        rows = slice(2 * number, 2 * number + 2)
        for kind, tensor in (("fp32", net["qkv"].weight.detach()), ("exp_avg_sq", own["exp_avg_sq"])):
            got = torch.load(zero / f"{part}.weight" / f"{kind}.pt", weights_only=True)["param"]
            assert_equal(got, tensor[rows])
    states = torch.load(tmp_path / "out" / "global_step1" / "mp_rank_00_model_states.pt", weights_only=True)
    assert sorted(states["param_shapes"][0]) == ["k.weight", "n.bias", "n.weight", "q.weight", "v.weight"]
    recipe.write_text(SPLIT.replace('"norm.weight [h]" = "n.weight [h]"', FACTOR))
    with pytest.raises(UsageError, match="multiplies n"):
        xrank.reshard_checkpoint(source, None, tmp_path / "no", to="dcp", recipe=recipe)
    assert not (tmp_path / "no").exists()


def damage_file(source: Path) -> None:
    (source / "__0_0.distcp").unlink()


def damage_bytes(source: Path) -> None:
    content = bytearray((source / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (source / "__0_0.distcp").write_bytes(content)


@pytest.mark.parametrize("to", ["dcp", "torchtitan", "accelerate", "deepspeed-universal"])
@pytest.mark.parametrize(("damage", "error"), [(damage_file, IncompleteError), (damage_bytes, XrankError)])
def test_damage_leaves_nothing(
    source: Path, tmp_path: Path, to: Any, damage: Callable[[Path], None], error: type[XrankError]
) -> None:
    damage(source)
    with pytest.raises(error):
        xrank.reshard_checkpoint(source, None, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_foreign_optimizers_and_mixed_steps_leave_nothing(tmp_path: Path) -> None:
    sgd = save(tmp_path / "sgd", *train(kind=torch.optim.SGD, momentum=0.9))
    with pytest.raises(UsageError, match="SGD"):
        xrank.reshard_checkpoint(sgd, None, tmp_path / "out", to="dcp")
    made = tmp_path / "checkpoint-2"
    xrank.reshard_checkpoint(save(tmp_path / "adam", *train()), None, made, to="accelerate")
    (made / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    with pytest.raises(ContradictionError, match="a different step than the optimizer"):
        xrank.reshard_checkpoint(made, None, tmp_path / "out", to="deepspeed-universal")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"to": "dcp", "dtype": "bf16"}, "a training state keeps its values"),
        ({"to": "deepspeed-universal", "dp": 2}, "DeepSpeed cuts a universal checkpoint while it loads"),
        ({"to": "dcp", "tag": "x"}, "only DeepSpeed's checkpoints"),
        ({"to": "dcp", "dp": 0}, "an axis has no place"),
        ({"to": "dcp", "optimizer": "Adam"}, "is a state of AdamW, not of Adam"),
        ({"to": "megatron"}, "must be one of workspace, dcp"),
        ({"dp": 2}, "dp= does not go with"),
        ({"to": "dcp", "world_size": 2}, "world_size= does not go with"),
        ({}, "a workspace needs the layout"),
    ],
)
def test_choices_that_do_not_go_together(source: Path, tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises((UsageError, ContradictionError, LayoutError), match=problem):
        xrank.reshard_checkpoint(source, None, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_layout_that_dcp_cannot_hold(source: Path, tmp_path: Path) -> None:
    layouts = layouts_of(r"up.weight [<p: c/r | q: c/r>, b]", r"(?!up).*weight [a, b]", r".*bias|table [a]")
    with pytest.raises(LayoutError, match="a part that is not a single box"):
        xrank.reshard_checkpoint(source, layouts, tmp_path / "out", to="dcp")
    with pytest.raises(UsageError, match="no rule of the layout file"):
        xrank.reshard_checkpoint(source, layouts_of(r".*weight [a, b]"), tmp_path / "out", to="dcp")
    assert not (tmp_path / "out").exists()


def test_the_command(source: Path, tmp_path: Path) -> None:
    planned = run("reshard", str(source), "--to", "deepspeed-universal", "-o", str(tmp_path / "out"), "--dry-run")
    assert planned.exit_code == 0 and "nothing was written" in planned.stdout
    assert not (tmp_path / "out").exists()
    ended = run("reshard", str(source), "--to", "deepspeed-universal", "-o", str(tmp_path / "out"), "--json")
    report = json.loads(ended.stdout)
    assert ended.exit_code == 0 and report["output"]["mesh"] == "deepspeed-universal"
    # The same command finds its output; another one replaces it only if it may.
    again = run("reshard", str(source), "--to", "deepspeed-universal", "-o", str(tmp_path / "out"))
    assert "an earlier run of this command had made the output" in again.stdout
    assert run("reshard", str(source), "--to", "dcp", "-o", str(tmp_path / "out")).exit_code != 0
    ended = run("reshard", str(source), "--to", "dcp", "-o", str(tmp_path / "out"), "--overwrite")
    assert ended.exit_code == 0, ended.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "xrank_manifest.json",
    ]


def test_corrupt_checksums_are_found_while_bytes_move(source: Path, tmp_path: Path) -> None:
    metadata = read_metadata(str(source / ".metadata"))
    tensor = metadata.tensors["optimizer.state.up.weight.exp_avg"]
    net, optimizer, _ = train()
    raw = optimizer.state[net.up.weight]["exp_avg"].numpy().tobytes()
    content = (source / "__0_0.distcp").read_bytes()
    at = content.index(raw, int(tensor.start[0]))
    (source / "__0_0.distcp").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(CorruptError, match="exp_avg"):
        xrank.reshard_checkpoint(source, None, tmp_path / "out", to="deepspeed-universal")
    assert not (tmp_path / "out").exists()
    shutil.rmtree(source)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_ranks_share_a_reshard(source: Path, tmp_path: Path) -> None:
    xrank.reshard_checkpoint(source, None, tmp_path / "alone", to="deepspeed-universal")
    with forked_ranks() as ranks:
        small = {"window_nbytes": 4096, "round_nbytes": 20_000}
        out = ("--to", "deepspeed-universal", "-o", tmp_path / "shared")
        ended = ranks("reshard", source, *out, num_ranks=3, **small)
    assert [rank.exit_code for rank in ended] == [0, 0, 0]
    assert content(tmp_path / "shared") == content(tmp_path / "alone")


def test_killed_at_every_call(source: Path, tmp_path: Path, every: int) -> None:
    """A killed run keeps its finished files, also those in folders, and shows none before all are complete."""
    out = tmp_path / "out"

    def work() -> int:
        report = xrank.reshard_checkpoint(source, None, out, to="accelerate", workers=1)
        return int(report.output["resumed_nbytes"])

    work()
    known = content(out)
    shutil.rmtree(out)
    resumed = set()
    for _ in kill_points(work, extra=EXTRA, every=every):
        if not out.exists():
            resumed.add(work())
            assert sorted(os.listdir(tmp_path)) == ["out", "step-2"]
        assert content(out) == known
        for path in (out, tmp_path / ".out.xrank.lock"):
            if path.exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    # A file in a folder is kept, too, the smallest of which is larger than the two in none.
    assert 0 in resumed
    assert max(resumed) >= min(len(data) for name, data in known.items() if "/" in name)


@pytest.mark.parametrize("to", ["dcp", "accelerate", "deepspeed-universal"])
def test_verify_reads_the_moments(source: Path, tmp_path: Path, to: Any) -> None:
    xrank.reshard_checkpoint(source, None, tmp_path / "out", to=to)
    report = xrank.verify_model(tmp_path / "out")
    assert report.ok and report.proof["num_checksums"] >= 18
    net, optimizer, _ = train()
    raw = optimizer.state[net.up.weight]["exp_avg_sq"].numpy().tobytes()
    (path,) = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and raw in path.read_bytes()]
    data = path.read_bytes()
    at = data.index(raw)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    report = xrank.verify_model(tmp_path / "out")
    assert not report.ok and "exp_avg_sq" in str(report.error)
