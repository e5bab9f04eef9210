"""Files that are no model checkpoint of torch: named as what they are, with exit code 2."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import save_file

from tests.cli.bench import run
from xrank.cli.main import cli
from xrank.readers.discovery import find_source

pytestmark = pytest.mark.quick

HDF = b"\x89HDF\r\n\x1a\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
KINDS = {
    "gguf": ({"model-Q4_K_M.gguf": b"GGUF\3\0\0\0"}, "a GGUF file of llama.cpp"),
    "gguf without its name": ({"blobs/sha256-1f": b"GGUF\3\0\0\0"}, "a GGUF file of llama.cpp"),
    "tensorizer": ({"model.tensors": b"|TZR|\n\2\0"}, "a file of tensorizer"),
    "flax": ({"config.json": b"{}", "flax_model.msgpack": b"\x81\xa5"}, "a msgpack file of Flax"),
    "flax in parts": ({"flax_model-00001-of-00002.msgpack": b"\x81"}, "a msgpack file of Flax"),
    "h5": ({"tf_model.h5": HDF}, "a file of TensorFlow or Keras"),
    "h5 without its name": ({"weights": HDF}, "a file of TensorFlow or Keras"),
    "saved model": (
        {"saved_model.pb": b"\x08\1", "variables/variables.index": b"", "variables/variables.data-00000-of-00001": b""},
        "a file of TensorFlow or Keras",
    ),
    "tensorflow's checkpoint": (
        {"checkpoint": b"", "model.ckpt-5.index": b"", "model.ckpt-5.data-00000-of-00001": b""},
        "a file of TensorFlow or Keras",
    ),
    "keras": ({"model.keras": b"PK\3\4"}, "a file of TensorFlow or Keras"),
    "git-lfs": ({"weights.dat": POINTER, "data": b""}, "a git-lfs pointer instead of a file"),
    "onnx": ({"onnx/model.onnx": b"\x08\x08", "onnx/model.onnx_data": b""}, "a graph of ONNX"),
    "orbax, not finished": (
        {"5.orbax-checkpoint-tmp/ocdbt.process_0/d/1f": b"", "5.orbax-checkpoint-tmp/_METADATA": b"{}"},
        "a part of a checkpoint of Orbax that is not finished, or has no tree of arrays",
    ),
    "orbax without a tree": (
        {"_CHECKPOINT_METADATA": b"{}", "default/params.w/.zarray": b"{}"},
        "a part of a checkpoint of Orbax that is not finished, or has no tree of arrays",
    ),
    "tensorrt-llm": (
        {"config.json": b"{}", "rank0.safetensors": b"", "rank1.safetensors": b""},
        "a rank's part of a model that an inference engine saved",
    ),
}


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def gather(source: Path) -> list[str]:
    """Return the lines of the refusal of a gather that a user types."""
    done = CliRunner().invoke(cli, ["gather", str(source), "--out", str(source.parent / "out")])
    assert (done.exit_code, done.stdout) == (2, "")
    assert not (source.parent / "out").exists()
    return done.stderr.splitlines()


@pytest.mark.parametrize(("files", "noun"), KINDS.values(), ids=KINDS)
def test_a_kind_is_named(tmp_path: Path, files: dict[str, bytes], noun: str) -> None:
    folder = fill(tmp_path / "source", files)
    refusal = gather(folder)
    assert refusal[0].startswith(f"xrank: UnknownFormatError: {folder}{os.sep}")
    assert refusal[0].endswith(f" is {noun}, which xrank does not read")
    assert any(line.startswith("  try   ") for line in refusal)
    above = gather(fill(tmp_path / "above", {f"run/{name}": content for name, content in files.items()}))
    assert above[0].endswith(f" is {noun}, which xrank does not read")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model_world_size_1_rank_0.pt", "model.pt"])
def test_pointers_of_git_lfs_under_names_of_models(tmp_path: Path, name: str) -> None:
    """The file itself may still come, with exit code 3."""
    fill(tmp_path / "source", {name: POINTER})
    done = CliRunner().invoke(cli, ["gather", str(tmp_path / "source"), "--out", str(tmp_path / "out")])
    first, *_, last = done.stderr.splitlines()
    assert done.exit_code == 3 and first.endswith(f"{name} is a pointer of git-lfs, not the file itself")
    assert last == "  try   fetch the file (git lfs pull), then run the same command (exit 3)"


def test_the_whole_text_for_a_file(tmp_path: Path) -> None:
    file = fill(tmp_path / "source", {"llama.gguf": b"GGUF\3\0\0\0"}) / "llama.gguf"
    assert gather(file) == [
        f"xrank: UnknownFormatError: {file} is a GGUF file of llama.cpp, which xrank does not read",
        "  want  a checkpoint of a framework on torch, or a Hugging Face folder",
        "  try   give the checkpoint or the Hugging Face folder that was converted into it (exit 2)",
    ]


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "source" / "checkpoint-5" / "inner" / "most").mkdir(parents=True)
    assert gather(tmp_path / "source") == [
        f"xrank: UnknownFormatError: {tmp_path / 'source'} contains no file",
        "  got   an empty folder; want a checkpoint",
        "  try   check the path (exit 2)",
    ]
    (tmp_path / "source" / "checkpoint-5" / "inner" / "most" / "link").symlink_to(tmp_path)
    assert "has no known format" in gather(tmp_path / "source")[0]


def test_other_formats_beside_a_model_are_no_hindrance(tmp_path: Path) -> None:
    for number, (files, _) in enumerate(KINDS.values()):
        folder = fill(tmp_path / f"source-{number}", files)
        save_file({"w": torch.ones(2)}, folder / "model.safetensors")
        assert find_source(str(folder)).path == str(folder)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    os.mkfifo(tmp_path / "source" / "pipe")
    (tmp_path / "source" / "broken").symlink_to("absent")
    (tmp_path / "source" / "short").write_bytes(b"GG")
    assert "has no known format" in gather(tmp_path / "source")[0]


class Quantized(torch.Tensor):
    """Stands for torchao's tensors, which torch saves by the same function."""


def own_class() -> torch.Tensor:
    return torch.rand(2, 3).as_subclass(Quantized)


def script(file: Path) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.rand(1, 2)), str(file))


OBJECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "list": (lambda file: torch.save([torch.rand(2)], file), "is not a state dict\n  got   list"),
    "tensor": (lambda file: torch.save(torch.rand(2), file), "is not a state dict\n  got   a tensor without a name"),
    "plain dict": (lambda file: torch.save({"step": 1, "lr": 0.1}, file), "holds no tensor\n  got   step, lr"),
    "script": (script, "is a TorchScript archive"),
    "own tensors": (lambda file: torch.save({"a.weight": own_class()}, file), "holds a tensor of"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "last.ckpt"])
@pytest.mark.parametrize("kind", OBJECTS)
def test_saved_objects_without_a_state_dict_are_named(tmp_path: Path, kind: str, name: str) -> None:
    save, says = OBJECTS[kind]
    source = tmp_path / "source"
    source.mkdir()
    save(source / name)
    ended = run("gather", source, "--out", tmp_path / "out")
    assert ended.exit_code == 2 and says in ended.stderr and "UnsafeError" not in ended.stderr, ended.stderr
    assert not (tmp_path / "out").exists()


def test_own_tensors_in_a_distributed_checkpoint_are_named(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": {"a.weight": own_class()}}, checkpoint_id=str(tmp_path / "step"), no_dist=True)
    ended = run("gather", tmp_path / "step", "--out", tmp_path / "out")
    assert ended.exit_code == 2 and "Quantized', which xrank cannot read" in ended.stderr


@pytest.mark.parametrize("part", ["model.safetensors", "pytorch_model.bin", "model.pt", "__0_0.distcp", ".metadata"])
def test_pointer_in_the_place_of_a_file_is_named(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    if "distcp" in part or part == ".metadata":
        with warnings.catch_warnings(action="ignore"):
            dcp.save({"model": {"a.weight": torch.rand(9)}}, checkpoint_id=str(folder), no_dist=True)
    (folder / part).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 9\n")
    ended = run("gather", folder, "--out", tmp_path / "out")
    assert ended.exit_code == 3 and "is a pointer of git-lfs, not the file itself" in ended.stderr
    assert f"{part} is a pointer" in ended.stderr and "git lfs pull" in ended.stderr


@pytest.mark.parametrize(
    "names", [["tokenizer.json", "tokenizer_config.json"], ["config.json"], ["adapter_config.json"]]
)
def test_folder_without_weights_is_named(tmp_path: Path, names: list[str]) -> None:
    fill(tmp_path / "model", dict.fromkeys(names, b"{}"))
    for command in (["gather", tmp_path / "model", "--out", tmp_path / "out"], ["inspect", tmp_path / "model"]):
        ended = run(*command)
        assert ended.exit_code == 2 and "contains small files of a model, but no weights" in ended.stderr
        assert all(name in ended.stderr for name in names)
