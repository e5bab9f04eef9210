"""What each rank is to hold in a new layout: compiled for every tensor, and proven to leave nothing out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.local_part import local_part
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest
from xrank.plan.coverage import Fault, contains, range_text
from xrank.plan.output import TensorPart
from xrank.plan.planner import divided, ranks_text

__all__ = ["NewPart", "new_layout", "new_parts"]


@dataclass(frozen=True, slots=True)
class NewPart:
    """What one rank is to hold of a tensor."""

    shape: tuple[int, ...]
    """Local shape."""
    part: TensorPart


def new_layout(name: str, layouts: LayoutMap) -> tuple[TensorLayout, DeviceMesh] | None:
    """Return the layout and mesh that a tensor is to have; None where no rule decides.

    Raises:
        LayoutError: several rules decide, or nothing says the mesh.
    """
    try:
        layout = layouts[name]
    except LayoutError as error:
        error.next_step = error.next_step or "let the patterns of the layout file tell the names apart"
        raise
    if layout is None:
        return None
    mesh = layout.device_mesh or layouts.device_mesh
    if mesh is None:
        raise LayoutError(
            f"{name}: the layout file has a rule for it but no [mesh]",
            tensor=name,
            got=str(layout),
            next_step='add a table like [mesh] with grid = "dp=2 tp=2" to the layout file',
        )
    if layout.view_mesh is None:
        return layout, mesh
    # A state's record knows meshes, not views: the view becomes the mesh, where the layout uses its axes alone.
    try:
        return TensorLayout.from_tree(replace(layout.tree, view=None), layout.view_mesh), layout.view_mesh
    except LayoutError as error:
        raise LayoutError(
            f"{name}: its layout uses axes of a view and of the mesh, which no state can record",
            tensor=name,
            got=str(layout),
            want=f"axes of {layout.view_mesh.grid} alone",
            next_step="say the layout with the axes of one view",
        ) from error


def new_parts(name: str, layout: TensorLayout, mesh: DeviceMesh, shape: tuple[int, ...]) -> Mapping[int, NewPart]:
    """Return what each rank that holds anything of a tensor is to hold.

    Raises:
        LayoutError: the layout does not fit the shape, leaves elements to no rank, or gives them to several in
            different cuts.
    """
    try:
        parts, fault = _proven(layout, mesh, shape)
    except LayoutError as error:
        error.message = f"{name}: {error.message}"
        error.tensor, error.file = name, None
        error.next_step = error.next_step or "correct the layout file"
        raise
    if fault is not None:
        raise _not_exact(name, layout, mesh, shape, parts, fault)
    return parts


@lru_cache(maxsize=1024)
def _proven(
    layout: TensorLayout, mesh: DeviceMesh, shape: tuple[int, ...]
) -> tuple[Mapping[int, NewPart], Fault | None]:
    found = {}
    for rank in mesh.ranks:
        part = local_part(layout, mesh, mesh.coordinate(rank), shape)
        if part is None:
            continue
        if part.sums:
            raise LayoutError(
                f"the layout asks for addends over {', '.join(part.sums)}, and a stored tensor is the sum",
                got=str(layout),
                want="parts or replicas",
            )
        found[rank] = part
    rows = [(rank, nest) for rank, part in found.items() for nest in part.nests]
    table = NestTable.of([nest for _, nest in rows])
    first, _, fault = divided(int_array(rank for rank, _ in rows), table, math.prod(shape))
    compared: dict[int, list[Nest]] = {}
    for row in first.tolist():
        rank, nest = rows[row]
        compared.setdefault(rank, []).append(nest)
    parts = {
        rank: NewPart(part.shape, TensorPart(shape, part.nests, tuple(compared.get(rank, ()))))
        for rank, part in found.items()
    }
    return parts, fault


def _not_exact(
    name: str,
    layout: TensorLayout,
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    parts: Mapping[int, NewPart],
    fault: Fault,
) -> LayoutError:
    where = range_text(shape, fault.address, fault.address)
    ranks = [rank for rank, new in parts.items() if any(contains(nest, fault.address) for nest in new.part.nests)]
    what = "left to no rank" if fault.kind == "gap" else f"given to ranks {ranks_text(ranks)} in different cuts"
    return LayoutError(
        f"{name}, from {where} on: {what} by the new layout",
        tensor=name,
        index_range=where,
        got=f"{layout} of {list(shape)} on {mesh.grid}",
        want="every element on some rank, and equal parts wherever several have it",
        next_step="correct the layout file",
    )
