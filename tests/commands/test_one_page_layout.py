"""A model of everything at once, described by one layout file of a page; its parts are cut here by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from xrank import NFSWorkspace, gather_checkpoint, reshard_checkpoint
from xrank.commands.layout import check_layouts
from xrank.engine.holdings import compute_shapes, survey
from xrank.errors import ContradictionError, IncompleteError, LayoutError, XrankError
from xrank.layout import LayoutMap

PAGE = """
[mesh]
grid = "pp=4 tp=2"
view.expert = "pp=4 ep=2"

[sizes]
v = 27          # the true vocabulary
g = 4           # KV groups, each with r query heads of d
r = 3
d = 2
f = 6
e = 4           # experts

[tensors]
"embed" = "[pad(v, 4*tp)/tp, h] where pp=0"
"head" = "[pad(v, 4*tp)/tp, h] where pp=last"
"layers.{10/pp{3,2,4,1}}.qkv" = "[g/tp <q: r d | k: d | v: d>, h]"
"layers.{10/pp{3,2,4,1}}.out" = "[h, g/tp r d]"
"layers.{10/pp{3,2,4,1}}.norm" = "[h]"
"layers.{10/pp{3,2,4,1}}.fc1" = "[<gate: f/tp | up: f/tp>, h]"
"layers.{10/pp{3,2,4,1}}.experts.{e/ep}.w13" = "[f <gate: 1 | up: 1>, h] in expert"
"layers.{10/pp{3,2,4,1}}.experts.{e/ep}.scale" = 'scale("layers.{10/pp{3,2,4,1}}.experts.{e/ep}.w13", 4x5)'
"tail" = "flat(final.norm [5], final.bias [3, 3], pad 4)/tp where pp=last"

[alias]
head = "embed"
"""
STAGES, H, F, G, R, D, V, E = (3, 2, 4, 1), 5, 6, 4, 3, 2, 27, 4
STARTS = (0, 3, 5, 9)


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = {"embed": torch.randn(V, H)}
    for n in range(sum(STAGES)):
        model[f"layers.{n}.qkv"] = torch.randn(G * (R + 2) * D, H)
        model[f"layers.{n}.out"] = torch.randn(H, G * R * D)
        model[f"layers.{n}.norm"] = torch.randn(H)
        model[f"layers.{n}.fc1"] = torch.randn(2 * F, H)
        for expert in range(E):
            model[f"layers.{n}.experts.{expert}.w13"] = torch.randn(2 * F, H)
            model[f"layers.{n}.experts.{expert}.scale"] = torch.randn(3, 1)
    return {**model, "final.norm": torch.randn(5), "final.bias": torch.randn(3, 3)}


def part(model: dict[str, torch.Tensor], pp: int, tp: int) -> dict[str, torch.Tensor]:
    """Return what Megatron would have the rank at a place hold, under the stage's own numbers."""
    held = {}
    for own in range(STAGES[pp]):
        n = STARTS[pp] + own
        gate, up = model[f"layers.{n}.fc1"].chunk(2)
        held[f"layers.{own}.qkv"] = model[f"layers.{n}.qkv"].chunk(2)[tp]
        held[f"layers.{own}.out"] = model[f"layers.{n}.out"].chunk(2, dim=1)[tp]
        held[f"layers.{own}.norm"] = model[f"layers.{n}.norm"]
        held[f"layers.{own}.fc1"] = torch.cat((gate.chunk(2)[tp], up.chunk(2)[tp]))
        for expert in range(2):
            for kind in ("w13", "scale"):
                held[f"layers.{own}.experts.{expert}.{kind}"] = model[f"layers.{n}.experts.{2 * tp + expert}.{kind}"]
    padded = torch.cat((model["embed"], torch.full((5, H), 9.0))).chunk(2)[tp]
    if pp == 0:
        held["embed"] = padded
    if pp == 3:
        held["head"] = padded
        flat = torch.cat((model["final.norm"], model["final.bias"].flatten(), torch.full((2,), 7.0)))
        held["tail"] = flat.chunk(2)[tp]
    return held


def write(folder: Path, model: dict[str, torch.Tensor], layouts: LayoutMap | None, change=lambda rank, held: held):
    for rank in range(8):
        held = change(rank, part(model, *divmod(rank, 2)))
        workspace = NFSWorkspace(folder, rank=rank, world_size=8, run_id="run")
        workspace.write_configs_and_weights({}, {name: t.contiguous() for name, t in held.items()}, layouts=layouts)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "layout.toml").write_text(PAGE)
    return tmp_path / "layout.toml"


@pytest.mark.parametrize("recorded", [False, True])
def test_a_model_of_everything_is_gathered_by_one_page(tmp_path: Path, page: Path, recorded: bool) -> None:
    model = whole()
    write(tmp_path / "ws", model, LayoutMap.read(page) if recorded else None)
    report = gather_checkpoint(tmp_path / "ws", tmp_path / "out", layouts=page)
    assert not [note for note in report.notes if note[0] in ("assumed-layout", "unused-rule")]
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == model.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


def without(name: str):
    return lambda rank, held: {key: tensor for key, tensor in held.items() if rank != 5 or key != name}


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (without("layers.1.qkv"), IncompleteError, "layers.6.qkv: rank 5 of its mesh holds no part of it"),
        (without("layers.3.experts.1.w13"), IncompleteError, "layers.8.experts.3.w13: no rank holds it"),
        (
            lambda rank, held: {**held, "layers.4.norm": torch.ones(H)} if rank == 4 else held,
            LayoutError,
            "layers.4.norm: .*beyond",
        ),
        (
            lambda rank, held: {**held, "layers.0.norm": torch.ones(H)} if rank == 1 else held,
            ContradictionError,
            "layers.0.norm: rank 1 holds different values than rank 0",
        ),
        (
            lambda rank, held: {**held, "tail": torch.ones(6)} if rank == 7 else held,
            ContradictionError,
            "tail: rank 7's part does not have the shape",
        ),
        (
            lambda rank, held: {**held, "final.norm": torch.ones(5)},
            LayoutError,
            "final.norm",
        ),
    ],
)
def test_what_does_not_fit_the_page_is_refused_by_name(tmp_path: Path, page: Path, change, kind, says) -> None:
    write(tmp_path / "ws", whole(), None, change)
    with pytest.raises(kind, match=says) as caught:
        gather_checkpoint(tmp_path / "ws", tmp_path / "out", layouts=page)
    assert isinstance(caught.value, XrankError) and caught.value.tensor is not None
    assert not (tmp_path / "out").exists()


def test_the_page_is_proven_without_any_state(page: Path) -> None:
    page.write_text(page.read_text().replace("[sizes]", "[sizes]\nh = 5"))
    found = survey(LayoutMap.read(page), compute_shapes(LayoutMap.read(page))[0])
    ranks = {one.name: {rank for share in one.shares for rank in share.ranks} for one in found.tensors}
    assert ranks["layers.8.experts.3.w13"] == ranks["layers.8.experts.3.scale"] == {5}
    assert ranks["layers.9.qkv"] == {6, 7} and ranks["embed"] == {0, 1} and ranks["final.norm"] == {6}
    report = check_layouts(page, compute_shapes(LayoutMap.read(page))[0])
    assert report.ok and report.num_tensors == len(whole()) + 1 and not report.notes


def test_what_is_left_out_by_name_may_be_missing(tmp_path: Path, page: Path) -> None:
    model = whole()
    write(tmp_path / "ws", model, None, without("layers.3.experts.1.w13"))
    gather_checkpoint(tmp_path / "ws", tmp_path / "out", layouts=page, exclude=[r"layers\.8\.experts\.3\..*"])
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert model.keys() - found.keys() == {"layers.8.experts.3.w13", "layers.8.experts.3.scale"}


@pytest.mark.parametrize(
    ("name", "says"),
    [("layers.4.norm", "index 4 is beyond"), ("embed.flat", "the shape of w, a member of the buffer, is unknown")],
)
def test_a_state_refuses_what_no_reader_could_place(tmp_path: Path, page: Path, name: str, says: str) -> None:
    layouts = LayoutMap.read(page)
    layouts["embed.flat"] = "flat(w [n], b [2])/tp"
    workspace = NFSWorkspace(tmp_path / "ws", rank=5, world_size=8, run_id="run")
    with pytest.raises(LayoutError, match=says) as caught:
        workspace.write_configs_and_weights({}, {name: torch.ones(H)}, layouts=layouts)
    assert caught.value.tensor == name


SWAPPED = {
    "embed": "[pad(v, 4*tp)/tp, h] where pp=last",
    "layers.{10/~pp}.qkv": "[g/tp <q: r d | k: d | v: d>, h]",
    "layers.{10/~pp}.out": "[h, g/tp r d]",
    "layers.{10/~pp}.norm": "[h]",
    "layers.{10/~pp}.fc1": "[f/tp <gate: 1 | up: 1>, h]",
    "layers.{10/~pp}.experts.{e/~ep}.w13": "[f <gate: 1 | up: 1>, h] in expert",
    "layers.{10/~pp}.experts.{e/~ep}.scale": 'scale("layers.{10/~pp}.experts.{e/~ep}.w13", 4x5)',
    "final.*": "[n/~pp, m] in expert",
    "final.norm": "[n/~tp]",
}


def test_a_model_of_everything_is_resharded_and_comes_back(tmp_path: Path, page: Path) -> None:
    model = whole()
    there = tmp_path / "there.toml"
    rules = [f"{name!r} = {text!r}" for name, text in SWAPPED.items()]
    there.write_text("\n".join([
        '[mesh]', 'grid = "pp=3 tp=4"', 'view.expert = "pp=3 ep=4"', "[sizes]", "v = 27", "g = 4", "r = 3", "d = 2",
        "f = 6", "e = 4", "[tensors]", *rules,
        "[alias]", 'head = "embed"',
    ]))  # fmt: skip
    write(tmp_path / "ws", model, LayoutMap.read(page))
    tied = tmp_path / "tied.toml"
    tied.write_text('[alias]\nhead = "embed"\n')
    gather_checkpoint(tmp_path / "ws", tmp_path / "whole", layouts=tied)
    with pytest.raises(LayoutError, match=r"layers\.0\.fc1: 6/tp: 6 is not divisible by 4"):
        reshard_checkpoint(tmp_path / "ws", there, tmp_path / "moved")
    there.write_text(there.read_text().replace("[f/tp <gate", "[f/~tp <gate"))
    report = reshard_checkpoint(tmp_path / "ws", there, tmp_path / "moved")
    assert report.output is not None and report.output["world_size"] == 12
    last = torch.load(tmp_path / "moved" / "rank_11_state.pth")["weight"]
    kinds = ("qkv", "out", "norm", "fc1", "experts.0.w13", "experts.0.scale")
    own = {f"layers.{number}.{kind}" for number in range(2) for kind in kinds}
    assert last.keys() == own | {"embed", "head", "final.bias", "final.norm"}
    assert torch.equal(last["layers.1.experts.0.w13"], model["layers.9.experts.3.w13"])
    # What the new states record is enough to gather them, and to go back to states like those they came of.
    gather_checkpoint(tmp_path / "moved", tmp_path / "again", layouts=tied)
    for folder in ("whole", "again"):
        found = safetensors.torch.load_file(tmp_path / folder / "model.safetensors")
        assert found.keys() == model.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in model.items())
    back = tmp_path / "back.toml"
    flat = '"tail" = "flat(final.norm [5], final.bias [3, 3], pad 4)/tp where pp=last"'
    back.write_text(page.read_text())
    with pytest.raises(LayoutError, match=r"final\.norm: the layout file puts it into the flat buffer tail"):
        reshard_checkpoint(tmp_path / "moved", back, tmp_path / "back")
    back.write_text(page.read_text().replace(flat, '"final.*" = "[n, m] where pp=last"\n"final.norm" = "[n]"'))
    reshard_checkpoint(tmp_path / "moved", back, tmp_path / "back")
    for rank in range(8):
        expected = part(model, *divmod(rank, 2))
        got = torch.load(tmp_path / "back" / f"rank_{rank}_state.pth")["weight"]
        assert expected.keys() - {"tail"} == got.keys() - {"final.norm", "final.bias"}
        for name in expected.keys() - {"tail"}:
            rows = min(len(expected[name]), V - 16 * (rank % 2)) if name in ("embed", "head") else len(expected[name])
            assert torch.equal(got[name][:rows], expected[name][:rows]), (rank, name)
