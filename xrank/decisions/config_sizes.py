"""Sizes of transformers' families, as data: lengths of tensors, and of lists of modules, that follow from config.json.

``config_sizes.json`` beside this module is generated from an installed transformers by
``tests/oracle/make_config_sizes.py``, for the keys that the rules of `xrank.decisions.config_claims` do not prove. An
entry is an equation: ``layers.*.mixer.in_proj.weight[1] = hidden_size`` is the length of a dim, and ``stages = depth``
the number of modules in a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from xrank.decisions.config_claims import Claim, Place
from xrank.decisions.config_sections import Section, TensorKind

Lengths = Mapping[str, tuple[int, Place]]
"""Left side of an equation -> the length that the tensors have."""

_PATH = Path(__file__).parent / "config_sizes.json"
_INDEX = re.compile(r"\.(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Equation:
    """A length: a product of sizes in config.json, or of their squares, and of divisors, with a constant added."""

    length: str
    factor: Fraction
    exponents: Mapping[str, int]
    """Path of a key -> its power, negative for a divisor."""
    offset: int = 0

    def __str__(self) -> str:
        number = [] if self.factor.numerator == 1 else [str(self.factor.numerator)]
        above = [*number, *(key for key, power in self.exponents.items() for _ in range(power))]
        divisor = [] if self.factor.denominator == 1 else [str(self.factor.denominator)]
        below = [*divisor, *(key for key, power in self.exponents.items() for _ in range(-power))]
        text = "*".join(above or ["1"]) + "".join(f"/{each}" for each in below)
        return f"{self.length} = {text}" + (f"{self.offset:+d}" if self.offset else "")

    def compute(self, sizes: Mapping[str, int]) -> Fraction:
        """Return the length for sizes by key."""
        product = self.factor
        for key, exponent in self.exponents.items():
            product *= Fraction(sizes[key]) ** exponent
        return product + self.offset


@lru_cache(maxsize=1024)
def parse_equation(text: str) -> Equation:
    """Return the equation of a text, as ``str`` writes it."""
    length, _, right = text.partition(" = ")
    product, offset = re.fullmatch(r"(.*?)([+-]\d+)?", right).groups()  # type: ignore[union-attr]
    factor, exponents = Fraction(1), dict[str, int]()
    for sign, term in re.findall(r"([*/]?)([^*/]+)", product):
        exponent = -1 if sign == "/" else 1
        if term.isdecimal():
            factor *= Fraction(int(term)) ** exponent
        else:
            exponents[term] = exponents.get(term, 0) + exponent
    return Equation(length, factor, exponents, int(offset or 0))


def make_family_claims(config: Mapping[str, Any], kinds: Sequence[TensorKind]) -> Iterator[tuple[Section, Claim]]:
    """Yield the claims of a config.json that are known of its model type alone, each with its values.

    An equation counts only if config.json has all its keys, and the tensors its length.
    """
    texts = _read_equations().get(str(config.get("model_type")), ())
    # Moshi's depth_decoder has layers of its own sizes, under the names of Moshi's.
    inner = {key.removesuffix("_config") for key, value in config.items() if isinstance(value, Mapping)}
    lengths = measure(kinds, inner) if texts else {}
    for equation in map(parse_equation, texts):
        sizes = {key: _look_up(config, key) for key in equation.exponents}
        found = lengths.get(equation.length)
        if found is None or not all(type(size) is int and size > 0 for size in sizes.values()):
            continue
        number = equation.compute(sizes)  # type: ignore[arg-type]
        if number.denominator == 1:  # transformers refuses other numbers, or rounds them
            numbers = (number.numerator,)
            yield Section("", sizes, (), ()), Claim(next(iter(sizes)), tuple(sizes), numbers, {found[0]: found[1]})


def measure(kinds: Sequence[TensorKind], inner: Collection[str] = ()) -> Lengths:
    """Return the lengths that tensors have, by the left sides of equations.

    Names of modules count with and without the outermost one, which is the base model's in classes with a head. A
    length that differs between tensors of one name, or pattern, is left out. Where a shape is that of one tensor alone,
    such as ``mlp.2.weight``, its own name counts besides.

    Args:
        kinds: the tensors.
        inner: outermost modules that hold inner models: their names count whole alone.
    """
    found: dict[str, tuple[int, Place] | None] = {}
    short: dict[str, tuple[int, Place] | None] = {}
    lists: dict[str, tuple[set[str], str]] = {}
    for kind in kinds:
        for dim, length in enumerate(kind.shape):
            each = length, Place(kind.names[0], f"in dim {dim} of {kind.names[0]}")
            for name in {kind.pattern, *kind.names} if len(kind.names) == 1 else [kind.pattern]:
                _add(found, f"{name}[{dim}]", each)
                if name.count(".") > 1 and name.partition(".")[0] not in inner:
                    _add(short, f"{name}[{dim}]".partition(".")[2], each)
        for name in kind.names:
            for match in _INDEX.finditer(name):
                path = _INDEX.sub(".*", name[: match.start()])
                lists.setdefault(path, (set(), name))[0].add(match[1])
    for path, (indices, name) in lists.items():
        place = Place(name, f"modules under {path}")
        _add(found, path, (len(indices), place))
        if "." in path and path.partition(".")[0] not in inner:
            _add(short, path.partition(".")[2], (len(indices), place))
    return {key: each for key, each in {**short, **found}.items() if each is not None}


def _add(found: dict[str, tuple[int, Place] | None], key: str, each: tuple[int, Place]) -> None:
    """Add a length, or mark the key where it has another one already."""
    known = found.setdefault(key, each)
    if known is not None and known[0] != each[0]:
        found[key] = None


def _look_up(config: Mapping[str, Any], path: str) -> object:
    value: object = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


@lru_cache(maxsize=1)
def _read_equations() -> Mapping[str, Sequence[str]]:
    equations: dict[str, list[str]] = json.loads(_PATH.read_text())["equations"]
    return equations
