"""Open: return any source as a lazy mapping of whole tensors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from xrank.decisions.folder_plan import plan_gather, read_layouts
from xrank.decisions.options import GatherOptions, dtype_choice
from xrank.errors import UsageError, names_own_arguments
from xrank.layout import LayoutMap
from xrank.making.checkpoint import Checkpoint
from xrank.stores import places

if TYPE_CHECKING:
    import torch


@names_own_arguments
def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    recipe: str | os.PathLike[str] | None = None,
    layouts: str | os.PathLike[str] | LayoutMap | None = None,
    base_model: str | os.PathLike[str] | None = None,
    part: str | None = None,
    dtype: str | torch.dtype | None = None,
    max_memory: str | int = "64MB",
) -> Checkpoint:
    """Open any source of `gather_checkpoint` as a mapping of whole tensors; nothing is written or removed.

    The plan is proven from metadata before this returns: every element of every tensor exactly once. Bytes of a tensor
    are read when it is looked up.

    Args:
        path: the folder, or file.
        recipe: as `gather_checkpoint`; so are `layouts` and `dtype`.
        layouts: a layout file, or its content, for a source without recorded layouts.
        base_model: a model with the names and shapes that the source must have.
        part: as `gather_checkpoint`.
        dtype: element type of floating-point tensors.
        max_memory: bytes of buffers, beside the tensor that a look-up returns.

    Raises:
        UsageError, LayoutError, IncompleteError, ContradictionError, CorruptError, UnsafeError: as `gather_checkpoint`.

    Example:
        >>> import torch, xrank
        >>> report = xrank.export_model({"norm.weight": torch.ones(4)}, "model")
        >>> checkpoint = xrank.open_checkpoint("model")
        >>> list(checkpoint), checkpoint["norm.weight"].tolist()
        (['norm.weight'], [1.0, 1.0, 1.0, 1.0])
    """
    options = GatherOptions(dtype=dtype_choice(dtype), max_memory=max_memory, max_shard_size=1 << 62)
    given = layouts if layouts is None or isinstance(layouts, LayoutMap) else read_layouts(layouts)
    gather = plan_gather(places.enter(path), options, base_model=base_model, layouts=given, recipe=recipe, part=part)
    adapted = gather.decision.adapted
    if adapted is not None and not adapted.is_alone:
        raise UsageError(
            f"{gather.source.path} holds a model and an adapter of it",
            file=gather.source.path,
            got=f"{len(adapted.own)} tensors of an adapter, such as {min(adapted.own)}",
            want="one model, or an adapter alone",
            next_step="gather it first, with the adapter merged or kept apart; xrank.open_checkpoint opens what that "
            "writes",
        )
    return Checkpoint(gather, given)
