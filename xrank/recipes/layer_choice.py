"""Which layers have the blocks of a group, from config.json's keys: ``layers from first_k_dense_replace``.

A term is ``layers CONDITION and CONDITION ...``. A value is a key or a number, and layers count from 0:

    from K, before K          layers K and later; layers before K
    every N                   each N-th layer: N - 1, 2 N - 1, ...
    every N from K            K, K + N, ...
    in KEY, not in KEY        the layers that a list of numbers has, or lacks
    KEY = TEXT                the layers whose entry in a list, or whose letter in a text, is this text, or TEXT|TEXT

A term with a key that config.json lacks is unknown, as other terms are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

_BEGINNING = "layers "

_VALUE = r"([A-Za-z_][\w.]*|[0-9]{1,18})"
_CONDITION = re.compile(
    rf"(?P<range>from|before) {_VALUE}|every {_VALUE}(?: from {_VALUE})?|(?P<list>in|not in) {_VALUE}|{_VALUE} = (\S+)"
)

_Kind = Literal["from", "before", "every", "in", "not in"]
_Get: TypeAlias = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The layers of a group by one origin.

    Args:
        text: the term, with the keys.
        origin: what has the keys: config.json, or the trainer's arguments.
        conditions: kind and numbers of each condition; all must hold. For ``every`` the numbers are step and start.
    """

    text: str
    origin: str
    conditions: tuple[tuple[_Kind, tuple[int, ...]], ...]

    def __contains__(self, layer: int) -> bool:
        """Return whether the layer has blocks of the group."""
        return all(_holds(kind, numbers, layer) for kind, numbers in self.conditions)


def _holds(kind: _Kind, numbers: tuple[int, ...], layer: int) -> bool:
    match kind:
        case "from":
            return layer >= numbers[0]
        case "before":
            return layer < numbers[0]
        case "every":
            return layer >= numbers[1] and (layer - numbers[1]) % numbers[0] == 0
        case "in":
            return layer in numbers
        case "not in":
            return layer not in numbers


def is_layer_term(text: str) -> bool:
    """Return whether a term is well formed: ``layers``, then conditions."""
    return text.startswith(_BEGINNING) and all(
        _CONDITION.fullmatch(one) for one in text.removeprefix(_BEGINNING).split(" and ")
    )


def parse_layers(text: str, get: _Get, origin: str) -> LayerChoice | None:
    """Return the layers of a term; None if a key is absent or has a value of another kind.

    Args:
        text: the term.
        get: returns the value of a key, or None.
        origin: what has the keys, for errors.

    Example:
        >>> choice = parse_layers("layers every step and not in dense", {"step": 2, "dense": [3]}.get, "config.json")
        >>> [layer for layer in range(8) if layer in choice]
        [1, 5, 7]
    """
    conditions = []
    for one in text.removeprefix(_BEGINNING).split(" and "):
        found = _parse_condition(one, get)
        if found is None:
            return None
        conditions.append(found)
    return LayerChoice(text, origin, tuple(conditions))


def _parse_condition(text: str, get: _Get) -> tuple[_Kind, tuple[int, ...]] | None:
    found = _CONDITION.fullmatch(text)
    if found is None:
        return None
    _, bound, step, start, _, listed, key, entry = found.groups()
    if bound is not None:
        return _numbers("from" if found["range"] == "from" else "before", _number(bound, get))
    if step is not None:
        count = _number(step, get)
        if count is None or count < 1:
            return None
        return _numbers("every", count, count - 1 if start is None else _number(start, get))
    if listed is not None:
        layers = get(listed)
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            return None
        return ("in" if found["list"] == "in" else "not in"), tuple(layers)
    entries = get(key)
    if not isinstance(entries, list | str):
        return None
    return "in", tuple(i for i, value in enumerate(entries) if str(value) in entry.split("|"))


def _number(text: str, get: _Get) -> int | None:
    value = int(text) if text.isdecimal() else get(text)
    return value if type(value) is int else None


def _numbers(kind: _Kind, *numbers: int | None) -> tuple[_Kind, tuple[int, ...]] | None:
    whole = tuple(number for number in numbers if number is not None)
    return (kind, whole) if len(whole) == len(numbers) else None
