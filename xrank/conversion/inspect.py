"""Inspect: what lies at a path, from metadata alone; problems are shown, not raised."""

from __future__ import annotations

import os
import time
from collections import Counter
from math import prod
from typing import Any

from xrank.conversion.named_source import read_found
from xrank.conversion.process import peak_rss_nbytes
from xrank.conversion.stage_inspection import inspect_stage
from xrank.errors import XrankError
from xrank.layout import LayoutMap
from xrank.plan.planner import divide_replicas
from xrank.plan.report import Report
from xrank.plan.source import StoredModel
from xrank.readers.discovery import find_source
from xrank.readers.workspace import WorkspaceReader, survey_ranks
from xrank.writers.companions import source_companions

__all__ = ["inspect_source"]


def inspect_source(path: str | os.PathLike[str], *, layout: str | os.PathLike[str] | None = None) -> Report:
    """Return what lies at a path: format, run, ranks, tensors, and the problems a gather would meet.

    Raises:
        IncompleteError: the path does not exist.
        UnknownFormatError: no reader recognises it.
    """
    started = time.monotonic()
    stage = inspect_stage(os.fspath(path)) if os.path.isdir(path) else None
    if stage is not None:
        return stage
    text, reader = find_source(os.fspath(path))
    problems: list[XrankError] = []
    model = None
    tensors: list[dict[str, Any]] = []
    recipe = None
    try:
        layouts = LayoutMap.read(layout) if layout is not None else None
        found = read_found(text, reader, layouts=layouts)
        model = found.model
        tensors = [_tensor_row(model, index, problems) for index in range(len(model.shards))]
        recipe = found.renamed().recipe
    except XrankError as error:
        problems.append(error)
    details: dict[str, Any] = {
        "problems": [{**problem.to_dict(), "exit_code": problem.exit_code} for problem in problems],
        "tensors": tensors,
        "format": {} if model is None else {key: what for key, what in model.details.items() if key != "ranks"},
        "companions": [c.name for c in source_companions(text)] if os.path.isdir(text) else [],
    }
    if isinstance(reader, WorkspaceReader):
        details["ranks"] = survey_ranks(text)
    return Report(
        command="inspect",
        path=text,
        seconds=time.monotonic() - started,
        peak_rss_nbytes=peak_rss_nbytes(),
        source={"path": text, "format": reader.name, **({} if model is None else _facts(model) | {"recipe": recipe})},
        notes=() if model is None else model.notes,
        details=details,
    )


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


def _tensor_row(model: StoredModel, index: int, problems: list[XrankError]) -> dict[str, Any]:
    shard = model.shards[index]
    row: dict[str, Any] = {"name": shard.name, "dtype": shard.dtype, "shape": list(shard.shape)}
    try:
        copies, replicas = divide_replicas(shard, model)
    except XrankError as error:
        problems.append(error)
        return row | {"problem": error.message}
    return row | {"num_pieces": len(copies), "num_replicas": len(replicas)}
