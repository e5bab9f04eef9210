"""Proof of shapes that no format records: they are what config.json's sizes make of a recipe's, or are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from xrank.errors import ContradictionError, IncompleteError, LayoutError, XrankError
from xrank.faces import AGAIN, option
from xrank.layout.binding import names_of_dim
from xrank.layout.notation import Size
from xrank.recipes.dim_equations import Conflict, DimLength, SolvedSizes, solve_lengths
from xrank.recipes.matching import Match, active_rules, froms, is_required, match
from xrank.recipes.recipe import Rule
from xrank.recipes.recipe_file import shipped_recipes
from xrank.recipes.side import Side
from xrank.recipes.sizes import flags_of, told_sizes
from xrank.words import list_text

__all__ = ["prove_shapes"]

_Shape = tuple[int, ...]
_BRING = f"bring the files of the missing ranks, then {AGAIN}; or give {option('base_model')} to compare with"
_OTHER = f"check that config.json is this model's, or give {option('base_model')}"


def prove_shapes(shapes: Mapping[str, _Shape], config: Mapping[str, Any] | None = None) -> str | None:
    """Return the name of a recipe whose symbolic shapes, by config.json's sizes, are these; None if none knows them.

    For formats that record no global shapes, where these are inferred from the pieces that are there: a piece that is
    missing at the end of a tensor makes it shorter. Sizes that shapes alone tell prove nothing: the loss of a last rank
    may shorten all tensors alike, vocabulary, heads and blocks, and still solve to one set of sizes. So config must say
    every size, of dims and of indices in names; that some sizes contradict each other is evidence without it. The names
    may be Hugging Face's or a training framework's. Every layer that config counts must be whole.

    Args:
        shapes: name -> inferred global shape, all tensors of the model.
        config: config.json's content, if it is known.

    Returns:
        The recipe's name, or None: no recipe knows all of the names, and nothing is proven. The caller then asks for
        a base model or refuses.

    Raises:
        IncompleteError: a tensor is shorter than others or the config say, or is not there at all; both are named.
        ContradictionError: a tensor is longer than the config says, or has another number of dims.
        LayoutError: nothing contradicts the shapes, and config does not say all sizes.
    """
    matches = [match(recipe, shapes, is_reversed=back) for recipe in shipped_recipes() for back in (True, False)]
    candidates = [found for found in matches if found.fits]
    model_type = (config or {}).get("model_type")
    own = [found for found in matches if model_type in found.recipe.model_types]
    if not candidates:
        _refuse_missing(own)
    first: XrankError | None = None
    for found in [found for found in own if found.fits] or candidates:
        try:
            _prove(found, shapes, config)
        except (IncompleteError, ContradictionError) as error:
            first = first or error
        except LayoutError as error:  # what fits one recipe is no evidence of a loss, whatever it is to others
            first = error if not isinstance(first, LayoutError) else first
        else:
            return found.recipe.name
    if first is not None:
        raise first
    return None


def _refuse_missing(own: list[Match]) -> None:
    """Refuse a model whose names a recipe of its type knows, all of them, and which lacks some."""
    found = next((found for found in own if found.knows_layers and not found.unknown and found.missing), None)
    if found is not None:
        raise IncompleteError(
            f"{found.missing[0]}: no file holds any of it",
            tensor=found.missing[0].partition(" ")[0],
            got=f"{found.num_known} tensors of {found.recipe.name}",
            want="all of its kinds, for config.json says that it is such a model",
            next_step=_BRING,
        )


def _prove(found: Match, shapes: Mapping[str, _Shape], config: Mapping[str, Any] | None) -> None:
    told = {size: number for size, (number, _) in told_sizes(found.recipe, config, None).items()}
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
    solved = solve_lengths(_lengths(found, sides, shapes, told), told)
    if isinstance(solved, Conflict):
        raise _refusal(solved)
    flags = flags_of(found.recipe, config, None)
    _check_names(found, sides, solved, flags)
    _check_told(found, sides, shapes, told, flags)


def _sides(found: Match) -> Iterator[tuple[Side, str]]:
    for (number, form), names in found.used.items():
        side = froms(found.recipe.rules[number], found.is_reversed)[form]
        for name in names:
            yield side, name


def _lengths(
    found: Match, sides: list[tuple[Side, str]], shapes: Mapping[str, _Shape], told: Mapping[str, int]
) -> list[DimLength]:
    """Return each kind of dim once for each of its lengths; rows that may be followed by padding say nothing."""
    kinds: dict[tuple[int, int, int], DimLength] = {}
    for side, name in sides:
        for dim, (node, length) in enumerate(zip(side.dims, shapes[name], strict=True)):
            if (id(side), dim, length) in kinds:
                continue
            is_padded = not found.is_reversed and dim == 0 and bool({*names_of_dim(node)} & {*found.recipe.padded})
            if is_padded and isinstance(node, Size) and length >= told.get(str(node.value), 0):
                continue
            kinds.setdefault((id(side), dim, length), DimLength(name, dim, node, length))
    return list(kinds.values())


def _refusal(conflict: Conflict) -> XrankError:
    at, others = conflict.at, conflict.others
    if conflict.is_quotient:
        return IncompleteError(
            f"{at.tensor}: no sizes solve its shape with that of {others[0].tensor if others else 'others'}",
            tensor=at.tensor,
            got=" and ".join(_text(dim) for dim in (at, *others[:2])),
            want=f"whole sizes, not {conflict.want}",
            next_step=_BRING,
        )
    want = f"{conflict.want}" + (f", as by {' and '.join(map(_text, others[:2]))}" if others else " by config.json")
    if at.length > conflict.want and not others:
        return ContradictionError(
            f"{at.tensor} is longer than config.json says",
            tensor=at.tensor,
            got=_text(at),
            want=want,
            next_step=_OTHER,
        )
    if at.length > conflict.want and len(others) == 1:
        at, others = others[0], (at,)
        want = f"as many as fit {_text(others[0])}"
    against = f"{others[0].tensor} has it" if others else "config.json says"
    return IncompleteError(
        f"{at.tensor} is shorter than {against}: a rank or file is missing",
        tensor=at.tensor,
        got=_text(at),
        want=want,
        next_step=_BRING,
    )


def _text(at: DimLength) -> str:
    return f"{at.length} in dim {at.dim} of {at.tensor}"


def _check_names(
    found: Match,
    sides: list[tuple[Side, str]],
    solved: SolvedSizes,
    flags: Mapping[str, bool],
) -> None:
    """Check that the tensors that names count are all there, in every layer of their kind of block."""
    counts: dict[str, int] = {}
    at_most: dict[str, str] = {}
    indices: dict[str, dict[str, int]] = {}
    for side, name in sides:
        for dim, index in zip(side.name.dims, side.name.indices(name) or (), strict=True):
            size = str(dim.value) if isinstance(dim, Size) else str(dim)
            indices.setdefault(name, {})[size] = index
            if index >= counts.get(size, 0):
                counts[size], at_most[size] = index + 1, name
    for size, count in counts.items():
        if count > solved.sizes.get(size, count):
            origins = solved.origins.get(size, ())
            kind = IncompleteError if origins else ContradictionError
            raise kind(
                f"{at_most[size]} is one of more than {size} = {solved.sizes[size]}",
                tensor=at_most[size],
                got=f"the index {count - 1}",
                want=f"less than {solved.sizes[size]}" + (f", as by {_text(origins[0])}" if origins else ""),
                next_step=_BRING if origins else _OTHER,
            )
    sizes = {**counts, **solved.sizes}
    rules = found.recipe.rules
    covered, groups = _covered(found, indices, sizes)
    blocks = {layer for layers in groups.values() for layer in layers}
    bare = next((i for i in range(sizes.get("L", 0)) if (i,) not in blocks), None) if groups else None
    if bare is not None:
        raise IncompleteError(
            f"layer {bare}: no file holds any of {' or '.join(sorted(groups))}",
            got=f"layers with one of them: {len(blocks)} of {sizes['L']}",
            want=f"all tensors of {found.recipe.name}",
            next_step=_BRING,
        )
    raised = {rules[number].when for number, _ in found.used} - {None}
    for number in active_rules(found.recipe, found.is_reversed):
        rule = rules[number]
        begun = any(str(target) in covered for target in rule.targets.values())
        if not (begun or is_required(rule) or _says(rule, flags) or rule.when in raised):
            continue
        for target in rule.targets.values():
            names = [str(dim.value) for dim in target.name.dims if isinstance(dim, Size)]
            for at in product(*(range(sizes.get(name, 0)) for name in names)):
                in_group = rule.group is None or at[:1] in groups.get(rule.group, set())
                if in_group and at not in covered.get(str(target), set()):
                    wanted = target.name if found.is_reversed else rule.sources[0].name
                    raise IncompleteError(
                        f"{wanted.at(*at) if len(wanted.dims) == len(at) else wanted}: no file holds any of it",
                        tensor=str(wanted),
                        got=f"other tensors of {', '.join(f'{n} = {i}' for n, i in zip(names, at, strict=True))}"
                        if at
                        else None,
                        want=f"all tensors of {found.recipe.name}",
                        next_step=_BRING,
                    )


def _check_told(
    found: Match,
    sides: list[tuple[Side, str]],
    shapes: Mapping[str, _Shape],
    told: Mapping[str, int],
    flags: Mapping[str, bool],
) -> None:
    """Check that nothing rests on shapes alone: every size was told, and whether tensors that are not there should be.

    Raises:
        LayoutError: something does.
    """
    untold: dict[str, str] = {}  # size or flag -> a tensor that rests on it
    for side, name in sides:
        for size in (size for dim in side.all_dims for size in names_of_dim(dim)):
            if size not in told:
                untold.setdefault(size, name)
    used = {number for number, _ in found.used}
    for number in active_rules(found.recipe, found.is_reversed):
        rule = found.recipe.rules[number]
        flag = rule.when if rule.unless is None else rule.unless
        if number not in used and flag is not None and flag not in flags:
            untold.setdefault(flag, str(froms(rule, found.is_reversed)[0].name))
    if untold:
        size, tensor = next(iter(untold.items()))
        keys = [repr(found.recipe.config.get(size, (size,))[0]) for size in untold]
        raise LayoutError(
            f"{tensor}: {size!r} is known by the pieces that are there alone, and a lost rank may shorten all alike",
            tensor=tensor,
            got=f"shape {list(shapes[tensor])}" if tensor in shapes else "no file with any of it",
            want=f"config.json with {list_text(keys, 3)}",
        )
    # Names that are ignored stay where names stay.
    loose = next((name for name in found.ignored if shapes[name]), None) if found.is_reversed else None
    if loose is not None:
        raise LayoutError(
            f"{loose}: {found.recipe.name} does not say its shape",
            tensor=loose,
            got=f"shape {list(shapes[loose])}",
            want="a base model with it",
        )


def _says(rule: Rule, flags: Mapping[str, bool]) -> bool:
    if rule.unless is not None:
        return flags.get(rule.unless) is False
    return rule.when is not None and flags.get(rule.when) is True


def _covered(
    found: Match, indices: Mapping[str, Mapping[str, int]], sizes: Mapping[str, int]
) -> tuple[dict[str, set[_Shape]], dict[str, set[_Shape]]]:
    """Return target -> the indices in its name that tensors are there for; and group -> the layers that it is in."""
    covered: dict[str, set[_Shape]] = {}
    groups: dict[str, set[_Shape]] = {}
    for (number, form), names in found.used.items():
        rule = found.recipe.rules[number]
        targets = froms(rule, True)
        for target in targets[form : form + 1] if found.is_reversed else targets:
            dims = [str(dim.value) for dim in target.name.dims if isinstance(dim, Size)]
            for name in names:
                own = indices.get(name, {})
                # A dim that is not in the name is one of the tensor's own: all of its indices are there.
                ranges = [(own[dim],) if dim in own else range(sizes.get(dim, 0)) for dim in dims]
                covered.setdefault(str(target), set()).update(product(*ranges))
            if rule.group is not None:
                groups.setdefault(rule.group, set()).update(at[:1] for at in covered[str(target)])
    return covered, groups
