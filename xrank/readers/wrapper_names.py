"""Removes the parts that wrappers add to the names in a state dict."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from xrank.errors import UsageError
from xrank.formats.pickles import is_extra_state
from xrank.plan.source import StoredModel
from xrank.words import list_text, plural

_OUTER = "module"
"""Prefix of DistributedDataParallel, DataParallel and DeepSpeed's engine, unless only some names have it."""
# torch/_dynamo/eval_frame.py: OptimizedModule; torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py;
# torch/distributed/fsdp/_common_utils.py: FSDP_WRAPPED_MODULE. Models do not have modules of these names.
_ANYWHERE = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_AVERAGED = "n_averaged"
"""torch/optim/swa_utils.py: AveragedModel counts in this buffer, beside the averages in ``module``."""
FindWrapping: TypeAlias = Callable[[Sequence[str]], Callable[[str], str] | None]
_NOTE = "parts of names that wrappers added were taken off: {} is {}"
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

    Args:
        names: the names of all tensors.
        find_wrapping: returns the function that takes off whatever stands before the names that the model is known to
            have; None if it has none of these names. Without it, only the marks of well-known wrappers are taken off.
        known: names that the model has. If it has one that a wrapper could have made, all names stay.
        in_attribute: whether the model is an attribute of another module, such as ``model`` of a LightningModule.

    Raises:
        UsageError: two tensors would get the same name.
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
            raise UsageError(
                f"{bare}: two tensors would have this name without the parts that wrappers added",
                tensor=bare,
                got=f"{other} and {name}",
                want="one",
                next_step="leave one of them out",
            )
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
    if not plain:
        return stored
    return replace(
        stored,
        shards=tuple(replace(shard, name=plain[shard.name]) for shard in stored.shards),
        absent=tuple(plain[name] for name in stored.absent),
        roundings=tuple(replace(shard, name=plain[shard.name]) for shard in stored.roundings),
        aliases={plain[name]: plain[target] for name, target in stored.aliases.items()},
        layouts={plain.get(name, name): stated for name, stated in stored.layouts.items()},
        notes=(*stored.notes, *name_notes(plain)),
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
    dropped = extra | counters
    if not dropped:
        return stored
    notes = [("extra-state", f"{plural(len(extra), 'extra state')} of modules left out: {list_text(sorted(extra), 3)}")]
    notes = notes if extra else []
    if counters:
        notes.append(("left-out", f"counters of averaged models were left out: {list_text(sorted(counters), 3)}"))
    return replace(
        stored,
        shards=tuple(shard for shard in stored.shards if shard.name not in dropped),
        absent=tuple(name for name in stored.absent if name not in dropped),
        roundings=tuple(shard for shard in stored.roundings if shard.name not in dropped),
        aliases={name: to for name, to in stored.aliases.items() if name not in dropped and to not in dropped},
        layouts={name: stated for name, stated in stored.layouts.items() if name not in dropped},
        notes=(*stored.notes, *notes),
    )


def _is_counter(name: str, names: Sequence[str]) -> bool:
    """Return whether a scalar counts the averages that lie beside it, all in ``module``."""
    prefix = name.removesuffix(_AVERAGED)
    return all(each == name or each.startswith(f"{prefix}{_OUTER}.") for each in names if each.startswith(prefix))


def name_notes(plain: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the note about changed names, if there are any."""
    changed = next((pair for pair in plain.items() if pair[0] != pair[1]), None)
    return () if changed is None else (("wrapper-names", _NOTE.format(*changed)),)
