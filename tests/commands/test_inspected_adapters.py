"""LoRA adapters in `xrank inspect`: the choice that a gather has, and the problems that it would meet."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.cli.bench import Bench, run
from tests.commands.adapted_models import (
    ALPHA,
    ATTENTION,
    RANK,
    P,
    adapter,
    base_model,
    leave_adapted,
    saved_names,
    wrapped,
    write_json,
)
from tests.commands.made_workspaces import leave

LORA_A = f"{P}{ATTENTION}.lora_A.default.weight"


def inspected(path: Path) -> dict[str, Any]:
    ended = run("inspect", path, "--json")
    assert ended.exit_code == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


def problems_of(path: Path) -> list[tuple[str, int, str]]:
    return [(found["type"], found["exit_code"], found["message"]) for found in inspected(path)["problems"]]


def test_an_adapter_is_a_note_that_names_the_choice(bench: Bench) -> None:
    leave_adapted(bench.workspace)
    assert problems_of(bench.workspace) == []
    text = run("inspect", bench.workspace).stdout
    assert "2 LoRA pairs are written separately" in text and "--adapter merge writes one model" in text


@pytest.mark.parametrize("source", ["verl", "folder"])
def test_of_other_formats_too(tmp_path: Path, source: str) -> None:
    if source == "verl":
        torch.save(wrapped(base_model(), adapter()), tmp_path / "model_world_size_1_rank_0.pt")
    else:
        save_file(base_model(), tmp_path / "model.safetensors")
        save_file(saved_names(adapter()), tmp_path / "adapter_model.safetensors")
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA})
    report = inspected(tmp_path)
    assert report["problems"] == []
    assert "adapter-choice" in [note["code"] for note in report["notes"]]


def test_what_is_in_the_way_of_a_gather(bench: Bench) -> None:
    leave_adapted(bench.workspace)
    write_json(bench.workspace / "lora_train_meta.json", {"r": RANK + 1, "lora_alpha": ALPHA})
    ((kind, code, message),) = problems_of(bench.workspace)
    assert (kind, code) == ("ContradictionError", 4) and "does not have the rank" in message


def test_half_an_adapter_is_told_once(bench: Bench) -> None:
    lora = adapter()
    del lora[LORA_A.removeprefix(P)]
    leave_adapted(bench.workspace, None, lora)
    ((kind, code, message),) = problems_of(bench.workspace)
    assert (kind, code) == ("ContradictionError", 4) and "the other half of its pair" in message


def test_a_recipe_that_would_rename_what_is_adapted(bench: Bench) -> None:
    names = ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2"]
    base = {f"layers.0.{name}.weight": torch.rand(8, 8) for name in [*names, "feed_forward.w3"]}
    base.update({f"layers.0.{name}.weight": torch.rand(8) for name in ("attention_norm", "ffn_norm")})
    base.update({f"{name}.weight": torch.rand(16, 8) for name in ("tok_embeddings", "output")})
    base["norm.weight"] = torch.rand(8)
    lora = {"layers.0.attention.wq.lora_A.default.weight": torch.rand(RANK, 8)}
    lora["layers.0.attention.wq.lora_B.default.weight"] = torch.rand(8, RANK)
    layouts = {name: "[n]" if tensor.dim() == 1 else "[m, n]" for name, tensor in {**base, **lora}.items()}
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    leave_adapted(bench.workspace, base, lora, layouts=layouts, config=config)
    (message,) = [message for _, _, message in problems_of(bench.workspace)]
    assert "that the recipe torchtitan-llama3 would rename" in message


def test_one_beside_the_model_is_a_note_as_of_a_gather(bench: Bench) -> None:
    model = leave(bench.workspace)
    (bench.workspace / "lora_adapter").mkdir()
    save_file(saved_names(adapter()), bench.workspace / "lora_adapter/adapter_model.safetensors")
    report = inspected(bench.workspace)
    assert report["problems"] == []
    (note,) = [note for note in report["notes"] if note["code"] == "adapter-beside"]
    assert "lora_adapter/adapter_model.safetensors belongs to an adapter, and is left out" in note["message"]
    assert note in bench.succeeds(model)["notes"]


def test_no_row_is_empty(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"up.weight": torch.rand(4, 4)}, checkpoint_id=tmp_path / "step", no_dist=True)
    assert inspected(tmp_path / "step")["format"]["prefix"] == ""
    rows = run("inspect", tmp_path / "step").stdout.splitlines()
    assert not [row for row in rows if row.startswith("prefix")]
    assert "values that are not tensors  0" in rows  # zero is a number, not nothing
    assert all(len(row.split()) > 1 for row in rows if row.strip()), rows
