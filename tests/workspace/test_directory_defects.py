"""Defects 1, 10, 11 and 12 of the list in tests/workspace/test_defects.py: gathers and states in a directory.

Defect 1 as a network file system shows it is in tests/network, and in tests/workspace/test_stale_view.py without one.
"""

import os

import pytest
import torch

from tests.workspace.notes import await_note, read_note, write_note
from xrank.errors import RankFailedError
from xrank.workspace.nfs import NFSWorkspace
from xrank.workspace.parallel import get_configs_parallel, get_tensors_parallel


@pytest.mark.ranks(2)
def test_defect_1_each_layer_comes_as_itself(rank, tmp_path):
    for layer in range(12):
        config = None if layer == 3 and rank == 1 else {"layer": layer, "w": torch.full((3000,), layer + rank)}
        with get_configs_parallel(config, [0, 1], None, tmp_path / "ws") as configs:
            if rank == 0:
                assert [c and (c["layer"], int(c["w"][-1])) for c in configs] == [
                    (layer, layer),
                    None if layer == 3 else (layer, layer + 1),
                ]


@pytest.mark.ranks(3)
def test_defect_10_nothing_stays_and_nothing_leaves_no_file(rank, tmp_path):
    with get_configs_parallel(None, [0, 1, 2], None, tmp_path / "ws"):
        assert os.listdir(tmp_path / "ws") == [], "None needs no file"
    for early_exit in (False, True):
        with get_tensors_parallel(torch.ones(5000), [0, 1, 2], workspace_path=tmp_path / "ws", early_exit=early_exit):
            pass
    failing = get_tensors_parallel(torch.ones(5000), [0, 1, 2], workspace_path=tmp_path / "ws")
    with pytest.raises(KeyError if rank == 0 else RankFailedError), failing:
        if rank == 0:
            raise KeyError("a gather that fails")
    with get_configs_parallel(None, [0, 1, 2], None, tmp_path / "ws"):  # all have left the ones before
        # The first rank knows that; another may be in its body while a third has not come yet.
        assert rank != 0 or os.listdir(tmp_path / "ws") == []


@pytest.mark.ranks(3)
def test_defect_11_no_rank_waits_for_another_to_make_the_directory(rank, tmp_path):
    mine = tmp_path / f"host{rank}"  # as if each host had its own mount point
    (tmp_path / "shared").mkdir(exist_ok=True)
    os.symlink(tmp_path / "shared", mine)
    with get_tensors_parallel(torch.full((5000,), rank), [2, 0, 1], workspace_path=mine / "deep" / "er") as parts:
        assert [int(part[0]) for part in parts] == ([2, 0, 1] if rank == 2 else [])
    # The rank that comes last, or not at all, is not the one that makes it.
    path = tmp_path / "without rank 0"
    if rank == 0:
        assert await_note("1 has gathered") and await_note("2 has gathered")
    else:
        with get_tensors_parallel(torch.ones(5000), [1, 2], workspace_path=path):
            pass
        write_note(f"{rank} has gathered")
    with get_tensors_parallel(torch.full((5000,), rank), [0, 1, 2], workspace_path=path) as parts:
        assert [int(part[0]) for part in parts] == ([0, 1, 2] if rank == 0 else [])


@pytest.mark.ranks(2)
def test_defect_12_a_reader_that_looks_at_any_time_sees_a_whole_state_or_none(rank, tmp_path):
    workspace = NFSWorkspace(tmp_path / "ws", rank=rank, world_size=2, run_id="run")
    if rank == 0:
        for number in range(1, 9):
            workspace.write_configs_and_weights({"number": number}, {"w": torch.full((1 << 19,), number)})
        write_note("all are written")
        return
    seen = set()
    while True:
        is_last = read_note("all are written") is not None
        config, weights = workspace.read_configs_and_weights_from_rank(0)
        number = None if config is None else config["number"]
        seen.add(number)
        assert number is None or bool((weights["w"] == number).all())
        if is_last:
            break
    assert number == 8 and seen <= {None, *range(1, 9)}
    workspace.write_configs_and_weights({}, {})
    assert workspace.read_configs_and_weights_from_rank(1) == ({}, {}), "an empty state differs from none"
