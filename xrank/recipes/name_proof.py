"""Prove that a model has all of its tensors: a recipe knows their names, and config.json or the names count them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product
from typing import Any

from xrank.errors import AGAIN, ContradictionError, IncompleteError, XrankError, option
from xrank.layout.binding import global_size, names_of_dim
from xrank.layout.notation import Size
from xrank.recipes.dim_equations import SolvedSizes
from xrank.recipes.layer_rules import place_names
from xrank.recipes.matching import Match, active_rules, is_required, match, raised_flags, source_sides
from xrank.recipes.recipe import Rule
from xrank.recipes.recipe_file import load_recipes_of
from xrank.recipes.sizes import check_counts, collect_flags, list_model_types

_Indices = tuple[int, ...]
BRING_FILES = f"bring the files of the missing ranks, then {AGAIN}; or give {option('base_model')} to compare with"
CHECK_CONFIG = f"check that config.json is this model's, or give {option('base_model')}"


def prove_family(
    names: Collection[str], config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> bool:
    """Refuse a model that lacks tensors, if a recipe of config.json's ``model_type`` knows all of its names.

    For formats that record whole shapes: they record no list of a model's tensors, so a state dict from which some were
    left out reads as a whole model, and transformers gives random values to the rest.

    Args:
        names: Hugging Face's names of all tensors of the model.
        config: the content of config.json.
        shapes: shapes of those tensors that config.json sizes; each must be the one that the recipe gives.

    Returns:
        Whether a recipe proves that all are there; False: no recipe knows the names.

    Raises:
        IncompleteError, ContradictionError: tensors are missing, or there are more than config.json counts, or they
            have other sizes.
    """
    types = list_model_types(config)
    recipes = sorted(load_recipes_of(types), key=lambda recipe: not recipe.args)
    own = [match(one, names, is_reversed=True) for one in recipes]
    first: XrankError | None = None
    for found in (found for found in own if found.fits):
        try:
            found, told = place_names(found, config, None)
            given = {size: number for size, (number, _) in told.items()}
            check_names(found, SolvedSizes(given, {}), collect_flags(found.recipe, config, None))
            _check_sizes(found, shapes or {}, told)
        except (IncompleteError, ContradictionError) as error:
            first = first or error
        else:
            return True
    if first is not None:
        raise first
    refuse_missing(own)
    return False


def _check_sizes(found: Match, shapes: Mapping[str, tuple[int, ...]], told: Mapping[str, tuple[int, str]]) -> None:
    """Refuse a shape that is not the recipe's, with the sizes that config.json has; rows of a vocabulary may be padded.

    Layers of different sizes (``by_layer``) are not compared.
    """
    sizes = {size: number for size, (number, _) in told.items()}
    sides = () if found.recipe.by_layer else found.find_sides()
    for side, name in sides:
        shape = shapes.get(name, ())
        for dim, (node, length) in enumerate(zip(side.dims, shape, strict=False)):
            names = names_of_dim(node)
            if not set(names) <= sizes.keys() - set(found.recipe.padded) or len(shape) != len(side.dims):
                continue
            want = global_size(node, sizes)
            if length != want:
                keys = [(found.recipe.config.get(size) or (size,))[0] for size in dict.fromkeys(names)]
                by = " and ".join(
                    f"{key} = {sizes[size]}" for key, size in zip(keys, dict.fromkeys(names), strict=True)
                )
                raise ContradictionError(
                    f"{' or '.join(keys)} in config.json is not that of the tensors, such as {name}",
                    tensor=name,
                    got=f"{length} in dim {dim} of {name}",
                    want=f"{want}, by {by}",
                    next_step=CHECK_CONFIG,
                )


def refuse_missing(own: list[Match]) -> None:
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
            next_step=CHECK_CONFIG if is_in_layers else BRING_FILES,
        )


def _describe_whole(found: Match) -> str:
    return f"all tensors of a {' or '.join(found.recipe.model_types)}, as in the recipe {found.recipe.name}"


def check_names(found: Match, solved: SolvedSizes, flags: Mapping[str, bool]) -> None:
    """Check that no index exceeds its size, and that every layer has all tensors of its kind of block.

    Args:
        found: a match, in which each name is at its own place.
        solved: the known sizes.
        flags: the known flags.

    Raises:
        IncompleteError, ContradictionError: a layer lacks tensors, or there are more layers than config.json counts.
    """
    indices, counts = _count_indices(found, solved)
    sizes = {**counts, **solved.sizes}
    check_counts(found.recipe, sizes)
    covered, groups = _find_covered(found, indices, sizes)
    _check_blocks(found, sizes, groups)
    raised = raised_flags(found.recipe, found.used)
    for number in active_rules(found.recipe, found.is_reversed):
        rule = found.recipe.rules[number]
        # A model has the tensors of an optional rule in all layers or in none.
        is_begun = any(str(target) in covered for target in rule.targets.values())
        is_due = is_required(rule) or _is_due(rule, flags) or rule.when in raised
        if is_begun or (is_due and rule.within in (None, *raised)):
            _check_covered(found, rule, sizes, covered, groups)


def _count_indices(found: Match, solved: SolvedSizes) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Return name -> its index in each dim of the name, and dim -> the number of indices that the names need."""
    indices: dict[str, dict[str, int]] = {}
    largest: dict[str, tuple[int, str]] = {}
    for side, name in found.find_sides():
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
                want=f"less than {solved.sizes[size]}" + (f", as by {origins[0]}" if origins else ""),
                next_step=BRING_FILES if origins else CHECK_CONFIG,
            )
    return indices, {size: index + 1 for size, (index, _) in largest.items()}


def _check_blocks(found: Match, sizes: Mapping[str, int], groups: Mapping[str, set[_Indices]]) -> None:
    """Check that each layer has a block of each choice, such as a dense or a sparse one."""
    rules = [rule for rule in found.recipe.rules if rule.group in groups]
    for choice in {(rule.within, rule.choice) for rule in rules}:
        own = [rule for rule in rules if (rule.within, rule.choice) == choice]
        rivals = sorted({str(rule.group) for rule in own})
        blocks = {layer for group in rivals for layer in groups[group]}
        layers = next(iter(own[0].targets.values())).name.dims[:1]
        # The layers that count on from others are counted with them.
        count = sizes.get(str(layers[0].value), 0) if layers and isinstance(layers[0], Size) else 0
        bare = next((layer for layer in range(count) if (layer,) not in blocks), None)
        if bare is not None:
            raise IncompleteError(
                f"layer {bare}: no file holds any of {' or '.join(rivals)}",
                got=f"layers with one of them: {len(blocks)} of {count}",
                want=_describe_whole(found),
                next_step=BRING_FILES,
            )


def _check_covered(
    found: Match,
    rule: Rule,
    sizes: Mapping[str, int],
    covered: Mapping[str, set[_Indices]],
    groups: Mapping[str, set[_Indices]],
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
                next_step=BRING_FILES,
            )


def _is_due(rule: Rule, flags: Mapping[str, bool]) -> bool:
    if rule.unless is not None:
        return flags.get(rule.unless) is False
    return rule.when is not None and flags.get(rule.when) is True


def _find_covered(
    found: Match, indices: Mapping[str, Mapping[str, int]], sizes: Mapping[str, int]
) -> tuple[dict[str, set[_Indices]], dict[str, set[_Indices]]]:
    """Return target -> the indices in its name with a tensor, and group -> the layers with tensors of the group."""
    covered: dict[str, set[_Indices]] = {}
    groups: dict[str, set[_Indices]] = {}
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
