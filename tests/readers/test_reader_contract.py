"""The readers that were there first, under the contract."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from tests.commands.made_workspaces import leave
from xrank.layout.stored_model import StoredModel
from xrank.readers import discovery
from xrank.readers.base import Hints, Reader
from xrank.readers.hugging_face.folder import HfFolderReader
from xrank.readers.workspace import WorkspaceReader
from xrank.testing.reader_contract import ReaderContract, SampleSource, whole

pytestmark = pytest.mark.quick


class TestWorkspace(ReaderContract):
    reader = WorkspaceReader()

    def make(self, folder: Path) -> SampleSource:
        model = leave(folder / "run")
        return SampleSource(folder / "run", {name: whole(tensor) for name, tensor in model.items()})


class TestSafetensors(ReaderContract):
    reader = HfFolderReader()
    unseen: ClassVar = {
        "a bit of a tensor flipped": "safetensors files hold no checksums",
        "zeros to the end": "safetensors files hold no checksums",
    }

    def make(self, folder: Path) -> SampleSource:
        path = folder / "model"
        path.mkdir()
        random = torch.Generator().manual_seed(0)
        model = {"a": torch.rand(4, 6, generator=random), "b": torch.rand(4, 6, generator=random)}
        files = {name: f"model-0000{k}-of-00002.safetensors" for k, name in enumerate(model, 1)}
        for name, tensor in model.items():
            save_file({name: tensor}, path / files[name])
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        return SampleSource(path, {name: whole(tensor) for name, tensor in model.items()})


@dataclass(frozen=True)
class _Listed:
    """A reader of a test's own in the place of those that xrank lists."""

    reader: Reader

    @property
    def name(self) -> str:
        return self.reader.name

    def is_hinted_at(self, path: str) -> bool:
        return True

    def load(self) -> Reader:
        return self.reader


def test_wrong_bytes_are_found(tmp_path: Path) -> None:
    """A reader that takes one tensor for another passes nothing of what compares."""

    class Exchanged(HfFolderReader):
        def read(self, path: str, hints: Hints) -> StoredModel:
            model = super().read(path, hints)
            a, b = model.shards
            return replace(model, shards=(replace(a, record=b.record), replace(b, record=a.record)))

    class Contract(TestSafetensors):
        reader = Exchanged()

    made = Contract().make(tmp_path)
    with mock.patch.object(discovery, "OWN_READERS", (_Listed(Contract.reader),)):
        with pytest.raises(AssertionError, match="a"):
            Contract().test_every_tensor_comes_bit_for_bit(made)
        with pytest.raises(AssertionError, match="wrong bytes"):
            Contract().test_fault(made, "a link out of the folder")


def test_a_reader_that_runs_pickles_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Runs(WorkspaceReader):
        def read(self, path: str, hints: Hints) -> StoredModel:
            for file in sorted(Path(path).glob("*.pth")):
                with contextlib.suppress(Exception):
                    torch.load(file, weights_only=False)
            return super().read(path, hints)

    class Contract(TestWorkspace):
        reader = Runs()

    made = Contract().make(tmp_path)
    with (
        mock.patch.object(discovery, "OWN_READERS", (_Listed(Contract.reader),)),
        pytest.raises(AssertionError, match="it ran"),
    ):
        Contract().test_hostile_pickles_run_nothing(made, monkeypatch)


def test_a_declaration_that_is_not_needed_is_found(tmp_path: Path) -> None:
    class Contract(TestWorkspace):
        unseen: ClassVar = {"a bit of a tensor flipped": "not so: torch.save keeps a CRC of each"}

    with pytest.raises(AssertionError, match="never is"):
        Contract().test_fault(Contract().make(tmp_path), "a bit of a tensor flipped")
