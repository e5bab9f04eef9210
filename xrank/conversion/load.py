"""Load: fill the tensors of a live module from any source, each rank its own part."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from xrank.conversion.report import count_outputs, source_facts
from xrank.decisions.live_arguments import check_meeting, check_types
from xrank.decisions.load_check import check_loads, describe_load
from xrank.decisions.options import default_workers, parse_size
from xrank.errors import names_own_arguments, require_torch
from xrank.making.module_filling import fill_module, prepare_load
from xrank.plan.budget import Budget
from xrank.plan.report import Report
from xrank.plan.report_facts import OutputFacts, ProofFacts
from xrank.readers.live.module_tensors import FilledModule
from xrank.stores import places
from xrank.system import peak_rss_nbytes
from xrank.teams.agreement import check_alike, nbytes_text, path_text
from xrank.teams.launches import find_group_team

if TYPE_CHECKING:
    from xrank.layout import LayoutMap


@names_own_arguments
def load_model(
    module: FilledModule,
    path: str | os.PathLike[str],
    *,
    layouts: LayoutMap | str | os.PathLike[str] | None = None,
    mesh: Any = None,
    recipe: str | os.PathLike[str] | None = None,
    part: str | None = None,
    max_memory: str | int = "64MB",
    progress: Callable[[int, int], None] | None = None,
    group: Any = None,
    timeout_seconds: float = 1800.0,
) -> Report:
    """Fill a module's tensors from a model folder or any sharded checkpoint; every rank reads its own part.

    Every rank of the group makes this call. All ranks prove the load from metadata before they touch a tensor: the
    module and the source have the same names, shapes and layouts fit, and every rank sees the same source. Then each
    rank reads its part straight into the module: no parameter is allocated anew, on any device and with any strides,
    and autograd counts the change. After an error beyond that point the tensors' values are undefined; another call
    fills them.

    A rank reads its own part of the source and, for cuts of inner dims, the gaps if it wants at least a quarter.
    Checksums are compared if a rank reads all bytes below one, replicas by one rank, and digests of
    ``xrank_manifest.json`` for tensors that a rank holds whole in the source's type. Buffers that are not persistent
    stay as they are, with a note: `torch.nn.Module.to_empty` leaves rotary frequencies without values.

    Args:
        module: a module with DTensors of any mesh (FSDP2, tensor parallelism, both), plain tensors, or both; its state
            dict; or Megatron's chunks of one. For tied names, the source may have only some of them.
        path: any source of `xrank.open_checkpoint` with recorded layouts.
        layouts: layouts of plain tensors that are cut, or a layout file; other plain tensors are whole.
        mesh: xrank's mesh or torch's, for layouts without one and for Megatron's modules
            (`xrank.dialects.megatron.mesh`).
        recipe: name of a shipped recipe, or a file, from training names to Hugging Face's or back, with zeros for the
            padding of a vocabulary. ``"none"`` keeps the names. None keeps them too, but fuses experts that
            transformers fuses in memory.
        part: as `xrank.gather_checkpoint`.
        max_memory: bytes of all buffers of a rank, such as ``"64MB"``; the same on all.
        progress: called with (bytes read so far, bytes in all) of this rank; an exception that it raises ends the call
            on all ranks.
        group: the process group of the ranks; None: the world, or this process alone.
        timeout_seconds: how long ranks may take to arrive. After that a death is noticed in seconds.

    Returns:
        The report of this rank.

    Raises:
        UsageError: a name, shape or element type differs from the source's, or the module is on the meta device.
        LayoutError: a layout does not fit its tensor.
        XrankError: as `xrank.gather_checkpoint`.

    Example:
        >>> import torch, xrank
        >>> report = xrank.export_model({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, "model")
        >>> module = torch.nn.Linear(3, 2)
        >>> xrank.load_model(module, "model").num_tensors, module.bias.tolist()
        (2, [1.0, 1.0])
    """
    require_torch("load_model")
    started = time.monotonic()
    place = places.enter(path)

    def read_arguments() -> int:
        check_types(None if isinstance(layouts, str | os.PathLike) else layouts, mesh)
        nbytes = parse_size(max_memory, "max_memory")
        Budget.from_memory(nbytes, default_workers())
        return nbytes

    def describe(max_memory_nbytes: int) -> dict[str, str | None]:
        size = nbytes_text(max_memory_nbytes)
        return {"call": "load_model", "recipe": path_text(recipe), "part": part, "max_memory": size}

    check_meeting(group, timeout_seconds)
    team = find_group_team(group, place, timeout_seconds=timeout_seconds, call="load_model", joins_launch=False)
    with team.together():
        max_memory_nbytes, _ = team.agree("the arguments", read_arguments, describe, check_alike(team.ranks))
        budget = Budget.from_memory(max_memory_nbytes, default_workers())
        planned, _ = team.agree(
            "the plan",
            partial(
                prepare_load,
                module,
                place,
                layouts=layouts,
                mesh=mesh,
                recipe=recipe,
                part=part,
                share=(team.position, team.size),
            ),
            lambda planned: describe_load(planned.source, planned.load),
            lambda planned, loads: check_loads(planned.source, team.ranks, loads),
        )
        outcome = fill_module(module, planned, budget, team, progress)
    source, outputs = planned.source, list(planned.load.plan.tensors)
    return Report(
        command="load",
        path=source.path,
        seconds=time.monotonic() - started,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=source_facts(source),
        proof=ProofFacts(
            coverage="proven",
            num_replicas_compared=sum(len(tensor.replicas) for tensor in outputs),
            num_checksums=outcome.num_checksums,
            num_digests=planned.digests.num_compared,
        ),
        output=OutputFacts(**count_outputs([tensor.output for tensor in outputs]), cast=dict(planned.load.cast)),
        notes=planned.notes,
    )
