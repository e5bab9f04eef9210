"""What gradients travel on: a few collectives by sets of ranks, behind a protocol that anything may stand in for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist

from xrank.gradients.wires.process_groups import ProcessGroups, exchanged_texts, world_device

__all__ = ["Combination", "Done", "Handle", "TorchWire", "Wire"]

Combination: TypeAlias = Literal["sum", "average", "max"]

_OPERATIONS: Mapping[Combination, Any] = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
}
# torch 2.13 warns of the names that 2.10 has alone.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when what it writes may be read; on a GPU, by work that is queued from now on."""


class Wire(Protocol):
    """Collectives over sets of ranks, each ascending and with the caller in it. All return at once, with a handle.

    Call order: every rank of a set makes the same calls over it in the same order; a tensor that was given is neither
    written nor read until its handle was waited for. Over a set of one rank nothing happens, and nothing need be there.
    """

    @property
    def device(self) -> torch.device:
        """Where small tensors have to lie that are exchanged beside gradients."""

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], how: Combination) -> Handle:
        """Combine a tensor in place."""

    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...], how: Combination
    ) -> Handle:
        """Combine a tensor and keep one of its equal parts, of which ``shard`` is this rank's and may be a view."""

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Put the equal parts of all ranks together, where ``shard`` may be a view of this rank's part."""

    def broadcast(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Give all ranks the first one's tensor."""

    def exchange(self, text: str, ranks: tuple[int, ...]) -> Mapping[int, str]:
        """Return each rank's text, and wait for it: the one call that is not for gradients."""


class Done:
    """The handle of what needs no waiting."""

    def wait(self) -> None:
        """Return."""


class TorchWire:
    """The collectives of torch's process groups."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self.device = world_device()

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], how: Combination) -> Handle:
        """Combine a tensor in place."""
        if len(ranks) == 1:
            return Done()
        return _handle(dist.all_reduce(tensor, op=_OPERATIONS[how], group=self._groups[ranks], async_op=True))

    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...], how: Combination
    ) -> Handle:
        """Combine a tensor and keep this rank's part."""
        if len(ranks) == 1:
            return Done()
        group = self._groups[ranks]
        return _handle(_reduce_scatter(shard, whole, op=_OPERATIONS[how], group=group, async_op=True))

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Put the parts of all ranks together."""
        if len(ranks) == 1:
            return Done()
        return _handle(_all_gather(whole, shard, group=self._groups[ranks], async_op=True))

    def broadcast(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Give all ranks the first one's tensor."""
        if len(ranks) == 1:
            return Done()
        return _handle(dist.broadcast(tensor, src=ranks[0], group=self._groups[ranks], async_op=True))

    def exchange(self, text: str, ranks: tuple[int, ...]) -> Mapping[int, str]:
        """Return each rank's text."""
        if len(ranks) == 1:
            return {ranks[0]: text}
        return dict(zip(ranks, exchanged_texts(text, self._groups[ranks]), strict=True))


def _handle(work: Any) -> Handle:
    return work if work is not None else Done()
