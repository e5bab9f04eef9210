"""Iterate: a model in the memory of many ranks, one whole tensor after another, for whoever loads it elsewhere."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from xrank import environment
from xrank.decisions.given_layouts import live_layouts
from xrank.decisions.live_arguments import check_meeting, check_types
from xrank.decisions.options import GatherOptions, dtype_choice
from xrank.decisions.transforms import Transform
from xrank.errors import UsageError
from xrank.faces import option
from xrank.lending.lent_model import ModelRequest
from xrank.making.model_tensors import ModelTensors, make_tensors
from xrank.making.whole_tensors import split_budget
from xrank.public_calls import errors_of, names_own_arguments
from xrank.teams.launches import find_group_team

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from xrank.layout import LayoutMap

    Tensors = Generator[tuple[str, torch.Tensor], None, None]

__all__ = ["ModelTensors", "iter_model"]


@names_own_arguments
def iter_model(
    model_or_state_dict: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any],
    *,
    layouts: LayoutMap | None = None,
    mesh: Any = None,
    recipe: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    transform: Transform | None = None,
    ranks: Literal["first", "all"] = "first",
    max_memory: str | int = "64MB",
    group: ProcessGroup | None = None,
    timeout_seconds: float = 1800,
) -> ModelTensors:
    """Iterate over a model that lies in the memory of many ranks: (Hugging Face name, whole tensor on the CPU).

    Every rank makes this call, and iterates, or closes what it got. When the call returns, all ranks have the same
    proven plan, replicas have been compared, and the tensors are those of the folder that `xrank.export_model` would
    make, in the model's order. They are made ahead of who takes them, in buckets that the budget bounds; one that was
    yielded is the caller's, in memory of its own. Nobody may change the model before all ranks have ended.

    On ranks that get nothing the iterator waits, lends its part to the others, and ends when they have ended. Whoever
    stops early ends well: others that get tensors go on, those that get none end with it. In a ``with`` block, what
    the body raises is named on all other ranks; a bare ``for`` cannot tell it from a ``break``. A rank that dies is
    named on all.

    Messages between hosts go through the folder of ``XRANK_WORKSPACE``, or the working directory, which all must see.

    Args:
        model_or_state_dict: as `xrank.export_model` takes it.
        layouts: as there.
        mesh: as there.
        recipe: as there.
        dtype: as there; there is no base model.
        transform: as there; called by the thread that iterates, on each rank that gets tensors.
        ranks: who gets the tensors: ``"first"``, the first rank of the group, or ``"all"``.
        max_memory: bounds the buffers of a rank and what is made and not yet taken; one larger tensor may exceed it.
        group: the ranks; None: all of the world.
        timeout_seconds: how long ranks may take to come. Once they have met, a death is noticed in seconds.

    Raises:
        XrankError: as `xrank.export_model`; before anything is yielded, or by the iterator.
    """
    place = os.path.join(environment.environ().get("XRANK_WORKSPACE") or os.curdir, "model")
    check_meeting(group, timeout_seconds)
    team = find_group_team(group, place, timeout_seconds=timeout_seconds)

    def read_arguments() -> ModelRequest:
        check_types(layouts, mesh)
        options = GatherOptions(dtype=dtype_choice(dtype), max_memory=max_memory)
        if ranks not in ("first", "all"):
            raise UsageError(
                f"{option('ranks')} must be 'first' or 'all'; got {ranks!r}",
                got=repr(ranks),
                want="'first' or 'all'",
                next_step="give one of the two",
            )
        split_budget(options.max_memory_nbytes, options.num_workers)
        return ModelRequest(
            model_or_state_dict,
            options,
            live_layouts(layouts, mesh),
            mesh,
            recipe,
            transform=transform,
            timeout_seconds=timeout_seconds,
            call="iter_model",
            takers=ranks,
        )

    tensors = make_tensors(read_arguments, team, errors_of(iter_model))
    next(tensors)  # comes when all is planned
    return ModelTensors(tensors)
