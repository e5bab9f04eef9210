"""The folder of a salvage is never taken for a model, a base model fills in what is missing, and pages show it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import xrank
from tests.cli.bench import refusal, run
from tests.commands.made_workspaces import leave, made_model
from tests.faults.planted import SOURCES
from xrank.errors import IncompleteError, UsageError


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """A workspace without one state; of its tensors, only up.weight has no replica."""
    leave(tmp_path / "states")
    (tmp_path / "states" / "rank_1_state.pth").unlink()
    return tmp_path / "states"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    save_file(made_model(1), tmp_path / "base" / "model.safetensors")
    return tmp_path / "base"


def test_a_salvage_is_no_model(tmp_path: Path, torn: Path) -> None:
    out = tmp_path / "out"
    ended = run("gather", torn, "-o", out, "--salvage", "--max-shard-size", "600")
    assert ended.exit_code == 0 and "missing  1 tensor: up.weight; salvage.json lists them" in ended.stdout, (
        ended.stdout
    )
    assert sorted(path.name for path in out.iterdir()) == [
        "salvage.json",
        "salvaged-00001-of-00002.safetensors",
        "salvaged-00002-of-00002.safetensors",
        "xrank_manifest.json",
    ]
    (missing,) = json.loads((out / "salvage.json").read_text())["missing"]
    assert missing["name"] == "up.weight" and "rank_1_state.pth" in missing["problem"]
    refusal(run("verify", out, "--json"), "IncompleteError", says=["is partial", "gather the checkpoint again"])
    (out / "salvaged-00001-of-00002.safetensors").write_bytes(b"")
    assert run("verify", out).exit_code == 4, "damage comes before what is missing"


def test_commands_refuse_a_salvage_by_name(tmp_path: Path, torn: Path) -> None:
    out = tmp_path / "out"
    xrank.gather_checkpoint(torn, out, salvage=True)
    for words in (
        ("gather", out, "-o", tmp_path / "no"),
        ("gather", out / "salvaged.safetensors", "-o", tmp_path / "no"),
        ("gather", torn, "-o", tmp_path / "no", "--base-model", out),
        ("layout", "show", out),
    ):
        ended = run(*words, "--json")
        assert ended.exit_code == 3 and f"{out} is partial" in ended.stderr, (words, ended.stderr)
    with pytest.raises(IncompleteError, match="is partial"):
        xrank.load_model(nn.Linear(2, 2), out)


def test_a_base_model_fills_in_what_is_missing(tmp_path: Path, torn: Path, base: Path) -> None:
    report = xrank.gather_checkpoint(torn, tmp_path / "out", base_model=base, fill_from_base=["up.*"])
    found, own, other = load_file(tmp_path / "out" / "model.safetensors"), made_model(), made_model(1)
    assert all(torch.equal(found[name], (other if name == "up.weight" else own)[name]) for name in own)
    assert report.output is not None and list(report.output.filled) == ["up.weight"] and found.keys() == own.keys()
    assert json.loads((tmp_path / "out" / "xrank_manifest.json").read_text())["filled"] == ["up.weight"]
    assert dict(report.notes)["filled"].endswith("up.weight")
    assert run("verify", tmp_path / "out").exit_code == 0


def test_what_is_not_filled_in_is_refused(tmp_path: Path, torn: Path, base: Path) -> None:
    (torn / "rank_3_state.pth").unlink()  # with it the replicas of half of the tensors
    with pytest.raises(IncompleteError, match=r"damaged or missing: embed.weight, down.weight") as caught:
        xrank.gather_checkpoint(torn, tmp_path / "out", base_model=base, fill_from_base="up.*")
    assert "salvage" in str(caught.value.next_step)
    with pytest.raises(UsageError, match=r"fill_from_base=? matches no missing tensor"):
        xrank.gather_checkpoint(torn, tmp_path / "out", base_model=base, fill_from_base="norm.*")
    report = xrank.gather_checkpoint(torn, tmp_path / "out", base_model=base, fill_from_base="up.*", salvage=True)
    assert report.output is not None and [one["name"] for one in report.output.missing] == [
        "embed.weight",
        "down.weight",
    ]
    assert load_file(tmp_path / "out" / "salvaged.safetensors").keys() == {"up.weight", "norm.weight", "steps"}


def test_chosen_tensors_need_no_others(tmp_path: Path, torn: Path) -> None:
    ended = run("gather", torn, "-o", tmp_path / "out", "--exclude", "up.*")
    assert ended.exit_code == 0 and "no written tensor needs it" in ended.stderr + ended.stdout
    refusal(run("gather", torn, "-o", tmp_path / "no", "--include", "up.*", "--json"), "IncompleteError", rank=1)


@pytest.mark.parametrize(("one", "other"), [("salvage", "quantize"), ("fill_from_base", "dequantize")])
def test_options_that_do_not_go_together(tmp_path: Path, torn: Path, one: str, other: str) -> None:
    options = {"salvage": True, "fill_from_base": ".*", "quantize": "FP8_DYNAMIC", "dequantize": True}
    with pytest.raises(UsageError, match=f"{one}.* and {other}.* were both given"):
        xrank.gather_checkpoint(torn, tmp_path / "out", **{one: options[one], other: options[other]})


def test_the_hub_takes_no_salvage(tmp_path: Path, torn: Path) -> None:
    with pytest.raises(UsageError, match="a salvage is no model for the Hub"):
        xrank.gather_checkpoint(torn, tmp_path / "out", salvage=True, push_to_hub="org/name")
    assert not (tmp_path / "out").exists()


def test_inspect_draws_what_is_lost(tmp_path: Path) -> None:
    source = tmp_path / "source"
    SOURCES["DCP"][0](source)
    (source / "__1_0.distcp").unlink()
    (source / "__2_0.distcp").write_bytes((source / "__2_0.distcp").read_bytes()[:3000])
    text = run("inspect", source, "--html", tmp_path / "page.html").stdout
    lost = "rank 1 in __1_0.distcp; rank 2 in __2_0.distcp"
    assert text.count("\nproblem ") == 2 and f"2.weight, rows 2-5: rank 1's part is damaged or missing; {lost}" in text
    assert f"2 whole tensors, and a list of the others: xrank gather {source} -o OUT --salvage" in text
    page = (tmp_path / "page.html").read_text()
    assert page.count('class="box lost"') >= 2 and "lost: the part of ranks 1-2" in page
    report = xrank.inspect(source, html=tmp_path / "again.html")
    assert report.path == str(source) and (tmp_path / "again.html").read_text() == page


def test_a_name_that_claims_a_billion_ranks_is_refused_at_once(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model_world_size_999999999_rank_0.pt")
    (problem,) = xrank.inspect(tmp_path).details["problems"]
    assert "and 999999997 more of 999999999" in problem["message"]


def test_a_cut_copy_of_another_shard_gives_no_piece(tmp_path: Path) -> None:
    """Its first pieces have the right shapes, and the values of another rank."""
    source = tmp_path / "source"
    SOURCES["torch_dist"][0](source)
    known = xrank.gather_checkpoint(source, tmp_path / "known", recipe="none")
    folder = source / "iter_0000010"
    (folder / "__2_0.distcp").write_bytes((folder / "__1_0.distcp").read_bytes()[:9000])
    (problem,) = xrank.inspect(source).details["problems"]
    assert "__2_0.distcp is cut short" in problem["message"]
    report = xrank.gather_checkpoint(source, tmp_path / "out", recipe="none", salvage=True)
    found, right = (load_file(tmp_path / name) for name in ("out/salvaged.safetensors", "known/model.safetensors"))
    assert report.output is not None and len(found) + len(report.output.missing) == known.num_tensors
    assert all(torch.equal(tensor, right[name]) for name, tensor in found.items()) and found
    assert not [name for name in found if "linear" in name and "norm" not in name], (
        "each linear layer has a piece in the lost shard"
    )


def test_a_salvage_is_replaced_by_a_whole_model(tmp_path: Path) -> None:
    model = leave(tmp_path / "states")
    kept = (tmp_path / "states" / "rank_1_state.pth").rename(tmp_path / "kept.pth")
    xrank.gather_checkpoint(tmp_path / "states", tmp_path / "out", salvage=True)
    kept.rename(tmp_path / "states" / "rank_1_state.pth")
    ended = run("gather", tmp_path / "states", "-o", tmp_path / "out", "--overwrite")
    assert ended.exit_code == 0, ended.stderr
    assert not (tmp_path / "out" / "salvage.json").exists() and run("verify", tmp_path / "out").exit_code == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == model.keys()
