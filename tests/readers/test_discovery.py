"""What a path means: one source, what xrank made beside it passed over, and errors that say what was nearly there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from xrank.commands.gather import gather_checkpoint
from xrank.errors import UnknownFormatError, UsageError
from xrank.readers.discovery import find_source

pytestmark = pytest.mark.quick


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": torch.ones(2, 2)}, folder / "model.safetensors")
    return folder


def fill(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


def test_an_output_in_the_runs_own_folder(tmp_path: Path) -> None:
    """The second command finds the source that the first one found; the output, where that is named."""
    source = model(tmp_path / "run" / "checkpoint-5")
    for _ in range(2):
        gather_checkpoint(tmp_path / "run", tmp_path / "run" / "model", overwrite=True)
        assert find_source(str(tmp_path / "run"))[0] == str(source)
    assert find_source(str(tmp_path / "run" / "model"))[0] == str(tmp_path / "run" / "model")
    model(tmp_path / "run" / "checkpoint-6")
    with pytest.raises(UsageError, match="contains several sources"):
        find_source(str(tmp_path / "run"))


def test_an_output_is_no_source_for_want_of_another(tmp_path: Path) -> None:
    gather_checkpoint(model(tmp_path / "run" / "checkpoint-5"), tmp_path / "run" / "models" / "one")
    (tmp_path / "run" / "checkpoint-5" / "model.safetensors").unlink()
    with pytest.raises(UnknownFormatError) as caught:
        find_source(str(tmp_path / "run"))
    one = tmp_path / "run" / "models" / "one"
    assert f"{one}, which xrank made" in str(caught.value.got) and f"or give {one} itself" in str(
        caught.value.next_step
    )


def test_what_nearly_fits_comes_first(tmp_path: Path) -> None:
    fill(tmp_path, "checkpoint/optimizer_0/.metadata", "checkpoint/optimizer_0/__0_0.distcp")
    folder = tmp_path / "checkpoint" / "optimizer_0"
    with pytest.raises(UnknownFormatError) as caught:
        find_source(str(folder))
    got = str(caught.value.got)
    assert got.startswith("dcp: only an optimizer's state, in a folder of accelerate; none of workspace, safetensors")
    assert len(got) < 250
    fill(tmp_path, "checkpoint/pytorch_model_fsdp_0/.metadata")
    with pytest.raises(UnknownFormatError, match="known") as caught:
        find_source(str(folder))
    assert f"give {folder.parent}, which has the model, too" in str(caught.value.got)
    with pytest.raises(UnknownFormatError) as caught:
        find_source(str(fill(tmp_path / "other", "notes.txt")))
    assert str(caught.value.got).startswith("none of ")


def test_another_format_than_the_one_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UnknownFormatError, match=r"is not of the format dcp: no \.metadata and no"):
        find_source(str(model(tmp_path / "model")), format_name="dcp")


def test_links_in_a_circle_beside_the_source(tmp_path: Path) -> None:
    source = model(tmp_path / "run" / "checkpoint-5")
    (tmp_path / "run" / "circle").symlink_to("circle")
    assert find_source(str(tmp_path / "run"))[0] == str(source)


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the source, or a second one; what every disk has is neither."""
    source = model(tmp_path / "run" / "checkpoint-5")
    (tmp_path / "run" / "lost+found").mkdir()
    closed: set[Path] = {tmp_path / "run" / "lost+found"}
    scandir = os.scandir

    def guarded(path: str) -> Any:
        if Path(path) in closed:  # root may read everything
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    assert find_source(str(tmp_path / "run"))[0] == str(source)
    (tmp_path / "run" / "theirs").mkdir()
    for place in (tmp_path / "run" / "theirs", tmp_path / "run"):
        closed.add(place)
        with pytest.raises(UsageError, match="may not be read by this user") as caught:
            find_source(str(tmp_path / "run"))
        assert caught.value.file == str(place)


@pytest.mark.parametrize("number", range(1, 6))
def test_a_checkpoint_that_its_trainer_removes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Gone when it has been found to be a folder, the first time or a later one."""
    source = model(tmp_path / "run" / "checkpoint-6")
    old = fill(tmp_path, "run/checkpoint-5/inner/model.pt") / "run" / "checkpoint-5"
    plain, asked = os.path.isdir, []

    def isdir(path: Any) -> bool:
        found = plain(path)
        if path == str(old):
            asked.append(path)
            if len(asked) == number:
                shutil.rmtree(old)
        return found

    monkeypatch.setattr(os.path, "isdir", isdir)
    assert find_source(str(tmp_path / "run"))[0] == str(source)
    assert asked


@pytest.mark.parametrize("begun", ["tmp-checkpoint-6", "checkpoint-6.tmp", "checkpoint-6.orbax-checkpoint-tmp-17"])
def test_a_save_that_did_not_finish_is_passed_over(tmp_path: Path, begun: str) -> None:
    source, rest = model(tmp_path / "run" / "checkpoint-5"), model(tmp_path / "run" / begun)
    found = find_source(str(tmp_path / "run"))
    assert found.path == str(source)
    text = f"a save with a name that suggests that it did not finish was passed over: {rest}"
    assert found.notes == (("unfinished", text),)
    assert find_source(str(rest)).path == str(rest)
    model(tmp_path / "run" / "checkpoint-4")
    with pytest.raises(UsageError, match="several sources") as caught:
        find_source(str(tmp_path / "run"))
    assert begun not in str(caught.value.got)


def test_a_model_beside_a_trainers_checkpoints(tmp_path: Path) -> None:
    """The trainer may have gone on after the model was saved."""
    run = model(tmp_path / "run")
    for step in (5, 10):
        model(run / f"checkpoint-{step}")
    found = find_source(str(run))
    text = f"the model in {run} itself is read; the folder also contains checkpoints: {run}/checkpoint-10 and 1 more"
    assert (found.path, found.notes) == (str(run), (("also-here", text),))


def test_a_link_to_a_step_is_no_second_source(tmp_path: Path) -> None:
    source = model(tmp_path / "run" / "checkpoint-5")
    for name in ("a-link", "latest"):
        (tmp_path / "run" / name).symlink_to("checkpoint-5")
    assert find_source(str(tmp_path / "run")).path == str(source)
    model(tmp_path / "run" / "checkpoint-6")
    with pytest.raises(UsageError, match="several sources") as caught:
        find_source(str(tmp_path / "run"))
    assert "latest" not in str(caught.value.got)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "latest").symlink_to(source)
    assert find_source(str(tmp_path / "links")).path == str(tmp_path / "links" / "latest")
