"""Where a checkpoint's companions are looked for: in every layout that users have, nearest to the weights first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xrank.readers.records import find_checkpoint_folders


def folders(root: Path, asked: str, place: str) -> list[str]:
    """Return where companions are looked for, below a root; ``huggingface`` folders left out, which follow each."""
    found = find_checkpoint_folders(str(root / asked), str(root / place))
    assert found[1::2] == tuple(f"{folder}/huggingface" for folder in found[::2])
    return [str(Path(folder).relative_to(root)) for folder in found[::2]]


def fill(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("iter" if file.endswith(".txt") else "")
    return root


def test_every_folder_between(tmp_path: Path) -> None:
    fill(tmp_path, "run/checkpoint-2000/pytorch_model_fsdp_0/.metadata")
    part = "run/checkpoint-2000/pytorch_model_fsdp_0"
    assert folders(tmp_path, "run", part) == [part, "run/checkpoint-2000", "run"]
    assert folders(tmp_path, "run/checkpoint-2000", part) == [part, "run/checkpoint-2000"]


def test_one_above_where_that_is_the_checkpoint(tmp_path: Path) -> None:
    fill(tmp_path, "run/checkpoint-2000/pytorch_model_fsdp_0/.metadata", "run/checkpoint-2000/dcp/.metadata")
    fill(tmp_path, "out/sharded/shard", "other/plain/.metadata", "accelerate/pytorch_model_fsdp_0/.metadata")
    fill(tmp_path, "run/actor/dist_ckpt/.metadata")
    parts = (
        "run/checkpoint-2000/pytorch_model_fsdp_0",
        "run/checkpoint-2000/dcp",
        "out/sharded",
        "run/actor/dist_ckpt",
    )
    for part in parts:
        assert folders(tmp_path, part, part) == [part, str(Path(part).parent)]
    assert folders(tmp_path, "accelerate/pytorch_model_fsdp_0", "accelerate/pytorch_model_fsdp_0")[1:] == ["accelerate"]
    assert folders(tmp_path, "other/plain", "other/plain") == ["other/plain"]
    assert folders(tmp_path, "run/checkpoint-2000", "run/checkpoint-2000") == ["run/checkpoint-2000"]


@pytest.mark.parametrize(
    ("marker", "text", "step"),
    [
        ("latest", "global_step2\n", "global_step2"),
        ("latest_universal", "global_step2_universal", "global_step2_universal"),
        ("latest_checkpointed_iteration.txt", "10", "iter_0000010"),
        ("latest_checkpointed_iteration.txt", "release", "release"),
        ("latest_ckpt_global_step.txt", "7", "global_step_7"),
    ],
)
def test_what_a_marker_names(tmp_path: Path, marker: str, text: str, step: str) -> None:
    fill(tmp_path, f"dist/{step}/common.pt", f"dist/{marker}", "dist/iter_0000009/common.pt")
    (tmp_path / "dist" / marker).write_text(text)
    assert folders(tmp_path, "dist", "dist") == [f"dist/{step}", "dist"]
    assert folders(tmp_path, ".", "dist") == [f"dist/{step}", "dist", "."]
    assert folders(tmp_path, f"dist/{step}", f"dist/{step}") == [f"dist/{step}", "dist"]


@pytest.mark.parametrize("text", ["../secret", "/", "..", ".", "", "a/b", "\udcff", "9" * 300])
def test_a_marker_never_leads_outside(tmp_path: Path, text: str) -> None:
    fill(tmp_path, "secret/config.json", "dist/a/b/config.json")
    (tmp_path / "dist" / "latest").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert folders(tmp_path, "dist", "dist") == ["dist"]


def test_a_marker_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    os.mkfifo(tmp_path / "dist" / "latest")
    assert folders(tmp_path, "dist", "dist") == ["dist"]


def test_files_and_paths_that_are_not_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "model/model.safetensors", "checkpoint-5/dcp/.metadata")
    assert folders(tmp_path, "model/model.safetensors", "model/model.safetensors") == ["model"]
    assert folders(tmp_path, "model/model.safetensors", "model") == ["model"]
    monkeypatch.chdir(tmp_path / "model")
    assert find_checkpoint_folders("model.safetensors", "model.safetensors") == (".", "./huggingface")
    monkeypatch.chdir(tmp_path / "checkpoint-5")
    assert find_checkpoint_folders("dcp", "dcp")[::2] == ("dcp", ".")
    assert find_checkpoint_folders(".", "./dcp")[::2] == ("./dcp", ".")
    monkeypatch.chdir(tmp_path / "checkpoint-5" / "dcp")
    assert find_checkpoint_folders(".", ".")[::2] == (".", str(tmp_path / "checkpoint-5"))
