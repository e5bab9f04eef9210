"""Flat buffers: the tensors whose local elements lie in one, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from xrank.errors import LayoutError
from xrank.layout.binding import bind, checked_shape, checked_sizes
from xrank.layout.local_part import local_part
from xrank.layout.mesh import DeviceMesh
from xrank.layout.mesh_parts import MeshParts, mesh_parts
from xrank.layout.nest_table import NestTable
from xrank.layout.nests import Nest
from xrank.layout.notation import LayoutTree
from xrank.layout.tensor_layout import TensorLayout, axis_lengths, flat_of

__all__ = ["FlatPart", "flat_mesh_parts", "flat_part"]


@dataclass(frozen=True, slots=True)
class FlatPart:
    """What one rank holds of a flat buffer.

    Args:
        size: the number of its elements, padding included.
        members: name -> nests; x is an element's place in the rank's buffer, y its row-major address in the member's
            global shape. None for a member that lies on other ranks.
        sums: axes along which the ranks hold addends, as of `LocalPart`.
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
    """Return what the rank at a coordinate holds of a flat buffer; None if the layout leaves the rank out.

    Args:
        layout: a flat layout.
        mesh: the mesh that gives the axes their lengths.
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
    """Return member -> what all ranks of a mesh hold of it; the buffer's padding is counted with the last member.

    A rank that holds nothing of a member is none of its ranks. Arguments and errors are `flat_part`'s.
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
        np.add.at(local_sizes, whole.owner[rows], nests.sizes)
        member = MeshParts(whole.ranks, whole.part, local_sizes, whole.owner[rows], nests)
        found[name] = member.kept(local_sizes[whole.part] > 0)
    return found


def _members(
    layout: TensorLayout, mesh: DeviceMesh, shapes: Mapping[str, Sequence[int]], sizes: Mapping[str, int] | None
) -> tuple[dict[str, tuple[int, int]], int, dict[str, int]]:
    """Return member -> where it stands among all their elements, how many these are, and the sizes that shapes tell."""
    flat = flat_of(layout)
    if flat is None:
        raise LayoutError(f"the layout {layout} is not flat", got=str(layout), want="flat(name [dims], ...)")
    lengths = axis_lengths(mesh, layout.view_mesh)
    known = checked_sizes(sizes)
    starts: dict[str, tuple[int, int]] = {}
    total = 0
    for member in flat.members:
        if member.name not in shapes:
            raise LayoutError(
                f"the shape of {member.name} is not given, which lies in {layout}",
                tensor=member.name,
                got=f"shapes of {sorted(shapes)[:16]}",
                want=f"a shape for {member.name}",
            )
        shape = checked_shape(shapes[member.name])
        bound = bind(LayoutTree(member.dims), shape, lengths, known)
        # A name means one size in all members, also where only one of them tells it.
        known |= {name: size for name, size in bound.items() if name not in lengths}
        starts[member.name] = (total, total + prod(shape))
        total += prod(shape)
    return starts, total, known
