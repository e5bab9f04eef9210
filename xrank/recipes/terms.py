"""Terms over the keys of config.json or of the trainer's arguments: ``hidden_size / num_attention_heads``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xrank.recipes.layer_choice import is_layer_term


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
    default of a key that a complete config.json (one with a model_type) lacks. `xrank.recipes.layer_choice` has the
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


def _calculate(a: object, sign: str, b: object) -> int | None:
    if type(a) is not int or type(b) is not int:
        return None
    match sign:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "//":
            return a // b if b > 0 else None
    return a // b if b > 0 and a % b == 0 else None


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
        value = _lookup_path(section, key.split(".")) if "." in key else None
        if value is not None:
            return value
    return None


def _lookup_path(value: object, path: Sequence[str]) -> object:
    """Return the value at the end of a path through sections and lists; None where it breaks off."""
    for key in path:
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list | tuple) and _NUMBER.fullmatch(key) and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value
