"""What errors of live conversions name is what Python's callers can give."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import xrank
from xrank.errors import XrankError

KNOWN = set(inspect.signature(xrank.export_model).parameters)


def words(text: str) -> set[str]:
    return set(re.findall(r"\b([a-z_0-9]+)=", text))


class Adapted(torch.nn.Module):
    """A PeftModel's state and configuration, without PEFT."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.active_adapter, self.peft_config, self._config = "default", {"default": self}, config
        for name, shape in {"base_layer": (4, 3), "lora_A": (2, 3), "lora_B": (4, 2)}.items():
            module = torch.nn.Module()
            module.weight = torch.nn.Parameter(torch.ones(shape))
            inner = module if name == "base_layer" else torch.nn.ModuleDict({"default": module})
            if not hasattr(self, "q"):
                self.q = torch.nn.Module()
            self.q.add_module(name, inner)

    def get_base_model(self) -> torch.nn.Module:
        return torch.nn.Module()

    def to_dict(self) -> dict[str, Any]:
        return {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **self._config}


W, ONE = {"w": torch.ones(2)}, torch.ones(1)
MERGE = {"adapter": "merge"}
ASKED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "what the base model has": (
        {"w": ONE},
        {"base_model": "base"},
        "give the right base model, or give a source that has it too, or leave base_model= out",
    ),
    "what it has not": (
        {**W, "z": ONE, "q": torch.zeros(3)},
        {"base_model": "base"},
        "give the right base model, or omit the tensor",
    ),
    "a name that is kept": (
        {"__metadata__": ONE},
        {},
        "let the ranks write it under a different name, or omit it",
    ),
    "a value too large": ({"w": ONE * 1e6}, {"dtype": "fp16"}, 'use dtype="bf16", or use dtype="keep"'),
    "nothing": ({}, {}, "give a model with tensors"),
    "nothing left": (W, {"transform": lambda name, tensor: {}}, "let transform= keep one"),
    "little memory": (W, {"max_memory": "1KB"}, "give a larger max_memory=; 64MB is the default"),
    "no adapter": (W, MERGE, "leave adapter= out"),
    "another rank": (Adapted(r=3), MERGE, "give a PeftModel with the configuration that its adapter was trained with"),
    "no DoRA": (
        Adapted(use_dora=True),
        MERGE,
        "give a PeftModel with the configuration that its adapter was trained with",
    ),
    "no rank": (Adapted(r=None), MERGE, "correct the configuration of the PeftModel's active adapter"),
    "another kind": (
        Adapted(peft_type="ADALORA"),
        MERGE,
        "correct the configuration of the PeftModel's active adapter",
    ),
}


@pytest.mark.parametrize("what", ASKED)
def test_what_to_do_can_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    save_file({**W, "z": ONE}, "base/model.safetensors")
    model, options, next_step = ASKED[what]
    with pytest.raises(XrankError) as raised:
        xrank.export_model(model, "out", **options)
    error = raised.value
    assert error.next_step == next_step
    assert words(" ".join([error.message, error.got or "", error.want or "", next_step])) <= KNOWN
