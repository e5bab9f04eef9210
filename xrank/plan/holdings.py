"""Holdings: the ranks of each part of a tensor, and whether they hold all of it exactly once; nothing is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.mesh_parts import MeshParts, mesh_parts
from xrank.layout.nest_table import IntArray
from xrank.layout.nests import Nest, canonical, size
from xrank.plan.misfit import Misfit, find_misfit
from xrank.words import ranks_text


@dataclass(frozen=True, slots=True)
class Share:
    """One part of a tensor, and all ranks that hold exactly this part."""

    ranks: tuple[int, ...]
    """By rising number; several ranks hold replicas."""
    nests: tuple[Nest, ...]
    """y is the row-major address in the tensor's global shape."""
    shape: tuple[int, ...] | None = None
    """Local shape, pads included; None if the part is in a flat buffer or in a file."""
    num_pads: int = 0
    """Number of local elements that are padding."""

    @property
    def num_elements(self) -> int:
        """Elements of the tensor in this part."""
        return sum(map(size, self.nests))


@dataclass(frozen=True, slots=True)
class Holdings:
    """The parts of one tensor and the ranks that hold them."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    dtype: str | None = None
    rule: str | None = None
    """Key of the layout map that decides for the tensor; None without one."""
    layout: TensorLayout | None = None
    mesh: DeviceMesh | None = None
    text: str | None = None
    """The layout or companion rule, in the notation of the layout file."""
    parts: MeshParts | None = None
    """The part of each rank; None if it is not known."""
    sums: tuple[str, ...] = ()
    """Axes along which the ranks hold addends."""
    misfit: Misfit | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes by name that do not follow from the shape."""
    problem: LayoutError | None = None
    """The error because of which nothing more is known."""

    @property
    def shares(self) -> tuple[Share, ...]:
        """Its parts one by one, by their lowest rank; computed on demand, as there may be a million."""
        return () if self.parts is None else _shares(self.parts)

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks of the mesh that have no part of the tensor, by rising number."""
        if self.parts is None or self.mesh is None:
            return ()
        return tuple(sorted(set(self.mesh.ranks).difference(self.parts.ranks.tolist())))


@dataclass(frozen=True, slots=True)
class Survey:
    """The holdings of every tensor."""

    meshes: Mapping[str, DeviceMesh]
    """``"mesh"`` and ``"view NAME"``."""
    rules: Mapping[str, str]
    tensors: tuple[Holdings, ...]
    unmatched: tuple[str, ...] = ()
    """Names of tensors without a rule."""
    unused: tuple[str, ...] = ()
    """Rules that match no tensor."""


@lru_cache(maxsize=256)
def _shares(parts: MeshParts) -> tuple[Share, ...]:
    """Return the parts as shares; equal parts of several ranks become one."""
    nests: list[list[Nest]] = [[] for _ in range(len(parts.local_sizes))]
    for row, part in enumerate(parts.owner.tolist()):
        nests[part].append(parts.nests[row])
    shapes = [None] * len(nests) if parts.shapes is None else [tuple(shape) for shape in parts.shapes.tolist()]
    kinds = list(zip(map(tuple, nests), shapes, parts.num_pads.tolist(), strict=True))
    found: dict[tuple[tuple[Nest, ...], tuple[int, ...] | None, int], list[int]] = {}
    for rank, part in zip(parts.ranks.tolist(), parts.part.tolist(), strict=True):
        found.setdefault(kinds[part], []).append(rank)
    return tuple(Share(tuple(ranks), *kind) for kind, ranks in found.items())


@lru_cache(maxsize=256)
def _compile_parts(
    layout: TensorLayout, mesh: DeviceMesh, shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]
) -> tuple[MeshParts, Misfit | None]:
    parts = mesh_parts(layout, mesh, shape, sizes=dict(sizes))
    return parts, find_misfit(parts, shape)


def apply_layout(start: Holdings, layout: TensorLayout, mesh: DeviceMesh) -> Holdings:
    """Return a tensor's holdings by a layout.

    Raises:
        LayoutError: the layout does not fit mesh and shape.
    """
    parts, misfit = _compile_parts(layout, mesh, start.shape, tuple(start.sizes.items()))
    return replace(start, layout=layout, mesh=mesh, text=str(layout), parts=parts, sums=layout.tree.sums, misfit=misfit)


def apply_parts(start: Holdings, parts: MeshParts, sums: tuple[str, ...] = ()) -> Holdings:
    """Return a tensor's holdings by the parts of its ranks."""
    return replace(start, parts=parts, sums=sums, misfit=find_misfit(parts, start.shape))


def apply_pieces(start: Holdings, held: Mapping[int, tuple[Nest, ...]]) -> Holdings:
    """Return a tensor's holdings by rank -> nests, of which only the y sides count."""
    placed = {rank: tuple(map(_drop_local_addresses, nests)) for rank, nests in held.items()}
    return apply_parts(
        start, MeshParts.from_held({rank: (nests, None, sum(map(size, nests))) for rank, nests in placed.items()})
    )


def _drop_local_addresses(nest: Nest) -> Nest:
    """Return a nest without its local addresses, which differ between files."""
    # With x equal to y, canonical merges loops by the y side alone, however a file orders the elements.
    y_side = canonical(Nest(nest.y, nest.y, tuple((n, stride, stride) for n, _, stride in nest.loops)))
    return Nest(0, y_side.y, tuple((n, 0, stride) for n, _, stride in y_side.loops))


def sum_held_nbytes(tensors: Iterable[Holdings], width: Callable[[str | None], int]) -> dict[int, int]:
    """Return rank -> bytes of all its parts, pads included; `width` returns the bytes of an element of a type."""
    sums: dict[bytes, tuple[IntArray, np.ndarray[tuple[int], np.dtype[np.object_]]]] = {}
    meshes: dict[int, DeviceMesh] = {}
    for one in tensors:
        if one.parts is None:
            continue
        if one.mesh is not None:
            # By identity: hashing a mesh goes over all its ranks, for each tensor.
            meshes[id(one.mesh)] = one.mesh
        # As integers of any size: a model's bytes may be more than an array's numbers can count.
        held = one.parts.local_sizes.astype(object) * width(one.dtype)
        # Tensors on the same ranks are added as arrays; the loop over ranks below runs once for each set of ranks.
        key = one.parts.ranks.tobytes()
        before = sums.get(key)
        held = held[one.parts.part]
        sums[key] = one.parts.ranks, held if before is None else before[1] + held
    found = {rank: 0 for mesh in meshes.values() for rank in mesh.ranks}
    for ranks, held in sums.values():
        for rank, nbytes in zip(ranks.tolist(), held.tolist(), strict=True):
            found[rank] = found.get(rank, 0) + nbytes
    return dict(sorted(found.items()))


def find_problem(one: Holdings) -> LayoutError | None:
    """Return the first reason why a tensor is not held exactly once per replica, or None."""
    if one.problem is not None:
        one.problem.about(next_step="correct the layout file")
        return one.problem
    if one.rule is None and not one.shares:
        dims = ", ".join(f"d{i}" for i in range(len(one.shape)))
        return LayoutError(
            f"{one.name}: no rule says how it is cut",
            tensor=one.name,
            got=f"shape {list(one.shape)}",
            want="a rule for every tensor",
            next_step=f'add a rule, such as "{one.name}" = "[{dims}]" for a tensor that every rank holds whole',
        )
    misfit = one.misfit
    if misfit is None:
        return None
    what = {
        "gap": "held by no rank",
        "overlap": f"held by {ranks_text(misfit.ranks)} in different cuts",
        "outside": f"outside the tensor, on {ranks_text(misfit.ranks)}",
    }[misfit.kind]
    return LayoutError(
        f"{one.name}, {misfit.where}: {what}",
        tensor=one.name,
        rank=misfit.ranks[0] if misfit.ranks else None,
        index_range=misfit.where,
        got=f"{one.text or 'what the ranks recorded'} of {list(one.shape)}"
        + ("" if one.mesh is None else f" on {one.mesh.grid}"),
        want="every element exactly once, or in equal parts as replicas",
        next_step="correct the layout" if one.rule is None else f"correct the rule {one.rule!r}",
    )
