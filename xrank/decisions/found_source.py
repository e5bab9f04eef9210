"""A source in files or in memory, with the model's config and the small files beside it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from xrank import dtypes
from xrank.decisions.alternatives import read_best
from xrank.decisions.own_config import OwnConfig
from xrank.decisions.ties import embedding_of
from xrank.errors import AGAIN, IncompleteError, UsageError, option
from xrank.layout import LayoutMap
from xrank.plan.source import StoredModel
from xrank.readers.base import Hints
from xrank.readers.checkpoint_folders import find_checkpoint_folders
from xrank.readers.discovery import SourcePlace, find_source
from xrank.readers.own_readers import WORKSPACE
from xrank.readers.wrapper_names import drop_states, plain_names, rename_tensors
from xrank.readers.zero_tails import note_zero_tails
from xrank.recipes.model_names import make_finder
from xrank.recipes.shape_proof import prove_shapes
from xrank.words import plural
from xrank.writers.companions import CompanionFile, find_companions

if TYPE_CHECKING:
    from xrank.decisions.base_model import BaseModel


@dataclass(frozen=True, slots=True, eq=False)
class FoundSource:
    """A source under its own names: tensors that a reader found in files, or that ranks hold in memory."""

    model: StoredModel
    config: Mapping[str, Any] | None
    """The model's config.json: the one beside the source, the base model's, or the one in the source."""
    config_path: str | None = None
    """Path of the config, if it is a file."""
    companions: tuple[CompanionFile, ...] = ()
    """Small files beside the source."""
    notes: tuple[tuple[str, str], ...] = ()
    """Notes on companions that share a name, so that only one is used."""
    place: str | None = None
    """Path of the source; None: memory."""
    own: OwnConfig | None = None
    """The knowledge of a live module about itself; None: files."""
    plain_names: Mapping[str, str] = field(default_factory=dict)
    """Name from a wrapper -> the model's own name, for a live model."""
    unsaved: tuple[str, ...] = ()
    """Names of a live module's tensors that `save_pretrained` leaves out, and therefore the source, too."""


def read_source(
    path: str,
    *,
    base: BaseModel | None = None,
    layouts: LayoutMap | None = None,
    part: str | None = None,
    world_size: int | None = None,
    share: tuple[int, int] = (0, 1),
    module_names: Collection[str] = (),
    keeps_names: bool = False,
) -> FoundSource:
    """Read the source at a path, only its metadata; arguments as `read_found`, errors as `find_source` and readers."""
    return read_found(
        path,
        find_source(path),
        base=base,
        layouts=layouts,
        part=part,
        world_size=world_size,
        share=share,
        module_names=module_names,
        keeps_names=keeps_names,
    )


def read_found(
    asked: str,
    where: SourcePlace,
    *,
    base: BaseModel | None = None,
    layouts: LayoutMap | None = None,
    part: str | None = None,
    world_size: int | None = None,
    is_left_out: Callable[[str], bool] | None = None,
    for_layouts: bool = False,
    beside: tuple[tuple[CompanionFile, ...], tuple[tuple[str, str], ...]] | None = None,
    share: tuple[int, int] = (0, 1),
    module_names: Collection[str] = (),
    keeps_names: bool = False,
) -> FoundSource:
    """Read a source at its place with the best reader of those that recognise it.

    Args:
        asked: the path from the user.
        where: the place where the source was found, with its readers.
        base: gives whole shapes, and the config if there is none beside the source.
        layouts: layouts for tensors without a recorded layout.
        part: keys of the part to read, joined by dots; None: the only one that may be the model.
        world_size: number of ranks that wrote the source, as the caller states it; None: not stated.
        is_left_out: returns whether the caller will leave a tensor out, so that it needs no layout.
        for_layouts: whether the caller wants the layouts that ranks recorded, and not their config.
        beside: the result of `companions_of`, where the caller has it; None: this function calls it.
        share: this rank's share of the comparison with another source at the place, as in `read_best`.
        module_names: names of a live module that the source will fill; wrappers' parts of names that it has stay.
        keeps_names: whether names need not be those of config.json's class, as where a trainer will load them.
    """
    companions, notes = companions_of(asked, where) if beside is None else beside
    candidates = (*companions, *(base.companions if base is not None else ()))
    config_path = next((companion.path for companion in candidates if companion.name == "config.json"), None)
    config = _read_config(config_path)
    hints = Hints(
        layouts=layouts,
        shapes={name: shape for name, (_, shape) in base.tensors.items()} if base is not None else {},
        tied_to=lambda name: embedding_of(name, base.tensors if base is not None else (), config),
        is_left_out=is_left_out,
        needs_config=config_path is None and not for_layouts,
        needs_layouts=for_layouts,
        part=part,
        world_size=world_size,
        config=config,
        module_names=module_names,
        keeps_names=keeps_names,
        prove_shapes=lambda shapes: prove_shapes(shapes, config),
    )
    model = read_best(where, hints, share)
    if world_size is not None:
        _check_world_size(model, world_size)
    notes += where.notes
    known = config if config_path is not None else model.config
    return FoundSource(model, known, config_path, companions, (*notes, *note_zero_tails(model)), where.path)


def _check_world_size(model: StoredModel, stated: int) -> None:
    """Check the number of ranks that the caller states.

    Raises:
        IncompleteError: the source is of fewer ranks; UsageError: of more, or not of ranks.
    """
    if model.world_size == stated:
        return
    kind = UsageError if model.world_size is None or model.world_size > stated else IncompleteError
    raise kind(
        f"{model.path} was not written by as many ranks as {option('world_size', stated)} states",
        file=model.path,
        got="a source that records no ranks" if model.world_size is None else plural(model.world_size, "rank"),
        want=plural(stated, "rank"),
        next_step=f"correct {option('world_size')} or leave it out"
        if kind is UsageError
        else f"copy the files of the missing ranks into the folder, or correct {option('world_size')}, then {AGAIN}",
    )


def _read_config(path: str | None) -> Mapping[str, Any] | None:
    if path is None:
        return None
    from xrank.decisions.base_model import read_config

    return read_config(path)


def companions_of(asked: str, where: SourcePlace) -> tuple[tuple[CompanionFile, ...], tuple[tuple[str, str], ...]]:
    """Return the companions of the source at a place, and notes on unused ones.

    Raises:
        IncompleteError: a companion is a broken link.
    """
    # The states of a workspace contain a config; a config in a folder above does not replace it.
    folders = (
        (where.path, os.path.join(where.path, "huggingface"))
        if where.reader.name == WORKSPACE.name
        else find_checkpoint_folders(asked, where.path)
    )
    found, others = find_companions(folders)
    return found, tuple(("companion", text) for text in others)


def find_live_source(stored: StoredModel, own: OwnConfig, base: BaseModel | None) -> FoundSource:
    """Return the parts of a live model on all ranks as a source, under the model's own names.

    Args:
        stored: the parts of all ranks.
        own: the knowledge of the module about itself.
        base: base model, which gives the config if it has one.

    Raises:
        UsageError: a tensor has an empty name, or is a placeholder of DeepSpeed's ZeRO-3.
    """
    config_path = next((c.path for c in base.companions if c.name == "config.json"), None) if base else None
    config = base.config if base is not None and config_path is not None else own.config
    stored = drop_states(stored)
    known = base.tensors if base is not None else ()
    plain = plain_names([*(shard.name for shard in stored.shards), *stored.absent], make_finder(known, config), known)
    stored = rename_tensors(stored, plain)
    stored = replace(stored, aliases=_choose_saved(stored.aliases, own.tied))
    unsaved = tuple(shard.name for shard in stored.shards if shard.name in own.unsaved)
    stored = replace(stored, shards=tuple(shard for shard in stored.shards if shard.name not in own.unsaved))
    _check_tensors(stored, base)
    return FoundSource(stored, config, config_path, own=own, plain_names=plain, unsaved=unsaved)


def _choose_saved(aliases: Mapping[str, str], tied: Sequence[str]) -> Mapping[str, str]:
    """Return aliases of the name that `save_pretrained` keeps for each tensor.

    It leaves out the names that match a pattern, in their order, as long as one name remains
    (transformers/modeling_utils.py: remove_tied_weights_from_state_dict).
    """
    names_of: dict[str, list[str]] = {}
    for alias, target in aliases.items():
        names_of.setdefault(target, [target]).append(alias)
    found: dict[str, str] = {}
    for target, names in names_of.items():
        left_out = [name for name in sorted(names) if any(re.search(pattern, name) for pattern in tied)]
        kept = target if target not in left_out else next((n for n in names if n not in left_out), max(names))
        found |= {name: kept for name in names if name != kept}
    return found


def _check_tensors(stored: StoredModel, base: BaseModel | None) -> None:
    """Refuse tensors without a name, or of shape [0], as ZeRO-3 leaves them in the state dict of a partitioned model.

    Raises:
        UsageError: there are such tensors; for shape [0], unless the base model's tensor has it, too.
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
