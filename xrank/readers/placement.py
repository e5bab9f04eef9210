"""From what each rank holds of a tensor to where its pieces lie in the whole: the second half of every per-rank reader.

A piece's place comes from the layout that the rank recorded, else from the caller's layout file, else from the base
model's shapes where they leave one way only. What cannot be placed is refused; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xrank.errors import LayoutError, UsageError, XrankError
from xrank.faces import either, option
from xrank.layout.tensor_layout import flat_of
from xrank.plan.source import StatedLayout, StoredShard
from xrank.readers.base import Hints
from xrank.readers.claims import Claim, Claims, claimed_name, counted_names
from xrank.readers.held_tensor import HeldTensor, pieces_of, row_slice, whole
from xrank.readers.layout_placement import Claimed, place_claimed, place_companion, place_members
from xrank.words import likewise_text, list_text, ranks_text

__all__ = ["Placement", "place", "place_all"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Every tensor's pieces in the whole."""

    shards: tuple[StoredShard, ...]
    """In the order in which the tensors were first met."""
    assumptions: tuple[tuple[str, str], ...] = ()
    """(Name, what base shapes decided of it, in words)."""
    num_pads: int = 0
    """Parts that stand for padding: an index of a name beyond the model's."""
    absent: tuple[str, ...] = ()
    """Names that a name with dims counts, and no rank holds; and those left out whose place nothing says."""
    layouts: Mapping[str, Sequence[StatedLayout]] = field(default_factory=dict)
    """Name -> how it is said to be cut, where the hints ask for it."""

    @property
    def notes(self) -> list[tuple[str, str]]:
        """What a report says of the assumptions: each once, with the first of the tensors that it is made of."""
        names: dict[str, list[str]] = {}
        for name, how in self.assumptions:
            names.setdefault(how, []).append(name)
        return [("assumed-layout", f"{list_text(own, 3)}: {how}") for how, own in names.items()]


@dataclass(slots=True)
class _Parts:
    """What ranks hold of one tensor, with the claims; by rising rank."""

    held: list[HeldTensor] = field(default_factory=list)
    claims: list[Claim | None] = field(default_factory=list)


def place_all(held: Mapping[str, Sequence[HeldTensor]], hints: Hints, *, world_size: int) -> Placement:
    """Return where all parts lie in their whole tensors.

    Args:
        held: the ranks' own name of a tensor -> what they hold under it, by rising rank.
        hints: layouts and shapes from outside.
        world_size: number of ranks that left a state.

    Raises:
        ContradictionError, IncompleteError, LayoutError: as `place`. A layout that is missing for one tensor is missing
            for more: all such tensors are named at once.
    """
    claims = Claims(hints.layouts)
    parts: dict[str, _Parts] = {}
    num_pads = 0
    unplaced: list[XrankError] = []
    left_out: list[str] = []
    for local_name, tensors in held.items():
        try:
            for tensor in tensors:
                claim = claims.of(local_name, tensor)
                name = claimed_name(claim, local_name, tensor)
                if name is None:
                    num_pads += 1
                    continue
                own = parts.setdefault(name, _Parts())
                own.held.append(tensor)
                own.claims.append(claim)
        except LayoutError as error:
            unplaced.append(error)
    placed: dict[str, list[StoredShard]] = {}
    assumptions = []
    # What follows from another tensor's layout comes last, when that tensor's shape is known.
    for name in sorted(parts, key=lambda name: any(c is not None and c.companion for c in parts[name].claims)):
        own = parts[name]
        order = sorted(range(len(own.held)), key=lambda i: own.held[i].rank)
        try:
            placed[name], assumption = place(
                name,
                [own.held[i] for i in order],
                [own.claims[i] for i in order],
                hints,
                world_size=world_size,
                shapes={shard.name: shard.shape for shards in placed.values() for shard in shards}
                if any(c is not None and c.companion for c in own.claims)
                else {},
            )
        except XrankError as error:
            if isinstance(error, UsageError) or error.exit_code != 2:
                raise
            if hints.is_left_out is not None and hints.is_left_out(name):
                left_out.append(name)
            else:
                unplaced.append(error)
            continue
        if assumption:
            assumptions.append((name, assumption))
    if unplaced:
        raise _joined(unplaced)
    shards = tuple(shard for name in parts for shard in placed.get(name, ()))
    _check_once(shards)
    counting = dict.fromkeys(claim for own in parts.values() for claim in own.claims if claim and claim.pattern)
    absent = dict.fromkeys(name for claim in counting for name in counted_names(claim) if name not in parts)
    absent.update(dict.fromkeys(left_out))
    layouts = _stated({name: own.claims for name, own in parts.items()}) if hints.needs_layouts else {}
    return Placement(shards, tuple(assumptions), num_pads, tuple(absent), layouts)


def _stated(claims: Mapping[str, Sequence[Claim | None]]) -> dict[str, Sequence[StatedLayout]]:
    """Return what is said of each tensor that is none of a flat buffer's, each layout once."""
    # Ranks have the same few objects by the million; to compare two meshes costs as much as they have ranks.
    known: dict[tuple[int, int], StatedLayout] = {}
    found: dict[str, dict[StatedLayout, None]] = {}
    for name, own in claims.items():
        seen: set[tuple[int, int]] = set()
        for claim in own:
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


def _joined(errors: Sequence[XrankError]) -> XrankError:
    errors[0].about(got=likewise_text([error.tensor or "?" for error in errors[1:]]).removeprefix("; "))
    return errors[0]


def _check_once(shards: Sequence[StoredShard]) -> None:
    seen = set()
    for shard in shards:
        if shard.name in seen:
            raise LayoutError(
                f"{shard.name}: it lies in a flat buffer, and in another one or by itself, too",
                tensor=shard.name,
                want="each tensor in one place",
                next_step="save one of the two",
            )
        seen.add(shard.name)


def place(
    name: str,
    held: Sequence[HeldTensor],
    claims: Sequence[Claim | None],
    hints: Hints,
    *,
    world_size: int,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[list[StoredShard], str | None]:
    """Return a tensor's pieces in the whole, and, where base shapes decided, the assumption in words.

    A flat buffer has several tensors' pieces.

    Args:
        name: the tensor's global name.
        held: what ranks hold of it, by rising rank.
        claims: how each of them says that it is cut.
        hints: layouts and shapes from outside.
        world_size: number of ranks that left a state.
        shapes: global shapes of tensors that it may follow from.

    Raises:
        ContradictionError: ranks disagree about dtype, global shape, layout or mesh, or a local shape does not fit.
        IncompleteError: a rank of the tensor's mesh holds nothing of it.
        LayoutError: how the tensor was cut is not known.
    """
    _check_equal(name, "dtype", {h.rank: h.dtype for h in held}, held)
    claimed = [(h, claim) for h, claim in zip(held, claims, strict=True) if claim is not None]
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
        return _place_claimed(name, claimed, hints, world_size, shapes or {}), None
    if world_size == 1:
        return [pieces_of(name, held, held[0].shape, [whole(held[0].shape)])], None
    shape = _told_shape(name, hints)
    if shape is not None:
        shard, assumption = _by_base_shape(name, held, shape)
        return [shard], assumption
    raise LayoutError(
        f"{name}: no layout is recorded, so how it is cut over {ranks_text(h.rank for h in held)} is not known",
        tensor=name,
        rank=held[0].rank,
        file=held[0].file,
        got=f"plain tensors of shape {_shapes_text(held)}",
        want=f"a recorded layout, a rule of {option('layouts')}, or the tensor's whole shape in a base model",
        next_step=either(
            "write DTensors, or their layouts beside them",
            f"give {option('layouts', metavar='FILE')}",
            f"give {option('base_model', metavar='DIR')}",
        ),
    )


def _told_shape(name: str, hints: Hints) -> tuple[int, ...] | None:
    """Return the whole shape that the base model tells of a tensor, or of the one that it is tied to."""
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
    # What ranks recorded stands by itself; a base model is compared with it afterwards.
    shape = first.global_shape if claim.is_recorded else hints.shapes.get(name) or first.global_shape
    return [place_claimed(name, claimed, shape)]


def _check_mesh_of_file(name: str, claimed: Sequence[Claimed], world_size: int) -> None:
    mesh = claimed[0][1].mesh
    ranks = [h.rank for h, _ in claimed]
    outside = [rank for rank in ranks if rank not in mesh.ranks]
    if outside or max(mesh.ranks) >= world_size:
        raise LayoutError(
            f"{name}: the layout file's mesh is not that of the {world_size} ranks that left a state",
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


def _by_base_shape(name: str, held: Sequence[HeldTensor], shape: tuple[int, ...]) -> tuple[StoredShard, str | None]:
    """Place parts by the one way that the whole shape leaves: all whole, or cut along one dim in rank order."""
    ranks = ranks_text(h.rank for h in held)
    if all(h.shape == shape for h in held):
        assumption = f"whole on {ranks}" if len(held) > 1 else None
        return pieces_of(name, held, shape, [whole(shape) for _ in held]), assumption
    if all(len(h.shape) == len(shape) for h in held):
        dims = [d for d in range(len(shape)) if any(h.shape[d] != shape[d] for h in held)]
        if len(dims) == 1 and sum(h.shape[dims[0]] for h in held) == shape[dims[0]]:
            dim, start, nests = dims[0], 0, []
            for h in held:
                nests.append(row_slice(shape, dim, start, h.shape[dim]))
                start += h.shape[dim]
            return pieces_of(name, held, shape, nests), f"cut along dim {dim} over {ranks} in rank order"
    raise LayoutError(
        f"{name}: no layout is recorded, and the base model's shape leaves no single way to put its parts together",
        tensor=name,
        rank=held[0].rank,
        file=held[0].file,
        got=f"shapes {_shapes_text(held)} on {ranks}",
        want=f"parts of {list(shape)}, whole or cut along one dim",
        next_step=f"give {option('layouts', metavar='FILE')} with this tensor's layout",
    )
