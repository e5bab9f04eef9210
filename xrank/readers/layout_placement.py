"""Places the parts of a tensor by their claimed layouts, each rank by its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from xrank.errors import ContradictionError, LayoutError, option
from xrank.layout.binding import collect_known_names, global_size
from xrank.layout.companion import companion_shape
from xrank.layout.companion_parts import base_shapes, companion_part
from xrank.layout.local_part import LocalPart, infer_shape, local_part
from xrank.layout.mesh import DeviceMesh
from xrank.layout.mesh_parts import FlatPart, flat_part
from xrank.layout.nest_table import IntArray, NestTable, int_array
from xrank.layout.nests import Nest, row_major
from xrank.layout.notation import LayoutTree
from xrank.layout.tensor_layout import TensorLayout, axis_lengths, flat_of
from xrank.plan.source import StoredShard
from xrank.readers.base import Hints
from xrank.readers.claimed_parts import Claimed, check_meshes, check_part
from xrank.readers.claims import Claim, find_holders, prefix_error
from xrank.readers.held_tensor import HeldTensor, pieces_of


def place_claimed(name: str, claimed: Sequence[Claimed], shape: tuple[int, ...] | None) -> StoredShard:
    """Return a tensor's pieces. If it has several meshes, they hold replicas of each other.

    Args:
        name: the tensor's global name.
        claimed: the ranks' parts, by rising rank.
        shape: its global shape; None to infer it from the local shapes.

    Raises:
        ContradictionError: ranks disagree about the layout, or a part does not fit it.
        IncompleteError: a rank that should have a part has none.
        LayoutError: the layout does not fit the shape.
    """
    held, first = [h for h, _ in claimed], claimed[0][1]
    if _are_alike([claim for _, claim in claimed]):
        own = (tuple(h.rank for h in held), tuple(h.shape for h in held))
        known = _place_alike(first.layout, first.mesh, first.sizes, *own, shape)
        if known is not None and all(not h.storage_offset and h.strides == row_major(h.shape) for h in held):
            records = int_array([h.record for h in held])[known.owner]
            return StoredShard(name, held[0].dtype, known.shape, known.rank, records, known.table)
        if known is not None:
            return pieces_of(name, held, known.shape, known.nests)
    # The checks below name the tensor and the rank of a fault.
    check_meshes(name, claimed)
    if shape is None:
        shape = _infer_shape(name, claimed)
    nests = []
    for h, claim in claimed:
        try:
            part = local_part(claim.layout, claim.mesh, _coordinate(claim, h), shape, sizes=dict(claim.sizes))
        except LayoutError as error:
            raise prefix_error(error, name, h) from None
        nests.append(check_part(name, h, claim, part, shape).nests)
    return pieces_of(name, held, shape, nests)


def _are_alike(claims: Sequence[Claim]) -> bool:
    """Return whether ranks declare one layout on one mesh, and one name."""
    if all(claim is claims[0] for claim in claims):
        return claims[0].pattern is None
    own = [(claim.layout, claim.mesh, claim.sizes) for claim in claims]
    return all(claim.pattern is None for claim in claims) and all(one == own[0] for one in own)


@dataclass(frozen=True, slots=True, eq=False)
class _Alike:
    """The pieces of all tensors with one layout, whose parts have the same shapes on the same ranks."""

    shape: tuple[int, ...]
    nests: Sequence[Sequence[Nest]]
    """Nests of each rank's part."""
    table: NestTable
    """All nests."""
    owner: IntArray
    """Nest -> number of its part."""
    rank: IntArray
    """Nest -> its rank."""


# A large model has some hundred kinds of tensors, each a hundred times and more.
@lru_cache(maxsize=4096)
def _place_alike(
    layout: TensorLayout,
    mesh: DeviceMesh,
    sizes: tuple[tuple[str, int], ...],
    ranks: tuple[int, ...],
    local_shapes: tuple[tuple[int, ...], ...],
    shape: tuple[int, ...] | None,
) -> _Alike | None:
    """Return the pieces of a tensor; None if there is any fault."""
    if len(set(ranks)) < len(ranks) or not find_holders(layout, mesh) <= set(ranks) <= set(mesh.ranks):
        return None
    nests = []
    try:
        if shape is None:
            shape = infer_shape(layout, mesh, dict(zip(ranks, local_shapes, strict=True)), sizes=dict(sizes))
        for rank, local_shape in zip(ranks, local_shapes, strict=True):
            part = local_part(layout, mesh, mesh.coordinate(rank), shape, sizes=dict(sizes))
            if part is None or part.sums or part.shape != local_shape:
                return None
            nests.append(part.nests)
    except LayoutError:
        return None
    table = NestTable.from_nests([nest for its in nests for nest in its])
    owner = np.repeat(np.arange(len(nests)), [len(its) for its in nests])
    return _Alike(shape, nests, table, owner, int_array(ranks)[owner])


def place_companion(
    name: str, claimed: Sequence[Claimed], shapes: Mapping[str, tuple[int, ...]], hints: Hints
) -> StoredShard:
    """Return the pieces of a companion, a tensor that follows from another one, such as a weight's scales.

    Args:
        name: the tensor's global name.
        claimed: the ranks' parts.
        shapes: global shapes by name; the other tensor is among them.
        hints: the layout file with the companion's rule.

    Raises:
        LayoutError: not exactly one shape of the other tensor fits the ranks' parts.
        ContradictionError, IncompleteError: as `place_claimed`.
    """
    check_meshes(name, claimed)
    first, claim = claimed[0]
    companion = claim.companion
    assert companion is not None
    fitting: dict[tuple[int, ...], list[LocalPart]] = {}
    failure: LayoutError | None = None
    for base in _base_shapes(name, claimed, shapes, hints):
        try:
            parts = [
                companion_part(companion, c.layout, c.mesh, _coordinate(c, h), base, sizes=dict(c.sizes))
                for h, c in claimed
            ]
        except LayoutError as error:
            failure = error
            continue
        if all(part is not None and part.shape == h.shape for (h, _), part in zip(claimed, parts, strict=True)):
            fitting[base] = [part for part in parts if part is not None]
    # Zero or several shapes: choosing one would be a guess.
    if len(fitting) != 1:
        if failure is not None and not fitting:
            raise prefix_error(failure, name, first)
        raise LayoutError(
            f"{name}: the tensor from which it follows by {companion} has not exactly one possible shape",
            tensor=name,
            rank=first.rank,
            file=first.file,
            got=f"a part of shape {list(first.shape)}; shapes that would fit: {sorted(map(list, fitting))[:4]}",
            want="one tensor, or several of one shape, from which it follows",
            next_step="write rules for that tensor and for this one that match their names only",
        )
    ((base, found),) = fitting.items()
    shape = companion_shape(companion, base)
    nests = [check_part(name, h, c, part, shape).nests for (h, c), part in zip(claimed, found, strict=True)]
    return pieces_of(name, [h for h, _ in claimed], shape, nests)


def _base_shapes(
    name: str, claimed: Sequence[Claimed], shapes: Mapping[str, tuple[int, ...]], hints: Hints
) -> set[tuple[int, ...]]:
    """Return the possible shapes of the tensor from which a companion follows."""
    first, claim = claimed[0]
    companion = claim.companion
    assert companion is not None
    if companion.of is not None:
        assert hints.layouts is not None  # a state's record contains the layout itself
        return base_shapes(companion, hints.layouts, name, shapes)
    blocks = companion.blocks or tuple(companion.factor if i == companion.dim else 1 for i in range(len(first.shape)))
    if len(blocks) != len(first.shape):
        return set()
    shape = _shape_of_dims(claim.layout.tree, claim)
    if shape is not None:
        return {shape}
    if first.global_shape is not None:
        return {tuple(n * block for n, block in zip(first.global_shape, blocks, strict=True))}
    local = {
        h.rank: tuple(n * block for n, block in zip(h.shape, blocks, strict=True))
        for h, c in claimed
        if len(h.shape) == len(blocks) and c.mesh == claim.mesh
    }
    try:
        return {infer_shape(claim.layout, claim.mesh, local, sizes=dict(claim.sizes))}
    except LayoutError as error:
        raise prefix_error(error, name, first) from None


def _shape_of_dims(tree: LayoutTree, claim: Claim) -> tuple[int, ...] | None:
    """Return the shape that the dims determine by themselves; None if a name in them has no number."""
    bound = collect_known_names(tree, axis_lengths(claim.mesh, claim.layout.view_mesh), dict(claim.sizes))
    try:
        return tuple(global_size(dim, bound) for dim in tree.dims)
    except KeyError:
        return None


def place_members(name: str, claimed: Sequence[Claimed], hints: Hints) -> list[StoredShard]:
    """Return the pieces of every member of a flat buffer.

    Args:
        name: the buffer's name.
        claimed: the ranks' parts of the buffer.
        hints: shapes of members whose dims do not determine them.

    Raises:
        LayoutError: a member's shape is unknown.
        ContradictionError, IncompleteError: as `place_claimed`.
    """
    check_meshes(name, claimed)
    claim = claimed[0][1]
    flat = flat_of(claim.layout)
    assert flat is not None
    if claim.pattern is not None:
        raise LayoutError(
            f"{name}: the members of a flat buffer have one name each, but the buffer's name has dims",
            tensor=name,
            got=f"{claim.pattern} = {claim.layout}",
            want="a rule for each buffer",
            next_step="write one rule per buffer name",
        )
    lengths = axis_lengths(claim.mesh, claim.layout.view_mesh)
    shapes = {}
    for member in flat.members:
        try:
            bound = collect_known_names(LayoutTree(member.dims), lengths, dict(claim.sizes))
            shapes[member.name] = hints.shapes.get(member.name) or tuple(global_size(dim, bound) for dim in member.dims)
        except KeyError as error:
            raise LayoutError(
                f"{member.name}: the layout of the buffer {name} does not determine its shape",
                tensor=member.name,
                got=f"no number for {error.args[0]!r} in {claim.layout}",
                want="numbers, or names of [sizes]",
                next_step=f"write numbers into the layout, or give {option('base_model')}",
            ) from None
    parts: list[FlatPart] = []
    for h, c in claimed:
        try:
            part = flat_part(c.layout, c.mesh, _coordinate(c, h), shapes, sizes=dict(c.sizes))
        except LayoutError as error:
            raise prefix_error(error, name, h) from None
        local = None if part is None else LocalPart((part.size,), (), part.sums)
        check_part(name, h, c, local, (sum(map(prod, shapes.values())),))
        assert part is not None
        parts.append(part)
    held = [h for h, _ in claimed]
    return [
        pieces_of(member.name, held, shapes[member.name], [part.members[member.name] for part in parts])
        for member in flat.members
    ]


def _infer_shape(name: str, claimed: Sequence[Claimed]) -> tuple[int, ...]:
    first, claim = claimed[0]
    # One mesh suffices: the others hold replicas, and `_check_part` compares their shapes with this one.
    holders = {h.rank: h for h, c in claimed if c.mesh == claim.mesh}
    try:
        return infer_shape(
            claim.layout, claim.mesh, {rank: h.shape for rank, h in holders.items()}, sizes=dict(claim.sizes)
        )
    except LayoutError as error:
        wrong = prefix_error(error, name, first if error.rank is None else holders[error.rank])
        raise wrong if not claim.is_recorded else _to_contradiction(wrong) from None


def _to_contradiction(error: LayoutError) -> ContradictionError:
    """Return the error for shapes that contradict the ranks' own records, where changing the command does not help."""
    return ContradictionError(
        error.message,
        tensor=error.tensor,
        rank=error.rank,
        file=error.file,
        got=error.got,
        want=error.want,
        next_step="all ranks must come from one run; write the states again",
    )


def _coordinate(claim: Claim, held: HeldTensor) -> Mapping[str, int]:
    return claim.mesh.coordinate(held.rank)
