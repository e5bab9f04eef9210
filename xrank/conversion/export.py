"""Export: from tensors in ranks' memory to a Hugging Face folder; no rank ever holds more than its part."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, cast

from xrank.conversion.report import output_facts, peak_rss_nbytes, proof_facts, read_report, report_text, source_facts
from xrank.decisions.given_layouts import live_layouts
from xrank.decisions.live_arguments import check_meeting, check_types
from xrank.decisions.options import AdapterChoice, GatherOptions, default_workers, dtype_choice
from xrank.decisions.transforms import Transform
from xrank.layout import LayoutMap
from xrank.lending.lent_model import ModelRequest, lend_model
from xrank.making.folder_filling import make_output
from xrank.plan.report import Report
from xrank.public_calls import names_own_arguments
from xrank.teams.agreement import check_alike
from xrank.teams.launches import find_group_team
from xrank.teams.team import Team
from xrank.writers.staging import check_output

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["export_model"]


@names_own_arguments
def export_model(
    model_or_state_dict: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any],
    out: str | os.PathLike[str],
    *,
    layouts: LayoutMap | None = None,
    mesh: Any = None,
    recipe: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    base_model: str | os.PathLike[str] | None = None,
    max_shard_size: str | int = "5GB",
    transform: Transform | None = None,
    adapter: str | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    max_memory: str | int = "64MB",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    group: ProcessGroup | None = None,
    timeout_seconds: float = 1800,
) -> Report:
    """Make a Hugging Face folder of a model that lies in the memory of many ranks; every one of them makes this call.

    Which rank holds what is told in one exchange; from that the plan is proven on every rank: each element of each
    tensor exactly once. What ranks ask for must be the same, and replicas are compared. Each rank writes its share of
    the files, of what lies near it where that can be, and the first makes the folder visible by one rename. Nobody may
    change the model meanwhile.

    Names, experts and ties are as `save_pretrained` leaves them where a recipe knows the model; else they are those in
    memory, which a note tells where transformers would change them.

    Args:
        model_or_state_dict: a module, Megatron's chunks of one, or tensors by name: DTensors, plain tensors, or both,
            on any device.
        out: the folder to make, on a file system that all ranks see; nothing may be there, not even an empty folder,
            without `overwrite`.
        layouts: the layouts of plain tensors; one without is taken to be whole on every rank that has it. A layout is
            believed: of a tensor that a rank holds whole, one that cuts it makes another, larger tensor.
        mesh: of layouts that have none, xrank's ``DeviceMesh`` or torch's; and of Megatron's modules
            (`xrank.dialects.megatron.mesh`).
        recipe: the name of a recipe that comes with xrank, a file, or ``"none"``: training names become Hugging Face's.
            None: the one that knows all names, if there is one.
        dtype: ``"keep"``, ``"base"`` (what the base model stores), ``"bf16"``, ``"fp16"``, ``"fp32"``, or torch's;
            integers stay as they are, and so do routers where a recipe says it, which a note tells.
        base_model: a model folder, or the ID of one in the local Hugging Face cache: companions, names and shapes.
        max_shard_size: bytes of tensors in a file.
        transform: called with (name, whole tensor on the CPU) for each tensor under its name in the folder, with the
            dtype that the ranks hold it in, a tied one once; what it returns, tensors by name, is written in its place,
            in files apart: quantized values and their scales, say. ``{name: tensor}`` copies it, and to such alone
            `dtype` applies; ``{}`` leaves it out. It must be the same function on all ranks. It is first called with
            tensors on the meta device, on every rank, which tell names, shapes and dtypes; then each tensor is one
            rank's to transform, beside its buffers.
        adapter: what becomes of LoRA adapters: ``"separate"``, a PEFT folder beside the model, or ``"merge"``; None: a
            model that has them is refused. A `PeftModel` brings their configuration.
        config_overrides: what config.json is to say besides, or otherwise.
        max_memory: bounds the buffers of each rank.
        overwrite: whether a model that is there may be replaced; folders in it that are no part of it are refused,
            and so are states of ranks.
        progress: called with (bytes written so far, bytes in all), on the first rank alone.
        group: the ranks; None: all of the world. Their store is used, and no collective.
        timeout_seconds: how long ranks may take to come. Once they have met, a death is noticed in seconds.

    Returns:
        The same report on every rank.

    Raises:
        UsageError, LayoutError: the call must change.
        IncompleteError: ranks do not hold all of a tensor.
        ContradictionError: ranks disagree: about names, shapes, layouts, or the values of replicas.
        NoSpaceError, XrankError: the output could not be written; what is finished is kept for the next call.
        RankFailedError, RankTimeoutError: another rank failed, died or did not come; what is finished is kept.
    """
    path = os.fspath(out)
    check_meeting(group, timeout_seconds)
    team = find_group_team(group, path, timeout_seconds=timeout_seconds)

    def read_arguments() -> ModelRequest:
        check_types(layouts, mesh, config_overrides)
        return ModelRequest(
            model_or_state_dict,
            GatherOptions(
                dtype=dtype_choice(dtype),
                max_shard_size=max_shard_size,
                max_memory=max_memory,
                # Ranks of one host share its processors.
                workers=None if team.size == 1 else max(1, default_workers() // team.num_here),
                adapter=cast(AdapterChoice | None, adapter),
                overwrite=overwrite,
            ),
            live_layouts(layouts, mesh),
            mesh,
            recipe,
            base_model,
            config_overrides,
            transform,
            timeout_seconds,
            place=path,
        )

    # What is lent is so until all ranks have ended.
    with ExitStack() as lent, team.together():
        request, _ = team.agree("what is asked", read_arguments, ModelRequest.describe, check_alike(team.ranks))
        return _export(request, path, team, lent, progress)


def _export(
    read_arguments: ModelRequest, out: str, team: Team, lent: ExitStack, progress: Callable[[int, int], None] | None
) -> Report:
    started = time.monotonic()
    model = lend_model(
        read_arguments, team, lent, check=lambda: check_output(out, overwrite=read_arguments.options.overwrite)
    )
    gather = model.gather
    with closing(model.source):
        made = make_output(gather, model.source, out, progress, team, model.holder)
        if not team.is_first:
            return read_report(team.broadcast("report"))
    output = output_facts(gather, out)
    if gather.transforms is not None:
        output = output.extended(transformed=gather.transforms.made_of)
    report = Report(
        command="export",
        path=out,
        seconds=time.monotonic() - started,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=source_facts(gather.source),
        proof=made.add_proof(proof_facts(gather)),
        output=made.add_output(output),
        notes=(*gather.notes, *made.notes),
    )
    return read_report(team.broadcast("report", report_text(report)))
