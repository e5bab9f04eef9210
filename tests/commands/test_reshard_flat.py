"""Reshards into flat slices of single tensors, as sharded optimizers hold them; buffers of several are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.commands.made_workspaces import assert_holds, cut, leave, made_model, state_of
from xrank.commands.gather import gather_checkpoint
from xrank.commands.reshard import reshard_checkpoint
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap

pytestmark = pytest.mark.quick

_MESH = DeviceMesh((3, 2), ("dp", "tp"))
_COUNTS = {
    "embed.weight": ("[16/tp, 8]", (10, 0, 54)),
    "up.weight": ("[12, 8]", (32, 32, 32)),
    "down.weight": ("[8, 12/tp]", (7, 41, 0)),
    "norm.weight": ("[8]", (1, 2, 5)),
    "steps": ("[3]", (3, 0, 0)),
}


def _told(**instead: str) -> LayoutMap:
    told = LayoutMap(_MESH)
    for name, (dims, counts) in _COUNTS.items():
        told[name] = instead.get(name) or f"flat({name} {dims})/dp{{{','.join(map(str, counts))}}}"
    return told


def test_every_rank_gets_its_run_of_the_local_tensor(tmp_path: Path) -> None:
    model = leave(tmp_path / "ws")
    reshard_checkpoint(tmp_path / "ws", _told(), tmp_path / "flat")
    for rank in range(6):
        held = torch.load(state_of(tmp_path / "flat", rank), weights_only=True)["weight"]
        at = _MESH.coordinate(rank)
        for name, (dims, counts) in _COUNTS.items():
            local = cut(model[name], dims.replace("16/", "v/").replace("12/", "f/"), _MESH, rank).flatten()
            first = sum(counts[: at["dp"]])
            assert torch.equal(held[name], local[first : first + counts[at["dp"]]]), (name, rank)
    gather_checkpoint(tmp_path / "flat", tmp_path / "model")
    assert_holds(tmp_path / "model", made_model())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flat(steps [3])/dp{1,1,1}", r"norm\.weight: the new layout is a flat buffer"),
        ("flat(norm.weight [8], steps [3])/dp{4,4,3}", r"norm\.weight: the new layout is a flat buffer"),
        ("flat(norm.weight [8], pad 3)/dp", r"norm\.weight: the new layout is a flat buffer"),
        ("flat(norm.weight [8])/dp{1,2,4}", r"norm\.weight: .*(8|7)"),
        ("flat(norm.weight [9])/dp{1,2,6}", r"norm\.weight: "),
    ],
)
def test_other_buffers_are_refused(tmp_path: Path, text: str, message: str) -> None:
    leave(tmp_path / "ws")
    with pytest.raises(LayoutError, match=message):
        reshard_checkpoint(tmp_path / "ws", _told(**{"norm.weight": text}), tmp_path / "flat")
    assert not (tmp_path / "flat").exists()
