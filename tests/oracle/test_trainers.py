"""Folders that transformers' Trainer leaves, gathered as a user does: a part of `make corpus`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.trainers.cells import CELLS, CHOSEN
from tests.oracle.trainers.check import check_cell
from tests.oracle.trainers.make import make_cells

# Each way to shard is a launch of its own, which imports torch, transformers and DeepSpeed on both ranks.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    assert make_cells(folder, [CELLS[name] for name in CHOSEN]) == {}
    return folder


@pytest.mark.parametrize("name", CHOSEN)
def test_a_trainers_folder_gathers_to_what_it_would_save(corpus: Path, name: str) -> None:
    result = check_cell(CELLS[name], corpus)
    assert (result.exit_code, result.fault) == (0, "")
