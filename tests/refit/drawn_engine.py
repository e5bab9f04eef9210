"""A random engine with a loader: fused, transposed, strided, padded and replicated parts, and experts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

__all__ = ["DrawnEngine"]

Cut = Callable[[torch.Tensor], torch.Tensor]
"""Whole tensor -> a rank's part, as a view."""


class DrawnEngine(nn.Module):
    """One rank. A parameter is fused of the parts of one to three tensors of a type, with padding behind them.

    Args:
        seed: draws the cuts, the same on all ranks.
        rank: this rank.
        world_size: the engine's number of ranks.
        tensors: whole tensors, whose values have no effect.
    """

    def __init__(self, seed: int, rank: int, world_size: int, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        rng, self.slots = random.Random(seed), dict[str, torch.Tensor]()
        self.cuts: dict[str, Cut] = {}
        self.padding: list[torch.Tensor] = []
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, tensor in tensors.items():
            by_dtype.setdefault(tensor.dtype, []).append(name)
        for names in by_dtype.values():
            while names:
                count = rng.randint(1, 3)
                fused, names = names[:count], names[count:]
                self._fuse(rng, rank, world_size, {name: tensors[name] for name in fused})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the parameters from whole tensors."""
        for padding in self.padding:
            padding.fill_(0)
        for name, loaded in weights:
            self.slots[name].copy_(self.cuts[name](loaded))

    def _fuse(self, rng: random.Random, rank: int, world_size: int, tensors: Mapping[str, torch.Tensor]) -> None:
        parts = {}
        for name, tensor in tensors.items():
            self.cuts[name] = draw_cut(rng, rank, world_size, tuple(tensor.shape))
            parts[name] = self.cuts[name](tensor)
        dtype = next(iter(tensors.values())).dtype
        size, padding = sum(part.numel() for part in parts.values()), rng.choice([0, 3])
        flat = nn.Parameter(torch.zeros(size + (padding or (0 if size else 1)), dtype=dtype), requires_grad=False)
        self.register_parameter(f"fused{len(self.padding)}_{'_'.join(parts)}", flat)
        start = 0
        for name, part in parts.items():
            slot = flat.data[start : start + part.numel()]
            is_transposed = part.ndim >= 2 and rng.random() < 0.4
            shape = (*part.shape[:-2], part.shape[-1], part.shape[-2]) if is_transposed else part.shape
            self.slots[name] = slot.view(shape).transpose(-1, -2) if is_transposed else slot.view(shape)
            start += part.numel()
        self.padding.append(flat.data[start:])


def draw_cut(rng: random.Random, rank: int, world_size: int, shape: tuple[int, ...]) -> Cut:
    """Return a rank's part of tensors of a shape; together with the loader's copies every parameter is filled."""
    kind = rng.choice(["whole", "even", "uneven", "strided", "experts", "columns"])
    if not shape or kind == "whole":
        return lambda whole: whole
    dim = len(shape) - 1 if kind == "columns" else 0 if kind == "experts" else rng.randrange(len(shape))
    length = shape[dim]
    if kind == "strided":
        return lambda whole: whole[(slice(None),) * dim + (slice(rank, None, world_size),)]
    if kind == "experts":  # equal numbers of neighbours, on groups of ranks
        count = math.gcd(length, world_size)
        at = rank % count
        return lambda whole: whole.narrow(0, at * (length // count), length // count)
    bounds = sorted([0, length, *(rng.randint(0, length) for _ in range(world_size - 1))])
    if kind != "uneven":
        each = -(-length // world_size)
        bounds = [min(length, each * i) for i in range(world_size + 1)]
    return lambda whole: whole.narrow(dim, bounds[rank], bounds[rank + 1] - bounds[rank])
