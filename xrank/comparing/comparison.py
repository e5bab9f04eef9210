"""Compares two models or checkpoints value by value, also with an adapter of one of them merged into it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from xrank.comparing.compared_sides import read_sides
from xrank.comparing.correspondence import NOT_COPIES, OR_CONFIG, Correspondence, TiedName, correspond
from xrank.comparing.made_differences import find_differences
from xrank.comparing.pairs import Pair, pair_adapters, pair_merged, pair_plain
from xrank.decisions.adapters import describe_merges
from xrank.decisions.base_model import BaseModel
from xrank.errors import ContradictionError, UsageError, XrankError, option
from xrank.layout import LayoutMap
from xrank.making.check import Check, Verdict
from xrank.plan.budget import Budget
from xrank.plan.coverage import range_text
from xrank.plan.executor import Outcome
from xrank.plan.output import OutputTensor
from xrank.plan.planner import Plan, make_plan
from xrank.plan.report_facts import ProofFacts, SourceFacts
from xrank.plan.source import merge_models
from xrank.writers.hf_folder import lay_out
from xrank.writers.manifest import MANIFEST_NAME

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
        pair = pair_adapters(*sides, adapter_config)
    elif adapted:
        pair = pair_merged(adapted[0], next(side for side in sides if side.names is None), adapter_config, base)
    else:
        pair = pair_plain(*sides, recipe)
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


def _outputs(pair: Pair, found: Correspondence) -> list[OutputTensor]:
    """Return the compared tensors in the form in which they are compared."""
    shards = (pair.ours.shards[name] for name in found.names)
    return [OutputTensor(shard.name, found.cast.get(shard.name, shard.dtype), shard.shape) for shard in shards]


def _plan(pair: Pair, found: Correspondence, outputs: Sequence[OutputTensor], made: Sequence[OutputTensor]) -> Plan:
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


def _rename_error(error: XrankError, pair: Pair, found: Correspondence) -> XrankError:
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


def _tie_error(error: ContradictionError, pair: Pair, one: TiedName) -> ContradictionError:
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


def _check_digests(pair: Pair, made: Sequence[OutputTensor], plan: Plan, outcome: Outcome, budget: Budget) -> None:
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
            next_step=OR_CONFIG,
        )
