"""Terms over the keys of config.json or of the trainer's arguments: sizes, flags, and the layers of a group."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from operator import add, mul, sub
from typing import Any, Literal, TypeAlias

from msgspec import Struct

_BEGINNING = "layers "

_VALUE = r"([A-Za-z_][\w.]*|[0-9]{1,18})"

_CONDITION = re.compile(
    rf"(?P<range>from|before) {_VALUE}|every {_VALUE}(?: from {_VALUE})?|(?P<list>in|not in) {_VALUE}|{_VALUE} = (\S+)"
)

_Kind = Literal["from", "before", "every", "in", "not in"]

_Get: TypeAlias = Callable[[str], object]


class LayerChoice(Struct, frozen=True):
    """The layers of a group by one origin, config.json or the trainer's arguments.

    All conditions, (kind, numbers), must hold. For ``every`` the numbers are step and start.
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


def evaluate(values: Mapping[str, Any], terms: Iterable[str]) -> object:
    """Return the value of the first known term; None if none is known."""
    return next((value for term in terms if (value := _term(values, term)) is not None), None)


def _term(values: Mapping[str, Any], term: str) -> object:
    """Evaluate a term; return None if a key is unknown or the condition does not hold.

    A term is a key, ``not KEY``, ``len KEY`` of a list or text, or ``A / B``, ``A // B`` without the remainder,
    ``A * B``, ``A + B`` or ``A - B``, where A may be such a term and B is a key or a number; the sign that is last
    counts last, but products come before sums.
    ``SECTION.KEY`` is a key of a section, ``KEY.0`` the first number of a list. A condition may
    follow: ``if KEY``, ``unless KEY``, ``if KEY = TEXT`` or ``unless KEY = TEXT``, where TEXT may be another key, which
    stands for its value. A condition on an absent key never holds. A number, ``true`` or ``false`` as a term is the
    default of a key that a complete config.json (one with a model_type) lacks. `xrank.recipes.sizes` has the
    terms of a group's layers.
    """
    if is_layer_term(term):
        return None
    counts_constants = "model_type" in values
    for word in (" if ", " unless "):
        term, found, condition = term.partition(word)
        if found:
            key, has_text, text = condition.partition(" = ")
            value = look_up(values, key)
            holds = value == look_up(values, text) or str(value) == text if has_text else value is True
            if value is None or holds != (word == " if "):
                return None
            # The condition's key is known, so a constant is no longer the default of an absent key.
            counts_constants = True
    if _NUMBER.fullmatch(term) or term in ("true", "false"):
        constant = int(term) if _NUMBER.fullmatch(term) else term == "true"
        return constant if counts_constants else None
    if term.startswith("not "):
        value = look_up(values, term.removeprefix("not "))
        return not value if isinstance(value, bool) else None
    if term.startswith("len "):
        value = look_up(values, term.removeprefix("len "))
        return len(value) if isinstance(value, list | str) else None
    for signs in (" [+-] ", " (?:[*/]|//) "):
        found_sign = re.fullmatch(f"(.+)({signs})(.+)", term)
        if found_sign is not None:
            left, sign, right = found_sign.groups()
            return _calculate(_operand(values, left), sign.strip(), _operand(values, right))
    return look_up(values, term)


def _operand(values: Mapping[str, Any], text: str) -> object:
    return int(text) if _NUMBER.fullmatch(text) else _term(values, text)


_SIGNS: Mapping[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}


def _calculate(a: object, sign: str, b: object) -> int | None:
    if type(a) is not int or type(b) is not int:
        return None
    if sign in _SIGNS:
        return _SIGNS[sign](a, b)
    return a // b if b > 0 and (sign == "//" or a % b == 0) else None


_KEY = re.compile(r"[A-Za-z_][\w.*-]*")

_NUMBER = re.compile("[0-9]{1,18}")

_MAX_OPERANDS = 32


def is_term(text: str) -> bool:
    """Return whether a text is a term, as `evaluate` reads it, or one of a group's layers.

    Example:
        >>> [is_term(text) for text in ("hidden_size / heads if use_heads", "layers from 3", "hidden_size /", "not 3")]
        [True, True, False, False]
    """
    if text.startswith("layers "):
        return is_layer_term(text)
    for word in (" if ", " unless "):
        text, found, condition = text.partition(word)
        if found and not _KEY.fullmatch(condition.partition(" = ")[0]):
            return False
    for word in ("not ", "len "):
        if text.startswith(word):
            return _KEY.fullmatch(text.removeprefix(word)) is not None
    operands = re.split(" (?:[-+*/]|//) ", text)
    # One after the other, each is evaluated by a call of its own.
    return len(operands) <= _MAX_OPERANDS and all(
        _NUMBER.fullmatch(one) or one.startswith("len ") or _KEY.fullmatch(one) for one in operands
    )


def look_up(values: Mapping[str, Any], key: str) -> object:
    """Return the value of a key, of the model or of its language model; None for an absent key."""
    inner = values.get("text_config", values.get("llm_config"))
    for section in (values, inner if isinstance(inner, Mapping) else {}):
        if key in section:
            return section[key]
        value: object = section if "." in key else None
        for step in key.split("."):  # a path through sections and lists may break off
            if isinstance(value, Mapping):
                value = value.get(step)
            elif isinstance(value, list | tuple) and _NUMBER.fullmatch(step) and int(step) < len(value):
                value = value[int(step)]
            else:
                value = None
        if value is not None:
            return value
    return None
