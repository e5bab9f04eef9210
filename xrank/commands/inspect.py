"""Inspect: describe a source, and decide about it as a gather does. Problems are listed, not raised."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from xrank.commands.checks import Moments, plan_moments
from xrank.commands.report import count_rank_tensors, counts_requests, model_facts
from xrank.engine.buffers import NullTarget
from xrank.engine.executor import execute
from xrank.engine.planner import divide_replicas, make_plan
from xrank.engine.report import InspectDetails, Report, SourceFacts, timed_report
from xrank.engine.sources import open_source
from xrank.errors import COMMAND, UsageError, XrankError, names_own_arguments, option
from xrank.layout import LayoutMap
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.layout.stored_model import StoredModel
from xrank.readers.base import Faults
from xrank.readers.discovery import find_source
from xrank.readers.workspace import WorkspaceReader, survey_ranks
from xrank.recipes.decision import FolderPlan, plan_found, read_layouts
from xrank.recipes.layout_sources import survey_pieces
from xrank.recipes.options import GatherOptions
from xrank.recipes.quantization import describe_quantization, find_stored_scheme
from xrank.recipes.salvage import MissingTensor, find_missing, lose_damaged
from xrank.recipes.sources import companions_of, open_base_model, read_source
from xrank.storage import places
from xrank.storage.folder_stage import inspect_stage
from xrank.words import plural


@names_own_arguments
@counts_requests
def inspect(
    path: str | os.PathLike[str],
    *,
    layouts: str | os.PathLike[str] | LayoutMap | None = None,
    base_model: str | os.PathLike[str] | None = None,
    format: str | None = None,  # noqa: A002  the option's name
    part: str | None = None,
    world_size: int | None = None,
    deep: bool = False,
    html: str | os.PathLike[str] | None = None,
) -> Report:
    """Describe a source: format, run, ranks, tensors, and the problems that a gather would meet.

    ``details["problems"]`` lists all faults of the source and other problems, each with the exit code of the gather;
    without any, ``gather --dry-run`` with the same options succeeds. ``missing`` lists the tensors that are not whole,
    with the rank and file of each lost part, and ``commands`` what can be had. The report is `ok` even then. Only
    metadata is read, except of two forms of a model in one folder, and of tied tensors that are stored apart: these
    are compared. Damage inside of tensors is found with `deep`.

    Args:
        path: the folder, or file.
        layouts: a layout file, or its content, for a source without recorded layouts.
        base_model: a model with the names and shapes that the source must have; fills in unrecorded shapes.
        format: name of the source's format, if several lie there; None: the best of them. A note names the others.
        part: keys of the part to describe where the source has several; None: the only one that may be the model.
        world_size: number of ranks that wrote the source, as for `gather_checkpoint`.
        deep: read all tensors, and compare recorded checksums and replicas.
        html: file of a page to write, with the faults, and the part of each tensor on each rank.

    Raises:
        UsageError: the base model does not exist.
        IncompleteError: the path does not exist.
        UnknownFormatError: no reader recognizes it.

    Example:
        >>> import torch, xrank
        >>> workspace = xrank.NFSWorkspace("inspected", rank=0, world_size=1)
        >>> workspace.write_configs_and_weights({"hidden_size": 2}, {"weight": torch.ones(2, 3)})
        >>> report = xrank.inspect("inspected")
        >>> report.source.format, report.source.num_parameters, report.details["problems"]
        ('workspace', 6, [])
    """
    started = time.monotonic()
    place = places.enter(path)
    stage = inspect_stage(place) if os.path.isdir(place) else None
    if stage is not None:
        return Report(
            command="inspect",
            path=place,
            source=SourceFacts(path=place, format="stage of xrank"),
            details=InspectDetails(stage=stage, problems=[], tensors=[], companions=[]),
        )
    where = find_source(place, format_name=format)
    text, reader = where.path, where.reader
    given = layouts if layouts is None or isinstance(layouts, LayoutMap) else read_layouts(layouts)
    base = open_base_model(base_model) if base_model is not None else None
    faults, model, missing = Faults(), None, list[MissingTensor]()
    tensors: list[dict[str, Any]] = []
    notes: list[tuple[str, str]] = []
    companions: list[str] = []
    recipe = config_path = quantization = None
    try:
        beside = companions_of(place, where)
        companions += [companion.name for companion in beside[0]]  # listed even if the reader fails
        found = read_source(
            place, where, base=base, layouts=given, part=part, world_size=world_size, beside=beside, faults=faults
        )
        found = replace(found, model=lose_damaged(found.model, faults, GatherOptions().budget) if deep else found.model)
        model = found.model
        missing = list(find_missing(model))
        notes += found.notes
        config_path = found.config_path
        quantization = describe_quantization(find_stored_scheme(found.config, found.companions), model.shards)
        tensors = [_tensor_row(model, index, faults) for index in range(len(model.shards))]
        if not faults.errors:
            planned = plan_found(found, text, GatherOptions(), base, given)
            recipe, adapted = planned.source.recipe, planned.decision.adapted
            if adapted is not None and adapted.is_alone and adapted.config_text is not None:
                companions.append("adapter_config.json")
            # A gather's advice on config.json is to run it again.
            notes = [note for note in planned.notes if note not in model.notes and note[0] != "no-config"]
            _compare_ties(planned)
    except XrankError as error:
        faults.add(error)
    problems = faults.errors
    counted = [] if model is None else count_rank_tensors(model)
    details = InspectDetails(
        problems=[{**problem.to_dict(), "exit_code": problem.exit_code} for problem in problems],
        tensors=tensors,
        missing=[to_builtins(one) for one in missing],
        commands=_list_commands(text, model, missing, problems),
        format={} if model is None else {key: value for key, value in model.details.items() if key != "ranks"},
        companions=companions,
        config_path=config_path,
        quantization=quantization,
        optimizer=None if model is None else _describe_optimizer(text, part, deep=deep),
        ranks=survey_ranks(text) if isinstance(reader, WorkspaceReader) else counted,
    )
    source = SourceFacts(path=text, format=reader.name)
    report = timed_report(
        "inspect",
        started,
        path=text,
        source=source if model is None else source.extended(**model_facts(model), recipe=recipe),
        notes=() if model is None else (*model.notes, *notes),
        details=details,
    )
    if html is None:
        return report
    from xrank.commands.layout import write_page  # most calls draw nothing
    from xrank.pictures.picture import inspect_html

    page = inspect_html(report, None if model is None else survey_pieces(model))
    return replace(write_page(report, page, os.fspath(html)), path=text)


inspect_source = inspect
"""The name inside xrank, where `inspect` is Python's module."""


def _describe_optimizer(path: str, part: str | None, *, deep: bool) -> dict[str, Any] | None:
    """Return the facts of a checkpoint's optimizer, or its first problem; `deep` reads its moments."""
    moments = plan_moments(path, part)
    if not isinstance(moments, Moments):
        return None if moments is None else {"problem": moments.message}
    problem = None
    try:
        if deep:
            with closing(open_source(moments.plan.source)) as files:
                execute(moments.plan, files, NullTarget(), budget=GatherOptions().budget)
    except XrankError as error:
        problem = error.message
    counts = {"num_tensors": moments.count, "nbytes": moments.plan.nbytes}
    return {"class": moments.optimizer, **counts, "problem": problem}


def _compare_ties(planned: FolderPlan) -> None:
    """Compare the tensors that are tied and stored apart, as a gather does while it copies them."""
    records = {shard.name: set(shard.record.tolist()) for shard in planned.source.shards}
    tied = {
        target: names
        for target, names in planned.selection.tied.items()
        if any(records[name] != records[target] for name in names)
    }
    outputs = [OutputTensor(each.name, each.dtype, each.shape) for each in planned.selection.outputs]
    plan = make_plan(planned.source, [OutputFile.bare(each) for each in outputs if each.name in tied], tied=tied)
    with closing(open_source(plan.source)) as files:
        execute(plan, files, NullTarget(), budget=planned.options.budget)


def _list_commands(
    path: str, model: StoredModel | None, missing: Sequence[MissingTensor], problems: Sequence[XrankError]
) -> list[dict[str, str]]:
    """Return what can be had of a source, each with its command."""
    if model is None or len(missing) == len([*model.shards, *model.absent]):
        return []
    count, gather = len(model.shards) - sum(one.shape is not None for one in missing), f"xrank gather {path} -o OUT"
    if not problems:
        return [{"what": f"all {plural(count, 'tensor')}", "command": gather}]
    if any(isinstance(problem, UsageError) for problem in problems):
        return []  # it ends each of these commands, too; its next step leads further
    wanted, filling = option("include", metavar="REGEX"), option("fill_from_base", metavar="REGEX")
    found = {
        f"a selection of {plural(count, 'whole tensor')}": wanted,
        f"{plural(count, 'whole tensor')}, and a list of the others": option("salvage", True),
        "a whole model, with a base model's tensors": f"{option('base_model', metavar='BASE')} {filling}",
    }
    return [{"what": what, "command": COMMAND.render(f"{gather} {more}")} for what, more in found.items()]


def _tensor_row(model: StoredModel, index: int, faults: Faults) -> dict[str, Any]:
    shard = model.shards[index]
    row: dict[str, Any] = {"name": shard.name, "dtype": shard.dtype, "shape": list(shard.shape)}
    try:
        copies, replicas = divide_replicas(shard, model)
    except XrankError as error:
        if not model.records.is_lost(shard.record).any():  # else the fault is listed
            faults.add(error)
        return row | {"problem": error.message}
    return row | {"num_pieces": len(copies), "num_replicas": len(replicas)}
