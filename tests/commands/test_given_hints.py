"""States without layouts: what ``--layout`` and ``--base-model`` tell is enough for every command that reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.bench import Bench, refusal, run
from tests.commands.made_workspaces import CONFIG, assert_holds, leave_plain
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.commands.verify import verify_model
from xrank.errors import LayoutError

EMBEDDING, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.up.weight"
TIED = {**CONFIG, "tie_word_embeddings": True}


@pytest.fixture
def model() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(4)
    return {EMBEDDING: torch.rand(6, 4, generator=random), UP: torch.rand(8, 4, generator=random)}


def leave_tied(bench: Bench, model: dict[str, torch.Tensor]) -> None:
    """Let two ranks leave plain tensors: embedding and head whole, the other cut by rows."""
    for rank in range(2):
        state = {EMBEDDING: model[EMBEDDING], HEAD: model[EMBEDDING], UP: model[UP][4 * rank : 4 * rank + 4].clone()}
        leave_plain(bench.workspace, rank, state, TIED)


def base_of(bench: Bench, model: dict[str, torch.Tensor], config: object = TIED) -> Path:
    """Save a model as transformers does: a tied head is not in it."""
    base = bench.folder / "base"
    base.mkdir()
    save_file(model, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps(config))
    return base


def layout_file(bench: Bench, *, alias: bool = True) -> Path:
    file = bench.folder / "l.toml"
    rules = f'"{EMBEDDING}" = "[v, h]"\n"{UP}" = "[f/tp, h]"\n'
    file.write_text(f'[mesh]\ngrid = "tp=2"\n\n[tensors]\n{rules}' + f'\n[alias]\n"{HEAD}" = "{EMBEDDING}"\n' * alias)
    return file


def test_a_tied_head_has_its_embeddings_shape(bench: Bench, model: dict[str, torch.Tensor]) -> None:
    leave_tied(bench, model)
    base = base_of(bench, model)
    gather_checkpoint(bench.workspace, bench.out, base_model=base)
    assert_holds(bench.out, model)
    assert json.loads((bench.out / "xrank_manifest.json").read_text())["tied"] == {HEAD: EMBEDDING}
    (base / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(LayoutError, match=f"{HEAD}: no layout is recorded"):
        gather_checkpoint(bench.workspace, bench.folder / "untied", base_model=base)


def test_an_alias_of_a_layout_file_is_enough(bench: Bench, model: dict[str, torch.Tensor]) -> None:
    leave_tied(bench, model)
    gather_checkpoint(bench.workspace, bench.out, layouts=layout_file(bench))
    assert_holds(bench.out, model)
    # Or of a file that says nothing else, beside a base model's shapes.
    file = bench.folder / "alias.toml"
    file.write_text(f'[tensors]\n\n[alias]\n"{HEAD}" = "{EMBEDDING}"\n')
    gather_checkpoint(bench.workspace, bench.folder / "b", layouts=file, base_model=base_of(bench, model, CONFIG))
    assert_holds(bench.folder / "b", model)


def test_what_is_left_out_needs_no_layout(bench: Bench, model: dict[str, torch.Tensor]) -> None:
    leave_tied(bench, model)
    base = base_of(bench, model, CONFIG)
    report = gather_checkpoint(bench.workspace, bench.out, base_model=base, exclude=HEAD)
    assert report.output is not None and report.output["excluded"] == [HEAD]
    assert_holds(bench.out, model)
    gather_checkpoint(bench.workspace, bench.folder / "b", layouts=layout_file(bench, alias=False), include="model.*")
    assert_holds(bench.folder / "b", model)
    bench.refused(
        "LayoutError", "--exclude", UP, "--overwrite", says=[f"{EMBEDDING}: no layout is recorded"], tensor=EMBEDDING
    )


@pytest.mark.parametrize("option", ["--layout", "--base-model"])
def test_inspect_and_verify_take_what_a_gather_takes(bench: Bench, model: dict[str, torch.Tensor], option: str) -> None:
    leave_tied(bench, model)
    base = base_of(bench, model)
    given = layout_file(bench) if option == "--layout" else base
    problems = json.loads(run("inspect", bench.workspace, "--json").stdout)["problems"]
    assert {problem["tensor"] for problem in problems} == {*model, HEAD}
    for problem in problems:
        assert (problem["type"], problem["exit_code"]) == ("LayoutError", 2) and option in problem["try"]
    report = json.loads(run("inspect", bench.workspace, option, given, "--json").stdout)
    assert (report["problems"], report["source"]["num_tensors"]) == ([], 3)
    refusal(run("verify", bench.workspace, "--json"), "LayoutError", says=[option])
    ended = run("verify", bench.workspace, option, given)
    assert "every element exactly once" in ended.stdout, ended
    assert ("names and shapes as in the base model" in ended.stdout) == (option == "--base-model")
    refusal(run("verify", bench.workspace, "--against", base, "--json"), "LayoutError", says=[option])
    assert run("verify", bench.workspace, "--against", base, option, given).exit_code == 0
    assert run("verify", base, "--against", bench.workspace, option, given).exit_code == 0
    keyword = {"--layout": "layouts", "--base-model": "base_model"}[option]
    assert verify_model(bench.workspace, against=base, **{keyword: given}).ok  # type: ignore[arg-type]
    assert inspect_source(bench.workspace, **{keyword: given}).details["problems"] == []  # type: ignore[arg-type]
    held = load_file(base / "model.safetensors")
    held[UP][5, 1] += 1
    save_file(held, base / "model.safetensors")
    ended = run("verify", bench.workspace, "--against", base, option, given, "--json")
    refusal(ended, "ContradictionError", says=[f"{UP} differs between"], index_range="element [5, 1]")


def test_names_and_shapes_are_compared_with_the_base_model(bench: Bench, model: dict[str, torch.Tensor]) -> None:
    leave_tied(bench, model)
    base = base_of(bench, {**model, "model.more.weight": torch.ones(2)})
    refusal(
        run("verify", bench.workspace, "--base-model", base, "--json"),
        "ContradictionError",
        says=["model.more.weight is in the base model but not in the source", "give the right base model"],
    )
    (problem,) = json.loads(run("inspect", bench.workspace, "--base-model", base, "--json").stdout)["problems"]
    assert (problem["tensor"], problem["exit_code"]) == ("model.more.weight", 4)
    gather_checkpoint(bench.workspace, bench.out, layouts=layout_file(bench))
    refusal(run("verify", bench.out, "--base-model", base, "--json"), "ContradictionError", tensor="model.more.weight")
    refusal(run("verify", bench.out, "--layout", layout_file(bench), "--json"), "UsageError", says=["with a manifest"])


def test_layout_check_takes_shapes_of_a_base_model(bench: Bench, model: dict[str, torch.Tensor]) -> None:
    leave_tied(bench, model)
    file, base = layout_file(bench, alias=False), base_of(bench, model)
    refusal(
        run("layout", "check", file, bench.workspace, "--json"),
        "LayoutError",
        says=[f"{HEAD}: no layout is recorded", f"add its rule to {file}, or give a base model"],
    )
    ended = run("layout", "check", file, bench.workspace, "--base-model", base, "--json")
    refusal(ended, "LayoutError", says=[f"{HEAD}: no rule gives its layout"])
    assert run("layout", "check", layout_file(bench), bench.workspace).exit_code == 0
    ended = run("layout", "check", file, "--base-model", base, "--json")
    refusal(ended, "UsageError", says=["without PATH"])
