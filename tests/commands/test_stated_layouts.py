"""``xrank layout`` of what ranks state: names of their own, views, scales; a file made of it says the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.bench import Bench, run
from tests.commands.made_workspaces import assert_holds
from xrank.commands.checkpoint import open_checkpoint
from xrank.commands.gather import gather_checkpoint
from xrank.commands.reshard import reshard_checkpoint
from xrank.layout import LayoutMap
from xrank.readers.workspace import read_rank_state

TOML = """[mesh]
grid = "pp=2 dp=2 tp=2"
view.expert = "pp=2 ep=2 etp=2"

[sizes]
L = 4
e = 2

[tensors]
"embed" = "[pad(v, 8*tp)/tp, h] where pp=0"
"layers.{L/pp}.norm" = "[h]"
"layers.{L/pp}.up" = "[f/tp, h]"
"layers.{L/pp}.experts.{e/ep}.w" = "[f, h/etp] in expert"
"head" = "[v/tp, h] where pp=last"
"""


@pytest.fixture
def model() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = {"embed": (13, 4), "head": (14, 4)}
    for layer in range(4):
        shapes |= {f"layers.{layer}.norm": (4,), f"layers.{layer}.up": (6, 4)}
        shapes |= {f"layers.{layer}.experts.{expert}.w": (3, 4) for expert in range(2)}
    return {name: torch.rand(shape, generator=random) for name, shape in shapes.items()}


@pytest.fixture
def staged(bench: Bench, model: dict[str, torch.Tensor]) -> Path:
    """A workspace of a pipeline: stage 1 calls its layers 2 and 3 by 0 and 1, and its experts by 0."""
    (bench.folder / "whole").mkdir()
    save_file(model, bench.folder / "whole" / "model.safetensors")
    (bench.folder / "l.toml").write_text(TOML)
    reshard_checkpoint(bench.folder / "whole", bench.folder / "l.toml", bench.workspace)
    return bench.workspace


def test_every_rank_is_drawn_with_what_it_holds(bench: Bench, staged: Path) -> None:
    report = json.loads(run("layout", "show", staged, "--json").stdout)
    held = {
        rank: 4 * sum(math.prod(tensor.shape) for tensor in read_rank_state(str(staged), rank).weights.values())
        for rank in range(8)
    }
    assert {row["rank"]: row["nbytes"] for row in report["ranks"]} == held
    by_name = {tensor["name"]: tensor for tensor in report["tensors"]}
    for layer, ranks in ((0, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (2, [4, 5, 6, 7]), (3, [4, 5, 6, 7])):
        (part,) = by_name[f"layers.{layer}.norm"]["parts"]
        assert (part["ranks"], part["local_shape"]) == (ranks, [4]), layer
        assert by_name[f"layers.{layer}.norm"]["absent_ranks"] == [rank for rank in range(8) if rank not in ranks]
        experts = [by_name[f"layers.{layer}.experts.{i}.w"]["parts"] for i in range(2)]
        first = ranks[0]
        assert [[part["ranks"] for part in parts] for parts in experts] == [
            [[first], [first + 1]],
            [[first + 2], [first + 3]],
        ]
    shown = run("layout", "show", staged).stdout
    assert shown.startswith("mesh   pp=2 dp=2 tp=2: ranks 0-7\nview expert pp=2 ep=2 etp=2: ranks 0-7\n"), shown
    assert "layers.2.up F32 [6, 4]  [f/tp, h]\n  and 1 more alike: layers.3.up\n" in shown


def test_the_file_of_it_says_the_same(bench: Bench, staged: Path, model: dict[str, torch.Tensor]) -> None:
    ended = run("layout", "show", staged, "--toml")
    assert ended.exit_code == 0, ended.stderr
    bound = TOML.replace("\n[sizes]\nL = 4\ne = 2\n", "").replace("{L/", "{4/").replace("{e/", "{2/")
    assert sorted(ended.stdout.splitlines()) == sorted(bound.replace("view.expert", 'view."expert"').splitlines())
    file = bench.folder / "again.toml"
    file.write_text(ended.stdout)
    for other in (file, bench.folder / "l.toml"):
        for pair in ((staged, other), (other, staged)):
            assert run("layout", "diff", *pair).stdout == "equal  no differences\n"
        assert run("layout", "check", other, staged).exit_code == 0
    (bench.folder / "other.toml").write_text(TOML.replace("[f/tp, h]", "[f, h/tp]"))
    said = run("layout", "diff", staged, bench.folder / "other.toml").stdout
    assert said == "changed  layers.{4/pp}.up: [f/tp, h] -> [f, h/tp]\n"
    reshard_checkpoint(staged, file, bench.folder / "again")
    gather_checkpoint(bench.folder / "again", bench.out)
    assert_holds(bench.out, model)


def test_an_opened_checkpoint_gives_its_layouts(bench: Bench, staged: Path) -> None:
    found = open_checkpoint(staged).layouts
    assert str(found["layers.3.up"]) == "[f/tp, h]" and found.rule_for("layers.3.up") == "layers.{4/pp}.up"


def test_layouts_given_to_a_checkpoint_that_records_none(bench: Bench) -> None:
    for rank in range(2):
        bench.workspace.mkdir(exist_ok=True)
        weights = {"a": torch.full((2, 3), float(rank))}
        torch.save({"config": {}, "weight": weights}, bench.workspace / f"rank_{rank}_state.pth")
    (bench.folder / "l.toml").write_text('[mesh]\ngrid = "tp=2"\n\n[tensors]\n"a" = "[r/tp, c]"\n')
    opened = open_checkpoint(bench.workspace, layouts=bench.folder / "l.toml")
    assert opened["a"].shape == (4, 3)
    assert opened.layouts == LayoutMap.read(bench.folder / "l.toml")


def test_scales_of_a_weight(bench: Bench) -> None:
    (bench.folder / "whole").mkdir()
    model = {"w": torch.rand(8, 4), "w.scale": torch.rand(4, 2)}
    save_file(model, bench.folder / "whole" / "model.safetensors")
    file = bench.folder / "l.toml"
    file.write_text('[mesh]\ngrid = "tp=2"\n\n[tensors]\n"w" = "[f/tp, h]"\n"w.scale" = "scale(\\"w\\", 2x2)"\n')
    reshard_checkpoint(bench.folder / "whole", file, bench.workspace)
    shown = run("layout", "show", bench.workspace)
    assert "w.scale F32 [4, 2]  scale([f/tp, h], 2x2)\n  rank 0  ##..  rows 0-1  16 B\n" in shown.stdout, shown
    text = run("layout", "show", bench.workspace, "--toml").stdout
    assert '"w.scale" = "scale([f/tp, h], 2x2)"\n' in text
    (bench.folder / "again.toml").write_text(text)
    assert run("layout", "check", bench.folder / "again.toml", bench.workspace).exit_code == 0
