"""The proof that a recorded loader writes each element of each parameter once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from xrank.errors import UsageError
from xrank.layout.nest_table import NestTable
from xrank.layout.nests import Nest, canonical
from xrank.plan.coverage import find_fault, range_text

if TYPE_CHECKING:
    from xrank.refit.recording import Fill


def prove_coverage(
    regions: Mapping[str, Sequence[torch.Tensor]],
    fills: Sequence[Fill],
    parameters: Sequence[tuple[str, torch.Tensor]],
    *,
    may_have_gaps: bool,
) -> None:
    """Check that each element of each parameter is written once; a constant for the whole parameter may come before.

    Args:
        regions: parameter -> the parts that the loader fills from tensors.
        fills: the parts that it sets to constants.
        parameters: the tensors that it fills, with names.
        may_have_gaps: whether some tensors could not be recorded, so that elements may seem unwritten.

    Raises:
        UsageError: it names the parameter and the elements.
    """
    for name, tensor in parameters:
        its = regions.get(name, [])
        own_fills = [fill for fill in fills if fill.parameter == name]
        filled = [fill.target for fill in own_fills]
        if any(fill.is_first and fill.target.numel() == tensor.numel() for fill in own_fills):
            # Writes after the constant must not overlap each other.
            later = [fill.target for fill in own_fills if not fill.is_first]
            fault = _find_fault_by_count(tensor, [*its, *later], may_have_gaps=True)
        elif tensor.is_contiguous():
            fault = _find_fault_by_nests(tensor, [*its, *filled])
        else:
            fault = _find_fault_by_count(tensor, [*its, *filled], may_have_gaps=False)
        if fault is None or (fault[0] == "gap" and may_have_gaps):
            continue
        kind, address = fault
        where = range_text(tuple(tensor.shape), address, address)
        raise UsageError(
            f"{name}, from {where} on: the loader {'never writes' if kind == 'gap' else 'writes twice'}",
            tensor=name,
            index_range=where,
            got=f"{len(its)} copies from the trainer's tensors",
            want="each element once",
            next_step="give the trainer's model all tensors that the engine loads; parameters that no checkpoint has "
            "must not be among the engine's",
        )


def _find_fault_by_nests(tensor: torch.Tensor, regions: Sequence[torch.Tensor]) -> tuple[str, int] | None:
    if not tensor.numel():
        return None
    nests = []
    for region in regions:
        start = int(region.storage_offset() - tensor.storage_offset())
        loops = [
            (n, x, y) for n, x, y in zip(region.shape, row_major_steps(region.shape), region.stride(), strict=True)
        ]
        nests.append(canonical(Nest(0, start, tuple(loop for loop in loops if loop[0] != 1))))
    fault = find_fault(NestTable.from_nests(nests), tensor.numel())
    return None if fault is None else (fault.kind, int(fault.address))


def _find_fault_by_count(
    tensor: torch.Tensor, regions: Sequence[torch.Tensor], *, may_have_gaps: bool
) -> tuple[str, int] | None:
    """Count the writes of each element: one byte for each of the parameter."""
    reach = span_nbytes(tensor) // tensor.element_size()
    counts = torch.zeros(reach, dtype=torch.uint8)
    for region in regions:
        start = int(region.storage_offset() - tensor.storage_offset())
        counts.as_strided(region.shape, region.stride(), start).add_(1)
    own = counts.as_strided(tensor.shape, tensor.stride(), 0).flatten()
    wrong = own > 1 if may_have_gaps else own != 1
    if not wrong.any():
        return None
    address = int(wrong.nonzero()[0])
    return ("overlap" if own[address] > 1 else "gap"), address


def span_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor, with the gaps between them."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return max(0, reach * tensor.element_size()) if tensor.numel() else 0


def row_major_steps(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor of a shape."""
    return [prod(shape[k + 1 :]) for k in range(len(shape))]
