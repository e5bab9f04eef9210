"""The proof of layouts before anything is trained or moved: every element of every tensor exactly once per replica."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from xrank.conversion.report import peak_rss_nbytes
from xrank.decisions.output_plan import read_layouts
from xrank.dtypes import DTYPES
from xrank.errors import LayoutError
from xrank.layout import LayoutMap
from xrank.plan.holdings import Holdings, Survey, held_nbytes
from xrank.plan.report import Report
from xrank.plan.survey import survey
from xrank.words import numbers_text, ranks_text

__all__ = ["check_layouts", "check_survey", "survey_facts"]


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


def check_survey(
    found: Survey,
    *,
    path: str | None = None,
    source: Mapping[str, Any] | None = None,
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
    problems = [error for one in found.tensors if (error := _problem(one)) is not None]
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
        source=source or {},
        proof={"coverage": "refused" if problems else "proven", "num_rules": len(found.rules)},
        plan={
            "num_tensors": len(found.tensors),
            "num_parameters": sum(math.prod(one.shape) for one in found.tensors),
            "nbytes": sum(math.prod(one.shape) * _width(one.dtype) for one in found.tensors),
        },
        notes=tuple(said),
        error=None if first is None else first.to_dict(),
        details={"problems": [problem.to_dict() for problem in problems], **survey_facts(found)},
    )
    return report, first


def survey_facts(found: Survey) -> dict[str, Any]:
    """Return what JSON shows of a survey beside its tensors."""
    held = held_nbytes(found.tensors, _width)
    return {
        "meshes": {name: {"grid": mesh.grid, "ranks": numbers_text(mesh.ranks)} for name, mesh in found.meshes.items()},
        "unmatched": list(found.unmatched),
        "unused_rules": list(found.unused),
        "ranks": [{"rank": rank, "nbytes": nbytes} for rank, nbytes in held.items()],
    }


def _width(dtype: str | None) -> int:
    return DTYPES[dtype].nbytes if dtype in DTYPES else 0


def _problem(one: Holdings) -> LayoutError | None:
    if one.problem is not None:
        one.problem.next_step = one.problem.next_step or "correct the layout file"
        return one.problem
    if one.rule is None and not one.shares:
        dims = ", ".join(f"d{i}" for i in range(len(one.shape)))
        return LayoutError(
            f"{one.name}: no rule says how it is cut",
            tensor=one.name,
            got=f"shape {list(one.shape)}",
            want="a rule for every tensor",
            next_step=f'add a rule, such as "{one.name}" = "[{dims}]" for a tensor that every rank holds whole',
        )
    misfit = one.misfit
    if misfit is None:
        return None
    what = {
        "gap": "held by no rank",
        "overlap": f"held by {ranks_text(misfit.ranks)} in different cuts",
        "outside": f"outside the tensor, on {ranks_text(misfit.ranks)}",
    }[misfit.kind]
    return LayoutError(
        f"{one.name}, {misfit.where}: {what}",
        tensor=one.name,
        rank=misfit.ranks[0] if misfit.ranks else None,
        index_range=misfit.where,
        got=f"{one.text or 'what the ranks recorded'} of {list(one.shape)}"
        + ("" if one.mesh is None else f" on {one.mesh.grid}"),
        want="every element exactly once, or in equal parts as replicas",
        next_step="correct the layout" if one.rule is None else f"correct the rule {one.rule!r}",
    )
