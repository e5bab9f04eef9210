"""Open: return any source as a lazy mapping of whole tensors. Opening proves it; each look-up reads one tensor."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import Struct

from xrank.dtypes import dtype as dtype_of
from xrank.engine.buffers import MemoryTarget
from xrank.engine.decoded_records import DecodedSource
from xrank.engine.executor import execute
from xrank.engine.faults import make_checksums
from xrank.engine.planner import TensorPlan, select_tensors
from xrank.engine.sources import open_source
from xrank.errors import UsageError, errors_of, names_own_arguments, require
from xrank.layout import LayoutMap
from xrank.recipes.decision import FolderPlan, plan_gather, read_layouts
from xrank.recipes.layout_sources import layouts_at
from xrank.recipes.options import GatherOptions, dtype_choice
from xrank.storage import places

if TYPE_CHECKING:
    import torch


class CheckpointTensor(Struct, frozen=True):
    """Facts of a tensor that are known before it is read."""

    dtype: str
    """Safetensors name of the element type."""
    shape: tuple[int, ...]
    nbytes: int
    num_pieces: int
    """Number of pieces that form the tensor."""
    num_replicas: int
    """Number of pieces that are compared with those."""


class Checkpoint(Mapping[str, "torch.Tensor"]):
    """Maps the names that a gather would write to whole tensors; `open_checkpoint` returns one.

    A look-up reads the tensor's bytes, compares checksums and replicas, and returns a new tensor on the CPU that is
    the caller's alone; it is not cached. Any thread may look up; threads take turns.

    Raises (from look-ups):
        KeyError: the checkpoint does not contain the tensor.
        CorruptError, ContradictionError: the source does not match its metadata.
    """

    def __init__(self, gather: FolderPlan, layouts: LayoutMap | None = None) -> None:
        self._gather = gather
        self._given = layouts
        self._plans = {tensor.output.name: tensor for tensor in gather.plan.tensors}
        self._lock = threading.Lock()
        self._checksums = make_checksums(self._gather.plan)
        source = open_source(gather.source)
        self._decoded = source if isinstance(source, DecodedSource) else None
        """For compressed records, which many tensors may share: each is decoded once."""

    def __getitem__(self, name: str) -> torch.Tensor:
        require("torch", "a tensor of open_checkpoint")
        import torch

        plan = self._plans[name]
        output = plan.output
        # As bytes, because torch gives no numpy view of bfloat16.
        memory = torch.empty(output.nbytes, dtype=torch.uint8)
        if output.nbytes:
            # One at a time, because the checksum of a record that tensors share is put together over their look-ups.
            with self._lock, errors_of(type(self).__getitem__):
                self._read(plan, memory.numpy().data)
        element = getattr(torch, dtype_of(output.dtype).torch_name)
        return memory.view(element).view(output.shape) if output.nbytes else torch.empty(output.shape, dtype=element)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)

    def __contains__(self, name: object) -> bool:
        return name in self._plans

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: {self.format}, {len(self)} tensors>"

    @property
    def path(self) -> str:
        """Path of the source."""
        return self._gather.source.path

    @property
    def format(self) -> str:
        """The source's format, as reports name it."""
        return self._gather.source.format

    @property
    def world_size(self) -> int | None:
        """Number of ranks that wrote the source; None where it is not recorded."""
        return self._gather.source.world_size

    @property
    def step(self) -> int | None:
        """Training step of the source; None where it is not recorded."""
        return self._gather.source.step

    @cached_property
    def layouts(self) -> LayoutMap:
        """Layouts of the source's tensors on its ranks, under the source's own names.

        Raises:
            LayoutError: the notation cannot express the layout of the pieces.
        """
        return layouts_at(self.path, self._given, self._gather.decision.base)

    @cached_property
    def tensors(self) -> Mapping[str, CheckpointTensor]:
        """Facts of each tensor by name, from metadata alone."""
        return {
            name: CheckpointTensor(
                plan.output.dtype, plan.output.shape, plan.output.nbytes, len(plan.copies), len(plan.replicas)
            )
            for name, plan in self._plans.items()
        }

    @property
    def problems(self) -> tuple[tuple[str, str], ...]:
        """Notes that a gather would make, as (code, message): assumptions, missing checksums, omitted items."""
        return self._gather.notes

    def _read(self, plan: TensorPlan, into: memoryview) -> None:
        options = self._gather.options
        # For each look-up anew: opening a file checks that it is still the one that was planned.
        source = self._decoded or open_source(self._gather.source)
        try:
            execute(
                select_tensors(self._gather.plan, (plan,)),
                source,
                MemoryTarget([into]),
                budget=options.budget,
                checksums=self._checksums,
            )
        except BaseException:
            self._checksums = make_checksums(self._gather.plan)  # bad or half-read records are read again
            raise
        finally:
            source.close() if self._decoded is None else self._decoded.close_files()


@names_own_arguments
def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    recipe: str | os.PathLike[str] | None = None,
    layouts: str | os.PathLike[str] | LayoutMap | None = None,
    base_model: str | os.PathLike[str] | None = None,
    part: str | None = None,
    dtype: str | torch.dtype | None = None,
    dequantize: bool = False,
    max_memory: str | int = "64MB",
) -> Checkpoint:
    """Open any source of `gather_checkpoint` as a mapping of whole tensors; nothing is written or removed.

    The plan is proven from metadata before this returns: every element of every tensor exactly once. A tensor's bytes
    are read when the tensor is looked up.

    Args:
        path: the folder, or file.
        recipe: as `gather_checkpoint`; so are `layouts` and `dtype`.
        layouts: a layout file, or its content, for a source without recorded layouts.
        base_model: a model with the names and shapes that the source must have.
        part: as `gather_checkpoint`.
        dtype: element type of floating-point tensors.
        dequantize: as `gather_checkpoint`.
        max_memory: bytes of buffers, in addition to the returned tensor.

    Raises:
        UsageError, LayoutError, IncompleteError, ContradictionError, CorruptError, UnsafeError: as `gather_checkpoint`.

    Example:
        >>> import torch, xrank
        >>> report = xrank.export_model({"norm.weight": torch.ones(4)}, "model")
        >>> checkpoint = xrank.open_checkpoint("model")
        >>> list(checkpoint), checkpoint["norm.weight"].tolist()
        (['norm.weight'], [1.0, 1.0, 1.0, 1.0])
    """
    options = GatherOptions(
        dtype=dtype_choice(dtype), dequantize=dequantize, max_memory=max_memory, max_shard_size=1 << 62
    )
    given = layouts if layouts is None or isinstance(layouts, LayoutMap) else read_layouts(layouts)
    gather = plan_gather(places.enter(path), options, base_model=base_model, layouts=given, recipe=recipe, part=part)
    adapted = gather.decision.adapted
    if adapted is not None and not adapted.is_alone:
        raise UsageError(
            f"{gather.source.path} contains a model and its adapter",
            file=gather.source.path,
            got=f"{len(adapted.own)} tensors of an adapter, such as {min(adapted.own)}",
            want="only a model, or only an adapter",
            next_step="gather it first, with the adapter merged or separate, then open the output with "
            "xrank.open_checkpoint",
        )
    return Checkpoint(gather, given)
