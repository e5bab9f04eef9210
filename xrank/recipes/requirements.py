"""Refuse a model whose names and shapes fit a recipe by chance: its values are required, and its origins must agree."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import isclose
from typing import Any

from xrank.errors import UsageError, option
from xrank.recipes.recipe import Recipe
from xrank.recipes.sizes import disagreement
from xrank.recipes.terms import evaluate, look_up

_Values = Mapping[str, Any]


def check_requirements(recipe: Recipe, config: _Values | None, args: _Values | None, folder: str) -> None:
    """Refuse another kind of model, and a config.json that is not that of the trained model.

    Args:
        recipe: the recipe that fits the names.
        config: the content of config.json.
        args: the trainer's arguments.
        folder: the folder that a config.json belongs in, for errors.

    Raises:
        UsageError: config.json or an argument of the trainer has a value that the recipe rules out.
        ContradictionError: config.json and the trainer's arguments differ in a value that the recipe names in both.
    """
    for values, must, origin in (
        (args, recipe.must, "the trainer's args"),
        (config, recipe.must_config, "config.json"),
    ):
        key = _find_refused(must, values)
        if key is not None and values is not None:
            value = look_up(values, key)
            raise UsageError(
                f"the recipe {recipe.name} is not for a model of {key} {value!r}",
                got=f"{key} = {value!r} in {origin}",
                want=" or ".join(map(repr, must[key])) or "none",
                next_step=f"give a recipe of your own with {option('recipe', metavar='FILE')}, or keep the names with "
                f"{option('recipe', 'none')}",
            )
    for name, terms in recipe.config.items():
        # config.json counts the rows to keep, the trainer's arguments the trained rows with padding.
        if config is None or args is None or name in recipe.padded:
            continue
        ours, theirs = evaluate(config, terms), evaluate(args, recipe.args.get(name, ()))
        if ours is not None and theirs is not None and not _is_equal(ours, theirs):
            raise disagreement(_key_in(recipe.args[name][0]), theirs, "the trainer's args", ours, "config.json", folder)


def is_refused(recipe: Recipe, args: _Values | None) -> bool:
    """Return whether the recipe rules out the value of one of the trainer's arguments."""
    return _find_refused(recipe.must, args) is not None


def _find_refused(must: Mapping[str, tuple[object, ...]], values: _Values | None) -> str | None:
    # None: a trainer's option that was not given.
    known = {key: value for key in must if (value := look_up(values or {}, key)) is not None}
    return next((key for key, value in known.items() if value not in must[key]), None)


def _key_in(term: str) -> str:
    """Return the key of a term, for errors: that of its last condition where its value is a constant."""
    key = term.removeprefix("not ").partition(" ")[0]
    return term.rpartition(" if ")[2].partition(" ")[0] if key in ("true", "false") else key


def _is_equal(one: object, other: object) -> bool:
    """Return whether two values are equal; numbers may be written as integers, or rounded."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        with suppress(OverflowError):  # an integer beyond all floats
            return isclose(one, other, rel_tol=1e-6)
    return one == other
