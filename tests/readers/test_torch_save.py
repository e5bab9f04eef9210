"""Whole models of one torch.save, under any name and among other values."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import tarfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.bench import run
from tests.readers.test_model_parts import EMA, MODEL, same
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.engine.report import Report
from xrank.errors import COMMAND, IncompleteError, UnknownFormatError, UsageError, XrankError
from xrank.readers.discovery import find_source
from xrank.readers.torch_save import TorchSaveReader
from xrank.testing.reader_contract import ReaderContract, SampleSource, whole

pytestmark = pytest.mark.quick

Saved = dict[str, Any]


def gathered(path: Path, **options: Any) -> tuple[dict[str, torch.Tensor], Report]:
    out = path.parent / f"{path.name}.out"
    report = gather_checkpoint(path, out, overwrite=True, **options)
    return load_file(out / "model.safetensors"), report


def save(path: Path, saved: object, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(saved, path, **options)
    return path


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


class TestTorchSave(ReaderContract):
    reader = TorchSaveReader()
    exit_codes: ClassVar[Mapping[str, frozenset[int]]] = {"a file missing": frozenset({2})}  # nothing is left

    def make(self, folder: Path) -> SampleSource:
        saved = {"model": MODEL, "optimizer": {"state": {0: {"exp_avg": torch.rand(2, 2)}}}, "epoch": 3}
        path = save(folder / "model" / "model.pt", saved).parent
        return SampleSource(path, {name: whole(tensor) for name, tensor in MODEL.items()})


NAMES = ["model.pt", "last.ckpt", "weights.pth", "consolidated.00.pth", "net.th", "step=3", "model.bin", "opt-125m.pt"]


@pytest.mark.parametrize("name", NAMES)
def test_any_name(tmp_path: Path, name: str) -> None:
    assert same(gathered(save(tmp_path / name, MODEL))[0], MODEL)


@pytest.mark.parametrize("name", [name for name in NAMES if "." in name])
def test_a_folder_with_one_model(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path / "run" / name, MODEL).parent
    for other in ("optimizer.pt", "scheduler.bin", "rng_state.pth", "training_args.bin", "data.pt", "hparams.pt"):
        save(folder / other, {"x": torch.rand(2, 2)})
    (folder / "config.json").write_text("{}")
    assert same(gathered(folder)[0], MODEL)
    assert find_source(str(tmp_path)).path == str(folder)


def test_a_folder_with_two_models(tmp_path: Path) -> None:
    folder = save(tmp_path / "run" / "model.pt", MODEL).parent
    save(folder / "best.pt", EMA)
    with pytest.raises(UsageError, match="more than one model") as caught:
        gathered(folder)
    assert str(folder / "best.pt") in str(caught.value.next_step)
    assert same(gathered(folder / "best.pt")[0], EMA)


@pytest.mark.parametrize("name", ["checkpoint.pth.tar", "model_best.pth.tar", "model.tar", "last.pt.tar"])
def test_a_file_named_as_in_torchs_examples(tmp_path: Path, name: str) -> None:
    file = save(tmp_path / "run" / name, {"epoch": 1, "arch": "mlp", "state_dict": MODEL})
    assert same(gathered(file.parent)[0], MODEL)
    assert same(gathered(file)[0], MODEL)
    save(tmp_path / "run" / "other.pth.tar", EMA)
    with pytest.raises(UsageError, match="more than one model"):
        gathered(file.parent)
    (tmp_path / "run" / "other.pth.tar").unlink()
    with tarfile.open(tmp_path / "run" / "code.tar", "w"):
        pass
    assert same(gathered(file.parent)[0], MODEL)


def split(model: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    names = list(model)
    return [{name: model[name] for name in names[number::2]} for number in range(2)]


def test_parts_of_a_model_are_one_model(tmp_path: Path) -> None:
    """torchtune saves as many files as the model that it started from had, without an index, and numbers the epoch."""
    folder = tmp_path / "run"
    for number, part in enumerate(split(MODEL), 1):
        save(folder / f"hf_model_{number:04d}_0.pt", part)
    save(folder / "adapter_0.pt", {"lora_a.weight": torch.rand(2, 2)})
    save(folder / "recipe_state.pt", {"epoch": 0, "optimizer": {"state": {0: {"exp_avg": torch.zeros(3, 4)}}}})
    found, report = gathered(folder)
    assert same(found, MODEL) and ("left-out", "1 file next to the model's own left out") in report.notes
    # A part stands for all parts of its epoch.
    assert same(gathered(folder / "hf_model_0002_0.pt")[0], MODEL)
    for number, part in enumerate(split(EMA), 1):
        save(folder / f"hf_model_{number:04d}_1.pt", part)
    with pytest.raises(UsageError, match="contains the models of 2 epochs") as caught:
        gathered(folder)
    assert "hf_model_*_1.pt" in str(caught.value.next_step)
    for path in folder.glob("hf_model_*_1.pt"):
        path.unlink()
    (folder / "hf_model_0001_0.pt").unlink()
    for path in (folder, folder / "hf_model_0002_0.pt"):
        with pytest.raises(IncompleteError, match=r"implies hf_model_0001_0\.pt"):
            gathered(path)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_parts_of_a_model_under_other_names_of_torchtune(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "epoch_0"
    folder.mkdir()
    end = "_0.safetensors" if kind == "safetensors" else ".bin"

    def write(model: dict[str, torch.Tensor], end: str) -> None:
        for number, part in enumerate(split(model), 1):
            file = folder / f"model-{number:05d}-of-00002{end}"
            save_file(part, file) if kind == "safetensors" else torch.save(part, file)

    write(MODEL, end)
    assert same(gathered(folder)[0], MODEL)
    assert same(gathered(folder / f"model-00001-of-00002{end}")[0], MODEL)
    if kind == "safetensors":
        write(EMA, "_1.safetensors")
        with pytest.raises(UsageError, match="contains more than one model"):
            gathered(folder)
    (folder / f"model-00002-of-00002{end}").unlink()
    with pytest.raises(IncompleteError, match="model-00002-of-00002"):
        gathered(folder)


def test_files_that_may_be_parts_of_a_model_are_not_called_models(tmp_path: Path) -> None:
    for name, part in zip("ab", split(MODEL), strict=True):
        save(tmp_path / "run" / f"weights_{name}.pt", part)
    with pytest.raises(UsageError, match="without a tensor in common, which may be parts of one model") as caught:
        gathered(tmp_path / "run")
    assert "save parts of one model with one torch.save" in str(caught.value.next_step)


def test_the_model_that_training_started_from_beside_parts_of_the_trained_one(tmp_path: Path) -> None:
    """torchtune's output folder is often the folder of the model that it started from."""
    folder = tmp_path / "run"
    for number, part in enumerate(split({**MODEL, "up.weight": MODEL["up.weight"] + 1}), 1):
        save(folder / f"hf_model_{number:04d}_0.pt", part)
    save_file(MODEL, folder / "model.safetensors")
    for path in (folder, folder / "hf_model_0001_0.pt"):
        with pytest.raises(UsageError, match="give different models") as caught:
            gathered(path)
        assert caught.value.next_step == 'choose one: format="safetensors" or format="torch-save"'
    found = gathered(folder, format="torch-save")[0]
    assert torch.equal(found["up.weight"], MODEL["up.weight"] + 1)


@pytest.mark.parametrize(
    "saved",
    [
        {"model": MODEL, "optimizer": {"state": {0: {"exp_avg": EMA["up.weight"], "step": torch.tensor(3)}}}},
        {"state_dict": OrderedDict(MODEL), "optimizer_states": [{"state": {0: {"exp_avg": EMA["up.weight"]}}}]},
        {"epoch": 3, "net": MODEL, "loss": torch.tensor(0.3), "scheduler": {"base_lrs": [0.1]}},
        {"run": {"model_state_dict": MODEL, "step": 3}, "args": argparse.Namespace(lr=0.1)},
        {"model": {f"module._orig_mod.{name}": tensor for name, tensor in MODEL.items()}},
        {"model": MODEL, "ema": {"decay": 0.9, "shadow_params": list(EMA.values())}},
        {"hyper_parameters": {"model": torch.nn.Linear(2, 2)}, "state_dict": MODEL},
        {"model": torch.nn.Linear(2, 2), "state_dict": MODEL},
        {"model": "resnet", "weights": MODEL},
    ],
)
@pytest.mark.parametrize("name", ["any.pt", "pytorch_model.bin"])
def test_nested_dicts_as_users_write_them(tmp_path: Path, saved: Saved, name: str) -> None:
    assert same(gathered(save(tmp_path / name, saved))[0], MODEL)


def test_numbered_files_may_be_those_of_ranks(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path / "run" / f"model_{number}.pt", MODEL)
    with pytest.raises(UnknownFormatError) as caught:
        gathered(tmp_path / "run")
    assert "several numbered ones" in str(caught.value.got)
    (tmp_path / "run" / "model_1.pt").unlink()
    assert same(gathered(tmp_path / "run")[0], MODEL)


def test_several_models_in_one_file(tmp_path: Path) -> None:
    file = save(tmp_path / "x.pt", {"model": MODEL, "ema": EMA, "step": 7})
    with pytest.raises(UsageError, match="more than one part") as caught:
        gathered(file)
    assert caught.value.got == "model (2 tensors), ema (2 tensors)"
    assert "--part model or --part ema" in COMMAND.render(caught.value.next_step)
    found, report = gathered(file, part="ema")
    assert same(found, EMA) and report.source["step"] == 7
    parts = inspect_source(file, part="ema").details["format"]["parts"]
    assert list(parts) == ["ema", "model"] and parts["model"].startswith("left out: 2 tensors")
    with pytest.raises(UsageError, match="has no part"):
        gather_checkpoint(save(tmp_path / "flat.pt", MODEL), tmp_path / "flat", part="up")


def test_shared_storage_is_a_tie(tmp_path: Path) -> None:
    embedding = torch.rand(8, 4)
    state = {"embed.weight": embedding, "head.weight": embedding, "norm.weight": torch.rand(4)}
    found, report = gathered(save(tmp_path / "x.ckpt", {"state_dict": state}))
    assert same(found, state) or found.keys() == {"embed.weight", "norm.weight"}
    assert report.source["nbytes"] == embedding.nbytes + 16


LIGHTNING: Saved = {"pytorch-lightning_version": "2.6.6", "global_step": 2, "callbacks": {}, "loops": {}}


@pytest.mark.parametrize(
    ("names", "want"),
    [
        (["model.embed.weight", "model.layers.0.weight"], ["embed.weight", "layers.0.weight"]),
        (["net.cls_token", "net.head.weight"], ["cls_token", "head.weight"]),
        # Not a module that contains the model: a list of layers, a layer, or one of two modules.
        (["layers.0.weight", "layers.1.weight"], None),
        (["linear.weight", "linear.bias"], None),
        (["model.embed.weight", "loss.scale.weight"], None),
    ],
)
def test_the_attribute_of_a_lightning_module(tmp_path: Path, names: list[str], want: list[str] | None) -> None:
    state = {name: torch.rand(2, 2) for name in names}
    found, report = gathered(save(tmp_path / "x.ckpt", {**LIGHTNING, "state_dict": state}))
    assert same(found, dict(zip(want or names, state.values(), strict=True)))
    assert report.source["step"] == 2
    # Without Lightning's version, the names are those of the model.
    assert same(gathered(save(tmp_path / "y.pt", {"state_dict": state}))[0], state)


@pytest.mark.parametrize("prefix", ["model.", "any.", ""])
def test_a_base_model_shows_the_attribute(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "base").mkdir()
    save_file(EMA, tmp_path / "base" / "model.safetensors")
    file = save(tmp_path / "x.pt", {f"{prefix}{name}": tensor for name, tensor in MODEL.items()})
    assert same(gathered(file, base_model=tmp_path / "base")[0], MODEL)


@pytest.mark.parametrize(
    ("saved", "error", "match"),
    [
        (module(), UsageError, "whole module.*Sequential"),
        ({"model": module(), "epoch": 3}, UsageError, "whole module.*Sequential"),
        ({"model": module(), "ema": EMA}, UsageError, "whole module.*Sequential"),
        ({"model": {**MODEL, "extra": argparse.Namespace(a=1)}}, UsageError, "an object of .argparse.Namespace"),
        ([torch.rand(2, 2)], UsageError, "not a state dict"),
        ({0: torch.rand(2, 2)}, UsageError, "not a state dict"),
        ({"model": {0: torch.rand(2, 2)}}, UsageError, "not a state dict"),
        ({"model.w": torch.rand(2, 2), "model": {"w": torch.rand(2, 2)}}, UsageError, "have one name"),
        ({"state": {0: {"exp_avg": torch.rand(2)}}, "param_groups": []}, UsageError, "no model"),
        ({"epoch": 3}, UsageError, "no tensor"),
    ],
    ids=itertools.count(),
)
def test_what_is_no_model(tmp_path: Path, saved: object, error: type[XrankError], match: str) -> None:
    with pytest.raises(error, match=match):
        gathered(save(tmp_path / "x.pt", saved))
    assert not (tmp_path / "x.pt.out").exists()


def test_the_format_before_zips(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="old format"):
        gathered(save(tmp_path / "x.pt", MODEL, _use_new_zipfile_serialization=False))


@pytest.mark.parametrize(
    "name",
    ["model_rank_0.pt", "model-00001-of-00002.pt", "tp0.pt", "common.pt", "x.shard3.pth"],
)
def test_one_of_several_files_is_no_model(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnknownFormatError, match="no known format"):
        gathered(save(tmp_path / name, MODEL))


@pytest.mark.parametrize("names", [["consolidated.00.pth", "consolidated.01.pth"], ["consolidated.01.pth"]])
def test_slices_of_a_model_are_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        save(tmp_path / "original" / name, MODEL)
    for path in (tmp_path / "original", tmp_path / "original" / names[0]):
        with pytest.raises(UsageError, match="one of several slices"):
            gathered(path)


@pytest.mark.parametrize(("rows", "is_slice"), [(8, False), (4, True), (2, True), (6, False)])
def test_the_first_slice_alone_is_no_model(tmp_path: Path, rows: int, is_slice: bool) -> None:
    """Its heads are a half, or a fourth, of the model's width; Mistral's may be of another width."""
    state = {"norm.weight": torch.rand(8), "layers.0.attention.wq.weight": torch.rand(rows, 8)}
    file = save(tmp_path / "original" / "consolidated.00.pth", state)
    if not is_slice:
        assert same(gathered(file, recipe="none")[0], state)
        return
    for path in (file, file.parent):
        with pytest.raises(UsageError, match="one of several slices") as caught:
            gathered(path)
        assert caught.value.got == f"{rows} rows of queries in a model of width 8"


def test_a_source_below_comes_before_a_file_beside_it(tmp_path: Path) -> None:
    """verl leaves data.pt beside the actor's folder; other trainers leave files with other names."""
    save(tmp_path / "run" / "state.pt", {"seen": torch.rand(2, 2)})
    (tmp_path / "run" / "actor").mkdir()
    save_file(MODEL, tmp_path / "run" / "actor" / "model.safetensors")
    found, report = gathered(tmp_path / "run")
    assert same(found, MODEL)
    text = f"torch-save files in {tmp_path}/run/state.pt are next to the safetensors files that are read, and hold "
    assert ("also-here", f"{text}other tensors: 1 tensor (F32)") in report.notes
    # A model of that folder that differs from the source below it must be chosen from.
    save(tmp_path / "run" / "state.pt", {name: tensor + 1 for name, tensor in MODEL.items()})
    with pytest.raises(UsageError, match="hold different models") as caught:
        gathered(tmp_path / "run")
    assert caught.value.next_step == f'choose one: format="safetensors" or give the path {tmp_path}/run/state.pt'
    (tmp_path / "run" / "state.pt").unlink()
    (tmp_path / "run" / "actor").rename(tmp_path / "run" / "last.ckpt")  # a folder with a file's name, as Lightning's
    assert not [text for code, text in gathered(tmp_path / "run")[1].notes if code == "also-here"]
    (tmp_path / "run" / "last.ckpt").rename(tmp_path / "run" / "actor")
    # The user's own file comes before the folder around it.
    file = save(tmp_path / "run" / "actor" / "mine.pt", EMA)
    assert same(gathered(file)[0], EMA)


@pytest.mark.parametrize("separator", ["  ", " *"])
def test_metas_checklist_is_compared(tmp_path: Path, separator: str) -> None:
    """``checklist.chk`` beside Meta's files has the MD5 of each, as md5sum writes it."""
    file = save(tmp_path / "original" / "consolidated.00.pth", {"norm.weight": torch.ones(4)})
    digest = hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
    checklist = file.with_name("checklist.chk")
    checklist.write_text(f"{'0' * 32}{separator}params.json\n{digest}{separator}consolidated.00.pth\n")
    gather_checkpoint(file, tmp_path / "out", recipe="none")
    assert run("verify", file).exit_code == 0
    save(file, {"norm.weight": torch.zeros(4)})  # a sound file of another model
    ended = run("gather", file.parent, "--out", tmp_path / "refused", "--recipe", "none")
    assert ended.exit_code == 4 and "consolidated.00.pth" in ended.stderr and "checklist.chk" in ended.stderr
    assert run("verify", file).exit_code == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["original", "out"]
