"""The plan of a model folder: find a source, decide its output, prove the plan; no byte of a tensor is read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import xxhash
from msgspec import Struct, field
from msgspec.structs import replace

from xrank.engine.hf_folder import lay_out, lay_out_file
from xrank.engine.planner import Plan, make_plan
from xrank.engine.transforms import Transform, Transforms, plan_transformed
from xrank.errors import AGAIN, LayoutError, UsageError, option
from xrank.layout import LayoutMap
from xrank.layout.output_files import Selection
from xrank.layout.stored_model import StoredModel
from xrank.readers.discovery import WORKSPACE, SourcePlace, find_source
from xrank.readers.records import refuse_foreign_names
from xrank.recipes.adapters import adapter_beside, check_ties
from xrank.recipes.config_proof import prove_config
from xrank.recipes.decision import Decision, Purpose, Request, decide
from xrank.recipes.found_source import BaseModel, FoundSource
from xrank.recipes.missing_tensors import check_against, describe_skipped_check
from xrank.recipes.options import GatherOptions
from xrank.recipes.own_config import OwnConfig
from xrank.recipes.recipe_choice import fits_any_recipe
from xrank.recipes.saved_form import TABLE
from xrank.recipes.sources import complete_adapter, find_live_source, open_base_model, read_source
from xrank.storage import places
from xrank.words import list_text


def digest_of_plan(plan: Plan, *options: str) -> str:
    """Return a digest that is the same for the same source, options and output."""
    state = xxhash.xxh3_128()
    for file in plan.source.files:
        state.update(repr(file.identity).encode())
    for tensor in plan.tensors:
        state.update(repr((tensor.output, tensor.source_dtype)).encode())
        if tensor.changed:
            state.update(repr(sorted(tensor.changed.items())).encode())
        if tensor.update is not None:
            a, b, rule = tensor.update.a, tensor.update.b, tensor.update.rule
            place = (rule.num_blocks, rule.start) if rule.num_blocks > 1 or rule.start else ()
            what = (a.output, b.output, rule.scale, rule.is_transposed, *place)
            state.update(repr(what).encode())
        for copies in tensor.read:
            for array in (copies.rank, copies.record, copies.nests.x, copies.nests.y, copies.nests.loops):
                state.update(array.tobytes())
    for made in plan.files:
        state.update(made.output.name.encode() + made.output.header)
    for choice in options:
        state.update(choice.encode("utf-8", "surrogateescape"))  # a path may hold bytes that are not text
    return state.hexdigest()


_GENERATION_NAME = "generation_config.json"
_TRAINING_NAMES = "the names are the training framework's, as asked; from_pretrained does not find those of the model"
_AS_IN_MEMORY = (
    "tensors have their names and shapes in memory; save_pretrained would change some of this model's, and other "
    "programs may not know these"
)


class FolderPlan(Struct, frozen=True, eq=False, dict=True):
    """A planned and proven model folder; nothing is written yet."""

    decision: Decision
    plan: Plan
    selection: Selection
    """The tensors of the folder: those of the decision, or a transform's results."""
    checked_against_base: str | None
    notes: tuple[tuple[str, str], ...]
    own_texts: Mapping[str, str] = field(default_factory=dict)
    """Content of further small files that xrank makes, by name."""
    transforms: Transforms | None = None
    """The tensors of a live model that a caller's function replaces."""

    @property
    def options(self) -> GatherOptions:
        """The options of the decision."""
        return self.decision.options

    @property
    def source(self) -> StoredModel:
        """The model under the names of the output."""
        return self.decision.source

    @property
    def texts(self) -> dict[str, str]:
        """Small files to write, by name, beside config.json."""
        adapted = self.decision.adapted
        return {**self.own_texts, **(adapted.texts if adapted is not None else {})}

    @property
    def padding_dropped(self) -> dict[str, int]:
        """Rows of padding that outputs lost, by name."""
        dropped = self.source.padding_dropped
        return {output.name: dropped[output.name] for output in self.selection.outputs if output.name in dropped}

    @cached_property
    def digest(self) -> str:
        """Digest that identifies an interrupted output: the same source, options and output give the same digest."""
        if self.options.sign is None:
            return digest_of_plan(self.plan, self.options.replicas)
        from xrank.formats.signature import name_key

        # A stage with a signature is not a start for an output without one, or with another key's.
        signing = name_key(os.fspath(self.options.sign)), str(self.options.attest)
        return digest_of_plan(self.plan, self.options.replicas, *signing)


def plan_gather(
    source: str,
    options: GatherOptions,
    *,
    base_model: str | os.PathLike[str] | None = None,
    layouts: str | os.PathLike[str] | LayoutMap | None = None,
    format_name: str | None = None,
    part: str | None = None,
    world_size: int | None = None,
    workspace: bool = False,
    recipe: str | os.PathLike[str] | None = None,
    share: tuple[int, int] = (0, 1),
) -> FolderPlan:
    """Plan a gather and prove the plan; read only metadata, unless two forms of the model lie there.

    Arguments and errors are those of `gather_checkpoint`; `share` is that of `read_best`.
    """
    base = None if base_model is None else open_base_model(base_model)
    given = layouts if isinstance(layouts, LayoutMap) or layouts is None else read_layouts(layouts)
    source = places.enter(source)
    where = SourcePlace(source, WORKSPACE.load()) if workspace else find_source(source, format_name=format_name)
    found = read_source(
        source,
        where,
        base=base,
        layouts=given,
        part=part,
        world_size=world_size,
        is_left_out=options.leaves_out,
        share=share,
        keeps_names=recipe not in (None, TABLE),  # such a recipe knows the names that the source has
    )
    return plan_found(found, where.path, options, base, given, recipe)


def plan_found(
    found: FoundSource,
    place: str,
    options: GatherOptions,
    base: BaseModel | None,
    given: LayoutMap | None,
    recipe: str | os.PathLike[str] | None = None,
) -> FolderPlan:
    """Plan the gather of a source that was read from a place. Errors are those of `gather_checkpoint`."""
    if options.strict_pickles:
        refuse_foreign_names(found.model)
    if options.adapter == "merge" and base is not None:
        found = replace(found, model=complete_adapter(found.model, base, options.adapter_config, place))
    request = Request(Purpose.MODEL, options, recipe, {} if given is None else given.aliases)
    decision = decide(found, request, base)
    notes = layout_notes(given, decision.source)
    if decision.base is not None and not decision.base.tensors:
        notes.append(describe_skipped_check(decision.base, place))
    notes += adapter_beside(place) if decision.adapted is None else decision.adapted.notes
    if recipe == "none" and fits_any_recipe(decision.source):
        notes.append(("training-names", _TRAINING_NAMES))
    return _plan_output(decision, notes)


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
) -> FolderPlan:
    """Plan an export and prove the plan. Errors are those of `xrank.commands.export.export_model`.

    A `transform` changes whole tensors after the comparison with the base model.
    """
    base = None if base_model is None else open_base_model(base_model)
    _ = options.budget  # refuses too small buffers before any work
    found = find_live_source(stored, own, base)
    aliases = layouts.aliases if layouts is not None else {}
    decision = decide(found, Request(Purpose.MODEL, options, recipe, aliases, config_overrides), base)
    notes = [] if decision.adapted is None else [*decision.adapted.notes]
    if own.conversions and decision.source.recipe is None:
        notes.append(("names-as-in-memory", _AS_IN_MEMORY))
    if found.unsaved:
        notes.append(("not-saved", f"save_pretrained leaves out: {list_text(found.unsaved, 4)}"))
    return _plan_output(decision, notes, transform)


def _plan_output(
    decision: Decision, more_notes: Sequence[tuple[str, str]], transform: Transform | None = None
) -> FolderPlan:
    """Return the proven plan of a decision, after a check against the base model."""
    source, options, selection, adapted = decision.source, decision.options, decision.selection, decision.adapted
    found, small, base, stem = decision.found, decision.small, decision.base, decision.weights_stem
    max_nbytes, outputs, transforms = options.max_shard_nbytes, selection.outputs, None
    if adapted is not None:
        if transform is not None:
            problem = "a transform of a model with an adapter is not possible"
            step = "give what module.merge_and_unload() returns, or leave transform= out"
            got, want = "transform=, and tensors of an adapter", "a model without an adapter, or no transform"
            raise UsageError(problem, got=got, want=want, next_step=step)
        check_ties(adapted.updates or (), adapted.trained, selection.tied)
        # The adapter is merged into the model's files, or has a file of its own.
        own_outputs = [output for output in outputs if output.name in adapted.own]
        outputs = tuple(output for output in outputs if output.name not in adapted.own)
        files = [] if adapted.is_alone or not outputs else list(lay_out(outputs, max_nbytes, stem=stem))
        files += [lay_out_file(adapted.weights_file, own_outputs)] if own_outputs else []
        whole = replace(adapted.source, shards=(*adapted.source.shards, *adapted.factors))
        plan = make_plan(whole, files, tied=selection.tied, updates=adapted.updates)
    elif transform is None:
        plan = make_plan(source, lay_out(list(outputs), max_nbytes, stem=stem), tied=selection.tied)
    else:
        plan, selection, transforms = plan_transformed(source, selection, transform, max_nbytes, stem)
    checked = None
    excluded = set(decision.selection.excluded)
    if base is not None:
        tied = {name for names in decision.selection.tied.values() for name in names}
        checked = check_against(base, list(outputs), excluded, tied)
    notes = (*source.notes, *found.notes, *selection.notes, *small.notes, *more_notes)
    if decision.is_model:
        notes += prove_config(
            found,
            source,
            base=base,
            config=None if small.config_text is None else json.loads(small.config_text),
            left_out=excluded,
            apart=() if adapted is None else adapted.own,
            written=None if transform is None else selection.outputs,
        )
    # A live module makes this file where the base model has none.
    text = found.own.generation_text if found.own is not None and decision.is_model else None
    is_copied = any(companion.name == _GENERATION_NAME for companion in small.companions)
    own_texts = {} if text is None or is_copied else {_GENERATION_NAME: text}
    return FolderPlan(decision, plan, selection, checked, notes, own_texts, transforms)


def read_layouts(path: str | os.PathLike[str]) -> LayoutMap:
    """Read a layout file that the caller named."""
    try:
        return LayoutMap.read(path)
    except (LayoutError, UsageError) as error:
        error.about(next_step=f"correct {option('layouts')} or the file, then {AGAIN}")
        raise


def layout_notes(layouts: LayoutMap | None, stored: StoredModel) -> list[tuple[str, str]]:
    """Return the report's notes on rules that do not decide for any tensor."""
    if layouts is None:
        return []
    unused = layouts.find_unused([shard.name for shard in stored.shards])
    if len(unused) > 3:
        return [("unused-rule", f"rules of the layout file match no tensor: {list_text(map(repr, unused), 3)}")]
    return [("unused-rule", f"the layout file's rule {pattern!r} matches no tensor") for pattern in unused]
