"""Refuse a recipe whose parts do not name each other: unknown sizes, flags, groups and malformed terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xrank.layout.binding import names_of_dim
from xrank.layout.notation import MAX_SIZE
from xrank.layout.tensor_name import compile_pattern
from xrank.recipes.recipe import Recipe
from xrank.recipes.recipe_tables import misplaced
from xrank.recipes.terms import is_term
from xrank.words import list_text

_MAX_ADDED = 1 << 24  # fp32 has all integers up to here


def check_patterns(lists: Mapping[str, tuple[str, ...]], file: str) -> None:
    """Refuse lists of names with anything but regular expressions.

    Raises:
        LayoutError: a text is not one; the error names its line.
    """
    for key in ("ignored", "dropped", "keep_fp32"):
        for pattern in lists[key]:
            try:
                compile_pattern(pattern)
            except ValueError as error:
                raise misplaced(file, (key,), pattern, f"a regular expression ({error})") from error


def check_sizes(sizes: Mapping[str, Any], file: str) -> None:
    """Refuse constant sizes that are not numbers of elements.

    Raises:
        LayoutError: a value is not a whole number of 1 or more.
    """
    for size, number in sizes.items():
        # isinstance would take TOML's `true` for 1.
        if type(number) is not int or not 1 <= number <= MAX_SIZE:
            raise misplaced(file, ("sizes", size), number, f"a whole number from 1 to {MAX_SIZE}")


def check_required(table: str, values: Mapping[str, Any], file: str) -> None:
    """Refuse required values that no argument can have.

    Raises:
        LayoutError: a value is neither a text, a number or a boolean, nor a list of them.
    """
    for key, value in values.items():
        if not all(
            isinstance(one, str | int | float | bool) for one in (value if isinstance(value, list) else [value])
        ):
            raise misplaced(file, (table, key), value, "a text, a number, true or false, or a list of them")


def check_names(recipe: Recipe, file: str) -> None:
    """Refuse names that the recipe does not define. They are probably misspelt.

    Args:
        recipe: the recipe, merged with those that it extends.
        file: its file, for errors.

    Raises:
        LayoutError: a list, rule or term names an unknown size, flag or group; the error names the line.
    """
    sizes = _find_sizes(recipe)
    groups = {rule.group for rule in recipe.rules if rule.group is not None}
    flags = {flag for rule in recipe.rules for flag in (rule.when, rule.unless) if flag is not None}
    for table, terms in (("config", recipe.config), ("args", recipe.args)):
        for name, texts in terms.items():
            wrong = next((text for text in texts if not is_term(text)), None)
            if wrong is not None:
                raise misplaced(file, (table, name), wrong, "a key, or a term such as 'hidden_size / num_heads'")
    # Recipes inherit sizes and flags that not all of them use.
    useless = find_useless(recipe) if recipe.depth == 0 else ()
    if useless:
        known = sizes | flags | groups
        raise misplaced(file, useless[0], useless[0][1], f"a name that a rule has: one of {_names(known)}")
    for key, names, all_names in (("padded", recipe.padded, sizes), ("needed", recipe.needed, groups)):
        for name in names:
            if name not in all_names:
                raise misplaced(file, (key,), name, f"one of the recipe's own: {_names(all_names)}")
    if recipe.by_layer and not any(rule.sources[0].name.dims for rule in recipe.rules):
        raise misplaced(file, ("by_layer",), recipe.by_layer[0], "a rule of layers, such as layers.{L}.w [h]")
    for rule in recipe.rules:
        keys = ("tensors", str(rule.sources[0]))
        for key, flag in (("when", rule.when), ("unless", rule.unless)):
            if flag is not None and flag not in recipe.config.keys() | recipe.args.keys():
                raise misplaced(file, (*keys, key), flag, f"a flag that [config] or [args] has, such as {flag} = KEY")
        for group in rule.beside:
            if group not in groups:
                raise misplaced(file, (*keys, "beside"), group, f"one of the recipe's groups: {_names(groups)}")
        if rule.group is not None and not rule.sources[0].name.dims:
            raise misplaced(file, (*keys, "group"), rule.group, "a tensor of a layer, such as layers.{L}.w [h]")
        if abs(rule.add) > _MAX_ADDED:
            raise misplaced(file, (*keys, "add"), rule.add, f"a number from -{_MAX_ADDED} to {_MAX_ADDED}")


def find_useless(recipe: Recipe) -> tuple[tuple[str, str], ...]:
    """Return the entries (table, name) that give a value to a name of no rule, and that compare nothing.

    Args:
        recipe: the recipe.
    """
    used = _find_sizes(recipe) | {
        name for rule in recipe.rules for name in (rule.when, rule.unless, rule.group) if name
    }
    found = [("config", name) for name in recipe.config if name not in used | recipe.args.keys()]
    found += [("args", name) for name in recipe.args if name not in used | recipe.config.keys()]
    return (*found, *(("sizes", name) for name in recipe.sizes if name not in used))


def _find_sizes(recipe: Recipe) -> set[str]:
    sides = (side for rule in recipe.rules for side in (rule.sources[0], *rule.targets.values()))
    return {size for side in sides for dim in side.all_dims for size in names_of_dim(dim)}


def _names(names: set[str]) -> str:
    return list_text(sorted(names), 16, "none")
