"""Models of all of transformers' families, made of their configs: small ones, and ones whose config was changed."""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto

from tests.oracle.small_configs import tailor

__all__ = [
    "build",
    "build_small",
    "change",
    "find_classes",
    "find_flags",
    "find_sizes",
    "list_classes",
    "parse_config",
    "read_config",
    "read_defaults",
    "read_shapes",
    "shrink",
]

Path = tuple[str, ...]
_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "depth"), 2),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim"), 64),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim", "n_inner"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "image_size": 32,
    "patch_size": 8,
}
"""Small sizes, each of which families name in their own way."""


def list_classes() -> list[tuple[str, str]]:
    """Return each model type with its classes that generate or classify, or its first class."""
    mappings = [name for name in vars(modeling_auto) if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")]
    found = []
    for model_type in sorted(CONFIG_MAPPING.keys()):
        names: list[str] = []
        for mapping in mappings:
            entry = getattr(modeling_auto, mapping).get(model_type, ())
            names += [entry] if isinstance(entry, str) else list(entry)
        names = list(dict.fromkeys(names))
        heads = [n for n in names if n.endswith(("ForCausalLM", "ForConditionalGeneration", "SequenceClassification"))]
        found += [(model_type, name) for name in heads or names[:1]]
    return found


def find_classes() -> list[tuple[str, str]]:
    """Return each model type with all its classes that auto classes know."""
    found: dict[tuple[str, str], None] = {}
    for mapping, table in vars(modeling_auto).items():
        if mapping.startswith("MODEL_") and mapping.endswith("_MAPPING_NAMES"):
            for model_type, entry in table.items():
                names = [entry] if isinstance(entry, str) else list(entry)
                found.update(dict.fromkeys((model_type, name) for name in names))
    return sorted(each for each in found if each[0] in CONFIG_MAPPING)


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the body after so much time of the processor: a class of large sizes is left out."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    # Not the clock's time: on a busy machine other classes would be left out than on a quiet one.
    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def build(model_type: str, name: str, values: dict[str, Any] | None, device: str) -> Any:
    """Make a model of a config's values; return None where the class does not take them, or lacks a package."""
    try:
        with _time_limit(20), torch.device(device):
            known = model_type in CONFIG_MAPPING
            kind = CONFIG_MAPPING[model_type] if known else getattr(transformers, name).config_class
            config = kind() if values is None else kind.from_dict(copy.deepcopy(values))
            return getattr(transformers, name)(config)
    except Exception:  # a class that does not take the sizes
        return None


def build_small(model_type: str, name: str, values: dict[str, Any]) -> Any:
    """Make a small model on the meta device: with small sizes, or else of few layers; None where neither is taken."""
    small = shrink(values)
    few = shrink(values, {key: size for key, size in _SIZES.items() if "layer" in key or key == "depth"})
    tries = (tailor(model_type, name, values, small), small, few)
    models = (build(model_type, name, each, "meta") for each in tries)
    return next((model for model in models if model is not None), None)


def shrink(values: dict[str, Any], sizes: Mapping[str, int] = _SIZES) -> dict[str, Any]:
    """Return a config's values with small sizes."""
    small = copy.deepcopy(values)
    for key, value in values.items():
        if isinstance(value, dict):
            small[key] = shrink(value, sizes)
        elif key in sizes and isinstance(value, int) and not isinstance(value, bool) and value > 1:
            same = key == "num_key_value_heads" and value == values.get("num_attention_heads")
            small[key] = 4 if same else sizes[key]
        elif key in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            small[key] = value[:2]
    return small


def read_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a model saves, under the names that they have in files."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {key: value for key, value in model.state_dict().items() if key not in tied}
    with suppress(Exception):  # no conversion on the meta device: the names in memory are as good
        state = revert_weight_conversion(model, state)
    return {key: tuple(value.shape) for key, value in state.items()}


def find_sizes(values: dict[str, Any], outer: Path = ()) -> Iterator[tuple[Path, int]]:
    """Yield the positive integers of a config with their paths; ids of words are not sizes."""
    for key, value in values.items():
        if isinstance(value, dict) and (key.endswith("_config") or "model_type" in value):
            yield from find_sizes(value, (*outer, key))
        elif type(value) is int and value > 0 and not key.endswith(("_id", "_index", "_idx", "_ids")):
            yield (*outer, key), value


_UNNAMED = {"head_dim": 16, "num_key_value_heads": 1, "n_inner": 40}
"""Sizes that model classes read although their config classes do not name them."""


def find_flags(values: dict[str, Any], outer: Path = ()) -> Iterator[tuple[Path, object]]:
    """Yield the flags of a config, each with its other value, and the sizes that it leaves open, each with a size."""
    for key, value in values.items():
        if isinstance(value, dict) and (key.endswith("_config") or "model_type" in value):
            yield from find_flags(value, (*outer, key))
        elif isinstance(value, bool):
            yield (*outer, key), not value
        elif value is None:
            yield (*outer, key), _UNNAMED.get(key, 24)
    yield from (((*outer, key), size) for key, size in _UNNAMED.items() if key not in values)


def change(values: dict[str, Any], path: Path, value: object) -> dict[str, Any]:
    """Return a copy of a config with another value at a path."""
    changed = copy.deepcopy(values)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def read_config(model: Any, name: str) -> dict[str, Any]:
    """Return config.json as the model would save it."""
    model.config.architectures = [name]
    return parse_config(model.config.to_json_string())


def read_defaults(config_class: Any) -> dict[str, Any]:
    """Return the values of a config class; its type alone where it needs arguments."""
    try:
        return parse_config(config_class().to_json_string())
    except Exception:
        return {"model_type": config_class.model_type}


def parse_config(text: str) -> dict[str, Any]:
    """Return the values of a config's text, in which transformers writes infinity as a dict."""
    values: dict[str, Any] = json.loads(text, object_hook=lambda each: float(each.get("__float__", 0)) or each)
    return values
