"""A source as it was found, in files or in memory, with the model's config and what lies beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from xrank import dtypes
from xrank.decisions.base_model import BaseModel, read_config
from xrank.decisions.own_config import OwnConfig
from xrank.decisions.selection import embedding_of
from xrank.errors import UsageError
from xrank.layout import LayoutMap
from xrank.plan.source import StoredModel
from xrank.readers.base import Hints, Reader
from xrank.readers.checkpoint_folders import find_checkpoint_folders
from xrank.readers.discovery import find_source
from xrank.readers.own_readers import WORKSPACE
from xrank.readers.wrapper_names import plain_names, rename_tensors
from xrank.recipes.shape_proof import prove_shapes
from xrank.writers.companions import CompanionFile, find_companions

__all__ = ["FoundSource", "companions_of", "find_live_source", "read_found", "read_source"]


@dataclass(frozen=True, slots=True, eq=False)
class FoundSource:
    """A source under its own names: what a reader found in files, or what ranks hold in memory."""

    model: StoredModel
    config: Mapping[str, Any] | None
    """The model's config.json: the one beside the source, the base model's, or the one in the source."""
    config_path: str | None = None
    """Path of the config, if it is a file."""
    companions: tuple[CompanionFile, ...] = ()
    """Small files beside the source."""
    notes: tuple[tuple[str, str], ...] = ()
    """Notes on companions of one name, of which one was taken."""
    place: str | None = None
    """Path where the source was found; None: memory."""
    own: OwnConfig | None = None
    """The knowledge of a live module about itself; None: files."""
    plain_names: Mapping[str, str] = field(default_factory=dict)
    """Name that a wrapper gave -> the model's own name, of a live model."""
    unsaved: tuple[str, ...] = ()
    """Names of a live module's tensors that `save_pretrained` leaves out, and so does the source."""


def read_source(path: str, *, base: BaseModel | None = None, layouts: LayoutMap | None = None) -> FoundSource:
    """Read what lies at a path, from metadata alone. Errors are those of `find_source` and of readers."""
    place, reader = find_source(path)
    return read_found(path, place, reader, base=base, layouts=layouts)


def read_found(
    asked: str,
    place: str,
    reader: Reader,
    *,
    base: BaseModel | None = None,
    layouts: LayoutMap | None = None,
    is_left_out: Callable[[str], bool] | None = None,
    for_layouts: bool = False,
    beside: tuple[tuple[CompanionFile, ...], tuple[tuple[str, str], ...]] | None = None,
) -> FoundSource:
    """Read what lies where it was found, by its reader.

    Args:
        asked: what the user gave.
        place: where it was found.
        reader: of its format.
        base: tells whole shapes, and the config where none lies beside the source.
        layouts: for tensors that record none.
        is_left_out: whether the caller will leave a tensor out, so that it need not be placed.
        for_layouts: whether what ranks say of their layouts is wanted, and their config is not.
        beside: what `companions_of` gave, where the caller has it; None: it is asked for here.
    """
    companions, notes = companions_of(asked, place, reader) if beside is None else beside
    candidates = (*companions, *(base.companions if base is not None else ()))
    config_path = next((companion.path for companion in candidates if companion.name == "config.json"), None)
    config = read_config(config_path) if config_path is not None else None
    hints = Hints(
        layouts=layouts,
        shapes={name: shape for name, (_, shape) in base.tensors.items()} if base is not None else {},
        tied_to=lambda name: embedding_of(name, base.tensors if base is not None else (), config),
        is_left_out=is_left_out,
        needs_config=config_path is None and not for_layouts,
        needs_layouts=for_layouts,
        prove_shapes=lambda shapes: prove_shapes(shapes, config),
    )
    model = reader.read(place, hints)
    known = config if config_path is not None else model.config
    return FoundSource(model, known, config_path, companions, notes, place)


def companions_of(
    asked: str, place: str, reader: Reader
) -> tuple[tuple[CompanionFile, ...], tuple[tuple[str, str], ...]]:
    """Return the companions of what was found at a place, and notes on those that were not taken.

    Raises:
        IncompleteError: one is a link to nothing.
    """
    # The states of a workspace hold a config, which one in a folder above does not overrule.
    folders = (
        (place, os.path.join(place, "huggingface"))
        if reader.name == WORKSPACE.name
        else find_checkpoint_folders(asked, place)
    )
    found, others = find_companions(folders)
    return found, tuple(("companion", text) for text in others)


def find_live_source(stored: StoredModel, own: OwnConfig, base: BaseModel | None) -> FoundSource:
    """Return what all ranks hold of a live model as a source, under the model's own names.

    Args:
        stored: the parts of all ranks.
        own: the knowledge of the module about itself.
        base: gives the config where it has one.

    Raises:
        UsageError: a tensor without a name, or a placeholder of DeepSpeed's ZeRO-3.
    """
    config_path = next((c.path for c in base.companions if c.name == "config.json"), None) if base else None
    plain = plain_names([*(shard.name for shard in stored.shards), *stored.absent])
    stored = rename_tensors(stored, plain)
    unsaved = tuple(shard.name for shard in stored.shards if shard.name in own.unsaved)
    stored = replace(stored, shards=tuple(shard for shard in stored.shards if shard.name not in own.unsaved))
    _check_tensors(stored, base)
    config = base.config if base is not None and config_path is not None else own.config
    return FoundSource(stored, config, config_path, own=own, plain_names=plain, unsaved=unsaved)


def _check_tensors(stored: StoredModel, base: BaseModel | None) -> None:
    """Refuse tensors of no name, or of shape [0], as ZeRO-3 leaves them in a state dict of what it partitions.

    Raises:
        UsageError: there are such tensors; of shape [0], and the base model has not the same.
    """
    known = base.tensors if base is not None else {}
    for shard in stored.shards:
        if not shard.name:
            raise UsageError("a tensor has the name ''", got="''", want="a name", next_step="give it a name")
        like = known.get(shard.name)
        if shard.shape == (0,) and dtypes.dtype(shard.dtype).is_float and (like is None or like[1] != (0,)):
            raise UsageError(
                f"{shard.name} has shape [0], as what DeepSpeed's ZeRO-3 leaves in the place of a tensor",
                tensor=shard.name,
                got="shape [0]",
                want="values; or a base model that has it so",
                next_step="make the call within deepspeed.zero.GatheredParameters(list(module.parameters())), or save "
                "a checkpoint and gather that: xrank gather; if there are no values, leave the tensor out",
            )
