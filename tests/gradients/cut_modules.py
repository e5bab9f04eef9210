"""Modules cut along tp with Megatron's marks and known gradients; and the same module whole."""

from __future__ import annotations

import torch
from torch import nn

SHAPES = {"column": (8, 6), "row": (6, 10), "gate_up": (8, 3), "norm": (7,), "scale": ()}
_CUTS = {"column": (0, 1), "row": (1, 1), "gate_up": (0, 2)}
"""Name -> the dim that tp cuts, and how many pieces each rank has a part of."""


def whole_tensors(seed: int = 3) -> dict[str, torch.Tensor]:
    """Return tensors of the whole model, the same everywhere."""
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def part_of(name: str, whole: torch.Tensor, place: int, length: int) -> torch.Tensor:
    """Return what one rank along tp holds."""
    if name not in _CUTS or length == 1:
        return whole.clone()
    dim, num_pieces = _CUTS[name]
    pieces = whole.chunk(num_pieces, dim)
    return torch.cat([piece.chunk(length, dim)[place] for piece in pieces], dim).contiguous()


def cut_module(place: int, length: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the module of a rank along tp."""
    module = nn.Module()
    for name, whole in whole_tensors().items():
        parameter = nn.Parameter(part_of(name, whole, place, length).to(dtype))
        if name in _CUTS and length > 1:
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = _CUTS[name]
        module.register_parameter(name, parameter)
    return module


def backward(module: nn.Module, gradients: dict[str, torch.Tensor], place: int, length: int) -> None:
    """Run a backward that gives each parameter its part of these."""
    own = {name: part_of(name, whole, place, length) for name, whole in gradients.items()}
    sum((one * own[name].to(one.dtype)).sum() for name, one in module.named_parameters()).backward()
