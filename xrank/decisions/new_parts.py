"""The parts of each rank in a new layout: compiled for every tensor, and proven to leave no element out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from xrank.errors import LayoutError
from xrank.layout.companion_parts import companion_part
from xrank.layout.local_part import LocalPart, local_part
from xrank.layout.mesh_parts import flat_part
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest
from xrank.layout.tensor_layout import flat_of
from xrank.plan.coverage import CoverageFault, contains, range_text
from xrank.plan.output import TensorPart
from xrank.plan.planner import divide_pieces
from xrank.readers.claims import Claim, Claims, find_local_name
from xrank.words import ranks_text


@dataclass(frozen=True, slots=True)
class NewPart:
    """The part of a tensor that one rank is to hold."""

    shape: tuple[int, ...]
    """Local shape of the part."""
    part: TensorPart


def new_claim(name: str, claims: Claims) -> Claim | None:
    """Return the claim that cuts a tensor; None where no rule decides. A flat buffer of the tensor alone is a claim.

    Raises:
        LayoutError: several rules decide, no mesh is known, or the layout puts it into a flat buffer with others.
    """
    claim = claims.find_in_file(name)
    flat = None if claim is None else flat_of(claim.layout)
    if flat is not None and (flat.multiple is not None or [member.name for member in flat.members] != [name]):
        raise LayoutError(
            f"{name}: the new layout is a flat buffer, which is read and not written unless it holds this tensor alone",
            tensor=name,
            got=str(claim),
            want=f"the layout of one tensor, or flat({name} [...])",
            next_step="give the members layouts of their own",
        )
    return claim


def new_parts(
    name: str, claim: Claim, shape: tuple[int, ...], base: tuple[int, ...] | None = None
) -> Mapping[int, NewPart]:
    """Return the part of each rank that is to hold any element of a tensor.

    Args:
        name: the tensor's global name.
        claim: its new layout and mesh.
        shape: its global shape.
        base: for a companion, the global shape of the tensor that it follows.

    Raises:
        LayoutError: the layout does not fit the shape, leaves elements to no rank, or gives them to several in
            different cuts.
    """
    try:
        owners = tuple(rank for rank in claim.mesh.ranks if find_local_name(claim, name, rank) is not None)
        parts, fault = _prove(claim, owners, shape, base)
    except LayoutError as error:
        error.about(name, tensor=name, next_step="correct the layout file")
        raise
    if fault is not None:
        raise _coverage_error(name, claim, shape, parts, fault)
    return parts


@lru_cache(maxsize=1024)
def _prove(
    claim: Claim, owners: tuple[int, ...], shape: tuple[int, ...], base: tuple[int, ...] | None
) -> tuple[Mapping[int, NewPart], CoverageFault | None]:
    found = {}
    for rank in owners:
        part = _part(claim, rank, shape, base)
        if part is None:
            continue
        if part.sums:
            raise LayoutError(
                f"the layout asks for addends over {', '.join(part.sums)}, and a stored tensor is the sum",
                got=str(claim),
                want="parts or replicas",
            )
        found[rank] = part
    rows = [(rank, nest) for rank, part in found.items() for nest in part.nests]
    table = NestTable.from_nests([nest for _, nest in rows])
    first, _, fault = divide_pieces(int_array(rank for rank, _ in rows), table, math.prod(shape))
    compared: dict[int, list[Nest]] = {}
    for row in first.tolist():
        rank, nest = rows[row]
        compared.setdefault(rank, []).append(nest)
    parts = {
        rank: NewPart(part.shape, TensorPart(shape, part.nests, tuple(compared.get(rank, ()))))
        for rank, part in found.items()
    }
    return parts, fault


def _part(claim: Claim, rank: int, shape: tuple[int, ...], base: tuple[int, ...] | None) -> LocalPart | None:
    coordinate, sizes = claim.mesh.coordinate(rank), dict(claim.sizes)
    flat = flat_of(claim.layout)
    if flat is not None:
        (member,) = flat.members
        found = flat_part(claim.layout, claim.mesh, coordinate, {member.name: shape}, sizes=sizes)
        return None if found is None else LocalPart((found.size,), found.members[member.name], found.sums)
    if claim.companion is None:
        return local_part(claim.layout, claim.mesh, coordinate, shape, sizes=sizes)
    assert base is not None
    return companion_part(claim.companion, claim.layout, claim.mesh, coordinate, base, sizes=sizes)


def _coverage_error(
    name: str, claim: Claim, shape: tuple[int, ...], parts: Mapping[int, NewPart], fault: CoverageFault
) -> LayoutError:
    where = range_text(shape, fault.address, fault.address)
    ranks = [rank for rank, new in parts.items() if any(contains(nest, fault.address) for nest in new.part.nests)]
    what = "left to no rank" if fault.kind == "gap" else f"given to {ranks_text(ranks)} in different cuts"
    return LayoutError(
        f"{name}, from {where} on: {what} by the new layout",
        tensor=name,
        index_range=where,
        got=f"{claim} of {list(shape)} on {claim.mesh.grid}",
        want="every element on some rank, and equal parts wherever several have it",
        next_step="correct the layout file",
    )
