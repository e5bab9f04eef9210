"""Iterate: yield a model in the memory of many ranks, one whole tensor after another."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from xrank import environment
from xrank.engine.tensor_target import ModelTensors, split_budget
from xrank.engine.transforms import Transform
from xrank.errors import errors_of, names_own_arguments, require, require_linux
from xrank.ranks.team import find_group_team
from xrank.recipes.lent_model import ModelRequest, make_tensors
from xrank.recipes.live_arguments import check_meeting, check_types, live_layouts
from xrank.recipes.options import AdapterChoice, GatherOptions, dtype_choice, wrong_value

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
    adapter: AdapterChoice | None = None,
    quantize: str | None = None,
    quantize_ignore: str | Sequence[str] = (),
    dialect: str | None = None,
    ranks: Literal["first", "all"] = "first",
    max_memory: str | int = "64MB",
    group: ProcessGroup | None = None,
    timeout_seconds: float = 1800,
) -> ModelTensors:
    """Iterate over a model in the memory of many ranks: (Hugging Face name, whole tensor on the CPU).

    Every rank makes this call, and iterates or closes the iterator. When the call returns, all ranks have the same
    proven plan and replicas have been compared. The tensors are those of `xrank.export_model`'s folder, in the model's
    order. They are made ahead, in buckets within the budget; each yielded tensor is the caller's, in its own memory.
    The model must not change before all ranks have ended.

    On ranks that take no tensors, the iterator waits while the others read this rank's part, and ends when they have
    ended. A rank may stop early: others that take tensors continue. An exception in a ``with`` block is reported on all
    other ranks; a bare ``for`` cannot distinguish it from a ``break``. If a rank dies, all ranks raise an error.

    Messages between hosts go through the folder of ``XRANK_WORKSPACE``, or the working directory, which all must see.

    Args:
        model_or_state_dict: as `xrank.export_model`; so are `layouts`, `mesh`, `recipe`, `dtype` and `transform`.
        layouts: the layouts of plain tensors.
        mesh: the mesh of `layouts`, if they have none.
        recipe: from training names to Hugging Face's.
        dtype: element type of floating-point tensors; ``"base"`` is not possible.
        transform: called by the iterating thread, on each rank that takes tensors.
        adapter: ``"separate"`` yields the base model's tensors, then those of LoRA adapters under the names in PEFT's
            files, such as ``base_model.model.<module>.lora_A.weight``; ``"merge"`` yields the sums, ``"both"`` the
            sums and then the adapters; None: separate.
        quantize: yield quantized tensors, codes, then scales and constants, as `xrank.gather_checkpoint` writes them;
            so are `quantize_ignore` and `dialect`.
        quantize_ignore: modules that stay as they are.
        dialect: the names of the quantized tensors.
        ranks: the ranks that take tensors: ``"first"``, the first rank of the group, or ``"all"``.
        max_memory: bytes of a rank's buffers and of tensors made ahead; a single larger tensor may exceed it.
        group: the ranks; None: all of the world.
        timeout_seconds: how long ranks may take to arrive. After that a death is noticed in seconds.

    Raises:
        XrankError: as `xrank.export_model`; before anything is yielded, or by the iterator.

    Example:
        >>> import torch, xrank
        >>> {name: tensor.tolist() for name, tensor in xrank.iter_model({"norm.weight": torch.ones(2)})}
        {'norm.weight': [1.0, 1.0]}
    """
    require("torch", "iter_model")
    require_linux("iter_model")
    place = os.path.join(environment.environ().get("XRANK_WORKSPACE") or os.curdir, "model")
    check_meeting(group, timeout_seconds)
    team = find_group_team(group, place, timeout_seconds=timeout_seconds, call="iter_model")

    def read_arguments() -> ModelRequest:
        check_types(layouts, mesh)
        options = GatherOptions(
            dtype=dtype_choice(dtype),
            max_memory=max_memory,
            adapter=adapter,
            quantize=quantize,
            quantize_ignore=quantize_ignore,
            dialect=dialect,
        )
        if ranks not in ("first", "all"):
            raise wrong_value("ranks", ranks, "'first' or 'all'", step="give one of the two")
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
    next(tensors)  # returns when the plan is proven on all ranks
    return ModelTensors(tensors)
