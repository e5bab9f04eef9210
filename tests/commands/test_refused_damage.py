"""States that are cut short, damaged or hostile: refused by rank and file; where the damage means nothing, right."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.bench import Bench
from tests.commands.made_workspaces import assert_holds, copied, flip, leave, leave_plain, record, state_of
from tests.formats.crafted_zip import archive_of
from tests.sampled import count_of
from xrank.commands.gather import gather_checkpoint
from xrank.errors import CorruptError
from xrank.formats.torch_archive import read_archive


def offset_of(path: Path, tensor: str) -> int:
    """Return where a tensor's bytes begin in a state."""
    archive = read_archive(str(path))
    return archive.records[archive.value["weight"][tensor].key].offset


def mended(bench: Bench, good: Path, model: dict[str, torch.Tensor]) -> None:
    shutil.rmtree(bench.workspace)
    shutil.copytree(good, bench.workspace)
    bench.succeeds(model)


# ---- cut short


def lengths() -> list[float]:
    random.seed(4)
    return [1, 0.5, 0.99, *(random.random() for _ in range(20))]


def test_truncated_at_many_lengths(bench: Bench) -> None:
    model = leave(bench.workspace)
    path = state_of(bench.workspace, 2)
    whole = path.read_bytes()
    for share in lengths():
        path.write_bytes(whole[: min(int(len(whole) * share), len(whole) - 1)])
        says = [
            "no zip directory at its end: cut short",
            f"got   {path.stat().st_size} bytes",
            "copy rank 2's file again",
        ]
        bench.refused("CorruptError", says=says, rank=2, file="rank_2_state.pth")
    path.write_bytes(whole)
    bench.succeeds(model)


def test_zeros_to_the_end(bench: Bench) -> None:
    # What a crash leaves of a file that was never synced: its length, and zeros.
    model = leave(bench.workspace)
    path = state_of(bench.workspace, 1)
    whole = path.read_bytes()
    for share in lengths():
        start = min(int(len(whole) * share), len(whole) - 23)
        path.write_bytes(whole[:start] + bytes(len(whole) - start))
        bench.refused("CorruptError", says=["rank 1"], rank=1, file="rank_1_state.pth")
    path.write_bytes(whole)
    bench.succeeds(model)


# ---- flipped and swapped


@pytest.mark.parametrize(
    ("rank", "tensor", "where"),
    [
        (0, "embed.weight", "rows 0-7"),  # written from here
        (3, "embed.weight", "rows 8-15"),  # a replica, only compared
        (2, "norm.weight", "the whole tensor"),  # a replica of all
        (1, "down.weight", "elements [0, 6] to [7, 11]"),  # columns
        (3, "up.weight", "rows 9-11"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--replicas", "pick"]], ids=["verify", "pick"])
def test_a_flipped_bit_in_a_tensor(bench: Bench, rank: int, tensor: str, where: str, options: list[str]) -> None:
    # Also where replicas may differ: damage is no difference of opinion.
    model = leave(bench.workspace)
    good = copied(bench.workspace)
    path = state_of(bench.workspace, rank)
    flip(path, offset_of(path, tensor) + 9, bit=3)
    says = [
        f"{tensor}, {where}: checksum of rank {rank}'s {path} at byte",
        "got   crc32 ",
        "crc32 ",
        f"let rank {rank} ",
    ]
    bench.refused(
        "CorruptError", *options, says=says, rank=rank, tensor=tensor, file=path.name, index_range=where
    )  # fmt: skip
    mended(bench, good, model)


@pytest.mark.parametrize(
    ("find", "said"),
    [
        (lambda content: content.index(b"norm.weight"), "'archive/data.pkl' fails its checksum"),
        (lambda content: content.rindex(b"PK\1\2") + 46 + 9, "local header is damaged"),
        (lambda content: content.rindex(b"PK\1\2") + 16, "not followed by its size and checksum"),
        (lambda content: content.rindex(b"PK\5\6") + 16, "the zip64 end record is damaged"),
    ],
    ids=["data.pkl", "a name in the directory", "a checksum in the directory", "the directory's place"],
)
def test_a_flipped_bit_in_the_structure(bench: Bench, find: Callable[[bytes], int], said: str) -> None:
    model = leave(bench.workspace)
    path = state_of(bench.workspace, 1)
    at = find(path.read_bytes())
    flip(path, at)
    bench.refused("CorruptError", says=["rank 1: ", said, "copy rank 1's file again"], rank=1, file="rank_1_state.pth")
    flip(path, at)
    bench.succeeds(model)


def test_bits_flipped_anywhere(bench: Bench) -> None:
    # In the padding between records a flip means nothing; then the model must be right.
    model = leave(bench.workspace)
    path = state_of(bench.workspace, 2)
    content = path.read_bytes()
    used = [at for at in range(len(content)) if content[at] not in b"\0Z"]  # torch pads by Z
    random.seed(5)
    places = [*random.sample(used, count_of(200)), *random.sample(range(len(content)), count_of(40))]
    harmless = 0
    for at in places:
        flip(path, at, bit=at % 8)
        try:
            gather_checkpoint(bench.workspace, bench.out, workers=1)
        except CorruptError as error:
            assert (error.rank, error.file) == (2, str(path)), (at, error)
        else:
            harmless += 1
            assert_holds(bench.out, model)
            shutil.rmtree(bench.out)
        flip(path, at, bit=at % 8)
    assert 0 < harmless < 120
    assert bench.names() == ["run42"]


def test_swapped_blocks(bench: Bench) -> None:
    model = leave(bench.workspace)
    path = state_of(bench.workspace, 0)
    whole = path.read_bytes()
    one, other = (offset_of(path, tensor) for tensor in ("embed.weight", "down.weight"))
    content = bytearray(whole)
    content[one : one + 4096], content[other : other + 4096] = whole[other : other + 4096], whole[one : one + 4096]
    path.write_bytes(content)
    bench.refused("CorruptError", says=["rank 0"], rank=0, file=path.name)
    path.write_bytes(whole)
    bench.succeeds(model)


def test_states_without_checksums_are_taken_and_told(bench: Bench) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        for rank in range(2):
            leave_plain(bench.workspace, rank, {"norm.weight": torch.ones(8)}, xrank=record(rank, 2, {}))
    finally:
        torch.serialization.set_crc32_options(True)
    layout = bench.folder / "layout.toml"
    layout.write_text('[mesh]\ngrid = "dp=2"\n[tensors]\n"norm.weight" = "[n]"\n')
    report = bench.succeeds({"norm.weight": torch.ones(8)}, "--layout", layout)
    (note,) = (note["message"] for note in report["notes"] if note["code"] == "no-checksums")
    first = bench.workspace / "rank_0_state.pth"
    assert note == f"2 files without checksums, {first} first; damage inside a tensor there can't be seen"
    assert report["proof"]["num_checksums"] == 0


# ---- hostile


class Call:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.made = (function, arguments)

    def __reduce__(self) -> Any:
        return self.made


class Filled:
    """Pickles as an object whose ``__setstate__`` would be called."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, str]) -> None:
        Path(state["path"]).touch()


def opcodes(text: bytes) -> Callable[[str], bytes]:
    """Return a pickle of raw opcodes with the marker's path in it."""
    return lambda marker: text.replace(b"MARKER", marker.encode())


HOSTILE: dict[str, Callable[[str], Any]] = {
    "os.system": lambda marker: Call(os.system, f"touch {marker}"),
    "eval": lambda marker: Call(eval, f"open({marker!r}, 'w').close()"),
    "exec": lambda marker: Call(exec, f"open({marker!r}, 'w').close()"),
    "os.mknod": lambda marker: Call(os.mknod, marker),
    "os.makedirs": lambda marker: Call(os.makedirs, marker),
    "an object with a state": Filled,
    "torch.load": lambda marker: Call(torch.load, marker),
    "pathlib": lambda marker: Call(Path.touch, Path(marker)),
    "a pickle in a pickle": lambda marker: Call(pickle.loads, pickle.dumps(Call(os.mknod, marker))),
}
RAW = {
    "opcode INST": opcodes(b"(S'touch MARKER'\nios\nsystem\n."),
    "opcode OBJ": opcodes(b"(cos\nsystem\nS'touch MARKER'\no."),
    "opcode REDUCE by text": opcodes(b"cos\nsystem\n(S'touch MARKER'\ntR."),
    "STACK_GLOBAL": opcodes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93(X\x00\x00\x00\x00tR."),
    "a call of a call's result": opcodes(b"cbuiltins\neval\n(S'open'\ntR(S'MARKER'\nS'w'\ntR."),
    "the same, in binary": opcodes(b"\x80\x02cbuiltins\neval\nX\x04\0\0\0open\x85RX\x01\0\0\0x\x85R."),
    "opcode EXT1": opcodes(b"\x80\x02\x82\x01."),
    "a persistent id": opcodes(b"\x80\x02cposix\nsystem\nQ."),
}


@pytest.mark.parametrize("place", ["weight", "config", "a tensor's place", "beside"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_pickle(bench: Bench, kind: str, place: str) -> None:
    marker = str(bench.folder / "marker")
    payload = HOSTILE[kind](marker)
    model = leave(bench.workspace)
    path = state_of(bench.workspace, 1)
    good = path.read_bytes()
    state = torch.load(path, weights_only=True)
    if place == "beside":
        state["optimizer"] = payload
    elif place == "a tensor's place":
        state["weight"]["embed.weight"] = payload
    else:
        state[place] = payload
    torch.save(state, path)
    error = bench.refused("UnsafeError", says=["rank 1: ", "plain values and tensors"], rank=1, file=path.name)
    assert error["got"]
    assert not os.path.exists(marker)
    path.write_bytes(good)
    bench.succeeds(model)


@pytest.mark.parametrize("kind", RAW)
def test_raw_opcodes(bench: Bench, kind: str) -> None:
    marker = bench.folder / "marker"
    model = leave(bench.workspace)
    path = state_of(bench.workspace, 1)
    good = path.read_bytes()
    path.write_bytes(archive_of(RAW[kind](str(marker))))
    ended = bench.gather()
    assert ended.exit_code == 4
    assert ended.stderr.startswith(("xrank: UnsafeError: rank 1: ", "xrank: CorruptError: rank 1: "))
    assert str(path) in ended.stderr
    assert bench.names() == ["run42"]
    path.write_bytes(good)
    bench.succeeds(model)


def test_the_payloads_would_have_run(tmp_path: Path) -> None:
    # Otherwise an absent marker would prove nothing.
    for number, (kind, make) in enumerate(HOSTILE.items()):
        if kind == "torch.load":
            continue  # it only fails
        marker = tmp_path / str(number)
        torch.save(make(str(marker)), tmp_path / "hostile.pt")
        torch.load(tmp_path / "hostile.pt", weights_only=False)
        assert marker.exists(), kind


def test_an_archive_whose_records_are_smaller_than_its_tensors(bench: Bench) -> None:
    # torch.load(mmap=True) takes what lies behind the record, zip headers and all, for weights.
    weights = {"norm.weight": torch.rand(400)}
    leave_plain(bench.workspace, 0, weights)
    path = state_of(bench.workspace, 0)
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read(f"{path.stem}/data.pkl")
        whole = archive.read(f"{path.stem}/data/0")
    path.write_bytes(archive_of(pickled, [whole[:400], bytes(5000)]))
    taken = torch.load(path, weights_only=True, mmap=True)["weight"]["norm.weight"]
    assert taken.shape == (400,)
    assert not torch.equal(taken[100:], weights["norm.weight"][100:])
    del taken
    says = ["does not have the size its storage claims", "got   400 bytes", "400 elements of 4 bytes"]
    bench.refused("CorruptError", says=says, rank=0, file="rank_0_state.pth")
    path.write_bytes(good)
    bench.succeeds(weights)


def test_a_compressed_archive(bench: Bench) -> None:
    model = {"norm.weight": torch.ones(1000)}
    leave_plain(bench.workspace, 0, model)
    path = state_of(bench.workspace, 0)
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    says = ["is compressed or encrypted", "a stored member"]
    bench.refused("CorruptError", says=says, rank=0, file="rank_0_state.pth")
    path.write_bytes(good)
    bench.succeeds(model)


@pytest.mark.parametrize("what", ["folder", "fifo", "dangling link", "link in a circle"])
def test_no_regular_file_in_a_states_place(bench: Bench, what: str) -> None:
    model = leave(bench.workspace)
    path = state_of(bench.workspace, 1)
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("../nothing" if what == "dangling link" else path.name)
    kind = "IncompleteError" if what == "dangling link" else "CorruptError"
    bench.refused(kind, says=["rank 1: "], rank=1, file=path.name)
    path.rmdir() if what == "folder" else path.unlink()
    leave(bench.workspace, ranks=[1])
    bench.succeeds(model)


def test_a_link_to_a_state_is_followed(bench: Bench) -> None:
    model = leave(bench.workspace)
    state_of(bench.workspace, 1).rename(bench.folder / "elsewhere")
    state_of(bench.workspace, 1).symlink_to("../elsewhere")
    bench.succeeds(model)
