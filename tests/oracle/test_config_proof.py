"""No right config.json of a transformers family is refused: all its model types, small enough to save or on meta."""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto

from xrank.conversion.gather import gather_checkpoint
from xrank.decisions.config_proof import find_misfit
from xrank.errors import ContradictionError, XrankError

NUM_PARTS = 8
PARTS = [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, NUM_PARTS))]
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
_MAX_ELEMENTS = 4_000_000


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


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the body: a class of large sizes is left out."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def build(model_type: str, name: str, values: dict[str, Any] | None, device: str) -> Any:
    """Make a model of a config's values; return None where the class does not take them, or lacks a package."""
    try:
        with time_limit(60), torch.device(device):
            kind = CONFIG_MAPPING[model_type]
            config = kind() if values is None else kind.from_dict(values)
            return getattr(transformers, name)(config)
    except Exception:  # a class that does not take the sizes
        return None


def shrink(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config's values with small sizes."""
    small = copy.deepcopy(values)
    for key, value in values.items():
        if isinstance(value, dict):
            small[key] = shrink(value)
        elif key in _SIZES and isinstance(value, int) and not isinstance(value, bool) and value > 1:
            same = key == "num_key_value_heads" and value == values.get("num_attention_heads")
            small[key] = 4 if same else _SIZES[key]
        elif key in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            small[key] = value[:2]
    return small


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.timeout(1200)
def test_default_sizes_of_all_families(part: int) -> None:
    refused, num_checked = [], 0
    for model_type, name in list_classes()[part::NUM_PARTS]:
        model = build(model_type, name, None, "meta")
        if model is None:
            continue
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        state = {key: value for key, value in model.state_dict().items() if key not in tied}
        with suppress(Exception):  # no conversion on the meta device: the names in memory are as good
            state = revert_weight_conversion(model, state)
        model.config.architectures = [name]
        shapes = {key: tuple(value.shape) for key, value in state.items()}
        misfit = find_misfit(json.loads(model.config.to_json_string()), shapes)
        num_checked += 1
        if misfit is not None:
            refused.append((name, misfit[1]))
    assert not refused and num_checked > 30


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.timeout(1200)
def test_saved_folders_of_small_models(part: int, tmp_path: Path) -> None:
    """Gather what `save_pretrained` writes, then the same with another number of layers."""
    refused, unseen, num_saved, num_seen = [], [], 0, 0
    for number, (model_type, name) in enumerate(list_classes()[part::NUM_PARTS]):
        default = build(model_type, name, None, "meta")
        values = None if default is None else shrink(json.loads(default.config.to_json_string()))
        tiny = None if values is None else build(model_type, name, values, "meta")
        if tiny is None or sum(parameter.numel() for parameter in tiny.parameters()) > _MAX_ELEMENTS:
            continue
        model, folder = build(model_type, name, values, "cpu"), tmp_path / f"{number}"
        try:
            model.save_pretrained(folder)
        except Exception:  # a class that cannot save itself
            continue
        num_saved += 1
        try:
            assert gather_checkpoint(folder, tmp_path / f"{number}-out").ok
        except XrankError as error:
            refused.append((name, error.message, error.got, error.want))
            continue
        config = json.loads((folder / "config.json").read_text())
        if config.get("num_hidden_layers") == 2:
            (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
            num_seen += 1
            try:
                gather_checkpoint(folder, tmp_path / f"{number}-wrong")
            except ContradictionError:
                continue
            unseen.append(name)
    assert not refused and num_saved > 10
    assert len(unseen) <= num_seen / 10, unseen  # families whose lists of layers have other names
