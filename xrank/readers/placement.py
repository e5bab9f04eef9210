"""Places the ranks' parts in whole tensors: the second half of every per-rank reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from math import prod
from typing import TypeAlias

import numpy as np
from msgspec import Struct, field

from xrank.errors import ContradictionError, LayoutError, either, option
from xrank.layout.layout_map import base_shapes, companion_part, companion_shape
from xrank.layout.local_part import LocalPart, collect_known_names, global_size, holds, infer_shape, local_part
from xrank.layout.mesh import DeviceMesh
from xrank.layout.mesh_parts import FlatPart, flat_part
from xrank.layout.nest_table import IntArray, NestTable, int_array
from xrank.layout.nests import Nest, row_major
from xrank.layout.notation import LayoutTree
from xrank.layout.stored_model import NO_CHECKSUM, StatedLayout, StoredModel, StoredShard
from xrank.layout.tensor_layout import TensorLayout, axis_lengths, flat_of
from xrank.readers.base import Hints
from xrank.readers.claims import (
    Claim,
    Claimed,
    Claims,
    HeldTensor,
    check_meshes,
    check_part,
    find_global_name,
    list_counted_names,
    pieces_of,
    prefix_error,
    row_slice,
    whole,
)
from xrank.readers.records import Subject
from xrank.storage.regular_file import open_regular
from xrank.words import likewise_text, list_text, ranks_text

_BLOCK_NBYTES = 4096
_CHUNK_NBYTES = 1 << 20
_MAX_ELEMENT_NBYTES = 8
_CAUSE = (
    "a crash leaves this if the data had not reached the disk. The format records no checksums, so these may also be "
    "tensors of zeros: compare the file with another copy, or the tensors with an earlier step"
)


def note_zero_tails(model: StoredModel) -> Iterator[tuple[str, str]]:
    """Yield a note on each file that ends in whole blocks of zeros, where no checksum covers them.

    The last block of each file is read, and more only where that is zeros.
    """
    records = model.records
    bare = records.crc32 == NO_CHECKSUM
    ends = np.zeros(len(model.files), dtype=np.int64)
    np.maximum.at(ends, records.file[bare], (records.offset + records.stored_nbytes)[bare])
    for number in np.flatnonzero(ends).tolist():
        path, end = model.files[number].path, int(ends[number])
        start = _find_zeros(path, end)
        border = -(-start // _BLOCK_NBYTES) * _BLOCK_NBYTES
        # The last element before the border may end in zero bytes.
        if end - border >= _BLOCK_NBYTES and border - start < _MAX_ELEMENT_NBYTES:
            lost = f"{path} ends in {end - border:,} bytes of zeros, which begin at a block's border"
            yield "zero-blocks", f"{lost}: {_CAUSE}"


def _find_zeros(path: str, end: int) -> int:
    """Return where the zeros begin that a file contains before `end`."""
    with open_regular(path) as file:
        low = max(0, (end - 1) // _BLOCK_NBYTES * _BLOCK_NBYTES)
        while True:
            content = file.read(low, end - low).rstrip(b"\0")
            if content or low == 0:
                return low + len(content)
            end, low = low, max(0, low - _CHUNK_NBYTES)


def place_claimed(name: str, claimed: Sequence[Claimed], shape: tuple[int, ...] | None) -> StoredShard:
    """Return a tensor's pieces. If it has several meshes, they hold replicas of each other."""
    held, first = [h for h, _ in claimed], claimed[0][1]
    # Ranks that declare one layout on one mesh, and one name, share the work.
    own_claim = (None, first.layout, first.mesh, first.sizes)
    if first.pattern is None and all(
        claim is first or (claim.pattern, claim.layout, claim.mesh, claim.sizes) == own_claim for _, claim in claimed
    ):
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
            part = local_part(claim.layout, claim.mesh, claim.mesh.coordinate(h.rank), shape, sizes=dict(claim.sizes))
        except LayoutError as error:
            raise prefix_error(error, name, h) from None
        nests.append(check_part(name, h, claim, part, shape).nests)
    return pieces_of(name, held, shape, nests)


class _Alike(Struct, frozen=True, eq=False):
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
    holders = {rank for rank in mesh.ranks if holds(layout, mesh, mesh.coordinate(rank))}
    if len(set(ranks)) < len(ranks) or not holders <= set(ranks) <= set(mesh.ranks):
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
    """Return the pieces of a companion, a tensor that follows from another one, such as a weight's scales."""
    check_meshes(name, claimed)
    first, claim = claimed[0]
    companion = claim.companion
    assert companion is not None
    fitting: dict[tuple[int, ...], list[LocalPart]] = {}
    failure: LayoutError | None = None
    for base in _base_shapes(name, claimed, shapes, hints):
        try:
            parts = [
                companion_part(companion, c.layout, c.mesh, c.mesh.coordinate(h.rank), base, sizes=dict(c.sizes))
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
        raise first.of(name).layout(
            f"the tensor from which it follows by {companion} has not exactly one possible shape",
            f"a part of shape {list(first.shape)}; shapes that would fit: {sorted(map(list, fitting))[:4]}",
            "one tensor, or several of one shape, from which it follows",
            "write rules for that tensor and for this one that match their names only",
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
    bound = collect_known_names(claim.layout.tree, axis_lengths(claim.mesh, claim.layout.view_mesh), dict(claim.sizes))
    with suppress(KeyError):  # a name without a number
        return {tuple(global_size(dim, bound) for dim in claim.layout.tree.dims)}
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


def place_members(name: str, claimed: Sequence[Claimed], hints: Hints) -> list[StoredShard]:
    """Return the pieces of every member of a flat buffer."""
    check_meshes(name, claimed)
    claim = claimed[0][1]
    flat = flat_of(claim.layout)
    assert flat is not None
    if claim.pattern is not None:
        problem = "the members of a flat buffer have one name each, but the buffer's name has dims"
        got, want = f"{claim.pattern} = {claim.layout}", "a rule for each buffer"
        raise Subject(name).layout(problem, got, want, "write one rule per buffer name")
    lengths = axis_lengths(claim.mesh, claim.layout.view_mesh)
    shapes = {}
    for member in flat.members:
        try:
            bound = collect_known_names(LayoutTree(member.dims), lengths, dict(claim.sizes))
            shapes[member.name] = hints.shapes.get(member.name) or tuple(global_size(dim, bound) for dim in member.dims)
        except KeyError as error:
            raise Subject(member.name).layout(
                f"the layout of the buffer {name} does not determine its shape",
                f"no number for {error.args[0]!r} in {claim.layout}",
                "numbers, or names of [sizes]",
                f"write numbers into the layout, or give {option('base_model')}",
            ) from None
    parts: list[FlatPart] = []
    for h, c in claimed:
        try:
            part = flat_part(c.layout, c.mesh, c.mesh.coordinate(h.rank), shapes, sizes=dict(c.sizes))
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
    # One mesh suffices: the others hold replicas, and `check_part` compares their shapes with this one.
    holders = {h.rank: h for h, c in claimed if c.mesh == claim.mesh}
    try:
        shapes = {rank: h.shape for rank, h in holders.items()}
        return infer_shape(claim.layout, claim.mesh, shapes, sizes=dict(claim.sizes))
    except LayoutError as error:
        part = first if error.rank is None else holders[error.rank]
        if not claim.is_recorded:
            raise prefix_error(error, name, part) from None
        # Where shapes contradict the ranks' own records, changing the command does not help.
        raise part.of(name).make(ContradictionError, error.message, error.got, error.want, part.again_all) from None


class Placement(Struct, frozen=True):
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
    """Return where all parts lie in their whole tensors."""
    parts: dict[str, _Parts] = {}
    num_pads, failures, claims = 0, list[LayoutError](), Claims(hints.layouts)
    for local_name, tensors in held.items():
        try:
            for tensor in tensors:
                claim = claims.find(local_name, tensor)
                global_name = find_global_name(claim, local_name, tensor)
                if global_name is None:
                    num_pads += 1
                else:
                    parts.setdefault(global_name, []).append((tensor, claim))
        except LayoutError as error:
            failures.append(error)
    placed: dict[str, list[StoredShard]] = {}
    assumptions = []
    left_out: list[str] = []
    # Companions follow from another tensor's layout, so they come last, when that tensor's shape is known.
    companions = {
        name
        for name, own in parts.items()
        # Ranks share a few claims, so each is looked at once.
        if any(claim.companion is not None for claim in {id(c): c for _, c in own if c is not None}.values())
    }
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
        # The first error names the tensors that the others concern.
        failures[0].about(got=likewise_text([error.tensor or "?" for error in failures[1:]]).removeprefix("; "))
        raise failures[0]
    shards = tuple(shard for name in parts for shard in placed.get(name, ()))
    seen = set()
    for shard in shards:
        if shard.name in seen:
            problem = "it lies in a flat buffer, and also in another one or by itself"
            raise Subject(shard.name).layout(problem, None, "each tensor in one place", "save only one of the two")
        seen.add(shard.name)
    # Each claim once: its ranks share it, and it counts the names of the whole model.
    counting = dict.fromkeys(claim for own in parts.values() for _, claim in own if claim and claim.pattern)
    absent = dict.fromkeys(name for claim in counting for name in list_counted_names(claim) if name not in parts)
    absent.update(dict.fromkeys(left_out))
    layouts = _collect_layouts(parts) if hints.needs_layouts else {}
    return Placement(shards, tuple(assumptions), num_pads, tuple(absent), layouts)


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


def _place(
    name: str, parts: _Parts, hints: Hints, world_size: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[StoredShard], str | None]:
    """Return a tensor's pieces in the whole, and the assumption, in words, if base shapes determined them.

    A flat buffer gives the pieces of several tensors.
    """
    held = [h for h, _ in parts]
    _check_equal(name, "dtype", {h.rank: h.dtype for h in held}, held)
    claimed = [(h, claim) for h, claim in parts if claim is not None]
    # Ranks that differ in what they record come from two programs or runs, so no rule of a file may fill the gap.
    if claimed and (len(claimed) < len(held) or len({claim.is_recorded for _, claim in claimed}) > 1):
        recording = [(h, claim) for h, claim in claimed if claim.is_recorded]
        without = [h for h in held if h.layout is None]
        subject = without[0].of(name)
        raise subject.contradiction(
            "some ranks recorded a layout and some did not",
            f"no layout on {ranks_text(h.rank for h in without)}",
            f"{recording[0][1]}, as on {ranks_text(h.rank for h, _ in recording)}",
            "let all ranks write their states in the same way",
        )
    if claimed:
        first, claim = claimed[0]
        _check_equal(name, "global shape", {h.rank: h.global_shape for h, _ in claimed}, held)
        mesh, ranks = claim.mesh, [h.rank for h, _ in claimed]
        outside = [rank for rank in ranks if rank not in mesh.ranks]
        if not claim.is_recorded and (outside or max(mesh.ranks) >= world_size):
            raise Subject(name, outside[0] if outside else None).layout(
                f"the layout file's mesh is not that of the {world_size} ranks that wrote a state",
                f"{mesh.grid}, {ranks_text(mesh.ranks)}",
                f"a mesh with {ranks_text(ranks)}, of {world_size}",
                "correct the mesh of the layout file",
            )
        if claim.companion is not None:
            return [place_companion(name, claimed, shapes, hints)], None
        if flat_of(claim.layout) is not None:
            return place_members(name, claimed, hints), None
        # A recorded shape does not need the base model, which is compared with it afterwards.
        known = first.global_shape if claim.is_recorded else hints.shapes.get(name) or first.global_shape
        return [place_claimed(name, claimed, known)], None
    if world_size == 1:
        return [pieces_of(name, held, held[0].shape, [whole(held[0].shape)])], None
    # The base model's shape of the tensor, or of the one that it is tied to.
    target = hints.layouts.aliases.get(name) if hints.layouts is not None else None
    if target is None and hints.tied_to is not None:
        target = hints.tied_to(name)
    shape = hints.shapes.get(name) or hints.shapes.get(target or name)
    if shape is not None:
        shard, assumption = _place_by_base_shape(name, held, shape)
        return [shard], assumption
    dims = ", ".join(("d0/tp", *(f"d{dim}" for dim in range(1, len(held[0].shape))))[: len(held[0].shape)])
    subject = held[0].of(name)
    raise subject.layout(
        f"no layout is recorded, so it is unknown how it is cut over {ranks_text(h.rank for h in held)}",
        f"plain tensors of shape {_shapes_text(held)}",
        f"a recorded layout, a rule of {option('layouts')}, or the tensor's whole shape in a base model",
        either(
            "write DTensors, or their layouts beside them",
            f"give {option('layouts', metavar='FILE')} with lines such as [mesh], "
            f'grid = "tp={world_size}", [tensors], "{name}" = "[{dims}]"',
            f"give {option('base_model', metavar='DIR')}",
        ),
    )


def _shapes_text(held: Sequence[HeldTensor]) -> str:
    return " and ".join(str(list(shape)) for shape in sorted({h.shape for h in held}))


def _check_equal(name: str, what: str, values: Mapping[int, object], held: Sequence[HeldTensor]) -> None:
    first = held[0]
    for h in held:
        if values[h.rank] != values[first.rank]:
            got, want = f"{values[h.rank]} on rank {h.rank}", f"{values[first.rank]}, as on rank {first.rank}"
            raise h.of(name).disagreement(first.rank, what, got, want, h.again_all)


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
    subject = held[0].of(name)
    raise subject.layout(
        "no layout is recorded, and more than one cut, or none, fits the base model's shape",
        f"shapes {_shapes_text(held)} on {ranks}",
        f"parts of {list(shape)}, whole or cut along one dim",
        f"give {option('layouts', metavar='FILE')} with this tensor's layout",
    )
