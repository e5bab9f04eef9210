"""The tensors that a recipe makes of one model: their order, and whether all that the model must have are there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

import numpy as np

from xrank.errors import ContradictionError
from xrank.layout.binding import global_size, names_of_dim
from xrank.layout.tensor_name import TensorName
from xrank.recipes.layer_choice import LayerChoice
from xrank.recipes.matching import Match, active_rules, raised_flags, source_sides
from xrank.recipes.recipe import Recipe, Rule
from xrank.recipes.side import Side, branches_of
from xrank.recipes.sizes import check_counts

_Layers: TypeAlias = Mapping[str, Sequence[LayerChoice]]
"""Group -> the layers that have its blocks, by each origin."""

_Choice: TypeAlias = tuple[int | None, str]
"""A layer, and a choice between kinds of blocks."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A tensor that a recipe may produce."""

    rules: tuple[Rule, ...]
    layer: int | None
    """The first index in its name, if the name has dims."""
    at: tuple[int, int, int]
    """Sort key in the output: embeddings, layer after layer, the rest."""


def list_outcomes(matched: Match, sizes: Mapping[str, int]) -> dict[str, Outcome]:
    """Return every name that the recipe may produce."""
    check_counts(matched.recipe, sizes)
    found: dict[str, Outcome] = {}
    has_begun = False
    for number in active_rules(matched.recipe, matched.is_reversed):
        rule = matched.recipe.rules[number]
        targets = {"": rule.sources[0]} if matched.is_reversed else rule.targets
        for part, side in targets.items():
            has_begun = has_begun or bool(side.name.dims)
            # A size is unknown if no tensor has it: one name then stands for all that may be required.
            known = {**dict.fromkeys((size for dim in side.name.dims for size in names_of_dim(dim)), 1), **sizes}
            for at in _indices_of(side.name, part, known):
                name, layer = side.name.with_indices(*at), at[0] if at else None
                phase = 1 if at else (2 if has_begun else 0)
                before = found.get(name)
                if before is None:
                    found[name] = Outcome((rule,), layer, (phase, layer or 0, number))
                elif rule not in before.rules:
                    found[name] = replace(before, rules=(*before.rules, rule))
    return found


def _indices_of(name: TensorName, part: str, sizes: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    """Yield the indices in the names of a part's tensors: of all of them, if the name has no parts of its own."""
    shape = tuple(global_size(dim, sizes) for dim in name.dims)
    branches = {branch.key: branch for branch in branches_of(Side(name, ()), sizes)}
    branch = branches.get(part, branches.get(""))
    if branch is None:
        yield from product(*map(range, shape))
        return
    for steps in product(*(range(loop.count) for loop in branch.loops)):
        address = branch.start + sum(i * loop.stride for i, loop in zip(steps, branch.loops, strict=True))
        yield tuple(map(int, np.unravel_index(address, shape)))


def check_whole(
    path: str,
    matched: Match,
    outcomes: Mapping[str, Outcome],
    made: Collection[str],
    flags: Mapping[str, bool],
    layers: _Layers,
) -> None:
    """Check that every tensor that the model must have was made, and no other.

    Args:
        path: the source, for errors.
        matched: the match of the recipe with the source's names.
        outcomes: all that the recipe may make.
        made: the names that it made.
        flags: the model's flags, from config.json or the trainer's arguments.
        layers: group -> the layers that have its blocks, by each origin.

    Raises:
        ContradictionError: a tensor is missing, or belongs to another model.
    """
    # Stacks of layers that are numbered apart have one kind of block each, so backwards there is no choice.
    apart = _numbered_apart(matched.recipe) if matched.is_reversed else set()
    groups = _find_groups(path, outcomes, made, layers, apart)
    _check_flags(path, matched, flags)
    used = [matched.recipe.rules[number] for number, _ in matched.used]
    # No flag of a used rule is false here (refused above), so the known flags cannot undo one that tensors raised.
    begun = {id(rule) for rule in used}
    flags = {**dict.fromkeys(raised_flags(matched.recipe, matched.used), True), **flags}
    for name, outcome in outcomes.items():
        if name in made:
            continue
        if any(
            _needs(rule, flags, begun)
            and _is_beside(rule, groups, outcome.layer)
            and (
                id(rule) in begun
                if rule.group is not None and rule.choice in apart
                else _has_group(rule, matched.recipe, groups, layers, outcome.layer)
            )
            for rule in outcome.rules
        ):
            wanted = source_sides(outcome.rules[0], matched.is_reversed)[:3]
            raise ContradictionError(
                f"{name}: nothing in the source becomes it",
                tensor=name,
                file=path,
                got=f"no {' and no '.join(map(str, wanted))}",
                want=f"all that the recipe {matched.recipe.name} makes",
                next_step="check that the checkpoint is whole, and that config.json is this model's",
            )


def _numbered_apart(recipe: Recipe) -> set[str]:
    """Return the choices whose layers have other numbers on the other side."""
    return {
        rule.choice
        for rule in recipe.rules
        if rule.group is not None
        for side in rule.targets.values()
        if side.name.dims[:1] != rule.sources[0].name.dims[:1]
    }


def _check_flags(path: str, matched: Match, flags: Mapping[str, bool]) -> None:
    """Refuse tensors that only models with a flag have, if the flag is false."""
    for (number, _), names in matched.used.items():
        flag = matched.recipe.rules[number].when
        if flag is not None and flags.get(flag) is False:
            raise ContradictionError(
                f"{names[0]} belongs to models with {flag}, and this model is not one",
                tensor=names[0],
                file=path,
                got=f"{len(names)} such tensors",
                want=f"none, because {flag} is false in config.json or the trainer's args",
                next_step="check that config.json is this model's",
            )


def _find_groups(
    path: str, outcomes: Mapping[str, Outcome], made: Iterable[str], layers: _Layers, apart: Collection[str]
) -> dict[_Choice, str]:
    """Return the group of each layer's blocks, for each choice.

    Raises:
        ContradictionError: a layer has blocks of two groups, or of another than `layers` gives it.
    """
    found: dict[_Choice, tuple[str, str]] = {}  # with a tensor of the group
    for name in made:
        layer = outcomes[name].layer
        for rule in outcomes[name].rules:
            if rule.group is None or rule.choice in apart:
                continue
            other = found.setdefault((layer, rule.choice), (rule.group, name))[0]
            if other != rule.group:
                raise ContradictionError(
                    f"layer {layer} has tensors of {' and '.join(sorted((other, rule.group)))} blocks",
                    tensor=name,
                    file=path,
                    want="one kind of block in each layer",
                    next_step="check that the files are those of one model",
                )
    for (number, kind), (group, name) in found.items():
        rivals = [(rival, one) for rival in layers if rival.rpartition(".")[0] == kind for one in layers[rival]]
        for rival, choice in rivals:
            if number is not None and (number in choice) != (rival == group):
                raise ContradictionError(
                    f"{name} is of the group {group}, which layer {number} lacks by {choice.origin}",
                    tensor=name,
                    file=path,
                    got=f"{group} in layer {number}",
                    want=f"{rival} in the {choice.text}",
                    next_step="check that config.json is this model's, and that all files are of one model",
                )
    return {at: group for at, (group, _) in found.items()}


def _has_group(
    rule: Rule,
    recipe: Recipe,
    groups: Mapping[_Choice, str],
    layers: _Layers,
    layer: int | None,
) -> bool:
    """Return whether a layer has, or must have, blocks of the rule's group."""
    if rule.group is None:
        return True
    if (layer, rule.choice) in groups:
        return groups[layer, rule.choice] == rule.group
    # A layer without any block needs those of every group that it may have, so that a wholly lost layer is noticed.
    rivals = {other.group for other in recipe.rules if other.group is not None and other.choice == rule.choice}
    due = {group for group in rivals for choice in layers.get(group, ()) if layer is not None and layer in choice}
    return rule.group in (due or rivals - layers.keys())


def _is_beside(rule: Rule, groups: Mapping[_Choice, str], layer: int | None) -> bool:
    return not rule.beside or any(groups.get((layer, group.rpartition(".")[0])) == group for group in rule.beside)


def _needs(rule: Rule, flags: Mapping[str, bool], begun: set[int]) -> bool:
    """Return whether a model must have the tensors of a rule in a layer with blocks of its group."""
    if rule.within is not None and not flags.get(rule.within, False):
        return False
    if rule.unless is not None:
        return not flags.get(rule.unless, True)
    if rule.when is not None:
        return flags.get(rule.when, False)
    return not rule.optional or id(rule) in begun  # optional tensors exist in all layers or in none
