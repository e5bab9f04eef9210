import errno
import io
import os
import pickle
import subprocess
import sys
import zipfile

import pytest
import torch

from xrank import environment, gather_checkpoint
from xrank.errors import (
    ContradictionError,
    CorruptError,
    LayoutError,
    NoSpaceError,
    UnsafeError,
    UsageError,
    XrankError,
)
from xrank.formats.rank_state import RankRecord
from xrank.formats.torch_archive import read_archive
from xrank.layout.layout_map import LayoutMap
from xrank.layout.mesh import DeviceMesh
from xrank.storage.places import state_file_name
from xrank.testing.workspace_contract import WorkspaceContract
from xrank.workspace import nfs, states
from xrank.workspace.nfs import NFSWorkspace


class TestContract(WorkspaceContract):
    @pytest.fixture
    def make_workspace(self, tmp_path):
        def make(rank=0, world_size=1, run_id="run"):
            return NFSWorkspace(tmp_path / "shared", rank=rank, world_size=world_size, run_id=run_id)

        return make

    @pytest.fixture
    def uninitialized(self):
        return NFSWorkspace()


@pytest.fixture
def environ(monkeypatch):
    """An environment of the test's own, empty at first."""
    values: dict[str, str] = {}
    monkeypatch.setattr(environment, "environ", lambda: values)
    return values


def record_of(path, rank=0):
    archive = read_archive(str(path / state_file_name(rank)))
    return RankRecord.from_json(archive.value["xrank"], file="x")


# ---- who and where


def test_alone_it_is_rank_0_of_1_without_a_run(tmp_path, environ):
    workspace = NFSWorkspace(tmp_path)
    assert (workspace.rank, workspace.world_size, workspace.run_id) == (0, 1, None)


def test_the_environment_says_the_rank_and_keywords_win(tmp_path, environ):
    environ |= {"RANK": "2", "WORLD_SIZE": "4", "XRANK_RUN_ID": "abc"}
    workspace = NFSWorkspace(tmp_path)
    assert (workspace.rank, workspace.world_size, workspace.run_id) == (2, 4, "abc")
    workspace = NFSWorkspace(tmp_path, rank=5, world_size=8, run_id="mine")
    assert (workspace.rank, workspace.world_size, workspace.run_id) == (5, 8, "mine")


def test_the_launchers_attempt_is_recorded(tmp_path, environ):
    environ |= {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "j1", "TORCHELASTIC_RESTART_COUNT": "2"}
    NFSWorkspace(tmp_path).write_configs_and_weights({}, {}, step=40)
    record = record_of(tmp_path)
    assert (record.run_id, record.attempt, record.step, record.rank, record.world_size) == ("j1", "2", 40, 0, 1)


@pytest.mark.ranks(2)
def test_a_process_group_says_rank_and_run(tmp_path, rank):
    import torch.distributed as dist

    workspace = NFSWorkspace(tmp_path)
    assert (workspace.rank, workspace.world_size) == (rank, 2)
    runs = [None, None]
    dist.all_gather_object(runs, workspace.run_id)
    assert runs[0] == runs[1] and runs[0]
    workspace.write_configs_and_weights({"rank": rank}, {})
    dist.barrier()
    assert workspace.read_configs_and_weights_from_rank(1 - rank)[0] == {"rank": 1 - rank}
    assert NFSWorkspace(tmp_path).read_configs_and_weights_from_rank(rank)[0] == {"rank": rank}


def test_importing_and_constructing_costs_no_torch(tmp_path):
    code = (
        "import sys; from xrank.workspace.nfs import NFSWorkspace; import xrank.environment, xrank.workspace.base;"
        f"w = NFSWorkspace({str(tmp_path)!r}); assert w.read_configs_and_weights_from_rank(0) == (None, None);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


def test_a_file_where_the_directory_should_be(tmp_path):
    (tmp_path / "f").write_text("")
    for path in (tmp_path / "f", tmp_path / "f" / "g"):
        with pytest.raises(UsageError, match="is not a directory"):
            NFSWorkspace(path)


# ---- what construction removes


def test_construction_removes_only_this_ranks_leavings(tmp_path):
    for rank in range(3):
        NFSWorkspace(tmp_path, rank=rank, world_size=3, run_id="old").write_configs_and_weights({}, {})
    for name in (
        ".rank_1.old.ab.part",
        ".rank_1.x\ny.cd.part",
        ".rank_11.old.ab.part",
        ".rank_0.old.ab.part",
        "rank_1",
    ):
        (tmp_path / name).write_text("")
    NFSWorkspace(tmp_path, rank=1, world_size=3, run_id="new")
    assert sorted(os.listdir(tmp_path)) == sorted(
        [".rank_0.old.ab.part", ".rank_11.old.ab.part", "rank_0_state.pth", "rank_1", "rank_2_state.pth"]
    )


# ---- the file


def test_records_are_aligned_and_checked_whatever_the_users_settings(tmp_path):
    from torch.utils.serialization import config

    workspace = NFSWorkspace(tmp_path, run_id="r")
    with config.patch({"save.compute_crc32": False, "save.storage_alignment": 64}):
        workspace.write_configs_and_weights({}, {f"w{i}": torch.randn(i + 1, 77) for i in range(9)})
        assert config.save.compute_crc32 is False
    archive = read_archive(str(tmp_path / "rank_0_state.pth"))
    assert archive.has_checksums and len(archive.records) == 9
    assert {record.offset % 4096 for record in archive.records.values()} == {0}


def test_torch_and_modelopt_can_read_it(tmp_path):
    x = torch.randn(5)
    NFSWorkspace(tmp_path, run_id="r").write_configs_and_weights({"a": [1.5]}, {"x": x})
    state = torch.load(tmp_path / "rank_0_state.pth", weights_only=True)
    assert list(state) == ["config", "weight", "xrank"] and state["config"] == {"a": [1.5]}
    assert torch.equal(state["weight"]["x"], x)


def test_permissions_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        NFSWorkspace(tmp_path, run_id="r").write_configs_and_weights({}, {})
    finally:
        os.umask(old)
    assert os.stat(tmp_path / "rank_0_state.pth").st_mode & 0o777 == 0o640


def test_odd_run_ids_stay_inside_the_directory(tmp_path):
    workspace = NFSWorkspace(tmp_path / "w", run_id="../../" + "x/" * 300)
    workspace.write_configs_and_weights({"a": 1}, {})
    assert workspace.read_configs_and_weights_from_rank(0)[0] == {"a": 1}
    assert os.listdir(tmp_path) == ["w"] and os.listdir(tmp_path / "w") == ["rank_0_state.pth"]


def test_layouts_of_plain_tensors_are_recorded(tmp_path):
    layouts = LayoutMap(DeviceMesh((2, 2), ("dp", "tp")))
    layouts["up"] = "[f/tp, h]"
    layouts["norm"] = "[h]"
    workspace = NFSWorkspace(tmp_path, rank=3, world_size=4, run_id="r")
    weights = {"up": torch.zeros(2, 3), "norm": torch.zeros(3), "other": torch.zeros(1)}
    workspace.write_configs_and_weights({}, weights, layouts=layouts)
    record = record_of(tmp_path, 3)
    assert record.meshes == ((("dp", "tp"), (2, 2), (0, 1, 2, 3)),)
    assert (record.tensors["up"].layout, record.tensors["up"].mesh, record.tensors["up"].shape) == (
        "[f/tp, h]",
        0,
        None,
    )
    assert record.tensors["norm"].shape == (3,) and "other" not in record.tensors
    layouts["norm2"] = "[a, b]"
    with pytest.raises(XrankError, match="norm2"):
        workspace.write_configs_and_weights({}, {"norm2": torch.zeros(3)}, layouts=layouts)


def test_a_layout_on_a_mesh_without_this_rank_is_refused(tmp_path):
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    layouts["up"] = "[f/tp]"
    with pytest.raises(XrankError, match="up: rank 3 is not in the mesh"):
        NFSWorkspace(tmp_path, rank=3, world_size=4).write_configs_and_weights(
            {}, {"up": torch.zeros(2)}, layouts=layouts
        )


# ---- what fails


def fail_with(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "open", "fstat"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failure_leaves_the_old_state_and_nothing_else(tmp_path, monkeypatch, call, number):
    workspace = NFSWorkspace(tmp_path, run_id="r")
    workspace.write_configs_and_weights({"n": 1}, {"a": torch.ones(3)})
    with monkeypatch.context() as patch:
        patch.setattr(nfs.os, call, fail_with(number))
        with pytest.raises(OSError) as caught:
            workspace.write_configs_and_weights({"n": 2}, {"a": torch.zeros(1000)})
    if number == errno.EIO:
        assert caught.value.errno == errno.EIO
    else:
        assert isinstance(caught.value, NoSpaceError)
        assert caught.value.needed_nbytes == 4000 and caught.value.free_nbytes > 0 and caught.value.rank == 0
    assert os.listdir(tmp_path) == ["rank_0_state.pth"]
    assert workspace.read_configs_and_weights_from_rank(0)[0] == {"n": 1}


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(nfs.os, "write", lambda fd, data: write(fd, data[:1000]))
    workspace = NFSWorkspace(tmp_path, run_id="r")
    x = torch.randn(5000)
    workspace.write_configs_and_weights({}, {"x": x})
    assert torch.equal(workspace.read_configs_and_weights_from_rank(0)[1]["x"], x)


def test_a_rename_whose_reply_was_lost_has_succeeded(tmp_path, monkeypatch):
    rename = os.rename

    def lose_reply(a, b):
        rename(a, b)
        raise FileNotFoundError(errno.ENOENT, "gone")

    workspace = NFSWorkspace(tmp_path, run_id="r")
    workspace.write_configs_and_weights({"n": 1}, {})
    monkeypatch.setattr(nfs.os, "rename", lose_reply)
    workspace.write_configs_and_weights({"n": 2}, {})
    assert workspace.read_configs_and_weights_from_rank(0)[0] == {"n": 2}
    monkeypatch.setattr(nfs.os, "rename", fail_with(errno.ENOENT))
    with pytest.raises(FileNotFoundError):
        workspace.write_configs_and_weights({"n": 3}, {})
    assert workspace.read_configs_and_weights_from_rank(0)[0] == {"n": 2}


def test_a_reader_goes_back_to_the_name_when_the_file_went_stale(tmp_path, monkeypatch):
    workspace = NFSWorkspace(tmp_path, run_id="r")
    workspace.write_configs_and_weights({"n": 1}, {"a": torch.ones(3)})
    preadv, calls, pauses = os.preadv, [], []
    monkeypatch.setattr(states, "sleep", pauses.append)

    def stale_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "stale")
        return preadv(*args)

    monkeypatch.setattr(nfs.os, "preadv", stale_once)
    assert workspace.read_configs_and_weights_from_rank(0)[0] == {"n": 1}
    monkeypatch.setattr(nfs.os, "preadv", fail_with(errno.ESTALE))
    with pytest.raises(XrankError, match="replaced 5 times"):
        workspace.read_configs_and_weights_from_rank(0)
    assert pauses == pytest.approx([0.1, 0.1, 0.2, 0.4, 0.8, 1.6])


def test_a_reader_of_two_files_under_one_name_starts_again(tmp_path, monkeypatch):
    workspace = NFSWorkspace(tmp_path, run_id="r")
    workspace.write_configs_and_weights({"n": 1}, {"a": torch.ones(3)})
    read, calls = states.read_saved_state, []

    def replaced_after(*args, **kwargs):
        state = read(*args, **kwargs)
        calls.append(state)
        if len(calls) == 1:
            workspace.write_configs_and_weights({"n": 2}, {"a": torch.zeros(3)})
        return state

    monkeypatch.setattr(states, "read_saved_state", replaced_after)
    config, weights = workspace.read_configs_and_weights_from_rank(0)
    assert config == {"n": 2} and weights["a"].tolist() == [0, 0, 0] and len(calls) == 2


# ---- files of others


def test_every_flipped_byte_of_the_data_is_found(tmp_path):
    workspace = NFSWorkspace(tmp_path, run_id="r")
    workspace.write_configs_and_weights({}, {"a": torch.randn(700_000)})
    file = tmp_path / "rank_0_state.pth"
    (record,) = read_archive(str(file)).records.values()
    content = bytearray(file.read_bytes())
    for at in (record.offset, record.offset + (1 << 20), record.offset + record.nbytes - 1):
        content[at] ^= 1
        file.write_bytes(content)
        with pytest.raises(CorruptError, match=r"rank 0.*checksum") as caught:
            workspace.read_configs_and_weights_from_rank(0)
        assert caught.value.rank == 0 and caught.value.file == str(file)
        content[at] ^= 1
    file.write_bytes(content[:-5])
    with pytest.raises(CorruptError):
        workspace.read_configs_and_weights_from_rank(0)


def test_modelopts_states_are_read_where_no_run_is_known(tmp_path, environ):
    tied = torch.nn.Parameter(torch.randn(3))
    torch.save(
        {"config": {"layers": [1]}, "weight": {"a": tied, "b": tied, "c": torch.zeros(2)[1:]}},
        tmp_path / "rank_1_state.pth",
    )
    config, weights = NFSWorkspace(tmp_path, rank=0, world_size=2).read_configs_and_weights_from_rank(1)
    assert config == {"layers": [1]} and weights["a"] is weights["b"] and not weights["a"].requires_grad
    assert torch.equal(weights["a"], tied.detach()) and weights["c"].tolist() == [0]


def test_modelopts_states_are_refused_by_name_where_a_run_is_known(tmp_path, environ):
    environ |= {"XRANK_RUN_ID": "job7"}
    torch.save({"config": {"layers": [1]}, "weight": {"a": torch.ones(2)}}, tmp_path / "rank_1_state.pth")
    known = NFSWorkspace(tmp_path, rank=0, world_size=2)
    with pytest.raises(ContradictionError, match=r"the state of rank 1 in .* records no run") as raised:
        known.read_configs_and_weights_from_rank(1)
    assert raised.value.rank == 1 and raised.value.file == str(tmp_path / "rank_1_state.pth")
    assert "job7" in raised.value.want and 'run_id=""' in raised.value.next_step
    # Follow the error's advice: the caller vouches for the directory.
    without = NFSWorkspace(tmp_path, rank=0, world_size=2, run_id="")
    assert without.run_id is None
    assert without.read_configs_and_weights_from_rank(1)[0] == {"layers": [1]}


class Hostile:
    def __reduce__(self):
        return os.mkdir, (Hostile.target,)


def hostile_archive(value):
    """A torch archive whose pickle does as it likes, checksums in order."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, protocol=2))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return content.getvalue()


@pytest.mark.parametrize("where", ["whole", "config", "weight", "xrank"])
def test_a_hostile_pickle_runs_nothing(tmp_path, monkeypatch, where):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    Hostile.target = str(tmp_path / "ran")
    state = {"config": {}, "weight": {}, "xrank": "{}"}
    value = Hostile() if where == "whole" else {**state, where: {"x": Hostile()}}
    (tmp_path / "rank_1_state.pth").write_bytes(hostile_archive(value))
    with pytest.raises(UnsafeError):
        NFSWorkspace(tmp_path, rank=0, world_size=2, run_id=None).read_configs_and_weights_from_rank(1)
    os.rename(tmp_path / "rank_1_state.pth", tmp_path / "rank_0_state.pth")
    NFSWorkspace(tmp_path, rank=0, world_size=2, run_id="r")  # looks at its own old state to clear it
    assert not os.path.exists(Hostile.target)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"config": []},
        {"config": {}, "weight": {"a": 1}},
        {"config": {}, "xrank": 3},
        {"config": {"a": [torch.ones(1)]}, "weight": {}},
    ],
)
def test_archives_that_are_no_states_are_corrupt(tmp_path, value):
    torch.save(value, tmp_path / "rank_1_state.pth")
    with pytest.raises(CorruptError, match="rank 1"):
        NFSWorkspace(tmp_path, rank=0, world_size=2).read_configs_and_weights_from_rank(1)


def test_a_link_as_the_state_is_replaced_never_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    os.symlink(victim, tmp_path / "rank_0_state.pth")
    workspace = NFSWorkspace(tmp_path, run_id="r")
    os.symlink(victim, tmp_path / "rank_0_state.pth")
    workspace.write_configs_and_weights({}, {})
    assert victim.read_text() == "mine" and not os.path.islink(tmp_path / "rank_0_state.pth")


def test_keys_of_a_config_become_what_json_writes(tmp_path):
    """As transformers' config.to_dict() has them: id2label maps numbers to names."""
    workspace = NFSWorkspace(tmp_path, rank=0, world_size=1, run_id="r")
    workspace.write_configs_and_weights({"id2label": {0: "no", 1: "yes"}, "odd": {True: 1, None: 2}}, {})
    config, _ = workspace.read_configs_and_weights_from_rank(0)
    assert config == {"id2label": {"0": "no", "1": "yes"}, "odd": {"true": 1, "null": 2}}
    with pytest.raises(UsageError, match="two keys that JSON writes as '0'"):
        workspace.write_configs_and_weights({"id2label": {0: "no", "0": "yes"}}, {})


def test_a_tensor_whose_storage_was_freed_is_refused_by_name(tmp_path):
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    workspace = NFSWorkspace(tmp_path, rank=0, world_size=1, run_id="run")
    with pytest.raises(UsageError, match="w has no memory: its storage was freed"):
        workspace.write_configs_and_weights({}, {"w": freed})
    assert not list(tmp_path.glob("rank_*"))


def test_a_layout_map_that_is_corrected_as_advised(tmp_path):
    parts = {"w": torch.arange(4.0).view(1, 4)}
    wrong = LayoutMap(DeviceMesh((2,), ("tp",)))
    wrong["w"] = "[r/tp]"
    bare = LayoutMap()
    bare["part.{2/tp}.w"] = "[c]"
    for layouts, tensors, next_step in (
        (wrong, parts, "correct the layout map"),
        (bare, {"part.0.w": parts["w"][0]}, "give the LayoutMap a mesh"),
    ):
        with pytest.raises(LayoutError) as caught:
            workspace = NFSWorkspace(tmp_path / "ws", rank=0, world_size=2)
            workspace.write_configs_and_weights({}, tensors, layouts=layouts)
        assert caught.value.next_step == next_step
    named = LayoutMap(DeviceMesh((2,), ("tp",)))
    named["part.{2/tp}.w"] = "[c]"
    with pytest.raises(LayoutError, match=r"^part\.1\.w: the index 1 is beyond"):
        workspace.write_configs_and_weights({}, {"part.1.w": parts["w"][0]}, layouts=named)
    corrected = LayoutMap(DeviceMesh((2,), ("tp",)))
    corrected["w"] = "[r/tp, c]"
    for folder, layouts, name in (("cut", corrected, "w"), ("named", named, "part.0.w")):
        for rank in range(2):
            tensor = rank + torch.arange(4.0)
            workspace = NFSWorkspace(str(tmp_path / folder), rank=rank, world_size=2, run_id="a")
            tensors = {name: tensor.view(1, 4) if name == "w" else tensor}
            workspace.write_configs_and_weights({"model_type": "x"}, tensors, layouts=layouts)
        assert gather_checkpoint(tmp_path / folder, tmp_path / f"{folder}-out").ok
