"""The files beside a model's weights: companions that are copied, and a config.json that is copied or made."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from xrank.decisions.options import GatherOptions
from xrank.decisions.own_config import override_config
from xrank.errors import AGAIN, Text, option
from xrank.stores import places
from xrank.writers.companions import CompanionFile, check_companions

_CAST_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class SmallFiles:
    """The files beside the weights, except texts that the conversion itself adds."""

    companions: tuple[CompanionFile, ...] = ()
    """Files to copy byte for byte, in the order of their names."""
    config_text: str | None = None
    """Text of a new config.json; None: no new one is made."""
    notes: tuple[tuple[str, str], ...] = ()


def small_files_of(
    companions: Iterable[CompanionFile],
    config_path: str | None,
    config: Mapping[str, Any] | None,
    options: GatherOptions,
    *,
    is_model: bool,
    place: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> SmallFiles:
    """Return the files to write beside the weights.

    Args:
        companions: the files found; the last one of a name wins.
        config_path: the config.json among them, if there is one.
        config: its content, or another known config of the model.
        options: the options of the conversion.
        is_model: whether the output is a model; an adapter alone has no config.json.
        place: the source, where the user could put a config.json.
        overrides: values to set in config.json in addition.

    Raises:
        CorruptError: a file to copy is broken; as for `check_companions`.
    """
    named = {companion.name: companion for companion in companions}
    text, notes = config_text_of(config_path, config, options, place) if is_model else (None, [])
    if is_model and overrides is not None:
        known = json.loads(text) if text is not None else config or {}
        text = _as_text(override_config(known, overrides))
        notes = [note for note in notes if note[0] != "no-config"]
    if text is not None or not is_model:
        named.pop("config.json", None)  # a new one is made, or the output is an adapter
    return SmallFiles(check_companions(named[name] for name in sorted(named)), text, tuple(notes))


def config_text_of(
    path: str | None, found: Mapping[str, Any] | None, options: GatherOptions, place: str | None = None
) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the config.json that replaces the one at `path` (None: copy that one, if any), and notes about it."""
    if found is None:
        replaced = f"{AGAIN} with {option('overwrite', True)}"
        if place is None:
            return None, [("no-config", Text(f"no config.json was found; give {option('base_model')}, and {replaced}"))]
        folder = place if places.is_folder(place) else os.path.dirname(place) or os.curdir
        told = f"no config.json was found, which from_pretrained needs; put the model's into {folder}, then {replaced}"
        return None, [("no-config", Text(told))]
    cast = _CAST_NAMES.get(options.dtype)
    if path is not None and cast is None:
        return None, []
    config = dict(found)
    notes = []
    if cast is not None:
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        if config.get(key) != cast:
            notes.append(("config-dtype", f"config.json has {key} {cast}: the tensors were cast to {options.dtype}"))
            config[key] = cast
    return _as_text(config), notes


def _as_text(config: Mapping[str, Any]) -> str:
    # The format of transformers (configuration_utils.py: to_json_string).
    return json.dumps(config, indent=2, sort_keys=True) + "\n"
