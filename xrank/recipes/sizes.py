"""The sizes of a recipe for one model: config.json, the trainer's arguments, names and shapes must agree about them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from math import isclose, prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from xrank.errors import ContradictionError, LayoutError, UsageError, option
from xrank.layout.local_part import global_size, solve_dims
from xrank.layout.notation import LayoutTree, Size, render_dim, size_names_of
from xrank.layout.tensor_name import MAX_NAMES
from xrank.recipes.recipe import Match, Recipe, Rule, Side, parse_side, settle
from xrank.recipes.recipe_file import (
    LayerChoice,
    evaluate,
    find_place,
    is_layer_term,
    look_up,
    parse_layers,
    read_shipped,
)
from xrank.words import clip

_Shape = tuple[int, ...]


def collect_sizes(
    recipe: Recipe,
    config: Mapping[str, Any] | None,
    args: Mapping[str, Any] | None,
    folder: str = "the source's folder",
) -> dict[str, tuple[int, str]]:
    """Return size -> (number, its origin) from the recipe, config.json and the arguments, which must agree."""
    found = {name: (number, "the recipe") for name, number in recipe.sizes.items()}
    for values, name, choices, origin in _list_terms(recipe, config, args):
        number = evaluate(values, choices)
        # Flags are in the same tables, and isinstance would take a bool for an int.
        if type(number) is not int or number < 1:
            continue
        if name in found and name in recipe.padded:
            continue  # config.json counts the rows to keep, the trainer's arguments the trained rows with padding
        if name in found and found[name][0] != number:
            key = choices[0].partition(" ")[0]
            raise disagreement(key, number, origin, found[name][0], found[name][1], folder)
        found.setdefault(name, (number, origin))
    check_counts(recipe, {name: number for name, (number, _) in found.items()})
    return found


def _list_terms(
    recipe: Recipe, config: Mapping[str, Any] | None, args: Mapping[str, Any] | None
) -> Iterator[tuple[Mapping[str, Any], str, tuple[str, ...], str]]:
    """Yield (values, name, its terms over them, their origin) of config.json, then of the trainer's arguments."""
    for values, terms, origin in ((config, recipe.config, "config.json"), (args, recipe.args, "the trainer's args")):
        if values is not None:
            yield from ((values, name, choices, origin) for name, choices in terms.items())


def check_counts(recipe: Recipe, sizes: Mapping[str, int]) -> None:
    """Refuse sizes by which one name of a recipe stands for more tensors than any model has: each would be listed."""
    for name in {side.name for rule in recipe.rules for side in (*rule.sources, *rule.targets.values())}:
        count = prod(sizes.get(size, 1) for dim in name.dims for size in size_names_of(dim))
        if count > MAX_NAMES:
            raise ContradictionError(
                f"{name} would match more tensors than any model has",
                tensor=str(name),
                got=clip(str(count), 40),
                want=f"at most {MAX_NAMES:,}",
                next_step="check the numbers of layers and experts in config.json, the trainer's args and the names",
            )


def disagreement(key: str, got: object, origin: str, want: object, other: str, folder: str) -> ContradictionError:
    """Return the error that two origins give different values for a key."""
    problem, got, want = f"{other} and {origin} disagree about {key}", f"{got} in {origin}", f"{want}, as in {other}"
    step = f"put the model's own config.json into {folder}, or give {option('base_model')}"
    return ContradictionError(problem, got=got, want=want, next_step=step)


def collect_flags(recipe: Recipe, config: Mapping[str, Any] | None, args: Mapping[str, Any] | None) -> dict[str, bool]:
    """Return flag -> its value in config.json, else in the trainer's arguments; unknown flags are absent."""
    found: dict[str, bool] = {}
    for values, name, choices, _ in _list_terms(recipe, config, args):
        value = evaluate(values, choices)
        if isinstance(value, bool):
            found.setdefault(name, value)
    return found


def find_unsaid(recipe: Recipe, config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the keys that config.json lacks, although the tensors show their values: key -> value."""
    keys = ((name, terms[0]) for name, terms in recipe.config.items() if terms and evaluate(config, terms) is None)
    return {key: sizes[name] for name, key in keys if name in sizes and key.isidentifier()}


def collect_layers(
    recipe: Recipe, config: Mapping[str, Any] | None, args: Mapping[str, Any] | None
) -> dict[str, tuple[LayerChoice, ...]]:
    """Return group -> the layers that have its blocks: by config.json, and by the trainer's arguments."""
    found: dict[str, tuple[LayerChoice, ...]] = {}
    for values, group, choices, origin in _list_terms(recipe, config, args):
        get = partial(look_up, values)
        known = (parse_layers(term, get, origin) for term in choices if is_layer_term(term))
        choice = next((choice for choice in known if choice is not None), None)
        if choice is not None:
            found[group] = (*found.get(group, ()), choice)
    return found


def list_model_types(config: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the model types in config.json: the model's, and that of its language model."""
    text = (config or {}).get("text_config", (config or {}).get("llm_config"))
    sections = (config or {}, text if isinstance(text, Mapping) else {})
    return frozenset(value for section in sections if isinstance(value := section.get("model_type"), str))


def solve_sizes(
    recipe: Recipe,
    given: Mapping[str, tuple[int, str]],
    tensors: Iterable[tuple[Side, str, _Shape]],
    *,
    is_reversed: bool = False,
    folder: str = "the source's folder",
) -> dict[str, int]:
    """Return all sizes of a recipe for a source; the given sizes, from `collect_sizes`, and all shapes must agree.

    `tensors` are (the recipe's side, name, global shape); reversed they are Hugging Face's, which have no padding. A
    config.json belongs in `folder`, for errors.
    """
    bound = {name: number for name, (number, _) in given.items()}
    padded = () if is_reversed else recipe.padded
    found: dict[tuple[int, _Shape], _TensorKind] = {}
    for side, name, shape in tensors:
        indices = side.name.indices(name) or ()
        kind = found.setdefault((id(side), shape), _TensorKind(side, name, shape, [(-1, name)] * len(indices)))
        for i, index in enumerate(indices):
            if index > kind.last[i][0]:
                kind.last[i] = index, name
    kinds = list(found.values())
    counts: dict[str, int] = {}
    for kind in kinds:
        for dim, (index, _) in zip(kind.side.name.dims, kind.last, strict=True):
            if isinstance(dim, Size) and isinstance(dim.value, str):
                counts[dim.value] = max(counts.get(dim.value, 0), index + 1)
    for size, count in counts.items():
        # Only without a given count: the highest layer present may not be the model's last, if files are lost.
        bound.setdefault(size, count)
    # A size that one tensor determines may leave a single unknown in another's product, so go round again.
    known = -1
    while known < len(bound):
        known = len(bound)
        for kind in kinds:
            dims = kind.side.dims
            if len(kind.shape) == len(dims):
                lengths = {i: n for i, n in enumerate(kind.shape) if not set(size_names_of(dims[i])) & set(padded)}
                with suppress(LayoutError):  # the check that follows names the tensor
                    solve_dims(LayoutTree(dims), lengths, bound)
    for kind in kinds:
        _check_fit(recipe, padded, given, bound, kind, folder)
    return bound


class _TensorKind(Struct):
    """All tensors of one side with the same shape."""

    side: Side
    name: str
    """Name of the first tensor."""
    shape: _Shape
    last: list[tuple[int, str]]
    """For each dim of the name the largest index and the name of its tensor."""


def _check_fit(
    recipe: Recipe,
    padded: Sequence[str],
    given: Mapping[str, tuple[int, str]],
    bound: Mapping[str, int],
    kind: _TensorKind,
    folder: str,
) -> None:
    side, shape = kind.side, kind.shape
    for dim in side.all_dims:
        for size in size_names_of(dim):
            if size not in bound:
                raise _unknown(recipe, side, size, kind.name, shape, folder)
    for dim, (index, name) in zip(side.name.dims, kind.last, strict=True):
        if index >= global_size(dim, bound):
            raise _misfit(recipe, given, side, name, f"the index {index}", f"less than {global_size(dim, bound)}")
    if len(shape) != len(side.dims):
        raise _misfit(recipe, given, side, kind.name, f"shape {list(shape)}", f"{len(side.dims)} dims")
    for i, (dim, n) in enumerate(zip(side.dims, shape, strict=True)):
        expected = global_size(dim, bound)
        # Padding comes after the last row, so only whole leading dims can have it.
        is_padded = i == 0 and isinstance(dim, Size) and dim.value in padded
        if n != expected and not (is_padded and n > expected):
            want = f"{[global_size(dim, bound) for dim in side.dims]}{' or more rows' if is_padded else ''}"
            raise _misfit(recipe, given, side, kind.name, f"shape {list(shape)}", want)


def _unknown(recipe: Recipe, side: Side, size: str, name: str, shape: _Shape, folder: str) -> UsageError:
    keys = ", ".join(f"{term!r}" for term in recipe.config.get(size, ()))
    padded = size in recipe.padded
    problem = f"{name}: the recipe {recipe.name} needs the size {size!r}, which is unknown"
    got = f"shape {list(shape)}" + (", which may end in rows of padding" if padded else "")
    want = f"a config.json with {keys}" if keys else f"a number for {size!r}"
    step = f"put the model's config.json into {folder}, or give {option('base_model')}" + _or_correct(recipe, side)
    return UsageError(problem, tensor=name, got=got, want=want, next_step=step)


def _misfit(
    recipe: Recipe, given: Mapping[str, tuple[int, str]], side: Side, name: str, got: str, want: str
) -> ContradictionError:
    names = dict.fromkeys(size for dim in side.all_dims for size in size_names_of(dim))
    origins = ", ".join(f"{size} = {given[size][0]} by {given[size][1]}" for size in names if size in given)
    want += f" ({origins})" if origins else ""
    step = "check that config.json is this model's, and that no rank or file is missing" + _or_correct(recipe, side)
    return ContradictionError(f"{name} does not fit {side}", tensor=name, got=got, want=want, next_step=step)


def _or_correct(recipe: Recipe, side: Side) -> str:
    """Return a next step for the author of a recipe; empty for a recipe that comes with xrank."""
    place = find_place(recipe.name, "tensors", str(side))
    return f", or correct the rule in {place}" if ", line " in place and recipe.name not in read_shipped() else ""


_Values = Mapping[str, Any]


def check_requirements(recipe: Recipe, config: _Values | None, args: _Values | None, folder: str) -> None:
    """Refuse another kind of model, and a config.json that is not that of the trained model."""
    for values, must, origin in (
        (args, recipe.must, "the trainer's args"),
        (config, recipe.must_config, "config.json"),
    ):
        key = find_refused(must, values)
        if key is not None and values is not None:
            value = look_up(values, key)
            problem = f"the recipe {recipe.name} is not for a model of {key} {value!r}"
            got, want = f"{key} = {value!r} in {origin}", " or ".join(map(repr, must[key])) or "none"
            step = f"give a recipe of your own with {option('recipe', metavar='FILE')}, or keep the names with "
            raise UsageError(problem, got=got, want=want, next_step=step + option("recipe", "none"))
    for name, terms in recipe.config.items():
        # config.json counts the rows to keep, the trainer's arguments the trained rows with padding.
        if config is None or args is None or name in recipe.padded:
            continue
        ours, theirs = evaluate(config, terms), evaluate(args, recipe.args.get(name, ()))
        if ours is not None and theirs is not None and not _is_equal(ours, theirs):
            # The key of the term: that of its last condition where its value is a constant.
            term = recipe.args[name][0]
            key = term.removeprefix("not ").partition(" ")[0]
            key = term.rpartition(" if ")[2].partition(" ")[0] if key in ("true", "false") else key
            raise disagreement(key, theirs, "the trainer's args", ours, "config.json", folder)


def find_refused(must: Mapping[str, tuple[object, ...]], values: _Values | None) -> str | None:
    """Return the first key whose value is not among those that a recipe requires (`must`); None: all are."""
    # None: a trainer's option that was not given.
    known = {key: value for key in must if (value := look_up(values or {}, key)) is not None}
    return next((key for key, value in known.items() if value not in must[key]), None)


def _is_equal(one: object, other: object) -> bool:
    """Return whether two values are equal; numbers may be written as integers, or rounded."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        with suppress(OverflowError):  # an integer beyond all floats
            return isclose(one, other, rel_tol=1e-6)
    return one == other


def place_names(
    found: Match,
    config: Mapping[str, Any] | None,
    args: Mapping[str, Any] | None,
    *,
    path: str = "the source",
    folder: str = "the source's folder",
) -> tuple[Match, dict[str, tuple[int, str]]]:
    """Return the match with rules for each layer and each name at its own place, and the sizes that are known."""
    found = _spread_layers(found, config, args, path)
    told = collect_sizes(found.recipe, config, args, folder)
    return settle(found, {size: number for size, (number, _) in told.items()}), told


def _spread_layers(found: Match, config: Mapping[str, Any] | None, args: Mapping[str, Any] | None, path: str) -> Match:
    """Return the match with a rule for each layer; the same match, if all layers of its recipe have the same sizes."""
    recipe = found.recipe
    if not recipe.by_layer:
        return found
    places = {at: _layer_dim(recipe.rules[at[0]]) is not None for at in found.used}
    indices = {
        name: (found.side_at(at).name.indices(name) or (0,))[0]
        for at, names in found.used.items()
        if places[at]
        for name in names
    }
    count = 1 + max(indices.values(), default=-1)
    dim = next(dim for dim in map(_layer_dim, recipe.rules) if dim is not None)
    told, origin = collect_sizes(recipe, config, args).get(dim, (count, ""))
    if told < count:
        last = max(indices, key=lambda name: indices[name])
        raise ContradictionError(
            f"{last} belongs to a layer after the {told} of {origin}",
            tensor=last,
            file=path,
            got=f"{count} layers",
            want=f"{told} layers, as in {origin}",
            next_step="check that config.json is this model's",
        )
    spread, numbers = _spread(recipe, told)
    used: dict[tuple[int, int], tuple[str, ...]] = {}
    for (number, form), names in found.used.items():
        for name in names:
            at = (numbers[number, indices[name] if places[number, form] else None], form)
            used[at] = (*used.get(at, ()), name)
    return replace(found, recipe=spread, used=dict(sorted(used.items())))


def _layer_dim(rule: Rule) -> str | None:
    """Return the size that counts layers in the names of a rule; None if its tensors lie in no layer."""
    dims = rule.sources[0].name.dims
    return render_dim(dims[0]) if dims else None


@lru_cache(maxsize=8)
def _spread(recipe: Recipe, count: int) -> tuple[Recipe, dict[tuple[int, int | None], int]]:
    """Return the recipe with rules for so many layers, and (number of a rule, layer) -> number of its own rule."""
    layered = [number for number, rule in enumerate(recipe.rules) if _layer_dim(rule) is not None]
    order: list[tuple[int, int | None]] = []
    for number in range(len(recipe.rules)):
        if number == layered[0]:  # layer after layer, as files list them
            order += [(each, layer) for layer in range(count) for each in layered]
        if number not in layered:
            order.append((number, None))
    rules = [
        recipe.rules[number] if layer is None else _rule_of(recipe.rules[number], layer, recipe.by_layer)
        for number, layer in order
    ]
    terms = [
        {key: texts for key, texts in table.items() if key not in recipe.by_layer}
        | {
            f"{key}_{layer}": tuple(text.replace(".*.", f".{layer}.") for text in table[key])
            for layer in range(count)
            for key in recipe.by_layer
            if key in table
        }
        for table in (recipe.config, recipe.args)
    ]
    spread = replace(recipe, rules=tuple(rules), config=terms[0], args=terms[1], by_layer=())
    return spread, {at: number for number, at in enumerate(order)}


def _rule_of(rule: Rule, layer: int, by_layer: tuple[str, ...]) -> Rule:
    def side_of(side: Side) -> Side:
        name, _, dims = str(side).partition(" ")
        name = re.sub(r"\{[^}]*\}", str(layer), name, count=1)
        # A part's name may be a size's, too.
        dims = re.sub(rf"\b({'|'.join(by_layer)})\b(?!:)", rf"\g<1>_{layer}", dims)
        return parse_side(f"{name} {dims}")

    def flag_of(flag: str | None) -> str | None:
        return f"{flag}_{layer}" if flag in by_layer else flag

    return replace(
        rule,
        sources=(side_of(rule.sources[0]),),
        targets={part: side_of(side) for part, side in rule.targets.items()},
        when=flag_of(rule.when),
        unless=flag_of(rule.unless),
        line=str(rule.sources[0]),
    )
