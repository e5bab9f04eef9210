"""Randomness inside a laid out model: ranks whose own seeds differ draw alike, so that replicas stay replicas.

Each outermost call draws one number on every rank; the largest seeds torch's generators during the call, and they are
put back at its end. Recomputed activations (torch.utils.checkpoint) find the generators as they were, as always.
On a CPU each rank draws for its own part (torch/distributed/tensor/_random.py: is_rng_supported_mesh), so that equal
parts draw the same numbers, and parts of other sizes leave the generators in other states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

__all__ = ["Stream", "drawn_seed", "dropout"]


def drawn_seed() -> int:
    """Return a number from torch's default generator, which moves on."""
    return int(torch.randint(1 << 62, ()).item())


class Stream:
    """Torch's generators during a call: seeded alike on all ranks, and put back at its end."""

    def __init__(self, seed: int, device_type: str) -> None:
        self._device: Any = None if device_type == "cpu" else torch.get_device_module(device_type)
        self._before = torch.get_rng_state(), None if self._device is None else self._device.get_rng_state()
        torch.manual_seed(seed)

    def close(self) -> None:
        """Put the generators back."""
        torch.set_rng_state(self._before[0])
        if self._device is not None:
            self._device.set_rng_state(self._before[1])


def dropout(tensor: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Do what ``functional.dropout`` does, also to partial sums, which torch 2.13 refuses to drop from."""
    whole = tensor.redistribute(placements=[Replicate() if at.is_partial() else at for at in tensor.placements])
    dropped: torch.Tensor = functional.dropout(whole, *args, **kwargs)
    return dropped
