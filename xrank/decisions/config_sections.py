"""The objects in a config.json, such as text_config and vision_config, each with the kinds of tensors that it sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrank.recipes.conversion_table import is_known_size

SIZE_KEYS = (
    *("vocab_size", "hidden_size", "d_model", "n_embd", "embed_dim", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size", "expert_dim"),
    *("moe_shared_expert_intermediate_size", "type_vocab_size", "kv_lora_rank", "q_lora_rank", "intermediate_size"),
    *("ffn_dim", "n_inner", "d_ff", "encoder_layers", "num_encoder_layers", "decoder_layers", "num_decoder_layers"),
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "num_attention_heads", "n_head", "n_heads"),
    *("num_heads", "d_kv", "kv_channels", "attention_head_dim", "num_key_value_heads", "num_experts"),
    *("num_local_experts", "n_routed_experts", "moe_num_experts", "n_shared_experts", "num_shared_experts"),
    *("moe_num_shared_experts", "max_position_embeddings", "n_positions", "max_source_positions"),
    *("max_target_positions", "patch_size", "num_channels", "in_channels", "image_size", "shared_intermediate_size"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
"""Keys of sizes that count only if the model's config class knows them.

``head_dim`` counts always: many models read it although their config class does not name it. So do layers of
multi-token prediction, which transformers does not load.
"""

_Shape = tuple[int, ...]
_INDEX = re.compile(r"\.\d+(?=\.|$)")
# Modules whose names differ from those of their configs.
_MODULES = {"vision": "vis|image|vit|pixel", "audio": "audio|speech|sound", "text": "text|language|llm"}


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Tensors of one shape whose names differ in indices alone."""

    pattern: str
    """Their name, with ``*`` for each index."""
    shape: _Shape
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """An object in config.json, and the tensors that it sizes."""

    prefix: str
    """``text_config.``; empty for the outermost object."""
    values: Mapping[str, Any]
    kinds: tuple[TensorKind, ...]
    model_types: tuple[str, ...]
    """Its model_type, and those of the objects around it."""
    architecture: str = ""
    """The model's class, for the object that sizes its words."""

    def find_size(self, *keys: str) -> tuple[str, int] | None:
        """Return the first of these keys that has a positive integer, and the integer."""
        own_type = self.values.get("model_type")
        found = ((key, self.values.get(key)) for key in keys if key not in SIZE_KEYS or is_known_size(own_type, key))
        return next(((key, value) for key, value in found if type(value) is int and value > 0), None)

    def size(self, *keys: str) -> int | None:
        """Return the positive integer of the first of these keys that has one."""
        found = self.find_size(*keys)
        return None if found is None else found[1]


def group_tensors(shapes: Mapping[str, _Shape]) -> tuple[TensorKind, ...]:
    """Return the kinds of tensors of a model, in the order of their first names."""
    groups: dict[tuple[str, _Shape], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault((_INDEX.sub(".*", name), shape), []).append(name)
    return tuple(TensorKind(pattern, shape, tuple(names)) for (pattern, shape), names in groups.items())


def split_config(
    config: Mapping[str, Any], kinds: Sequence[TensorKind], prefix: str = "", outer: tuple[str, ...] = ()
) -> Iterator[Section]:
    """Yield the objects of a config.json, each with its tensors: those in modules that are named after the object.

    Args:
        config: the content of config.json, or of an object in it.
        kinds: the tensors that it sizes.
        prefix: path of the object, as in `Section`.
        outer: the model types of the objects around it.
    """
    model_type = config.get("model_type")
    types = (*outer, model_type) if isinstance(model_type, str) else outer
    inner = {key: value for key, value in config.items() if _is_section(key, value)}
    text = inner.pop("text_config", None)
    for key, values in inner.items():
        own = tuple(kind for kind in kinds if _is_within(kind, key.removesuffix("_config")))
        kinds = [kind for kind in kinds if kind not in own]
        yield from split_config(values, own, f"{prefix}{key}.", types)
    if text is not None:
        # A text model's tensors may lie in no module of their own, and its head lies outside.
        own = tuple(kind for kind in kinds if _is_within(kind, "text") or kind.pattern.startswith("lm_head."))
        text = {**text, "architectures": config.get("architectures"), "tie_word_embeddings": _is_tied(config, text)}
        yield from split_config(text, own or kinds, f"{prefix}text_config.", types)
        kinds = [kind for kind in kinds if own and kind not in own]
        config = {key: value for key, value in config.items() if key not in text}
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    yield Section(prefix, config, tuple(kinds), types, name if isinstance(name, str) else "")


def _is_section(key: str, value: object) -> bool:
    return isinstance(value, Mapping) and (key.endswith("_config") or "model_type" in value)


def _is_tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool | None:
    """Return whether a model or its text model ties the head to the embedding; None where config.json has no flag."""
    flags = [values["tie_word_embeddings"] for values in (config, text) if "tie_word_embeddings" in values]
    return True in flags if flags else None


def _is_within(kind: TensorKind, word: str) -> bool:
    """Return whether a module around tensors is named after an object of config.json."""
    expression = _MODULES.get(word, re.escape(word))
    return any(re.search(expression, module) for module in kind.pattern.split(".")[:-1])
