"""The plan of a gather: the source read, the output decided, the proof made; nothing is written yet."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xrank.conversion.adapters import Adapted, adapt, adapter_beside, check_ties
from xrank.conversion.base_model import BaseModel, check_against, open_base_model, read_config
from xrank.conversion.options import GatherOptions
from xrank.conversion.plan_digest import digest_of_plan
from xrank.conversion.recipe_choice import choose_recipe, follow_recipe
from xrank.conversion.selection import Selection, select
from xrank.errors import LayoutError, UsageError
from xrank.layout import LayoutMap
from xrank.plan.output import OutputTensor
from xrank.plan.planner import Plan, make_plan
from xrank.plan.source import StoredModel
from xrank.readers.base import Hints
from xrank.readers.discovery import find_source
from xrank.readers.workspace import WorkspaceReader
from xrank.recipes.shape_proof import prove_shapes
from xrank.writers.companions import Companion, source_companions
from xrank.writers.hf_folder import lay_out, lay_out_file

__all__ = ["Gather", "companions_beside", "config_text_of", "layout_notes", "plan_gather", "read_layouts"]

_CAST_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """A gather that is planned and proven; nothing is written yet."""

    options: GatherOptions
    source: StoredModel
    base: BaseModel | None
    selection: Selection
    plan: Plan
    companions: tuple[Companion, ...]
    """Copied byte for byte."""
    config_text: str | None
    """A config.json made here: of the states' config, or with the dtype of a cast."""
    checked_against_base: str | None
    notes: tuple[tuple[str, str], ...]
    adapted: Adapted | None = None
    """What became of an adapter, where the source has one."""

    @property
    def digest(self) -> str:
        """Says which plan an interrupted output belongs to: the same source, options and output give the same."""
        return digest_of_plan(self.plan, self.options.replicas)


def plan_gather(
    source: str,
    options: GatherOptions,
    *,
    base_model: str | os.PathLike[str] | None = None,
    layout: str | os.PathLike[str] | LayoutMap | None = None,
    format_name: str | None = None,
    workspace: bool = False,
    recipe: str | os.PathLike[str] | None = None,
) -> Gather:
    """Return the proven plan of a gather; reads metadata alone. Arguments and errors as `gather_checkpoint`."""
    base = open_base_model(base_model) if base_model is not None else None
    layouts = layout if isinstance(layout, LayoutMap) or layout is None else read_layouts(layout)
    place, reader = (source, WorkspaceReader()) if workspace else find_source(source, format_name=format_name)
    beside = companions_beside(place)
    config_path = next((c.path for c in (*beside, *(base.companions if base else ())) if c.name == "config.json"), None)
    config = read_config(config_path) if config_path is not None else None
    hints = Hints(
        layouts=layouts,
        shapes={name: shape for name, (_, shape) in base.tensors.items()} if base else {},
        needs_config=config_path is None,
        prove_shapes=lambda shapes: prove_shapes(shapes, config),
    )
    stored = reader.read(place, hints)
    config = config if config_path is not None else stored.config
    adapted = adapt(stored, options, place, base.tensors if base else {})
    if adapted is not None:
        stored = adapted.source
    matched = choose_recipe(stored, config, recipe)
    if matched is not None and adapted is not None:
        raise UsageError(
            f"{stored.path} holds an adapter of tensors that the recipe {matched.recipe.name} would rename",
            file=stored.path,
            got=f"an adapter, and names of {matched.recipe.name}",
            want="an adapter of a model under Hugging Face's names",
            next_step="keep the names with --recipe none",
        )
    if matched is not None:
        stored = follow_recipe(stored, matched, config)
        names = [shard.name for shard in stored.shards]
        kept = (p for p in matched.recipe.keep_fp32 if any(re.fullmatch(p, name) for name in names))
        options = options.with_keep_fp32(kept)
    aliases = layouts.aliases if layouts is not None else {}
    if adapted is not None:
        aliases = {adapted.new_name(name): adapted.new_name(target) for name, target in aliases.items()}
        base = None if adapted.is_alone else base
    selection = select(stored, options, base, config, aliases, adapted.own if adapted is not None else ())
    outputs = list(selection.outputs)
    if adapted is None:
        files = lay_out(outputs, options.max_shard_nbytes)
        plan = make_plan(stored, files, tied=selection.tied)
    else:
        outputs = [output for output in outputs if output.name not in adapted.own]
        plan = _plan_with_adapter(adapted, selection, outputs, options)
    dropped = {name for names in selection.tied.values() for name in names}
    checked = check_against(base, outputs, set(selection.excluded), dropped) if base else None
    companions = {c.name: c for c in (*(base.companions if base else ()), *beside)}
    config_text, config_notes = config_text_of(config_path, config, options)
    is_model = adapted is None or not adapted.is_alone
    if not is_model:
        config_text, config_notes = None, []
    if config_text is not None or not is_model:
        companions.pop("config.json", None)  # made anew, or not an adapter's
    notes = [*stored.notes, *selection.notes, *config_notes, *layout_notes(layouts, stored)]
    notes += adapter_beside(place) if adapted is None else adapted.notes
    return Gather(
        options,
        stored,
        base,
        selection,
        plan,
        tuple(companions[name] for name in sorted(companions)),
        config_text,
        checked,
        tuple(notes),
        adapted,
    )


def _plan_with_adapter(
    adapted: Adapted, selection: Selection, outputs: Sequence[OutputTensor], options: GatherOptions
) -> Plan:
    """Return the plan of the model's files, with what is merged into them, or of them and the adapter's own."""
    check_ties(adapted, selection.tied)
    own = [output for output in selection.outputs if output.name in adapted.own]
    files = [] if adapted.is_alone else list(lay_out(outputs, options.max_shard_nbytes))
    if own:
        files.append(lay_out_file(adapted.weights_file, own))
    whole = replace(adapted.source, shards=(*adapted.source.shards, *adapted.factors))
    return make_plan(whole, files, tied=selection.tied, updates=adapted.updates)


def read_layouts(path: str | os.PathLike[str]) -> LayoutMap:
    """Return the content of the file given as ``--layout``.

    Raises:
        LayoutError, UsageError: as `LayoutMap.read`.
    """
    try:
        return LayoutMap.read(path)
    except (LayoutError, UsageError) as error:
        error.next_step = error.next_step or "correct --layout or the file, then run the same command"
        raise


def companions_beside(source: str) -> tuple[Companion, ...]:
    """Return the companions in a source's folder; none where the source is a file."""
    return source_companions(source) if os.path.isdir(source) else ()


def layout_notes(layouts: LayoutMap | None, stored: StoredModel) -> Sequence[tuple[str, str]]:
    """Return what the report says of rules that decide for no tensor."""
    if layouts is None:
        return []
    unused = layouts.unused([shard.name for shard in stored.shards])
    return [("unused-rule", f"the layout file's rule {pattern!r} matches no tensor") for pattern in unused]


def config_text_of(
    path: str | None, found: Mapping[str, Any] | None, options: GatherOptions
) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the config.json to write in place of copying the one at `path`, and what is to be said about it."""
    if found is None:
        return None, [("no-config", "no config.json was found; add one, or gather again with --base-model")]
    cast = _CAST_NAMES.get(options.dtype)
    if path is not None and cast is None:
        return None, []
    config = dict(found)
    notes = []
    if cast is not None:
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        if config.get(key) != cast:
            notes.append(("config-dtype", f"config.json says {key} {cast}, as asked for by --dtype {options.dtype}"))
            config[key] = cast
    # As transformers writes it (configuration_utils.py: to_json_string).
    return json.dumps(config, indent=2, sort_keys=True) + "\n", notes
