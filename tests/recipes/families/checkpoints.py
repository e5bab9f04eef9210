"""Checkpoints of the tiny families over TP 2, PP 2 and, with experts, EP 2, in both of Megatron's formats."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tests.readers.made_megatron import Run, write_dist, write_legacy
from tests.recipes.families.family import Family

__all__ = ["run_of", "write_checkpoint"]

_GATED = ("swiglu", "quick_geglu", "gated_linear_unit")


def run_of(family: Family) -> Run:
    """Return the parallel run of a family's tiny model."""
    shapes, args = family.recorded["shapes"], family.full_args()
    layers = 1 + max(int(found[1]) for name in shapes if (found := re.match(r"decoder\.layers\.(\d+)\.", name)))
    has_experts = any("local_experts" in name for name in shapes)
    return Run(
        tp=family.num_ways, pp=2, ep=2 if has_experts else 1, chunks=((layers // 2, layers - layers // 2),),
        has_experts=has_experts, args=args, gated=any(args.get(key) for key in _GATED),
    )  # fmt: skip


def write_checkpoint(folder: Path, family: Family, kind: str) -> Path:
    """Write the family's checkpoint of that format; return its folder."""
    tensors = {name: torch.from_numpy(array) for name, array in family.weights().items()}
    write = write_legacy if kind == "legacy" else write_dist
    write(folder, run_of(family), tensors)
    return folder
