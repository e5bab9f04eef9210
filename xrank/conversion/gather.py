"""OutputPlan: from any source to a Hugging Face folder, proven before the first byte is written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from xrank.conversion.report import output_facts, peak_rss_nbytes, proof_facts, source_facts
from xrank.decisions.options import GatherOptions
from xrank.decisions.output_plan import OutputPlan, plan_gather
from xrank.errors import UsageError
from xrank.layout import LayoutMap
from xrank.making.stage_filling import make_output
from xrank.plan.buffers import FileSource
from xrank.plan.merging import factors_nbytes
from xrank.plan.report import Report
from xrank.plan.windows import WINDOW_NBYTES
from xrank.public_calls import names_own_arguments
from xrank.teams.agreement import check_plans
from xrank.teams.launches import find_launched_team
from xrank.writers.staging import check_apart, check_output, check_room

__all__ = ["gather_checkpoint"]


@names_own_arguments
def gather_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    workspace: bool = False,
    base_model: str | os.PathLike[str] | None = None,
    layout: str | os.PathLike[str] | LayoutMap | None = None,
    recipe: str | os.PathLike[str] | None = None,
    format: str | None = None,  # noqa: A002  the option's name
    progress: Callable[[int, int], None] | None = None,
    distributed: bool = False,
    timeout_seconds: float = 1800.0,
    **options: Any,
) -> Report:
    """Make a Hugging Face folder of a workspace or a sharded checkpoint.

    The whole plan is proven from metadata before anything is written: every element of every tensor exactly once.
    While bytes move, every recorded checksum is compared, and so is every replica. The folder appears by one rename.

    Args:
        source: the folder, or file, to gather.
        out: the folder to make.
        workspace: insist that the source is a workspace.
        base_model: a model folder, or the ID of one in the local Hugging Face cache: companions, names and shapes.
        layout: a layout file, or its content, for a source that records no layouts.
        recipe: the name of a recipe that comes with xrank, a file, or ``"none"``: training names become Hugging Face's.
            None: the one that knows all of the source's names, if there is one.
        format: the source's format, where two readers accept it.
        progress: called with (bytes written so far, bytes in all), on rank 0 alone.
        distributed: share the work with all other ranks that torchrun, srun or mpirun started, or that RANK and
            WORLD_SIZE name; each makes this call. Rank 0 alone checks and reports all: the reports of the others
            lack digests and counts. A dry run is everybody's own.
        timeout_seconds: how long ranks that live may take to come; a death is noticed in seconds.
        **options: the other options of ``xrank gather``, by name (`xrank.decisions.options.GatherOptions`).

    Raises:
        UsageError, LayoutError: the call must change.
        IncompleteError: something is missing and may still come.
        ContradictionError, CorruptError, UnsafeError: the source is not to be trusted.
        NoSpaceError, XrankError: the output could not be written; what is finished is kept for the next run.
        RankFailedError, RankTimeoutError: another rank failed, died or did not come; what is finished is kept.
    """
    started = time.monotonic()
    checked = _checked_options(options)
    path = os.fspath(out)
    team = find_launched_team(path, distributed=distributed and not checked.dry_run, timeout_seconds=timeout_seconds)

    def plan() -> OutputPlan:
        check_apart(os.fspath(source), path)
        if team.is_first:  # others may still see what was there a moment ago
            check_output(out, overwrite=checked.overwrite)
        gather = plan_gather(
            os.fspath(source),
            checked,
            base_model=base_model,
            layouts=layout,
            format_name=format,
            workspace=workspace,
            recipe=recipe,
        )
        check_apart(gather.source.path, path)  # again: the source may have been found further down
        return gather

    if checked.dry_run:
        gather = plan()
        check_room(out, [file.output.nbytes for file in gather.plan.files], gather.source.path)
        return _planned_report(gather, path, time.monotonic() - started)
    with team.together():
        gather, _ = team.agree("the plan", plan, lambda gather: gather.digest, check_plans(team.ranks))
        with closing(FileSource(gather.plan.source)) as files:
            made = make_output(gather, files, path, progress, team)
    return Report(
        command="gather",
        path=path,
        seconds=time.monotonic() - started,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=source_facts(gather.source),
        proof={**proof_facts(gather), **made.proof},
        output={"path": path, **output_facts(gather), **made.output},
        notes=(*gather.notes, *made.notes),
    )


def _checked_options(options: Mapping[str, Any]) -> GatherOptions:
    unknown = sorted(set(options) - set(GatherOptions.__dataclass_fields__))
    if unknown:
        raise UsageError(
            f"gather has no option {unknown[0]}",
            got=unknown[0],
            want=", ".join(GatherOptions.__dataclass_fields__),
        )
    return GatherOptions(**options)


def _planned_report(gather: OutputPlan, out: str, seconds: float) -> Report:
    budget = gather.options.budget
    files = [
        {"name": file.output.name, "nbytes": file.output.nbytes, "num_tensors": len(file.tensors)}
        for file in gather.plan.files
    ]
    replicas = sum(len(replicas) for tensor in gather.plan.tensors for replicas in tensor.compared)
    return Report(
        command="gather",
        path=out,
        seconds=seconds,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=source_facts(gather.source),
        proof={**proof_facts(gather), "num_replicas_to_compare": replicas},
        plan={
            "path": out,
            **output_facts(gather),
            "files": files,
            # Each worker holds the factors of what it merges, and a window of it as it is stored.
            "peak_buffer_nbytes": budget.nbytes
            + (budget.workers * (factors + WINDOW_NBYTES) if (factors := factors_nbytes(gather.plan)) else 0),
        },
        notes=gather.notes,
    )
