"""A reduce-scatter that sends gradients in their own dtype and adds them up in float32: each sum is rounded once.

A collective's own sum of n gradients of 16 bits is rounded up to n - 1 times.
"""

from __future__ import annotations

import torch

from xrank.gradients.wire import GradientWire, Handle


def start_wide_sum(shard: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...], wire: GradientWire) -> Handle:
    """Send a bucket; the handle's wait leaves the sum of all ranks' parts in ``shard``, a view of this rank's part."""
    if len(ranks) == 1:
        return wire.reduce_scatter(shard, whole, ranks, "sum")
    received = torch.empty_like(whole)
    return _WideSum(wire.all_to_all(received, whole, ranks), received.view(len(ranks), -1), shard)


class _WideSum:
    def __init__(self, handle: Handle, parts: torch.Tensor, shard: torch.Tensor) -> None:
        self._handle, self._parts, self._shard = handle, parts, shard

    def wait(self) -> None:
        self._handle.wait()
        self._shard.copy_(self._parts.sum(0, dtype=torch.promote_types(self._shard.dtype, torch.float32)))
