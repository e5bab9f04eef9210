"""An adapter that lies alone, as trainers save it, with the base model that the user names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xrank.decisions.adapter_config import find_config
from xrank.decisions.adapter_names import PREFIX, find_adapter
from xrank.decisions.adapters import Adapted, check_ties
from xrank.decisions.base_model import BaseModel
from xrank.decisions.saved_form import convert_to_module
from xrank.plan.source import StoredModel, merge_models
from xrank.readers.base import Hints
from xrank.readers.hugging_face.folder import HfFolderReader
from xrank.recipes.tied_weights import find_class_ties
from xrank.words import list_text


def complete_adapter(
    source: StoredModel, base: BaseModel, given: str | os.PathLike[str] | None, place: str
) -> StoredModel:
    """Return a source that holds an adapter alone with the base model's tensors beside it; return others unchanged.

    The base model gets its names in memory, which those of adapters follow. Tensors that the adapter's folder holds
    whole, as PEFT saves `modules_to_save`, stand in place of the base model's.

    Args:
        source: the model that the reader found.
        base: the base model.
        given: path of the adapter's configuration; None: search for one.
        place: path of the source.

    Raises:
        UsageError, ContradictionError: as for `find_adapter`, `find_config` and the reader of the base model.
    """
    names = find_adapter([shard.name for shard in source.shards], source.path, base.tensors)
    if names is None or not names.is_alone or not base.tensors:
        return source
    config = find_config(given, place, names, {shard.name: shard.shape for shard in source.shards})
    stored = HfFolderReader().read(base.path, Hints())
    adapted = {
        name
        for pair in names.pairs
        for name in (config.parameters_of(pair.module) if pair.depth else ()) or [f"{pair.module}.weight"]
    }
    stacked = {name for pair in names.pairs for name in config.parameters_of(pair.module)}
    converted = convert_to_module(stored, base.config, dict.fromkeys(adapted | stacked))
    own = set(names.base.values())
    check_ties(adapted, own.union(names.trained), {}, base.config)
    inner = stored if converted is None else converted.model
    kept = replace(inner, shards=tuple(shard for shard in inner.shards if shard.name not in own))
    whole = merge_models(replace(source, absent=()), kept, PREFIX)
    replaced = sorted(own.intersection(shard.name for shard in inner.shards))
    notes = [("adapter-trained", f"{list_text(replaced)}: taken from {source.path}, not from the base model")]
    return replace(whole, nbytes=source.nbytes + stored.nbytes, notes=(*source.notes, *(notes if replaced else ())))


def drop_tied(adapted: Adapted, config: Mapping[str, Any] | None) -> Adapted:
    """Return an adapter alone without tensors of the base model that are tied to one that it lacks; others unchanged.

    A trainer that leaves frozen parameters out may leave the other name of one of them in the state. PEFT saves an
    embedding and its head together, or what `modules_to_save` names.

    Args:
        adapted: the source with its adapter.
        config: the model's config.json.
    """
    if not adapted.is_alone or adapted.config_text is None:
        return adapted
    kept = json.loads(adapted.config_text).get("modules_to_save") or []
    names = {shard.name.removeprefix(PREFIX) for shard in adapted.source.shards}
    dropped = [
        PREFIX + tied
        for tied, target in find_class_ties(names, config).items()
        if tied in names and target not in names and not any(f".{tied}".endswith(f".{one}.weight") for one in kept)
    ]
    if not dropped:
        return adapted
    shards = tuple(shard for shard in adapted.source.shards if shard.name not in dropped)
    note = ("adapter-tied", f"left out, because they are tied to tensors that are not here: {list_text(dropped)}")
    source = replace(adapted.source, shards=shards)
    return replace(adapted, source=source, own=adapted.own.difference(dropped), notes=(*adapted.notes, note))
