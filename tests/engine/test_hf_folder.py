"""The split into files, checked against the Hub's rules and read back by safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.sampled import count_of
from xrank import dtypes
from xrank.engine import hf_folder
from xrank.engine.hf_folder import index_text, lay_out
from xrank.errors import UsageError
from xrank.layout.output_files import OutputFile, OutputTensor

pytestmark = pytest.mark.quick


def tensor(name: str, *shape: int, dtype: str = "F32") -> OutputTensor:
    return OutputTensor(name, dtype, shape)


def write(folder: Path, file: OutputFile) -> Path:
    path = folder / file.name
    with open(path, "wb") as out:
        out.write(file.header)
        out.truncate(file.nbytes)
    return path


def test_files_in_the_given_order_and_a_large_tensor_alone() -> None:
    names = [("a", 10), ("b", 10), ("large", 1000), ("c", 10), ("d", 11)]
    files = lay_out([tensor(name, n) for name, n in names], 80)
    assert [(f.name, [t.name for t in f.tensors]) for f in files] == [
        ("model-00001-of-00004.safetensors", ["a", "b"]),
        ("model-00002-of-00004.safetensors", ["large"]),
        ("model-00003-of-00004.safetensors", ["c"]),
        ("model-00004-of-00004.safetensors", ["d"]),
    ]


def test_index() -> None:
    text = index_text(lay_out([tensor("b", 10), tensor("a", 10, dtype="BF16")], 40))
    assert text is not None
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    assert json.loads(text) == {
        "metadata": {"total_parameters": 20, "total_size": 60},
        "weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"},
    }
    assert text.index('"a"') < text.index('"b"')


def test_blocks_first_then_by_width() -> None:
    given = [
        tensor("byte", 3, dtype="U8"),
        tensor("half", 5, dtype="BF16"),
        tensor("block", 1024),
        tensor("double", 1, dtype="F64"),
        tensor("empty", 0),
        tensor("half2", 1, dtype="F16"),
        tensor("block2", 2, 4096, dtype="I8"),
        tensor("scalar"),
    ]
    (file,) = lay_out(given, 10**9)
    names = [t.name for t in file.tensors]
    assert names == ["block", "empty", "block2", "double", "scalar", "half", "half2", "byte"]
    assert all(t.offset % 4096 == 0 for t in file.tensors[:3])


def test_nothing_to_write() -> None:
    with pytest.raises(UsageError, match="no tensor"):
        lay_out([], 10)


def test_one_name_twice() -> None:
    with pytest.raises(UsageError, match="two tensors") as caught:
        lay_out([tensor("a", 1), tensor("a", 2)], 10)
    assert caught.value.tensor == "a"


def test_split_before_the_header_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_folder, "_MAX_HEADER_NBYTES", 20_000)
    tensors = [tensor(f"{'ä' * 200}{i}", 1) for i in range(100)]
    files = lay_out(tensors, 10**9)
    assert len(files) > 3
    assert all(len(f.header) <= 20_000 for f in files)
    assert [t.name for f in files for t in f.tensors] == [t.name for t in tensors]


@settings(max_examples=count_of(60), deadline=None)
@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from(["F64", "F32", "BF16", "F8_E4M3", "U8", "I64", "BOOL"]),
            st.lists(st.integers(0, 70), max_size=3),
        ),
        min_size=1,
        max_size=12,
    ),
    limit=st.integers(1, 10**6),
)
def test_every_layout_is_read_by_safetensors(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[str, list[int]]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("model")
    tensors = [OutputTensor(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(shapes)]
    files = lay_out(tensors, limit)
    assert sorted(t.name for f in files for t in f.tensors) == sorted(t.name for t in tensors)
    assert files == lay_out(tensors, limit)
    for file in files:
        assert len(file.header) % 4096 == 0
        end = len(file.header)
        for placed in file.tensors:
            assert placed.offset == end
            assert placed.offset % dtypes.dtype(placed.dtype).nbytes == 0
            end += placed.nbytes
        assert end == file.nbytes
        assert sum(t.nbytes for t in file.tensors) <= limit or len([t for t in file.tensors if t.nbytes]) == 1
        with safe_open(write(folder, file), "np") as opened:
            assert opened.metadata() == {"format": "pt"}
            for placed in file.tensors:
                part = opened.get_slice(placed.name)
                assert (part.get_dtype(), tuple(part.get_shape())) == (placed.dtype, placed.shape)


def test_names_as_the_hub_splits(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub.serialization._base")
    sizes = [5, 9, 30, 1, 1, 1, 12, 2]
    tensors = [tensor(f"t{i}", n) for i, n in enumerate(sizes)]
    split = hub.split_state_dict_into_shards_factory(
        {t.name: t for t in tensors},
        get_storage_size=lambda t: t.nbytes,
        get_storage_id=lambda t: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=60,
    )
    files = lay_out(tensors, 60)
    text = index_text(files)
    assert text is not None
    ours = json.loads(text)
    assert ours["metadata"]["total_size"] == split.metadata["total_size"]
    assert sorted(set(ours["weight_map"].values())) == sorted(
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    )
    assert all(n.startswith("model-") for n in split.filename_to_tensors)


def test_one_file() -> None:
    files = lay_out([tensor("a", 1024), tensor("b", 3)], 10**9)
    assert [f.name for f in files] == ["model.safetensors"]
    assert index_text(files) is None


@pytest.mark.parametrize("limit", [0, -1])
def test_no_limit_at_all(limit: int) -> None:
    with pytest.raises(UsageError):
        lay_out([tensor("a", 1)], limit)


def test_the_limit_is_safetensors_own() -> None:
    from xrank.formats.safetensors_header import MAX_HEADER_NBYTES

    assert hf_folder._MAX_HEADER_NBYTES == MAX_HEADER_NBYTES
