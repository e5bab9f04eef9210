"""Gather: from any source to a Hugging Face folder, proven before the first byte is written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from xrank.conversion.report import file_facts, output_facts, peak_rss_nbytes, proof_facts, source_facts
from xrank.decisions.folder_plan import FolderPlan, plan_gather
from xrank.decisions.options import AdapterChoice, GatherOptions, ReplicaChoice, dtype_choice
from xrank.layout import LayoutMap
from xrank.making.folder_filling import make_output
from xrank.plan.buffers import FileSource
from xrank.plan.merging import factors_nbytes
from xrank.plan.report import Report
from xrank.plan.windows import WINDOW_NBYTES
from xrank.public_calls import names_own_arguments
from xrank.teams.agreement import check_plans
from xrank.teams.launches import find_launched_team
from xrank.teams.team import Team
from xrank.writers.staging import check_apart, check_output, check_room

if TYPE_CHECKING:
    import torch

__all__ = ["gather_checkpoint"]


@names_own_arguments
def gather_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    workspace: bool = False,
    base_model: str | os.PathLike[str] | None = None,
    layouts: str | os.PathLike[str] | LayoutMap | None = None,
    recipe: str | os.PathLike[str] | None = None,
    format: str | None = None,  # noqa: A002  the option's name
    dtype: str | torch.dtype | None = None,
    keep_fp32: str | Sequence[str] = (),
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    max_shard_size: str | int = "5GB",
    max_memory: str | int = "64MB",
    workers: int | None = None,
    replicas: ReplicaChoice = "verify",
    adapter: AdapterChoice | None = None,
    adapter_config: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    resume: bool = True,
    verify: bool | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
    distributed: bool = False,
    timeout_seconds: float = 1800.0,
) -> Report:
    """Make a Hugging Face folder of a workspace or a sharded checkpoint.

    The whole plan is proven from metadata before anything is written: every element of every tensor exactly once.
    While bytes move, every recorded checksum is compared, and so is every replica. The folder appears by one rename.

    Args:
        source: the folder, or file, to gather.
        out: the folder to make.
        workspace: insist that the source is a workspace.
        base_model: a model folder, or the ID of one in the local Hugging Face cache: companions, names and shapes.
        layouts: a layout file, or its content, for a source that records no layouts.
        recipe: the name of a recipe that comes with xrank, a file, or ``"none"``: training names become Hugging Face's.
            None: the one that knows all of the source's names, if there is one.
        format: the source's format, where two readers accept it.
        dtype: ``"keep"``, ``"base"`` (what the base model stores), ``"bf16"``, ``"fp16"``, ``"fp32"``, or torch's, for
            floating-point tensors; None keeps, too.
        keep_fp32: regular expressions of names that are not cast below fp32.
        include: regular expressions of the output names to write; empty: all.
        exclude: regular expressions of the output names to leave out.
        max_shard_size: bytes of tensors in a file.
        max_memory: bytes of all buffers.
        workers: number of threads; None: ``min(4, cores)``.
        replicas: ``"verify"`` refuses replicas that differ, ``"pick"`` takes the lowest rank's.
        adapter: ``"separate"`` writes LoRA adapters as a PEFT folder, ``"merge"`` adds them to the model; None refuses.
        adapter_config: PEFT's ``adapter_config.json``, where the source holds none.
        overwrite: whether a model that is there may be replaced.
        resume: whether to go on with what an interrupted run finished.
        verify: whether to read the stage back before the rename; None: if an output is replaced.
        dry_run: prove and plan; write nothing.
        progress: called with (bytes written so far, bytes in all), on rank 0 alone.
        distributed: share the work with all other ranks that torchrun, srun or mpirun started, or that RANK and
            WORLD_SIZE name; each makes this call. Rank 0 alone checks and reports all: the reports of the others
            lack digests and counts. A dry run is everybody's own.
        timeout_seconds: how long ranks that live may take to come; a death is noticed in seconds.

    Raises:
        UsageError, LayoutError: the call must change.
        IncompleteError: something is missing and may still come.
        ContradictionError, CorruptError, UnsafeError: the source is not to be trusted.
        NoSpaceError, XrankError: the output could not be written; what is finished is kept for the next run.
        RankFailedError, RankTimeoutError: another rank failed, died or did not come; what is finished is kept.
    """
    options = GatherOptions(
        dtype=dtype_choice(dtype),
        keep_fp32=keep_fp32,
        include=include,
        exclude=exclude,
        max_shard_size=max_shard_size,
        max_memory=max_memory,
        workers=workers,
        replicas=replicas,
        adapter=adapter,
        adapter_config=adapter_config,
        overwrite=overwrite,
        resume=resume,
        verify=verify,
        dry_run=dry_run,
    )
    plan = partial(
        plan_gather,
        os.fspath(source),
        options,
        base_model=base_model,
        layouts=layouts,
        format_name=format,
        workspace=workspace,
        recipe=recipe,
    )
    path, is_shared = os.fspath(out), distributed and not dry_run
    team = find_launched_team(path, distributed=is_shared, timeout_seconds=timeout_seconds)
    return _gather(os.fspath(source), path, options, plan, team, progress)


def _gather(
    source: str,
    out: str,
    options: GatherOptions,
    plan: Callable[[], FolderPlan],
    team: Team,
    progress: Callable[[int, int], None] | None,
) -> Report:
    started = time.monotonic()

    def plan_apart() -> FolderPlan:
        check_apart(source, out)
        if team.is_first:  # other ranks may still see what was there a moment ago
            check_output(out, overwrite=options.overwrite)
        planned = plan()
        check_apart(planned.source.path, out)  # again: the source may have been found further down
        return planned

    if options.dry_run:
        planned = plan_apart()
        check_room(out, [file.output.nbytes for file in planned.plan.files], planned.source.path)
        return _plan_report(planned, out, time.monotonic() - started)
    with team.together():
        planned, _ = team.agree("the plan", plan_apart, lambda planned: planned.digest, check_plans(team.ranks))
        with closing(FileSource(planned.plan.source)) as files:
            made = make_output(planned, files, out, progress, team)
    return Report(
        command="gather",
        path=out,
        seconds=time.monotonic() - started,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=source_facts(planned.source),
        proof=made.add_proof(proof_facts(planned)),
        output=made.add_output(output_facts(planned, out)),
        notes=(*planned.notes, *made.notes),
    )


def _plan_report(planned: FolderPlan, out: str, seconds: float) -> Report:
    budget = planned.options.budget
    replicas = sum(len(replicas) for tensor in planned.plan.tensors for replicas in tensor.compared)
    return Report(
        command="gather",
        path=out,
        seconds=seconds,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=source_facts(planned.source),
        proof=proof_facts(planned).extended(num_replicas_to_compare=replicas),
        plan=output_facts(planned, out).extended(
            files=file_facts(planned.plan),
            # Each worker holds the factors of what it merges, and a window of it as it is stored.
            peak_buffer_nbytes=budget.nbytes
            + (budget.workers * (factors + WINDOW_NBYTES) if (factors := factors_nbytes(planned.plan)) else 0),
        ),
        notes=planned.notes,
    )
