"""What verify and inspect compare with a base model, and that they say so where they compare nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import xrank
from tests.cli.bench import Bench
from tests.commands.adapted_models import base_model, leave_adapted
from tests.commands.made_workspaces import leave, made_model
from xrank.commands.inspect import inspect_source
from xrank.commands.verify import verify_model


def base_of(bench: Bench, model: dict[str, torch.Tensor] | None, config: Any = None) -> Path:
    folder = bench.folder / "base"
    folder.mkdir()
    if model is not None:
        save_file(model, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- what was not compared


def test_an_adapter_in_the_checkpoint(bench: Bench) -> None:
    leave_adapted(bench.workspace)
    base = base_of(bench, {**base_model(), "more.weight": torch.ones(2)})
    report = verify_model(bench.workspace, base_model=base)
    assert report.ok and report.proof["base_model"] is None
    told = f"{bench.workspace} contains an adapter: names and shapes were not compared with {base}"
    assert ("base-model", told) in report.notes


@pytest.mark.parametrize("what", ["checkpoint", "model"])
def test_a_base_model_without_weights(bench: Bench, what: str) -> None:
    model = leave(bench.workspace)
    bench.succeeds(model)
    base = base_of(bench, None, {"model_type": "toy"})
    path = bench.workspace if what == "checkpoint" else bench.out
    told = ("base-model", f"{base} contains no safetensors weights: names and shapes were not compared with it")
    report = verify_model(path, base_model=base)
    assert report.ok and report.proof["base_model"] is None
    assert told in report.notes
    if what == "checkpoint":
        assert told in inspect_source(path, base_model=base).notes
    assert told not in verify_model(path).notes


# ---- names of the base model's own that look like an adapter's


@pytest.mark.parametrize("adapters", [["vision"], ["vision", "speech"]])
def test_layers_named_as_loras_are_compared(bench: Bench, adapters: list[str]) -> None:
    """Such as Phi-4-multimodal's, whose own layers are named as PEFT's."""
    model = {"x.base_layer.weight": torch.rand(4, 4)}
    for adapter in adapters:
        model[f"x.lora_A.{adapter}.weight"] = torch.rand(2, 4)
        model[f"x.lora_B.{adapter}.weight"] = torch.rand(4, 2)
    leave(bench.workspace, model, layouts=dict.fromkeys(model, "[m/tp, n]"))
    base = base_of(bench, model)
    report = verify_model(bench.workspace, base_model=base)
    assert report.ok and report.proof["base_model"] == "names and shapes" and not report.notes
    report = inspect_source(bench.workspace, base_model=base)
    assert not report.details["problems"] and not report.notes


def test_one_of_them_has_another_shape(bench: Bench) -> None:
    model = {"x.base_layer.weight": torch.rand(4, 4), "x.lora_A.vision.weight": torch.rand(2, 4)}
    model["x.lora_B.vision.weight"] = torch.rand(4, 2)
    leave(bench.workspace, model, layouts=dict.fromkeys(model, "[m/tp, n]"))
    base = base_of(bench, {**model, "x.lora_A.vision.weight": torch.rand(2, 8)})
    report = verify_model(bench.workspace, base_model=base)
    assert report.error is not None and report.exit_code == 4
    assert report.error["message"] == "x.lora_A.vision.weight does not have its shape in the base model"
    (problem,) = inspect_source(bench.workspace, base_model=base).details["problems"]
    assert problem["message"] == report.error["message"]


# ---- what a transform made


def quantized(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if name == "up.weight":
        return {"up.packed": tensor[:, :4].float(), "up.scale": tensor[0, :1].float()}
    if name == "down.weight":
        return {name: tensor.t()}
    return {} if name == "steps" else {name: tensor}


def test_what_was_exported_with_a_transform_has_the_names_before_it(bench: Bench) -> None:
    model = made_model()
    base = base_of(bench, model)
    told = xrank.export_model(model, bench.out, transform=quantized, base_model=base)
    report = verify_model(bench.out, base_model=base)
    assert report.ok, report.error
    assert report.proof["base_model"] == told.proof["base_model"] == "names and shapes"
    assert ("base-model", "of 3 tensors that a transform made, no shape was compared") in report.notes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"more.weight": torch.ones(2)}, "more.weight is in the base model but not in the source"),
        ({"norm.weight": torch.ones(9)}, "norm.weight does not have its shape in the base model"),
    ],
)
def test_another_base_model_than_it_was_exported_with(bench: Bench, change: dict[str, torch.Tensor], says: str) -> None:
    model = made_model()
    xrank.export_model(model, bench.out, transform=quantized)
    report = verify_model(bench.out, base_model=base_of(bench, {**model, **change}))
    assert report.error is not None and report.error["message"] == says
