"""Compares two models or checkpoints value by value, also with an adapter of one of them merged into it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from xrank.comparing.compared_sides import ComparedSide, read_sides
from xrank.comparing.correspondence import NOT_COPIES, Compared, Correspondence, TiedName, correspond
from xrank.comparing.made_differences import find_differences
from xrank.decisions.adapter_config import find_config
from xrank.decisions.adapters import Adapted, adapt, describe_merges
from xrank.decisions.base_model import BaseModel
from xrank.decisions.decision import Purpose, Request, decide
from xrank.decisions.found_source import FoundSource
from xrank.decisions.lone_adapter import complete_adapter
from xrank.decisions.options import GatherOptions
from xrank.decisions.recipe_choice import load_recipe
from xrank.decisions.saved_form import TABLE, convert_adapted, convert_to_files
from xrank.errors import ContradictionError, UsageError, XrankError
from xrank.faces import option
from xrank.layout import LayoutMap
from xrank.making.check import Check, Verdict
from xrank.plan.coverage import range_text
from xrank.plan.executor import Budget, Outcome
from xrank.plan.low_rank import LowRank
from xrank.plan.output import OutputTensor
from xrank.plan.planner import Plan, make_plan
from xrank.plan.report import ProofFacts, SourceFacts
from xrank.plan.source import StoredModel, StoredShard, merge_models
from xrank.recipes.matching import match
from xrank.writers.hf_folder import lay_out
from xrank.writers.manifest import MANIFEST_NAME

__all__ = ["plan_comparison"]

_OTHER = "\0other/"  # no tensor that a gather accepts has such a name
_OR_CONFIG = f"{NOT_COPIES}; if the gather was given {option('adapter_config')}, give the same here"


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """The two models under the same names."""

    ours: Compared
    """The side that has the adapter, where one has."""
    theirs: Compared
    factors: tuple[StoredShard, ...] = ()
    updates: Mapping[str, LowRank] = field(default_factory=dict)
    """Name -> the update that is added to it before the comparison."""
    proof: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[tuple[str, str], ...] = ()


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
    when it runs, if they differ.

    Args:
        path: path of the first model.
        other_path: path of the other model.
        budget: threads and buffers, to locate differences.
        adapter_config: configuration of the adapter among the tensors, in place of the one beside them.
        base: supplies metadata that either side does not record: whole shapes, the config.
        layouts: supplies the layouts that either side does not record.
        recipe: names the tensors of each side that it fits; the other side's names, and those without one, are known.
        part: keys of the part of `path` to read.
        world_size: number of ranks that wrote `path`, where it records none.

    Raises:
        ContradictionError: their metadata shows that they differ.
        UsageError: the merge of the adapter cannot be computed.
        XrankError: one of them cannot be read.
    """
    sides = read_sides(path, other_path, base=base, layouts=layouts, part=part, world_size=world_size)
    adapted = [side for side in sides if side.names is not None]
    if adapter_config is not None and not adapted:
        raise UsageError(
            f"neither {path} nor {other_path} holds an adapter to configure",
            got=option("adapter_config", os.fspath(adapter_config)),
            next_step=f"leave {option('adapter_config')} out",
        )
    if len(adapted) == 2:
        pair = _pair_adapters(*sides, adapter_config)
    elif adapted:
        pair = _pair_merged(adapted[0], next(side for side in sides if side.names is None), adapter_config, base)
    else:
        pair = _pair_plain(*sides, recipe)
    found = correspond((pair.ours, pair.theirs), pair.updates)
    outputs = _outputs(pair, found)
    made = [output for output in outputs if output.name in pair.updates or output.name in found.cast]
    try:
        plan = _plan(pair, found, outputs, made)
    except XrankError as error:
        raise _rename_error(error, pair, found) from error

    def judge(outcome: Outcome) -> Verdict:
        if made:
            _check_digests(pair, made, plan, outcome, budget)
        return Verdict(
            SourceFacts(path=path, format=sides[0].source.model.format),
            ProofFacts(against=other_path, **pair.proof, num_checksums=outcome.num_checksums),
            [output for output in outputs if output.name not in found.aliases],
            (*pair.notes, *found.notes, *sides[0].notes, *sides[1].notes),
        )

    return Check(plan, judge, lambda error: _rename_error(error, pair, found))


def _pair_plain(ours: ComparedSide, theirs: ComparedSide, recipe: str | os.PathLike[str] | None) -> _Pair:
    """Return both as they are, or under Hugging Face's names where those differ."""
    models = [side.source.model for side in (ours, theirs)]
    if ours.shapes.keys() != theirs.shapes.keys() or recipe is not None:
        # A side under training names gets Hugging Face's; the config of one side serves both.
        sides = [ours.source, theirs.source]
        chosen = [recipe if recipe is not None and _fits(side.model, recipe) else None for side in sides]
        if chosen == [None, None]:
            chosen[0] = recipe  # its error names what does not fit
        models = [_name_model(sides[0], sides[1], chosen[0]), _name_model(sides[1], sides[0], chosen[1])]
    return _Pair(_make_compared(ours, models[0]), _make_compared(theirs, models[1]))


def _fits(model: StoredModel, recipe: str | os.PathLike[str]) -> bool:
    return recipe in ("none", TABLE) or match(load_recipe(os.fspath(recipe)), [one.name for one in model.shards]).fits


def _name_model(source: FoundSource, other: FoundSource, recipe: str | os.PathLike[str] | None) -> StoredModel:
    """Return a side's model under Hugging Face's names; the other side's config serves where it has none."""
    known = source if source.config else replace(source, config=other.config)
    names = [shard.name for shard in other.model.shards]
    return decide(known, Request(Purpose.PROOF, recipe=recipe, file_names=names)).source


def _make_compared(side: ComparedSide, model: StoredModel) -> Compared:
    return Compared(side.path, side.with_tied(model), side.manifest, side.source.config)


def _pair_adapters(ours: ComparedSide, theirs: ComparedSide, given: str | os.PathLike[str] | None) -> _Pair:
    """Return both with their adapter's tensors apart."""
    assert ours.names is not None and theirs.names is not None
    our_model, our_notes = _drop_base(ours, theirs)
    their_model, their_notes = _drop_base(theirs, ours)
    num_saved = len(ours.names.saved)
    notes = [("adapter", f"{num_saved:,} of the tensors compared are an adapter's"), *our_notes, *their_notes]
    return _Pair(
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
                next_step=_OR_CONFIG,
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


def _pair_merged(
    side: ComparedSide, other: ComparedSide, given: str | os.PathLike[str] | None, base: BaseModel | None
) -> _Pair:
    """Return the first side as a merge would write it, and the other as it is."""
    options = GatherOptions(adapter="merge", adapter_config=given)
    try:
        adapted = _merge(side, other, options, base)
    except UsageError as error:
        error.about(f"what merging the adapter in {side.path} gives cannot be computed")
        error.advise(
            f"give the adapter's own configuration as {option('adapter_config')} if that is wrong or missing, or the "
            f"model that it was trained on as {option('base_model')} if it lies alone; else "
            f"compare {other.path} with a model into which the adapter was merged the same way"
        )
        raise
    assert adapted is not None and adapted.updates is not None
    notes = [(code, f"{side.path}, compared as merged: {text}") for code, text in adapted.notes]
    return _Pair(
        _make_compared(side, adapted.source),
        _make_compared(other, other.source.model),
        adapted.factors,
        adapted.updates,
        {"num_merged": len(adapted.updates)},
        tuple(notes),
    )


def _outputs(pair: _Pair, found: Correspondence) -> list[OutputTensor]:
    """Return the compared tensors in the form in which they are compared."""
    shards = (pair.ours.shards[name] for name in found.names)
    return [OutputTensor(shard.name, found.cast.get(shard.name, shard.dtype), shard.shape) for shard in shards]


def _plan(pair: _Pair, found: Correspondence, outputs: Sequence[OutputTensor], made: Sequence[OutputTensor]) -> Plan:
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


def _rename_error(error: XrankError, pair: _Pair, found: Correspondence) -> XrankError:
    """Return an error in the names of the two sides, as a difference between them where it is one."""
    text, is_within = error.message, (error.tensor or "").startswith(_OTHER)
    error.rename(_OTHER, "")
    if not isinstance(error, ContradictionError):
        return error
    for one in found.tied:
        if text.startswith(f"{_OTHER * one.side}{one.name} is tied to "):
            return _tie_error(error, pair, one)
    is_difference = error.index_range is not None and not is_within
    if not is_difference or error.file not in {file.path for file in pair.theirs.model.files}:
        return error
    return ContradictionError(
        f"{error.tensor} differs between {pair.ours.path} and {pair.theirs.path}",
        tensor=error.tensor,
        file=error.file,
        index_range=error.index_range,
        got=error.got,
        want="equal values",
        next_step=NOT_COPIES,
    )


def _tie_error(error: ContradictionError, pair: _Pair, one: TiedName) -> ContradictionError:
    path, other_path = (pair.theirs.path, pair.ours.path) if one.side else (pair.ours.path, pair.theirs.path)
    return ContradictionError(
        f"{one.name} is in {path} alone, and is not {one.target} there",
        tensor=one.name,
        file=error.file,
        index_range=error.index_range,
        got=error.got,
        want=f"{one.target}: the two are tied, and {other_path} has one of them",
        next_step=NOT_COPIES,
    )


def _check_digests(pair: _Pair, made: Sequence[OutputTensor], plan: Plan, outcome: Outcome, budget: Budget) -> None:
    """Check that merged or cast tensors are the same on both sides."""
    found = {
        tensor.output.name: (tensor, digest)
        for index, file in enumerate(plan.files)
        for tensor, digest in zip(file.tensors, outcome.files[index].tensor_digests, strict=True)
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
        if name not in formulas:
            made_of = pair.ours.shards[name].dtype, pair.theirs.shards[name].dtype
            raise ContradictionError(
                f"{name} differs between {pair.ours.path} and {pair.theirs.path}",
                tensor=name,
                file=pair.theirs.model.files[record - len(pair.ours.model.files)].path,
                index_range=where,
                got=got,
                want=f"equal values in {mine.output.dtype}, of {made_of[0]} and {made_of[1]}",
                next_step=NOT_COPIES,
            )
        told = pair.theirs.manifest
        formula = told.get("merged", {}).get(name, "nothing of a merge") if told else None
        says = f"; {MANIFEST_NAME} says {formula}" if formula not in (None, formulas[name]) else ""
        raise ContradictionError(
            f"{name} in {pair.theirs.path} is not what merging the adapter in {pair.ours.path} gives",
            tensor=name,
            file=pair.theirs.model.files[record - len(pair.ours.model.files)].path,
            index_range=where,
            got=got + says,
            want=f"{formulas[name]}, as a gather computes it",
            next_step=_OR_CONFIG,
        )
