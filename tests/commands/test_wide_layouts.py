"""A gather of what only the wider notation can say; the parts are cut here by hand."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from xrank import NFSWorkspace, gather_checkpoint
from xrank.errors import ContradictionError, LayoutError
from xrank.layout import DeviceMesh, LayoutMap

MESH = DeviceMesh.parse_grid("pp=2 tp=2")
SIZES = {"g": 4, "r": 2, "d": 3, "v": 10}
RULES = {
    "embed": "[pad(v, 4*tp)/tp, h] where pp=0",
    "qkv": "[g/tp <q: r d | k: d | v: d>, h]",
    "halves": "[<gate: f/tp | up: f/tp>, h]",
    "turns": "[f/tp <gate: 1 | up: 1>, h]",
    "uneven": "[f/=tp%3/~pp]",
    "norm": "[h]",
}


def layouts(**rules: str) -> LayoutMap:
    made = LayoutMap(MESH)
    made.sizes.update(SIZES)
    made.update(RULES | rules)
    return made


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"embed": (10, 2), "qkv": (48, 2), "halves": (12, 2), "turns": (12, 2), "uneven": (20,), "norm": (5,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def parts(model: dict[str, torch.Tensor], pp: int, tp: int) -> dict[str, torch.Tensor]:
    """Return what the rank at a place holds."""
    padded = torch.cat((model["embed"], torch.full((6, 2), 7.0)))
    gate, up = model["halves"].chunk(2)
    held = {
        "qkv": model["qkv"].chunk(2)[tp],
        "halves": torch.cat((gate.chunk(2)[tp], up.chunk(2)[tp])),
        "turns": model["turns"].chunk(2)[tp],
        "uneven": model["uneven"]
        .split([12, 8])[tp]
        .chunk(2)[pp],  # seven blocks of three: four and three, the last short
        "norm": model["norm"],
    }
    return held if pp else {**held, "embed": padded.chunk(2)[tp]}


def write(folder, model, made: LayoutMap | None, change=lambda place, held: held) -> None:
    for rank in range(4):
        place = MESH.coordinate(rank)
        held = {name: tensor.contiguous() for name, tensor in change(place, parts(model, **place)).items()}
        workspace = NFSWorkspace(folder, rank=rank, world_size=4, run_id="run")
        workspace.write_configs_and_weights({"hidden": 2}, held, layouts=made)


@pytest.mark.parametrize("recorded", [True, False])
def test_what_ranks_hold_by_wider_layouts_is_gathered_exactly(tmp_path, recorded):
    model = whole()
    write(tmp_path / "ws", model, layouts() if recorded else None)
    file = tmp_path / "layout.toml"
    layouts().write(file)
    report = gather_checkpoint(tmp_path / "ws", tmp_path / "out", layouts=None if recorded else file)
    assert report.ok
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == model.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


def test_a_part_on_a_rank_that_the_layout_leaves_out_is_refused(tmp_path):
    write(tmp_path / "ws", whole(), layouts(), lambda place, held: {**held, "embed": torch.zeros(8, 2)})
    with pytest.raises((ContradictionError, LayoutError), match="but the layout") as caught:
        gather_checkpoint(tmp_path / "ws", tmp_path / "out")
    assert caught.value.tensor == "embed" and caught.value.rank == 2


def test_addends_are_no_replicas_even_where_they_are_equal(tmp_path):
    write(tmp_path / "ws", whole(), layouts(grad="[h] sum(tp)"), lambda _, held: {**held, "grad": torch.zeros(3)})
    with pytest.raises(LayoutError, match="its ranks hold partial sums over tp"):
        gather_checkpoint(tmp_path / "ws", tmp_path / "out")
