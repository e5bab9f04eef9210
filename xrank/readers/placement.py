"""From what each rank holds of a tensor to where its pieces lie in the whole: the second half of every per-rank reader.

A piece's place comes from the layout that the rank recorded, else from the caller's layout file, else from the base
model's shapes where they leave one way only. What cannot be placed is refused; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from xrank.errors import ContradictionError, IncompleteError, LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.flat import flat_of
from xrank.layout.local_part import holds, local_part
from xrank.layout.shape_inference import infer_shape
from xrank.plan.planner import ranks_text
from xrank.plan.source import StoredShard
from xrank.readers.base import Hints
from xrank.readers.held_tensor import HeldTensor, pieces_of, row_slice, whole

__all__ = ["place"]


def place(name: str, held: Sequence[HeldTensor], hints: Hints, *, world_size: int) -> tuple[StoredShard, str | None]:
    """Return a tensor's pieces in the whole, and, where base shapes decided, the assumption in words.

    Args:
        name: the tensor's name.
        held: what ranks hold of it, by rising rank.
        hints: layouts and shapes from outside.
        world_size: number of ranks that left a state.

    Raises:
        ContradictionError: ranks disagree about dtype, global shape, layout or mesh, or a local shape does not fit.
        IncompleteError: a rank of the tensor's mesh holds nothing of it.
        LayoutError: how the tensor was cut is not known.
    """
    _check_equal(name, "dtype", {h.rank: h.dtype for h in held}, held)
    try:
        given = hints.layouts[name] if hints.layouts is not None else None
    except LayoutError as error:
        error.next_step = error.next_step or "let the patterns of the layout file tell the names apart"
        raise
    recorded = [h for h in held if h.layout is not None]
    if recorded and len(recorded) < len(held):
        without = [h for h in held if h.layout is None]
        raise ContradictionError(
            f"{name}: some ranks recorded a layout and some did not",
            tensor=name,
            rank=without[0].rank,
            file=without[0].file,
            got=f"no layout on ranks {ranks_text([h.rank for h in without])}",
            want=f"{recorded[0].layout}, as on ranks {ranks_text([h.rank for h in recorded])}",
            next_step="let all ranks write their states in the same way",
        )
    if recorded:
        if given is not None:
            raise LayoutError(
                f"{name}: its ranks recorded a layout, and the layout file gives one too",
                tensor=name,
                got=str(given),
                want=str(recorded[0].layout),
                next_step="take the tensor's rule out of the layout file",
            )
        shape = _common_shape(name, held)
        placed = [(h, _layout_of(name, h), _mesh_of(name, h)) for h in held]
        return _by_layout(name, placed, shape), None
    if given is not None:
        return _by_given_layout(name, given, held, hints, world_size), None
    if world_size == 1:
        return pieces_of(name, held, held[0].shape, [whole(h.shape) for h in held]), None
    if name in hints.shapes:
        return _by_base_shape(name, held, hints.shapes[name])
    raise LayoutError(
        f"{name}: no layout is recorded, so how ranks {ranks_text([h.rank for h in held])} share it is not known",
        tensor=name,
        rank=held[0].rank,
        file=held[0].file,
        got=f"plain tensors of shape {_shapes_text(held)}",
        want="a recorded layout, a rule of --layout, or the tensor's whole shape in a base model",
        next_step="write DTensors or give layouts= when writing, or run again with --layout FILE or --base-model DIR",
    )


def _shapes_text(held: Sequence[HeldTensor]) -> str:
    return " and ".join(str(list(shape)) for shape in sorted({h.shape for h in held}))


def _check_equal(name: str, what: str, values: Mapping[int, object], held: Sequence[HeldTensor]) -> None:
    first = held[0]
    for h in held:
        if values[h.rank] != values[first.rank]:
            raise ContradictionError(
                f"{name}: ranks {first.rank} and {h.rank} disagree about its {what}",
                tensor=name,
                rank=h.rank,
                file=h.file,
                got=f"{values[h.rank]} on rank {h.rank}",
                want=f"{values[first.rank]}, as on rank {first.rank}",
                next_step="all ranks must come from one run and step; write the states again",
            )


def _common_shape(name: str, held: Sequence[HeldTensor]) -> tuple[int, ...] | None:
    _check_equal(name, "global shape", {h.rank: h.global_shape for h in held}, held)
    return held[0].global_shape


@lru_cache(maxsize=4096)
def _parsed(layout: str) -> TensorLayout:
    """Return the same object for equal texts: a model has a handful of layouts."""
    return TensorLayout.parse(layout)


def _layout_of(name: str, held: HeldTensor) -> TensorLayout:
    try:
        return _parsed(held.layout or "")
    except LayoutError as error:
        raise _named(error, name, held) from None


def _mesh_of(name: str, held: HeldTensor) -> DeviceMesh:
    if held.mesh is None or held.rank not in held.mesh:
        got = "no mesh" if held.mesh is None else f"a mesh of ranks {ranks_text(held.mesh.ranks)}"
        raise ContradictionError(
            f"{name}: the mesh that rank {held.rank} recorded is not one of its own",
            tensor=name,
            rank=held.rank,
            file=held.file,
            got=got,
            want=f"a mesh with rank {held.rank}",
            next_step="let the rank write its state again",
        )
    return held.mesh


def _by_layout(
    name: str,
    placed: Sequence[tuple[HeldTensor, TensorLayout, DeviceMesh]],
    shape: tuple[int, ...] | None,
    sizes: Mapping[str, int] | None = None,
) -> StoredShard:
    """Place every rank's part by its own layout and mesh; several meshes of one tensor are replicas of each other."""
    for h, layout, _ in placed:
        if flat_of(layout) is not None:
            raise LayoutError(
                f"{name}: it is a flat buffer of several tensors, which are not taken apart yet",
                tensor=name,
                rank=h.rank,
                file=h.file,
                got=str(layout),
                want="the layout of one tensor",
                next_step="save the tensors one by one",
            )
    _check_meshes(name, placed)
    if shape is None:
        first, layout, mesh = placed[0]
        holders = {h.rank: h for h, _, m in placed if m == mesh}
        try:
            shape = infer_shape(layout, mesh, {rank: h.shape for rank, h in holders.items()}, sizes=sizes)
        except LayoutError as error:
            named = _named(error, name, first if error.rank is None else holders[error.rank])
            raise named if first.layout is None else _contradiction(named) from None
    nests = []
    for h, layout, mesh in placed:
        try:
            part = local_part(layout, mesh, mesh.coordinate(h.rank), shape, sizes=sizes)
        except LayoutError as error:
            raise _named(error, name, h) from None
        if part is None:
            raise ContradictionError(
                f"{name}: rank {h.rank} holds a part, and the layout says that it holds none",
                tensor=name,
                rank=h.rank,
                file=h.file,
                got=f"a part of shape {list(h.shape)}",
                want=f"none, by {layout} on {mesh.grid}",
                next_step="check that the layout and mesh are those of the run that wrote the state",
            )
        if part.sums:
            raise LayoutError(
                f"{name}: its ranks hold addends of a sum over {', '.join(part.sums)}, which are no values to copy",
                tensor=name,
                rank=h.rank,
                file=h.file,
                got=str(layout),
                want="parts or replicas",
                next_step="reduce the tensor before it is saved",
            )
        if part.shape != h.shape:
            raise ContradictionError(
                f"{name}: rank {h.rank}'s part does not have the shape that its layout gives it",
                tensor=name,
                rank=h.rank,
                file=h.file,
                got=str(list(h.shape)),
                want=f"{list(part.shape)}, by {layout} of {list(shape)} on {mesh.grid}",
                next_step="check that the layout and mesh are those of the run that wrote the state",
            )
        nests.append(part.nests)
    return pieces_of(name, [h for h, _, _ in placed], shape, nests)


def _named(error: LayoutError, name: str, held: HeldTensor) -> LayoutError:
    error.message = f"{name}: {error.message}"
    error.tensor, error.rank, error.file = name, held.rank, held.file
    mend = "correct the layout file" if held.layout is None else f"let rank {held.rank} write its state again"
    error.next_step = error.next_step or mend
    return error


def _contradiction(error: LayoutError) -> ContradictionError:
    """Return the error for shapes that contradict layouts which the ranks themselves recorded: no option is wrong."""
    return ContradictionError(
        error.message,
        tensor=error.tensor,
        rank=error.rank,
        file=error.file,
        got=error.got,
        want=error.want,
        next_step="all ranks must come from one run; write the states again",
    )


def _check_meshes(name: str, placed: Sequence[tuple[HeldTensor, TensorLayout, DeviceMesh]]) -> None:
    """Check that meshes are equal or disjoint, that one mesh has one layout, and that all its ranks are there."""
    holders = {h.rank: h for h, _, _ in placed}
    claims: dict[int, tuple[HeldTensor, TensorLayout, DeviceMesh]] = {}
    for claim in placed:
        h, layout, mesh = claim
        # A mesh is looked at rank by rank when its first rank comes; the others only find themselves claimed by it.
        for rank in mesh.ranks if h.rank not in claims else (h.rank,):
            other, other_layout, other_mesh = claims.setdefault(rank, claim)
            if other is not h and (other_mesh, other_layout) != (mesh, layout):
                raise ContradictionError(
                    f"{name}: ranks {other.rank} and {h.rank} disagree about its layout or mesh",
                    tensor=name,
                    rank=h.rank,
                    file=h.file,
                    got=f"{layout} on {mesh.grid}, ranks {_in_order(mesh.ranks)}",
                    want=f"{other_layout} on {other_mesh.grid}, ranks {_in_order(other_mesh.ranks)}",
                    next_step="all ranks must come from one run; write the states again",
                )
            if rank not in holders and holds(layout, mesh, mesh.coordinate(rank)):
                raise IncompleteError(
                    f"{name}: rank {rank} of its mesh holds nothing of it",
                    tensor=name,
                    rank=rank,
                    got=f"parts on ranks {ranks_text(list(holders))}",
                    want=f"parts on ranks {ranks_text(mesh.ranks)}",
                    next_step=f"let rank {rank} write its state again, then run the same command",
                )


def _in_order(ranks: Sequence[int]) -> str:
    rising = all(a < b for a, b in pairwise(ranks))
    return ranks_text(ranks) if rising else ", ".join(map(str, ranks))


def _by_given_layout(
    name: str, layout: TensorLayout, held: Sequence[HeldTensor], hints: Hints, world_size: int
) -> StoredShard:
    assert hints.layouts is not None
    rule = hints.layouts.rule_for(name)
    if rule is not None and hints.layouts.name_of(rule) is not None:
        # A rank's index in a name is its own: parts of one name would be taken for parts of one tensor.
        raise LayoutError(
            f"{name}: its rule has dims in the name, which a gather does not count yet",
            tensor=name,
            rank=held[0].rank,
            file=held[0].file,
            got=f"rule {rule!r}",
            want="a pattern for names that are the same on all ranks",
            next_step="save the tensors under their global names",
        )
    mesh = layout.device_mesh or hints.layouts.device_mesh
    if mesh is None:
        raise LayoutError(
            f"{name}: the layout file has a rule for it but no [mesh]",
            tensor=name,
            next_step='add a table like [mesh] with grid = "dp=2 tp=2" to the layout file',
        )
    outside = [h.rank for h in held if h.rank not in mesh.ranks]
    if outside or max(mesh.ranks) >= world_size:
        raise LayoutError(
            f"{name}: the layout file's mesh is not that of the {world_size} ranks that left a state",
            tensor=name,
            rank=outside[0] if outside else None,
            got=f"{mesh.grid}, ranks {ranks_text(mesh.ranks)}",
            want=f"a mesh with ranks {ranks_text([h.rank for h in held])}, of {world_size}",
            next_step="correct the mesh of the layout file",
        )
    shape = hints.shapes.get(name) or _common_shape(name, held)
    return _by_layout(name, [(h, layout, mesh) for h in held], shape, hints.layouts.sizes)


def _by_base_shape(name: str, held: Sequence[HeldTensor], shape: tuple[int, ...]) -> tuple[StoredShard, str | None]:
    """Place parts by the one way that the whole shape leaves: all whole, or cut along one dim in rank order."""
    ranks = ranks_text([h.rank for h in held])
    if all(h.shape == shape for h in held):
        assumption = f"{name}: whole on ranks {ranks}" if len(held) > 1 else None
        return pieces_of(name, held, shape, [whole(shape) for _ in held]), assumption
    if all(len(h.shape) == len(shape) for h in held):
        dims = [d for d in range(len(shape)) if any(h.shape[d] != shape[d] for h in held)]
        if len(dims) == 1 and sum(h.shape[dims[0]] for h in held) == shape[dims[0]]:
            dim, start, nests = dims[0], 0, []
            for h in held:
                nests.append(row_slice(shape, dim, start, h.shape[dim]))
                start += h.shape[dim]
            return pieces_of(name, held, shape, nests), f"{name}: cut along dim {dim} over ranks {ranks} in rank order"
    raise LayoutError(
        f"{name}: no layout is recorded, and the base model's shape leaves no single way to put its parts together",
        tensor=name,
        rank=held[0].rank,
        file=held[0].file,
        got=f"shapes {_shapes_text(held)} on ranks {ranks}",
        want=f"parts of {list(shape)}, whole or cut along one dim",
        next_step="run again with --layout FILE that gives this tensor's layout",
    )
