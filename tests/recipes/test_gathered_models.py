"""Gathers of other frameworks' names: equal tensors, equal logits, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.recipes.made_checkpoints import as_megatron, as_torchtitan, config_of, leave, stacked, tiny_llama
from xrank import gather_checkpoint
from xrank.errors import ContradictionError, UsageError


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return tiny_llama()


def assert_is(out: Path, model: torch.nn.Module) -> None:
    found = safetensors.torch.load_file(out / "model.safetensors")
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "made",
    [
        lambda model: as_megatron(model, te=True),
        lambda model: stacked(as_megatron(model, vocab=40), "decoder.layers."),
        lambda model: {**as_megatron(model), "decoder.layers.0.mlp.linear_fc1._extra_state": torch.zeros(2)},
        as_torchtitan,
    ],
    ids=["transformer-engine", "stacked", "extra-state", "torchtitan"],
)
def test_the_forms_that_a_model_has(tmp_path: Path, llama: torch.nn.Module, made: Any) -> None:
    gather_checkpoint(leave(tmp_path / "ws", made(llama), config_of(llama)), tmp_path / "out")
    assert_is(tmp_path / "out", llama)


def test_a_tied_head_need_not_be_there(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    gather_checkpoint(leave(tmp_path / "ws", as_megatron(model), config_of(model)), tmp_path / "out")
    assert_is(tmp_path / "out", model)
    untied = config_of(model, tie_word_embeddings=False)
    with pytest.raises(ContradictionError, match=r"lm_head.weight: no tensor of the source maps to it"):
        gather_checkpoint(leave(tmp_path / "ws", as_megatron(model), untied), tmp_path / "no")


def test_names_may_be_kept(tmp_path: Path, llama: torch.nn.Module) -> None:
    tensors = as_megatron(llama)
    report = gather_checkpoint(leave(tmp_path / "ws", tensors, config_of(llama)), tmp_path / "out", recipe="none")
    assert report.source["recipe"] is None
    assert safetensors.torch.load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (
            lambda t, c: (without(t, "decoder.layers.1.mlp.linear_fc2.weight"), c),
            ContradictionError,
            r"model.layers.1.mlp.down_proj.weight: no tensor of the source maps to it",
        ),
        (
            lambda t, c: (t, {**c, "num_hidden_layers": 4}),
            ContradictionError,
            "model.layers.3.input_layernorm.weight: no tensor",
        ),
        (
            lambda t, c: (t, {**c, "num_hidden_layers": 2}),
            ContradictionError,
            r"decoder.layers.2.input_layernorm.weight does not fit",
        ),
        (
            lambda t, c: (t, {**c, "intermediate_size": 21}),
            ContradictionError,
            r"decoder.layers.0.mlp.linear_fc1.weight does not fit|linear_fc2.weight does not fit",
        ),
        (lambda t, c: (t, {**c, "vocab_size": 38}), ContradictionError, "word_embeddings.weight does not fit"),
        (lambda t, c: ({**t, "decoder.layers.0.new.weight": torch.ones(2)}, c), UsageError, "no recipe fits its names"),
        (
            lambda t, c: ({k: v for k, v in t.items() if "linear_proj" not in k}, c),
            UsageError,
            r"(?m)no recipe fits its names$",
        ),
        (lambda t, c: (t, {**c, "model_type": "cohere"}), UsageError, "several recipes fit its names"),
        (
            lambda t, c: (t, {k: v for k, v in c.items() if k != "vocab_size"}),
            UsageError,
            "needs the size 'v', which is unknown",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, llama: torch.nn.Module, change: Any, kind: type[Exception], says: str
) -> None:
    tensors, config = change(as_megatron(llama), config_of(llama))
    with pytest.raises(kind, match=says):
        gather_checkpoint(leave(tmp_path / "ws", tensors, config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text('[tensors]\n"w.{L} [a b]" = "x.{L}.weight [b a]"\n[config]\na = "rows"\n')
    tensors = {f"w.{i}": torch.arange(6.0) + 10 * i for i in range(2)}
    source = leave(tmp_path / "ws", tensors, {"rows": 2})
    gather_checkpoint(source, tmp_path / "out", recipe=recipe)
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert found["x.1.weight"].tolist() == [10, 13, 11, 14, 12, 15] and len(found) == 2
    with pytest.raises(UsageError, match="no recipe is called own"):
        gather_checkpoint(source, tmp_path / "no", recipe="own")
