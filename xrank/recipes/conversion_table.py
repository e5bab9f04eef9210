"""transformers' own conversions, as data: which names and forms tensors have in files, and which in memory.

``transformers.json`` beside this module is generated from an installed transformers by
``tests/oracle/make_conversion_table.py``. A conversion of a model is a sequence of transforms; each renames tensors or
rearranges them (`xrank.recipes.conversion_names`, `xrank.recipes.tensor_operations`), and has one side for loading and
one for saving, as transformers itself reverses it (transformers/core_model_loading.py: reverse_transform).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from xrank.errors import LayoutError, option

_PATH = Path(__file__).parent / "transformers.json"


@dataclass(frozen=True, slots=True)
class Operation:
    """A rearrangement of tensors; `xrank.recipes.tensor_operations` carries it out."""

    kind: str
    """Name of transformers' class."""
    arguments: tuple[tuple[str, Any], ...]
    """Arguments that differ from the class' defaults."""


@dataclass(frozen=True, slots=True)
class Side:
    """One direction of a transform."""

    patterns: tuple[str, ...]
    """Regular expressions of names; ``*.`` stands for an index and all before it."""
    targets: tuple[str, ...]
    """Text that replaces a match; ``\\1`` stands for the text of the pattern's group."""
    operations: tuple[Operation, ...] = ()
    offset: int = 0
    """Number to add to an index that the group matches."""


@dataclass(frozen=True, slots=True)
class Transform:
    """One entry of transformers' table, for a model or for a model inside it."""

    kind: str
    """``rename``, ``prefix``, ``convert``, ``offset``, or ``group``: renamings that count only after the first one."""
    load: Side
    save: Side
    scope: str | None = None
    """Path of the inner model without `prefix`; None: all names."""
    prefix: str = ""
    """The outer model's ``base_model_prefix``."""

    @property
    def is_converter(self) -> bool:
        """Whether the transform rearranges tensors."""
        return self.kind == "convert"


def find_transforms(config: Mapping[str, Any]) -> tuple[Transform, ...]:
    """Return the transforms of a model, in the order of loading; none for a model that has the same names in files.

    The order and the scopes are those of transformers/conversion_mapping.py: get_model_conversion_mapping.

    Args:
        config: the content of config.json.

    Raises:
        LayoutError: the table lacks the models inside this class.
    """
    table = _read_table()
    root = _find_class(config)
    if root in table["unmade"]:
        raise LayoutError(
            f"the conversion of {root} is not in xrank's table, since transformers {table['transformers']} cannot make "
            "such a model",
            got=f"{root} in config.json",
            want="a class whose names in files and in memory are known",
            next_step=f"keep the names as they are with {option('recipe', 'none')}",
        )
    prefix = table["models"][root][0] if root in table["models"] else ""
    claimed: dict[str, list[str]] = defaultdict(list)
    found: list[Transform] = []
    for path, name, model_type in _walk(root, config, ""):
        if _is_inside(path, claimed[name]):
            continue
        numbers, is_own = table["mappings"].get(name), True
        if numbers is None:
            if _is_inside(path, claimed[model_type]):
                continue
            numbers, is_own = table["mappings"].get(model_type), False
        if numbers is None:
            continue
        scope = path.removeprefix(prefix).removeprefix(".") if path else None
        found += (replace(_transforms()[number], scope=scope, prefix=prefix) for number in numbers)
        claimed[name].append(path)
        if not is_own:
            claimed[model_type].append(path)
    return tuple(found)


def find_num_heads(config: Mapping[str, Any], key: str | None) -> int:
    """Return the number of attention heads in a config, or in the one inside it under `key`."""
    inner = config.get(key) if key is not None else None
    config = inner if isinstance(inner, Mapping) else config
    name, default = _read_table()["heads"].get(config.get("model_type"), ("num_attention_heads", 1))
    return int(config.get(name, config.get("num_attention_heads", default)))


def is_known_size(model_type: object, key: str) -> bool:
    """Return whether a model type's config has a size under that key; for unknown types each key counts.

    Config files also contain keys that no model reads, such as ``num_key_value_heads`` for GPT-NeoX.
    """
    known = _read_table()["sizes"].get(model_type) if isinstance(model_type, str) else None
    return known is None or key in known


def is_known_type(model_type: object) -> bool:
    """Return whether transformers has this model type."""
    return isinstance(model_type, str) and model_type in _read_table()["sizes"]


def _is_inside(path: str, outer: list[str]) -> bool:
    return any(seen == "" or path.startswith(seen + ".") for seen in outer)


def _find_class(config: Mapping[str, Any]) -> str:
    """Return the model's class; "" if the config names none that transformers has."""
    table = _read_table()
    architectures = config.get("architectures")
    name = str(architectures[0]).removeprefix("FSDP") if isinstance(architectures, list) and architectures else ""
    if name in table["models"] or name in table["mappings"] or "auto_map" in config:
        return name
    model_type = config.get("model_type")
    return next((kinds[model_type] for kinds in reversed(table["auto"].values()) if model_type in kinds), name)


def _walk(name: str, config: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, str]]:
    """Yield (path, class, model type) of a model and of all models in it, outer ones first."""
    table = _read_table()
    _, known_type, parts = table["models"].get(name, ("", "", ()))
    yield path, name, str(config.get("model_type") or known_type)
    for inner_path, inner, key, kind in parts:
        inner_known = table["models"].get(inner, ("", "", ()))[1]
        inner_config = config if key == "" else config.get(key)
        if not isinstance(inner_config, Mapping):
            inner_config = {}
        model_type = inner_config.get("model_type")
        if kind is not None and model_type not in (None, inner_known):
            inner = table["auto"][kind].get(model_type, "")
        elif model_type is None:
            inner_config = {**inner_config, "model_type": inner_known}
        yield from _walk(inner, inner_config, f"{path}.{inner_path}" if path else inner_path)


@lru_cache(maxsize=1)
def _read_table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(_PATH.read_text(encoding="utf-8"))
    return table


@lru_cache(maxsize=1)
def _transforms() -> tuple[Transform, ...]:
    return tuple(
        Transform(each["kind"], _parse_side(each["load"]), _parse_side(each["save"]))
        for each in _read_table()["transforms"]
    )


def _parse_side(side: Mapping[str, Any]) -> Side:
    operations = tuple(
        Operation(each["op"], tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in each.items() if k != "op"))
        for each in side.get("operations", ())
    )
    return Side(tuple(side["from"]), tuple(side["to"]), operations, side.get("offset", 0))
