"""The plan of an export: what ranks told made one model, the output decided, the proof made; no byte is read yet."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xrank import dtypes
from xrank.decisions.adapter_config import checked_config
from xrank.decisions.adapter_names import find_adapter
from xrank.decisions.adapters import Adapted, adapt
from xrank.decisions.base_model import BaseModel, check_against, open_base_model
from xrank.decisions.fused_experts import match_fused
from xrank.decisions.gather_plan import Gather, plan_with_adapter, renames_adapted
from xrank.decisions.options import GatherOptions
from xrank.decisions.own_config import OwnConfig
from xrank.decisions.recipe_choice import choose_recipe, under_recipe
from xrank.decisions.selection import select
from xrank.decisions.small_files import small_files_of
from xrank.decisions.transformed_plan import plan_transformed
from xrank.decisions.transforms import Transform
from xrank.errors import UsageError
from xrank.layout import LayoutMap
from xrank.plan.executor import Budget
from xrank.plan.planner import make_plan
from xrank.plan.source import StoredModel
from xrank.readers.wrapper_names import plain_names, renamed
from xrank.words import list_text
from xrank.writers.hf_folder import lay_out

__all__ = ["plan_export"]

_GENERATION_NAME = "generation_config.json"


def plan_export(
    stored: StoredModel,
    options: GatherOptions,
    own: OwnConfig,
    *,
    base_model: str | os.PathLike[str] | None = None,
    layouts: LayoutMap | None = None,
    recipe: str | os.PathLike[str] | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    transform: Transform | None = None,
) -> Gather:
    """Return the proven plan of an export; arguments and errors as `xrank.conversion.export.export_model`.

    Args:
        stored: what all ranks hold.
        options: what is asked for.
        own: what the module knows of itself.
        base_model: a model folder, or the ID of one in the local Hugging Face cache.
        layouts: for their aliases.
        recipe: from training names to Hugging Face's.
        config_overrides: what config.json is to say besides.
        transform: what becomes of whole tensors; the base model's names and shapes are those before it.
    """
    base = open_base_model(base_model) if base_model is not None else None
    config_path = next((c.path for c in base.companions if c.name == "config.json"), None) if base else None
    config = base.config if base is not None and config_path is not None else own.config
    # Whether the buffers are large enough is known now, and nothing is written yet.
    Budget.within(options.max_memory_nbytes, options.num_workers)
    plain = plain_names([*(shard.name for shard in stored.shards), *stored.absent])
    stored = renamed(stored, plain)
    unsaved = [shard.name for shard in stored.shards if shard.name in own.unsaved]
    stored = replace(stored, shards=tuple(shard for shard in stored.shards if shard.name not in own.unsaved))
    _check_tensors(stored, base)
    adapted = _adapted(stored, options, own, base)
    if adapted is not None:
        if transform is not None:
            raise UsageError(
                "transform= and adapter= were given together",
                got="a model with an adapter, and a transform",
                next_step="merge the adapter first, or leave one of the two out",
            )
        stored = adapted.source
    whole = stored if adapted is None else adapted.base
    matched = match_fused(whole, own.config) if recipe is None else None
    matched = matched or choose_recipe(whole, config, recipe)
    if matched is not None and adapted is not None:
        raise renames_adapted(stored, matched)
    stored, options = under_recipe(stored, matched, config, options)
    aliases = layouts.aliases if layouts is not None else {}
    aliases = {plain.get(name, name): plain.get(target, target) for name, target in aliases.items()}
    if adapted is not None:
        aliases = {adapted.new_name(name): adapted.new_name(target) for name, target in aliases.items()}
        base = None if adapted.is_alone else base
    kept_apart = adapted.own if adapted is not None else frozenset()
    selection = select(stored, options, base, config, aliases, kept_apart)
    outputs, excluded = [o for o in selection.outputs if o.name not in kept_apart], set(selection.excluded)
    dropped = {name for names in selection.tied.values() for name in names}
    transforms = None
    if adapted is not None:
        plan = plan_with_adapter(adapted, selection, outputs, options)
    elif transform is None:
        plan = make_plan(stored, lay_out(outputs, options.max_shard_nbytes), tied=selection.tied)
    else:
        plan, selection, transforms = plan_transformed(stored, selection, transform, options.max_shard_nbytes)
    checked = check_against(base, outputs, excluded, dropped) if base else None
    is_model = adapted is None or not adapted.is_alone
    small = small_files_of(
        base.companions if base is not None else (),
        config_path,
        config,
        options,
        is_model=is_model,
        overrides=config_overrides,
    )
    texts = {}
    if is_model and own.generation_text is not None and _GENERATION_NAME not in {c.name for c in small.companions}:
        texts[_GENERATION_NAME] = own.generation_text
    told = (
        "no recipe fits, so tensors have their names and shapes in memory; save_pretrained would change some of this "
        "model's, and from_pretrained may not know these"
    )
    as_in_memory = [("names-as-in-memory", told)] if own.is_renamed and matched is None else []
    left_out = [("not-saved", f"save_pretrained leaves out: {list_text(unsaved, 4)}")] if unsaved else []
    return Gather(
        options,
        stored,
        base,
        selection,
        plan,
        small.companions,
        small.config_text,
        checked,
        (
            *stored.notes,
            *selection.notes,
            *small.notes,
            *(adapted.notes if adapted is not None else ()),
            *as_in_memory,
            *left_out,
        ),
        adapted,
        own_texts=texts,
        transforms=transforms,
    )


def _adapted(stored: StoredModel, options: GatherOptions, own: OwnConfig, base: BaseModel | None) -> Adapted | None:
    """Return the model with its adapter kept apart or merged; errors as `adapt`."""
    known = base.tensors if base is not None else {}
    names = find_adapter([shard.name for shard in stored.shards], stored.path, known)
    if names is not None and options.adapter is None:
        example = next(iter(names.saved))
        raise UsageError(
            "the model holds an adapter, and what is to become of it was not said",
            tensor=example,
            got=f"{len(names.saved)} tensors of it, such as {example}",
            want="a model without one; or, of export_model, adapter=",
            next_step='give export_model adapter="separate" (a PEFT folder beside the model) or adapter="merge" (one '
            "model); or give what module.merge_and_unload() returns",
        )
    if names is None and own.adapter_text is not None:
        kind = json.loads(own.adapter_text).get("peft_type")
        raise UsageError(
            f"the model is a PeftModel whose adapter, {kind}, is no LoRA",
            got=f"peft_type {kind}",
            want="LoRA, with adapter=, or a model without an adapter",
            next_step="give what module.merge_and_unload() or module.unload() returns",
        )
    config = None
    if names is not None:
        if own.adapter_text is None:
            raise UsageError(
                "nothing says the rank and alpha of the model's adapter",
                tensor=next(iter(names.saved)),
                got=f"adapter={options.adapter!r}, tensors of an adapter, and no PeftModel",
                want="the PeftModel, which knows them",
                next_step="give the PeftModel itself; or what its merge_and_unload() returns, without adapter=",
            )
        shapes = {shard.name: shard.shape for shard in stored.shards}
        config = checked_config(json.loads(own.adapter_text), "the model's peft_config", names, shapes)
    return adapt(stored, options, stored.path, known, names=names, config=config)


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
