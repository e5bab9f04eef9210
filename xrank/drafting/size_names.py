"""Names for the sizes of a drafted recipe, and the terms over config.json's keys that define them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import combinations
from math import prod
from typing import Any, Literal, TypeAlias

from xrank.recipes.terms import evaluate

Role: TypeAlias = Literal["layer", "index", "outer", "inner", "whole"]
"""The place of a size: the first index of names, another one, heads or groups, a part of them, a whole dim."""

_TERMS: Mapping[str, tuple[str, ...]] = {
    "L": ("num_hidden_layers", "n_layer", "num_layers"),
    "h": ("hidden_size", "n_embd", "d_model"),
    "f": ("intermediate_size", "n_inner", "n_embd * 4"),
    "v": ("vocab_size",),
    "a": ("num_attention_heads", "n_head"),
    "g": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "r": ("num_attention_heads / num_key_value_heads",),
    "d": ("head_dim", "hidden_size / num_attention_heads", "n_embd / n_head"),
    "half": ("head_dim / 2", "hidden_size / num_attention_heads / 2"),
    "e": ("num_experts", "num_local_experts", "n_routed_experts"),
    "m": ("moe_intermediate_size",),
    "s": ("shared_expert_intermediate_size", "moe_intermediate_size * n_shared_experts"),
}
_ORDER: Mapping[Role, tuple[str, ...]] = {
    "layer": ("L",),
    "index": ("e", "L"),
    "outer": ("g", "a", "e", "f", "m", "half", "d"),
    "inner": ("r d", "d", "half", "g d", "a d", "f", "m", "s", "h"),
    "whole": ("h", "v", "f", "m", "s", "e", "a d", "g d", "d", "a", "g"),
}
_NO_SIZES = ("_id", "_token", "version", "seed", "window", "max_", "layer", "topk", "top_k", "per_tok", "position")
"""Texts in keys whose numbers are not sizes of tensors."""


class SizeNames:
    """Names sizes, and remembers the definitions of all names that were given.

    Args:
        config: the content of the base model's config.json.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config: dict[str, tuple[str, ...]] = {}
        """Name -> terms, of the names in use."""
        self.sizes: dict[str, int] = {}
        """Name -> number, for numbers that need a name."""
        self._terms = {name: self._known(config, terms) for name, terms in _TERMS.items()}
        self._numbers = {name: evaluate(config, terms) for name, terms in self._terms.items()}
        self._others = {
            key: number
            for part in (config.get("text_config"), config)
            if isinstance(part, Mapping)
            for key, number in part.items()
            if type(number) is int and number > 1 and key.isidentifier() and not any(no in key for no in _NO_SIZES)
        }

    @staticmethod
    def _known(config: Mapping[str, Any], terms: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(term for term in terms if type(evaluate(config, (term,))) is int)

    def name(self, count: int, role: Role) -> str:
        """Return a text for a size: a name, a product or sum of names, or the number itself."""
        if count == 1:
            return "1"
        texts = [*_ORDER[role], *_ORDER["whole"]] if role in ("outer", "inner", "whole") else [*_ORDER[role]]
        for text in texts:
            if self._value(text) == count:
                return self._use(text)
        same = [key for key, number in self._others.items() if number == count and key not in self._used_keys()]
        if same:
            return self._use(same[0])
        parts = [key for key in self._others if key.endswith(("_rank", "head_dim"))]
        for a, b in combinations(parts, 2):
            for before in ("", "a ") if role in ("whole", "inner") else ():
                if (self._value(before.strip()) or 1) * (self._others[a] + self._others[b]) == count:
                    self._use(f"{before}{a} {b}")
                    return f"{before}({a} + {b})"
        for key in parts:
            if self._value("a") is not None and (self._value("a") or 0) * self._others[key] == count:
                return self._use(f"a {key}")
        return str(count)

    def alias(self, text: str) -> str:
        """Return other names for the sizes in a text, with the same numbers."""
        return re.sub(r"[A-Za-z_]\w*|[0-9]+", lambda found: self._alias(found[0]), text)

    def _alias(self, name: str) -> str:
        if name.isdecimal():
            self.sizes[f"n{name}"] = int(name)
            return f"n{name}"
        number = next(n for n in range(2, 100) if f"{name}_{n}" not in self.config)
        self.config[f"{name}_{number}"] = self.config[name]
        return f"{name}_{number}"

    def _used_keys(self) -> set[str]:
        return {terms[0] for name, terms in self.config.items() if name in _TERMS}

    def _value(self, text: str) -> int | None:
        if not text:
            return None
        numbers = [self._numbers.get(name, self._others.get(name)) for name in text.split()]
        whole = [number for number in numbers if type(number) is int]
        return prod(whole) if len(whole) == len(numbers) else None

    def _use(self, text: str) -> str:
        for name in text.split():
            self.config[name] = self._terms.get(name) or (name,)
        return text
