"""What errors of live conversions name is what Python's callers can give."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import xrank
from xrank.decisions.live_arguments import notes_in_python
from xrank.errors import XrankError

KNOWN = set(inspect.signature(xrank.export_model).parameters)
PACKAGES = ("conversion/choices", "conversion/making", "conversion/plans")
PACKAGES += ("gather", "plan", "recipes", "writers")
# What no export comes to say: it asks for nothing of the kind, or says something else in its place.
UNSAID = {
    "--replicas", "--include", "--exclude", "--keep-fp32", "xrank inspect --tensors lists the names",
    "--keep-fp32 was given and nothing is cast", "--keep-fp32 {}",
    "say with --dtype what the other tensors are cast to, or leave --keep-fp32 out",
    "--adapter-config was given and --adapter was not", "--adapter-config {}", "--workers takes no number below 1",
    "name the right base model; a gather can leave tensors out by name with --exclude",
    "find out why the ranks diverged; --replicas pick takes the lowest rank's and lists the differences",
    "{}: left by an earlier run, cleared away as asked (--no-resume)",
    "only what xrank gathered has one; give --against to compare with another copy",
}  # fmt: skip


def words(text: str) -> set[str]:
    return set(re.findall(r"\b([a-z_0-9]+)=", text))


def texts(path: Path) -> Iterator[str]:
    """Yield what a module may say, {} for what is put in, and not its docstrings."""
    tree = ast.parse(path.read_text())
    within: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            within.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            within.update(id(value) for value in node.values)
            yield "".join(str(value.value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in within:
            yield node.value


def test_options_become_arguments_that_there_are() -> None:
    root = Path(xrank.__file__).parent
    said = {text for package in PACKAGES for path in (root / package).rglob("*.py") for text in texts(path)}
    said = {text for text in said if re.search(r"--[a-z]", text)}
    assert len(said) > 50 and said >= UNSAID
    told = {text: notes_in_python([("", text)])[0][1] for text in said - UNSAID}
    assert {text: told[text] for text in told if words(told[text]) - KNOWN} == {}
    assert {text for text in told.values() if "--" in text.replace("--ckpt-format torch_dist", "")} == set()


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
        "gather what holds it too, or leave base_model= out",
    ),
    "what it has not": (
        {**W, "z": ONE, "q": torch.zeros(3)},
        {"base_model": "base"},
        "name the right base model, or leave the tensor out of what is given",
    ),
    "a name that is kept": (
        {"__metadata__": ONE},
        {},
        "leave it out of what is given, or let the ranks write it under another name",
    ),
    "a value too large": ({"w": ONE * 1e6}, {"dtype": "fp16"}, 'use dtype="bf16" or dtype="keep"'),
    "nothing": ({}, {}, "give a model with tensors"),
    "nothing left": (W, {"transform": lambda name, tensor: {}}, "let transform= keep one"),
    "little memory": (W, {"max_memory": "1KB"}, "give a larger max_memory= (64MB is the default)"),
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
