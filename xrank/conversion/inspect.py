"""Inspect: what lies at a path, from metadata alone; problems are shown, not raised."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

from xrank.conversion.report import peak_rss_nbytes
from xrank.decisions.adapters import Adapted, adapt, adapter_beside
from xrank.decisions.base_check import check_source, describe_skipped_check
from xrank.decisions.base_model import open_base_model
from xrank.decisions.decision import Purpose, Request, decide, renames_adapted
from xrank.decisions.folder_plan import read_layouts
from xrank.decisions.found_source import companions_of, read_found
from xrank.decisions.options import AdapterChoice, GatherOptions
from xrank.decisions.recipe_choice import choose_recipe
from xrank.dtypes import dtype as dtype_of
from xrank.errors import XrankError
from xrank.layout import LayoutMap
from xrank.plan.planner import divide_replicas
from xrank.plan.report import InspectDetails, Report, SourceFacts
from xrank.plan.source import StoredModel
from xrank.readers.discovery import find_source
from xrank.readers.workspace import WorkspaceReader, survey_ranks
from xrank.writers.stage_inspection import inspect_stage

__all__ = ["inspect_source"]


def inspect_source(
    path: str | os.PathLike[str],
    *,
    layouts: str | os.PathLike[str] | LayoutMap | None = None,
    base_model: str | os.PathLike[str] | None = None,
) -> Report:
    """Return what lies at a path: format, run, ranks, tensors, and the problems a gather would meet.

    Problems are in ``details["problems"]``, each with the exit code of a gather; the report is `ok` with them, too.

    Args:
        path: the folder, or file.
        layouts: layouts for a source that records none: a layout file, or its content.
        base_model: names and shapes that the source must have, and what it does not record.

    Raises:
        UsageError: there is no such base model.
        IncompleteError: the path does not exist.
        UnknownFormatError: no reader recognises it.
    """
    started = time.monotonic()
    stage = inspect_stage(os.fspath(path)) if os.path.isdir(path) else None
    if stage is not None:
        return stage
    text, reader = find_source(os.fspath(path))
    given = layouts if layouts is None or isinstance(layouts, LayoutMap) else read_layouts(layouts)
    base = open_base_model(base_model) if base_model is not None else None
    problems: list[XrankError] = []
    model = None
    tensors: list[dict[str, Any]] = []
    notes: list[tuple[str, str]] = []
    companions: list[str] = []
    recipe = config_path = None
    try:
        beside = companions_of(os.fspath(path), text, reader)
        companions += [companion.name for companion in beside[0]]  # to be shown where the reader finds a problem, too
        found = read_found(os.fspath(path), text, reader, base=base, layouts=given, beside=beside)
        model = found.model
        notes += found.notes
        config_path = found.config_path
        tensors = [_tensor_row(model, index, problems) for index in range(len(model.shards))]
        refusals, adapted = _adapter_in(model, text, base.tensors if base is not None else {})
        problems += refusals
        if not refusals:
            notes += adapter_beside(text)
            renamed = decide(found, Request(Purpose.PROOF)).source
            recipe = renamed.recipe
            if base is not None and check_source(base, renamed, found.config) is None:
                notes.append(describe_skipped_check(base, text))
        elif adapted is not None and (matched := choose_recipe(adapted.base, found.config, None)) is not None:
            problems.append(renames_adapted(adapted.source, matched))
    except XrankError as error:
        problems.append(error)
    details = InspectDetails(
        problems=[{**problem.to_dict(), "exit_code": problem.exit_code} for problem in problems],
        tensors=tensors,
        format={} if model is None else {key: what for key, what in model.details.items() if key != "ranks"},
        companions=companions,
        config_path=config_path,
        ranks=survey_ranks(text) if isinstance(reader, WorkspaceReader) else [] if model is None else _ranks(model),
    )
    source = SourceFacts(path=text, format=reader.name)
    return Report(
        command="inspect",
        path=text,
        seconds=time.monotonic() - started,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=source if model is None else source.extended(**_facts(model), recipe=recipe),
        notes=() if model is None else (*model.notes, *notes),
        details=details,
    )


def _adapter_in(model: StoredModel, place: str, own: Mapping[str, Any]) -> tuple[list[XrankError], Adapted | None]:
    """Return why a gather would refuse the adapter in a source, and it kept apart; nothing where there is none."""
    refusals: list[XrankError] = []
    choices: tuple[AdapterChoice | None, ...] = (None, "separate")
    for choice in choices:
        # Without a choice a gather says that there is one; what else is in the way it says to who chose.
        try:
            adapted = adapt(model, GatherOptions(adapter=choice), place, own)
        except XrankError as error:
            if error.message not in [refusal.message for refusal in refusals]:
                refusals.append(error)
        else:
            return refusals, adapted
    return refusals, None


def _facts(model: StoredModel) -> dict[str, Any]:
    # A tie is one tensor under two names.
    shards = [shard for shard in model.shards if shard.name not in model.aliases]
    return {
        "step": model.step,
        "world_size": model.world_size,
        "run_id": model.run_id,
        "num_tensors": len(shards),
        "num_parameters": sum(prod(shard.shape) for shard in shards),
        "dtypes": dict(Counter(shard.dtype for shard in shards)),
        "nbytes": model.nbytes,
        "skipped_nbytes": model.skipped_nbytes,
        "has_config": model.config is not None,
    }


def _ranks(model: StoredModel) -> list[dict[str, Any]]:
    """Return what each rank left of the model's tensors, in a format whose ranks leave nothing that says more."""
    if model.world_size is None:
        return []
    counts: Counter[int] = Counter()
    nbytes: Counter[int] = Counter()
    for shard in model.shards:
        if shard.name not in model.aliases:
            counts.update(set(shard.rank.tolist()))
            width = dtype_of(shard.dtype).nbytes
            for rank, size in zip(shard.rank.tolist(), shard.nests.sizes.tolist(), strict=True):
                nbytes[rank] += size * width
    return [{"rank": rank, "num_tensors": counts[rank], "nbytes": nbytes[rank]} for rank in sorted(counts)]


def _tensor_row(model: StoredModel, index: int, problems: list[XrankError]) -> dict[str, Any]:
    shard = model.shards[index]
    row: dict[str, Any] = {"name": shard.name, "dtype": shard.dtype, "shape": list(shard.shape)}
    try:
        copies, replicas = divide_replicas(shard, model)
    except XrankError as error:
        problems.append(error)
        return row | {"problem": error.message}
    return row | {"num_pieces": len(copies), "num_replicas": len(replicas)}
