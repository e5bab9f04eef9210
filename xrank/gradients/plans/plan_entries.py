"""Entries of a gradient plan: parameters, buckets, buffers and later reductions. Pure data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

Operation: TypeAlias = Literal["sum", "average"]
LaterKind: TypeAlias = Literal["conditional", "tensor", "word", "position"]
LATER_KINDS: tuple[LaterKind, ...] = ("conditional", "tensor", "word", "position")
"""In the order of finalize: conditional embedders along pp, copies along tp, tied tables."""


def _compute_prescale(operation: Operation, divisor: int, num_ranks: int) -> float:
    """Return the factor of a gradient before its collective, after which the result is the sum over `divisor`."""
    return num_ranks / divisor if operation == "average" else 1.0 / divisor


def shard_bounds(start: int, stop: int, num_shards: int, place: int) -> tuple[int, int]:
    """Return the bounds of one shard of a bucket."""
    size = (stop - start) // num_shards
    return start + place * size, start + (place + 1) * size


@dataclass(frozen=True, slots=True)
class LaterReduction:
    """A reduction of one parameter's gradient by `finalize_model_grads`, after the sum over replicas."""

    kind: LaterKind
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    """Ranks that take part, this rank among them, ascending as in a process group; two or more."""
    operation: Operation
    reason: str


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """A parameter that needs a gradient. All numbers of elements count this rank's local tensor."""

    name: str
    aliases: tuple[str, ...]
    """Other names of the same parameter in the module."""
    shape: tuple[int, ...]
    """Shape of this rank's local tensor."""
    dtype: torch.dtype
    grad_dtype: torch.dtype
    axes: tuple[str, ...]
    """Axes longer than 1 along which ranks hold the same parameter and read different data, in the mesh's order."""
    ranks: tuple[int, ...]
    """The ranks along these axes, this rank among them, ascending as in a process group."""
    operation: Operation
    """Operation of the collective. With `prescale`, the result is the sum over the ranks, divided by `divisor`."""
    divisor: int
    later: tuple[LaterReduction, ...]
    """Later reductions, in the order of execution."""
    buffer: int
    """Number of its buffer in the plan."""
    bucket: int
    """Id of its bucket."""
    offset: int
    """Offset of its first element in the buffer, in elements."""
    owned: tuple[int, int]
    """This rank's range of its flattened elements, stop exclusive: the elements that are right after the collective and
    that this rank's optimizer steps. All elements without the distributed optimizer."""
    reasons: tuple[str, ...]
    tensor_ranks: tuple[int, ...] = ()
    """This rank and the ranks that differ from it along tp, or etp of experts, ascending."""
    is_cut_over_tp: bool | None = None
    """Whether these hold different parts of the parameter, or copies; None if no source defines it."""
    placement_axes: tuple[tuple[str, ...], ...] = ()
    """Axes of the plan that each placement of the parameter is along; empty for a plain tensor."""

    @property
    def numel(self) -> int:
        """Elements of the local tensor."""
        return prod(self.shape)

    @property
    def prescale(self) -> float:
        """Factor of the gradient before its collective."""
        return _compute_prescale(self.operation, self.divisor, len(self.ranks))


def list_later(parameters: Iterable[PlannedParameter]) -> list[tuple[PlannedParameter, LaterReduction]]:
    """Return all later reductions in one order on all ranks: by kind, since stages register tables in other orders."""
    pairs = [(parameter, later) for parameter in parameters for later in parameter.later]
    return sorted(pairs, key=lambda pair: LATER_KINDS.index(pair[1].kind))


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """A part of a buffer that one collective exchanges."""

    id: int
    """Position in the order in which buckets leave, over all buffers of the plan."""
    buffer: int
    start: int
    """First element in the buffer."""
    stop: int
    """One past the last element in the buffer, padding included."""
    numel_unpadded: int
    """Elements up to the end of the last parameter, gaps between parameters included."""
    names: tuple[str, ...]
    """Names of its parameters in the order of the buffer: the last registered one first."""

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """A contiguous run of gradients of one dtype that the same ranks exchange in the same way."""

    id: int
    is_expert: bool
    dtype: torch.dtype
    """Dtype of the parameters."""
    grad_dtype: torch.dtype
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    """Replicas: ranks that hold the same buffer."""
    rank: int
    """The rank of the plan."""
    shard_ranks: tuple[int, ...]
    """Ranks that own the shards of a bucket, in the order of the shards; `ranks` unless there are several instances of
    the distributed optimizer."""
    across_ranks: tuple[int, ...]
    """Ranks that hold the same shard in each instance; this rank alone if there is one instance."""
    operation: Operation
    divisor: int
    numel: int
    """Elements, padding included."""
    numel_unpadded: int
    """Sum of `numel_unpadded` of the buckets."""
    buckets: tuple[int, ...]
    """Ids of the buckets, in the order of the buffer."""

    @property
    def prescale(self) -> float:
        """Factor of the gradients before the collective."""
        return _compute_prescale(self.operation, self.divisor, len(self.ranks))

    @property
    def place(self) -> int:
        """Index of this rank's shard in each bucket: its place in `shard_ranks`."""
        return self.shard_ranks.index(self.rank)
