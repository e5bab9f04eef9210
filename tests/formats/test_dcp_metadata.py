"""The metadata of torch DCP: what torch's own classes say, read without them; nothing runs, nothing is guessed."""

from __future__ import annotations

import gc
import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, WriteItem, WriteItemType

from tests.sampled import count_of
from xrank.errors import CorruptError, UnsafeError, UsageError, XrankError
from xrank.formats.dcp_metadata import DcpMetadata, _find_referenced, _RunFinder, read_metadata
from xrank.formats.pickles import PickleScan
from xrank.storage.regular_file import Origin


def own(text: str) -> str:
    """Return the same text as an object of its own, as it comes out of another rank's pickle."""
    return pickle.loads(pickle.dumps([text]))[0]


def size(*extents: int) -> torch.Size:
    return torch.Size(extents)


def made(
    tensors: dict[str, list[tuple[int, ...]]],
    num_ranks: int = 3,
    *,
    shared: bool = False,
    scale: int = 1,
    planner_data: Any = None,
) -> Metadata:
    """Return metadata of tensors cut by rows over ranks.

    Args:
        tensors: name -> shape of each rank's piece.
        num_ranks: pieces of each tensor.
        shared: let all entries name the same text objects, as a save by one process does.
        scale: of byte offsets.
        planner_data: as torch has it.
    """
    listed: dict[str, Any] = {}
    stored = {}
    for name, pieces in tensors.items():
        chunks = []
        low = 0
        for piece in pieces[:num_ranks]:
            offsets = size(low, *(0 for _ in piece[1:])) if piece else size()
            chunks.append(ChunkStorageMetadata(offsets, size(*piece)))
            low += piece[0] if piece else 0
        whole = size(low, *pieces[0][1:]) if pieces[0] else size()
        listed[name] = TensorStorageMetadata(TensorProperties(torch.float16), whole, chunks)
    paths = [f"__{rank}_0.distcp" for rank in range(num_ranks)]
    for rank in range(num_ranks):
        for k, name in enumerate(tensors):
            chunks = listed[name].chunks
            if rank < len(chunks):
                index = MetadataIndex(name if shared else own(name), chunks[rank].offsets, rank)
                path = paths[rank] if shared else own(paths[rank])
                stored[index] = _StorageInfo(path, (k + 1) * scale, k + 1000)
    return Metadata(listed, planner_data, stored, StorageMeta(Path("a/b"), "id"), "1.0.0")


def read(folder: Path, metadata: Any, protocol: int = 4) -> DcpMetadata:
    path = folder / ".metadata"
    path.write_bytes(metadata if isinstance(metadata, bytes) else pickle.dumps(metadata, protocol))
    return read_metadata(str(path))


def assert_same(found: DcpMetadata, want: Metadata) -> None:
    """Compare with what torch's objects say, piece by piece."""
    tensors = {name: item for name, item in want.state_dict_metadata.items() if hasattr(item, "chunks")}
    assert list(found.tensors) == list(tensors)
    for name, item in tensors.items():
        tensor = found.tensors[name]
        assert (tensor.name, tensor.shape, f"torch.{tensor.dtype}") == (name, item.size, str(item.properties.dtype))
        pieces = {}
        for chunk in item.chunks:
            info = want.storage_data[MetadataIndex(name, chunk.offsets)]
            if 0 not in chunk.sizes:
                pieces[tuple(chunk.offsets)] = (tuple(chunk.sizes), info.relative_path, info.offset, info.length)
        columns = (tensor.offsets, tensor.sizes, tensor.file, tensor.start, tensor.nbytes)
        assert all(column.dtype == np.int64 for column in columns)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        assert {
            tuple(low): (tuple(extents), found.files[file], start, nbytes) for low, extents, file, start, nbytes in rows
        } == pieces
        assert tensor.offsets.tolist() == sorted(tensor.offsets.tolist())


RAGGED = {
    "model.layers.0.weight": [(300, 70000), (300, 70000), (17, 70000)],
    "rows": [(2,), (2,), (1,)],
    "none on the last": [(3, 4), (3, 4), (0, 4)],
    "scalar": [()],
    "cube": [(1, 2, 3)] * 3,
    "four": [(2, 3, 4, 5)] * 3,
    "six": [(2, 3, 1, 4, 5, 7)] * 3,
    "huge": [(2**40, 2**20), (2**33, 2**20)],
    "n" * 148: [(4, 4)] * 3,  # its length is a memo's opcode
    "n" * 400: [(4, 4)] * 3,
    "\u00d4 \u0094": [(4, 4)] * 3,  # its bytes have that opcode in them
    "": [(1,)],
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("scale", [1, 2**15, 2**31 - 1, 2**31, 2**39, 2**47, 2**55, 2**60])
def test_says_what_torchs_classes_say(tmp_path: Path, protocol: int, shared: bool, scale: int) -> None:
    metadata = made(RAGGED, shared=shared, scale=scale // 16)
    found = read(tmp_path, metadata, protocol)
    assert_same(found, metadata)
    assert found.version == "1.0.0" and found.paths is None
    assert found.nbytes == sum(info.length for info in metadata.storage_data.values())


def test_random_cuts(tmp_path: Path) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        tensors = {}
        for k in range(draw.randint(1, 12)):
            rest = [draw.choice([1, 3, 255, 256, 65536]) for _ in range(draw.randint(0, 4))]
            rows = [draw.choice([1, 200, 256, 70000]) for _ in range(draw.randint(1, 6))]
            tensors[f"t{k}" * draw.randint(1, 60)] = [(n, *rest) for n in rows]
        metadata = made(tensors, 6, shared=draw.random() < 0.5, scale=draw.choice([1, 3000, 2**33]))
        assert_same(read(tmp_path, metadata, draw.choice([4, 5])), metadata)


def test_nearly_all_entries_are_taken_whole() -> None:
    data = pickle.dumps(made({f"layers.{k}.weight": [(3, 4)] * 50 for k in range(40)}, 50))
    rest, runs = _RunFinder(data, Origin("x"), set()).cut()
    # But the first two, from which later ones get classes and fields, and those that a frame of the pickle ends in.
    num_entries = sum(run.count for run in runs if run.is_entries)
    assert 40 * 50 - 3 - len(data) // 60_000 <= num_entries < 40 * 50
    # Of 28,000 values that the pickle memoizes, those of the chunks and entries are not kept.
    assert len(rest) < len(data) / 10


def test_a_path_that_later_entries_refer_to_is_not_taken_whole() -> None:
    # Ranks begin within batches of 1,000 entries, and each has the text of its path once.
    data = pickle.dumps(made({f"layers.{k}.weight": [(3, 4)] * 5 for k in range(300)}, 5, shared=True))
    rest, runs = _RunFinder(data, Origin("x"), set()).cut()
    assert not _find_referenced(PickleScan(rest, Origin("x"), 1 << 26, runs), runs)


def test_what_was_taken_whole_is_read_again_where_it_is_referred_to(tmp_path: Path) -> None:
    metadata = made({f"t{k}": [(3, 4)] * 4 for k in range(6)}, 4)
    infos = list(metadata.storage_data.items())
    for (_, one), (index, _) in zip(infos[5:9], infos[11:15], strict=True):
        metadata.storage_data[index] = one  # the very object: the pickle refers back into a stretch taken whole
    chunks = metadata.state_dict_metadata["t3"].chunks
    metadata.state_dict_metadata["t4"].chunks = list(chunks)
    assert_same(read(tmp_path, metadata), metadata)


def test_byte_items_and_paths(tmp_path: Path) -> None:
    metadata = made(
        {"model.w": [(3, 4)] * 3}, planner_data={"model.w": ("model", "w"), "optim.0.lr": ("optim", 0, "lr")}
    )
    metadata.state_dict_metadata["optim.0.lr"] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex("optim.0.lr")] = _StorageInfo("__0_0.distcp", 5000, 77)
    found = read(tmp_path, metadata)
    assert_same(found, metadata)
    assert dict(found.byte_items) == {"optim.0.lr": (found.files.index("__0_0.distcp"), 5000, 77)}
    assert dict(found.paths or {}) == {"model.w": ("model", "w"), "optim.0.lr": ("optim", 0, "lr")}


def test_metadata_of_older_torch(tmp_path: Path) -> None:
    # Before 2.3 there is no storage_meta, before 2.7 no version, and every entry says that it has no transform.
    metadata = made({"w": [(3, 4)] * 3})
    del metadata.__dict__["storage_meta"], metadata.__dict__["version"]
    found = read(tmp_path, metadata)
    assert_same(found, metadata)
    assert found.version is None


def test_plans_of_ranks_may_be_recorded(tmp_path: Path) -> None:
    """As Megatron-core's torch_dist does (core/dist_checkpointing/strategies/torch.py: MCoreSavePlanner)."""
    metadata = made(RAGGED)
    items = [
        WriteItem(MetadataIndex("a", (0,)), WriteItemType.SHARD, None, None),
        WriteItem(MetadataIndex("b"), WriteItemType.BYTE_IO, BytesIOWriteData(3), None),
    ]
    metadata.all_local_plans = [SavePlan(items)]  # type: ignore[attr-defined]
    assert_same(read(tmp_path, metadata), made(RAGGED))


def test_replicas_listed_twice_are_one(tmp_path: Path) -> None:
    metadata = made({"w": [(3, 4)] * 3})
    chunks = metadata.state_dict_metadata["w"].chunks
    chunks += [ChunkStorageMetadata(chunk.offsets, chunk.sizes) for chunk in chunks]
    assert len(read(tmp_path, metadata).tensors["w"].start) == 3


def test_the_collector_runs_again_afterwards(tmp_path: Path) -> None:
    read(tmp_path, made({"w": [(3, 4)] * 3}))
    assert gc.isenabled()
    with pytest.raises(CorruptError):
        read(tmp_path, b"\x80\x04N.")
    assert gc.isenabled()


# ---- contradictions


def changed(change: Any) -> Metadata:
    metadata = made({"a": [(3, 4)] * 3, "b": [(3,)] * 3}, planner_data={"a": ("a",), "b": ("b",)})
    change(metadata, metadata.state_dict_metadata, metadata.storage_data)
    return metadata


def moved(stored: dict[Any, Any], name: str, number: int, offset: torch.Size) -> None:
    index = [index for index in stored if index.fqn == name][number]
    stored[MetadataIndex(name, offset)] = stored.pop(index)


CONTRADICTIONS: dict[str, tuple[Any, str]] = {
    "not listed": (lambda m, listed, stored: listed.pop("a"), "is stored, but not listed"),
    "not stored": (
        lambda m, listed, stored: stored.pop(MetadataIndex("a", [3, 0])),
        r"a piece at \[3, 0\] that is stored no",
    ),
    "elsewhere": (lambda m, listed, stored: moved(stored, "a", 1, size(4, 0)), "stored nowhere"),
    "one too many": (lambda m, listed, stored: listed["a"].chunks.pop(), "is stored in other pieces than listed"),
    "dims of a place": (lambda m, listed, stored: moved(stored, "a", 1, size(3)), "dimensions"),
    "dims of a tensor": (lambda m, listed, stored: setattr(listed["a"], "size", size(9, 4, 1)), "dimensions"),
    "dims of a piece": (lambda m, listed, s: setattr(listed["a"].chunks[2], "sizes", size(3)), "dimensions|in number"),
    "no pieces": (lambda m, listed, stored: setattr(listed["a"], "chunks", None), "no list of pieces"),
    "negative shape": (lambda m, listed, stored: setattr(listed["a"], "size", size(9, -4)), "not a count"),
    "negative offset": (
        lambda m, listed, s: setattr(listed["a"].chunks[1], "offsets", size(-3, 0)),
        "below 0|not a count",
    ),
    "bytes not stored": (lambda m, listed, s: listed.update(c=BytesStorageMetadata()), "is listed, but stored nowhere"),
    "no places": (lambda m, listed, stored: setattr(m, "storage_data", None), "lists no tensors, or not where"),
    "no list": (lambda m, listed, stored: setattr(m, "state_dict_metadata", []), "lists no tensors, or not where"),
    "no nesting": (lambda m, listed, stored: m.__dict__.pop("planner_data"), "lists no tensors, or not where"),
    "another name": (
        lambda m, listed, stored: m.planner_data.update(a=("c",)),
        "a name that differs from its keys",
    ),
    "no keys": (lambda m, listed, stored: m.planner_data.pop("a"), "is missing in the nested state"),
    "a path of no keys": (lambda m, listed, stored: m.planner_data.update({"": ()}), "an empty path"),
    "a number as tensor": (lambda m, listed, stored: listed.update(a=3), "an unexpected value"),
    "a number as place": (lambda m, listed, stored: stored.update({4: 5}), "an unexpected value"),
    "negative place": (lambda m, listed, s: setattr(s[MetadataIndex("b", [3])], "offset", -1), "below 0|not a count"),
    "endless place": (lambda m, listed, s: setattr(s[MetadataIndex("b", [3])], "length", 2**63), "not a count"),
    "a number as path": (lambda m, listed, s: setattr(s[MetadataIndex("b", [3])], "relative_path", 5), "or its file"),
    "no dtype": (lambda m, listed, stored: setattr(listed["b"].properties, "dtype", None), "no element type"),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_contradictions_are_named(tmp_path: Path, kind: str) -> None:
    change, said = CONTRADICTIONS[kind]
    with pytest.raises(CorruptError) as caught:
        read(tmp_path, changed(change))
    assert re.search(said, f"{caught.value} {caught.value.got}")
    assert caught.value.file == str(tmp_path / ".metadata")


def test_what_is_no_dense_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a dense tensor"):
        read(tmp_path, changed(lambda m, listed, s: setattr(listed["a"].properties, "layout", torch.sparse_coo)))


def test_two_pieces_at_one_place(tmp_path: Path) -> None:
    # No dict of Python's holds a key twice, but a pickle may.
    metadata = made({"a": [(3, 4)], "A": [(2, 4)]}, 1)
    metadata.state_dict_metadata["a"].chunks += metadata.state_dict_metadata.pop("A").chunks
    data = pickle.dumps(metadata)
    assert data.count(b"\x8c\x01A\x94") == 1
    with pytest.raises(CorruptError, match="two pieces at the same offsets"):
        read(tmp_path, data.replace(b"\x8c\x01A\x94", b"\x8c\x01a\x94"))


# ---- hostile and damaged


def test_stretches_taken_whole_are_held_to_the_rules_of_pickle(tmp_path: Path) -> None:
    data = pickle.dumps(made({"first": [(3, 4)] * 4, "other": [(3, 4)] * 4}, 4))
    assert read(tmp_path, data)
    # Four pieces where the opcode takes one; without a mark for the opcode that takes all down to it.
    at = data.rindex(b"e", 0, data.index(b"planner_data"))
    mark = data.rindex(b"]\x94(", 0, at) + 2
    assert data[at + 1 : at + 3] == b"ub"
    # A text that claims another length than it has.
    text = data.rindex(b"\x8c\x05other")
    for broken in (
        data[:mark] + data[mark + 1 : at] + b"a" + data[at + 1 :],
        data[:at] + b"a" + data[at + 1 :],
        data[:mark] + data[mark + 1 :],
        data[: text + 1] + b"\x04" + data[text + 2 :],
        data[: text + 1] + b"\x06" + data[text + 2 :],
    ):
        with pytest.raises(CorruptError):
            read(tmp_path, broken)


def test_objects_of_other_classes_are_not_taken_for_chunks(tmp_path: Path) -> None:
    """They have the same form, and are read opcode by opcode."""
    data = pickle.dumps(made({"a.w": [(300, 4)] * 4}, 4))
    assert data.count(b"\x07offsets") == data.count(b"\x14ChunkStorageMetadata") == 1
    with pytest.raises(CorruptError, match="not a tuple"):
        read(tmp_path, data.replace(b"\x07offsets", b"\x07offsetz"))
    with pytest.raises(CorruptError, match="a piece of an unexpected class"):
        read(tmp_path, data.replace(b"\x14ChunkStorageMetadata", b"\x14ChunkStorageMetadatb"))


def test_memo_numbers_out_of_order(tmp_path: Path) -> None:
    # As no pickler writes them.
    with pytest.raises(CorruptError):
        read(tmp_path, b"\x80\x02Nr\xff\xff\x00\x00.")


class Call:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.made = (function, arguments)

    def __reduce__(self) -> Any:
        return self.made


PLACES = {
    "the whole": lambda m, evil: evil,
    "the listed": lambda m, evil: setattr(m, "state_dict_metadata", evil),
    "a tensor": lambda m, evil: m.state_dict_metadata.update(a=evil),
    "a shape": lambda m, evil: setattr(m.state_dict_metadata["a"], "size", evil),
    "a piece": lambda m, evil: m.state_dict_metadata["a"].chunks.append(evil),
    "a piece's sizes": lambda m, evil: setattr(m.state_dict_metadata["a"].chunks[1], "sizes", evil),
    "a place": lambda m, evil: m.storage_data.update({MetadataIndex("a", [3, 0]): evil}),
    "a path": lambda m, evil: setattr(m.storage_data[MetadataIndex("a", [3, 0])], "relative_path", evil),
    "a dtype": lambda m, evil: setattr(m.state_dict_metadata["a"].properties, "dtype", evil),
}


@pytest.mark.parametrize("place", PLACES)
def test_calls_are_not_made(tmp_path: Path, place: str) -> None:
    marker = tmp_path / "marker"
    metadata = made({"a": [(3, 4)] * 3})
    data = pickle.dumps(PLACES[place](metadata, Call(os.mkdir, str(marker))) or metadata)
    with pytest.raises((UnsafeError, CorruptError)):
        read(tmp_path, data)
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists()  # else its absence proves nothing


def test_every_cut_and_many_flips_end_in_one_error_or_none(tmp_path: Path) -> None:
    data = pickle.dumps(made({"a.w": [(300, 4)] * 4, "b": [(3,)] * 3}, 4))
    for length in range(0, len(data), 5):
        with pytest.raises(CorruptError):
            read(tmp_path, data[:length])
    draw = random.Random(5)
    outcomes = set()
    for _ in range(count_of(700)):
        flipped = bytearray(data)
        for _ in range(draw.choice([1, 1, 2, 8])):
            flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        try:
            read(tmp_path, bytes(flipped))
            outcomes.add("read")
        except XrankError as error:
            assert error.file == str(tmp_path / ".metadata"), error
            assert error.exit_code in (2, 4), error
            outcomes.add(type(error).__name__)
    assert {"read", "CorruptError", "UnsafeError"} <= outcomes


def test_claims_allocate_nothing_and_depth_takes_no_recursion(tmp_path: Path) -> None:
    # A memo of a billion entries is claimed; lists in lists go on without end.
    for data in (
        b"\x80\x04Nr\xff\xff\xff\x3f.",
        b"\x80\x04" + b"]" * 300_000 + b"a" * 299_999 + b".",
        b"\x80\x04" + b"(" * 300_000 + b"t" * 300_000 + b".",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    ):
        with pytest.raises((CorruptError, UsageError)):
            read(tmp_path, data)


def test_torch_is_not_imported(tmp_path: Path) -> None:
    read(tmp_path, made(RAGGED))
    code = (
        "import sys; from xrank.formats.dcp_metadata import read_metadata; "
        "print(len(read_metadata(sys.argv[1]).tensors)); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(tmp_path / ".metadata")]
    assert subprocess.run(command, check=True, capture_output=True).stdout.split() == [b"12"]
