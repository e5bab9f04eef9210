"""Selects the model's tensors in a torch DCP checkpoint; trainers save optimizer and counters beside them.

The nesting of the saved dict in ``planner_data`` identifies them: ``{"model": …, "optim": …}``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import TypeAlias

from xrank.errors import LayoutError, UsageError
from xrank.formats.dcp_metadata import DcpMetadata, DcpTensor
from xrank.formats.regular_file import quote
from xrank.words import list_text

__all__ = ["ModelPart", "TopPart", "select_model"]

_Path: TypeAlias = tuple[str | int, ...]

_MODELS = frozenset({"model", "module", "state_dict", "model_state_dict", "model_state"})
_WRAPPERS = frozenset({"app", "app_state", "state"})
"""From torch's own tutorials: a Stateful that holds model and optimizer."""
_OPTIMIZERS = frozenset(
    {"optim", "optimizer", "optimizers", "optimizer_state", "optimizer_states", "optimizer_state_dict"}
    | {"optim_state", "optim_states", "optim_state_dict", "optimizer_0", "opt_state"}
)
_TRAINERS = frozenset(
    {"lr_scheduler", "lr_schedulers", "scheduler", "schedulers", "dataloader", "train_state", "trainer", "extra_state"}
    | {"rng", "rng_state", "rng_states", "cuda_rng_state", "random_states", "epoch", "step", "global_step", "iteration"}
    | {"scaler", "grad_scaler", "loss_scaler", "callbacks", "sampler"}
)
_MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_inf", "exp_avg_diff"}
    | {"momentum_buffer", "square_avg", "grad_avg", "acc_delta", "master_param"}
)
"""State that torch's optimizers, and similar ones, keep for a parameter."""
_OPTIMIZER_KEYS = frozenset({"state", "param_groups"})
"""torch/optim/optimizer.py: state_dict."""
_FLAT = "_flat_param"
"""torch/distributed/fsdp/_flat_param.py: FLAT_PARAM."""


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

    tensors: Mapping[str, DcpTensor]
    """By the model's own names."""
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

    def is_nested(self) -> bool:
        """Return whether further keys lead to all of it, so that it is a dict or a list."""
        return all(len(self.paths[name]) > len(self.keys) for name in (*self.tensors, *self.values))

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


def select_model(metadata: DcpMetadata) -> ModelPart:
    """Return the model's tensors, named without the keys that lead to them.

    The search starts at the top and leaves out branches of optimizers and trainers. If a branch leads to the model, it
    follows that branch and leaves out the others. Without a branch to follow, the remaining tensors are the model.

    Raises:
        UsageError: no part, or more than one part, may be the model.
        LayoutError: the model was saved as FSDP1's flat parameters.
    """
    saved: Mapping[str, _Path] = metadata.paths or {}
    paths = {name: saved.get(name, (name,)) for name in (*metadata.tensors, *metadata.byte_items)}
    of_optimizers = _names_of_optimizers(paths)
    here = _Branch((), list(metadata.tensors), list(metadata.byte_items), paths)
    parts: list[TopPart] = []
    is_model = False
    while not is_model:
        inner = here.split()
        rest = [branch for branch in inner if not _is_left_out(branch.key)]
        kept = [branch for branch in rest if branch.tensors and not _is_optimizer(branch, of_optimizers)]
        followed = _choose_branch(metadata, kept)
        chosen = frozenset(kept if followed is None else [followed])
        parts += [_part(metadata, each.keys, each.tensors) for each in inner if each.tensors and each not in chosen]
        is_model = followed is None or followed.key in _MODELS
        here = followed or _Branch(
            here.keys,
            [name for branch in kept for name in branch.tensors],
            [name for branch in rest for name in branch.values],
            paths,
        )
    own = [name for name in here.tensors if name not in of_optimizers]
    if not own:
        raise _missing_model_error(metadata, [branch.key for branch in inner if branch.tensors])
    if states := [name for name in here.tensors if name in of_optimizers]:
        parts.append(_part(metadata, (*here.keys, "state"), states))
    tensors = {own_name: metadata.tensors[name] for own_name, name in here.strip_keys(own).items()}
    _check_flat(metadata, tensors)
    values = here.strip_keys(name for name in here.values if name not in of_optimizers)
    model = _part(metadata, here.keys, own, is_model=True)
    return ModelPart(MappingProxyType(tensors), here.keys, (model, *parts), MappingProxyType(values))


def _names_of_optimizers(names: Collection[str]) -> frozenset[str]:
    """Return the flat names that belong to an optimizer, under whatever keys it was saved.

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
            whole.update(".".join([*above, key]) for key in _OPTIMIZER_KEYS)
        if keys[-1] in _MOMENTS and "state" in keys[:-1]:
            owners.add(".".join(keys[:-1]))
    return frozenset(
        name
        for name in names
        if name.rpartition(".")[0] in owners
        or (whole and not whole.isdisjoint(accumulate(name.split("."), "{}.{}".format)))
    )


def _is_optimizer(branch: _Branch, of_optimizers: Collection[str]) -> bool:
    """Return whether all tensors under a key belong to an optimizer, whatever the key."""
    if not branch.is_nested():
        return False
    state = tuple(".".join((*branch.keys, key, "")) for key in _OPTIMIZER_KEYS)
    has_moment = any(name.rpartition(".")[2] in _MOMENTS for name in branch.tensors)
    if has_moment and all(name.startswith(state) for name in branch.tensors):
        return True
    # A model's key is not skipped for its neighbours: the search follows it and reports that it contains no model.
    return branch.key not in _MODELS and all(name in of_optimizers for name in branch.tensors)


def _choose_branch(metadata: DcpMetadata, kept: Sequence[_Branch]) -> _Branch | None:
    """Return the branch that leads to the model, alone or with more; None if the branches together are the model.

    Raises:
        UsageError: more than one may be the model.
    """
    nested = [branch for branch in kept if branch.is_nested()]
    models = [branch for branch in nested if branch.key in _MODELS]
    if models:
        _check_one(metadata, [*models, *(branch for branch in nested if branch.key not in _MODELS)])
        return models[0]
    return nested[0] if nested and len(kept) == 1 and _is_wrapper(nested[0]) else None


def _is_wrapper(branch: _Branch) -> bool:
    """Return whether a key leads to a model and more: by its name, or because both a model and an optimizer follow."""
    inner = {each.key for each in branch.split() if each.is_nested()}
    return branch.key in _WRAPPERS or (not inner.isdisjoint(_MODELS) and not inner.isdisjoint(_OPTIMIZERS))


def _check_flat(metadata: DcpMetadata, tensors: Mapping[str, DcpTensor]) -> None:
    """Refuse FSDP1's flat parameters, of which every rank saved its own range under one name."""
    for name, tensor in tensors.items():
        if name.rpartition(".")[2] == _FLAT:
            raise LayoutError(
                f"{quote(name)[1:-1]}: a flat parameter of FSDP1, which does not record its members' shapes",
                tensor=name,
                file=metadata.path,
                got=f"{tensor.shape[0] if tensor.shape else 1:,} elements of a LOCAL_STATE_DICT",
                want="parameters by name",
                next_step="load it into the same model, and save with SHARDED_STATE_DICT or FULL_STATE_DICT",
            )


def _missing_model_error(metadata: DcpMetadata, children: Iterable[str]) -> UsageError:
    pickled = [f"{name}, pickled whole" for name in metadata.byte_items if name in _MODELS]
    return UsageError(
        f"{metadata.path}: this checkpoint contains no model",
        file=metadata.path,
        got=list_text([*pickled, *sorted(quote(key)[1:-1] for key in children)], 10, empty="no tensor at all"),
        want="tensors that belong to no optimizer and no trainer",
        next_step="load and save it with torch's default planner, without flatten_state_dict=False"
        if pickled
        else "give the path of the folder to which the model was saved",
    )


def _is_left_out(key: str) -> bool:
    # Some planners flatten names themselves: optimizer.state.exp_avg.…
    return key in _OPTIMIZERS or key in _TRAINERS or key.partition(".")[0] in _OPTIMIZERS


def _part(metadata: DcpMetadata, keys: tuple[str, ...], names: Sequence[str], *, is_model: bool = False) -> TopPart:
    nbytes = sum(int(metadata.tensors[name].nbytes.sum()) for name in names)
    return TopPart(".".join(keys), len(names), nbytes, is_model)


def _check_one(metadata: DcpMetadata, parts: Iterable[_Branch]) -> None:
    """Refuse to choose between parts.

    Single tensors beside a model, and parts without a matrix, do not count: they are counters, seeds and positions.
    """
    parts = [part for part in parts if part.key in _MODELS or _has_matrix(metadata, part.tensors)]
    if len(parts) > 1:
        raise UsageError(
            f"{metadata.path}: more than one part of this checkpoint may be the model",
            file=metadata.path,
            got=", ".join(f"{quote(part.key)[1:-1]} ({len(part.tensors)} tensors)" for part in parts),
            want="one",
            next_step="save the model's part in a checkpoint of its own",
        )


def _has_matrix(metadata: DcpMetadata, names: Iterable[str]) -> bool:
    return any(len(metadata.tensors[name].shape) > 1 for name in names)
