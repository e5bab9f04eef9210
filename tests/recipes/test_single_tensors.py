"""A model that lacks a tensor that all models of its type have once."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.errors import IncompleteError
from xrank.recipes.config_proof import find_absent

CONFIG: dict[str, Any] = {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 20,
    "tie_word_embeddings": False,
}
NORM = "model.norm.weight"


def make_shapes() -> dict[str, tuple[int, ...]]:
    layer = {
        "input_layernorm.weight": (8,),
        "post_attention_layernorm.weight": (8,),
        "self_attn.qkv_proj.weight": (16, 8),
        "self_attn.o_proj.weight": (8, 8),
        "mlp.gate_up_proj.weight": (24, 8),
        "mlp.down_proj.weight": (8, 12),
    }
    layers = {f"model.layers.{number}.{name}": shape for number in range(2) for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (20, 8), NORM: (8,), "lm_head.weight": (20, 8), **layers}


def without(*names: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in make_shapes().items() if name not in names}


def test_an_absent_tensor_is_named() -> None:
    assert find_absent(make_shapes(), CONFIG) is None
    assert find_absent(without(NORM), CONFIG) == "norm.weight"
    assert find_absent(without("model.embed_tokens.weight", "lm_head.weight"), CONFIG) == "embed_tokens.weight"
    # Either name of a tied pair will do, and files may leave the outer modules out.
    assert find_absent(without("lm_head.weight"), CONFIG) is None
    assert find_absent(without("model.embed_tokens.weight"), CONFIG) is None
    bare = {name.removeprefix("model."): shape for name, shape in without("lm_head.weight").items()}
    assert find_absent(bare, {**CONFIG, "architectures": ["Phi3Model"]}) is None


@pytest.mark.parametrize(
    "changes", [{"model_type": "mine"}, {"architectures": ["Phi3ForCausalLMEagle3"]}, {"model_type": None}]
)
def test_models_of_unknown_classes_may_lack_it(changes: dict[str, Any]) -> None:
    assert find_absent(without(NORM), {**CONFIG, **changes}) is None


def test_a_tensor_of_another_name_may_be_it() -> None:
    """transformers renames those of older files when it loads them, such as LayerNorm.gamma."""
    assert find_absent({**without(NORM), "model.final_norm.gamma": (8,)}, CONFIG) is None
    assert find_absent({**without(NORM), "model.other.weight": (8, 8)}, CONFIG) == "norm.weight"


def test_a_gather_without_the_final_norm_is_refused(tmp_path: Path) -> None:
    tensors = {name: torch.rand(shape) for name, shape in make_shapes().items()}
    warnings.simplefilter("ignore")
    dcp.save({"model": {n: t for n, t in tensors.items() if n != NORM}}, checkpoint_id=tmp_path / "run", no_dist=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(IncompleteError, match=r"norm\.weight: no file holds any of it") as raised:
        gather_checkpoint(tmp_path / "run", tmp_path / "out")
    assert raised.value.want == "the tensor that each phi3 of transformers has"
    (problem,) = inspect_source(tmp_path / "run").details["problems"]
    assert problem["exit_code"] == 3 and not (tmp_path / "out").exists()
    # The advice, followed.
    dcp.save({"model": tensors}, checkpoint_id=tmp_path / "run", no_dist=True)
    assert gather_checkpoint(tmp_path / "run", tmp_path / "out").ok
