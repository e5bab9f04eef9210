"""Ties of transformers' model classes, as a generated table (``tied_weights.json``; tests/oracle/make_tied_weights.py).

A class lists which of its tensors are one with another (``_tied_weights_keys``); its config declares whether they are.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_PATH = Path(__file__).with_name("tied_weights.json")
_KEY, _TEXT = "tie_word_embeddings", "text_config"
_STATES = (None, False, True)
_UNSAVED: Mapping[str, tuple[str, ...]] = {
    "MarianMTModel": ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"),
}
"""Tensors that `save_pretrained` leaves out and `from_pretrained` computes (``_keys_to_ignore_on_save``), by class."""
_UNSHARED: Mapping[str, Mapping[str, str]] = {
    "MarianModel": {},
    "MarianMTModel": {"lm_head.weight": "model.decoder.embed_tokens.weight"},
}
"""Ties of classes that the config's ``share_encoder_decoder_embeddings`` takes the shared embedding from."""


@cache
def _read_table() -> tuple[dict[str, dict[str, Any]], dict[str, bool]]:
    """Return the kinds of classes by class name, and by model type whether a config without the key declares ties."""
    content = json.loads(_PATH.read_text())
    classes = {name: kind for kind in content["classes"] for name in kind["names"]}
    return classes, {**dict.fromkeys(content["tied"], True), **dict.fromkeys(content["untied"], False)}


def is_known_class(config: Mapping[str, Any] | None) -> bool:
    """Return whether the table has the class in config.json's ``architectures``."""
    return _kind_of(config) is not None


def list_unsaved(config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the names that `save_pretrained` leaves out for the class in config.json's ``architectures``."""
    names = (config or {}).get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return _UNSAVED.get(name, ()) if isinstance(name, str) else ()


def never_ties(config: Mapping[str, Any] | None) -> bool:
    """Return whether config.json's class ties nothing, whatever the config declares (BigBirdPegasusForCausalLM)."""
    kind = _kind_of(config)
    return kind is not None and not any(kind["ties"].values())


def _kind_of(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    names = (config or {}).get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return _read_table()[0].get(name) if isinstance(name, str) else None


def declares_ties(config: Mapping[str, Any] | None) -> bool | None:
    """Return whether config.json ties embeddings and heads as transformers reads it; None where that is not known.

    Classes differ in the default of the key, and in whether the text model's config counts too.
    """
    if config is None:
        return None
    text = config.get(_TEXT)
    inner = text if isinstance(text, Mapping) else {}
    flags = [one.get(_KEY) if isinstance(one.get(_KEY), bool) else None for one in (config, inner)]
    kind = _kind_of(config)
    if kind is not None:
        return bool(kind["declared"][3 * _STATES.index(flags[0]) + _STATES.index(flags[1])] == "T")
    if any(flag is not None for flag in flags):
        return True in flags
    return _read_table()[1].get(str(config.get("model_type")))


def find_class_ties(names: Collection[str], config: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the ties that the model's class lists and its config declares: name -> name of the tensor that it is.

    At least one name of each tie is among `names`.
    """
    kind = _kind_of(config)
    if kind is None or config is None:
        return {}
    by_place = kind["ties"]
    if config.get("share_encoder_decoder_embeddings") is False:
        own = _UNSHARED.get(config["architectures"][0])
        by_place = by_place if own is None else {"": own}
    declared = [ties for place, ties in by_place.items() if _is_declared(config, place)]
    pairs = [pair for ties in declared for pair in ties.items() if not set(pair).isdisjoint(names)]
    # A model inside a model may tie what the outer one ties in turn.
    known = dict(pairs)
    return {tied: known.get(target, target) for tied, target in pairs}


def _is_declared(config: Mapping[str, Any], place: str) -> bool:
    """Return whether the config, or the config inside it at `place`, declares ties."""
    inner = config.get(place) if place else config
    return isinstance(inner, Mapping) and declares_ties(inner) is True
