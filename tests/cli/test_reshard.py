"""``xrank reshard``: what it prints, its options, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.bench import Bench, Ended, refusal, run
from tests.commands.made_workspaces import RUN, assert_holds, flip, leave, state_of
from xrank.readers.workspace import read_rank_state

pytestmark = pytest.mark.quick

LAYOUT = """
[mesh]
grid = "r=2"

[tensors]
".*weight" = "[n/~r, m]"
"norm.weight" = "[n]"
"steps" = "[n/~r]"
"""


@pytest.fixture
def layout(bench: Bench) -> Path:
    path = bench.folder / "new.toml"
    path.write_text(LAYOUT)
    return path


def reshard(bench: Bench, layout: Path, *options: object) -> Ended:
    return run("reshard", bench.workspace, "--layout", layout, "--out", bench.out, *options)


def test_its_text(bench: Bench, layout: Path) -> None:
    model = leave(bench.workspace)
    ended = reshard(bench, layout)
    assert ended.exit_code == 0, ended.stderr
    rows = [line.split(maxsplit=1) for line in ended.stdout.splitlines()]
    assert [label for label, _ in rows] == ["source", "proof", "layout", "wrote"]
    assert rows[0][1].startswith("workspace, step 2000, written by 4 ranks; ")
    assert rows[1][1] == "5 tensors, every element exactly once; 20 checksums good; 10 replicas equal"
    assert rows[2][1] == f"r=2; run {RUN}"
    assert f"{bench.out}: 2 states of " in rows[3][1]
    assert ", peak memory " in rows[3][1]
    assert run("gather", bench.out, "--out", bench.folder / "again").exit_code == 0
    assert_holds(bench.folder / "again", model)
    assert run("verify", bench.out).stdout.startswith("ok  5 tensors")


def test_its_json_and_its_path(bench: Bench, layout: Path) -> None:
    leave(bench.workspace)
    ended = reshard(bench, layout, "--json", "--dtype", "bf16", "--max-memory", "2MB", "--workers", 1)
    report = json.loads(ended.stdout)
    assert (report["command"], report["status"], report["exit_code"]) == ("reshard", "ok", 0)
    assert report["output"]["world_size"] == 2
    assert report["output"]["cast"]["norm.weight"] == "F32 -> BF16"
    assert [file["name"] for file in report["output"]["files"]] == ["rank_0_state.pth", "rank_1_state.pth"]
    again = reshard(bench, layout, "--overwrite", "--quiet")
    assert again.stdout == f"{bench.out}\n"


def test_it_says_what_is_tied(bench: Bench, layout: Path) -> None:
    leave(bench.workspace, layouts={**_layouts(), "head.weight": "[v/tp, h]"}, model=_tied())
    layout.write_text(LAYOUT + '\n[alias]\n"head.weight" = "embed.weight"\n')
    ended = reshard(bench, layout)
    assert "head.weight equals embed.weight, whose bytes they share" in ended.stdout


def _layouts() -> dict[str, str]:
    return {"embed.weight": "[v/tp, h]", "norm.weight": "[h]"}


def _tied() -> dict[str, object]:
    from tests.commands.made_workspaces import made_model

    model = made_model()
    return {name: model[name] for name in _layouts()} | {"head.weight": model["embed.weight"]}


def refused(bench: Bench, kind: str, layout: Path, *options: object, **parts: object) -> None:
    refusal(reshard(bench, layout, "--json", *options), kind, **parts)
    assert not bench.out.exists()


def test_its_exit_codes(bench: Bench, layout: Path) -> None:
    leave(bench.workspace)
    refused(bench, "UsageError", bench.folder / "none.toml")
    refused(bench, "UsageError", layout, "--dtype", "base", says=["states are not cast"])
    refused(bench, "UsageError", layout, "--max-memory", "0", says=["--max-memory must be a size"])
    refused(bench, "UsageError", layout, "--recipe", "llama", says=["no recipe is called llama"])
    bad = bench.folder / "bad.toml"
    bad.write_text(LAYOUT.replace('"r=2"', '"r=5"').replace("n/~r, m", "n/r, m"))
    refused(bench, "LayoutError", bad, says=["is not divisible by 5"], tensor="embed.weight")
    bad.write_text(LAYOUT.replace('"steps"', '"stops"'))
    refused(bench, "LayoutError", bad, says=["no rule of the layout file"], tensor="steps")
    assert [name for name in bench.names() if name.startswith(".")] == []
    record = next(iter(read_rank_state(str(bench.workspace), 2).archive.records.values()))
    flip(state_of(bench.workspace, 2), record.offset)
    refused(bench, "CorruptError", layout, tensor="embed.weight", rank=2, file="rank_2_state.pth")
    state_of(bench.workspace, 2).unlink()
    refused(bench, "IncompleteError", layout, rank=2)
    assert run("reshard", bench.workspace, "--out", bench.out).exit_code == 2
    leave(bench.workspace)
    bench.out.mkdir()
    (bench.out / "mine").write_text("")
    refusal(reshard(bench, layout, "--json"), "OutputExistsError")


def test_a_size_of_another_model_is_named(bench: Bench) -> None:
    (bench.folder / "whole").mkdir()
    model = {f"layers.{i}.qkv": torch.rand(12, 4) for i in range(2)}
    save_file(model, bench.folder / "whole" / "model.safetensors")
    file = bench.folder / "l.toml"
    text = (
        '[mesh]\ngrid = "pp=2 tp=1"\n\n[sizes]\nr = {r}\nd = 2\nL = {L}\nz = 9\n\n[tensors]\n"layers.{{L/pp}}.qkv" = '
    )
    text += '"[g/tp <q: r d | k: d | v: d>, h]"\n'
    file.write_text(text.format(r=4, L=2))
    arguments = ("reshard", bench.folder / "whole", "--layout", file, "--out", bench.out)
    ended = run(*arguments, "--json")
    assert "g = " not in ended.stderr and ended.exit_code == 0, ended.stderr
    again = run(*arguments, "--json")
    assert again.exit_code == 0 and "an earlier run of this command had made the output" in again.stdout
    file.write_text(text.format(r=3, L=2))
    refusal(
        run(*arguments, "--overwrite", "--json"),
        "LayoutError",
        says=["no size 'g' makes dim 0", "in its [sizes], r = 3, d = 2, L = 2 must be the model's"],
    )
    # Half of the stages would get all layers: nothing is lost, and it is hardly what was meant.
    file.write_text(text.format(r=4, L=8))
    report = json.loads(run(*arguments, "--overwrite", "--json").stdout)
    (note,) = [note["message"] for note in report["notes"] if note["code"] == "counts-more"]
    assert note == "layers.{8/pp}.qkv counts 8 tensors, and the source has 2: is the layout file of this model's size?"
