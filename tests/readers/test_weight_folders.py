"""Folders of whole tensors, .bin and safetensors: what must be there, what is tied, and what is no weight."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from xrank.conversion.gather import gather_checkpoint
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UnsafeError, UsageError, XrankError
from xrank.plan.report import Report
from xrank.readers.bin_folder import BinFolderReader
from xrank.readers.discovery import find_source
from xrank.testing.reader_contract import Made, ReaderContract, WholeTensor, read_model, whole

KINDS = ["bin", "safetensors"]


def model() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.rand(6, 4, generator=random),
        "norm.weight": torch.rand(4, generator=random).bfloat16(),
        "steps": torch.tensor(3),
        "mask": torch.tensor([True, False]),
    }


def write(folder: Path, kind: str, *, num_files: int = 2, index: bool = True, total_size: int | None = None) -> Path:
    """Write the model as transformers does."""
    folder.mkdir(parents=True)
    stem = {"bin": "pytorch_model", "safetensors": "model"}[kind]
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(num_files)]
    for number, (name, tensor) in enumerate(model().items()):
        parts[number % num_files][name] = tensor
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"{stem}-{number:05d}-of-{num_files:05d}.{kind}" if num_files > 1 else f"{stem}.{kind}"
        torch.save(part, folder / file) if kind == "bin" else save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    nbytes = sum(tensor.nbytes for tensor in model().values()) if total_size is None else total_size
    if index:
        told = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
        (folder / f"{stem}.{kind}.index.json").write_text(json.dumps(told))
    return folder


def wanted() -> dict[str, WholeTensor]:
    return {name: whole(tensor) for name, tensor in model().items()}


def gathered(path: Path, **options: Any) -> tuple[Mapping[str, WholeTensor], Report]:
    out = path.parent / f"{path.name}.out"
    report = gather_checkpoint(path, out, **options)
    return read_model(out), report


class TestBin(ReaderContract):
    reader = BinFolderReader()

    def make(self, folder: Path) -> Made:
        return Made(write(folder / "model", "bin"), wanted())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_files", [1, 3])
def test_with_and_without_index(tmp_path: Path, kind: str, num_files: int) -> None:
    assert gathered(write(tmp_path / "a", kind, num_files=num_files))[0] == wanted()
    assert gathered(write(tmp_path / "b", kind, num_files=num_files, index=False))[0] == wanted()
    (file, *others) = sorted((tmp_path / "b").iterdir())
    place, reader = find_source(str(file))
    # One file of several is no model: its folder is.
    assert (place, reader.name) == (str(file.parent if others else file), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_the_others_names_tell_of(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "model", kind, num_files=3, index=False)
    gone = sorted(folder.iterdir())[2]
    gone.unlink()
    with pytest.raises(IncompleteError, match=f"tells of {gone.name}") as caught:
        gathered(folder)
    assert caught.value.file == str(gone)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_may_claim_any_number_of_files(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "model", kind, index=False)
    first = sorted(folder.iterdir())[0]
    first.rename(folder / first.name.replace("of-00002", "of-99999"))
    with pytest.raises(IncompleteError, match="tells of"):
        gathered(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_ghosts_and_strays_of_the_index(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "model", kind)
    (file,) = folder.glob("*.index.json")
    index = json.loads(file.read_text())
    first = index["weight_map"]["embed.weight"]
    changes: list[tuple[str, str | None, type[XrankError]]] = [
        ("lm_head.weight", first, IncompleteError),
        ("embed.weight", None, ContradictionError),
        ("embed.weight", "../" + first, UnsafeError),
        ("embed.weight", "absent.bin", IncompleteError),
    ]
    for name, target, error in changes:
        weight_map = {**index["weight_map"], name: target}
        file.write_text(json.dumps({**index, "weight_map": {n: f for n, f in weight_map.items() if f is not None}}))
        with pytest.raises(error) as caught:
            gathered(folder)
        assert str(caught.value.file).startswith(str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_total_is_noted(tmp_path: Path, kind: str) -> None:
    """verl counts elements there, Megatron-Bridge copies the source's."""
    found, report = gathered(write(tmp_path / "model", kind, total_size=31))
    assert found == wanted()
    notes = {note["code"]: note["message"] for note in report.to_dict()["notes"]}
    assert "total_size 31, and the tensors have 114 bytes" in notes["wrong-total-size"]
    _, sound = gathered(write(tmp_path / "sound", kind))
    assert "wrong-total-size" not in {note["code"] for note in sound.to_dict()["notes"]}


@pytest.mark.parametrize("kind", KINDS)
def test_placeholders_of_zero_3(tmp_path: Path, kind: str) -> None:
    """What `save_pretrained` leaves of parameters that DeepSpeed holds; a base model may have such a tensor."""
    folder = tmp_path / "model"
    folder.mkdir()
    state = {"a.weight": torch.empty(0), "b.weight": torch.empty(0), "c": torch.rand(2)}
    file = folder / {"bin": "pytorch_model.bin", "safetensors": "model.safetensors"}[kind]
    torch.save(state, file) if kind == "bin" else save_file(state, file)
    with pytest.raises(IncompleteError, match=r"a\.weight: a placeholder of shape \[0\].*likewise b\.weight") as caught:
        gathered(folder)
    assert caught.value.file == str(file) and "ZeRO checkpoint" in str(caught.value.next_step)
    (tmp_path / "base").mkdir()
    save_file(state, tmp_path / "base" / "model.safetensors")
    found, _ = gathered(folder, base_model=tmp_path / "base")
    assert found == {name: whole(tensor) for name, tensor in state.items()}


def test_two_candidates_in_a_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "bin", num_files=1)
    save_file({"other": torch.rand(2)}, folder / "model.safetensors")
    with pytest.raises(UsageError, match="can be read in several ways") as caught:
        gathered(folder)
    assert caught.value.got == "safetensors, bin"
    assert gathered(folder, format="bin")[0] == wanted()


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    """Two names of one storage; equal bytes elsewhere, or another view of it, are no tie."""
    embed = torch.rand(6, 4)
    state = {"embed.weight": embed, "lm_head.weight": embed, "turned": embed.t(), "twin": embed.clone()}
    (tmp_path / "model").mkdir()
    torch.save(state, tmp_path / "model" / "pytorch_model.bin")
    found, report = gathered(tmp_path / "model")
    assert found == {name: whole(tensor) for name, tensor in state.items() if name != "lm_head.weight"}
    assert "lm_head.weight" in json.dumps(report.to_dict()["output"]["tied"])


def test_accelerates_full_state(tmp_path: Path) -> None:
    torch.save(OrderedDict(model()), tmp_path / "pytorch_model_fsdp.bin")
    torch.save({"state": {}}, tmp_path / "optimizer.bin")
    assert gathered(tmp_path)[0] == wanted()


@pytest.mark.parametrize(
    "state", [{"model": {"w": torch.rand(2)}}, [torch.rand(2)], {1: torch.rand(2)}, torch.rand(2)], ids=repr
)
def test_what_is_no_state_dict(tmp_path: Path, state: object) -> None:
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises((UsageError, CorruptError), match=r"is no state dict|holds no state dict"):
        gathered(tmp_path)


def test_an_object_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.rand(2), "module": torch.nn.Linear(2, 2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsafeError, match="Linear"):
        gathered(tmp_path)


def test_the_format_before_zips(tmp_path: Path) -> None:
    torch.save(model(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(UsageError, match="old format") as caught:
        gathered(tmp_path)
    assert "save it again" in str(caught.value.next_step)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(CorruptError):
        gathered(tmp_path)
