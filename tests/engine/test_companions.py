"""What is copied beside the weights, and what never is."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from xrank.engine.companions import (
    CompanionFile,
    check_companions,
    find_hub_snapshot,
    list_base_companions,
    list_source_companions,
)
from xrank.errors import CorruptError, IncompleteError, UnsafeError, UsageError


def fill(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def names(folder: Path) -> list[str]:
    return [c.name for c in list_base_companions(str(folder))]


KEPT = [
    "LICENSE",
    "README.md",
    "additional_chat_templates/tool.jinja",
    "code/deep/model.py",
    "config.json",
    "generation_config.json",
    "retrieval.index.json",
    "some.index.thing.json",
    "tokenizer.model",
    "vocab.txt",
]
DROPPED = [
    ".gitattributes",
    ".cache/x.json",
    "a.safetensors",
    "pytorch_model-00001-of-00002.bin",
    "A.PT",
    "a.pth",
    "a.ckpt",
    "tf_model.h5",
    "flax_model.msgpack",
    "a.gguf",
    "onnx/model.onnx",
    "onnx/model.onnx_data",
    "rust_model.ot",
    "a.npz",
    "a.tflite",
    "__0_0.distcp",
    "a.lock",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "model.safetensors.index.fp16.json",
    "fqn_to_dtype_mapping.json",
    "fqn_to_file_index_mapping.json",
    "xrank_manifest.json",
]


def test_all_but_weights_and_hidden_files(tmp_path: Path) -> None:
    fill(tmp_path, *KEPT, *DROPPED)
    assert names(tmp_path) == sorted(KEPT)
    assert all(Path(c.path).read_text() == c.name for c in list_base_companions(str(tmp_path)))


def test_nothing_of_another_model_or_checkpoint_within(tmp_path: Path) -> None:
    fill(tmp_path, "config.json", "checkpoint-2000/config.json", "checkpoint-2000/trainer_state.json")
    fill(tmp_path, "checkpoint-2000/pytorch_model_fsdp_0/__0_0.distcp", "onnx/config.json", "onnx/model.onnx")
    assert names(tmp_path) == ["config.json"]


def test_links_to_files_are_read_links_to_folders_are_not(tmp_path: Path) -> None:
    fill(tmp_path, "blobs/abc", "elsewhere/secret.json")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").symlink_to("../blobs/abc")
    (model / "folder").symlink_to("../elsewhere")
    (model / "loop").symlink_to(".")
    (model / "circle").symlink_to("circle")
    assert names(model) == ["config.json"]


def test_a_link_to_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("../blobs/gone")
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(IncompleteError, match=r"tokenizer\.json"):
        names(tmp_path)


def test_fifos_and_devices_are_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "vocab.txt").symlink_to("/dev/zero")
    assert names(tmp_path) == []
    assert list_source_companions(str(tmp_path)) == ()


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a folder"):
        list_base_companions(str(tmp_path / "gone"))


def test_beside_a_source_only_well_known_names(tmp_path: Path) -> None:
    fill(tmp_path, "config.json", "huggingface/config.json", "huggingface/tokenizer.json", "trainer_state.json")
    found = {c.name: c.path for c in list_source_companions(str(tmp_path))}
    assert found == {
        "config.json": str(tmp_path / "config.json"),
        "tokenizer.json": str(tmp_path / "huggingface" / "tokenizer.json"),
    }


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    fill(tmp_path, "models--org--name/snapshots/0a1b/config.json")
    (tmp_path / "models--org--name/refs").mkdir()
    (tmp_path / "models--org--name/refs/main").write_text("0a1b\n")
    return tmp_path


def test_a_model_in_the_cache(cache: Path) -> None:
    assert find_hub_snapshot("org/name", str(cache)) == str(cache / "models--org--name/snapshots/0a1b")


def test_a_model_not_in_the_cache(cache: Path) -> None:
    with pytest.raises(UsageError, match="models--org--other") as caught:
        find_hub_snapshot("org/other", str(cache))
    assert "hf download org/other" in (caught.value.next_step or "")
    (cache / "models--org--name/refs/main").write_text("ffff")
    with pytest.raises(UsageError, match="ffff"):
        find_hub_snapshot("org/name", str(cache))


@pytest.mark.parametrize("text", ["../../x", "/etc", "", ".", "..", "a/b", "a\0b", "ä"])
def test_a_cache_that_points_outside(cache: Path, text: str) -> None:
    (cache / "models--org--name/refs/main").write_text(text)
    with pytest.raises(UnsafeError):
        find_hub_snapshot("org/name", str(cache))


@pytest.mark.parametrize("identifier", ["", "../x", "a/b/c", "/a", "a/", "a\nb", "a/../b", "~"])
def test_no_identifier(cache: Path, identifier: str) -> None:
    with pytest.raises(UsageError, match="neither"):
        find_hub_snapshot(identifier, str(cache))


@pytest.mark.parametrize("kind", ["sha1", "sha256"])
def test_a_file_of_the_cache_has_the_hash_that_it_is_named_by(tmp_path: Path, kind: str) -> None:
    """The cache names large files by SHA-256, others by the hash that git gives them."""
    content = b"hello\n"
    name = hashlib.sha256(content).hexdigest() if kind == "sha256" else "ce013625030ba8dba906f756967f9e9ca394464a"
    blob = tmp_path / "blobs" / name
    blob.parent.mkdir()
    blob.write_bytes(content)
    (tmp_path / "model").mkdir()
    link = tmp_path / "model" / "tokenizer.model"
    link.symlink_to(f"../blobs/{name}")
    companion = CompanionFile(link.name, str(link))
    assert check_companions([companion]) == (companion,)
    blob.write_bytes(b"hellp\n")
    with pytest.raises(CorruptError, match=r"tokenizer\.model is not the file that was downloaded") as caught:
        check_companions([companion])
    assert name in str(caught.value)
    assert "download the model again" in (caught.value.next_step or "")
