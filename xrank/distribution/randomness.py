"""Randomness in a laid out model: ranks with different seeds draw the same numbers, so that replicas stay equal.

In each outermost call every rank draws one number. The largest number seeds torch's generators during the call; their
old states return at its end. Recomputed activations (torch.utils.checkpoint) find the same generator states as before.

On an accelerator DTensor draws for the whole tensor. On a CPU each rank draws only for its own part
(torch/distributed/tensor/_random.py: is_rng_supported_mesh), so that one seed would give all parts the same mask. So
here replicas of a part draw the same numbers, and other parts draw others (`PartSeeds`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.tensor._random as dtensor_random
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

__all__ = ["PartSeeds", "Stream", "draw_seed", "dropout", "let_parts_differ"]


def draw_seed() -> int:
    """Return a number drawn from torch's default generator."""
    return int(torch.randint(1 << 62, ()).item())


class Stream:
    """Torch's generators during a call: one seed on all ranks; their old states return at the end."""

    def __init__(self, seed: int, device_type: str) -> None:
        self._device: Any = None if device_type == "cpu" else torch.get_device_module(device_type)
        self._before = torch.get_rng_state(), None if self._device is None else self._device.get_rng_state()
        torch.manual_seed(seed)

    def close(self) -> None:
        """Restore the generators."""
        torch.set_rng_state(self._before[0])
        if self._device is not None:
            self._device.set_rng_state(self._before[1])


class PartSeeds:
    """DTensor's generator states for random operations on a CPU, for which torch has no such object.

    Each operation draws one number, equal on ranks in one state. It seeds the generator with the number and the index
    of the rank's part of the tensor. Then the state continues after the draw, whatever the part's size.
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
        # An odd, large factor makes the seeds of parts differ in many of the bits that the generator uses.
        torch.default_generator.manual_seed((seed + part * 0x9E3779B97F4A7C15) % (1 << 63))
        try:
            yield
        finally:
            torch.set_rng_state(before)


def let_parts_differ(device_type: str) -> None:
    """Make DTensors on CPUs draw different numbers for different parts, in this process; accelerators already do.

    This is set in DTensor itself, because torch.utils.checkpoint recomputes outside of every call.
    """
    # torch has one such object for all devices.
    if device_type == "cpu" and not torch.accelerator.is_available() and dtensor_random._rng_tracker is None:
        dtensor_random._rng_tracker = PartSeeds()  # type: ignore[assignment]


def dropout(tensor: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run ``functional.dropout``, also on partial sums, which torch 2.13 rejects."""
    whole = tensor.redistribute(placements=[Replicate() if at.is_partial() else at for at in tensor.placements])
    dropped: torch.Tensor = functional.dropout(whole, *args, **kwargs)
    return dropped
