"""The proof of layouts before anything is trained or moved: every element of every tensor exactly once per replica."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from xrank.conversion.report import peak_rss_nbytes
from xrank.decisions.base_model import open_base_model
from xrank.decisions.folder_plan import read_layouts
from xrank.decisions.layout_sources import read_stored
from xrank.dtypes import DTYPES
from xrank.errors import LayoutError, UsageError
from xrank.faces import option
from xrank.layout import LayoutMap
from xrank.plan.holdings import Survey, find_problem, sum_held_nbytes
from xrank.plan.layout_shapes import compute_shapes
from xrank.plan.report import LayoutDetails, OutputFacts, ProofFacts, Report, SourceFacts
from xrank.plan.survey import survey
from xrank.words import numbers_text

__all__ = ["check_file", "check_layouts", "check_survey", "survey_facts"]


def check_layouts(
    layouts: LayoutMap | str | os.PathLike[str],
    shapes: Mapping[str, Sequence[int]],
    *,
    dtypes: Mapping[str, str] | None = None,
) -> Report:
    """Check that ranks which hold tensors by these layouts hold every element exactly once per replica.

    The report's ``ok`` is the answer, its ``error`` the first gap, overlap or misfit, with ranks and index range;
    ``details`` has all of them under ``problems``, tensors that no rule decides for under ``unmatched``, which are
    problems too, and rules that decide for no tensor under ``unused_rules``.

    Args:
        layouts: how each tensor is cut, with a mesh; or the path of a layout file.
        shapes: global shape by name.
        dtypes: safetensors name of the element type by name, for the bytes of each rank.

    Raises:
        LayoutError, UsageError: the layout file is none, or a shape is no shape.
    """
    started = time.monotonic()
    read = layouts if isinstance(layouts, LayoutMap) else read_layouts(layouts)
    report, _ = check_survey(survey(read, shapes, dtypes=dtypes), started=started)
    return report


def check_file(
    file: str,
    path: str | None,
    *,
    base_model: str | os.PathLike[str] | None = None,
    started: float | None = None,
) -> tuple[Report, LayoutError | None]:
    """Return the report of a layout file's proof, and its first problem.

    Args:
        file: the layout file.
        path: a workspace or model folder that says names, shapes and types; None for the sizes that the file tells.
        base_model: a folder, or a cached ID, that tells whole shapes where neither the source nor the file does.
        started: when the check began, on the monotonic clock.

    Raises:
        UsageError, LayoutError, ...: the file or the source cannot be read.
    """
    layouts = read_layouts(file)
    if path is None and base_model is not None:
        raise UsageError(
            f"{option('base_model')} was given without PATH",
            got=option("base_model", os.fspath(base_model)),
            want="PATH, a source whose shapes it tells",
            next_step=f"run: xrank layout check {file} {os.fspath(base_model)}, if its tensors are meant",
        )
    if path is None:
        shapes, untold = compute_shapes(layouts)
        if not shapes and len(layouts):
            raise LayoutError(
                f"{file} tells the size of no tensor, so nothing can be proven",
                file=file,
                got=next(iter(untold.values()), "no rule"),
                want="numbers in [sizes], or a source of shapes",
                next_step=f"run: xrank layout check {file} PATH, with a workspace or model folder",
            )
        found = survey(layouts, shapes)
        found = replace(found, unused=tuple(rule for rule in found.unused if rule not in untold))
        notes = [("not-proven", f"the rule {rule!r} is not proven: {reason}") for rule, reason in untold.items()]
        return check_survey(found, path=file, notes=notes, started=started)
    try:
        place, stored = read_stored(path, layouts, open_base_model(base_model) if base_model is not None else None)
    except LayoutError as error:
        has_tensor = f"give a base model that has the tensor by {option('base_model')}"
        error.advise(f"add its rule to {file}, or {has_tensor}")
        raise
    found = survey(
        layouts,
        {shard.name: shard.shape for shard in stored.shards},
        dtypes={shard.name: shard.dtype for shard in stored.shards},
    )
    return check_survey(found, path=file, source=SourceFacts(path=place, format=stored.format), started=started)


def check_survey(
    found: Survey,
    *,
    path: str | None = None,
    source: SourceFacts | None = None,
    notes: Sequence[tuple[str, str]] = (),
    started: float | None = None,
) -> tuple[Report, LayoutError | None]:
    """Return the report of a check, and its first problem.

    Args:
        found: who holds what.
        path: of the layout file.
        source: where the shapes are from.
        notes: what else is to be said; where there is some, not everything was proven.
        started: when the check began, on the monotonic clock.
    """
    problems = [error for one in found.tensors if (error := find_problem(one)) is not None]
    first = problems[0] if problems else None
    addends = [one for one in found.tensors if one.sums]
    said = [
        *notes,
        *(("unused-rule", f"the rule {rule!r} decides for no tensor") for rule in found.unused),
        *(("addends", f"{one.name}: the ranks hold addends over {', '.join(one.sums)}") for one in addends),
    ]
    report = Report(
        command="layout check",
        path=path,
        status="ok" if first is None else "failed",
        exit_code=0 if first is None else first.exit_code,
        seconds=0.0 if started is None else time.monotonic() - started,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=source or SourceFacts(),
        proof=ProofFacts(coverage="refused" if problems else "proven", num_rules=len(found.rules)),
        plan=OutputFacts(
            num_tensors=len(found.tensors),
            num_parameters=sum(math.prod(one.shape) for one in found.tensors),
            nbytes=sum(math.prod(one.shape) * _width(one.dtype) for one in found.tensors),
        ),
        notes=tuple(said),
        fault=first,
        details=LayoutDetails(problems=[problem.to_dict() for problem in problems], **survey_facts(found)),
    )
    return report, first


def survey_facts(found: Survey) -> dict[str, Any]:
    """Return what JSON shows of a survey beside its tensors."""
    held = sum_held_nbytes(found.tensors, _width)
    return {
        "meshes": {name: {"grid": mesh.grid, "ranks": numbers_text(mesh.ranks)} for name, mesh in found.meshes.items()},
        "unmatched": list(found.unmatched),
        "unused_rules": list(found.unused),
        "ranks": [{"rank": rank, "nbytes": nbytes} for rank, nbytes in held.items()],
    }


def _width(dtype: str | None) -> int:
    return DTYPES[dtype].nbytes if dtype in DTYPES else 0
