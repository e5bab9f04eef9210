"""A refit that is simulated moves as many bytes as the engine's ranks hold, from the ranks that have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import xrank
from xrank.errors import LayoutError, UsageError

TRAINER = """
[mesh]
grid = "hsdp=2 dp=2"
[sizes]
L = 3
E = 4
[tensors]
"layers.{L}.experts.{E}.w" = "[8/dp, 6]"
"layers.{L}.norm" = "[8]"
"head" = "[10/~dp, 6]"
"""
ENGINE = """
[mesh]
grid = "pp=1 tp=2"
[sizes]
L = 3
[tensors]
"layers.{L}.experts.0.w" = "[8, 6] where tp=0"
"layers.{L}.experts.1.w" = "[8, 6] where tp=0"
"layers.{L}.experts.2.w" = "[8, 6] where tp=1"
"layers.{L}.experts.3.w" = "[8, 6] where tp=1"
"layers.{L}.norm" = "[8]"
"head" = "[10, 6/tp]"
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "trainer.toml").write_text(TRAINER)
    (tmp_path / "engine.toml").write_text(ENGINE)
    return tmp_path / "trainer.toml", tmp_path / "engine.toml"


def test_the_engine_takes_what_it_holds_and_replicas_share_the_load(files: tuple[Path, Path]) -> None:
    found = xrank.simulate(files[0], "refit", to=files[1], link="bandwidth=1KB/s latency=1ms start=2s")
    held = 2 * (3 * (2 * 48 + 8) + 30)  # bytes of an engine rank
    assert found.work.num_ranks == 6 and found.work.held_nbytes.tolist()[4:] == [held, held]
    assert found.traffic.total("taken_nbytes").tolist() == [0, 0, 0, 0, held, held]
    given = found.traffic.total("given_nbytes")
    assert given.sum() == 2 * held and not given[4:].any()
    assert given[:4].max() < 0.35 * 2 * held  # of four ranks, whose two groups hold the same
    # Runs: half of an expert from each rank, whole norms, and rows of three elements of the head.
    assert found.traffic.total("messages").tolist()[4:] == [3 * (2 * 2 + 1) + 10] * 2
    assert found.prediction is not None
    assert found.prediction.seconds == pytest.approx(2 + held / 1000 + 0.025)


def test_the_ranks_of_a_workspace_are_a_trainers(tmp_path: Path, files: tuple[Path, Path]) -> None:
    """An engine's file of another model is refused; its own layout moves all of it."""
    torch = pytest.importorskip("torch")
    for rank in range(2):
        workspace = xrank.NFSWorkspace(tmp_path / "states", rank=rank, world_size=2, run_id="r")
        layouts = xrank.layout.LayoutMap(xrank.layout.DeviceMesh((2,), ("dp",)))
        layouts["head"] = "[10/dp, 6]"
        workspace.write_configs_and_weights({}, {"head": torch.ones(5, 6)}, layouts=layouts)
    (tmp_path / "one.toml").write_text('[mesh]\ngrid = "tp=2"\n[tensors]\n"head" = "[10, 6/tp]"\n')
    found = xrank.simulate(tmp_path / "states", "refit", to=tmp_path / "one.toml")
    assert np.array_equal(found.traffic.total("taken_nbytes"), [0, 0, 120, 120])
    assert np.array_equal(found.traffic.total("given_nbytes"), [120, 120, 0, 0])
    (tmp_path / "other.toml").write_text('[mesh]\ngrid = "tp=2"\n[tensors]\n"tail" = "[10, 6/tp]"\n')
    with pytest.raises(LayoutError, match="no rule"):
        xrank.simulate(files[1], "refit", to=tmp_path / "other.toml")


def test_a_tensor_that_the_engine_does_not_take_is_noted(files: tuple[Path, Path]) -> None:
    files[0].write_text(TRAINER + '"mtp.bias" = "[4]"\n"mtp.w" = "[8/dp, 6]"\n')
    found = xrank.simulate(files[0], "refit", to=files[1])
    assert found.work.held_nbytes.tolist()[4:] == [2 * (3 * (2 * 48 + 8) + 30)] * 2
    notes = dict(found.work.notes)
    assert notes["not-taken"] == "mtp.bias, mtp.w: not sent to the engine, because its layouts have no rule"
    with pytest.raises(LayoutError, match="no rule of the layout file"):  # a reshard must say how each one is cut
        xrank.simulate(files[0], "reshard", to=files[1])


def test_a_refit_needs_an_engine_and_its_own_ranks(files: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="refit"):
        xrank.simulate(files[0], "refit")
    with pytest.raises(UsageError, match="whose work processes share"):
        xrank.simulate(files[0], "refit", to=files[1], num_ranks=2)


def test_engine_ranks_that_hold_the_same_read_different_replicas(tmp_path: Path) -> None:
    names = "".join(f'"w{i}" = "[8, 6]"\n' for i in range(4))
    (tmp_path / "trainer.toml").write_text(f'[mesh]\ngrid = "dp=4"\n[tensors]\n{names}')
    (tmp_path / "engine.toml").write_text(f'[mesh]\ngrid = "tp=4"\n[tensors]\n{names}')
    found = xrank.simulate(tmp_path / "trainer.toml", "refit", to=tmp_path / "engine.toml")
    held = 4 * 8 * 6 * 2
    assert found.traffic.total("given_nbytes").tolist() == [held] * 4 + [0] * 4
    assert found.traffic.total("taken_nbytes").tolist() == [0] * 4 + [held] * 4
