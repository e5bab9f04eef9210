"""Flat buffers: the places of their members' local elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from xrank.errors import LayoutError
from xrank.layout.binding import bind, check_shape, check_sizes
from xrank.layout.local_part import local_part
from xrank.layout.mesh import DeviceMesh
from xrank.layout.mesh_parts import MeshParts, mesh_parts
from xrank.layout.nest_table import NestTable
from xrank.layout.nests import Nest
from xrank.layout.notation import LayoutTree
from xrank.layout.tensor_layout import TensorLayout, axis_lengths, flat_of


@dataclass(frozen=True, slots=True)
class FlatPart:
    """The part of a flat buffer that one rank holds.

    Args:
        size: number of elements, padding included.
        members: name -> nests; x is an element's place in the rank's buffer, y its row-major address in the member's
            global shape. Empty for a member on other ranks.
        sums: axes along which the ranks hold addends, as in `LocalPart`.
    """

    size: int
    members: Mapping[str, tuple[Nest, ...]]
    sums: tuple[str, ...] = ()


def flat_part(
    layout: TensorLayout,
    mesh: DeviceMesh,
    coordinate: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    *,
    sizes: Mapping[str, int] | None = None,
) -> FlatPart | None:
    """Return the part of a flat buffer that the rank at a coordinate holds; None if the layout excludes the rank.

    Args:
        layout: a flat layout.
        mesh: the mesh, which defines the lengths of the axes.
        coordinate: the rank's place along the mesh's axes.
        shapes: member -> its global shape.
        sizes: sizes by name.

    Raises:
        LayoutError: the layout is not flat, a member has no shape, or as `local_part`.
    """
    starts, total, known = _members(layout, mesh, shapes, sizes)
    part = local_part(layout, mesh, coordinate, (total,), sizes=known)
    if part is None:
        return None
    members = {
        # `dim_part` never merges nests of two members, so the first address of a nest decides its member.
        name: tuple(Nest(nest.x, nest.y - low, nest.loops) for nest in part.nests if low <= nest.y < high)
        for name, (low, high) in starts.items()
    }
    return FlatPart(part.shape[0], members, part.sums)


def flat_mesh_parts(
    layout: TensorLayout,
    mesh: DeviceMesh,
    shapes: Mapping[str, Sequence[int]],
    *,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, MeshParts]:
    """Return member -> its parts on all ranks of a mesh; the buffer's padding counts as part of the last member.

    A member's parts exclude ranks without elements of it. Arguments and errors as in `flat_part`.
    """
    starts, total, known = _members(layout, mesh, shapes, sizes)
    whole = mesh_parts(layout, mesh, (total,), sizes=known)
    num_pads, last = whole.num_pads, next(reversed(starts))
    found: dict[str, MeshParts] = {}
    for name, (low, high) in starts.items():
        rows = np.flatnonzero((whole.nests.y >= low) & (whole.nests.y < high))
        nests = whole.nests.take(rows)
        nests = NestTable(nests.x, nests.y - low, nests.loops)
        local_sizes = num_pads.copy() if name == last else np.zeros_like(num_pads)
        # Not `+=`, which would count only one of several nests of the same part.
        np.add.at(local_sizes, whole.owner[rows], nests.sizes)
        member = MeshParts(whole.ranks, whole.part, local_sizes, whole.owner[rows], nests)
        found[name] = member.select(local_sizes[whole.part] > 0)
    return found


def _members(
    layout: TensorLayout, mesh: DeviceMesh, shapes: Mapping[str, Sequence[int]], sizes: Mapping[str, int] | None
) -> tuple[dict[str, tuple[int, int]], int, dict[str, int]]:
    """Return member -> (start, end) among all elements, the number of elements, and the sizes that shapes define."""
    flat = flat_of(layout)
    if flat is None:
        raise LayoutError(f"the layout {layout} is not flat", got=str(layout), want="flat(name [dims], ...)")
    lengths = axis_lengths(mesh, layout.view_mesh)
    known = check_sizes(sizes)
    starts: dict[str, tuple[int, int]] = {}
    total = 0
    for member in flat.members:
        if member.name not in shapes:
            raise LayoutError(
                f"the shape of {member.name} is not given, which is in {layout}",
                tensor=member.name,
                got=f"shapes of {sorted(shapes)[:16]}",
                want=f"a shape for {member.name}",
            )
        shape = check_shape(shapes[member.name])
        bound = bind(LayoutTree(member.dims), shape, lengths, known)
        # A name has one size in all members, even if only one member defines it.
        known |= {name: size for name, size in bound.items() if name not in lengths}
        starts[member.name] = (total, total + prod(shape))
        total += prod(shape)
    return starts, total, known
