"""The states of ranks and their records: sound ones, and files that are not one."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from xrank import NFSWorkspace
from xrank.errors import ContradictionError, CorruptError, UsageError
from xrank.formats.rank_state import RankRecord, TensorRecord, read_saved_state, record_of
from xrank.storage.places import rank_of, state_file_name

pytestmark = pytest.mark.quick

RECORD = RankRecord(
    run_id="7f3a",
    attempt="0",
    step=2000,
    rank=3,
    world_size=4,
    host="node-1",
    meshes=((("dp", "tp"), (2, 2), (0, 1, 2, 3)), (("tp",), (2,), (2, 3))),
    tensors={
        "b": TensorRecord("[f/tp, h]", 0, (16, 8)),
        "a\n\ud800": TensorRecord("[f/tp]", 1, None),
        "plain": TensorRecord(),
        "scalar": TensorRecord("[]", 1, ()),
    },
)


def test_file_names():
    for rank in (0, 7, 10, 123456789):
        assert rank_of(state_file_name(rank)) == rank


@pytest.mark.parametrize(
    "name",
    [
        "rank_01_state.pth",
        "rank_+1_state.pth",
        "rank_-1_state.pth",
        "rank__state.pth",
        "rank_1_state.pth\n",
        "rank_1_state.pt",
        "rank_1_state.pth.bak",
        ".rank_1_state.pth",
        "Rank_1_state.pth",
        "rank_\u0661_state.pth",
        "rank_1234567890_state.pth",
        "rank_1_0_state.pth",
        "rank_1_state_pth",
    ],
)
def test_other_names_are_no_states(name):
    assert rank_of(name) is None


def test_the_text_is_the_record_and_always_the_same():
    text = RECORD.to_json()
    assert RankRecord.from_json(text, file="f") == RECORD
    turned = RankRecord(
        **{k: getattr(RECORD, k) for k in RECORD.__slots__} | {"tensors": dict(reversed(RECORD.tensors.items()))}
    )
    assert turned.to_json() == text and text.isascii() and " " not in text.replace("[f/tp, h]", "")
    assert pickle.loads(pickle.dumps(RECORD)) == RECORD


def test_a_bare_record():
    record = RankRecord(run_id=None, attempt=None, step=None, rank=0, world_size=1, host="h")
    assert RankRecord.from_json(record.to_json(), file="f") == record


def test_a_view_and_a_name_with_dims():
    tensor = TensorRecord("[h/kvs] in kv", 0, None, view=0, name="layers.{4/pp}.k")
    record = replace(RECORD, tensors={"layers.1.k": tensor})
    assert RankRecord.from_json(record.to_json(), file="f") == record
    assert '"view"' not in RECORD.to_json() and '"name"' not in RECORD.to_json()


def test_a_newer_version_is_no_corruption():
    with pytest.raises(UsageError, match="f was written by a newer xrank") as caught:
        RankRecord.from_json('{"version": 2, "what": "ever"}', file="f")
    assert caught.value.file == "f"


def changed(*path, to):
    value = json.loads(RECORD.to_json())
    inner = value
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = to
    return json.dumps(value)


MISSING = json.loads(RECORD.to_json())
del MISSING["host"]


MALFORMED = [
    "",
    "[]",
    "null",
    "{",
    "[" * 100_000,
    '{"version": 1}',
    '{"version": 1, "version": 1}',
    json.dumps(MISSING),
    changed("version", to=0),
    changed("version", to=True),
    changed("version", to="1"),
    changed("version", to=1.0),
    changed("extra", to=1),
    changed("run_id", to=3),
    changed("run_id", to=""),
    changed("attempt", to=3),
    changed("step", to=-1),
    changed("step", to=1.5),
    changed("step", to=float("nan")),
    changed("step", to=True),
    changed("rank", to=4),
    changed("rank", to=-1),
    changed("rank", to=None),
    changed("rank", to=2**63),
    changed("world_size", to=0),
    changed("world_size", to=3),
    changed("host", to=None),
    changed("meshes", to={}),
    changed("meshes", 0, to=[]),
    changed("meshes", 0, "shape", to=[2, 3]),
    changed("meshes", 0, "shape", to=[0, 2]),
    changed("meshes", 0, "shape", to=4),
    changed("meshes", 0, "axis_names", to=["dp"]),
    changed("meshes", 0, "axis_names", to=["dp", "dp"]),
    changed("meshes", 0, "axis_names", to=["dp", ""]),
    changed("meshes", 0, "axis_names", to=["dp", 1]),
    changed("meshes", 0, "ranks", to=[0, 1, 2, 2]),
    changed("meshes", 0, "ranks", to=[0, 1, 2, 4]),
    changed("meshes", 0, "more", to=1),
    changed("tensors", to=[]),
    changed("tensors", "b", to="[f/tp, h]"),
    changed("tensors", "b", "mesh", to=2),
    changed("tensors", "b", "mesh", to=False),
    changed("tensors", "b", "layout", to=1),
    changed("tensors", "b", "shape", to=[16, -8]),
    changed("tensors", "b", "shape", to="16"),
    changed("tensors", "b", "dtype", to="F32"),
    changed("tensors", "b", "view", to=2),
    changed("tensors", "b", "view", to="kv"),
    changed("tensors", "b", "name", to=["b"]),
]


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_anything_malformed_is_corrupt_and_names_the_file(text):
    with pytest.raises(CorruptError, match=r"/nfs/rank_3_state\.pth") as caught:
        RankRecord.from_json(text, file="/nfs/rank_3_state.pth")
    assert caught.value.file == "/nfs/rank_3_state.pth"


def test_a_wrong_record_cannot_be_made():
    with pytest.raises(UsageError, match="rank 5 of 4"):
        RankRecord(run_id=None, attempt=None, step=None, rank=5, world_size=4, host="h")


def state_file(folder: Path, value: object) -> str:
    torch.save(value, folder / "rank_1_state.pth")
    return str(folder / "rank_1_state.pth")


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ([], "a list"),
        ({"weight": {}}, "a dict"),
        ({"config": {}}, "a dict"),
        ({"config": [], "weight": {}}, "a config in a list"),
        ({"config": {}, "weight": [torch.ones(1)]}, "weights in a list"),
        ({"config": {}, "weight": {"a": 1}}, "'a': int"),
        ({"config": {}, "weight": {3: torch.ones(1)}}, "3: ArchivedTensor"),
        ({"config": {}, "weight": {}, "xrank": 3}, "a record in a int"),
    ],
)
def test_what_is_no_state_is_corrupt(tmp_path: Path, value: object, got: str) -> None:
    file = state_file(tmp_path, value)
    with pytest.raises(CorruptError, match="the state of rank 1 differs from what was written") as caught:
        read_saved_state(file, 1)
    assert (caught.value.rank, caught.value.file, caught.value.got) == (1, file, got)


@pytest.mark.parametrize("config", [None, {"layers": [1]}])
def test_modelopts_states_record_nothing(tmp_path: Path, config: dict[str, Any] | None) -> None:
    state = read_saved_state(state_file(tmp_path, {"config": config, "weight": {"a": torch.ones(3)}}), 1)
    assert (state.config, state.record, state.run, state.weights["a"].shape) == (config, None, None, (3,))
    state.check_rank()  # nothing says otherwise


def test_whose_it_is_and_of_which_run(tmp_path: Path) -> None:
    workspace = NFSWorkspace(tmp_path, rank=1, world_size=2, run_id="r")
    workspace.write_configs_and_weights({}, {"a": torch.ones(3)}, step=7)
    file = str(tmp_path / "rank_1_state.pth")
    state = read_saved_state(file, 1)
    state.check_rank()
    assert state.run is not None and (state.run[0], *state.run[2:]) == ("r", 7, 2)
    assert record_of(state.archive, None) == state.record
    with pytest.raises(ContradictionError, match="it contains the state of rank 1") as caught:
        read_saved_state(file, 0).check_rank()
    assert caught.value.rank == 0 and caught.value.file == file
