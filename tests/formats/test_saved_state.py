"""What is a rank's state, and what only lies where one should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from xrank import NFSWorkspace
from xrank.errors import ContradictionError, CorruptError
from xrank.formats.rank_state import read_saved_state, record_of


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
    with pytest.raises(CorruptError, match="the state of rank 1 is not what was written") as caught:
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
    with pytest.raises(ContradictionError, match="it holds the state of rank 1") as caught:
        read_saved_state(file, 0).check_rank()
    assert caught.value.rank == 0 and caught.value.file == file
