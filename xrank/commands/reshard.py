"""Reshard: write any source as rank states in another layout, proven before the first byte is written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from xrank.commands.earlier_output import check_dry_run
from xrank.commands.report import counts_requests, reshard_report
from xrank.engine.report import Report
from xrank.errors import UsageError, names_own_arguments, option
from xrank.layout import LayoutMap
from xrank.ranks.team import find_launched_team
from xrank.recipes.options import GatherOptions, dtype_choice, wrong_value
from xrank.recipes.reshard_plan import Reshard, plan_reshard
from xrank.recipes.state_plan import StateChoices, plan_state
from xrank.recipes.state_targets import StateTarget
from xrank.storage import places
from xrank.storage.staging import plan_apart
from xrank.storage.url import clean_path
from xrank.system import host_name

if TYPE_CHECKING:
    import torch


@names_own_arguments
@counts_requests
def reshard_checkpoint(
    source: str | os.PathLike[str],
    layouts: str | os.PathLike[str] | LayoutMap | None,
    out: str | os.PathLike[str],
    *,
    to: Literal["workspace", "dcp", "torchtitan", "accelerate", "deepspeed-universal"] = "workspace",
    dp: int | None = None,
    tp: int | None = None,
    tag: str | None = None,
    optimizer: Literal["Adam", "AdamW"] | None = None,
    recipe: str | os.PathLike[str] | None = None,
    base_model: str | os.PathLike[str] | None = None,
    part: str | None = None,
    world_size: int | None = None,
    dtype: str | torch.dtype | None = None,
    dequantize: bool = False,
    max_memory: str | int = "64MB",
    workers: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
    distributed: bool = False,
    timeout_seconds: float = 1800.0,
) -> Report:
    """Write a checkpoint as states of ranks in another layout, or a training state for another framework to resume.

    With `to`, model and optimizer are written: masters in fp32, moments, steps, groups and plain values. The report's
    notes name what the target has no place for. Without it, the model alone becomes one state for each rank of the new
    mesh.

    The plan is proven from metadata before anything is written: every element of the source, and of every new part,
    exactly once. While bytes move, all recorded checksums and all replicas are compared. The workspace appears by one
    rename; after an interruption the same call resumes. The states record the source's run id and step; for a source
    without a run id they get a new one, with a note in the report.

    Args:
        source: the folder, or file, to read: any source of `gather_checkpoint` with recorded layouts.
        layouts: a file of the new layout, or its content, with a rule for every tensor. Names in its ``[alias]`` are
            compared with the tensors that they stand for, and share their bytes in every state.
            With `to`, None lets each file hold whole tensors: all targets are loaded on any ranks.
        out: the workspace to make; or its URL in a store, ``s3://bucket/states``, where the last rank's state appears
            last.
        to: ``"dcp"``, torch's distributed checkpoint with the names of ``get_state_dict``; ``"torchtitan"``, the same
            with torchtitan's names; ``"accelerate"``, its two folders, as transformers' Trainer has them; or
            ``"deepspeed-universal"``, for ZeRO of any stage.
        dp: number of parts of each tensor's first dim in DCP's files, instead of `layouts`; `tp` of its second.
        tp: see `dp`.
        tag: name of the folder with DeepSpeed's files; None: ``global_step<N>``.
        optimizer: the optimizer of a source that does not record it.
        recipe: name of a shipped recipe, or a file, from training names to Hugging Face's or back, whichever fits the
            source; the layout's rules are for the new names. None, and ``"none"``, keep the names.
        base_model: a model folder, or the ID of one in the local Hugging Face cache: its companions, and its
            config.json if the source has none.
        part: as `xrank.gather_checkpoint`; so is `world_size`.
        world_size: number of ranks that wrote the source.
        dtype: ``keep``, ``bf16``, ``fp16`` or ``fp32``, for floating-point tensors; None keeps, too.
        dequantize: as `xrank.gather_checkpoint`.
        max_memory: as `xrank.gather_checkpoint`; so are `workers`, `dry_run`, `progress` and `timeout_seconds`.
        workers: number of threads.
        overwrite: whether an existing model or workspace of xrank may be replaced.
        dry_run: prove and plan without writing.
        progress: called with (bytes written so far, bytes in all), on rank 0 alone; an exception that it
            raises ends the call on all ranks.
        distributed: share the work among a launcher's ranks; reports of ranks other than 0 contain the plan.
        timeout_seconds: how long to wait for a live rank.

    Raises:
        UsageError, LayoutError: the call must change: a tensor has no rule, or a size does not divide.
        XrankError: as `xrank.gather_checkpoint`.

    Example:
        >>> import torch, xrank
        >>> from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
        >>> report = xrank.export_model({"norm.weight": torch.ones(4)}, "model")
        >>> halves = LayoutMap(DeviceMesh((2,), ("tp",)))
        >>> halves["norm.weight"] = TensorLayout.parse("[rows/tp]")
        >>> xrank.reshard_checkpoint("model", halves, "states").output["world_size"]
        2
    """
    started, place, path = time.monotonic(), places.enter(source), clean_path(out)
    choice = dtype_choice(dtype)
    if to not in (*get_args(StateTarget), "workspace"):
        raise wrong_value("to", to, f"one of workspace, {', '.join(get_args(StateTarget))}")
    of_states = {"dp": dp, "tp": tp, "tag": tag, "optimizer": optimizer}
    unused = of_states if to == "workspace" else {"base_model": base_model, "world_size": world_size}
    if name := next((name for name, value in unused.items() if value is not None), None):
        step = f"leave {option(name)} out"
        raise UsageError(f"{option(name)} does not go with {option('to', to)}", got=option("to", to), next_step=step)
    if to == "workspace" and layouts is None:
        raise UsageError(
            "a workspace needs the layout of its ranks",
            want=option("layouts", metavar="FILE"),
            next_step=f"give a layout file, or a target that any number of ranks can load, such as "
            f"{option('to', 'dcp')}",
        )
    if choice == "base":
        raise UsageError(
            f"{option('dtype', 'base')} is for a gather: states are not cast to the types of a base model",
            got="base",
            want="keep, bf16, fp16 or fp32",
            next_step="choose a dtype",
        )
    options = GatherOptions(
        dtype=choice,
        dequantize=dequantize,
        max_memory=max_memory,
        workers=workers,
        overwrite=overwrite,
        dry_run=dry_run,
    )

    def plan(host: str, *, checks_output: bool = True) -> Reshard:
        make: Callable[[], Reshard]
        if to != "workspace":
            choices = StateChoices(to, layouts, dp, tp, tag, optimizer, recipe, part)
            make = partial(plan_state, place, options, choices)
            return plan_apart(place, path, make, overwrite=overwrite, replaces_states=True, checks_output=checks_output)
        assert layouts is not None
        make = partial(
            plan_reshard,
            place,
            layouts,
            options,
            recipe=recipe,
            base_model=base_model,
            part=part,
            world_size=world_size,
            host=host,
        )
        return plan_apart(place, path, make, overwrite=overwrite, replaces_states=True, checks_output=checks_output)

    if dry_run:
        reshard = plan(host_name())
        check_dry_run(reshard, path)
        return reshard_report(reshard, path, started)

    from xrank.commands.folder_filling import make_once  # a dry run moves no byte

    team = find_launched_team(path, distributed=distributed, timeout_seconds=timeout_seconds)
    with team.together():
        # States name one host, whichever rank writes them.
        host = team.broadcast("host", host_name() if team.is_first else None)
        reshard, _ = team.agree(
            "the plan",
            lambda: plan(host, checks_output=team.is_first),
            lambda reshard: reshard.digest,
            team.check_plans,
        )
        made = make_once(reshard, path, progress, team)
    return reshard_report(reshard, path, started, made)
