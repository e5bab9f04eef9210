"""Places the ranks' parts in whole tensors: the second half of every per-rank reader.

A part's place comes from the layout that its rank recorded, else from the caller's layout file, else from the base
model's shapes if only one cut of one dim fits them, in rank order. A note states that assumption: it is wrong where
FSDP2 has cut the parts of tensor parallelism again along their dim. A part without a place is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from xrank.errors import LayoutError, either, option
from xrank.layout.tensor_layout import flat_of
from xrank.plan.source import StatedLayout, StoredShard
from xrank.readers.base import Hints
from xrank.readers.claimed_parts import Claimed
from xrank.readers.claims import Claim, Claims, find_global_name, list_counted_names
from xrank.readers.held_tensor import HeldTensor, pieces_of, row_slice, whole
from xrank.readers.layout_placement import place_claimed, place_companion, place_members
from xrank.words import likewise_text, list_text, ranks_text


@dataclass(frozen=True, slots=True)
class Placement:
    """The pieces of all tensors in the whole."""

    shards: tuple[StoredShard, ...]
    """In the order in which the tensors first occur."""
    assumptions: tuple[tuple[str, str], ...] = ()
    """(Name, description of the cut that base shapes determined)."""
    num_pads: int = 0
    """Number of padding parts, whose name has an index beyond the model's."""
    absent: tuple[str, ...] = ()
    """Names that a name with dims counts but no rank holds, and names left out because their place is unknown."""
    layouts: Mapping[str, Sequence[StatedLayout]] = field(default_factory=dict)
    """Name -> its declared layouts, if the hints ask for them."""

    @property
    def notes(self) -> list[tuple[str, str]]:
        """The report's notes about the assumptions, each with the first of its tensors."""
        names: dict[str, list[str]] = {}
        for name, how in self.assumptions:
            names.setdefault(how, []).append(name)
        return [("assumed-layout", f"{list_text(own, 3)}: {how}") for how, own in names.items()]


_Parts: TypeAlias = list[tuple[HeldTensor, Claim | None]]
"""The ranks' parts of one tensor, with their claims."""


def place_all(held: Mapping[str, Sequence[HeldTensor]], hints: Hints, *, world_size: int) -> Placement:
    """Return where all parts lie in their whole tensors.

    Args:
        held: parts by the rank's own name of the tensor, by rising rank.
        hints: layouts and shapes from the caller.
        world_size: number of ranks that wrote a state.

    Raises:
        ContradictionError, IncompleteError, LayoutError: as `_place`. A layout that is missing for one tensor is often
            missing for more: one LayoutError names all such tensors.
    """
    parts, num_pads, failures = _collect_parts(held, Claims(hints.layouts))
    placed: dict[str, list[StoredShard]] = {}
    assumptions = []
    left_out: list[str] = []
    # Companions follow from another tensor's layout, so they come last, when that tensor's shape is known.
    companions = {name for name, own in parts.items() if _has_companion(own)}
    for name in sorted(parts, key=companions.__contains__):
        own = sorted(parts[name], key=lambda part: part[0].rank)
        shapes = {}
        if name in companions:
            shapes = {shard.name: shard.shape for shards in placed.values() for shard in shards}
        try:
            placed[name], assumption = _place(name, own, hints, world_size, shapes)
        except LayoutError as error:
            if hints.is_left_out is not None and hints.is_left_out(name):
                left_out.append(name)
            else:
                failures.append(error)
            continue
        if assumption:
            assumptions.append((name, assumption))
    if failures:
        raise _join_errors(failures)
    shards = tuple(shard for name in parts for shard in placed.get(name, ()))
    _check_once(shards)
    # Each claim once: its ranks share it, and it counts the names of the whole model.
    counting = dict.fromkeys(claim for own in parts.values() for _, claim in own if claim and claim.pattern)
    absent = dict.fromkeys(name for claim in counting for name in list_counted_names(claim) if name not in parts)
    absent.update(dict.fromkeys(left_out))
    layouts = _collect_layouts(parts) if hints.needs_layouts else {}
    return Placement(shards, tuple(assumptions), num_pads, tuple(absent), layouts)


def _collect_parts(
    held: Mapping[str, Sequence[HeldTensor]], claims: Claims
) -> tuple[dict[str, _Parts], int, list[LayoutError]]:
    """Return the parts by global name, the number of padding parts, and the errors of parts without a name."""
    parts: dict[str, _Parts] = {}
    num_pads = 0
    failures: list[LayoutError] = []
    for local_name, tensors in held.items():
        try:
            for tensor in tensors:
                claim = claims.find(local_name, tensor)
                name = find_global_name(claim, local_name, tensor)
                if name is None:
                    num_pads += 1
                else:
                    parts.setdefault(name, []).append((tensor, claim))
        except LayoutError as error:
            failures.append(error)
    return parts, num_pads, failures


def _has_companion(parts: _Parts) -> bool:
    claims = {id(claim): claim for _, claim in parts if claim is not None}  # ranks share few of them
    return any(claim.companion is not None for claim in claims.values())


def _collect_layouts(parts: Mapping[str, _Parts]) -> dict[str, Sequence[StatedLayout]]:
    """Return the declared layouts of each tensor outside flat buffers, each layout once."""
    # A million ranks share a few objects, so compare identities: comparing two meshes costs as much as they have ranks.
    known: dict[tuple[int, int], StatedLayout] = {}
    found: dict[str, dict[StatedLayout, None]] = {}
    for name, own in parts.items():
        seen: set[tuple[int, int]] = set()
        for _, claim in own:
            if claim is None or flat_of(claim.layout) is not None:
                continue
            key = id(claim.layout), id(claim.mesh)
            if key in seen:
                continue
            seen.add(key)
            stated = known.get(key)
            if stated is None or (stated.pattern, stated.companion) != (claim.pattern, claim.companion):
                stated = known[key] = StatedLayout(claim.layout, claim.mesh, claim.pattern, claim.companion)
            found.setdefault(name, {})[stated] = None
    return {name: tuple(stated) for name, stated in found.items()}


def _join_errors(errors: Sequence[LayoutError]) -> LayoutError:
    """Return the first error with the names of the tensors that the others concern."""
    errors[0].about(got=likewise_text([error.tensor or "?" for error in errors[1:]]).removeprefix("; "))
    return errors[0]


def _check_once(shards: Sequence[StoredShard]) -> None:
    seen = set()
    for shard in shards:
        if shard.name in seen:
            raise LayoutError(
                f"{shard.name}: it lies in a flat buffer, and also in another one or by itself",
                tensor=shard.name,
                want="each tensor in one place",
                next_step="save only one of the two",
            )
        seen.add(shard.name)


def _place(
    name: str, parts: _Parts, hints: Hints, world_size: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[StoredShard], str | None]:
    """Return a tensor's pieces in the whole, and the assumption, in words, if base shapes determined them.

    A flat buffer gives the pieces of several tensors.

    Args:
        name: the tensor's global name.
        parts: the ranks' parts and claims, by rising rank.
        hints: layouts and shapes from the caller.
        world_size: number of ranks that wrote a state.
        shapes: global shapes of tensors from which this one may follow.

    Raises:
        ContradictionError: ranks disagree about dtype, global shape, layout or mesh, or a local shape does not fit.
        IncompleteError: a rank of the tensor's mesh holds no part of it.
        LayoutError: it is unknown how the tensor was cut.
    """
    held = [h for h, _ in parts]
    _check_equal(name, "dtype", {h.rank: h.dtype for h in held}, held)
    claimed = [(h, claim) for h, claim in parts if claim is not None]
    # Ranks that differ in what they record come from two programs or runs, so no rule of a file may fill the gap.
    if claimed and (len(claimed) < len(held) or len({claim.is_recorded for _, claim in claimed}) > 1):
        recording = [(h, claim) for h, claim in claimed if claim.is_recorded]
        without = [h for h in held if h.layout is None]
        raise without[0].contradiction(
            name,
            "some ranks recorded a layout and some did not",
            got=f"no layout on {ranks_text(h.rank for h in without)}",
            want=f"{recording[0][1]}, as on {ranks_text(h.rank for h, _ in recording)}",
            next_step="let all ranks write their states in the same way",
        )
    if claimed:
        return _place_claimed(name, claimed, hints, world_size, shapes), None
    if world_size == 1:
        return [pieces_of(name, held, held[0].shape, [whole(held[0].shape)])], None
    shape = _find_base_shape(name, hints)
    if shape is not None:
        shard, assumption = _place_by_base_shape(name, held, shape)
        return [shard], assumption
    dims = ", ".join(("d0/tp", *(f"d{dim}" for dim in range(1, len(held[0].shape))))[: len(held[0].shape)])
    raise LayoutError(
        f"{name}: no layout is recorded, so it is unknown how it is cut over {ranks_text(h.rank for h in held)}",
        tensor=name,
        rank=held[0].rank,
        file=held[0].file,
        got=f"plain tensors of shape {_shapes_text(held)}",
        want=f"a recorded layout, a rule of {option('layouts')}, or the tensor's whole shape in a base model",
        next_step=either(
            "write DTensors, or their layouts beside them",
            f"give {option('layouts', metavar='FILE')} with lines such as [mesh], "
            f'grid = "tp={world_size}", [tensors], "{name}" = "[{dims}]"',
            f"give {option('base_model', metavar='DIR')}",
        ),
    )


def _find_base_shape(name: str, hints: Hints) -> tuple[int, ...] | None:
    """Return the base model's shape of a tensor, or of the one that it is tied to."""
    target = hints.layouts.aliases.get(name) if hints.layouts is not None else None
    if target is None and hints.tied_to is not None:
        target = hints.tied_to(name)
    return hints.shapes.get(name) or hints.shapes.get(target or name)


def _place_claimed(
    name: str, claimed: Sequence[Claimed], hints: Hints, world_size: int, shapes: Mapping[str, tuple[int, ...]]
) -> list[StoredShard]:
    first, claim = claimed[0]
    _check_equal(name, "global shape", {h.rank: h.global_shape for h, _ in claimed}, [h for h, _ in claimed])
    if not claim.is_recorded:
        _check_mesh_of_file(name, claimed, world_size)
    if claim.companion is not None:
        return [place_companion(name, claimed, shapes, hints)]
    if flat_of(claim.layout) is not None:
        return place_members(name, claimed, hints)
    # A recorded shape does not need the base model, which is compared with it afterwards.
    shape = first.global_shape if claim.is_recorded else hints.shapes.get(name) or first.global_shape
    return [place_claimed(name, claimed, shape)]


def _check_mesh_of_file(name: str, claimed: Sequence[Claimed], world_size: int) -> None:
    mesh = claimed[0][1].mesh
    ranks = [h.rank for h, _ in claimed]
    outside = [rank for rank in ranks if rank not in mesh.ranks]
    if outside or max(mesh.ranks) >= world_size:
        raise LayoutError(
            f"{name}: the layout file's mesh is not that of the {world_size} ranks that wrote a state",
            tensor=name,
            rank=outside[0] if outside else None,
            got=f"{mesh.grid}, {ranks_text(mesh.ranks)}",
            want=f"a mesh with {ranks_text(ranks)}, of {world_size}",
            next_step="correct the mesh of the layout file",
        )


def _shapes_text(held: Sequence[HeldTensor]) -> str:
    return " and ".join(str(list(shape)) for shape in sorted({h.shape for h in held}))


def _check_equal(name: str, what: str, values: Mapping[int, object], held: Sequence[HeldTensor]) -> None:
    first = held[0]
    for h in held:
        if values[h.rank] != values[first.rank]:
            raise h.contradiction(
                name,
                f"ranks {first.rank} and {h.rank} disagree about its {what}",
                got=f"{values[h.rank]} on rank {h.rank}",
                want=f"{values[first.rank]}, as on rank {first.rank}",
                next_step="all ranks must come from one run and step; write the states again",
            )


def _place_by_base_shape(
    name: str, held: Sequence[HeldTensor], shape: tuple[int, ...]
) -> tuple[StoredShard, str | None]:
    """Place parts by the only cut that fits the whole shape: all whole, or along one dim in rank order."""
    ranks = ranks_text(h.rank for h in held)
    if all(h.shape == shape for h in held):
        assumption = f"whole on {ranks}" if len(held) > 1 else None
        return pieces_of(name, held, shape, [whole(shape) for _ in held]), assumption
    if all(len(h.shape) == len(shape) for h in held):
        dims = [d for d in range(len(shape)) if any(h.shape[d] != shape[d] for h in held)]
        # Two cut dims would be a grid of ranks, in an order that shapes do not tell.
        if len(dims) == 1 and sum(h.shape[dims[0]] for h in held) == shape[dims[0]]:
            dim, start, nests = dims[0], 0, []
            for h in held:
                nests.append(row_slice(shape, dim, start, h.shape[dim]))
                start += h.shape[dim]
            # Ranks that FSDP2 and tensor parallelism cut along one dim have the same shapes in another order.
            how = f"cut along dim {dim} over {ranks} in rank order; where two axes of the mesh cut it, only a layout "
            return pieces_of(name, held, shape, nests), how + "file gives their order"
    raise LayoutError(
        f"{name}: no layout is recorded, and more than one cut, or none, fits the base model's shape",
        tensor=name,
        rank=held[0].rank,
        file=held[0].file,
        got=f"shapes {_shapes_text(held)} on {ranks}",
        want=f"parts of {list(shape)}, whole or cut along one dim",
        next_step=f"give {option('layouts', metavar='FILE')} with this tensor's layout",
    )
