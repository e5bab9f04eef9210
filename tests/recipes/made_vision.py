"""Tiny vision-language models of transformers', under the names of Megatron's models, turned by plain torch code."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch

from tests.recipes.made_checkpoints import as_grouped, config_of, megatron_state, saved, stacked, tiny_of
from tests.recipes.made_towers import Tensors, gemma_tower, internvl_tower, qwen_tower, rename

_TEXT = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 37, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_HALF_TEXT = {**{key: value for key, value in _TEXT.items() if key != "head_dim"}, "hidden_size": 48}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 20, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
_ROUTED = {
    "n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 12, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip
_TOWER = {"depth": 2, "hidden_size": 16, "intermediate_size": 12, "num_heads": 2, "patch_size": 2}
_QWEN3_TOWER = {**_TOWER, "out_hidden_size": 24, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 9}
_GLM_TOWER = {**_TOWER, "out_hidden_size": 24, "image_size": 8}
_LAYERED = {
    "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 2,
}  # fmt: skip

VISION_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"text_config": {**_TEXT, **_SECTIONS}, "vision_config": _QWEN3_TOWER},
    "qwen3_vl_moe": {"text_config": {**_TEXT, **_SECTIONS, **_EXPERTS}, "vision_config": _QWEN3_TOWER},
    "qwen2_5_vl": {"text_config": {**_HALF_TEXT, **_SECTIONS}, "vision_config": {**_TOWER, "out_hidden_size": 48}},
    "glm4v": {
        "text_config": {**_HALF_TEXT, **_SECTIONS},
        "vision_config": {**_GLM_TOWER, "out_hidden_size": 48},
    },
    "glm4v_moe": {"text_config": {**_TEXT, **_SECTIONS, **_ROUTED, "head_dim": 16}, "vision_config": _GLM_TOWER},
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "ministral3"},
        "vision_config": {**_LAYERED, "model_type": "pixtral"},
    },
    "internvl": {
        "text_config": {**_HALF_TEXT, "model_type": "qwen2"},
        "vision_config": {**_LAYERED, "attention_bias": True, "image_size": [8, 8], "patch_size": [2, 2]},
    },
    "gemma3": {
        "text_config": _TEXT, "vision_config": {**_LAYERED, "vision_use_head": False}, "mm_tokens_per_image": 4,
    },
}  # fmt: skip
_RECIPES = {"internvl-chat": "internvl", "qwen3-vl-moe-hub": "qwen3_vl_moe", "gemma3-vl": "gemma3"}
"""Recipe -> family, where one does not follow from the other."""
VISION_RECIPES = {*_RECIPES, *(family.replace("_", "-") for family in VISION_FAMILIES if family != "gemma3")}
VISION_EXPERTS = ("qwen3_vl_moe", "glm4v_moe")
MEGATRON_TOWERS = ("qwen2_5_vl", "internvl", "gemma3")
"""Families for which mbridge makes a vision tower of Megatron's layers."""

_INNER = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
_KEPT = {
    "qwen3_vl": {"model.visual.": "vision_model."},
    "qwen3_vl_moe": {"model.visual.": "vision_model."},
    "qwen2_5_vl": {"visual.": "visual."},
    "glm4v": {"model.visual.": "vision_model."},
    "glm4v_moe": {"model.visual.": "visual."},
    "mistral3": {"vision_tower.": "vision_tower.", "multi_modal_projector.": "multi_modal_projector."},
    "gemma3": {"vision_tower.": "vision_tower.", "multi_modal_projector.": "multi_modal_projector."},
}


def tiny_vision(family: str, *, is_headed: bool = False, **changes: Any) -> torch.nn.Module:
    """Return a tiny vision-language model with values of a seed of its own.

    Args:
        family: its model type.
        is_headed: whether Siglip's tower has its pooling head.
        changes: other values of its text_config.
    """
    # transformers fills in the dicts of a config in place, and families share some.
    options = {**copy.deepcopy(VISION_FAMILIES[family]), "tie_word_embeddings": False}
    options["text_config"] = {**options["text_config"], **copy.deepcopy(changes)}
    if is_headed:
        options["vision_config"]["vision_use_head"] = True
    model = tiny_of(family, options)
    for name, tensor in model.named_parameters():
        if name.endswith(("cls_token", "position_embeddings")):
            tensor.data.normal_()
    return model


def as_megatron_vision(model: torch.nn.Module, *, is_kept: bool = True, **options: Any) -> dict[str, torch.Tensor]:
    """Return a model's tensors under the names of Megatron-Bridge's or mbridge's model.

    Args:
        model: of any family.
        is_kept: whether the tower is Hugging Face's own module, where a family has both.
        options: as for `as_megatron`.
    """
    family, state = model.config.model_type, saved(model)
    text = _split_fused(rename(state, _INNER))
    if family == "gemma3":
        text, behind = _gemma_norms(text)
    language = megatron_state(model.config.text_config, text, **options)
    for name, tensor in text.items():  # GLM's norms behind attention and block
        if name.endswith(("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")):
            language[name.replace("model.", "decoder.", 1)] = tensor
    if family == "gemma3":
        language |= behind
    made = {f"language_model.{name}": tensor for name, tensor in language.items()}
    if family == "internvl":
        return made | internvl_tower(state, model.config.vision_config)
    if not is_kept and family == "qwen2_5_vl":
        return made | qwen_tower(state, model.config.vision_config)
    tower = {name: tensor for name, tensor in state.items() if name.startswith(tuple(_KEPT[family]))}
    tower = rename(tower, _KEPT[family])
    if family == "gemma3":
        tower["multi_modal_projector.proj.weight"] = tower.pop("multi_modal_projector.mm_input_projection_weight").T
        tower["multi_modal_projector.mm_soft_embed_norm.weight"] = tower.pop(
            "multi_modal_projector.mm_soft_emb_norm.weight"
        )
    if not is_kept and family == "gemma3":
        return gemma_tower(made | tower, model.config.vision_config)
    return made | tower


def _gemma_norms(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors with the norms before blocks as other families name them, and those behind as Bridge does."""
    kept, behind = {}, {}
    names = {
        "post_attention_layernorm": "self_attention.linear_proj.post_layernorm",
        "post_feedforward_layernorm": "mlp.linear_fc2.post_layernorm",
    }
    for name, tensor in state.items():
        own = next((own for own in names if own in name), None)
        if own is not None:
            behind[name.replace("model.", "decoder.", 1).replace(own, names[own])] = tensor
        else:
            kept[name.replace("pre_feedforward_layernorm", "post_attention_layernorm")] = tensor
    return kept, behind


def _split_fused(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with gate and up projections, and the experts of a layer, as tensors of their own."""
    made = {}
    for name, tensor in state.items():
        if name.endswith("mlp.gate_up_proj.weight"):
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                made[name.replace("gate_up", part)] = half
        elif name.endswith("mlp.experts.gate_up_proj"):
            for expert, matrix in enumerate(tensor):
                for part, half in zip(("gate", "up"), matrix.chunk(2), strict=True):
                    made[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = half
        elif name.endswith("mlp.experts.down_proj"):
            for expert, matrix in enumerate(tensor):
                made[name.replace("down_proj", f"{expert}.down_proj.weight")] = matrix
        else:
            made[name] = tensor
    return made


def vision_forms(name: str) -> Iterator[tuple[dict[str, Any], Tensors, Tensors]]:
    """Yield config.json, Hugging Face's tensors and Megatron's for each of the forms that a recipe knows.

    Args:
        name: the recipe's, without ``megatron-``.
    """
    family = _RECIPES.get(name, name.replace("-", "_"))
    # The language models of these have other biases, too.
    changes = {"attention_bias": True} if family in ("qwen3_vl", "qwen3_vl_moe", "glm4v_moe") else {}
    model = tiny_vision(family, **changes)
    config, expected = config_of(model), saved(model)
    if family == "mistral3":
        expected |= {f"multi_modal_projector.linear_{n}.bias": torch.randn(24) for n in (1, 2)}
        config["multimodal_projector_bias"] = True
    if family == "gemma3":
        headed = tiny_vision(family, is_headed=True)
        for place in ("vision_tower.", "vision_tower.vision_model."):
            theirs = rename(as_megatron_vision(headed), {"vision_tower.": place})
            yield config_of(headed), saved(headed), theirs
    for theirs in _forms(model):
        if family == "mistral3":
            theirs |= {key: tensor for key, tensor in expected.items() if "projector" in key and "bias" in key}
        if name == "internvl-chat":
            yield _chat_config(config), _as_chat(expected), theirs
        elif name == "qwen3-vl-moe-hub":
            turned = {key: t.transpose(1, 2) if ".experts." in key else t for key, t in expected.items()}
            yield config, {key: tensor.contiguous() for key, tensor in turned.items()}, theirs
        else:
            yield config, expected, theirs


def _forms(model: torch.nn.Module) -> Iterator[Tensors]:
    family = model.config.model_type
    yield as_megatron_vision(model)
    yield as_megatron_vision(model, te=True)
    yield split_gated(as_megatron_vision(model, is_kept=False))
    if family == "qwen2_5_vl":
        yield as_megatron_vision(model, is_kept=False)
    if family == "gemma3":
        made = as_megatron_vision(model, is_kept=False)
        norms = ("mm_input_projection.layer_norm_", "mm_soft_emb_norm.")
        yield {name.replace(*norms): tensor for name, tensor in made.items()}
        yield rename(as_megatron_vision(model), {"vision_tower.": "vision_tower.vision_model."})
    if family == "glm4v":
        made = as_megatron_vision(model)
        yield {re.sub("^vision_model", "visual", name): tensor for name, tensor in made.items()}
    if family == "glm4v_moe":
        made = as_megatron_vision(model)
        yield {re.sub("^visual", "vision_model", name): tensor for name, tensor in made.items()}
    if family in VISION_EXPERTS:
        named = as_megatron_vision(model, experts="experts.{}.linear_fc{}.weight")
        yield as_megatron_vision(model, experts="linear_fc{1}.weight{0}", te=True)
        yield {name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"): t for name, t in named.items()}
        yield split_gated(named)
        yield as_grouped(stacked(named, "mlp.experts.experts."))


def split_gated(tensors: Tensors) -> Tensors:
    """Return gated projections, and their biases, as `as_singletons` has them."""
    made = {}
    for name, tensor in tensors.items():
        down = tensors.get(re.sub(r"linear_fc1\.(weight|bias)$", "linear_fc2.weight", name))
        is_gated = ".decoder." in f".{name}" and re.search(r"linear_fc1\.(weight|bias)$", name)
        if is_gated and down is not None and "local_experts" not in name and len(tensor) == 2 * down.shape[1]:
            made[f"{name}_w"], made[f"{name}_v"] = tensor.chunk(2)
        else:
            made[name] = tensor
    return made


def _chat_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of InternVL's own code."""
    vision = {**config["vision_config"], "image_size": 8, "patch_size": 2, "qkv_bias": True}
    return {"model_type": "internvl_chat", "llm_config": config["text_config"], "vision_config": vision}


def _as_chat(state: Tensors) -> Tensors:
    """Return InternVL's tensors as in its own code's files."""
    names = {
        "vision_tower.embeddings.cls_token": "vision_model.embeddings.class_embedding",
        "vision_tower.embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
        "vision_tower.embeddings.patch_embeddings.projection.": "vision_model.embeddings.patch_embedding.",
        "vision_tower.encoder.layer.": "vision_model.encoder.layers.", "multi_modal_projector.layer_norm.": "mlp1.0.",
        "multi_modal_projector.linear_1.": "mlp1.1.", "multi_modal_projector.linear_2.": "mlp1.3.",
    }  # fmt: skip
    inner = {
        ".layernorm_before.": ".norm1.", ".layernorm_after.": ".norm2.", ".lambda_": ".ls",
        ".attention.projection_layer.": ".attn.proj.",
    }  # fmt: skip
    made: Tensors = {}
    for name, tensor in rename(state, names).items():
        for ours, theirs in inner.items():
            name = name.replace(ours, theirs)
        if ".attention.q_proj." in name and name.startswith("vision_model."):
            old = name.replace("vision_model.encoder.layers.", "vision_tower.encoder.layer.")
            parts = [state[old.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            made[name.replace(".attention.q_proj.", ".attn.qkv.")] = torch.cat(parts)
        elif not re.match(r"vision_model\..*\.attention\.[kv]_proj\.", name):
            made[name] = tensor
    return made
