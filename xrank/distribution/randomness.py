"""Randomness in a laid out model: ranks with different seeds draw the same numbers, so that replicas stay equal.

In each outermost call every rank draws one number. The largest number, with the index of the rank's part of the batch,
seeds torch's generators during the call. So ranks along a model axis draw the same numbers, and parts of the batch draw
others. The generators' old states return at the end. Recomputed activations (torch.utils.checkpoint) find the same
generator states as before.
"""

from __future__ import annotations

from typing import Any, Self

import torch


def draw_seed() -> int:
    """Return a number drawn from torch's default generator."""
    return int(torch.randint(1 << 62, ()).item())


class Stream:
    """Context in which torch's generators continue from a seed; their old states return at the end.

    Args:
        seed: a number that all ranks agree on.
        part: index of this rank's part of the batch.
        device_type: the kind of device whose generator is seeded beside the CPU's.
    """

    def __init__(self, seed: int, part: int, device_type: str) -> None:
        # An odd, large factor makes the seeds of parts differ in many of the bits that the generator uses.
        self._seed = (seed + part * 0x9E3779B97F4A7C15) % (1 << 63)
        self._device: Any = None if device_type == "cpu" else torch.get_device_module(device_type)
        self._before: tuple[Any, Any] = (None, None)

    def __enter__(self) -> Self:
        self._before = torch.get_rng_state(), None if self._device is None else self._device.get_rng_state()
        torch.manual_seed(self._seed)
        return self

    def __exit__(self, *exception: object) -> None:
        torch.set_rng_state(self._before[0])
        if self._device is not None:
            self._device.set_rng_state(self._before[1])
