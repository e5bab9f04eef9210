"""The plan of a gather: the source read, the output decided, the proof made; nothing is written yet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from xrank.decisions.adapters import Adapted, adapt, adapter_beside, check_ties
from xrank.decisions.base_check import not_compared
from xrank.decisions.base_model import BaseModel, check_against, open_base_model
from xrank.decisions.named_source import read_found
from xrank.decisions.options import GatherOptions
from xrank.decisions.plan_digest import digest_of_plan
from xrank.decisions.recipe_choice import choose_recipe, under_recipe
from xrank.decisions.selection import Selection, select
from xrank.decisions.small_files import small_files_of
from xrank.decisions.transformed_plan import Transforms
from xrank.errors import LayoutError, UsageError
from xrank.layout import LayoutMap
from xrank.plan.output import OutputTensor
from xrank.plan.planner import Plan, make_plan
from xrank.plan.source import StoredModel
from xrank.readers.discovery import find_source
from xrank.readers.own_readers import WORKSPACE
from xrank.recipes.matching import Match
from xrank.words import list_text
from xrank.writers.companions import Companion
from xrank.writers.hf_folder import lay_out, lay_out_file

__all__ = ["Gather", "layout_notes", "plan_gather", "plan_with_adapter", "read_layouts", "renames_adapted"]


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
    own_texts: Mapping[str, str] = field(default_factory=dict)
    """Further small files that are made here, by name."""
    transforms: Transforms | None = None
    """Of a live model, what a caller's function makes something else of."""

    @property
    def texts(self) -> dict[str, str]:
        """Small files to write, by name, beside config.json."""
        return {**self.own_texts, **(self.adapted.texts if self.adapted is not None else {})}

    @property
    def padding_dropped(self) -> dict[str, int]:
        """Rows of padding that outputs lost, by name."""
        dropped = self.source.padding_dropped
        return {output.name: dropped[output.name] for output in self.selection.outputs if output.name in dropped}

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
    place, reader = (source, WORKSPACE.load()) if workspace else find_source(source, format_name=format_name)
    found = read_found(source, place, reader, base=base, layouts=layouts, is_left_out=options.leaves_out)
    stored, config = found.model, found.config
    adapted = adapt(stored, options, place, base.tensors if base else {})
    if adapted is not None:
        stored = adapted.source
    matched = choose_recipe(stored if adapted is None else adapted.base, config, recipe)
    if matched is not None and adapted is not None:
        raise renames_adapted(stored, matched)
    stored, options = under_recipe(stored, matched, config, options)
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
        plan = plan_with_adapter(adapted, selection, outputs, options)
    dropped = {name for names in selection.tied.values() for name in names}
    checked = check_against(base, outputs, set(selection.excluded), dropped) if base else None
    small = small_files_of(
        (*(base.companions if base else ()), *found.companions),
        found.config_path,
        config,
        options,
        is_model=adapted is None or not adapted.is_alone,
        place=place,
    )
    notes = [*stored.notes, *found.notes, *selection.notes, *small.notes, *layout_notes(layouts, stored)]
    if base is not None and not base.tensors:
        notes.append(not_compared(base, place))
    notes += adapter_beside(place) if adapted is None else adapted.notes
    return Gather(
        options,
        stored,
        base,
        selection,
        plan,
        small.companions,
        small.config_text,
        checked,
        tuple(notes),
        adapted,
    )


def plan_with_adapter(
    adapted: Adapted, selection: Selection, outputs: Sequence[OutputTensor], options: GatherOptions
) -> Plan:
    """Return the plan of the model's files, with what is merged into them, or of them and the adapter's own.

    Raises:
        UsageError: as `check_ties`; IncompleteError, ContradictionError: as `make_plan`.
    """
    check_ties(adapted, selection.tied)
    own = [output for output in selection.outputs if output.name in adapted.own]
    files = [] if adapted.is_alone else list(lay_out(outputs, options.max_shard_nbytes))
    if own:
        files.append(lay_out_file(adapted.weights_file, own))
    whole = replace(adapted.source, shards=(*adapted.source.shards, *adapted.factors))
    return make_plan(whole, files, tied=selection.tied, updates=adapted.updates)


def renames_adapted(source: StoredModel, matched: Match) -> UsageError:
    """Return the refusal of a recipe that would rename what an adapter in the source is for."""
    return UsageError(
        f"{source.path} holds an adapter of tensors that the recipe {matched.recipe.name} would rename",
        file=source.path,
        got=f"an adapter, and names of {matched.recipe.name}",
        want="an adapter of a model under Hugging Face's names",
        next_step="keep the names with --recipe none",
    )


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


def layout_notes(layouts: LayoutMap | None, stored: StoredModel) -> Sequence[tuple[str, str]]:
    """Return what the report says of rules that decide for no tensor."""
    if layouts is None:
        return []
    unused = layouts.unused([shard.name for shard in stored.shards])
    if len(unused) > 3:
        return [("unused-rule", f"rules of the layout file match no tensor: {list_text(map(repr, unused), 3)}")]
    return [("unused-rule", f"the layout file's rule {pattern!r} matches no tensor") for pattern in unused]
