"""Every family of models, from Megatron-core's names to a folder that transformers loads: tensors and logits equal."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.cli.bench import run as run_command
from tests.readers.made_megatron import Run, write_dist, write_legacy
from tests.recipes.made_checkpoints import (
    EXPERT_FORMS,
    FAMILIES,
    MIXED,
    as_megatron,
    expert_forms,
    leave,
    saved,
    stacked,
    tiny,
)
from tests.recipes.made_checkpoints import config_of as config_of_model
from xrank import gather_checkpoint
from xrank.errors import ContradictionError, UsageError

pytestmark = pytest.mark.timeout(120)


@cache
def model_of(family: str, **changes: Any) -> torch.nn.Module:
    return tiny(family, **changes)


@cache
def saved_of(family: str, **changes: Any) -> dict[str, torch.Tensor]:
    return saved(model_of(family, **changes))


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return config_of_model(model_of(family, **changes))


def megatron(family: str, *, changes: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    return as_megatron(model_of(family, **(changes or {})), **options)


def gathered(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None, **options: Any
) -> dict[str, torch.Tensor]:
    gather_checkpoint(leave(folder / "ws", tensors, config), folder / "out", **options)
    return safetensors.torch.load_file(folder / "out" / "model.safetensors")


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_transformers_loads(tmp_path: Path, family: str) -> None:
    import transformers

    model, tensors = model_of(family), megatron(family, vocab=48)
    report = gather_checkpoint(leave(tmp_path / "ws", tensors, config_of(family)), tmp_path / "out")
    assert report.source["recipe"] == f"megatron-{family.replace('_', '-')}"
    assert ("padding-cut", "embedding.word_embeddings.weight: 11 rows of padding cut") in report.notes
    manifest = json.loads((tmp_path / "out" / "xrank_manifest.json").read_text())
    (table,) = [name for name in manifest["tensors"] if name.endswith(("embed_tokens.weight", "wte.weight"))]
    assert report.output is not None
    assert report.output["padding_dropped"][table] == manifest["padding_dropped"][table] == 11
    assert_equal(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), saved_of(family))
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformer_engines_names_and_layers_in_one_tensor(tmp_path: Path, family: str) -> None:
    tensors = megatron(family, te=True)
    if family not in MIXED:  # of layers that differ there is no one tensor
        tensors = stacked(tensors, "decoder.layers.")
    assert_equal(gathered(tmp_path, tensors, config_of(family)), saved_of(family))


@pytest.mark.parametrize("family", ["mixtral", *MIXED])
@pytest.mark.parametrize("form", EXPERT_FORMS)
def test_the_forms_of_experts(tmp_path: Path, family: str, form: str) -> None:
    tensors = expert_forms(model_of(family))[form]
    assert_equal(gathered(tmp_path, tensors, config_of(family)), saved_of(family))


def test_experts_behind_layers_in_one_tensor(tmp_path: Path) -> None:
    tensors = stacked(expert_forms(model_of("mixtral"))["stacked"], "decoder.layers.")
    assert tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape == (3, 4, 40, 24)
    assert_equal(gathered(tmp_path, tensors, config_of("mixtral")), saved_of("mixtral"))


def test_experts_in_every_layer(tmp_path: Path) -> None:
    whole = {"mlp_only_layers": ()}
    tensors = stacked(megatron("qwen3_moe", changes=whole, te=True), "decoder.layers.")
    assert_equal(gathered(tmp_path, tensors, config_of("qwen3_moe", **whole)), saved_of("qwen3_moe", **whole))


ARGS = {
    "num_hidden_layers": "num_layers", "hidden_size": "hidden_size", "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads", "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels", "moe_intermediate_size": "moe_ffn_hidden_size", "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_head_dim", "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim", "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}  # fmt: skip


@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize("write", [write_legacy, write_dist])
def test_checkpoints_of_many_ranks(tmp_path: Path, family: str, write: Any) -> None:
    changes = {"num_hidden_layers": 4}
    config = config_of(family, **changes)
    args = {its: config[ours] for ours, its in ARGS.items() if ours in config}
    args |= {"group_query_attention": True, "padded_vocab_size": 40, "vocab_size": 37}
    if family.startswith("deepseek"):
        args |= {"kv_channels": 4, "multi_latent_attention": True}
    if family == "qwen2_moe":
        args |= {"kv_channels": 4, "add_qkv_bias": True}
    if family == "glm4_moe":
        args |= {"qk_layernorm": True, "rotary_percent": 0.5}
    run = Run(tp=2, pp=2, ep=2, chunks=((1, 1), (1, 1)), has_experts=True, args=args)
    write(tmp_path / "ckpt", run, megatron(family, changes=changes, vocab=40))
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(config))
    ended = run_command("gather", tmp_path / "ckpt", "--out", tmp_path / "out")
    assert ended.exit_code == 0, ended.stderr
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert_equal(found, saved_of(family, **changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 6}),
        ("llama", {"num_key_value_heads": 1}),
        ("qwen3", {"attention_bias": True}),
        ("qwen2_moe", {"qkv_bias": False}),
        ("glm4_moe", {"attention_bias": True}),
        ("glm4_moe", {"use_qk_norm": False}),
        ("glm4_moe", {"first_k_dense_replace": 0}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gpt2", {"n_inner": 44}),
        ("gpt2", {"tie_word_embeddings": False}),
    ],
)
def test_variants(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    tensors = megatron(family, changes=changes, vocab=40)
    if changes == {"tie_word_embeddings": False}:
        tensors["output_layer.weight"] = saved_of(family, **changes)["lm_head.weight"]
    assert_equal(gathered(tmp_path, tensors, config_of(family, **changes)), saved_of(family, **changes))


def without(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    found = {name: tensor for name, tensor in tensors.items() if part not in name}
    assert len(found) < len(tensors)
    return found


_ALL_BIASES = {"attention_bias": True, "mlp_bias": True}
_TWO_DENSE = {"mlp_only_layers": (0, 1)}


@pytest.mark.parametrize(
    ("made", "config", "kind", "says"),
    [
        # Biases that transformers would drop without a word, or miss.
        (
            lambda: megatron("llama", changes=_ALL_BIASES),
            lambda: config_of("llama"),
            ContradictionError,
            "bias belongs to models with (attention|mlp)_bias, but this model is not one of them",
        ),
        (
            lambda: megatron("llama"),
            lambda: config_of("llama", attention_bias=True),
            ContradictionError,
            "model.layers.0.self_attn.q_proj.bias: no tensor of the source maps to it",
        ),
        (
            lambda: megatron("llama", changes=_ALL_BIASES),
            lambda: config_of("mistral"),
            UsageError,
            "several recipes fit its names",
        ),
        (lambda: megatron("qwen2"), lambda: config_of("llama"), UsageError, "several recipes fit"),
        (lambda: megatron("llama"), lambda: config_of("qwen2"), UsageError, "several recipes fit"),
        (lambda: megatron("qwen3"), lambda: config_of("qwen2"), UsageError, "several recipes fit"),
        (
            lambda: without(megatron("qwen2"), "1.self_attention.linear_qkv.bias"),
            lambda: config_of("qwen2"),
            ContradictionError,
            "model.layers.1.self_attn.q_proj.bias: no tensor",
        ),
        (
            lambda: without(megatron("qwen3"), "k_layernorm"),
            lambda: config_of("qwen3"),
            UsageError,
            "no recipe fits its names",
        ),
        (
            lambda: without(megatron("mixtral"), "2.mlp.experts.local_experts.3.linear_fc2"),
            lambda: config_of("mixtral"),
            ContradictionError,
            "model.layers.2.block_sparse_moe.experts.3.w2.weight: no tensor",
        ),
        (
            lambda: without(megatron("mixtral"), "experts.local_experts.3."),
            lambda: config_of("mixtral"),
            ContradictionError,
            "experts.3.w1.weight: no tensor|router.weight does not fit",
        ),
        (
            lambda: without(megatron("qwen3_moe", changes=_TWO_DENSE), "layers.1.mlp.linear_fc1"),
            lambda: config_of("qwen3_moe", **_TWO_DENSE),
            ContradictionError,
            "model.layers.1.mlp.gate_proj.weight: no tensor",
        ),
        (
            lambda: {
                **megatron("qwen3_moe"),
                "decoder.layers.0.mlp.linear_fc2.weight": torch.ones(24, 20),
            },
            lambda: config_of("qwen3_moe"),
            ContradictionError,
            "layer 0 has tensors of dense and experts blocks",
        ),
        (
            lambda: without(megatron("qwen2_moe"), "2.mlp.shared_experts.gate_weight"),
            lambda: config_of("qwen2_moe"),
            ContradictionError,
            "model.layers.2.mlp.shared_expert_gate.weight: no tensor",
        ),
        (
            lambda: megatron("qwen2_moe"),
            lambda: config_of("qwen2_moe", qkv_bias=False),
            ContradictionError,
            "bias belongs to models with qkv_bias",
        ),
        (
            lambda: megatron("qwen2_moe"),
            lambda: config_of("qwen2_moe", mlp_only_layers=()),
            ContradictionError,
            "is of the group dense, which layer 1 lacks by config.json",
        ),
        (
            lambda: megatron("deepseek_v3"),
            lambda: config_of("deepseek_v3", first_k_dense_replace=2),
            ContradictionError,
            "is of the group experts, which layer 1 lacks by config.json",
        ),
        (lambda: megatron("qwen2_moe"), lambda: config_of("qwen3_moe"), UsageError, "several recipes fit"),
        (lambda: megatron("deepseek_v3"), lambda: config_of("glm4_moe"), UsageError, "several recipes fit"),
        (lambda: megatron("deepseek_v3"), lambda: config_of("deepseek_v2"), UsageError, "several recipes fit"),
        (lambda: megatron("deepseek_v2"), lambda: config_of("deepseek_v3"), UsageError, "several recipes fit"),
        (
            lambda: without(megatron("deepseek_v3"), "2.mlp.router.expert_bias"),
            lambda: config_of("deepseek_v3"),
            ContradictionError,
            "model.layers.2.mlp.gate.e_score_correction_bias: no tensor",
        ),
        (
            lambda: without(megatron("deepseek_v3"), "1.self_attention.kv_layernorm"),
            lambda: config_of("deepseek_v3"),
            ContradictionError,
            "model.layers.1.self_attn.kv_a_layernorm.weight: no tensor",
        ),
        (
            lambda: megatron("deepseek_v3"),
            lambda: {**config_of("deepseek_v3"), "num_attention_heads": 5},
            ContradictionError,
            "does not fit",
        ),
        (
            lambda: megatron("deepseek_v3"),
            lambda: {**config_of("deepseek_v3"), "qk_rope_head_dim": 6, "qk_nope_head_dim": 4},
            ContradictionError,
            "does not fit",
        ),
        (
            lambda: megatron("glm4_moe"),
            lambda: config_of("glm4_moe", use_qk_norm=False),
            ContradictionError,
            "layernorm.weight belongs to models with qk_norm",
        ),
        (
            lambda: {**megatron("mixtral"), "decoder.layers.0.mlp.router.expert_bias": torch.ones(4)},
            lambda: config_of("mixtral"),
            UsageError,
            "no recipe fits its names",
        ),
        (
            lambda: without(megatron("gpt2"), "position_embeddings"),
            lambda: config_of("gpt2"),
            UsageError,
            "no recipe fits its names",
        ),
        (
            lambda: without(megatron("gpt2"), "layers.2.mlp.linear_fc1.bias"),
            lambda: config_of("gpt2"),
            ContradictionError,
            "transformer.h.2.mlp.c_fc.bias: no tensor",
        ),
        (
            lambda: megatron("gpt2"),
            lambda: {**config_of("gpt2"), "n_head": 5},
            (ContradictionError, UsageError),
            "does not fit|needs the size",
        ),
    ],
    ids=[
        "biases-that-config-denies",
        "biases-missing",
        "biases-of-no-mistral",
        "qwen2-as-llama",
        "llama-as-qwen2",
        "qwen3-as-qwen2",
        "one-bias-missing",
        "no-k-norm",
        "one-expert-matrix-missing",
        "an-expert-missing",
        "dense-block-cut",
        "two-kinds-of-blocks",
        "one-shared-gate-missing",
        "biases-that-qwen2-moe-denies",
        "experts-where-config-denies-them",
        "dense-where-config-denies-it",
        "qwen2-moe-as-qwen3-moe",
        "deepseek-as-glm",
        "deepseek-v3-as-v2",
        "deepseek-v2-as-v3",
        "one-router-bias-missing",
        "one-norm-of-latents-missing",
        "latent-heads-of-another-model",
        "another-part-of-heads-is-turned",
        "norms-that-glm-denies",
        "router-bias",
        "no-positions",
        "one-gpt2-bias-missing",
        "heads-of-another-model",
    ],
)
def test_wrong_variants_are_refused(tmp_path: Path, made: Any, config: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        gathered(tmp_path, made(), config())
    assert not (tmp_path / "out").exists()
