"""Randomness inside a laid out model: ranks whose own seeds differ draw alike, so that replicas stay replicas.

Each outermost call draws one number on every rank; the largest seeds torch's generators during the call, and they are
put back at its end. Recomputed activations (torch.utils.checkpoint) find the generators as they were, as always.

On an accelerator DTensor draws for the whole tensor. On a CPU each rank draws for its own part alone
(torch/distributed/tensor/_random.py: is_rng_supported_mesh), so that with one seed all parts of a tensor would get one
mask. There replicas of a part draw the same numbers, and other parts others (`PartSeeds`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.tensor._random as dtensor_random
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

__all__ = ["PartSeeds", "Stream", "drawn_seed", "dropout", "let_parts_differ"]


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


class PartSeeds:
    """What DTensor asks for the generator's state of a random operation on a CPU; torch has none of its own there.

    Each operation draws one number, the same on ranks that are in one state, and seeds the generator with it and with
    which part of the tensor the rank holds; then the state goes on from after the draw, whatever the part's size.
    """

    distribute_region_enabled = True

    @contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        part = 0
        for axis, placement in enumerate(spec.placements):
            if hasattr(placement, "dim"):
                part = part * spec.mesh.size(axis) + spec.mesh.get_local_rank(axis)
        seed = int(torch.randint(1 << 62, (), generator=generator).item())
        before = torch.get_rng_state()
        # Odd and large, so that parts' seeds differ in many of the bits that the generator takes.
        torch.default_generator.manual_seed((seed + part * 0x9E3779B97F4A7C15) % (1 << 63))
        try:
            yield
        finally:
            torch.set_rng_state(before)


def let_parts_differ(device_type: str) -> None:
    """Let DTensors on CPUs draw other numbers for other parts, from now on in this process; accelerators do so.

    It must be known to DTensor itself: what torch.utils.checkpoint computes again runs outside of every call.
    """
    # torch knows one such object for all devices.
    if device_type == "cpu" and not torch.accelerator.is_available() and dtensor_random._rng_tracker is None:
        dtensor_random._rng_tracker = PartSeeds()  # type: ignore[assignment]


def dropout(tensor: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Do what ``functional.dropout`` does, also to partial sums, which torch 2.13 refuses to drop from."""
    whole = tensor.redistribute(placements=[Replicate() if at.is_partial() else at for at in tensor.placements])
    dropped: torch.Tensor = functional.dropout(whole, *args, **kwargs)
    return dropped
