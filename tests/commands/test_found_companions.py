"""A checkpoint's config.json and tokenizer are found where trainers put them, by every command alike."""

from __future__ import annotations

import json
import shlex
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.cli.bench import run
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.commands.reshard import reshard_checkpoint
from xrank.errors import CorruptError, IncompleteError
from xrank.layout import DeviceMesh, LayoutMap

PART = "pytorch_model_fsdp_0"


def checkpoint(folder: Path) -> Path:
    """Save what a trainer leaves: shards in a folder of their own, config.json above them."""
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": {"w": torch.ones(4, 2)}}, checkpoint_id=str(folder / PART), no_dist=True)
    (folder / "config.json").write_text('{"model_type": "near"}')
    return folder


def notes(found: Any) -> dict[str, str]:
    return dict(found.notes)


@pytest.mark.parametrize("asked", [".", "checkpoint-2000", f"checkpoint-2000/{PART}"])
def test_by_every_command(tmp_path: Path, asked: str) -> None:
    checkpoint(tmp_path / "run" / "checkpoint-2000")
    source, out = tmp_path / "run" / asked, tmp_path / "out"
    report = gather_checkpoint(source, out)
    assert "no-config" not in notes(report) and (out / "config.json").read_text() == '{"model_type": "near"}'
    assert inspect_source(source).details["companions"] == ["config.json"]
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    layouts["w"] = "[f/tp, h]"
    reshard_checkpoint(source, layouts, tmp_path / "states")
    assert (tmp_path / "states" / "config.json").read_text() == '{"model_type": "near"}'


def test_the_nearest_counts_and_others_are_told(tmp_path: Path) -> None:
    near = checkpoint(tmp_path / "run" / "checkpoint-2000")
    (tmp_path / "run" / "config.json").write_text('{"model_type": "far"}')
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    report = gather_checkpoint(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "near"}'
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    told = f"{near / 'config.json'} was used; {tmp_path / 'run' / 'config.json'} differs from it"
    assert notes(report)["companion"] == told == notes(inspect_source(tmp_path / "run"))["companion"]
    (tmp_path / "run" / "config.json").write_text('{"model_type": "near"}')
    assert "companion" not in notes(gather_checkpoint(tmp_path / "run", tmp_path / "again"))


def test_beside_a_single_file(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    gather_checkpoint(tmp_path / "model.safetensors", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "{}"


def test_where_to_put_one_is_said(tmp_path: Path) -> None:
    """The very folder: of the source that was found, not of what the user gave."""
    folder = checkpoint(tmp_path / "run")
    (folder / "config.json").unlink()
    told = notes(gather_checkpoint(tmp_path, tmp_path / "out", format="dcp"))["no-config"]
    assert told.endswith(f"into {folder / PART}; then make the same call with overwrite=True")


@pytest.mark.parametrize("is_json", [False, True])
def test_advice_about_a_missing_config_works_as_typed(tmp_path: Path, is_json: bool) -> None:
    folder = checkpoint(tmp_path / "my run")
    config = (folder / "config.json").rename(tmp_path / "config.json")
    arguments = ["gather", folder, "--out", tmp_path / "out", *["--json"][: int(is_json)]]
    ended = run(*arguments)
    assert ended.exit_code == 0
    if is_json:
        (told,) = [note["message"] for note in json.loads(ended.stdout)["notes"] if note["code"] == "no-config"]
    else:
        (wrote,) = [line for line in ended.stdout.splitlines() if line.startswith("wrote")]
        assert wrote.endswith("; no config.json: see the note")
        (told,) = [line for line in ended.stdout.splitlines() if "no config.json was found" in line]
    place = told.partition("put it into ")[2].partition("; then run: ")[0]
    shutil.copy(config, place)
    command = shlex.split(told.partition("; then run: ")[2])
    assert command == ["xrank", *map(str, arguments), "--overwrite"]
    assert run(*command[1:]).exit_code == 0
    assert (tmp_path / "out" / "config.json").read_bytes() == config.read_bytes()
    (Path(place) / "config.json").unlink()
    ended = run(*command[1:])  # whose note repeats it
    assert ended.exit_code == 0 and ended.stdout.count("--overwrite") == 1


def test_a_size_that_nothing_says_names_the_folder(tmp_path: Path) -> None:
    """Megatron's queries, keys and values in one: how they are divided, no shape says."""
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    others = {
        "embedding.word_embeddings.weight": (8, 4),
        "decoder.layers.0.input_layernorm.weight": (4,),
        "decoder.layers.0.pre_mlp_layernorm.weight": (4,),
        "decoder.layers.0.self_attention.linear_proj.weight": (4, 4),
        "decoder.layers.0.mlp.linear_fc1.weight": (12, 4),
        "decoder.layers.0.mlp.linear_fc2.weight": (4, 6),
        "decoder.final_layernorm.weight": (4,),
        "output_layer.weight": (8, 4),
    }
    save_file({name: torch.ones(shape) for name, shape in {qkv: (12, 4), **others}.items()}, tmp_path / "w.safetensors")
    ended = run("gather", tmp_path, "--out", tmp_path / "out", "--recipe", "megatron-llama", "--json")
    assert ended.exit_code == 2, ended.stderr
    assert f"config.json into {tmp_path}, or" in json.loads(ended.stdout)["error"]["try"]


def test_a_link_to_nothing_is_shown_as_a_problem(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint-2000")
    (source / "tokenizer.json").symlink_to("blobs/gone")
    says = f"{source / 'tokenizer.json'} is a broken link"
    (problem,) = inspect_source(source).details["problems"]
    assert (problem["type"], problem["message"], problem["exit_code"]) == ("IncompleteError", says, 3)
    with pytest.raises(IncompleteError, match=r"is a broken link"):
        gather_checkpoint(source, tmp_path / "out")


def test_companions_are_shown_where_the_reader_finds_a_problem(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint-2000")
    next((source / PART).glob("*.distcp")).unlink()
    details = inspect_source(source).details
    assert details["problems"] and details["companions"] == ["config.json"]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("of_base", [False, True], ids=["of the source", "of the base model"])
def test_a_companion_that_was_cut_short_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, of_base: bool
) -> None:
    source, base = checkpoint(tmp_path / "run"), tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "near"}')
    path = (base if of_base else source) / name
    path.write_text('{"model_max_length": 4096, "padding_s')
    (base / "more.json").write_text("{")  # unknown to transformers, so that xrank does not judge it
    arguments = [str(source), "--out", str(tmp_path / "out"), "--base-model", str(base)]
    ended = run("gather", *arguments)
    assert ended.exit_code == 4 and not (tmp_path / "out").exists()
    assert ended.stderr.startswith(f"xrank: CorruptError: {path} is not a whole JSON object\n")
    (problem,) = inspect_source(source, base_model=base).details["problems"]
    assert (problem["exit_code"], problem["file"]) == (4, str(path))
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    layouts["w"] = "[f/tp, h]"
    with pytest.raises(CorruptError, match="is not a whole JSON object"):
        reshard_checkpoint(source, layouts, tmp_path / "states", base_model=base)
    path.write_text('{"model_max_length": 4096}')
    assert gather_checkpoint(source, tmp_path / "out", base_model=base).ok


def test_an_own_companion_hides_a_broken_one_of_the_base_model(tmp_path: Path) -> None:
    source, base = checkpoint(tmp_path / "run"), tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "tokenizer_config.json").write_text("{")
    (source / "tokenizer_config.json").write_text("{}")
    assert gather_checkpoint(source, tmp_path / "out", base_model=base).ok
