"""``xrank layout``: what it shows, compares and proves; how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.bench import Bench, refusal, run
from tests.commands.made_workspaces import LAYOUTS, leave, leave_plain
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.workspace.nfs import NFSWorkspace

pytestmark = pytest.mark.quick

GRID = '[mesh]\ngrid = "dp=2 tp=2"\n\n[tensors]\n'
TOML = GRID + "".join(f'"{name}" = "{layout}"\n' for name, layout in LAYOUTS.items())


def written(bench: Bench, text: str, name: str = "layout.toml") -> Path:
    path = bench.folder / name
    path.write_text(text)
    return path


# ---- show


def test_show_a_workspace(bench: Bench) -> None:
    leave(bench.workspace)
    ended = run("layout", "show", bench.workspace)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert ended.stdout.startswith("mesh   dp=2 tp=2: ranks 0-3\n\nembed.weight F32 [16, 8]  [v/tp, h]\n")
    assert "  rank 1  ......###...  rows 6-8   local [3, 8], 48 B\n" in ended.stdout
    assert ended.stdout.endswith("each rank holds\n  ranks 0-3  552 B\n")
    report = json.loads(run("layout", "show", bench.workspace, "--json").stdout)
    assert (report["command"], report["status"], report["error"]) == ("layout show", "ok", None)
    assert [tensor["name"] for tensor in report["tensors"]] == list(LAYOUTS)
    parts = report["tensors"][0]["parts"]
    assert [(part["ranks"], part["holds"]) for part in parts] == [([0, 2], "rows 0-7"), ([1, 3], "rows 8-15")]
    assert [row["nbytes"] for row in report["ranks"]] == [552] * 4


def test_show_some_tensors(bench: Bench) -> None:
    leave(bench.workspace)
    shown = run("layout", "show", bench.workspace, "--tensor", "(up|down).weight").stdout
    assert "up.weight BF16" in shown and "down.weight F32" in shown and "embed" not in shown
    for pattern, says in (("up", "none of 5 tensors"), ("(", "must be a regular expression")):
        refusal(run("layout", "show", bench.workspace, "--tensor", pattern, "--json"), "UsageError", says=[says])


def test_show_a_model_folder(bench: Bench) -> None:
    bench.out.mkdir()
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4)}, bench.out / "model.safetensors")
    shown = run("layout", "show", bench.out).stdout
    assert "a F32 [2, 3]\n  rank 0  the whole tensor  24 B\n" in shown


def test_show_a_file_draws_what_it_tells(bench: Bench) -> None:
    file = written(bench, GRID + '"a" = "[8/tp, 2]"\n"layers.{4/dp}.b" = "[6/tp]"\n"c" = "[f/tp]"\n')
    ended = run("layout", "show", file)
    assert "a [8, 2]  [8/tp, 2]\n  ranks 0,2  ####....  rows 0-3  local [4, 2], 8 elements\n" in ended.stdout
    assert "layers.0.b [6]  [6/tp]\n  and 1 more alike: layers.1.b\n" in ended.stdout
    assert "layers.2.b [6]  [6/tp]\n  and 1 more alike: layers.3.b\n" in ended.stdout
    assert ended.stdout.endswith("\n\nnote  the rule 'c' = [f/tp] is not drawn: the size 'f' is not known\n")


def test_show_toml_is_a_file_that_says_the_same(bench: Bench) -> None:
    whole = {f"layers.{i}.up.weight": torch.rand(4, 2) for i in range(12)} | {"x{3}": torch.ones(4), "n": torch.ones(2)}
    layouts = dict.fromkeys(whole, "[f/tp/~dp, h]") | {"x{3}": "[v/tp]", "n": "[h]"}
    leave(bench.workspace, whole, layouts=layouts)
    ended = run("layout", "show", bench.workspace, "--toml")
    assert ended.stdout == GRID + (
        '"layers.[0-9]+.up.weight" = "[f/tp/~dp, h]"\n"x\\\\{3\\\\}" = "[v/tp]"\n"n" = "[h]"\n'
    ), ended
    file = written(bench, ended.stdout)
    read = LayoutMap.read(file)
    assert {name: str(read[name]) for name in whole} == layouts
    assert run("layout", "check", file, bench.workspace).exit_code == 0
    assert run("layout", "diff", file, bench.workspace).stdout == "equal  no differences\n"
    assert run("layout", "show", file, "--toml").stdout == ended.stdout


def test_show_toml_of_tensors_on_parts_of_the_mesh(bench: Bench) -> None:
    # As FSDP leaves what tensor parallelism does not cut: each tp place has a mesh of its own, of dp alone.
    for rank in range(4):
        layouts = LayoutMap(DeviceMesh((2, 2), ("dp", "tp")))
        layouts["up"] = "[f/tp/~dp, h]"
        layouts["norm"] = TensorLayout.parse("[h/~dp]", DeviceMesh((2,), ("dp",), [rank % 2, rank % 2 + 2]))
        workspace = NFSWorkspace(bench.workspace, rank=rank, world_size=4, run_id="r")
        parts = {"up": torch.ones(2, 3), "norm": torch.ones(2)}
        workspace.write_configs_and_weights({}, parts, layouts=layouts)
    ended = run("layout", "show", bench.workspace)
    assert "norm F32 [4]  [h/~dp]\n  ranks 0-1  ##..  elements 0-1  local [2], 8 B\n" in ended.stdout
    ended = run("layout", "show", bench.workspace, "--toml")
    assert ended.stdout == GRID + '"up" = "[f/tp/~dp, h]"\n"norm" = "[h/~dp]"\n', ended


def test_show_toml_of_names_that_are_patterns_for_each_other(bench: Bench) -> None:
    whole = {name: torch.ones(4, 2) for name in ("a.1", "aX1", "aX2", "b(", "c[", "\n")}
    leave_plain(bench.workspace, 0, whole)
    file = written(bench, run("layout", "show", bench.workspace, "--toml").stdout)
    read = LayoutMap.read(file)
    assert {name: str(read[name]) for name in whole} == dict.fromkeys(whole, "[d0, d1]")
    assert run("layout", "check", file, bench.workspace).exit_code == 0


def test_show_writes_a_page(bench: Bench) -> None:
    leave(bench.workspace)
    page = bench.folder / "page.html"
    ended = run("layout", "show", bench.workspace, "--html", page)
    assert (ended.exit_code, ended.stdout) == (0, f"wrote  {page}: 5 tensors\n")
    assert page.read_text().startswith("<!DOCTYPE html>") and "up.weight" in page.read_text()
    assert run("layout", "show", bench.workspace, "--html", page, "-q").stdout == f"{page}\n"
    missing = bench.folder / "no" / "page.html"
    refusal(
        run("layout", "show", bench.workspace, "--html", missing, "--json"), "UsageError", says=["cannot be written"]
    )
    assert sorted(bench.names()) == ["page.html", "run42"]


def test_show_hostile_names(bench: Bench) -> None:
    leave_plain(bench.workspace, 0, {"a\x1b[31m\n\u202e<script>": torch.ones(4)})
    for arguments in ([], ["--json"], ["--toml"]):
        ended = run("layout", "show", bench.workspace, *arguments)
        assert ended.exit_code == 0, ended.stderr
        assert not [c for c in ended.stdout + ended.stderr if c != "\n" and not c.isprintable()], arguments
    assert "\na\\x1b[31m\\n\\u202e<script> F32 [4]\n" in "\n" + run("layout", "show", bench.workspace).stdout


def test_show_refuses_what_records_no_layout(bench: Bench) -> None:
    for rank in range(2):
        leave_plain(bench.workspace, rank, {"a": torch.ones(2, 2)})
    refusal(run("layout", "show", bench.workspace, "--json"), "LayoutError", says=["xrank layout check FILE PATH"])
    refusal(run("layout", "show", bench.folder / "none", "--json"), "IncompleteError")


# ---- diff


def test_diff(bench: Bench) -> None:
    old = written(bench, TOML, "old.toml")
    new = written(
        bench,
        TOML.replace("dp=2 tp=2", "dp=1 tp=4")
        .replace('"steps" = "[n]"\n', '"more" = "[n]"\n')
        .replace("[v/tp", "[v/~tp"),
        "new.toml",
    )
    assert run("layout", "diff", old, old).stdout == "equal  no differences\n"
    ended = run("layout", "diff", old, new)
    assert ended.exit_code == 0
    assert ended.stdout.splitlines() == [
        "mesh     grid: dp=2 tp=2 -> dp=1 tp=4",
        "removed  steps: [n]",
        "added    more: [n]",
        "changed  embed.weight: [v/tp, h] -> [v/~tp, h]",
    ]
    report = json.loads(run("layout", "diff", old, new, "--json").stdout)
    assert (report["command"], report["equal"]) == ("layout diff", False)
    assert run("layout", "diff", old, old, "--exit-code").exit_code == 0
    ended = run("layout", "diff", old, new, "--exit-code")
    assert ended.exit_code == 4 and "differ" in ended.stderr and "more" in ended.stderr, ended.stderr
    assert report["differences"]["removed"] == [{"name": "steps", "old": "[n]", "new": None}]


# ---- check


def test_check_against_a_workspace_and_a_model(bench: Bench) -> None:
    whole = leave(bench.workspace)
    bench.out.mkdir()
    save_file(whole, bench.out / "model.safetensors")
    file = written(bench, TOML)
    for source in (bench.workspace, bench.out):
        ended = run("layout", "check", file, source)
        assert ended.stdout == (
            f"ok     5 tensors, every element exactly once per replica; 5 rules in {file}\nranks  4 ranks, 552 B each\n"
        ), ended


def test_check_reads_states_without_a_record_by_the_file(bench: Bench) -> None:
    leave(bench.workspace, recorded=False)
    assert run("layout", "check", written(bench, TOML), bench.workspace).exit_code == 0


def test_check_by_the_sizes_that_the_file_tells(bench: Bench) -> None:
    file = written(
        bench, GRID.replace("[tensors]", "[sizes]\nf = 8\n\n[tensors]") + '"a" = "[f/tp, 2]"\n"b" = "[x/tp]"\n'
    )
    ended = run("layout", "check", file)
    assert ended.stdout.splitlines()[0].startswith("ok    1 tensor, every element exactly once")
    assert "the rule 'b' is not proven: the size 'x' is not known" in ended.stdout
    file.write_text(TOML)
    refusal(run("layout", "check", file, "--json"), "LayoutError", says=["xrank layout check"])


@pytest.mark.parametrize(
    ("change", "says", "tensor"),
    [
        (("[v/tp, h]", "[v/tp/rep, h] in other"), ["embed.weight, rows 4-11: held by no rank"], "embed.weight"),
        (('"norm.weight"', '"norm.bias"'), ["norm.weight: no rule gives its layout"], "norm.weight"),
        (("[h]", "[h/three]"), ["three"], None),
        (("[n]", "[n/tp]"), ["steps"], "steps"),
    ],
)
def test_check_refuses_what_does_not_cover(
    bench: Bench, change: tuple[str, str], says: list[str], tensor: str | None
) -> None:
    leave(bench.workspace)
    text = TOML.replace("\n\n[tensors]", '\nview.other = "u=2 rep=2"\n\n[tensors]')
    ended = run("layout", "check", written(bench, text.replace(*change)), bench.workspace, "--json")
    refusal(ended, "LayoutError", says=says, tensor=tensor)
    if tensor is not None:
        report = json.loads(ended.stdout)
        assert report["command"] == "layout check"
        assert [problem["tensor"] for problem in report["problems"]] == [tensor]
        assert report["unused_rules"] == (["norm.bias"] if tensor == "norm.weight" else [])


def test_check_says_rules_that_match_nothing(bench: Bench) -> None:
    leave(bench.workspace)
    ended = run("layout", "check", written(bench, TOML + '"ghost.*" = "[h]"\n'), bench.workspace)
    assert (ended.exit_code, ended.stdout.splitlines()[-1]) == (0, "note   the rule 'ghost.*' matches no tensor")


def test_the_group_is_a_command_line_as_any(bench: Bench) -> None:
    for arguments in (["layout", "bogus"], ["layout", "check"], ["layout", "diff", "a"]):
        ended = run(*arguments, "--json")
        refusal(ended, "UsageError")
        assert json.loads(ended.stdout)["command"] == " ".join(arguments[: 1 if arguments[1] == "bogus" else 2])
    for words in (["layout", "--help"], ["layout", "show", "--help"]):
        assert run(*words).exit_code == 0
