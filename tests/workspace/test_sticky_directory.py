"""Workspaces and outputs in a directory where all users may write: what has the name of a file of xrank's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import xrank
from tests.cli.bench import run
from tests.refit.test_shared_directory import KINDS, STRANGER, put_fifo
from xrank.errors import UsageError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    if os.geteuid() == 0:
        os.chown(folder, STRANGER + 1, -1)
    return folder


def workspace(place: Path) -> xrank.NFSWorkspace:
    return xrank.NFSWorkspace(place, rank=0, world_size=2, run_id="run")


@pytest.mark.parametrize("put", [put for put in KINDS if "link" not in put.__name__ and put.__name__ != "put_holes"])
def test_what_has_a_states_name_is_refused_by_name(place: Path, put: Callable[[Path], None]) -> None:
    put(place / "rank_0_state.pth")
    with pytest.raises(UsageError, match=r"rank_0_state\.pth.*rank 0"):
        workspace(place)
    assert os.path.lexists(place / "rank_0_state.pth")


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_link_in_a_states_place_is_removed_or_another_users(place: Path, is_foreign: bool) -> None:
    (place / "rank_0_state.pth").symlink_to("/dev/zero")
    if not is_foreign:
        workspace(place)
        assert not os.path.lexists(place / "rank_0_state.pth")
    elif os.geteuid() == 0:
        os.chown(place / "rank_0_state.pth", STRANGER, -1, follow_symlinks=False)
        with pytest.raises(UsageError, match=r"rank_0_state\.pth.*rank 0"):
            workspace(place)


@pytest.mark.parametrize("put", [put for put in KINDS if put.__name__ != "put_holes"])
def test_another_ranks_state_is_looked_at_before_it_is_read(place: Path, put: Callable[[Path], None]) -> None:
    own = workspace(place)
    put(place / "rank_1_state.pth")
    with pytest.raises(UsageError, match=r"rank_1_state\.pth.*rank 1"):
        own.read_configs_and_weights_from_rank(1)


@pytest.mark.parametrize("put", KINDS)
def test_what_has_the_name_of_an_unfinished_state_is_left(place: Path, put: Callable[[Path], None]) -> None:
    put(place / ".rank_0.run.0123456789abcdef.part")
    own = workspace(place)
    own.write_configs_and_weights({"model_type": "llama"}, {"norm.weight": torch.ones(4)})
    state = own.read_configs_and_weights_from_rank(0)
    assert state[1] is not None and state[1]["norm.weight"].eq(1).all()


@pytest.mark.parametrize("put", KINDS)
@pytest.mark.parametrize(
    "name",
    [".model.xrank.lock", ".model.xrank-0123456789abcdef", ".rank_0.0123456789abcdef.1.0123456789abcdef.1.message"],
)
def test_a_gather_and_a_clean_never_wait(place: Path, tmp_path: Path, put: Callable[[Path], None], name: str) -> None:
    xrank.NFSWorkspace(tmp_path / "states", rank=0, world_size=1).write_configs_and_weights(
        {"model_type": "llama"}, {"norm.weight": torch.ones(4)}
    )
    put(place / name)
    ended = run("gather", tmp_path / "states", "--out", place / "model")
    assert ended.exit_code == 0 or (ended.exit_code == 2 and name in ended.stderr), ended
    assert run("clean", place).exit_code == 0


@pytest.mark.parametrize("name", ["xrank_manifest.json", "config.json", ".xrank-journal.jsonl"])
def test_an_output_with_a_fifo_is_replaced_or_refused(place: Path, tmp_path: Path, name: str) -> None:
    xrank.NFSWorkspace(tmp_path / "states", rank=0, world_size=1).write_configs_and_weights(
        {"model_type": "llama"}, {"norm.weight": torch.ones(4)}
    )
    (place / "model" / "inner").mkdir(parents=True)
    (place / "model" / "inner" / "x").touch()
    (place / "model" / "model.safetensors").touch()
    put_fifo(place / "model" / name)
    assert run("gather", tmp_path / "states", "--out", place / "model", "--overwrite").exit_code == 2
    assert run("inspect", place / "model").exit_code is not None
    assert run("verify", place / "model").exit_code in (2, 3, 4)


def test_a_gather_of_states_of_two_users_is_refused(place: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    for rank in range(2):
        xrank.NFSWorkspace(place, rank=rank, world_size=2, run_id="run").write_configs_and_weights(
            {"model_type": "llama"}, {"norm.weight": torch.ones(4)}
        )
    os.chown(place / "rank_1_state.pth", STRANGER, -1)
    ended = run("gather", "--workspace", place, "--out", tmp_path / "model")
    assert ended.exit_code == 4 and "rank_1_state.pth: different users" in ended.stderr
