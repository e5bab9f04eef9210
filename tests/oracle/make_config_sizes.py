"""Write xrank/recipes/config_sizes.json: lengths of tensors that follow from config.json, of all model types.

Run it from the repository root with the environment of ``make oracle``, whenever that environment gets another
transformers; review the difference as you would review code. A run that was cut short goes on if it is started again:

    PYTHONPATH=. .venv-oracle/bin/python tests/oracle/make_config_sizes.py

Everything comes from transformers itself: a small model of each class is made on the meta device, then again with each
key of its config changed. Where that changes shapes and xrank's rules do not see it, an equation is sought that gives
one of the changed lengths, before and after. An equation stays if it holds in every other variant of every class of
the model type: with each size changed, each flag turned, each empty key filled, and with the sizes of its config class.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

from tests.oracle.config_models import (
    build,
    build_small,
    change,
    find_classes,
    find_flags,
    find_sizes,
    list_classes,
    read_config,
    read_defaults,
    read_shapes,
)
from tests.oracle.resumable import map_resumably
from xrank.recipes import config_proof
from xrank.recipes.config_proof import Equation, find_misfit, group_tensors, measure

_OUT = Path(__file__).parents[2] / "xrank" / "recipes" / "config_sizes.json"
_RECORD = Path("build/config_sizes.jsonl")
_LIMIT_SECONDS = 60
"""Time of the processor that the variants of one class may take; a class that needs more is reported as cut."""
_MAX_KEYS = 4
_MAX_CONSTANT = 4
"""Larger numbers stand for keys that the variants could not change, such as the layers of Gemma 3n in
``35*hidden_size_per_layer_input``: the equation would refuse right models of other sizes."""


@dataclass(frozen=True)
class Variant:
    """A config, and the lengths of its model."""

    sizes: Mapping[str, int]
    lengths: Mapping[str, int]
    changed: str = ""
    """The key that differs from the first variant's."""


@dataclass(frozen=True)
class Family:
    """The variants of one class."""

    variants: tuple[Variant, ...]
    unseen: frozenset[str]
    """Keys whose change no rule sees."""
    is_cut: bool
    """Whether the time limit left out variants."""


def read_variant(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], changed: str = "") -> Variant:
    """Return a variant of a config and its model's shapes."""
    lengths = {key: length for key, (length, _) in measure(group_tensors(shapes)).items()}
    return Variant({".".join(path): size for path, size in find_sizes(config)}, lengths, changed)


def make_first(model_type: str, name: str) -> Any:
    """Return a small model of a class, or else one of the default sizes; None if it cannot be made here."""
    try:
        values = read_defaults(CONFIG_MAPPING[model_type])
    except Exception:  # a config class that asks for arguments
        return None
    return build_small(model_type, name, values) or build(model_type, name, None, "meta")


def make_family(model_type: str, name: str) -> Family | None:
    """Return the variants of a class; None if it cannot be made here."""
    model = make_first(model_type, name)
    if model is None:
        return None
    config, shapes = read_config(model, name), read_shapes(model)
    variants, unseen = [read_variant(config, shapes)], set()
    end = time.process_time() + _LIMIT_SECONDS
    for path, size in find_sizes(config):
        num_made, num_needed = 0, 1
        for new in (size * 2, size * 3, size + 2, size + 1, size * 4, size // 2, size - 1):
            changed = change(config, path, new)
            other = build(model_type, name, changed, "meta") if new > 0 and time.process_time() < end else None
            if other is None:
                continue
            other_shapes = read_shapes(other)
            num_made += 1
            if other_shapes != shapes:
                variants.append(read_variant(changed, other_shapes, ".".join(path)))
                if num_made == 1 and find_misfit(changed, shapes) is None:
                    unseen.add(".".join(path))
                    num_needed = 3
            if num_made >= num_needed:
                break
    for path, value in find_flags(config):
        other = build(model_type, name, change(config, path, value), "meta") if time.process_time() < end else None
        if other is not None:
            variants.append(read_variant(change(config, path, value), read_shapes(other), "a flag"))
    return Family(tuple(variants), frozenset(unseen), time.process_time() >= end)


def find_equations(family: Family) -> Iterator[tuple[str, Equation]]:
    """Yield keys that no rule sees, each with the equations that show it."""
    first = family.variants[0]
    influences: dict[str, set[str]] = {}
    for variant in family.variants[1:]:
        if variant.changed in first.sizes:
            for length in variant.lengths.keys() & first.lengths.keys():
                if variant.lengths[length] != first.lengths[length]:
                    influences.setdefault(length, set()).add(variant.changed)
    for length, keys in influences.items():
        if keys & family.unseen and len(keys) <= _MAX_KEYS:
            equation = _fit(length, sorted(keys), family.variants)
            if equation is not None and all(holds(equation, variant) for variant in family.variants):
                yield from ((key, equation) for key in keys & family.unseen)


def _fit(length: str, keys: list[str], variants: Iterable[Variant]) -> Equation | None:
    """Return the equation of a length by these keys that the variants give; None if there is none of this form."""
    points = [v for v in variants if length in v.lengths and (not v.changed or v.changed in keys)]
    choices = (1, -1, 2, -2) if len(keys) < 3 else (1, -1)
    for powers in sorted(itertools.product(choices, repeat=len(keys)), key=lambda each: sum(map(abs, each))):
        if max(powers) < 0:
            continue
        unit = Equation(length, Fraction(1), dict(zip(keys, powers, strict=True)))
        products = [unit.compute(point.sizes) for point in points]
        lengths = [point.lengths[length] for point in points]
        other = next((k for k, product in enumerate(products) if product != products[0]), None)
        if other is None:
            continue
        slope = Fraction(lengths[other] - lengths[0]) / (products[other] - products[0])
        offset = lengths[0] - slope * products[0]
        # Two points give any line; more, or a line through zero, are no chance.
        is_certain = offset == 0 or len(set(products)) > 2
        is_small = slope.numerator <= _MAX_CONSTANT and abs(offset) <= _MAX_CONSTANT
        if slope > 0 and slope.denominator <= 8 and offset.denominator == 1 and is_small:
            equation = Equation(length, slope, unit.exponents, int(offset))
            if is_certain and all(equation.compute(p.sizes) == n for p, n in zip(points, lengths, strict=True)):
                return equation
    return None


def holds(equation: Equation, variant: Variant) -> bool:
    """Return whether an equation is true in a variant, or counts for nothing there."""
    if equation.length not in variant.lengths or not equation.exponents.keys() <= variant.sizes.keys():
        return True
    number = equation.compute(variant.sizes)
    return number.denominator > 1 or number == variant.lengths[equation.length]


def choose(equations: Iterable[tuple[str, Equation]], families: list[Family]) -> Iterator[Equation]:
    """Yield the equations of a model type: for each key the one that most classes show, by itself if possible."""
    by_key: dict[str, dict[str, Equation]] = {}
    for key, equation in equations:
        by_key.setdefault(key, {})[equation.length] = equation
    for found in by_key.values():

        def rank(equation: Equation) -> tuple[int, bool, int, int, str]:
            num_classes = sum(equation.length in family.variants[0].lengths for family in families)
            is_one = re.search(r"\.\d+[.\[]", equation.length) is not None
            return len(equation.exponents), is_one, -num_classes, len(equation.length), equation.length

        yield min(found.values(), key=rank)


def make_variants(model_type: str, name: str, keys: Iterable[str]) -> Iterator[Variant]:
    """Yield variants of another class of a model type: its first one, and one with each of these keys changed."""
    model = make_first(model_type, name)
    if model is None:
        return
    config = read_config(model, name)
    yield read_variant(config, read_shapes(model))
    for path, size in find_sizes(config):
        if ".".join(path) in keys:
            changed = change(config, path, size * 2)
            other = build(model_type, name, changed, "meta")
            if other is not None:
                yield read_variant(changed, read_shapes(other))


def make_default(model_type: str, name: str) -> Iterator[Variant]:
    """Yield the variant of a class with the sizes of its config class; none where it cannot be made so."""
    model = build(model_type, name, None, "meta")
    if model is not None:
        yield read_variant(read_config(model, name), read_shapes(model))


def describe_type(model_type: str, names: list[str], others: list[str]) -> tuple[list[str], list[str], int, list[str]]:
    """Return a model type's equations, the keys that remain unseen, how many keys no rule saw, and the classes cut.

    Args:
        model_type: the model type.
        names: classes in which equations are sought.
        others: classes in which they must hold, too.
    """
    made = {name: make_family(model_type, name) for name in names}
    families = [family for family in made.values() if family is not None]
    found = [each for family in families for each in find_equations(family)]
    variants = [variant for family in families for variant in family.variants]
    if found:
        keys = {key for _, equation in found for key in equation.exponents}
        variants += [variant for name in others for variant in make_variants(model_type, name, keys)]
        # Sizes that no variant could change, such as a number of layers beside a list of them, differ by default.
        defaults = [variant for name in [*names, *others] for variant in make_default(model_type, name)]
        variants += defaults
        # Where none has this length, a number may be such a size.
        found = [
            (key, equation)
            for key, equation in found
            if (equation.factor.numerator == 1 and not equation.offset)
            or any(equation.length in default.lengths for default in defaults)
        ]
    right = [(key, equation) for key, equation in found if all(holds(equation, variant) for variant in variants)]
    texts = sorted({str(equation) for equation in choose(right, families)})
    unseen = set().union(*(family.unseen for family in families)) if families else set()
    cut = [name for name, family in made.items() if family is not None and family.is_cut]
    return texts, sorted(unseen - {key for key, _ in right}), len(unseen), cut


def _work(model_type: str, names: list[str], others: list[str]) -> Any:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    # The keys that other rules do not see are those of this table.
    config_proof.make_family_claims = lambda config, kinds: iter(())
    return describe_type(model_type, names, others)


def main() -> None:
    """Write the entries of all model types."""
    types: dict[str, tuple[list[str], list[str]]] = {}
    for model_type, name in list_classes():
        types.setdefault(model_type, ([], []))[0].append(name)
    for model_type, name in find_classes():
        if name not in types[model_type][0]:
            types[model_type][1].append(name)
    work = {key: (key, *names) for key, names in types.items()}
    found = map_resumably(_work, work, _RECORD, f"transformers {transformers.__version__}")
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(each[0])}" for key, each in sorted(found.items()) if each[0])
    _OUT.write_text(f'{{"transformers": {json.dumps(transformers.__version__)}, "equations": {{\n{lines}\n}}}}\n')
    for key, (equations, left, num_unseen, cut) in found.items():
        print(f"{key}: {len(equations)} equations for {num_unseen} keys; not {', '.join(left)}; cut: {', '.join(cut)}")
    num_unseen, num_left = (
        sum(count(each) for each in found.values()) for count in (lambda e: e[2], lambda e: len(e[1]))
    )
    print(f"{num_unseen} keys that no rule sees; {num_left} that no equation shows")
    _RECORD.unlink()


if __name__ == "__main__":
    main()
