"""The names in what a trainer saved: the model's part of it, and what wrappers add to names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from itertools import accumulate, combinations
from types import MappingProxyType
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from xrank.errors import UsageError, either, option
from xrank.formats.pickles import is_extra_state
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.storage.regular_file import Origin, quote
from xrank.words import list_text, plural, size_text

MODELS = frozenset({"model", "module", "state_dict", "model_state_dict", "model_state", "params"})
WRAPPERS = frozenset({"app", "app_state", "state"})
"""From torch's own tutorials: a Stateful that holds model and optimizer."""
OPTIMIZERS = frozenset(
    {"optim", "optimizer", "optimizers", "optimizer_state", "optimizer_states", "optimizer_state_dict"}
    | {"optim_state", "optim_states", "optim_state_dict", "optimizer_0", "opt_state"}
)
_TRAINERS = frozenset(
    {"lr_scheduler", "lr_schedulers", "scheduler", "schedulers", "dataloader", "train_state", "trainer", "extra_state"}
    | {"rng", "rng_state", "rng_states", "cuda_rng_state", "random_states", "epoch", "step", "global_step", "iteration"}
    | {"scaler", "grad_scaler", "loss_scaler", "callbacks", "sampler", "loops", "hyper_parameters"}
)
MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_inf", "exp_avg_diff"}
    | {"momentum_buffer", "square_avg", "grad_avg", "acc_delta", "master_param"}
)
"""State that torch's optimizers, and similar ones, keep for a parameter."""
OPTIMIZER_KEYS = frozenset({"state", "param_groups"})
"""torch/optim/optimizer.py: state_dict."""


def leads_to_model(keys: Sequence[str | int]) -> bool:
    """Return whether a model lies under these keys by their names alone."""
    return bool(keys) and keys[-1] in MODELS and all(key in WRAPPERS for key in keys[:-1])


def is_left_out(key: str) -> bool:
    """Return whether what lies under a key belongs to an optimizer or a trainer."""
    # Some planners flatten names themselves: optimizer.state.exp_avg.…
    return key in OPTIMIZERS or key in _TRAINERS or key.partition(".")[0] in OPTIMIZERS


def names_of_optimizers(names: Collection[str]) -> frozenset[str]:
    """Return the flat names that belong to an optimizer, under any keys.

    torch names its state ``state.<parameter>.exp_avg``, behind the keys that lead to it, and the learning rates beside
    it ``param_groups.…lr``. If a state has groups beside it, all of it belongs to an optimizer; otherwise only the
    names beside a moment do.
    """
    whole: set[str] = set()
    owners: set[str] = set()
    for name in names:
        keys = name.split(".")
        if "param_groups" in keys:
            above = keys[: keys.index("param_groups")]
            whole.update(".".join([*above, key]) for key in OPTIMIZER_KEYS)
        if keys[-1] in MOMENTS and "state" in keys[:-1]:
            owners.add(".".join(keys[:-1]))
    return frozenset(
        name
        for name in names
        if name.rpartition(".")[0] in owners
        or (whole and not whole.isdisjoint(accumulate(name.split("."), "{}.{}".format)))
    )


_OUTER = "module"
"""Prefix of DistributedDataParallel, DataParallel and DeepSpeed's engine, unless only some names have it."""
# torch/_dynamo/eval_frame.py: OptimizedModule; torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py;
# torch/distributed/fsdp/_common_utils.py: FSDP_WRAPPED_MODULE. Models do not have modules of these names.
_ANYWHERE = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_AVERAGED = "n_averaged"
"""torch/optim/swa_utils.py: AveragedModel counts in this buffer, beside the averages in ``module``."""
FindWrapping: TypeAlias = Callable[[Sequence[str]], Callable[[str], str] | None]
_NOTE = "prefixes that wrappers added to names were removed: {} is {}"
LIGHTNING_VERSION = "pytorch-lightning_version"
"""Key that Lightning's Trainer writes, and Fabric does not (trainer/connectors/checkpoint_connector.py)."""


def is_of_lightning(saved: object) -> bool:
    """Return whether Lightning's Trainer saved a dict; the model is an attribute of the module that has its names."""
    return isinstance(saved, dict) and LIGHTNING_VERSION in saved


def strip_wrappers(name: str) -> str:
    """Return a name without the parts that wrappers add, if all names beside it have them, too."""
    name = _strip_anywhere(name)
    while name.startswith(f"{_OUTER}."):
        name = name.removeprefix(f"{_OUTER}.")
    return name


def _strip_anywhere(name: str) -> str:
    return ".".join(piece for piece in name.split(".") if piece not in _ANYWHERE)


def plain_names(
    names: Sequence[str],
    find_wrapping: FindWrapping | None = None,
    known: Container[str] = (),
    *,
    in_attribute: bool = False,
) -> dict[str, str]:
    """Return the model's own name for every name; an empty dict if no wrapper changed any.

    `find_wrapping` returns the function that takes off whatever stands before the names that the model is known to
    have, or None if it has none of these names. Without it, only the marks of well-known wrappers are taken off. If the
    model has a name (`known`) that a wrapper could have made, all names stay. `in_attribute`: the model is an attribute
    of another module, such as ``model`` of a LightningModule.
    """
    plain = {name: _strip_anywhere(name) for name in names}
    strip = None if find_wrapping is None else find_wrapping([*plain.values()])
    if strip is None:
        # A model may have a child called `module` itself, but a wrapper's prefix is in front of every name.
        while plain and all(name.startswith(f"{_OUTER}.") for name in plain.values()):
            plain = {name: bare.removeprefix(f"{_OUTER}.") for name, bare in plain.items()}
        plain = _strip_attribute(plain) if in_attribute else plain
    else:
        plain = {name: strip(bare) for name, bare in plain.items()}
    changed = [name for name, bare in plain.items() if name != bare]
    if not changed or any(name in known for name in changed):
        return {}
    taken: dict[str, str] = {}
    for name, bare in plain.items():
        if (other := taken.setdefault(bare, name)) != name:
            problem = f"{bare}: two tensors would have this name without the parts that wrappers added"
            step = "leave one of them out"
            raise UsageError(problem, tensor=bare, got=f"{other} and {name}", want="one", next_step=step)
    return plain


def _strip_attribute(plain: dict[str, str]) -> dict[str, str]:
    """Return the names without the first part of all of them, unless it names a layer or a list of layers."""
    names = plain.values()
    first = next(iter(names), "").partition(".")[0]
    if not first or any(not name.startswith(f"{first}.") for name in names):
        return plain
    bare = {name: value.removeprefix(f"{first}.") for name, value in plain.items()}
    fits = any("." in name for name in bare.values()) and not any(name[:1].isdecimal() for name in bare.values())
    return bare if fits else plain


def rename_tensors(stored: StoredModel, plain: Mapping[str, str]) -> StoredModel:
    """Return a model under its own names, with a note about the change."""
    changed = next((pair for pair in plain.items() if pair[0] != pair[1]), None)
    notes = () if changed is None else (("wrapper-names", _NOTE.format(*changed)),)
    return _with_names(stored, plain, (), notes) if plain else stored


def _with_names(
    stored: StoredModel, plain: Mapping[str, str], dropped: Collection[str], notes: Sequence[tuple[str, str]]
) -> StoredModel:
    """Return a model under other names, without some tensors, and with further notes."""

    def name(old: str) -> str:
        return plain.get(old, old)

    def rename(shards: Sequence[StoredShard]) -> tuple[StoredShard, ...]:
        return tuple(replace(shard, name=name(shard.name)) for shard in shards if shard.name not in dropped)

    ties = {old: to for old, to in stored.aliases.items() if old not in dropped and to not in dropped}
    return replace(
        stored,
        shards=rename(stored.shards),
        absent=tuple(name(old) for old in stored.absent if old not in dropped),
        roundings=rename(stored.roundings),
        aliases={name(old): name(to) for old, to in ties.items()},
        layouts={name(old): stated for old, stated in stored.layouts.items() if old not in dropped},
        notes=(*stored.notes, *notes),
    )


def remove_wrapper_names(
    stored: StoredModel, find_wrapping: FindWrapping | None = None, known: Container[str] = ()
) -> StoredModel:
    """Return a reader's model under the model's own names, without modules' state that is not a weight.

    Arguments and errors are those of `plain_names`.
    """
    stored = drop_states(stored)
    names = [*(shard.name for shard in stored.shards), *stored.absent]
    return rename_tensors(stored, plain_names(names, find_wrapping, known, in_attribute=stored.is_attribute))


def drop_states(stored: StoredModel) -> StoredModel:
    """Return a model without the tensors in which modules keep state that is not a weight, with a note."""
    names = [*(shard.name for shard in stored.shards), *stored.absent]
    scalars = {shard.name for shard in stored.shards if not shard.shape}
    extra = {name for name in names if is_extra_state(name)}
    counters = {name for name in scalars if name.rpartition(".")[2] == _AVERAGED and _is_counter(name, names)}
    notes = []
    if extra:
        text = f"{plural(len(extra), 'extra state')} of modules left out: {list_text(sorted(extra), 3)}"
        notes.append(("extra-state", text))
    if counters:
        notes.append(("left-out", f"counters of averaged models were left out: {list_text(sorted(counters), 3)}"))
    return _with_names(stored, {}, extra | counters, notes) if notes else stored


def _is_counter(name: str, names: Sequence[str]) -> bool:
    """Return whether a scalar counts the averages that lie beside it, all in ``module``."""
    prefix = name.removesuffix(_AVERAGED)
    return all(each == name or each.startswith(f"{prefix}{_OUTER}.") for each in names if each.startswith(prefix))


_Path: TypeAlias = tuple[str | int, ...]

_MAX_SHOWN = 12


class SavedTree(Struct, frozen=True, eq=False):
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


class TopPart(Struct, frozen=True):
    """Summary of the tensors under one key."""

    key: str
    num_tensors: int
    nbytes: int
    is_model: bool


class ChosenPart(Struct, frozen=True, eq=False):
    """The model's tensors, and summaries of the other parts."""

    tensors: Mapping[str, str]
    """The model's own names -> flat names."""
    prefix: tuple[str, ...]
    """The keys that lead to the model."""
    parts: tuple[TopPart, ...]
    values: Mapping[str, str]
    """Values beside them that are not tensors: name -> flat name."""


class _Branch(Struct, frozen=True, eq=False):
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


def select_model(tree: SavedTree, wanted: str | None = None) -> ChosenPart:
    """Return the model's tensors, named without the keys that lead to them.

    The search starts at the top, or at the wanted part (its keys, joined by dots), and leaves out branches of
    optimizers and trainers. If a branch leads to the model, it follows that branch and leaves out the others. Without a
    branch to follow, the remaining tensors are the model.
    """
    paths = {name: tree.paths.get(name, (name,)) for name in (*tree.shapes, *tree.values)}
    of_optimizers = names_of_optimizers(paths)
    top = here = _Branch((), list(tree.shapes), list(tree.values), paths)
    parts: list[TopPart] = []
    if wanted is not None:
        here = _find_part(tree, here, wanted)
        above = top
        while above.keys != here.keys:
            # At each level on the way to the part, what lies beside it.
            beside = {branch.keys: branch for branch in above.split()}
            above = beside.pop(here.keys[: len(above.keys) + 1])
            parts += [_summarize(tree, each.keys, each.tensors) for each in beside.values() if each.tensors]
    is_model = wanted is not None and here.is_state_dict()
    while not is_model:
        inner = here.split()
        rest = [branch for branch in inner if not is_left_out(branch.key)]
        kept = _candidates(tree, rest, of_optimizers)
        followed = _choose_branch(tree, here, kept, of_optimizers)
        chosen = frozenset(kept if followed is None else [followed])
        parts += [_summarize(tree, each.keys, each.tensors) for each in inner if each.tensors and each not in chosen]
        is_model = followed is None or followed.key in MODELS or followed.is_state_dict()
        tensors = [name for branch in kept for name in branch.tensors]
        here = followed or _Branch(here.keys, tensors, [name for branch in rest for name in branch.values], paths)
    own = [name for name in here.tensors if name not in of_optimizers]
    if not own:
        raise _missing_model_error(tree, [branch.key for branch in top.split() if branch.tensors])
    if states := [name for name in here.tensors if name in of_optimizers]:
        parts.append(_summarize(tree, (*here.keys, "state"), states))
    named = here.strip_keys(own)
    values = here.strip_keys(name for name in here.values if name not in of_optimizers)
    model = _summarize(tree, here.keys, list(named.values()), is_model=True)
    return ChosenPart(MappingProxyType(named), here.keys, (model, *parts), MappingProxyType(values))


def part_details(part: ChosenPart) -> dict[str, Any]:
    """Return the parts as facts for `inspect`."""
    parts = {}
    for each in part.parts:
        text = f"{plural(each.num_tensors, 'tensor')} in {size_text(each.nbytes)}"
        parts[each.key or "(all)"] = text if each.is_model else f"left out: {text}"
    return {"parts": parts, "prefix": ".".join(part.prefix)}


def describe_families(described: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the descriptions of tensors by families of names, which differ in numbers only, for `inspect`."""
    found: dict[str, set[str]] = {}
    for name, text in described:
        found.setdefault(re.sub(r"\d+", "#", name), set()).add(text)
    return {family: ", ".join(sorted(texts)) for family, texts in sorted(found.items())}


def part_notes(part: ChosenPart) -> list[tuple[str, str]]:
    """Return the note about parts that are left out, if there are any."""
    left = [f"{other.key} ({other.num_tensors:,})" for other in part.parts if not other.is_model]
    return [("left-out", f"tensors that are not the model's were left out: {list_text(left, _MAX_SHOWN)}")] * bool(left)


def _find_part(tree: SavedTree, top: _Branch, wanted: str) -> _Branch:
    here = top
    while here.name != wanted:
        nested = [branch for branch in here.split() if branch.tensors and branch.is_nested()]
        fitting = [branch for branch in nested if f"{wanted}.".startswith(f"{branch.name}.")]
        if not fitting:
            names = [f"{quote(branch.name)[1:-1]} ({plural(len(branch.tensors), 'tensor')})" for branch in nested]
            raise Origin(tree.path).usage(
                f"this checkpoint has no part {quote(wanted)}",
                list_text(names, _MAX_SHOWN, empty="tensors that are not in parts"),
                option("part", wanted),
                f"choose one of them with {option('part')}" if nested else f"leave {option('part')} out",
            )
        here = max(fitting, key=lambda branch: len(branch.name))
    return here


def _candidates(tree: SavedTree, branches: Iterable[_Branch], of_optimizers: Collection[str]) -> list[_Branch]:
    """Return the branches that may be the model or a piece of it.

    A list of tensors beside a model, as exponential moving averages are kept, gives them no names and is not one.
    """
    kept = [branch for branch in branches if branch.tensors and not _is_optimizer(branch, of_optimizers)]
    named = [one for one in kept if one.key in MODELS or any(type(one.paths[n][-1]) is not int for n in one.tensors)]
    return named if any(branch.is_nested() and _has_matrix(tree, branch.tensors) for branch in named) else kept


def _is_optimizer(branch: _Branch, of_optimizers: Collection[str]) -> bool:
    if not branch.is_nested():
        return False
    state = tuple(".".join((*branch.keys, key, "")) for key in OPTIMIZER_KEYS)
    has_moment = any(name.rpartition(".")[2] in MOMENTS for name in branch.tensors)
    if has_moment and all(name.startswith(state) for name in branch.tensors):
        return True
    # A model's key is not skipped for its neighbors: the search follows it and reports that it contains no model.
    return branch.key not in MODELS and all(name in of_optimizers for name in branch.tensors)


def _choose_branch(
    tree: SavedTree, here: _Branch, kept: Sequence[_Branch], of_optimizers: Collection[str]
) -> _Branch | None:
    """Return the branch that leads to the model, alone or with more; None if the branches together are the model."""
    nested = [branch for branch in kept if branch.is_nested()]
    models = [branch for branch in nested if branch.key in MODELS]
    # Single tensors beside a model, and parts without a matrix, are counters, seeds and positions.
    others = [branch for branch in nested if branch not in models and _has_matrix(tree, branch.tensors)]
    if models:
        if len(models) + len(others) > 1:
            raise _several_models_error(tree, [*models, *others])
        return models[0]
    tensors = [name for branch in kept if branch not in nested for name in branch.tensors]
    loose = _Branch(here.keys, tensors, (), here.paths)
    copies = _list_copies([*others, *([loose] if others and _has_matrix(tree, loose.tensors) else [])])
    if copies:
        raise _several_models_error(tree, copies)
    # A scalar beside a state dict is a loss, a seed or a counter.
    if len(nested) != 1 or any(tree.shapes[name] for name in loose.tensors):
        return None
    # A wrapper leads to a model and more: by its name, or because both a model and an optimizer follow.
    inner = {each.key for each in nested[0].split() if each.is_nested()}
    is_wrapper = nested[0].key in WRAPPERS or (not inner.isdisjoint(MODELS) and not inner.isdisjoint(OPTIMIZERS))
    return nested[0] if is_wrapper or _leads_to_one(tree, nested[0], of_optimizers) else None


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


def _missing_model_error(tree: SavedTree, children: Iterable[str]) -> UsageError:
    pickled = [f"{name}, pickled whole" for name in tree.pickled if name in MODELS]
    step = "give the path to which the model was saved"
    if pickled:
        step = "load and save it with torch's default planner, without flatten_state_dict=False"
    got = list_text([*pickled, *sorted(quote(key)[1:-1] for key in children)], 10, empty="no tensor at all")
    want = "tensors that belong to no optimizer and no trainer"
    return Origin(tree.path).usage("this checkpoint contains no model", got, want, step)


def _several_models_error(tree: SavedTree, parts: Sequence[_Branch]) -> UsageError:
    named = [part for part in parts if part.keys]
    names = ((quote(part.name)[1:-1] or "tensors beside them", len(part.tensors)) for part in parts)
    return Origin(tree.path).usage(
        "more than one part of this checkpoint may be the model",
        list_text((f"{name} ({plural(count, 'tensor')})" for name, count in names), _MAX_SHOWN),
        "one",
        either(
            f"choose one: {' or '.join(option('part', part.name) for part in named[:_MAX_SHOWN])}",
            "save the model's part in a checkpoint of its own",
        ),
    )


def _summarize(tree: SavedTree, keys: tuple[str, ...], names: Sequence[str], *, is_model: bool = False) -> TopPart:
    return TopPart(".".join(keys), len(names), sum(map(tree.count_bytes, names)), is_model)


def _has_matrix(tree: SavedTree, names: Iterable[str]) -> bool:
    return any(len(tree.shapes[name]) > 1 for name in names)
