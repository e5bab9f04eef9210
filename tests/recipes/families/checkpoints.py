"""Checkpoints of the tiny families over TP 2, PP 2 and, with experts, EP 2, in both of Megatron's formats."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.readers.made_megatron import Run, write_dist, write_legacy
from tests.recipes.families.family import Family
from tests.recipes.made_hybrids import HYBRID_FAMILIES, apart, packed_rows

__all__ = ["run_of", "write_checkpoint"]

_GATED = ("swiglu", "quick_geglu", "gated_linear_unit")


def run_of(family: Family) -> Run:
    """Return the parallel run of a family's tiny model."""
    shapes, args = family.recorded["shapes"], family.full_args()
    numbers = (re.match(rf"{family.prefix}decoder\.layers\.(\d+)\.", name) for name in shapes)
    layers = 1 + max(int(found[1]) for found in numbers if found)
    has_experts = any("local_experts" in name for name in shapes)
    return Run(
        tp=family.num_ways, pp=2, ep=2 if has_experts else 1, chunks=((layers // 2, layers - layers // 2),),
        has_experts=has_experts, args=args, gated=any(args.get(key) for key in _GATED),
        plain=("vision_",), packed=_packed_of(family),
    )  # fmt: skip


def _packed_of(family: Family) -> dict[str, list[int]]:
    """Return the rows of the projections in a mixer's tensors that hold several."""
    if family.config["model_type"] not in HYBRID_FAMILIES:
        return {}
    rows = packed_rows(SimpleNamespace(**family.config))
    return {own: [*parts.values()] for own, parts in rows.items()}


def write_checkpoint(folder: Path, family: Family, kind: str) -> Path:
    """Write the family's checkpoint of that format; return its folder."""
    tensors = {name: torch.from_numpy(array) for name, array in family.weights().items()}
    if kind == "legacy":
        write_legacy(folder, run_of(family), tensors)
    elif family.config["model_type"] in HYBRID_FAMILIES:
        write_dist(folder, run_of(family), apart(tensors, SimpleNamespace(**family.config)))
    else:
        write_dist(folder, run_of(family), tensors)
    return folder
