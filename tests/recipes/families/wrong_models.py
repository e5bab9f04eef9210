"""Generated mistakes about a family's tiny model: in config.json, in the trainer's arguments, and in the tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.recipes.families.family import Family

__all__ = ["Case", "list_mistakes"]

Shapes = dict[str, tuple[int, ...]]
_OF_ANY = {"rope_parameters", "layer_types", "layers_block_type"}
"""Keys of config.json that change, although transformers fills them in."""


@dataclass(frozen=True)
class Case:
    """A model as a source has it.

    Args:
        config: the content of config.json.
        args: Megatron's arguments.
        shapes: Megatron's name -> shape.
        mistake: the mistake, such as ``config rope_theta``.
    """

    config: Mapping[str, Any]
    args: Mapping[str, Any]
    shapes: Shapes
    mistake: str = ""


def list_mistakes(family: Family) -> Iterator[Case]:
    """Yield the family's model with one mistake each."""
    shapes = {name: tuple(shape) for name, shape in family.recorded["shapes"].items()}
    right = Case(family.full_config(), family.full_args(), shapes)
    for where, other in _change(right.config, family.config, ""):
        yield replace(right, config=other, mistake=f"config {where}")
    for key, value in right.args.items():
        for where, other in _others(value, key):
            yield replace(right, args={**right.args, key: other}, mistake=f"args {where}")
    yield from _heads(right)
    yield from _tensors(right, family.prefix)


def _change(config: Mapping[str, Any], stated: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    """Yield (the key that differs, a config with another value) for the keys that the family's options state."""
    for key in sorted(({*stated} | _OF_ANY) & {*config}):
        if key in ("text_config", "vision_config"):
            changes = _change(config[key], stated[key], f"{before}{key}.")
        elif key == "model_type" or key.endswith("_token_id") or (key not in stated and config[key] is None):
            continue
        else:
            changes = _others(config[key], f"{before}{key}")
        for where, other in changes:
            yield where, {**config, key: other}


def _others(value: object, where: str) -> Iterator[tuple[str, object]]:
    """Yield other values of the same type, with the key that changes."""
    if isinstance(value, bool):
        yield where, not value
    elif isinstance(value, int):
        yield from ((where, value + 1), (where, 2 * value))
        if value > 1:
            yield where, value - 1
    elif isinstance(value, float):
        yield where, 1.5 * value + 0.5
    elif isinstance(value, str):
        swapped = {"RMSNorm": "LayerNorm", "LayerNorm": "RMSNorm", "rope": "none", "yarn": "none"}
        swapped |= {"softmax": "sigmoid", "sigmoid": "softmax", "M*-EM*": "*M-EM*"}
        yield where, swapped.get(value, "other")
    elif isinstance(value, list) and value != value[::-1] and not isinstance(value[0], Mapping):
        where = f"{where} of mixers" if "linear_attention" in value else where
        yield from ((where, value[:-1]), (where, [value[-1], *value[1:-1], value[0]]))
    elif isinstance(value, list) and len(value) == 1:
        yield where, []
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from ((at, {**value, key: other}) for at, other in _others(inner, f"{where}.{key}"))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        yield from ((at, [other, *value[1:]]) for at, other in _others(value[0], f"{where}.0"))
    elif value is None:
        yield where, 4


def _heads(right: Case) -> Iterator[Case]:
    """Yield heads twice as many and half as wide: queries, keys and values have the same rows in all."""
    text = right.config.get("text_config", right.config)
    heads, groups, width = map(text.get, ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if heads and groups and width and width % 2 == 0:
        wrong = {**text, "num_attention_heads": 2 * heads, "num_key_value_heads": 2 * groups, "head_dim": width // 2}
        config = {**right.config, "text_config": wrong} if "text_config" in right.config else wrong
        yield replace(right, config=config, mistake="config heads of half the width")
        theirs = {"num_attention_heads": 2 * heads, "num_query_groups": 2 * groups, "kv_channels": width // 2}
        yield replace(right, args={**right.args, **theirs}, mistake="args heads of half the width")


def _tensors(right: Case, prefix: str) -> Iterator[Case]:
    """Yield models without a tensor of each kind, with a shorter one, and with one too many."""
    kinds = {re.sub(r"\d+", "0", name): name for name in right.shapes}
    for name in kinds.values():
        left = {other: shape for other, shape in right.shapes.items() if other != name}
        yield replace(right, shapes=left, mistake=f"without {name}")
        shape = right.shapes[name]
        if shape[0] % 2 == 0:
            yield replace(right, shapes={**right.shapes, name: (shape[0] // 2, *shape[1:])}, mistake=f"half of {name}")
        if len(shape) > 1 and shape[1] % 2 == 0:
            half = (shape[0], shape[1] // 2)
            yield replace(right, shapes={**right.shapes, name: half}, mistake=f"half the columns of {name}")
    numbers = (re.match(rf"{prefix}decoder\.layers\.(\d+)\.", name) for name in right.shapes)
    layers = 1 + max(int(found[1]) for found in numbers if found)
    last = f"{prefix}decoder.layers.{layers - 1}."
    yield replace(
        right,
        shapes={n: s for n, s in right.shapes.items() if not n.startswith(last)},
        mistake="without the last layer",
    )
    more = {n.replace(last, f"{prefix}decoder.layers.{layers}."): s for n, s in right.shapes.items()}
    yield replace(right, shapes={**right.shapes, **more}, mistake="a layer too many")
    yield replace(right, shapes={**right.shapes, f"{last}new.weight": (4,)}, mistake="a tensor too many")
    fewer = {n: s for n, s in right.shapes.items() if "experts.3." not in n}
    if len(fewer) < len(right.shapes):
        yield replace(right, shapes=fewer, mistake="without the last expert")
    head = f"{prefix}output_layer.weight"
    if head in right.shapes:
        left = {n: s for n, s in right.shapes.items() if n != head}
        yield replace(right, shapes=left, mistake="without the head")
    else:
        shape = right.shapes[f"{prefix}embedding.word_embeddings.weight"]
        yield replace(right, shapes={**right.shapes, head: shape}, mistake="with a head")
