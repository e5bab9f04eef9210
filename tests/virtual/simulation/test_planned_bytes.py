"""Plans match execution: bytes and reads of real gathers, exports and reshards, counted rank by rank."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

import xrank
from tests.free_port import free_port
from tests.virtual.simulation.counting import Counted, counting
from xrank.layout import LayoutMap
from xrank.layout.local_part import local_part
from xrank.virtual.simulation.simulation import Simulation, simulate
from xrank.workspace.nfs import NFSWorkspace

PAGE = """
[mesh]
grid = "dp=2 tp=2"

[sizes]
f = 903
h = 640
v = 1003

[tensors]
"embed" = "[pad(v, 4*tp)/tp, h]"
"up" = "[f/~tp/~dp, h]"
"down" = "[h, f/~tp]"
"fused" = "[<gate: f/~tp | up: f/~tp>, h]"
"inner" = "[5, <a: 200/tp | b: 120/tp>, 7]"
"norm" = "[h]"
"flat" = "[h/~dp/~tp]"
"""
"""Rows and columns, even and not; padding, fused parts, replicas; more than one window each, and less."""

SHAPES = {
    "embed": (1003, 640), "up": (903, 640), "down": (640, 903), "fused": (1806, 640), "inner": (5, 320, 7),
    "norm": (640,), "flat": (640,),
}  # fmt: skip

NEW = PAGE.replace('grid = "dp=2 tp=2"', 'grid = "dp=1 tp=3"').replace("200/tp", "200/~tp").replace("120/tp", "120/~tp")


def part(name: str, layouts: LayoutMap, rank: int) -> torch.Tensor:
    """Return what a rank holds of a tensor: zeros, or of a tensor cut plainly its part, so that replicas are equal."""
    layout, mesh = layouts[name], layouts.device_mesh
    assert layout is not None and mesh is not None
    made = local_part(layout, mesh, mesh.coordinate(rank), SHAPES[name], sizes=layouts.sizes)
    assert made is not None
    return torch.zeros(made.shape, dtype=torch.float32)


def written(folder: Path, text: str = PAGE) -> Path:
    file = folder / "layout.toml"
    file.write_text(text)
    return file


def left(folder: Path) -> Path:
    """Let all ranks leave their parts in a workspace."""
    layouts = LayoutMap.read(written(folder))
    for rank in range(4):
        parts = {name: part(name, layouts, rank) for name in SHAPES}
        workspace = NFSWorkspace(folder / "run", rank=rank, world_size=4, run_id="r")
        workspace.write_configs_and_weights({}, parts, layouts=layouts)
    return folder / "run"


def assert_as_planned(found: Simulation, rank: int, counted: Counted | dict[str, int]) -> None:
    told = counted.told() if isinstance(counted, Counted) else counted
    planned = {name: int(found.traffic.total(name)[rank]) for name in told}
    planned["own_nbytes"] += int(found.traffic.compared_nbytes[rank])
    assert planned["written_nbytes"] == told["written_nbytes"]
    for name, amount in told.items():
        # Reads across gaps, and reads that a window's edge cuts, are estimated.
        assert abs(planned[name] - amount) <= (0.5 if name in ("reads", "messages") else 0.01) * amount, name


def test_a_gather(tmp_path: Path) -> None:
    run = left(tmp_path)
    planned = simulate(run)
    with counting() as counted:
        report = xrank.gather_checkpoint(run, tmp_path / "model")
    assert counted.read_nbytes > report.nbytes  # replicas and padding
    assert_as_planned(planned, 0, counted)
    # The layout file's parts of each rank equal those that the ranks wrote.
    laid = simulate(written(tmp_path), dtype="fp32")
    assert_as_planned(laid, 0, counted)


def test_a_reshard(tmp_path: Path) -> None:
    run, new = left(tmp_path), tmp_path / "new.toml"
    new.write_text(NEW)
    planned = simulate(run, "reshard", to=new)
    with counting() as counted:
        # One thread: reads for checksums alone depend on which of several states is finished first.
        xrank.reshard_checkpoint(run, new, tmp_path / "again", workers=1)
    endings = counted.written_nbytes - planned.work.plan.nbytes
    assert 0 < endings < 10_000  # the directory of each state is written once more, when the checksums are known
    counted.written_nbytes -= endings
    assert_as_planned(planned, 0, counted)
    laid = simulate(written(tmp_path), "reshard", to=new, dtype="fp32")
    assert laid.traffic.total("read_nbytes").tolist() == planned.traffic.total("read_nbytes").tolist()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(left(tmp_path))


@pytest.mark.ranks(3)
def test_a_gather_by_several_ranks(rank: int, run: str, port: int, tmp_path: Path) -> None:
    launch = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, launch), counting() as counted:
        xrank.gather_checkpoint(run, tmp_path / "model", distributed=True, timeout_seconds=30)
    assert_as_planned(simulate(run, num_ranks=3), rank, counted)


@pytest.mark.ranks(4)
def test_an_export(rank: int, tmp_path: Path) -> None:
    file = tmp_path / f"layout{rank}.toml"
    file.write_text(PAGE)
    layouts = LayoutMap.read(file)
    model = {name: part(name, layouts, rank) for name in SHAPES}
    with counting() as counted:
        xrank.export_model(model, tmp_path / "model", layouts=layouts, timeout_seconds=30)
    planned = simulate(file, "export", dtype="fp32")
    assert planned.work.num_ranks == 4
    assert_as_planned(planned, rank, counted)
    held = sum(tensor.numel() * 4 for tensor in model.values())
    assert planned.work.held_nbytes[rank] == held
