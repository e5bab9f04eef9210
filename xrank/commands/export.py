"""Export: write tensors in ranks' memory as a Hugging Face folder. Each rank holds only its part."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from msgspec.structs import replace

from xrank.commands.delta_writing import plan_version
from xrank.commands.folder_filling import make_output
from xrank.commands.report import begin_counting, folder_report, read_report, report_text, with_traffic
from xrank.engine.report import Report
from xrank.engine.transforms import Transform
from xrank.errors import UsageError, errors_of, names_own_arguments, require, require_linux
from xrank.layout import LayoutMap
from xrank.ranks.team import (
    Team,
    await_background,
    find_group_team,
    raise_background_failure,
    run_in_background,
)
from xrank.recipes.lent_model import ModelPart, ModelRequest, copy_part, lend_model, locate_part
from xrank.recipes.live_arguments import check_meeting, check_types, live_layouts
from xrank.recipes.options import AdapterChoice, GatherOptions, default_workers, dtype_choice, parse_size
from xrank.storage import places
from xrank.storage.staging import check_output
from xrank.storage.url import clean_path

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_BUFFERS_NBYTES = 64_000_000


@overload
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
    quantize: str | None = None,
    quantize_ignore: str | Sequence[str] = (),
    dialect: str | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    max_memory: str | int | None = None,
    overwrite: bool = False,
    delta_from: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    group: ProcessGroup | None = None,
    timeout_seconds: float = 1800,
    background: Literal[False] = False,
) -> Report: ...


@overload
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
    quantize: str | None = None,
    quantize_ignore: str | Sequence[str] = (),
    dialect: str | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    max_memory: str | int | None = None,
    overwrite: bool = False,
    delta_from: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    group: ProcessGroup | None = None,
    timeout_seconds: float = 1800,
    background: Literal[True],
) -> Future[Report]: ...


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
    quantize: str | None = None,
    quantize_ignore: str | Sequence[str] = (),
    dialect: str | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    max_memory: str | int | None = None,
    overwrite: bool = False,
    delta_from: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    group: ProcessGroup | None = None,
    timeout_seconds: float = 1800,
    background: bool = False,
) -> Report | Future[Report]:
    """Write a model in the memory of many ranks as a Hugging Face folder; every rank makes this call.

    The ranks exchange descriptions of their parts once. Every rank proves the same plan from them: each element of
    each tensor exactly once. Arguments must agree, and replicas are compared. Each rank writes its share of the files,
    its own parts where possible, and the first rank publishes the folder by one rename. The model must not change
    meanwhile, except with `background`, which copies it.

    With a known recipe, names, experts and ties are those of `save_pretrained`. Otherwise the names are those in
    memory, with a note if transformers would change them.

    Args:
        model_or_state_dict: a module, also one that is sharded by FSDP1 or ZeRO-3; Megatron's chunks of one; or tensors
            by name: DTensors, plain tensors, or both, on any device.
        out: the folder to make, on a file system that all ranks see, or its URL in a store, ``s3://bucket/model``.
            Without `overwrite` it must not exist.
        layouts: the layouts of plain tensors. A plain tensor without a layout counts as whole on every rank that has
            it. Layouts are trusted: a layout that splits a whole tensor describes a larger tensor.
        mesh: xrank's ``DeviceMesh`` or torch's, for layouts without a mesh and for Megatron's modules
            (`xrank.readers.megatron.live`).
        recipe: as `xrank.gather_checkpoint`; so are `dtype`, `base_model` and `max_shard_size`.
        dtype: element type of floating-point tensors. A recipe may keep routers in fp32, with a note.
        base_model: a model folder, or the ID of one in the local Hugging Face cache.
        max_shard_size: bytes of tensors in a file.
        transform: called with (name, whole tensor on the CPU) for each tensor under its name in the folder, in the
            dtype of the ranks, once for tied names. The returned tensors by name, such as quantized values and scales,
            replace it in separate files. ``{name: tensor}`` copies the tensor, and only copies get `dtype`; ``{}``
            leaves it out. The function must be the same on all ranks. Every rank first calls it with meta tensors to
            learn names, shapes and dtypes; then one rank calls it for each tensor.
        adapter: ``"separate"`` writes LoRA adapters as a PEFT folder inside the model's folder, ``"merge"`` adds them
            to it; ``"both"`` does both; None: ``"separate"``. A `PeftModel` contains their configuration.
        quantize: write matrices quantized, as `xrank.gather_checkpoint`; so are `quantize_ignore` and `dialect`. Ranks
            read each other's parts, band by band: no rank holds a whole tensor.
        quantize_ignore: modules that are not quantized.
        dialect: the form of the quantized folder.
        config_overrides: additional or replaced content of config.json.
        max_memory: bytes of each rank's buffers; None: ``"64MB"``. With `background`, bytes of the buffers and the
            copy; None: the copy may take this rank's share of the memory that its host has left.
        overwrite: whether an existing model may be replaced; unknown folders in it, and states of ranks, are refused.
        delta_from: a folder, which all ranks see, of a model with the same tensors: `out`, ``deltas/weight_v000001``,
            then gets only the changes, as from `xrank.make_delta`, and no small files. Each rank compares its share of
            the tensors.
        progress: called with (bytes written so far, bytes in all), only on the first rank; an exception in it ends the
            call on all ranks.
        group: the ranks; None: all of the world. Only their store is used, no collective.
        timeout_seconds: how long ranks may take to arrive. After that, a rank's death is detected within seconds.
        background: return as soon as each rank has copied its part to the host's memory. A thread does the rest, and
            training may continue: the model at the time of the call is written. The next export waits for the previous
            one. At exit, the interpreter waits for a running export.

    Returns:
        The same report on every rank; with `background`, a `concurrent.futures.Future` of it. `result()` raises what
        the call would raise, on all ranks. If `result()` is never called, the next export raises the failure on all
            ranks.

    Raises:
        NoSpaceError: with `background`, the host has too little memory left for the copies.
        IncompleteError: the ranks do not hold all of a tensor.
        ContradictionError: ranks disagree: about names, shapes, layouts, or the values of replicas.
        XrankError: as `xrank.gather_checkpoint`.

    Example:
        >>> import torch, xrank
        >>> report = xrank.export_model({"norm.weight": torch.ones(4)}, "model")
        >>> report.num_parameters, [file["name"] for file in report.output["files"]]
        (4, ['model.safetensors'])
    """
    require("torch", "export_model")
    require_linux("export_model")
    path = clean_path(out)
    name = f"the export of {path}"
    check_meeting(group, timeout_seconds)
    await_background(name)
    team = find_group_team(group, path, timeout_seconds=timeout_seconds, call="export_model")

    base = None if delta_from is None else places.enter(delta_from)

    def read_arguments() -> ModelRequest:
        raise_background_failure()
        check_types(layouts, mesh, config_overrides)
        if base is not None:
            plan_version(path, base)
        return ModelRequest(
            model_or_state_dict,
            GatherOptions(
                dtype=dtype_choice(dtype),
                max_shard_size=max_shard_size,
                max_memory=_buffers(max_memory, background=background),
                # Ranks of one host share its cores.
                workers=None if team.size == 1 else max(1, default_workers() // team.num_here),
                adapter=adapter,
                quantize=quantize,
                quantize_ignore=quantize_ignore,
                dialect=dialect,
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
            background=background,
            delta_from=base,
        )

    # Other ranks read this rank's parts until all of them have left `together`, so the loan ends after it.
    with ExitStack() as loan, team.together():
        request, _ = team.agree("the arguments", read_arguments, ModelRequest.describe, team.check_alike)
        if not background:
            return _export(request, None, path, team, loan, progress)
        # The first rank checks the place of the output for all, before they copy.
        check = partial(check_output, path, overwrite=overwrite)
        team.agree("the place of the output", lambda: None, lambda _: None, lambda *_: check())
        room = None if max_memory is None else parse_size(max_memory, "max_memory") - request.options.max_memory_nbytes
        part = locate_part(request, team, partial(copy_part, rank=team.rank, num_here=team.num_here, room_nbytes=room))
        behind = team.make_background()

    def export_copy() -> Report:
        with errors_of(export_model), ExitStack() as loan, behind.together():
            return _export(request, part, path, behind, loan, progress)

    request = replace(request, model={})  # the copy replaces it
    return run_in_background(name, export_copy)


@names_own_arguments
def save_model(
    model_or_state_dict: torch.nn.Module | Mapping[str, Any],
    out: str | os.PathLike[str],
    *,
    recipe: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    base_model: str | os.PathLike[str] | None = None,
    max_shard_size: str | int = "5GB",
    transform: Transform | None = None,
    adapter: AdapterChoice | None = None,
    quantize: str | None = None,
    quantize_ignore: str | Sequence[str] = (),
    dialect: str | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    max_memory: str | int | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Write whole tensors of one process as a Hugging Face folder; other ranks do not call this.

    It is `export_model` for one rank, such as the first one in the body of `get_tensors_parallel`, which holds tensors
    that it has gathered: the same names, shards, manifest and commit.

    Args:
        model_or_state_dict: a module, or tensors by name, each whole, on any device.
        out: the folder to make, or its URL in a store.
        recipe: as `export_model`; so are `dtype`, `base_model` and `adapter`.
        dtype: element type of floating-point tensors.
        base_model: a model folder, or the ID of one in the local Hugging Face cache.
        max_shard_size: bytes of tensors in a file.
        transform: computes new tensors from whole tensors, as in `export_model`.
        adapter: the form of LoRA adapters.
        quantize: as `export_model`; so are `quantize_ignore` and `dialect`.
        quantize_ignore: modules that are not quantized.
        dialect: the form of the quantized folder.
        config_overrides: additional or replaced content of config.json.
        max_memory: bytes of the buffers; None: ``"64MB"``.
        overwrite: whether an existing model may be replaced.
        progress: called with (bytes written so far, bytes in all).

    Raises:
        UsageError: a tensor is a DTensor, and this rank holds only a part of it.
        XrankError: as `export_model`.

    Example:
        >>> import torch, xrank
        >>> with xrank.get_tensors_parallel(torch.ones(4), ranks=[0]) as parts:
        ...     if parts:
        ...         report = xrank.save_model({"norm.weight": torch.cat(parts)}, "saved")
        >>> report.num_parameters
        4
    """
    require("torch", "save_model")
    require_linux("save_model")
    path = clean_path(out)
    check_types(None, None, config_overrides)
    _check_whole(model_or_state_dict)
    request = ModelRequest(
        model_or_state_dict,
        GatherOptions(
            dtype=dtype_choice(dtype),
            max_shard_size=max_shard_size,
            max_memory=_buffers(max_memory, background=False),
            adapter=adapter,
            quantize=quantize,
            quantize_ignore=quantize_ignore,
            dialect=dialect,
            overwrite=overwrite,
        ),
        recipe=recipe,
        base_model=base_model,
        config_overrides=config_overrides,
        transform=transform,
        call="save_model",
        place=path,
    )
    with ExitStack() as loan:
        return _export(request, None, path, Team(), loan, progress)


def _check_whole(model: torch.nn.Module | Mapping[str, Any]) -> None:
    """Check that no tensor is a DTensor, of which other ranks hold the other parts."""
    tensors = model if isinstance(model, Mapping) else dict(getattr(model, "named_parameters", dict)())
    for name, tensor in tensors.items():
        if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
            raise UsageError(
                f"{name} is a DTensor, and this rank holds only a part of it",
                tensor=name,
                got=f"a DTensor over {tensor.device_mesh.size()} ranks",
                want="whole tensors",
                next_step="call export_model on all ranks instead of save_model",
            )


def _buffers(max_memory: str | int | None, *, background: bool) -> str | int:
    """Return the size of a rank's buffers: all of `max_memory`, or the default beside a copy."""
    if max_memory is None:
        return _BUFFERS_NBYTES
    return min(_BUFFERS_NBYTES, parse_size(max_memory, "max_memory")) if background else max_memory


def _export(
    request: ModelRequest,
    part: ModelPart | None,
    out: str,
    team: Team,
    loan: ExitStack,
    progress: Callable[[int, int], None] | None,
) -> Report:
    started, before = time.monotonic(), begin_counting()
    overwrite = request.options.overwrite
    model = lend_model(request, team, loan, part=part, check=lambda: check_output(out, overwrite=overwrite))
    with closing(model.source):
        if request.delta_from is not None:
            from xrank.commands.live_delta import export_delta  # whole models do not need this module

            report = export_delta(
                model.gather,
                model.source,
                model.holder,
                request.delta_from,
                out,
                team,
                started=started,
                progress=progress,
                timeout_seconds=request.timeout_seconds,
            )
            if not team.is_first:
                return read_report(team.broadcast("report"))
            return read_report(team.broadcast("report", report_text(with_traffic(report, before))))
        written = make_output(model.gather, model.source, out, progress, team, model.holder)
        if not team.is_first:
            return read_report(team.broadcast("report"))
    report = with_traffic(folder_report("export", model.gather, written, out, started), before)
    return read_report(team.broadcast("report", report_text(report)))
