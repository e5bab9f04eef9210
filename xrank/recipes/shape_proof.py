"""Prove inferred shapes, which no file records: a recipe's symbolic shapes with config.json's sizes must equal them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Any

from xrank.errors import ContradictionError, IncompleteError, LayoutError, XrankError
from xrank.faces import AGAIN, option
from xrank.layout.binding import names_of_dim
from xrank.layout.notation import Size
from xrank.recipes.dim_equations import Conflict, DimLength, SolvedSizes, solve_lengths
from xrank.recipes.layer_rules import place_names
from xrank.recipes.matching import Match, active_rules, is_required, match, raised_flags, source_sides
from xrank.recipes.recipe import Rule
from xrank.recipes.recipe_file import load_recipes_of, load_shipped_recipes
from xrank.recipes.side import Side
from xrank.recipes.sizes import collect_flags, list_model_types
from xrank.words import list_text

__all__ = ["prove_family", "prove_shapes"]

_Shape = tuple[int, ...]
_BRING = f"bring the files of the missing ranks, then {AGAIN}; or give {option('base_model')} to compare with"
_OTHER = f"check that config.json is this model's, or give {option('base_model')}"


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
        _refuse_missing(own)
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


def prove_family(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Refuse a model that lacks tensors, if a recipe of config.json's ``model_type`` knows all of its names.

    For formats that record whole shapes: they record no list of a model's tensors, so a state dict from which some were
    left out reads as a whole model, and transformers gives random values to the rest.

    Args:
        names: Hugging Face's names of all tensors of the model.
        config: the content of config.json.

    Returns:
        Whether a recipe proves that all are there; False: no recipe knows the names.

    Raises:
        IncompleteError, ContradictionError: tensors are missing, or there are more than config.json counts.
    """
    types = list_model_types(config)
    recipes = sorted(load_recipes_of(types), key=lambda recipe: not recipe.args)
    own = [match(one, names, is_reversed=True) for one in recipes]
    first: XrankError | None = None
    for found in (found for found in own if found.fits):
        try:
            found, given = _place_names(found, config)
            _check_names(found, list(_sides(found)), SolvedSizes(given, {}), collect_flags(found.recipe, config, None))
        except (IncompleteError, ContradictionError) as error:
            first = first or error
        else:
            return True
    if first is not None:
        raise first
    _refuse_missing(own)
    return False


def _refuse_missing(own: list[Match]) -> None:
    """Refuse a model that lacks tensors of the recipe of its type, if that recipe knows all of its names."""
    # A few of Hugging Face's own names suffice; those of a trainer, such as norm.weight, may be another one's.
    near = (found for found in own if found.knows_layers or (found.is_reversed and found.used))
    found = next((found for found in near if not found.unknown and found.missing), None)
    if found is not None:
        # A lost file may have held what lies in the model once, but not one kind of all layers.
        is_in_layers = "{" in found.missing[0].partition(" ")[0]
        kind = ContradictionError if is_in_layers else IncompleteError
        raise kind(
            f"{found.missing[0]}: no file holds any of it",
            tensor=found.missing[0].partition(" ")[0],
            got=f"{found.num_known} tensors of {found.recipe.name}",
            want="all of its kinds, because config.json has the model_type of this recipe",
            next_step=_OTHER if is_in_layers else _BRING,
        )


def _place_names(found: Match, config: Mapping[str, Any] | None) -> tuple[Match, dict[str, int]]:
    found, told = place_names(found, config, None)
    return found, {size: number for size, (number, _) in told.items()}


def _describe_whole(found: Match) -> str:
    return f"all tensors of a {' or '.join(found.recipe.model_types)}, as in the recipe {found.recipe.name}"


def _prove(found: Match, shapes: Mapping[str, _Shape], config: Mapping[str, Any] | None) -> None:
    found, given = _place_names(found, config)
    sides = list(_sides(found))
    for side, name in sides:
        if len(shapes[name]) != len(side.dims):
            raise ContradictionError(
                f"{name} does not fit {side}",
                tensor=name,
                got=f"shape {list(shapes[name])}",
                want=f"{len(side.dims)} dims",
                next_step=_OTHER,
            )
    solved = solve_lengths(_lengths(found, sides, shapes, given), given)
    if isinstance(solved, Conflict):
        raise _refusal(solved)
    flags = collect_flags(found.recipe, config, None)
    _check_names(found, sides, solved, flags)
    _check_given(found, sides, shapes, given, flags)


def _sides(found: Match) -> Iterator[tuple[Side, str]]:
    for (number, form), names in found.used.items():
        side = source_sides(found.recipe.rules[number], found.is_reversed)[form]
        for name in names:
            yield side, name


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
            got=" and ".join(_text(dim) for dim in (at, *others[:2])),
            want=f"whole sizes, not {conflict.want}",
            next_step=_BRING,
        )
    want = f"{conflict.want}" + (f", as by {' and '.join(map(_text, others[:2]))}" if others else " by config.json")
    if at.length > conflict.want and not others:
        return ContradictionError(
            f"{at.tensor} is longer than config.json allows",
            tensor=at.tensor,
            got=_text(at),
            want=want,
            next_step=_OTHER,
        )
    # A loss only shortens: of two dims that disagree, the shorter one is at fault, not the one that was read last.
    if at.length > conflict.want and len(others) == 1:
        at, others = others[0], (at,)
        want = f"as many as fit {_text(others[0])}"
    against = f"{others[0].tensor} requires" if others else "config.json requires"
    return IncompleteError(
        f"{at.tensor} is shorter than {against}: a rank or file is missing",
        tensor=at.tensor,
        got=_text(at),
        want=want,
        next_step=_BRING,
    )


def _text(at: DimLength) -> str:
    return f"{at.length} in dim {at.dim} of {at.tensor}"


def _check_names(found: Match, sides: list[tuple[Side, str]], solved: SolvedSizes, flags: Mapping[str, bool]) -> None:
    """Check that no index exceeds its size, and that every layer has all tensors of its kind of block."""
    indices: dict[str, dict[str, int]] = {}
    largest: dict[str, tuple[int, str]] = {}
    for side, name in sides:
        for dim, index in zip(side.name.dims, side.name.indices(name) or (), strict=True):
            size = str(dim.value) if isinstance(dim, Size) else str(dim)
            indices.setdefault(name, {})[size] = index
            if size not in largest or index > largest[size][0]:
                largest[size] = index, name
    for size, (index, name) in largest.items():
        if index >= solved.sizes.get(size, index + 1):
            origins = solved.origins.get(size, ())
            kind = IncompleteError if origins else ContradictionError
            raise kind(
                f"{name} is one of more than {size} = {solved.sizes[size]}",
                tensor=name,
                got=f"the index {index}",
                want=f"less than {solved.sizes[size]}" + (f", as by {_text(origins[0])}" if origins else ""),
                next_step=_BRING if origins else _OTHER,
            )
    sizes = {**{size: index + 1 for size, (index, _) in largest.items()}, **solved.sizes}
    covered, groups = _find_covered(found, indices, sizes)
    rules = found.recipe.rules
    choices = {rule.group: rule.choice for rule in rules if rule.group is not None}
    for choice in {choices[group] for group in groups}:
        rivals = sorted(group for group in groups if choices[group] == choice)
        blocks = {layer for group in rivals for layer in groups[group]}
        bare = next((i for i in range(sizes.get("L", 0)) if (i,) not in blocks), None)
        if bare is not None:
            raise IncompleteError(
                f"layer {bare}: no file holds any of {' or '.join(rivals)}",
                got=f"layers with one of them: {len(blocks)} of {sizes['L']}",
                want=_describe_whole(found),
                next_step=_BRING,
            )
    raised = raised_flags(found.recipe, found.used)
    for number in active_rules(found.recipe, found.is_reversed):
        rule = rules[number]
        # A model has the tensors of an optional rule in all layers or in none.
        is_begun = any(str(target) in covered for target in rule.targets.values())
        is_due = is_required(rule) or _is_due(rule, flags) or rule.when in raised
        if is_begun or (is_due and rule.within in (None, *raised)):
            _check_covered(found, rule, sizes, covered, groups)


def _check_covered(
    found: Match,
    rule: Rule,
    sizes: Mapping[str, int],
    covered: Mapping[str, set[_Shape]],
    groups: Mapping[str, set[_Shape]],
) -> None:
    """Check that the targets of a rule are covered at all indices, or in all layers of the rule's group."""
    for target in rule.targets.values():
        names = [str(dim.value) for dim in target.name.dims if isinstance(dim, Size)]
        for at in product(*(range(sizes.get(name, 0)) for name in names)):
            in_group = rule.group is None or at[:1] in groups.get(rule.group, set())
            if not in_group or at in covered.get(str(target), set()):
                continue
            wanted = target.name if found.is_reversed else rule.sources[0].name
            place = ", ".join(f"{n} = {i}" for n, i in zip(names, at, strict=True))
            lost = str(wanted.with_indices(*at) if len(wanted.dims) == len(at) else wanted)
            raise IncompleteError(
                f"{lost}: no file holds any of it",
                tensor=lost,
                got=f"other tensors of {place}" if at else None,
                want=_describe_whole(found),
                next_step=_BRING,
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


def _is_due(rule: Rule, flags: Mapping[str, bool]) -> bool:
    if rule.unless is not None:
        return flags.get(rule.unless) is False
    return rule.when is not None and flags.get(rule.when) is True


def _find_covered(
    found: Match, indices: Mapping[str, Mapping[str, int]], sizes: Mapping[str, int]
) -> tuple[dict[str, set[_Shape]], dict[str, set[_Shape]]]:
    """Return target -> the indices in its name with a tensor, and group -> the layers with tensors of the group."""
    covered: dict[str, set[_Shape]] = {}
    groups: dict[str, set[_Shape]] = {}
    for (number, form), names in found.used.items():
        rule = found.recipe.rules[number]
        targets = source_sides(rule, True)
        for target in targets[form : form + 1] if found.is_reversed else targets:
            dims = [str(dim.value) for dim in target.name.dims if isinstance(dim, Size)]
            for name in names:
                own = indices.get(name, {})
                # A dim that is not in the name is a dim of the tensor, which has all of its indices.
                ranges = [(own[dim],) if dim in own else range(sizes.get(dim, 0)) for dim in dims]
                covered.setdefault(str(target), set()).update(product(*ranges))
            if rule.group is not None:
                groups.setdefault(rule.group, set()).update(at[:1] for at in covered[str(target)])
    return covered, groups
