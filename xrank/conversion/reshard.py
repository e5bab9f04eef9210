"""Reshard: from any source to the states of a workspace in another layout, proven before the first byte is written."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from xrank.conversion.report import file_facts, peak_rss_nbytes, source_facts
from xrank.decisions.options import DTypeChoice, GatherOptions, dtype_choice
from xrank.decisions.reshard_plan import Reshard, plan_reshard
from xrank.errors import UsageError
from xrank.faces import option
from xrank.layout import LayoutMap
from xrank.making.file_writing import WrittenFiles
from xrank.making.states_filling import make_states
from xrank.plan.digests import digest_text
from xrank.plan.report import OutputFacts, ProofFacts, Report
from xrank.public_calls import names_own_arguments
from xrank.teams.agreement import check_plans
from xrank.teams.launches import find_launched_team
from xrank.writers.staging import check_apart, check_output, check_room

if TYPE_CHECKING:
    import torch

__all__ = ["reshard_checkpoint"]


@names_own_arguments
def reshard_checkpoint(
    source: str | os.PathLike[str],
    layouts: str | os.PathLike[str] | LayoutMap,
    out: str | os.PathLike[str],
    *,
    recipe: str | os.PathLike[str] | None = None,
    base_model: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    max_memory: str | int = "64MB",
    workers: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
    distributed: bool = False,
    timeout_seconds: float = 1800.0,
) -> Report:
    """Write a workspace, or split a model folder, in another layout: a state for each rank of the new mesh.

    The whole plan is proven from metadata before anything is written: every element of the source exactly once, and
    of every new part. While bytes move, every recorded checksum is compared, and so is every replica. The workspace
    appears by one rename; the same call goes on with what an interrupted one finished. The states say the source's
    run id and step; a source without a run id gives them a new one, which the report notes.

    Args:
        source: the folder, or file, to read: whatever `gather_checkpoint` takes that records its own layouts.
        layouts: the new layout: a layout file, or its content. Every tensor needs a rule; names in its ``[alias]``
            are compared with the tensors they stand for, and share their bytes in every state.
        out: the workspace to make.
        recipe: the name of a recipe that comes with xrank, or a file: training names become Hugging Face's, or these
            training names, whichever the source does not have. None, and ``"none"``, keep the names. The layout's
            rules are for the new names.
        base_model: a model folder, or the ID of one in the local Hugging Face cache: its companions, and its
            config.json where none is beside the source.
        dtype: ``keep``, ``bf16``, ``fp16`` or ``fp32``, for floating-point tensors; None keeps, too.
        max_memory: bytes of all buffers, such as ``"64MB"``.
        workers: threads; ``min(4, cores)`` if None.
        overwrite: whether a model or workspace of xrank's that is there may be replaced.
        dry_run: prove and plan; write nothing.
        progress: called with (bytes written so far, bytes in all), on rank 0 alone.
        distributed: share the work among a launcher's ranks, as `gather_checkpoint` does; ranks other than 0 return
            what was planned.
        timeout_seconds: how long ranks that live may take to come.

    Raises:
        UsageError, LayoutError: the call must change: among others, a tensor that no rule cuts, or a size that does
            not divide.
        IncompleteError: something is missing and may still come.
        ContradictionError, CorruptError, UnsafeError: the source is not to be trusted.
        NoSpaceError, XrankError: the output could not be written; what is finished is kept for the next run.
        RankFailedError, RankTimeoutError: another rank failed, died or did not come; what is finished is kept.
    """
    started = time.monotonic()
    options = GatherOptions(
        dtype=_check_dtype(dtype), max_memory=max_memory, workers=workers, overwrite=overwrite, dry_run=dry_run
    )
    path = os.fspath(out)
    team = find_launched_team(path, distributed=distributed and not dry_run, timeout_seconds=timeout_seconds)

    def plan(host: str) -> Reshard:
        check_apart(os.fspath(source), path)
        if team.is_first:
            check_output(out, overwrite=overwrite, replaces_states=True)
        reshard = plan_reshard(os.fspath(source), layouts, options, recipe=recipe, base_model=base_model, host=host)
        check_apart(reshard.source.path, path)  # again: the source may have been found further down
        return reshard

    if dry_run:
        reshard = plan(socket.gethostname())
        check_room(out, [file.output.nbytes for file in reshard.plan.files], reshard.source.path)
        return _report(reshard, path, started, None, ())
    with team.together():
        # States name one host, whichever rank writes them.
        host = team.broadcast("host", socket.gethostname() if team.is_first else None)
        reshard, _ = team.agree("the plan", lambda: plan(host), lambda reshard: reshard.digest, check_plans(team.ranks))
        written, notes = make_states(reshard, path, progress, team)
    return _report(reshard, path, started, written, notes)


def _check_dtype(dtype: str | torch.dtype | None) -> DTypeChoice:
    choice = dtype_choice(dtype)
    if choice == "base":
        raise UsageError(
            f"{option('dtype', 'base')} is for a gather: states are not cast to what the base model stores",
            got="base",
            want="keep, bf16, fp16 or fp32",
            next_step="choose a dtype",
        )
    return choice


def _report(
    reshard: Reshard, path: str, started: float, written: WrittenFiles | None, stage_notes: tuple[str, ...]
) -> Report:
    plan, proof = reshard.plan, ProofFacts(coverage="proven")
    facts = OutputFacts(
        path=path,
        num_tensors=len(reshard.outputs),
        num_parameters=sum(output.num_elements for output in reshard.outputs),
        nbytes=sum(tensor.output.nbytes for tensor in plan.tensors),
        world_size=len(plan.files),
        mesh=reshard.grid,
        run_id=reshard.run_id,
        tied=[[target, *names] for target, names in reshard.tied.items()],
        cast=dict(reshard.selection.cast),
        companions=[companion.name for companion in reshard.companions],
        files=file_facts(plan),
    )
    if written is None:
        facts = facts.extended(peak_buffer_nbytes=reshard.options.budget.nbytes)
        proof = proof.extended(num_replicas_to_compare=sum(len(tensor.replicas) for tensor in plan.tensors))
    else:
        digests = [digest_text(written.digests[index].digest) for index in range(len(plan.files))]
        files = [file.extended(digest=digest) for file, digest in zip(facts.files, digests, strict=True)]
        facts = facts.extended(files=files, resumed_nbytes=written.resumed_nbytes)
        proof = proof.extended(
            num_replicas_compared=written.num_replicas_compared, num_checksums=written.outcome.num_checksums
        )
    return Report(
        command="reshard",
        path=path,
        seconds=time.monotonic() - started,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=source_facts(reshard.source),
        proof=proof,
        output=None if written is None else facts,
        plan=facts if written is None else None,
        notes=(*reshard.notes, *(written.notes if written else ()), *(("stage", note) for note in stage_notes)),
    )
