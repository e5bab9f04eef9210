"""Brings two models under the same names, so that their values can be compared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from xrank.comparing.compared_sides import ComparedSide
from xrank.comparing.correspondence import OR_CONFIG, Compared
from xrank.decisions.adapter_config import find_config
from xrank.decisions.adapters import Adapted, adapt
from xrank.decisions.base_model import BaseModel
from xrank.decisions.decision import Purpose, Request, decide
from xrank.decisions.found_source import FoundSource
from xrank.decisions.lone_adapter import complete_adapter
from xrank.decisions.options import GatherOptions
from xrank.decisions.recipe_choice import load_recipe
from xrank.decisions.saved_form import TABLE, convert_adapted, convert_to_files
from xrank.errors import ContradictionError, UsageError, option
from xrank.plan.low_rank import LowRank
from xrank.plan.source import StoredModel, StoredShard
from xrank.recipes.matching import match


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """The two models under the same names."""

    ours: Compared
    """The side that has the adapter, where one has."""
    theirs: Compared
    factors: tuple[StoredShard, ...] = ()
    updates: Mapping[str, LowRank] = field(default_factory=dict)
    """Name -> the update that is added to it before the comparison."""
    proof: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[tuple[str, str], ...] = ()


def pair_plain(ours: ComparedSide, theirs: ComparedSide, recipe: str | os.PathLike[str] | None) -> Pair:
    """Return both as they are, or under Hugging Face's names where those differ."""
    models = [side.source.model for side in (ours, theirs)]
    if ours.shapes.keys() != theirs.shapes.keys() or recipe is not None:
        # A side under training names gets Hugging Face's; the config of one side serves both.
        sides = [ours.source, theirs.source]
        chosen = [recipe if recipe is not None and _fits(side.model, recipe) else None for side in sides]
        if chosen == [None, None]:
            chosen[0] = recipe  # its error names what does not fit
        models = [_name_model(sides[0], sides[1], chosen[0]), _name_model(sides[1], sides[0], chosen[1])]
    return Pair(_make_compared(ours, models[0]), _make_compared(theirs, models[1]))


def _fits(model: StoredModel, recipe: str | os.PathLike[str]) -> bool:
    return recipe in ("none", TABLE) or match(load_recipe(os.fspath(recipe)), [one.name for one in model.shards]).fits


def _name_model(source: FoundSource, other: FoundSource, recipe: str | os.PathLike[str] | None) -> StoredModel:
    """Return a side's model under Hugging Face's names; the other side's config serves where it has none."""
    known = source if source.config else replace(source, config=other.config)
    names = [shard.name for shard in other.model.shards]
    return decide(known, Request(Purpose.PROOF, recipe=recipe, file_names=names)).source


def _make_compared(side: ComparedSide, model: StoredModel) -> Compared:
    return Compared(side.path, side.with_tied(model), side.manifest, side.source.config)


def pair_adapters(ours: ComparedSide, theirs: ComparedSide, given: str | os.PathLike[str] | None) -> Pair:
    """Return both with their adapter's tensors apart."""
    assert ours.names is not None and theirs.names is not None
    our_model, our_notes = _drop_base(ours, theirs)
    their_model, their_notes = _drop_base(theirs, ours)
    num_saved = len(ours.names.saved)
    notes = [("adapter", f"{num_saved:,} of the tensors compared are an adapter's"), *our_notes, *their_notes]
    return Pair(
        Compared(ours.path, our_model, ours.manifest, ours.source.config),
        Compared(theirs.path, their_model, theirs.manifest, theirs.source.config),
        proof={"num_adapter_tensors": num_saved},
        notes=(*notes, *_check_scales(ours, theirs, given)),
    )


def _drop_base(side: ComparedSide, other: ComparedSide) -> tuple[StoredModel, list[tuple[str, str]]]:
    """Return a side with its adapter apart; drop its base tensors that the other side, an adapter alone, lacks."""
    assert side.names is not None and other.names is not None
    model = side.name_adapter_apart(other)
    if side.names.is_alone or not other.names.is_alone:
        return model, []
    wanted = {shard.name for shard in other.name_adapter_apart(side).shards}.union(side.names.saved.values())
    kept = tuple(shard for shard in model.shards if shard.name in wanted)
    text = f"{len(model.shards) - len(kept):,} tensors of {side.path} were not compared: {other.path} has no base model"
    return replace(model, shards=kept, aliases={}), [("adapter-alone", text)]


def _check_scales(
    ours: ComparedSide, theirs: ComparedSide, given: str | os.PathLike[str] | None
) -> list[tuple[str, str]]:
    """Check that both sides multiply the same B @ A by the same number; return notes on the unchecked ones."""
    configs = []
    for side in (ours, theirs):
        assert side.names is not None
        # A PEFT folder has its own configuration; the given one belongs to an adapter among a checkpoint's tensors.
        is_given = given is not None and side.names.adapter is not None
        try:
            configs.append(find_config(given if is_given else None, side.adapter_place, side.names, side.shapes))
        except UsageError as error:
            if is_given:
                raise
            return [("adapter-config", f"rank and alpha were not compared: {error.message}")]
    for pair in ours.names.pairs if ours.names is not None else ():
        scales = [config.scale_of(pair.module) for config in configs]
        if scales[0] != scales[1]:
            raise ContradictionError(
                f"{pair.module}: its adapter is scaled otherwise in {ours.path} than in {theirs.path}",
                tensor=pair.a,
                file=configs[0].path,
                got=f"{scales[0]:g}, as {configs[0].path} says",
                want=f"{scales[1]:g}, as {configs[1].path} says",
                next_step=OR_CONFIG,
            )
    return []


def _merge(side: ComparedSide, other: ComparedSide, options: GatherOptions, base: BaseModel | None) -> Adapted | None:
    """Return a side with its adapter merged, an adapter alone into the base model, in the form of the other side."""
    model, names = side.source.model, side.names
    if base is not None and names is not None and names.is_alone:
        model, names = complete_adapter(model, base, options.adapter_config, side.adapter_place), None
    adapted = adapt(model, options, side.adapter_place, {}, names=names)
    config = next((one for one in (side.source.config, other.source.config) if one), None)
    files = [shard.name for shard in other.source.model.shards]
    if adapted is None or {shard.name for shard in adapted.source.shards} == set(files):
        return adapted
    convert = partial(convert_to_files, config=config, base_names=files)
    converted = convert(adapted.source)
    return adapted if converted is None else convert_adapted(adapted, converted, convert) or adapted


def pair_merged(
    side: ComparedSide, other: ComparedSide, given: str | os.PathLike[str] | None, base: BaseModel | None
) -> Pair:
    """Return the first side as a merge would write it, and the other as it is."""
    options = GatherOptions(adapter="merge", adapter_config=given)
    try:
        adapted = _merge(side, other, options, base)
    except UsageError as error:
        error.about(f"the merge of the adapter in {side.path} cannot be computed")
        error.advise(
            f"give the adapter's own configuration as {option('adapter_config')} if that is wrong or missing, or the "
            f"model that it was trained on as {option('base_model')} if it lies alone; else "
            f"compare {other.path} with a model into which the adapter was merged the same way"
        )
        raise
    assert adapted is not None and adapted.updates is not None
    notes = [(code, f"{side.path}, compared as merged: {text}") for code, text in adapted.notes]
    return Pair(
        _make_compared(side, adapted.source),
        _make_compared(other, other.source.model),
        adapted.factors,
        adapted.updates,
        {"num_merged": len(adapted.updates)},
        tuple(notes),
    )
