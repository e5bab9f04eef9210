"""Collectives on gradients between sets of ranks, as a protocol that tests and benchmarks replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist

from xrank.gradients.wires.process_groups import ProcessGroups, exchange_texts, world_device
from xrank.gradients.wires.rank_watch import RankWatch

Combination: TypeAlias = Literal["sum", "average", "max"]

_OPERATIONS: Mapping[Combination, Any] = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
}
# torch 2.13 warns of these names, the only ones that 2.10 has.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when its results may be read; on a GPU, by work that is queued after this call."""


class GradientWire(Protocol):
    """Collectives over ascending sets of ranks that contain the caller. All but `exchange` return a handle at once.

    Call order: every rank of a set makes the same calls over it in the same order. The caller neither writes nor reads
    a tensor of a call until its handle was waited for. Calls over a set of one rank do nothing and need no group.
    """

    @property
    def device(self) -> torch.device:
        """Device of small tensors that are exchanged beside gradients."""

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], how: Combination) -> Handle:
        """Combine a tensor in place."""

    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...], how: Combination
    ) -> Handle:
        """Combine a tensor and keep one of its equal parts in ``shard``, which may be a view of this rank's part."""

    def all_to_all(self, received: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Send each rank its equal part of ``whole``, and receive this rank's parts, in the order of ranks."""

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Gather the equal parts of all ranks into ``whole``, where ``shard`` may be a view of this rank's part."""

    def broadcast(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Send the first rank's tensor to all ranks."""

    def exchange(self, text: str, ranks: tuple[int, ...]) -> Mapping[int, str]:
        """Return the text of each rank. This waits: texts are not gradients."""


class Done:
    """The handle of a collective over one rank."""

    def wait(self) -> None:
        """Return at once."""


class TorchWire:
    """The collectives of torch's process groups.

    Raises:
        RankFailedError: from all methods, and from waits on handles: a rank of the world has ended.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self.device = world_device()

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], how: Combination) -> Handle:
        """Combine a tensor in place."""
        return self._start(ranks, dist.all_reduce, tensor, op=_OPERATIONS[how])

    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...], how: Combination
    ) -> Handle:
        """Combine a tensor and keep this rank's part."""
        return self._start(ranks, _reduce_scatter, shard, whole, op=_OPERATIONS[how])

    def all_to_all(self, received: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Exchange parts."""
        return self._start(ranks, dist.all_to_all_single, received, whole)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Gather the parts of all ranks."""
        return self._start(ranks, _all_gather, whole, shard)

    def broadcast(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Send the first rank's tensor to all ranks."""
        return self._start(ranks, dist.broadcast, tensor, src=ranks[0])

    def exchange(self, text: str, ranks: tuple[int, ...]) -> Mapping[int, str]:
        """Return each rank's text."""
        if len(ranks) == 1:
            return {ranks[0]: text}
        return dict(zip(ranks, exchange_texts(text, self._groups[ranks], self._groups.watch), strict=True))

    def _start(self, ranks: tuple[int, ...], collective: Callable[..., Any], *tensors: Any, **options: Any) -> Handle:
        if len(ranks) == 1:
            return Done()
        watch = self._groups.watch
        assert watch is not None  # a world of several ranks has one
        work = watch.run(partial(collective, *tensors, group=self._groups[ranks], async_op=True, **options))
        if work is None:  # this rank is not in the group
            return Done()
        return _WatchedWork(work, watch, tensors[0].device.type == "cpu")


@dataclass(frozen=True, slots=True)
class _WatchedWork:
    """A collective of torch whose waits end when a rank has ended."""

    work: Any
    watch: RankWatch
    is_on_host: bool

    def wait(self) -> None:
        # On an accelerator this only orders streams: the host goes on.
        if self.is_on_host:
            self.watch.wait(self.work, is_on_host=True)
        else:
            self.watch.run(self.work.wait)

    def finish(self) -> None:
        self.watch.wait(self.work, is_on_host=self.is_on_host)


def finish(handle: Handle) -> None:
    """Wait on the host for a collective whose result the host reads next, on an accelerator, too.

    Raises:
        RankFailedError: a rank has ended; reading the result would wait for it.
    """
    if isinstance(handle, _WatchedWork):
        handle.finish()
    else:
        handle.wait()
