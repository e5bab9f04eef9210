"""Selects the model's tensors in what a trainer saved, which has optimizer, counters or further models beside it.

The keys of the saved, nested dict identify them: ``{"model": …, "optim": …}``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import Any, TypeAlias

from xrank.errors import UsageError, either, option
from xrank.formats.regular_file import quote
from xrank.readers.saved_keys import (
    MODELS,
    MOMENTS,
    OPTIMIZER_KEYS,
    OPTIMIZERS,
    WRAPPERS,
    is_left_out,
    names_of_optimizers,
)
from xrank.readers.wrapper_names import strip_wrappers
from xrank.words import list_text, plural, size_text

_Path: TypeAlias = tuple[str | int, ...]

_MAX_SHOWN = 12


@dataclass(frozen=True, slots=True, eq=False)
class SavedTree:
    """A nested dict of tensors and other values, by flat names."""

    path: str
    """The file that contains it, for errors."""
    shapes: Mapping[str, tuple[int, ...]]
    """Flat name of each tensor -> its shape."""
    values: Collection[str]
    """Flat names of values that are not tensors."""
    paths: Mapping[str, _Path]
    """Flat name -> all keys that lead to it; a missing one is a single key."""
    count_bytes: Callable[[str], int]
    """Returns the bytes of a tensor by its flat name."""
    pickled: Collection[str] = ()
    """Flat names of values that a planner pickled whole, which may contain a model."""


@dataclass(frozen=True, slots=True)
class TopPart:
    """Summary of the tensors under one key."""

    key: str
    num_tensors: int
    nbytes: int
    is_model: bool


@dataclass(frozen=True, slots=True, eq=False)
class ModelPart:
    """The model's tensors, and summaries of the other parts."""

    tensors: Mapping[str, str]
    """The model's own names -> flat names."""
    prefix: tuple[str, ...]
    """The keys that lead to the model."""
    parts: tuple[TopPart, ...]
    values: Mapping[str, str]
    """Values beside them that are not tensors: name -> flat name."""


@dataclass(frozen=True, slots=True, eq=False)
class _Branch:
    """The content under some keys, by flat names."""

    keys: tuple[str, ...]
    tensors: Sequence[str]
    values: Sequence[str]
    """Flat names of values that are not tensors."""
    paths: Mapping[str, _Path]
    """Flat name -> all keys that lead to it, from the top."""

    @property
    def key(self) -> str:
        """The last key."""
        return self.keys[-1]

    @property
    def name(self) -> str:
        """All keys, as the user names a part."""
        return ".".join(self.keys)

    def is_nested(self) -> bool:
        """Return whether further keys lead to all of it, so that it is a dict or a list."""
        return all(len(self.paths[name]) > len(self.keys) for name in (*self.tensors, *self.values))

    def is_state_dict(self) -> bool:
        """Return whether one further key leads to each tensor; a module's state dict is not nested."""
        return all(len(self.paths[name]) == len(self.keys) + 1 for name in self.tensors)

    def split(self) -> list[_Branch]:
        """Return a branch for each next key."""
        tensors, values = self._group_by_key(self.tensors), self._group_by_key(self.values)
        keys = dict.fromkeys([*tensors, *values])
        return [_Branch((*self.keys, k), tensors.get(k, ()), values.get(k, ()), self.paths) for k in keys]

    def _group_by_key(self, names: Iterable[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(str(self.paths[name][len(self.keys)]), []).append(name)
        return found

    def strip_keys(self, names: Iterable[str]) -> dict[str, str]:
        """Return names without this branch's keys -> flat names."""
        return {".".join(map(str, self.paths[name][len(self.keys) :])): name for name in names}


def select_model(tree: SavedTree, wanted: str | None = None) -> ModelPart:
    """Return the model's tensors, named without the keys that lead to them.

    The search starts at the top, or at the wanted part, and leaves out branches of optimizers and trainers. If a branch
    leads to the model, it follows that branch and leaves out the others. Without a branch to follow, the remaining
    tensors are the model.

    Args:
        tree: what was saved.
        wanted: the keys that lead to a part, joined by dots; None: the only part that may be the model.

    Raises:
        UsageError: no part, or more than one part, may be the model; or there is no such part.
    """
    paths = {name: tree.paths.get(name, (name,)) for name in (*tree.shapes, *tree.values)}
    of_optimizers = names_of_optimizers(paths)
    top = here = _Branch((), list(tree.shapes), list(tree.values), paths)
    parts: list[TopPart] = []
    if wanted is not None:
        here = _find_part(tree, here, wanted)
        parts += [_summarise(tree, each.keys, each.tensors) for each in _list_beside(top, here)]
    is_model = wanted is not None and here.is_state_dict()
    while not is_model:
        inner = here.split()
        rest = [branch for branch in inner if not is_left_out(branch.key)]
        kept = _candidates(tree, rest, of_optimizers)
        followed = _choose_branch(tree, here, kept, of_optimizers)
        chosen = frozenset(kept if followed is None else [followed])
        parts += [_summarise(tree, each.keys, each.tensors) for each in inner if each.tensors and each not in chosen]
        is_model = followed is None or followed.key in MODELS or followed.is_state_dict()
        here = followed or _Branch(
            here.keys,
            [name for branch in kept for name in branch.tensors],
            [name for branch in rest for name in branch.values],
            paths,
        )
    own = [name for name in here.tensors if name not in of_optimizers]
    if not own:
        raise _missing_model_error(tree, [branch.key for branch in top.split() if branch.tensors])
    if states := [name for name in here.tensors if name in of_optimizers]:
        parts.append(_summarise(tree, (*here.keys, "state"), states))
    tensors = here.strip_keys(own)
    values = here.strip_keys(name for name in here.values if name not in of_optimizers)
    model = _summarise(tree, here.keys, list(tensors.values()), is_model=True)
    return ModelPart(MappingProxyType(tensors), here.keys, (model, *parts), MappingProxyType(values))


def part_details(part: ModelPart) -> dict[str, Any]:
    """Return the parts as facts for `inspect`."""
    return {"parts": {each.key or "(all)": _describe(each) for each in part.parts}, "prefix": ".".join(part.prefix)}


def part_notes(part: ModelPart) -> list[tuple[str, str]]:
    """Return the note about parts that are left out, if there are any."""
    left = [f"{other.key} ({other.num_tensors:,})" for other in part.parts if not other.is_model]
    return [("left-out", f"tensors that are not the model's were left out: {list_text(left, _MAX_SHOWN)}")] * bool(left)


def _describe(part: TopPart) -> str:
    text = f"{plural(part.num_tensors, 'tensor')} in {size_text(part.nbytes)}"
    return text if part.is_model else f"left out: {text}"


def _find_part(tree: SavedTree, top: _Branch, wanted: str) -> _Branch:
    """Return the branch of this name.

    Raises:
        UsageError: there is none.
    """
    here = top
    while here.name != wanted:
        nested = [branch for branch in here.split() if branch.tensors and branch.is_nested()]
        fitting = [branch for branch in nested if f"{wanted}.".startswith(f"{branch.name}.")]
        if not fitting:
            names = [f"{quote(branch.name)[1:-1]} ({plural(len(branch.tensors), 'tensor')})" for branch in nested]
            raise UsageError(
                f"{tree.path}: this checkpoint has no part {quote(wanted)}",
                file=tree.path,
                got=list_text(names, _MAX_SHOWN, empty="tensors that are not in parts"),
                want=option("part", wanted),
                next_step=f"choose one of them with {option('part')}" if nested else f"leave {option('part')} out",
            )
        here = max(fitting, key=lambda branch: len(branch.name))
    return here


def _list_beside(top: _Branch, chosen: _Branch) -> Iterator[_Branch]:
    """Yield the branches with tensors beside the keys that lead to a branch."""
    here = top
    while here.keys != chosen.keys:
        inner = {branch.keys: branch for branch in here.split()}
        here = inner.pop(chosen.keys[: len(here.keys) + 1])
        yield from (branch for branch in inner.values() if branch.tensors)


def _candidates(tree: SavedTree, branches: Iterable[_Branch], of_optimizers: Collection[str]) -> list[_Branch]:
    """Return the branches that may be the model or a piece of it.

    A list of tensors beside a model, as exponential moving averages are kept, gives them no names and is not one.
    """
    kept = [branch for branch in branches if branch.tensors and not _is_optimizer(branch, of_optimizers)]
    named = [branch for branch in kept if not _is_list(branch)]
    return named if any(branch.is_nested() and _has_matrix(tree, branch.tensors) for branch in named) else kept


def _is_list(branch: _Branch) -> bool:
    return branch.key not in MODELS and all(type(branch.paths[name][-1]) is int for name in branch.tensors)


def _is_optimizer(branch: _Branch, of_optimizers: Collection[str]) -> bool:
    """Return whether all tensors under a key belong to an optimizer."""
    if not branch.is_nested():
        return False
    state = tuple(".".join((*branch.keys, key, "")) for key in OPTIMIZER_KEYS)
    has_moment = any(name.rpartition(".")[2] in MOMENTS for name in branch.tensors)
    if has_moment and all(name.startswith(state) for name in branch.tensors):
        return True
    # A model's key is not skipped for its neighbours: the search follows it and reports that it contains no model.
    return branch.key not in MODELS and all(name in of_optimizers for name in branch.tensors)


def _choose_branch(
    tree: SavedTree, here: _Branch, kept: Sequence[_Branch], of_optimizers: Collection[str]
) -> _Branch | None:
    """Return the branch that leads to the model, alone or with more; None if the branches together are the model.

    Raises:
        UsageError: more than one may be the model.
    """
    nested = [branch for branch in kept if branch.is_nested()]
    models = [branch for branch in nested if branch.key in MODELS]
    # Single tensors beside a model, and parts without a matrix, are counters, seeds and positions.
    others = [branch for branch in nested if branch not in models and _has_matrix(tree, branch.tensors)]
    if models:
        if len(models) + len(others) > 1:
            raise _several_models_error(tree, [*models, *others])
        return models[0]
    loose = _Branch(
        here.keys, [name for branch in kept if branch not in nested for name in branch.tensors], (), here.paths
    )
    copies = _list_copies([*others, *([loose] if others and _has_matrix(tree, loose.tensors) else [])])
    if copies:
        raise _several_models_error(tree, copies)
    # A scalar beside a state dict is a loss, a seed or a counter.
    if len(nested) != 1 or any(tree.shapes[name] for name in loose.tensors):
        return None
    return nested[0] if _is_wrapper(nested[0]) or _leads_to_one(tree, nested[0], of_optimizers) else None


def _leads_to_one(tree: SavedTree, branch: _Branch, of_optimizers: Collection[str]) -> bool:
    """Return whether a branch is one state dict, or contains one and nothing more of a model."""
    if branch.is_state_dict():
        return True
    inner = [each for each in branch.split() if not is_left_out(each.key)]
    kept = _candidates(tree, inner, of_optimizers)
    return len(kept) == 1 and kept[0].is_nested() and _leads_to_one(tree, kept[0], of_optimizers)


def _list_copies(branches: Sequence[_Branch]) -> list[_Branch]:
    """Return the branches of which another one has at least half of the names, as copies of one model have.

    Only modules with submodules count, whose names have dots: layers of one model have equal names, too, where a
    nested dict contains them.
    """
    names = [frozenset(map(strip_wrappers, branch.strip_keys(branch.tensors))) for branch in branches]
    copies = {
        index
        for pair in combinations(range(len(branches)), 2)
        for index in pair
        if 2 * len(names[pair[0]] & names[pair[1]]) >= min(len(names[pair[0]]), len(names[pair[1]]))
        and all(branches[each].is_state_dict() and any("." in name for name in names[each]) for each in pair)
    }
    return [branches[index] for index in sorted(copies)]


def _is_wrapper(branch: _Branch) -> bool:
    """Return whether a key leads to a model and more: by its name, or because both a model and an optimizer follow."""
    inner = {each.key for each in branch.split() if each.is_nested()}
    return branch.key in WRAPPERS or (not inner.isdisjoint(MODELS) and not inner.isdisjoint(OPTIMIZERS))


def _missing_model_error(tree: SavedTree, children: Iterable[str]) -> UsageError:
    pickled = [f"{name}, pickled whole" for name in tree.pickled if name in MODELS]
    return UsageError(
        f"{tree.path}: this checkpoint contains no model",
        file=tree.path,
        got=list_text([*pickled, *sorted(quote(key)[1:-1] for key in children)], 10, empty="no tensor at all"),
        want="tensors that belong to no optimizer and no trainer",
        next_step="load and save it with torch's default planner, without flatten_state_dict=False"
        if pickled
        else "give the path to which the model was saved",
    )


def _several_models_error(tree: SavedTree, parts: Sequence[_Branch]) -> UsageError:
    named = [part for part in parts if part.keys]
    return UsageError(
        f"{tree.path}: more than one part of this checkpoint may be the model",
        file=tree.path,
        got=list_text((f"{_quote_name(part)} ({plural(len(part.tensors), 'tensor')})" for part in parts), _MAX_SHOWN),
        want="one",
        next_step=either(
            f"choose one: {' or '.join(option('part', part.name) for part in named[:_MAX_SHOWN])}",
            "save the model's part in a checkpoint of its own",
        ),
    )


def _quote_name(part: _Branch) -> str:
    return quote(part.name)[1:-1] or "tensors beside them"


def _summarise(tree: SavedTree, keys: tuple[str, ...], names: Sequence[str], *, is_model: bool = False) -> TopPart:
    return TopPart(".".join(keys), len(names), sum(map(tree.count_bytes, names)), is_model)


def _has_matrix(tree: SavedTree, names: Iterable[str]) -> bool:
    return any(len(tree.shapes[name]) > 1 for name in names)
