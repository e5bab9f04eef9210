"""States that record no layout: placed by a layout file, or by a base model's shapes where they leave one way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.bench import Bench, run
from tests.commands.made_workspaces import assert_holds, leave, leave_plain, made_model

ASSUMED = "; if two axes of the mesh split it, only a layout file gives their order"

FILE = """
[mesh]
grid = "dp=2 tp=2"

[tensors]
"embed.weight" = "[v/tp, h]"
"up.weight" = "[f/tp/~dp, h]"
"down.weight" = "[h, f/tp]"
"norm.weight|steps" = "[n]"
"""


def layout_file(bench: Bench, text: str = FILE) -> tuple[str, Path]:
    path = bench.folder / "layout.toml"
    path.write_text(text)
    return "--layout", path


def base_model(bench: Bench, model: dict[str, torch.Tensor]) -> tuple[str, Path]:
    path = bench.folder / "base"
    path.mkdir(exist_ok=True)
    save_file(model, path / "model.safetensors")
    return "--base-model", path


def test_refused_tensor_by_tensor(bench: Bench) -> None:
    model = leave(bench.workspace, recorded=False)
    says = [
        "embed.weight: no layout is recorded, so it is unknown how it is split over ranks 0-3",
        "likewise up.weight, down.weight, norm.weight, steps",
        "plain tensors of shape [8, 8]",
        (
            'give --layout FILE with lines such as [mesh], grid = "tp=4", [tensors], "embed.weight" = "[d0, d1]" if '
            'each rank holds the whole tensor, or "[d0/tp, d1]" if it holds a part of the rows'
        ),
        "or give --base-model DIR",
    ]
    bench.refused("LayoutError", says=says, tensor="embed.weight", rank=0, file="rank_0_state.pth")
    bench.succeeds(model, *layout_file(bench))


def test_of_many_tensors_the_first_are_named(bench: Bench) -> None:
    many = {f"layers.{i}": torch.rand(4) for i in range(20)}
    leave(bench.workspace, many, layouts=dict.fromkeys(many, "[n/tp]"), recorded=False)
    error = bench.refused("LayoutError", says=["layers.0: no layout", "layers.5 and 14 more"])
    assert "layers.6" not in error["message"]


def test_a_tensor_without_a_rule(bench: Bench) -> None:
    leave(bench.workspace, recorded=False)
    options = layout_file(bench, FILE.replace('"norm.weight|steps" = "[n]"', ""))
    error = bench.refused("LayoutError", *options, says=["norm.weight: no layout is recorded", "likewise steps"])
    assert "up.weight" not in error["message"]


def test_unused_rules_are_told(bench: Bench) -> None:
    model = leave(bench.workspace, recorded=False)
    report = bench.succeeds(model, *layout_file(bench, FILE + '"gone.*" = "[a]"\n'))
    (message,) = [note["message"] for note in report["notes"] if note["code"] == "unused-rule"]
    assert "'gone.*' matches no tensor" in message
    shutil.rmtree(bench.out)
    many = "".join(f'"gone{i}.*" = "[a]"\n' for i in range(5))
    report = bench.succeeds(model, *layout_file(bench, FILE + many))
    (message,) = [note["message"] for note in report["notes"] if note["code"] == "unused-rule"]
    assert "match no tensor: 'gone0.*', 'gone1.*', 'gone2.*' and 2 more" in message


def test_one_note_for_what_many_tensors_have_in_common(bench: Bench) -> None:
    model = {f"norm{i}": torch.rand(4) for i in range(7)}
    leave(bench.workspace, model, layouts=dict.fromkeys(model, "[n]"), recorded=False)
    report = bench.succeeds(model, *base_model(bench, model))
    (message,) = [note["message"] for note in report["notes"] if note["code"] == "assumed-layout"]
    assert message == "norm0, norm1, norm2 and 4 more: whole on ranks 0-3"
    shutil.rmtree(bench.out)
    ended = run("gather", bench.workspace, "--out", bench.out, *base_model(bench, model), "--exclude", "norm[1-6]")
    assert "left out  6 tensors: norm1, norm2, norm3, norm4, norm5 and 1 more\n" in ended.stdout, ended.stdout


BAD_FILES = {
    "no TOML": (FILE + "x == 2", ["layout.toml is not TOML", "(at line"], "layout.toml"),
    "an unknown axis": (FILE.replace("f/tp]", "f/pp]"), ["rule 'down.weight'", "got   ['pp']"], "layout.toml"),
    "an unknown table": (FILE + "[more]\n", ["'more' is not a table"], "layout.toml"),
    "a rule that is no text": (FILE.replace('"[n]"', "3"), ["'norm.weight|steps' has no layout's text"], "layout.toml"),
    "a rule that cannot be read": (FILE.replace('"[n]"', '"[n/]"'), ["cannot be read", "instead of"], "layout.toml"),
    "a pattern that is none": (FILE.replace("norm.weight|", "("), ["is not a regular expression"], "layout.toml"),
    "no mesh": (FILE.partition("[tensors]")[2].join(["[tensors]", ""]), ["a rule for it but no [mesh]"], None),
    "a mesh that is too small": (
        FILE.replace("dp=2 tp=2", "dp=1 tp=2"),
        ["mesh does not match the 4 ranks", "dp=1 tp=2, ranks 0-1", "ranks 0-3, of 4"],
        None,
    ),
    "a mesh that is too large": (
        FILE.replace("dp=2 tp=2", "dp=4 tp=2"),
        ["mesh does not match the 4 ranks", "dp=4 tp=2, ranks 0-7"],
        None,
    ),
    "two rules for one tensor": (FILE + '".*.weight" = "[a, b]"\n', ["matches multiple", "only one may match"], None),
    "too few dims": (FILE.replace("[v/tp, h]", "[v/tp]"), ["embed.weight: ", "got   2 dims", "1 dims"], None),
    "an alias of nothing": (FILE + '[alias]\n"steps" = "gone"\n', ["ties steps to gone"], None),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_FILES)
def test_layout_files_with(bench: Bench, what: str) -> None:
    text, says, file = BAD_FILES[what]
    model = leave(bench.workspace, recorded=False)
    options = layout_file(bench, text)
    error = bench.refused("LayoutError", *options, says=says)
    assert file is None or Path(error["file"]).name == file
    bench.succeeds(model, *layout_file(bench))


def test_no_layout_file(bench: Bench) -> None:
    leave(bench.workspace, recorded=False)
    absent = bench.folder / "absent.toml"
    bench.refused("UsageError", "--layout", absent, says=["cannot be read: No such file"], file="absent.toml")


@pytest.mark.parametrize("layout", ["[v/dp, h]", "[v, h]"])
def test_a_layout_that_makes_replicas_of_different_parts(bench: Bench, layout: str) -> None:
    # A wrong file cannot be told from a right one by shapes alone; the replicas it claims are compared.
    leave(bench.workspace, recorded=False)
    options = layout_file(bench, FILE.replace("[v/tp, h]", layout))
    bench.refused(
        "ContradictionError", *options, says=["embed.weight: rank 1 holds different values than rank 0"], rank=1
    )


def test_a_rule_for_what_is_recorded(bench: Bench) -> None:
    model = leave(bench.workspace)
    says = [
        "embed.weight: the layout that its ranks recorded differs from the layout file",
        "delete the tensor's rule from",
    ]
    bench.refused("LayoutError", *layout_file(bench, FILE.replace("[v/tp, h]", "[v/~tp, h]")), says=says)
    bench.succeeds(model)


# ---- shapes of a base model


def plain_model() -> dict[str, torch.Tensor]:
    return {
        "rows": torch.rand(16, 8),
        "columns": torch.rand(4, 12),
        "whole": torch.rand(4, 4),
        "one": torch.tensor(2.0),
    }


def test_one_way_is_left(bench: Bench) -> None:
    model = plain_model()
    layouts = {"rows": "[v/dp/tp, h]", "columns": "[h, f/dp/tp]", "whole": "[a, b]", "one": "[]"}
    leave(bench.workspace, model, layouts=layouts, recorded=False)
    report = bench.succeeds(model, *base_model(bench, model))
    assert [note["message"] for note in report["notes"] if note["code"] == "assumed-layout"] == [
        "rows: split along dim 0 over ranks 0-3 in rank order" + ASSUMED,
        "columns: split along dim 1 over ranks 0-3 in rank order" + ASSUMED,
        "whole, one: whole on ranks 0-3",
    ]
    # The assumption is printed, too.
    shutil.rmtree(bench.out)
    ended = run("gather", bench.workspace, "--out", bench.out, *base_model(bench, model))
    assert "note    rows: split along dim 0 over ranks 0-3 in rank order" + ASSUMED + "\n" in ended.stdout
    assert_holds(bench.out, model)


@pytest.mark.parametrize("layout", ["[v/tp, h/dp]", "[v/tp, h]"], ids=["cut along two dims", "cut and repeated"])
def test_several_ways_are_left(bench: Bench, layout: str) -> None:
    model = {"rows": torch.rand(16, 8)}
    leave(bench.workspace, model, layouts={"rows": layout}, recorded=False)
    says = [
        "rows: no layout is recorded, and several splits, or none, fit",
        "parts of [16, 8]",
        "--layout",
    ]
    bench.refused("LayoutError", *base_model(bench, model), says=says, tensor="rows", file="rank_0_state.pth")
    bench.succeeds(model, *layout_file(bench, f'[mesh]\ngrid = "dp=2 tp=2"\n[tensors]\nrows = "{layout}"\n'))


def test_a_missing_last_rank_is_no_smaller_model(bench: Bench) -> None:
    # States without records: only the shape knows that a rank is missing.
    model = {"rows": torch.rand(16, 8)}
    for rank in range(3):
        leave_plain(bench.workspace, rank, {"rows": model["rows"].chunk(4)[rank].clone()})
    options = base_model(bench, model)
    bench.refused(
        "LayoutError", *options, says=["rows: no layout", "got   shapes [4, 8] on ranks 0-2", "parts of [16, 8]"]
    )
    leave_plain(bench.workspace, 3, {"rows": model["rows"].chunk(4)[3].clone()})
    report = bench.succeeds(model, *options)
    assert "no-record" in [note["code"] for note in report["notes"]]


def test_a_layout_file_and_a_base_model_that_disagree(bench: Bench) -> None:
    model = leave(bench.workspace, recorded=False)
    wrong = {**made_model(), "embed.weight": torch.rand(32, 8)}
    says = ["embed.weight: rank 0's part does not have the shape", "got   [8, 8]", "[16, 8], by [v/tp, h] of [32, 8]"]
    options = (*layout_file(bench), *base_model(bench, wrong))
    bench.refused("ContradictionError", *options, says=says, tensor="embed.weight")
    bench.succeeds(model, *layout_file(bench), *base_model(bench, made_model()))
