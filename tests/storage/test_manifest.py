"""The manifest: the same for the same input, and strict when read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xrank.errors import CorruptError, IncompleteError
from xrank.storage.manifest import (
    DIGEST_ALGORITHM,
    ManifestFile,
    ManifestSource,
    ManifestTensor,
    manifest_blocks,
    read_manifest,
    tensor_line,
)

pytestmark = pytest.mark.quick

DIGEST = "0123456789abcdef" * 2


def line_of(dtype: str, shape: tuple[int, ...], sources: list[tuple[str, int, int, int]], replicas: int = 0) -> str:
    return tensor_line(ManifestTensor(dtype, shape, "model.safetensors", DIGEST, (), replicas), sources)


def text() -> str:
    return b"".join(
        manifest_blocks(
            ManifestSource("dcp", 2, None, 7),
            [ManifestFile("model.safetensors", 8, DIGEST)],
            [
                ("a", line_of("BF16", (2, 1), [("__0_0.distcp", 0, 64, 4)], replicas=1)),
                ("b\n", line_of("F32", (), [])),
            ],
            companions=[ManifestFile("config.json", 2, DIGEST)],
            tied={"c": "a"},
            excluded=["z", "y"],
            cast={"a": "F32"},
            padding_dropped={"a": 3},
            notes=["all well"],
        )
    ).decode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "xrank_manifest.json").write_text(text())
    return tmp_path / "xrank_manifest.json"


def test_a_tensors_line_is_what_json_writes():
    """Names in any letters, and numbers of any size, in the order of the keys."""
    sources = [('a "b"\\é\n.pth', 0, 64, 2**40), ("rank_1_state.pth", 1, 0, 0)]
    for shape in ((), (3,), (2, 0, 2**33)):
        line = tensor_line(ManifestTensor("F8_E4M3", shape, "model\u2028.safetensors", DIGEST, (), 2), sources)
        rows = [{"file": file, "rank": rank, "offset": at, "nbytes": nbytes} for file, rank, at, nbytes in sources]
        value = {"dtype": "F8_E4M3", "shape": shape, "file": "model\u2028.safetensors", "digest": DIGEST}
        assert line == json.dumps({**value, "sources": rows, "replicas": 2}, sort_keys=True)


def test_reads_back(path: Path) -> None:
    found = read_manifest(str(path))
    assert found["schema"] == 1
    assert found["digest"] == DIGEST_ALGORITHM
    assert found["source"] == {"format": "dcp", "world_size": 2, "run_id": None, "step": 7}
    assert found["files"] == [{"name": "model.safetensors", "nbytes": 8, "digest": DIGEST}]
    assert found["companions"] == [{"name": "config.json", "nbytes": 2, "digest": DIGEST}]
    assert list(found["tensors"]) == ["a", "b\n"]
    assert found["tensors"]["a"] == {
        "dtype": "BF16",
        "shape": [2, 1],
        "file": "model.safetensors",
        "digest": DIGEST,
        "sources": [{"file": "__0_0.distcp", "rank": 0, "offset": 64, "nbytes": 4}],
        "replicas": 1,
    }
    assert found["excluded"] == ["y", "z"]
    assert (found["tied"], found["cast"], found["padding_dropped"]) == ({"c": "a"}, {"a": "F32"}, {"a": 3})
    assert found["notes"] == ["all well"]


def test_a_line_for_each_tensor() -> None:
    assert sum(line.lstrip().startswith(('"a"', '"b\\n"')) for line in text().splitlines()) >= 2
    assert text() == text()


def test_empty_sections(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"".join(manifest_blocks(ManifestSource("hf", None, None, None), [], [])))
    assert read_manifest(str(tmp_path / "m"))["tensors"] == {}


def test_none(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError):
        read_manifest(str(tmp_path / "xrank_manifest.json"))


def test_fifo_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m")
    with pytest.raises(CorruptError):
        read_manifest(str(tmp_path / "m"))


def _set(*keys: Any) -> Callable[[Any], None]:
    *where, value = keys

    def change(manifest: Any) -> None:
        for key in where[:-1]:
            manifest = manifest[key]
        manifest[where[-1]] = value

    return change


FLAWS = [
    _set("schema", 2),
    _set("schema", True),
    _set("schema", 1.0),
    _set("digest", "md5"),
    _set("extra", 1),
    _set("source", None),
    _set("source", "format", 3),
    _set("source", "world_size", -1),
    _set("source", "world_size", True),
    _set("source", "run_id", 4),
    _set("source", "host", "me"),
    _set("files", {}),
    _set("files", 0, "name", "../x"),
    _set("files", 0, "name", "/etc/passwd"),
    _set("files", 0, "name", "a\\b"),
    _set("files", 0, "name", None),
    _set("files", 0, "nbytes", -1),
    _set("files", 0, "nbytes", 1.5),
    _set("files", 0, "digest", "zz"),
    _set("files", []),
    _set("companions", 0, "name", "model.safetensors"),
    _set("tensors", []),
    _set("tensors", "a", []),
    _set("tensors", "a", "dtype", "F6_E2M3"),
    _set("tensors", "a", "shape", [-1]),
    _set("tensors", "a", "shape", [True]),
    _set("tensors", "a", "shape", 3),
    _set("tensors", "a", "file", "config.json"),
    _set("tensors", "a", "digest", None),
    _set("tensors", "a", "sources", 0, "file", "../x"),
    _set("tensors", "a", "sources", 0, "rank", "0"),
    _set("tensors", "a", "sources", 0, "offset", None),
    _set("tensors", "a", "replicas", None),
    _set("tied", "c", "nothing"),
    _set("tied", "c", []),
    _set("excluded", [1]),
    _set("cast", []),
    _set("notes", {}),
]


@pytest.mark.parametrize("number", range(len(FLAWS)))
def test_flaws(path: Path, number: int) -> None:
    manifest = json.loads(path.read_text())
    FLAWS[number](manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(CorruptError) as caught:
        read_manifest(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"schema": 1, "schema": 1}',
        b'{"schema": NaN}',
        b"1" * 5000,
    ],
)
def test_no_manifest_at_all(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(CorruptError):
        read_manifest(str(path))


def test_torn_anywhere(path: Path) -> None:
    content = path.read_bytes()
    for length in range(len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CorruptError):
            read_manifest(str(path))
