"""``xrank recipe``: what it lists, prints and checks; how it refuses, with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.bench import Bench, refusal, run
from tests.recipes.made_checkpoints import as_megatron, config_of, leave, saved, tiny
from xrank.recipes.recipe_file import (
    find_useless,
    list_shipped_recipes,
    load_shipped_recipe,
    read_recipe,
    read_shipped_text,
)

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]

OWN = """framework = "own"

[config]
h = "hidden_size"

[tensors]
"embed.weight [v, h]" = "model.embed_tokens.weight [v, h]"
"blocks.{L}.qkv.weight [<q: d | k: d | v: d>, h]".to.q = "model.layers.{L}.self_attn.q_proj.weight [d, h]"
"blocks.{L}.qkv.weight [<q: d | k: d | v: d>, h]".to.k = "model.layers.{L}.self_attn.k_proj.weight [d, h]"
"blocks.{L}.qkv.weight [<q: d | k: d | v: d>, h]".to.v = "model.layers.{L}.self_attn.v_proj.weight [d, h]"
"norm.weight [h]" = { to = "model.norm.weight [h]" }
"""
SHAPES = {"embed.weight": (10, 4), "blocks.0.qkv.weight": (12, 4), "blocks.1.qkv.weight": (12, 4), "norm.weight": (4,)}


def source(bench: Bench, **changes: tuple[int, ...]) -> Path:
    """Leave a model of these shapes under training names."""
    folder = bench.folder / "src"
    folder.mkdir()
    shapes = {**SHAPES, **{name.replace("__", "."): shape for name, shape in changes.items()}}
    save_file({name: torch.rand(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def recipe(bench: Bench, text: str = OWN) -> Path:
    file = bench.folder / "own.toml"
    file.write_text(text)
    return file


def check(*arguments: object) -> dict[str, Any]:
    """Check a recipe, see it refused, and return the report."""
    ended = run("recipe", "check", *arguments, "--json")
    refusal(ended, "LayoutError", says=["does not fit"])
    return json.loads(ended.stdout)


def test_list_and_show() -> None:
    report = json.loads(run("recipe", "list", "--json").stdout)
    assert [row["name"] for row in report["recipes"]] == [*list_shipped_recipes()]
    assert "  torchtitan, llama, 16 rules\n" in run("recipe", "list").stdout
    shown = run("recipe", "show", "megatron-qwen2")
    assert (shown.exit_code, shown.stdout) == (0, read_shipped_text("megatron-qwen2"))
    refusal(run("recipe", "show", "own", "--json"), "UsageError", says=["is called own", "run: xrank recipe list"])


@pytest.mark.parametrize("name", list_shipped_recipes())
def test_a_merged_recipe_is_the_recipe(bench: Bench, name: str) -> None:
    shown = run("recipe", "show", name, "--merged").stdout
    assert "extends" not in shown
    read, shipped = read_recipe(str(recipe(bench, shown))), load_shipped_recipe(name)
    assert read.rules == shipped.rules
    for key in ("framework", "model_types", "padded", "ignored", "dropped", "keep_fp32", "must", "must_config"):
        assert getattr(read, key) == getattr(shipped, key)
    useless = find_useless(shipped)
    for key in ("config", "args", "sizes"):
        kept = {name: value for name, value in getattr(shipped, key).items() if (key, name) not in useless}
        assert getattr(read, key) == kept


def test_a_recipe_that_fits(bench: Bench) -> None:
    ended = run("recipe", "check", recipe(bench), source(bench))
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert "fits    4 of 4 tensors\nsizes   L = 2, v = 10, h = 4, d = 4\n" in ended.stdout
    rows = run("recipe", "check", recipe(bench), bench.folder / "src", "--tensors").stdout
    assert "tensor  embed.weight [10, 4]  embed.weight [v, h] -> model.embed_tokens.weight [v, h]\n" in rows
    assert run("recipe", "check", recipe(bench), bench.folder / "src", "-q").stdout == f"{bench.folder}/own.toml\n"


@pytest.mark.parametrize("is_reversed", [False, True])
def test_shipped_recipes_fit_both_ways(bench: Bench, is_reversed: bool) -> None:
    model = tiny("llama")
    if is_reversed:
        model.save_pretrained(bench.folder / "src")
    else:
        leave(bench.folder / "src", as_megatron(model, vocab=37), config_of(model))
    ended = run("recipe", "check", "megatron-llama", bench.folder / "src", "--json")
    report = json.loads(ended.stdout)
    assert (ended.exit_code, report["is_reversed"], report["wrong_rules"]) == (0, is_reversed, [])
    assert all(row["fits"] for row in report["tensors"])


def test_the_base_model_must_be_what_the_recipe_makes(bench: Bench) -> None:
    model = tiny("llama")
    folder = leave(bench.folder / "src", as_megatron(model, vocab=37), config_of(model))
    base = bench.folder / "base"
    model.save_pretrained(base)
    assert run("recipe", "check", "megatron-llama", folder, "--base-model", base).exit_code == 0
    save_file({"other" if name == "model.norm.weight" else name: t for name, t in saved(model).items()},
              base / "model.safetensors")  # fmt: skip
    ended = run("recipe", "check", "megatron-llama", folder, "--base-model", base, "--json")
    refusal(ended, "LayoutError", says=["other is in the base model"])


def test_a_wrong_rule_is_named_with_its_line(bench: Bench) -> None:
    file = recipe(bench, OWN.replace('"norm.weight [h]" =', '"norm.weight [h, h]" ='))
    report = check(file, source(bench))
    [wrong] = report["wrong_rules"]
    assert (wrong["place"], wrong["got"], wrong["want"]) == (f"{file}, line 11", "shape [4]", "2 dims")
    assert f"correct the rule in {file}, line 11" in report["error"]["try"]
    assert [row["name"] for row in report["tensors"] if not row["fits"]] == ["norm.weight"]


@pytest.mark.parametrize("order", [1, -1])
def test_one_wrong_rule_does_not_blame_the_others(bench: Bench, order: int) -> None:
    rules = [
        '"norm.weight [h]" = "n [h]"',
        '"embed.weight [v, h]" = "e [v, h]"',
        '"blocks.{L}.qkv.weight [h, d]" = "b.{L} [h, d]"',
    ]
    report = check(recipe(bench, "[tensors]\n" + "\n".join(rules[::order]) + "\n"), source(bench))
    assert [row["rule"] for row in report["wrong_rules"]] == ["blocks.{L}.qkv.weight [h, d]"]


def test_sides_with_other_elements_are_a_wrong_rule(bench: Bench) -> None:
    file = recipe(bench, OWN.replace("k_proj.weight [d, h]", "k_proj.weight [d, k]").replace("[sizes]", ""))
    [wrong] = check(file, source(bench))["wrong_rules"]
    assert wrong["place"].endswith("own.toml, line 8") and "'k'" in wrong["message"]


def test_parts_on_both_sides_are_written_once(bench: Bench) -> None:
    """A fused tensor in another order: one target that has all parts of the source."""
    head, _, _ = OWN.partition('"blocks.{L}.qkv')
    rule = '"blocks.{L}.qkv.weight [<q: d | k: d | v: d>, h]" = "model.layers.{L}.qkv [h, <v: d | q: d | k: d>]"\n'
    file = recipe(bench, head + rule + '"norm.weight [h]" = "model.norm.weight [h]"\n')
    folder = source(bench)
    assert run("gather", folder, "--recipe", file, "--out", bench.out).exit_code == 0
    made, fused = load_file(bench.out / "model.safetensors"), load_file(folder / "model.safetensors")
    q, k, v = fused["blocks.1.qkv.weight"].chunk(3)
    assert torch.equal(made["model.layers.1.qkv"], torch.cat([v, q, k]).T)


def test_unknown_names_have_the_nearest_rule(bench: Bench) -> None:
    file = recipe(bench, OWN.replace("blocks.{L}.qkv.weight", "blocks.{L}.qkvs.weight"))
    folder = source(bench)
    ended = run("recipe", "check", file, folder)
    near = "the nearest rule is blocks.{L}.qkvs.weight [<q: d | k: d | v: d>, h]"
    assert f"unknown  blocks.0.qkv.weight and 1 more alike; {near}\n" in ended.stdout
    assert "missing  model.layers.{L}.self_attn.q_proj.weight [d, h]\n" in ended.stdout
    assert ended.exit_code == 2 and "  got   2 unknown names, 3 missing targets\n" in ended.stderr
    report = check(file, folder)
    assert (report["unknown"][0]["count"], len(report["missing"])) == (2, 3)
    # A gather with it points to this command.
    ended = run("gather", folder, "--recipe", file, "--out", bench.out, "--json")
    refusal(ended, "UsageError", says=[f"run: xrank recipe check {file} {folder}"])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('framework = "own"', "framework = own", "line 1"),
        ('framework = "own"', 'frame = "own"', ", line 1 is wrong at frame"),
        ('h = "hidden_size"', "h = 3", ", line 4 is wrong at config.h"),
        ("[config]", "[sizes]\ntwo = 0\n[config]", ", line 4 is wrong at sizes.two"),
        ("[config]", 'ignored = ["("]\n[config]', ", line 3 is wrong at ignored"),
        ('{ to = "model.norm.weight [h]" }', '{ to = "n [h]", times = "h" }', ", line 11 is wrong at tensors."),
        ('{ to = "model.norm.weight [h]" }', '{ to = "n [h]", times = "sqrt(d)" }', ", line 11 is wrong at tensors."),
        ('{ to = "model.norm.weight [h]" }', '{ to = "n [h]", when = 3 }', ", line 11 is wrong at tensors."),
        ('{ to = "model.norm.weight [h]" }', '{ tu = "n [h]" }', ", line 11 is wrong at tensors."),
        ('"norm.weight [h]"', '"norm.weight [h"', ", line 11: tensors."),
        ('{ to = "model.norm.weight [h]" }', '"n [h/tp]"', ", line 11: tensors."),
        ('"norm.weight [h]"', '"norm.weight [h + L]"', "a sum stands in parentheses"),
        ('"norm.weight [h]"', '"norm.weight [<a: h | b: h>]"', ", line 11 is wrong at tensors."),
    ],
)
def test_errors_in_a_recipe_name_file_and_line(bench: Bench, old: str, new: str, says: str) -> None:
    assert old in OWN
    file, folder = recipe(bench, OWN.replace(old, new)), source(bench)
    for words in (["recipe", "check", file, folder], ["gather", folder, "--recipe", file, "--out", bench.out]):
        refusal(run(*words, "--json"), "LayoutError", file="own.toml", says=[str(file), says])


def test_a_gather_names_the_line_of_a_wrong_rule(bench: Bench) -> None:
    file, folder = recipe(bench, OWN.replace("k_proj.weight [d, h]", "k_proj.weight [d, k]")), source(bench)
    ended = run("gather", folder, "--recipe", file, "--out", bench.out, "--json")
    refusal(ended, "LayoutError", file="own.toml", says=[f"correct the rule in {file}, line 8"])


@pytest.mark.parametrize("kind", ["optional = true", 'when = "sparse"'])
def test_a_size_of_absent_tensors_need_not_be_known(bench: Bench, kind: str) -> None:
    more = f'"blocks.{{L}}.experts.{{e}}.w [h]" = {{ to = "model.layers.{{L}}.experts.{{e}}.w [h]", {kind} }}\n'
    flag = "[config]" if "optional" in kind else '[config]\nsparse = "sparse"'
    assert run("recipe", "check", recipe(bench, OWN.replace("[config]", flag) + more), source(bench)).exit_code == 0
    # config.json has the flag, so the tensors are due, although their number is not known.
    (bench.folder / "src" / "config.json").write_text('{"sparse": true, "hidden_size": 4}')
    text = OWN.replace("[config]", flag) + more
    ended = run("recipe", "check", recipe(bench, text), bench.folder / "src", "--json")
    if "when" in kind:
        refusal(ended, "LayoutError", says=["model.layers.0.experts.0.w: no tensor of the source maps to it"])
    else:
        assert ended.exit_code == 0


def test_a_misfit_of_a_shipped_recipe(bench: Bench) -> None:
    report = check("megatron-llama", source(bench))
    assert 'write one that begins with extends = "megatron-llama"' in report["error"]["try"]


def test_neither_a_name_nor_a_file(bench: Bench) -> None:
    ended = run("recipe", "check", "own", source(bench), "--json")
    refusal(ended, "UsageError", says=["no recipe is called own", "a path"])
