"""Removes the parts that wrappers add to the names in a state dict."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from xrank.errors import UsageError
from xrank.plan.source import StoredModel

__all__ = [
    "LIGHTNING_VERSION",
    "is_of_lightning",
    "name_notes",
    "plain_names",
    "remove_wrapper_names",
    "rename_tensors",
    "strip_wrappers",
]

_OUTER = "module"
"""Prefix of DistributedDataParallel, DataParallel and DeepSpeed's engine, unless only some names have it."""
# torch/_dynamo/eval_frame.py: OptimizedModule; torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py;
# torch/distributed/fsdp/_common_utils.py: FSDP_WRAPPED_MODULE. Models do not have modules of these names.
_ANYWHERE = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
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


def plain_names(names: Sequence[str], known: Container[str] = (), *, in_attribute: bool = False) -> dict[str, str]:
    """Return the model's own name for every name; an empty dict if no wrapper changed any.

    Args:
        names: the names of all tensors.
        known: names that the model has. If it has one that a wrapper could have made, all names stay.
        in_attribute: whether the model is an attribute of another module, such as ``model`` of a LightningModule.

    Raises:
        UsageError: two tensors would get the same name.
    """
    plain = {name: _strip_anywhere(name) for name in names}
    # A model may have a child called `module` itself, but a wrapper's prefix is in front of every name.
    while plain and all(name.startswith(f"{_OUTER}.") for name in plain.values()):
        plain = {name: bare.removeprefix(f"{_OUTER}.") for name, bare in plain.items()}
    plain = _strip_attribute(plain, known, in_attribute=in_attribute)
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


def _strip_attribute(plain: dict[str, str], known: Container[str], *, in_attribute: bool) -> dict[str, str]:
    """Return the names without the first part of all of them, if that is a module which contains the model.

    It is where the model's known names appear without it. Without known names, only the first part of a module that is
    known to contain a model is, unless it names a layer or a list of layers.
    """
    names = plain.values()
    first = next(iter(names), "").partition(".")[0]
    if not first or any(not name.startswith(f"{first}.") for name in names):
        return plain
    bare = {name: value.removeprefix(f"{first}.") for name, value in plain.items()}
    if known:
        fits = any(name in known for name in bare.values()) and not any(name in known for name in names)
    else:
        fits = in_attribute and any("." in name for name in bare.values())
        fits = fits and not any(name[:1].isdecimal() for name in bare.values())
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


def remove_wrapper_names(stored: StoredModel, known: Container[str] = (), *, in_attribute: bool = False) -> StoredModel:
    """Return a reader's model under the model's own names; arguments and errors as `plain_names`."""
    return rename_tensors(
        stored,
        plain_names([*(shard.name for shard in stored.shards), *stored.absent], known, in_attribute=in_attribute),
    )


def name_notes(plain: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the note about changed names, if there are any."""
    changed = next((pair for pair in plain.items() if pair[0] != pair[1]), None)
    return () if changed is None else (("wrapper-names", _NOTE.format(*changed)),)
