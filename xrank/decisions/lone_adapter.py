"""An adapter that lies alone, as trainers save it, with the base model that the user names."""

from __future__ import annotations

import os
from dataclasses import replace

from xrank.decisions.adapter_config import find_config
from xrank.decisions.adapter_names import PREFIX, find_adapter
from xrank.decisions.base_model import BaseModel
from xrank.decisions.saved_form import convert_to_module
from xrank.plan.source import StoredModel, merge_models
from xrank.readers.base import Hints
from xrank.readers.hugging_face.folder import HfFolderReader
from xrank.words import list_text

__all__ = ["complete_adapter"]


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
    converted = convert_to_module(stored, base.config, adapted | stacked)
    own = set(names.base.values())
    inner = stored if converted is None else converted.model
    kept = replace(inner, shards=tuple(shard for shard in inner.shards if shard.name not in own))
    whole = merge_models(replace(source, absent=()), kept, PREFIX)
    replaced = sorted(own.intersection(shard.name for shard in inner.shards))
    notes = [("adapter-trained", f"{list_text(replaced)}: taken from {source.path}, not from the base model")]
    return replace(whole, nbytes=source.nbytes + stored.nbytes, notes=(*source.notes, *(notes if replaced else ())))
