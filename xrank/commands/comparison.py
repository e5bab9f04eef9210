"""Compare two models, or a model with its source, value by value."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from xrank import dtypes
from xrank.commands.checks import Check, Verdict, make_absence_error
from xrank.engine.casts import LowRank
from xrank.engine.executor import Budget, Outcome
from xrank.engine.faults import Differences
from xrank.engine.hf_folder import lay_out
from xrank.engine.planner import Plan, TensorPlan, make_plan, select_tensors
from xrank.engine.report import ProofFacts, SourceFacts
from xrank.engine.sources import open_source
from xrank.engine.tensor_pairs import Bytes, TensorSide, read_pairs
from xrank.engine.windows import digest_text
from xrank.errors import ContradictionError, UsageError, XrankError, option
from xrank.layout import LayoutMap
from xrank.layout.coverage import range_text
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.layout.stored_model import StoredModel, StoredShard, merge_models
from xrank.readers.discovery import find_source
from xrank.recipes.adapter_names import PREFIX, AdapterNames, find_adapter, find_config
from xrank.recipes.adapters import (
    FOLDER,
    WEIGHTS_NAME,
    Adapted,
    adapt,
    adapter_beside,
    convert_adapted,
    describe_merges,
)
from xrank.recipes.conversions import TABLE, convert_to_files
from xrank.recipes.decision import Purpose, Request, decide, plan_found
from xrank.recipes.found_source import BaseModel, FoundSource
from xrank.recipes.options import KINDS, GatherOptions
from xrank.recipes.quantization import is_quantized
from xrank.recipes.recipe import match
from xrank.recipes.recipe_choice import load_recipe
from xrank.recipes.sources import complete_adapter, read_source
from xrank.recipes.ties import find_config_ties
from xrank.storage import places
from xrank.storage.manifest import MANIFEST_NAME, read_manifest
from xrank.words import list_text


def find_differences(plan: Plan, ours: TensorPlan, theirs: TensorPlan, budget: Budget) -> Differences:
    """Return the differences of two tensors of a plan, of one element type and shape."""
    found, width = Differences(ours.output.dtype), dtypes.dtype(ours.output.dtype).nbytes

    def take(_: int, low: int, mine: Bytes, other: Bytes) -> None:
        found.add(low // width, mine.data, other.data)

    with closing(open_source(plan.source)) as source:
        mine, other = (TensorSide(select_tensors(plan, [tensor]), source) for tensor in (ours, theirs))
        read_pairs((mine, other), [0], budget, take)
    return found


class ComparedPair(Struct, frozen=True, eq=False):
    """The two models under the same names."""

    ours: ComparedSide
    """The side that has the adapter, where one has."""
    theirs: ComparedSide
    factors: tuple[StoredShard, ...] = ()
    updates: Mapping[str, LowRank] = field(default_factory=dict)
    """Name -> the update that is added to it before the comparison."""
    proof: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[tuple[str, str], ...] = ()


def pair_plain(ours: ComparedSide, theirs: ComparedSide, recipe: str | os.PathLike[str] | None) -> ComparedPair:
    """Return both as they are, or under Hugging Face's names where those differ."""
    models = [ours.model, theirs.model]
    if ours.shards.keys() != theirs.shards.keys() or recipe is not None:
        # A side under training names gets Hugging Face's; the config of one side serves both.
        sides = [ours.source, theirs.source]
        chosen = [recipe if recipe is not None and _fits(side.model, recipe) else None for side in sides]
        if chosen == [None, None]:
            chosen[0] = recipe  # its error names what does not fit
        models = [_name_model(sides[0], sides[1], chosen[0]), _name_model(sides[1], sides[0], chosen[1])]
    return ComparedPair(ours.with_tied(models[0]), theirs.with_tied(models[1]))


def _fits(model: StoredModel, recipe: str | os.PathLike[str]) -> bool:
    return recipe in ("none", TABLE) or match(load_recipe(os.fspath(recipe)), [one.name for one in model.shards]).fits


def _name_model(source: FoundSource, other: FoundSource, recipe: str | os.PathLike[str] | None) -> StoredModel:
    """Return a side's model under Hugging Face's names; the other side's config serves where it has none."""
    known = source if source.config else replace(source, config=other.config)
    names = [shard.name for shard in other.model.shards]
    return decide(known, Request(Purpose.PROOF, recipe=recipe, file_names=names)).source


def pair_adapters(ours: ComparedSide, theirs: ComparedSide, given: str | os.PathLike[str] | None) -> ComparedPair:
    """Return both with their adapter's tensors apart."""
    assert ours.names is not None
    (our_side, our_notes), (their_side, their_notes) = _drop_base(ours, theirs), _drop_base(theirs, ours)
    num_saved = len(ours.names.saved)
    notes = [("adapter", f"{num_saved:,} of the compared tensors belong to an adapter"), *our_notes, *their_notes]
    notes += _check_scales(ours, theirs, given)
    return ComparedPair(our_side, their_side, proof={"num_adapter_tensors": num_saved}, notes=tuple(notes))


def _drop_base(side: ComparedSide, other: ComparedSide) -> tuple[ComparedSide, list[tuple[str, str]]]:
    """Return a side with its adapter apart; drop its base tensors that the other side, an adapter alone, lacks."""
    assert side.names is not None and other.names is not None
    apart = side.name_adapter_apart(other)
    if side.names.is_alone or not other.names.is_alone:
        return apart, []
    wanted = {*other.name_adapter_apart(side).shards, *side.names.saved.values()}
    kept = tuple(shard for shard in apart.model.shards if shard.name in wanted)
    num_dropped = len(apart.model.shards) - len(kept)
    text = f"{num_dropped:,} tensors of {side.path} were not compared: {other.path} has no base model"
    return apart.with_model(replace(apart.model, shards=kept, aliases={})), [("adapter-alone", text)]


def _check_scales(
    ours: ComparedSide, theirs: ComparedSide, given: str | os.PathLike[str] | None
) -> list[tuple[str, str]]:
    """Check that both sides multiply the same B @ A by the same number; return notes on the unchecked ones."""
    configs = []
    for side in (ours, theirs):
        assert side.names is not None
        # A PEFT folder has its own configuration; the given one belongs to an adapter among a checkpoint's tensors.
        is_given = given is not None and side.names.adapter is not None
        shapes = {name: shard.shape for name, shard in side.shards.items()}
        try:
            configs.append(find_config(given if is_given else None, side.place, side.names, shapes))
        except UsageError as error:
            if is_given:
                raise
            return [("adapter-config", f"rank and alpha were not compared: {error.message}")]
    for pair in ours.names.pairs if ours.names is not None else ():
        scales = [config.scale_of(pair.module) for config in configs]
        if scales[0] != scales[1]:
            raise ContradictionError(
                f"{pair.module}: the scale of its adapter differs between {ours.path} and {theirs.path}",
                tensor=pair.a,
                file=configs[0].path,
                got=f"{scales[0]:g}, as {configs[0].path} says",
                want=f"{scales[1]:g}, as {configs[1].path} says",
                next_step=OR_CONFIG,
            )
    return []


def _merge(side: ComparedSide, other: ComparedSide, options: GatherOptions, base: BaseModel | None) -> Adapted | None:
    """Return a side with its adapter merged, an adapter alone into the base model, in the form of the other side."""
    model, names = side.model, side.names
    if base is not None and names is not None and names.is_alone:
        model, names = complete_adapter(model, base, options.adapter_config, side.place), None
    adapted = adapt(model, options, side.place, {}, names=names)
    config = side.source.config or other.source.config or None
    files = other.shards.keys()
    if adapted is None or {shard.name for shard in adapted.source.shards} == files:
        return adapted
    convert = partial(convert_to_files, config=config, base_names=files)
    converted = convert(adapted.source)
    return adapted if converted is None else convert_adapted(adapted, converted, convert) or adapted


def pair_merged(
    side: ComparedSide, other: ComparedSide, given: str | os.PathLike[str] | None, base: BaseModel | None
) -> ComparedPair:
    """Return the first side as a merge would write it, and the other as it is."""
    options = GatherOptions(adapter="merge", adapter_config=given)
    try:
        adapted = _merge(side, other, options, base)
    except UsageError as error:
        error.about(f"the merge of the adapter in {side.path} cannot be computed")
        error.advise(
            f"give the adapter's own configuration as {option('adapter_config')} if that is wrong or missing, or the "
            f"model that it was trained on as {option('base_model')} if that is missing; or "
            f"compare {other.path} with a model into which the adapter was merged the same way"
        )
        raise
    assert adapted is not None and adapted.updates is not None
    notes = [(code, f"{side.path}, compared as merged: {text}") for code, text in adapted.notes]
    return ComparedPair(
        side.with_tied(adapted.source),
        other.with_tied(other.model),
        adapted.factors,
        adapted.updates,
        {"num_merged": len(adapted.updates)},
        tuple(notes),
    )


_APART = FOLDER + WEIGHTS_NAME


class ComparedSide(Struct, frozen=True, eq=False, dict=True):
    """One of the two sides of a comparison."""

    path: str
    """Path of the side as the user named it."""
    place: str
    """Where the adapter's configuration is looked for."""
    source: FoundSource
    """The side under its own names, or those of the comparison; an adapter in a folder within is part of its model."""
    manifest: Mapping[str, Any]
    """The side's manifest; empty without one."""
    names: AdapterNames | None = None
    """Names of the adapter's tensors; None without an adapter."""
    notes: tuple[tuple[str, str], ...] = ()
    """Notes on the parts of the side that are not compared."""

    @property
    def model(self) -> StoredModel:
        """The model of the source."""
        return self.source.model

    @cached_property
    def shards(self) -> dict[str, StoredShard]:
        """Shards by name."""
        return {shard.name: shard for shard in self.model.shards}

    @property
    def has_adapter_apart(self) -> bool:
        """Whether the folder has an adapter in a folder within, which is not merged into the model, too."""
        is_there = places.is_folder(self.place) and places.is_file(os.path.join(self.place, _APART))
        return is_there and not self.manifest.get("merged")

    def with_model(self, model: StoredModel) -> ComparedSide:
        """Return the side with another model."""
        return replace(self, source=replace(self.source, model=model))

    def name_adapter_apart(self, other: ComparedSide) -> ComparedSide:
        """Return the side with the adapter's tensors under PEFT's names and the base model's under its own names.

        In a folder that PEFT saved, a tensor trained whole has the base model's name, and trained biases of a whole
        model have two names. The other side shows which they are.
        """
        assert self.names is not None and other.names is not None
        theirs = set(other.names.saved.values())
        trained = {name: name for name in self.names.base if self.names.is_alone and name in theirs}
        renamed = {**self.names.base, **self.names.saved, **trained}
        copies = {} if self.names.is_alone else self.names.biases_of("all")
        model = self.model
        aliases = {renamed[name]: renamed[target] for name, target in model.aliases.items()}
        rows = [self.names.saved[name] for name in self.names.tokens.values()]
        kept = [name for name in rows if name in theirs]
        aliases |= {name: kept[0] for name in rows if len(kept) == 1 and name not in theirs}
        shards = [replace(shard, name=renamed[shard.name]) for shard in model.shards]
        shards += [replace(one, name=copies[one.name]) for one in model.shards if copies.get(one.name) in theirs]
        return self.with_tied(replace(model, shards=tuple(shards), aliases=aliases))

    def with_tied(self, model: StoredModel) -> ComparedSide:
        """Return the side with a model, and with a shard and an alias for each name that the manifest ties to another.

        Those names are not written.
        """
        shards = {shard.name: shard for shard in model.shards}
        told = self.manifest.get("tied", {})
        tied = {name: target for name, target in told.items() if target in shards and name not in shards}
        aliases = (replace(shards[target], name=name) for name, target in tied.items())
        return self.with_model(replace(model, shards=(*model.shards, *aliases), aliases={**model.aliases, **tied}))


def read_sides(
    path: str,
    other_path: str,
    *,
    base: BaseModel | None = None,
    layouts: LayoutMap | None = None,
    part: str | None = None,
    world_size: int | None = None,
) -> tuple[ComparedSide, ComparedSide]:
    """Read both sides. An adapter in a folder within counts where a manifest lists it or the other side has one, too.

    `base` and `layouts` supply metadata that either side does not record; `part` and `world_size` are the first side's.
    """
    wheres = [(each, find_source(each)) for each in (path, other_path)]
    manifests = [_manifest(where.path) for _, where in wheres]
    # Tensors that the other's manifest records as left out need no place.
    found = []
    for i, (each, where) in enumerate(wheres):
        source = read_source(
            each,
            where,
            base=base,
            layouts=layouts,
            part=None if i else part,
            world_size=None if i else world_size,
            is_left_out=frozenset(manifests[1 - i].get("excluded", ())).__contains__,
        )
        found.append(ComparedSide(each, where.path, source, manifests[i]))
    has_codes = [is_quantized(side.model) for side in found]
    if has_codes.count(True) == 1:
        side = found[number := has_codes.index(True)]
        if not side.manifest.get("quantized"):  # otherwise the other side is quantized again
            from xrank.recipes.dequantization import dequantize_source  # few comparisons need this module

            kinds = Counter(shard.dtype for shard in found[1 - number].model.shards if len(shard.shape) > 1)
            kind = max(kinds, key=kinds.__getitem__, default="")
            choice = next((choice for choice, name in KINDS.items() if name == kind), "keep")
            found[number] = replace(side, source=dequantize_source(side.source, choice))
    shared = found[0].shards.keys() & found[1].shards.keys()
    has_one = [
        side.has_adapter_apart or find_adapter(list(side.shards), side.model.path, shared) is not None for side in found
    ]
    ours, theirs = (_find_names(side, shared, other_has_one=has_one[1 - i]) for i, side in enumerate(found))
    return ours, theirs


def _manifest(place: str) -> Mapping[str, Any]:
    path = os.path.join(place, MANIFEST_NAME)
    return read_manifest(path) if places.exists(path) else {}


def _find_names(side: ComparedSide, own: Collection[str], *, other_has_one: bool) -> ComparedSide:
    """Return a side with its adapter's names, and with the adapter in a folder within."""
    is_listed = any(file["name"] == _APART for file in side.manifest.get("files", ()))
    if (is_listed and not side.manifest.get("merged")) or (side.has_adapter_apart and other_has_one):
        found = replace(_with_adapter(side), place=os.path.join(side.place, FOLDER))
    else:
        found = replace(side, names=find_adapter(list(side.shards), side.model.path, own))
    read = {os.path.relpath(file.path, side.place) for file in found.model.files}
    notes = tuple((code, f"{side.path}: {text}") for code, text in adapter_beside(side.place, read))
    return replace(found, notes=notes)


def _with_adapter(found: ComparedSide) -> ComparedSide:
    """Return a side together with the adapter in the folder within, and the names of each."""
    path = os.path.join(found.place, *_APART.split("/"))
    if not found.has_adapter_apart:
        raise make_absence_error(found.place, _APART)
    adapter = read_source(path).model
    base = {name: name for name in found.shards}
    saved = {shard.name: shard.name for shard in adapter.shards}
    for name in saved:
        if name in base:
            raise ContradictionError(
                f"{name} is in {found.path} and in its folder {_APART}",
                tensor=name,
                file=path,
                got="two tensors of this name",
                want="one",
                next_step="check that the files are those of one model",
            )
    marked = find_adapter(list(saved), path) or AdapterNames(None, (), {}, {})
    # PEFT saves a tensor trained whole under the name of the tensor that it replaces.
    trained = {name.removeprefix(PREFIX): name for name in saved if name not in marked.saved}
    names = AdapterNames(None, marked.pairs, saved, base, trained, marked.tokens)
    return replace(found.with_model(merge_models(found.model, adapter, "")), names=names)


NOT_COPIES = "find out which of the two is right"
OR_CONFIG = f"{NOT_COPIES}; if the gather was given {option('adapter_config')}, give the same here"


class TiedName(Struct, frozen=True):
    """A name on one side alone, whose tensor must equal `target`, which both sides have."""

    side: int
    name: str
    target: str


class Correspondence(Struct, frozen=True):
    """How the tensors of two models belong together."""

    names: tuple[str, ...]
    """Names on both sides whose tensors are compared: one is the other's copy."""
    cast: Mapping[str, str]
    """Name -> the element type in which both are compared, where a manifest records that one was cast to it."""
    tied: tuple[TiedName, ...]
    aliases: frozenset[str]
    """Those of `names` that are, on some side, another name of one of `names`."""
    notes: tuple[tuple[str, str], ...]


def correspond(sides: tuple[ComparedSide, ComparedSide], updates: Collection[str] = ()) -> Correspondence:
    """Match the tensors of two models; the first side's adapter is added to those named in `updates`.

    A name on one side alone is not a difference where it is tied, by that side's storage, a manifest or a
    config.json, to a tensor that both have; nor where the other side's manifest records that it was left out as asked.
    """
    ties = _ties(sides)
    left_out: tuple[list[str], list[str]] = ([], [])
    tied = []
    for name in sorted(set(sides[0].shards) ^ set(sides[1].shards)):
        side = 0 if name in sides[0].shards else 1
        if name in sides[1 - side].manifest.get("excluded", ()):
            left_out[1 - side].append(name)
            continue
        # No record decides whether a merge into one of two tied tensors should also change the other.
        may_be = [to for to in ties.get(name, ()) if _is_on_both(to, sides) and (side == 1 or to not in updates)]
        if not may_be:
            raise ContradictionError(
                f"{name} is only in {sides[side].path}",
                tensor=name,
                got=f"{len(sides[0].shards)} tensors against {len(sides[1].shards)}",
                want="the same names",
                next_step=NOT_COPIES,
            )
        tied.append(TiedName(side, name, may_be[0]))
    # Without names that are on both sides only another name of a tensor among them.
    on_both = [name for name in sides[0].shards if _is_on_both(name, sides)]
    known_aliases = {alias for side in sides for alias in side.model.aliases}
    kept: set[str] = set()
    for name in sorted(on_both, key=known_aliases.__contains__):
        others = [other for other in ties.get(name, ()) if other in kept and other not in updates]
        if not any(all(_is_one(side.shards[name], side.shards[other]) for side in sides) for other in others):
            kept.add(name)
    names = [name for name in on_both if name in kept]
    casts = {name: found for name in names if (found := _cast(name, sides, ties)) is not None}
    notes = []
    for one in tied:
        text = f"{one.name} is only in {sides[one.side].path}, where it is tied to {one.target}"
        notes.append(("tied", f"{text}, with which it was compared"))
    for side in (0, 1):
        says = f"{sides[side].path}/{MANIFEST_NAME} says"
        made = Counter(text for number, text in casts.values() if number == side)
        for text, count in made.items():
            notes.append(("cast", f"{count} tensors were compared after the cast {text}, as {says}"))
        if left_out[side]:
            notes.append(("excluded", f"not compared, as {says} left out: {list_text(left_out[side])}"))
    aliases = {name for name in names if any(side.model.aliases.get(name) in names for side in sides)}
    # One storage under both names cannot differ.
    tied = [one for one in tied if not _is_one(*(sides[one.side].shards[name] for name in (one.name, one.target)))]
    dtypes = {name: sides[side].shards[name].dtype for name, (side, _) in casts.items()}
    return Correspondence(tuple(names), dtypes, tuple(tied), frozenset(aliases), tuple(notes))


def _is_on_both(name: str, sides: Sequence[ComparedSide]) -> bool:
    return all(name in side.shards for side in sides)


def _ties(sides: Sequence[ComparedSide]) -> dict[str, list[str]]:
    """Return name -> the other names of the same tensor, as either side records them."""
    pairs = [pair for side in sides for pair in side.model.aliases.items()]
    for side in sides:
        pairs += find_config_ties({name: None for each in sides for name in each.shards}, side.source.config).items()
    groups: dict[str, list[str]] = {}
    for name, target in pairs:
        joined = list(dict.fromkeys([*groups.get(target, [target]), *groups.get(name, [name])]))
        groups.update(dict.fromkeys(joined, joined))
    return {name: [other for other in group if other != name] for name, group in groups.items()}


def _is_one(a: StoredShard, b: StoredShard) -> bool:
    """Return whether two tensors are the same bytes."""
    arrays = [(shard.record, shard.nests.x, shard.nests.y, shard.nests.loops) for shard in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and all(map(np.array_equal, *arrays))


def _cast(name: str, sides: Sequence[ComparedSide], ties: Mapping[str, Sequence[str]]) -> tuple[int, str] | None:
    """Return which side is a cast of the other by a manifest, and "from -> to"; None for the same element type."""
    shards = [side.shards[name] for side in sides]
    if (shards[0].dtype, shards[0].shape) == (shards[1].dtype, shards[1].shape):
        return None
    for side in (0, 1):
        text = f"{shards[1 - side].dtype} -> {shards[side].dtype}"
        told = sides[side].manifest.get("cast", {})
        # A tied name that was not written was cast with the tensor that stands for it.
        casts = [told[known] for known in (name, *ties.get(name, ())) if known in told]
        if casts[:1] == [text] and shards[0].shape == shards[1].shape:
            return side, text
    raise ContradictionError(
        f"{name} differs in type or shape",
        tensor=name,
        got=f"{shards[0].dtype} {list(shards[0].shape)} in {sides[0].path}",
        want=f"{shards[1].dtype} {list(shards[1].shape)}, as in {sides[1].path}",
        next_step=NOT_COPIES,
    )


_OTHER = "\0other/"  # no tensor that a gather accepts has such a name


def plan_comparison(
    path: str,
    other_path: str,
    budget: Budget,
    adapter_config: str | os.PathLike[str] | None = None,
    *,
    base: BaseModel | None = None,
    layouts: LayoutMap | None = None,
    recipe: str | os.PathLike[str] | None = None,
    part: str | None = None,
    world_size: int | None = None,
) -> Check:
    """Return the check that compares the tensors of two models or checkpoints value by value.

    Where both have an adapter, in a folder of its own or among the tensors, its tensors are compared, too. Where one
    has, the other must be the result of a gather that merges it, bit for bit. The check raises ContradictionError
    when it runs, if they differ. `base` and `layouts` supply metadata that either side does not record; `recipe` names
    the tensors of each side that it fits; `part` and `world_size` are those of `path`.
    """
    sides = read_sides(path, other_path, base=base, layouts=layouts, part=part, world_size=world_size)
    quantized = [side for side in sides if side.manifest.get("quantized")]
    if len(quantized) == 1:
        plain = next(side for side in sides if side is not quantized[0])
        return _plan_quantized(plain, quantized[0], adapter_config, base=base, recipe=recipe, layouts=layouts)
    adapted = [side for side in sides if side.names is not None]
    if adapter_config is not None and not adapted:
        raise UsageError(
            f"neither {path} nor {other_path} contains an adapter to configure",
            got=option("adapter_config", os.fspath(adapter_config)),
            next_step=f"leave {option('adapter_config')} out",
        )
    if len(adapted) == 2:
        pair = pair_adapters(*sides, adapter_config)
    elif adapted:
        pair = pair_merged(adapted[0], next(side for side in sides if side.names is None), adapter_config, base)
    else:
        pair = pair_plain(*sides, recipe)
    found = correspond((pair.ours, pair.theirs), pair.updates)
    # In the form in which they are compared.
    shards = [pair.ours.shards[name] for name in found.names]
    outputs = [OutputTensor(shard.name, found.cast.get(shard.name, shard.dtype), shard.shape) for shard in shards]
    made = [output for output in outputs if output.name in pair.updates or output.name in found.cast]
    try:
        plan = _plan(pair, found, outputs, made)
    except XrankError as error:
        raise _rename_error(error, pair, found) from error

    def judge(outcome: Outcome) -> Verdict:
        if made:
            _check_digests(pair, made, plan, outcome, budget)
        return Verdict(
            SourceFacts(path=path, format=sides[0].model.format),
            ProofFacts(against=other_path, **pair.proof, num_checksums=outcome.num_checksums),
            [output for output in outputs if output.name not in found.aliases],
            (*pair.notes, *found.notes, *sides[0].notes, *sides[1].notes),
        )

    return Check(plan, judge, lambda error: _rename_error(error, pair, found))


def _plan_quantized(
    plain: ComparedSide,
    made: ComparedSide,
    adapter_config: str | os.PathLike[str] | None,
    *,
    base: BaseModel | None,
    recipe: str | os.PathLike[str] | None,
    layouts: LayoutMap | None,
) -> Check:
    """Return the check that quantizes one side again, by the options in the other's manifest, and compares the bits."""
    told, merged = made.manifest["quantized"], made.manifest.get("merged")
    options = GatherOptions(
        dtype=told["dtype"],
        dequantize=is_quantized(plain.model),
        quantize=told["scheme"],
        quantize_ignore=told["ignore"],
        dialect=told["dialect"],
        exclude=[re.escape(name) for name in made.manifest["excluded"]],
        adapter="merge" if merged else None,
        adapter_config=adapter_config if merged else None,
    )
    source = plain.source if plain.source.config else replace(plain.source, config=made.source.config)
    planned = plan_found(source, plain.place, options, base, layouts, recipe)
    outputs = [OutputTensor(shard.name, shard.dtype, shard.shape) for shard in made.model.shards]
    plan = make_plan(made.model, [OutputFile.bare(output) for output in outputs])

    def judge(read: Outcome, again: Outcome) -> Verdict:
        want = {
            tensor.output.name: digest
            for index, file in enumerate(planned.plan.files)
            for tensor, digest in zip(file.tensors, again.files[index].tensor_digests, strict=True)
        }
        got = {output.name: read.files[index].tensor_digests[0] for index, output in enumerate(outputs)}
        for name in (*want, *got):
            if want.get(name) != got.get(name):
                texts = [digest_text(each[name]) if name in each else "no such tensor" for each in (got, want)]
                raise ContradictionError(
                    f"{name} in {made.path} differs from {plain.path} quantized by {told['scheme']}",
                    tensor=name,
                    file=made.path,
                    got=texts[0],
                    want=texts[1],
                    next_step=NOT_COPIES,
                )
        notes = (("quantized", f"{plain.path} was quantized again by {told['scheme']}, as the manifest says"),)
        return Verdict(
            SourceFacts(path=plain.path, format=plain.model.format),
            ProofFacts(against=made.path, num_checksums=again.num_checksums),
            outputs,
            (*notes, *plain.notes, *made.notes),
        )

    return Check(plan, judge, made=planned)


def _plan(
    pair: ComparedPair, found: Correspondence, outputs: Sequence[OutputTensor], made: Sequence[OutputTensor]
) -> Plan:
    """Return the plan that compares every value.

    The tensors that are the same on both sides are copies of one another: theirs count as replicas of ours. Merged
    tensors and tensors of which one was cast are `made` on both sides, so that their digests can be compared.
    """
    is_made = {output.name for output in made}
    same = [output for output in outputs if output.name not in is_made]
    groups = (same, made, [replace(output, name=_OTHER + output.name) for output in made])
    ours = replace(pair.ours.model, shards=(*pair.ours.model.shards, *pair.factors))
    tied: dict[str, tuple[str, ...]] = {output.name: (_OTHER + output.name,) for output in same}
    for one in found.tied:
        prefix = _OTHER if one.side else ""
        target = prefix * (one.target in is_made) + one.target
        tied[target] = (*tied.get(target, ()), prefix + one.name)
    return make_plan(
        merge_models(ours, pair.theirs.model, _OTHER),
        [file for group in groups if group for file in lay_out(group, 1 << 62)],
        tied=tied,
        updates=pair.updates,
    )


def _rename_error(error: XrankError, pair: ComparedPair, found: Correspondence) -> XrankError:
    """Return an error in the names of the two sides, as a difference between them where it is one."""
    text, is_within = error.message, (error.tensor or "").startswith(_OTHER)
    error.rename(_OTHER, "")
    if not isinstance(error, ContradictionError):
        return error
    for one in found.tied:
        if text.startswith(f"{_OTHER * one.side}{one.name} is tied to "):
            path, other_path = (pair.theirs.path, pair.ours.path) if one.side else (pair.ours.path, pair.theirs.path)
            return ContradictionError(
                f"{one.name} is only in {path}, where it differs from {one.target}",
                tensor=one.name,
                file=error.file,
                index_range=error.index_range,
                got=error.got,
                want=f"{one.target}: the two are tied, and {other_path} has one of them",
                next_step=NOT_COPIES,
            )
    is_difference = error.index_range is not None and not is_within
    if not is_difference or error.file not in {file.path for file in pair.theirs.model.files}:
        return error
    return _difference_error(pair, error.tensor, error.file, error.index_range, error.got, "equal values")


def _difference_error(
    pair: ComparedPair, tensor: str | None, file: str | None, where: str | None, got: str | None, want: str
) -> ContradictionError:
    problem = f"{tensor} differs between {pair.ours.path} and {pair.theirs.path}"
    return ContradictionError(
        problem, tensor=tensor, file=file, index_range=where, got=got, want=want, next_step=NOT_COPIES
    )


def _check_digests(
    pair: ComparedPair, made: Sequence[OutputTensor], plan: Plan, outcome: Outcome, budget: Budget
) -> None:
    found = {
        tensor.output.name: (tensor, digest)
        for index, planned in enumerate(plan.files)
        for tensor, digest in zip(planned.tensors, outcome.files[index].tensor_digests, strict=True)
    }
    formulas = describe_merges(plan)
    for name in (output.name for output in made):
        (mine, digest), (other, other_digest) = found[name], found[_OTHER + name]
        if digest == other_digest:
            continue
        differences = find_differences(plan, mine, other, budget)
        where = range_text(mine.output.shape, differences.first, differences.first)
        got = differences.describe(mine.output.num_elements, where)
        record = int(plan.source.records.file[other.copies.record[0]])
        file = pair.theirs.model.files[record - len(pair.ours.model.files)].path
        if name not in formulas:
            kinds = f"{pair.ours.shards[name].dtype} and {pair.theirs.shards[name].dtype}"
            want = f"equal values in {mine.output.dtype}, of {kinds}"
            raise _difference_error(pair, name, file, where, got, want)
        told = pair.theirs.manifest
        formula = told.get("merged", {}).get(name, "nothing of a merge") if told else None
        says = f"; {MANIFEST_NAME} says {formula}" if formula not in (None, formulas[name]) else ""
        raise ContradictionError(
            f"{name} in {pair.theirs.path} differs from the merge of the adapter in {pair.ours.path}",
            tensor=name,
            file=file,
            index_range=where,
            got=got + says,
            want=f"{formulas[name]}, as a gather computes it",
            next_step=OR_CONFIG,
        )
