"""Which of a torch DCP checkpoint's tensors are the model: trainers save optimizer and counters beside it.

What tells is the nesting of the dict that was saved, ``planner_data``: ``{"model": …, "optim": …}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from xrank.errors import UsageError
from xrank.formats.dcp_metadata import DcpMetadata, DcpTensor
from xrank.formats.regular_file import shown

__all__ = ["ModelPart", "TopPart", "select_model"]

_Path: TypeAlias = tuple[str | int, ...]

_MODELS = frozenset({"model", "module", "state_dict", "model_state_dict", "model_state"})
_WRAPPERS = frozenset({"app", "app_state", "state"})
"""Of torch's own tutorials: a Stateful that holds model and optimizer."""
_OPTIMIZERS = frozenset(
    {"optim", "optimizer", "optimizers", "optimizer_state", "optimizer_states", "optimizer_state_dict"}
    | {"optim_state", "optim_states", "optim_state_dict", "optimizer_0", "opt_state"}
)
_TRAINERS = frozenset(
    {"lr_scheduler", "lr_schedulers", "scheduler", "schedulers", "dataloader", "train_state", "trainer", "extra_state"}
    | {"rng", "rng_state", "rng_states", "cuda_rng_state", "random_states", "epoch", "step", "global_step", "iteration"}
    | {"scaler", "grad_scaler", "loss_scaler", "callbacks", "sampler"}
)


@dataclass(frozen=True, slots=True)
class TopPart:
    """What was saved under one key."""

    key: str
    num_tensors: int
    nbytes: int
    is_model: bool


@dataclass(frozen=True, slots=True, eq=False)
class ModelPart:
    """The model's tensors, and what else there is."""

    tensors: Mapping[str, DcpTensor]
    """By the names that the model has for them."""
    prefix: tuple[str, ...]
    """The keys that led to the model."""
    parts: tuple[TopPart, ...]


def select_model(metadata: DcpMetadata) -> ModelPart:
    """Return the tensors that are the model's, without the keys that lead to them.

    Raises:
        UsageError: there is no model, or more than one part may be it.
    """
    paths: Mapping[str, _Path] = (
        {name: (name,) for name in metadata.tensors}
        if metadata.paths is None
        else {name: metadata.paths[name] for name in metadata.tensors}
    )
    prefix: tuple[str, ...] = ()
    parts: list[TopPart] = []
    while True:
        depth = len(prefix)
        children = _children(paths, depth)
        kept = [key for key in children if not _is_left_out(key)]
        nested = [key for key in kept if all(len(paths[name]) > depth + 1 for name in children[key])]
        models = [key for key in nested if key in _MODELS]
        if not models and kept == nested and len(kept) == 1 and kept[0] in _WRAPPERS:
            into = kept
        elif models:
            _check_one(metadata, [*models, *(key for key in nested if key not in models)], children)
            into = models
        else:
            into = []
        chosen = [name for key in into or kept for name in children[key]]
        if not chosen:
            raise UsageError(
                f"{metadata.path}: there is no model in this checkpoint",
                file=metadata.path,
                got=", ".join(sorted(shown(key)[1:-1] for key in children)[:10]) or "no tensor at all",
                want="tensors that belong to no optimizer and no trainer",
                next_step="name the folder that the model was saved to",
            )
        parts += [_part(metadata, (*prefix, key), children[key]) for key in children if key not in (into or kept)]
        prefix = (*prefix, *into)
        paths = {name: paths[name] for name in chosen}
        if models or not into:
            tensors = {".".join(map(str, path[len(prefix) :])): metadata.tensors[name] for name, path in paths.items()}
            model = TopPart(".".join(prefix), len(tensors), _nbytes(metadata, chosen), is_model=True)
            return ModelPart(MappingProxyType(tensors), prefix, (model, *parts))


def _children(paths: Mapping[str, _Path], depth: int) -> dict[str, list[str]]:
    """Return the keys at that depth and the flat names of the tensors under each."""
    found: dict[str, list[str]] = {}
    for name, path in paths.items():
        found.setdefault(str(path[depth]), []).append(name)
    return found


def _is_left_out(key: str) -> bool:
    # Planners that flatten in ways of their own leave names such as optimizer.state.exp_avg.…
    return key in _OPTIMIZERS or key in _TRAINERS or key.partition(".")[0] in _OPTIMIZERS


def _part(metadata: DcpMetadata, keys: tuple[str, ...], names: list[str]) -> TopPart:
    return TopPart(".".join(keys), len(names), _nbytes(metadata, names), is_model=False)


def _nbytes(metadata: DcpMetadata, names: list[str]) -> int:
    return sum(int(metadata.tensors[name].nbytes.sum()) for name in names)


def _check_one(metadata: DcpMetadata, parts: list[str], children: Mapping[str, list[str]]) -> None:
    """Refuse a choice between parts. Single tensors beside a model are no part: they are counters and seeds."""
    if len(parts) > 1:
        raise UsageError(
            f"{metadata.path}: more than one part of this checkpoint may be the model",
            file=metadata.path,
            got=", ".join(f"{shown(key)[1:-1]} ({len(children[key])} tensors)" for key in parts),
            want="one",
            next_step="save the part that is meant in a checkpoint of its own",
        )
