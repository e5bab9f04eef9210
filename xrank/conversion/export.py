"""Export: write tensors in ranks' memory as a Hugging Face folder. Each rank holds only its part."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from xrank.conversion.report import folder_report, read_report, report_text
from xrank.decisions.given_layouts import live_layouts
from xrank.decisions.live_arguments import check_meeting, check_types
from xrank.decisions.options import AdapterChoice, GatherOptions, default_workers, dtype_choice
from xrank.decisions.transforms import Transform
from xrank.extras import require_torch
from xrank.layout import LayoutMap
from xrank.lending.lent_model import ModelRequest, lend_model
from xrank.making.folder_filling import make_output
from xrank.plan.report import Report
from xrank.public_calls import names_own_arguments
from xrank.system import require_linux
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
    adapter: AdapterChoice | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    max_memory: str | int = "64MB",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    group: ProcessGroup | None = None,
    timeout_seconds: float = 1800,
) -> Report:
    """Write a model in the memory of many ranks as a Hugging Face folder; every rank makes this call.

    The ranks exchange descriptions of their parts once. Every rank proves the same plan from them: each element of
    each tensor exactly once. Arguments must agree, and replicas are compared. Each rank writes its share of the files,
    its own parts where possible, and the first rank publishes the folder by one rename. The model must not change
    meanwhile.

    With a known recipe, names, experts and ties are those of `save_pretrained`. Else names are those in memory, with a
    note where transformers would change them.

    Args:
        model_or_state_dict: a module, Megatron's chunks of one, or tensors by name: DTensors, plain tensors, or both,
            on any device.
        out: the folder to make, on a file system that all ranks see. Without `overwrite` it must not exist.
        layouts: the layouts of plain tensors. A plain tensor without a layout counts as whole on every rank that has
            it. Layouts are trusted: one that cuts a whole tensor describes a larger tensor.
        mesh: xrank's ``DeviceMesh`` or torch's, for layouts without a mesh and for Megatron's modules
            (`xrank.dialects.megatron.mesh`).
        recipe: as `xrank.gather_checkpoint`; so are `dtype`, `base_model`, `max_shard_size` and `max_memory`.
        dtype: element type of floating-point tensors. A recipe may keep routers in fp32, with a note.
        base_model: a model folder, or the ID of one in the local Hugging Face cache.
        max_shard_size: bytes of tensors in a file.
        transform: called with (name, whole tensor on the CPU) for each tensor under its name in the folder, in the
            dtype of the ranks, once for tied names. The returned tensors by name, such as quantized values and scales,
            replace it in separate files. ``{name: tensor}`` copies the tensor, and only copies get `dtype`; ``{}``
            leaves it out. The function must be the same on all ranks. Every rank first calls it with meta tensors to
            learn names, shapes and dtypes; then one rank calls it for each tensor.
        adapter: ``"separate"`` writes LoRA adapters as a PEFT folder beside the model, ``"merge"`` adds them to it;
            None: ``"separate"``. A `PeftModel` brings their configuration.
        config_overrides: additional or replaced content of config.json.
        max_memory: bytes of each rank's buffers.
        overwrite: whether an existing model may be replaced; unknown folders in it, and states of ranks, are refused.
        progress: called with (bytes written so far, bytes in all), on the first rank alone; an exception that it
            raises ends the call on all ranks.
        group: the ranks; None: all of the world. Only their store is used, no collective.
        timeout_seconds: how long ranks may take to arrive. After that a death is noticed in seconds.

    Returns:
        The same report on every rank.

    Raises:
        IncompleteError: the ranks do not hold all of a tensor.
        ContradictionError: ranks disagree: about names, shapes, layouts, or the values of replicas.
        XrankError: as `xrank.gather_checkpoint`.

    Example:
        >>> import torch, xrank
        >>> report = xrank.export_model({"norm.weight": torch.ones(4)}, "model")
        >>> report.num_parameters, [file["name"] for file in report.output["files"]]
        (4, ['model.safetensors'])
    """
    require_torch("export_model")
    require_linux("export_model")
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
                # Ranks of one host share its cores.
                workers=None if team.size == 1 else max(1, default_workers() // team.num_here),
                adapter=adapter,
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

    # Other ranks read this rank's parts until all of them have left `together`, so the loan ends after it.
    with ExitStack() as loan, team.together():
        request, _ = team.agree("the arguments", read_arguments, ModelRequest.describe, check_alike(team.ranks))
        return _export(request, path, team, loan, progress)


def _export(
    request: ModelRequest, out: str, team: Team, loan: ExitStack, progress: Callable[[int, int], None] | None
) -> Report:
    started = time.monotonic()
    model = lend_model(request, team, loan, check=lambda: check_output(out, overwrite=request.options.overwrite))
    with closing(model.source):
        written = make_output(model.gather, model.source, out, progress, team, model.holder)
        if not team.is_first:
            return read_report(team.broadcast("report"))
    report = folder_report("export", model.gather, written, out, started)
    return read_report(team.broadcast("report", report_text(report)))
