"""Prove inferred shapes, which no file records: a recipe's symbolic shapes with config.json's sizes must equal them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xrank.errors import ContradictionError, IncompleteError, LayoutError, XrankError
from xrank.layout.binding import names_of_dim
from xrank.layout.notation import Size
from xrank.recipes.dim_equations import Conflict, DimLength, solve_lengths
from xrank.recipes.layer_rules import place_names
from xrank.recipes.matching import Match, active_rules, match, source_sides
from xrank.recipes.name_proof import BRING_FILES, CHECK_CONFIG, check_names, refuse_missing
from xrank.recipes.recipe_file import load_shipped_recipes
from xrank.recipes.side import Side
from xrank.recipes.sizes import collect_flags, list_model_types
from xrank.words import list_text

_Shape = tuple[int, ...]


def prove_shapes(shapes: Mapping[str, _Shape], config: Mapping[str, Any] | None = None) -> str | None:
    """Return the name of a recipe whose symbolic shapes, with the sizes in config.json, equal these shapes.

    For formats that record no global shapes: the reader infers them from the pieces that exist, so a piece missing at
    the end of a tensor makes it shorter. Shapes alone prove nothing, because the loss of the last rank may shorten all
    tensors alike (vocabulary, heads and blocks) and still fit one set of sizes. So config must contain every size, of
    dims and of indices in names; only a contradiction between shapes is evidence without it. The names may be Hugging
    Face's or a training framework's. Every layer that config counts must be complete.

    Args:
        shapes: name -> inferred global shape, for all tensors of the model.
        config: the content of config.json, if known.

    Returns:
        The recipe's name; None if no recipe knows all names, so that nothing is proven. The caller then asks for
        a base model or refuses.

    Raises:
        IncompleteError: a tensor is shorter than others or config require, or is missing; both are named.
        ContradictionError: a tensor is longer than config allows, or has another number of dims.
        LayoutError: nothing contradicts the shapes, but config does not contain all sizes.
    """
    # Several know Hugging Face's names of one family; those with a trainer's arguments know the most, such as biases.
    types = list_model_types(config)
    # Layers of different sizes prove nothing of each other, so their recipes need the model's own config.json.
    recipes = [one for one in load_shipped_recipes() if not one.by_layer or not types.isdisjoint(one.model_types)]
    recipes.sort(key=lambda recipe: not recipe.args)
    matches = [match(recipe, shapes, is_reversed=back) for recipe in recipes for back in (True, False)]
    candidates = [found for found in matches if found.fits]
    own = [found for found in matches if not types.isdisjoint(found.recipe.model_types)]
    if not candidates:
        refuse_missing(own)
    first: XrankError | None = None
    # If the recipe of the model's own type knows the names, no other counts: it could prove other shapes of them.
    for found in [found for found in own if found.fits] or candidates:
        try:
            _prove(found, shapes, config)
        except (IncompleteError, ContradictionError) as error:
            first = first or error
        except LayoutError as error:  # fits this recipe, so other recipes' misfits do not prove a loss
            first = error if not isinstance(first, LayoutError) else first
        else:
            return found.recipe.name
    if first is not None:
        raise first
    return None


def _prove(found: Match, shapes: Mapping[str, _Shape], config: Mapping[str, Any] | None) -> None:
    found, told = place_names(found, config, None)
    given = {size: number for size, (number, _) in told.items()}
    sides = list(found.find_sides())
    for side, name in sides:
        if len(shapes[name]) != len(side.dims):
            raise ContradictionError(
                f"{name} does not fit {side}",
                tensor=name,
                got=f"shape {list(shapes[name])}",
                want=f"{len(side.dims)} dims",
                next_step=CHECK_CONFIG,
            )
    solved = solve_lengths(_lengths(found, sides, shapes, given), given)
    if isinstance(solved, Conflict):
        raise _refusal(solved)
    flags = collect_flags(found.recipe, config, None)
    check_names(found, solved, flags)
    _check_given(found, sides, shapes, given, flags)


def _lengths(
    found: Match, sides: list[tuple[Side, str]], shapes: Mapping[str, _Shape], given: Mapping[str, int]
) -> list[DimLength]:
    """Return each kind of dim once per length, without rows that padding may follow: they determine no size."""
    kinds: dict[tuple[int, int, int], DimLength] = {}
    for side, name in sides:
        for dim, (node, length) in enumerate(zip(side.dims, shapes[name], strict=True)):
            if (id(side), dim, length) in kinds:
                continue
            is_padded = not found.is_reversed and dim == 0 and bool({*names_of_dim(node)} & {*found.recipe.padded})
            # Fewer rows than the vocabulary are not padding but a loss, and stay in the equations.
            if is_padded and isinstance(node, Size) and length >= given.get(str(node.value), 0):
                continue
            kinds.setdefault((id(side), dim, length), DimLength(name, dim, node, length))
    return list(kinds.values())


def _refusal(conflict: Conflict) -> XrankError:
    at, others = conflict.at, conflict.others
    if conflict.is_quotient:
        return IncompleteError(
            f"{at.tensor}: no sizes solved its shape with that of {others[0].tensor if others else 'others'}",
            tensor=at.tensor,
            got=" and ".join(str(dim) for dim in (at, *others[:2])),
            want=f"whole sizes, not {conflict.want}",
            next_step=BRING_FILES,
        )
    want = f"{conflict.want}" + (f", as by {' and '.join(map(str, others[:2]))}" if others else " by config.json")
    if at.length > conflict.want and not others:
        return ContradictionError(
            f"{at.tensor} is longer than config.json allows",
            tensor=at.tensor,
            got=str(at),
            want=want,
            next_step=CHECK_CONFIG,
        )
    # A loss only shortens: of two dims that disagree, the shorter one is at fault, not the one that was read last.
    if at.length > conflict.want and len(others) == 1:
        at, others = others[0], (at,)
        want = f"as many as fit {others[0]!s}"
    against = f"{others[0].tensor} requires" if others else "config.json requires"
    return IncompleteError(
        f"{at.tensor} is shorter than {against}: a rank or file is missing",
        tensor=at.tensor,
        got=str(at),
        want=want,
        next_step=BRING_FILES,
    )


def _check_given(
    found: Match,
    sides: list[tuple[Side, str]],
    shapes: Mapping[str, _Shape],
    given: Mapping[str, int],
    flags: Mapping[str, bool],
) -> None:
    """Check that nothing rests on shapes alone: all sizes are given, and so is the flag of each absent tensor.

    Raises:
        LayoutError: a size or a flag is not given.
    """
    open_terms: dict[str, str] = {}  # size or flag -> a tensor that depends on it
    for side, name in sides:
        for size in (size for dim in side.all_dims for size in names_of_dim(dim)):
            if size not in given:
                open_terms.setdefault(size, name)
    used = {number for number, _ in found.used}
    for number in active_rules(found.recipe, found.is_reversed):
        rule = found.recipe.rules[number]
        flag = rule.when if rule.unless is None else rule.unless
        # A model may lack a whole stack of layers of its own, whatever its config.
        if number not in used and flag is not None and rule.within is None and flag not in flags:
            open_terms.setdefault(flag, str(source_sides(rule, found.is_reversed)[0].name))
    if open_terms:
        size, tensor = next(iter(open_terms.items()))
        keys = [repr((found.recipe.config.get(size) or (size,))[0]) for size in open_terms]
        raise LayoutError(
            f"{tensor}: {size!r} follows from the existing pieces alone, and a lost rank may shorten them all alike",
            tensor=tensor,
            got=f"shape {list(shapes[tensor])}" if tensor in shapes else "no file with any of it",
            want=f"config.json with {list_text(keys, 3)}",
        )
    # In reverse, ignored tensors keep their names and are written too.
    loose = next((name for name in found.ignored if shapes[name]), None) if found.is_reversed else None
    if loose is not None:
        raise LayoutError(
            f"{loose}: {found.recipe.name} has no shape for it",
            tensor=loose,
            got=f"shape {list(shapes[loose])}",
            want="a base model with it",
        )
