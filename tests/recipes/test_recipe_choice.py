"""The recipe that a source's names are of, and the sizes that args, config and shapes tell: agreed, or refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.recipes.made_checkpoints import as_megatron, config_of, leave, saved, tiny
from xrank.errors import ContradictionError, LayoutError, UsageError
from xrank.layout.stored_model import StoredModel
from xrank.readers.base import Hints
from xrank.readers.workspace import WorkspaceReader
from xrank.recipes.recipe import Recipe, match
from xrank.recipes.recipe_choice import choose_recipe, follow_recipe
from xrank.recipes.recipe_file import (
    find_model_types,
    load_recipes_for,
    load_shipped_recipe,
    load_shipped_recipes,
    read_recipe,
)
from xrank.recipes.sizes import check_requirements

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]

# As Megatron-LM's training/arguments.py leaves them in a checkpoint.
ARGS = {
    "num_layers": 3, "hidden_size": 24, "ffn_hidden_size": 20, "num_attention_heads": 6, "kv_channels": 8,
    "group_query_attention": True, "num_query_groups": 2, "vocab_size": 37, "padded_vocab_size": 37,
    "swiglu": True,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_interleaved": False,
    "apply_layernorm_1p": False, "untie_embeddings_and_output_weights": True, "add_bias_linear": False,
}  # fmt: skip


@cache
def theirs(family: str, vocab: int = 37, **changes: Any) -> dict[str, torch.Tensor]:
    return as_megatron(tiny(family, **changes), vocab=vocab)


def stored(folder: Path, tensors: dict[str, torch.Tensor], args: dict[str, Any] | None) -> StoredModel:
    model = WorkspaceReader().read(str(leave(folder / "ws", tensors)), Hints(needs_config=False))
    return replace(model, args=args, config=None)


def named(model: StoredModel, config: dict[str, Any] | None = None) -> StoredModel:
    found = choose_recipe(model, config, None)
    assert found is not None
    return follow_recipe(model, found, config)


def shapes_of(model: StoredModel) -> dict[str, tuple[int, ...]]:
    return {shard.name: shard.shape for shard in model.shards}


@pytest.mark.parametrize(
    ("family", "changes", "args", "recipe"),
    [
        ("llama", {}, {}, "megatron-llama"),
        ("qwen3", {}, {}, "megatron-qwen3"),
        ("qwen2", {}, {"kv_channels": 4}, "megatron-qwen2"),
        ("mixtral", {}, {"num_experts": 4, "moe_ffn_hidden_size": 20}, "megatron-mixtral"),
        (
            "llama",
            {"num_key_value_heads": 6},
            {"group_query_attention": False, "num_query_groups": 1},
            "megatron-llama",
        ),
        (
            "gpt2",
            {},
            {
                "num_attention_heads": 4, "kv_channels": 6, "ffn_hidden_size": 96, "max_position_embeddings": 19,
                "group_query_attention": False, "num_query_groups": 1, "swiglu": False, "normalization": "LayerNorm",
                "position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False,
                "add_bias_linear": True,
            },
            "megatron-gpt2",
        ),
    ],
    ids=["llama", "qwen3", "qwen2", "mixtral", "no-groups", "gpt2"],
)  # fmt: skip
def test_args_alone_tell_all_sizes(
    tmp_path: Path, family: str, changes: dict[str, Any], args: dict[str, Any], recipe: str
) -> None:
    model = named(stored(tmp_path, theirs(family, **changes), {**ARGS, **args}))
    assert model.recipe == recipe
    assert shapes_of(model) == {name: tuple(t.shape) for name, t in saved(tiny(family, **changes)).items()}


@pytest.mark.parametrize(
    "args",
    [
        {key: value for key, value in ARGS.items() if key != "vocab_size"},
        {**ARGS, "vocab_size": None, "padded_vocab_size": 48},
        # Before the tokenizer's own tokens, such as NullTokenizer's end of a document, or before padding: who knows.
        {**ARGS, "padded_vocab_size": 48},
    ],
    ids=["not-said", "none", "padded"],
)
def test_a_vocabulary_that_may_not_be_the_true_one_is_not_believed(tmp_path: Path, args: dict[str, Any]) -> None:
    model = stored(tmp_path, theirs("llama", 48), args)
    with pytest.raises(UsageError, match="needs the size 'v', which is unknown") as caught:
        named(model)
    assert "base_model=" in str(caught.value.next_step)
    assert shapes_of(named(model, {"vocab_size": 37}))["lm_head.weight"] == (37, 24)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"rotary_interleaved": True}, "rotary_interleaved True"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p True"),
        ({"normalization": "LayerNorm"}, "normalization 'LayerNorm'"),
        ({"position_embedding_type": "none"}, "position_embedding_type 'none'"),
        ({"swiglu": False}, "swiglu False"),
        ({"rotary_percent": 0.5}, "rotary_percent 0.5"),
        ({"no_rope_freq": [0, 1]}, r"no_rope_freq \[0, 1\]"),
        ({"qk_l2_norm": True}, "qk_l2_norm True"),
        ({"softmax_type": "off-by-one"}, "softmax_type 'off-by-one'"),
        ({"activation_func_clamp_value": 7.0}, "activation_func_clamp_value 7.0"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset 1.0"),
    ],
)
def test_other_models_of_the_same_names_are_refused(tmp_path: Path, args: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=f"the recipe megatron-llama is not for a model of {says}"):
        named(stored(tmp_path, theirs("llama"), {**ARGS, **args}))


@pytest.mark.parametrize(
    ("family", "args"),
    [
        ("mixtral", {"moe_router_pre_softmax": True}),
        ("mixtral", {"moe_router_score_function": "sigmoid"}),
        ("qwen3_moe", {"moe_router_score_function": "sigmoid"}),
        ("qwen2_moe", {"moe_router_score_function": "sigmoid"}),
        ("glm4_moe", {"moe_router_score_function": "softmax"}),
        ("glm4_moe", {"rotary_percent": 1.0}),
        ("deepseek_v3", {"multi_latent_attention": False}),
        ("qwen3_moe", {"moe_router_topk_scaling_factor": 2.5}),
        ("gpt2", {"squared_relu": True}),
    ],
)
def test_experts_and_activations_of_other_models_are_refused(family: str, args: dict[str, Any]) -> None:
    recipe = load_shipped_recipe(f"megatron-{family.replace('_', '-')}")
    with pytest.raises(UsageError, match=f"is not for a model of {next(iter(args))}"):
        check_requirements(recipe, None, args, "folder")


def test_a_requirement_of_the_extended_recipe_is_removed() -> None:
    recipe = load_shipped_recipe("megatron-deepseek-v3")
    check_requirements(recipe, None, {"moe_router_topk_scaling_factor": 2.5}, "folder")


def test_options_that_were_not_given(tmp_path: Path) -> None:
    as_it_is = {"rotary_percent": 1.0, "qk_l2_norm": False, "softmax_type": "vanilla", "glu_linear_offset": 0.0}
    none = dict.fromkeys(("no_rope_freq", "activation_func_clamp_value", "normalization"))
    assert shapes_of(named(stored(tmp_path, theirs("llama"), {**ARGS, **as_it_is, **none})))


@pytest.mark.parametrize(
    ("key", "number", "says"),
    [
        ("ffn_hidden_size", 24, r"config\.json and the trainer's args disagree about ffn_hidden_size"),
        ("num_layers", 4, "disagree about num_layers"),
        ("kv_channels", 4, "disagree about kv_channels"),
    ],
)
def test_args_and_config_must_agree(tmp_path: Path, key: str, number: int, says: str) -> None:
    config = config_of(tiny("llama"))
    model = stored(tmp_path, theirs("llama"), {**ARGS, key: number})
    with pytest.raises(ContradictionError, match=says):
        named(model, config)
    with pytest.raises(ContradictionError, match="does not fit"):
        named(replace(model, args=ARGS), {**config, "vocab_size": 38})


def test_families_of_the_same_outcome_are_one(tmp_path: Path) -> None:
    model = stored(tmp_path, theirs("llama"), ARGS)
    fitting = [recipe.name for recipe in load_shipped_recipes() if match(recipe, theirs("llama")).fits]
    # The layers of those with experts may all be dense; GLM's arguments differ from Llama's.
    like_llama = ["gemma", "glm4-moe", "llama", "ministral3", "mistral", "nemotron-nas", "qwen2-moe"]
    assert fitting == [f"megatron-{name}" for name in like_llama]
    assert choose_recipe(model, None, None).recipe.name == "megatron-llama"
    gemma = replace(model, args={**ARGS, "apply_layernorm_1p": True, "swiglu": False})
    assert choose_recipe(gemma, None, None).recipe.name == "megatron-gemma"
    assert choose_recipe(model, {"model_type": "mistral"}, None).recipe.name == "megatron-mistral"


def test_two_that_differ_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        'extends = "megatron-llama"\n[tensors]\n"decoder.final_layernorm.weight [h]" = "model.other.weight [h]"\n'
    )
    both = (*load_shipped_recipes(), read_recipe(str(own)))
    monkeypatch.setattr("xrank.recipes.recipe_choice.load_shipped_recipes", lambda: both)
    monkeypatch.setattr("xrank.recipes.recipe_choice.load_recipes_for", lambda names, types=(): both)
    with pytest.raises(UsageError, match="several recipes fit") as caught:
        choose_recipe(stored(tmp_path, theirs("llama"), ARGS), None, None)
    assert "megatron-llama" in str(caught.value.got) and "own.toml" in str(caught.value.got)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('extends = "nothing"\n', "wrong at extends"),
        ('extends = "megatron-llama"\n[tensors]\n"no.such [h]" = false\n', "wrong at tensors"),
        ('[tensors]\n"a [h]" = { to = "b [h]", ifso = "c" }\n', r"line 2 is wrong at tensors\..*ifso"),
        ('[tensors]\n"a [h]" = { to = "b [h]", when = 3 }\n', "when"),
        ('[tensors]\n"a [h" = "b [h]"\n', "a \\[h"),
        ('must = 3\n[tensors]\n"a [h]" = "b [h]"\n', "wrong at must"),
        ("[tensors]\n", "wrong at tensors"),
        ("[tensors", "is not TOML"),
    ],
)
def test_what_is_no_recipe(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(LayoutError, match=says):
        read_recipe(str(file))


def test_each_shipped_recipe_is_found_by_each_of_its_names() -> None:
    for recipe in load_shipped_recipes():
        for side in (side for rule in recipe.rules for side in rule.sources):
            assert recipe in load_recipes_for([side.name.with_indices(*(0 for _ in side.name.dims))]), (
                recipe.name,
                str(side),
            )


def test_model_types_are_found_without_parsing() -> None:
    for recipe in load_shipped_recipes():
        assert find_model_types(recipe.name) == set(recipe.model_types)


def test_no_recipe_is_parsed_for_hugging_face_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(name: str) -> None:
        raise AssertionError(f"{name} was parsed")

    monkeypatch.setattr("xrank.recipes.recipe_file.load_shipped_recipe", parse)
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")
    assert choose_recipe(stored(tmp_path, {name: torch.zeros(2) for name in names}, None), None, None) is None


def test_only_recipes_of_the_model_type_are_parsed_where_one_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    def parse(name: str) -> Recipe:
        parsed.append(name)
        return load_shipped_recipe(name)

    monkeypatch.setattr("xrank.recipes.recipe_file.load_shipped_recipe", parse)
    model = replace(stored(tmp_path, theirs("llama"), ARGS), format="megatron-dist")
    found = choose_recipe(model, {"model_type": "mistral"}, None)
    assert found is not None and found.recipe.name == "megatron-mistral"
    assert set(parsed) == {recipe.name for recipe in load_shipped_recipes() if "mistral" in recipe.model_types}


def test_towers_with_the_names_of_both_are_no_sign_of_a_trainer(tmp_path: Path) -> None:
    """Megatron's bridges hold Hugging Face's vision towers, so their names alone show neither."""
    found = 0
    for recipe in load_shipped_recipes():
        same = {
            str(rule.sources[0].name): rule.sources[0].name
            for rule in recipe.rules
            if rule.sources[0] in rule.targets.values()
        }
        names = [
            name.with_indices(*(at for _ in name.dims)) for name in same.values() for at in range(2 if name.dims else 1)
        ]
        if len(names) > 4 and not match(recipe, names).fits:
            found += 1
            source = stored(
                tmp_path / recipe.name, {name: torch.zeros(2) for name in [*names, "language_model.own"]}, None
            )
            assert choose_recipe(source, None, None) is None, recipe.name
    assert found >= 3
