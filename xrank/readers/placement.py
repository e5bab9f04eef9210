"""Places the ranks' parts in whole tensors, by the cuts that ranks record or a layout file gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from msgspec import Struct, field
from msgspec.structs import astuple, replace

from xrank.errors import AGAIN, ContradictionError, CorruptError, IncompleteError, LayoutError, either, option
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.layout_map import (
    Companion,
    base_layout,
    base_shapes,
    companion_part,
    companion_shape,
    inline_base,
    is_companion,
    parse_companion,
)
from xrank.layout.local_part import LocalPart, collect_known_names, global_size, holds, infer_shape, local_part
from xrank.layout.mesh_parts import FlatPart, flat_part
from xrank.layout.nest_table import IntArray, NestTable, int_array
from xrank.layout.nests import Nest, canonical, intersect, row_major
from xrank.layout.notation import LayoutTree
from xrank.layout.stored_model import NO_CHECKSUM, StatedLayout, StoredModel, StoredShard
from xrank.layout.tensor_layout import axis_lengths, flat_of
from xrank.layout.tensor_name import NameTable, TensorName, name_table, parse_name
from xrank.readers.base import Hints
from xrank.readers.records import Subject
from xrank.storage.regular_file import open_regular
from xrank.words import likewise_text, list_text, ranks_text

if TYPE_CHECKING:
    from xrank.formats.rank_state import TensorRecord
    from xrank.formats.torch_archive import ArchivedTensor


SAME_LAYOUTS = "write the same model, of one run and step and with the same layouts, on all ranks"
"""The next step for live ranks, which wrote no states."""


class HeldTensor(Struct, frozen=True):
    """One rank's part of a tensor, as it lies in a record."""

    rank: int
    file: str
    record: int
    dtype: str
    shape: tuple[int, ...]
    """Local shape."""
    strides: tuple[int, ...]
    """Strides in the storage, in elements."""
    storage_offset: int
    """Index of the first element, counted from the record's start."""
    layout: str | None = None
    """Layout that the rank recorded; the attributes below are the rank's records, too."""
    mesh: DeviceMesh | None = None
    view: DeviceMesh | None = None
    """The view of the mesh that the layout refers to."""
    pattern: str | None = None
    """The tensor's name with dims, if the rank's own name for it differs."""
    global_shape: tuple[int, ...] | None = None

    @classmethod
    def from_archive(cls, tensor: ArchivedTensor, *, rank: int, file: str, record: int) -> HeldTensor:
        """Return the part that a tensor of a torch archive is, without a layout."""
        return cls(rank, file, record, tensor.dtype, tensor.shape, tensor.strides, tensor.storage_offset)

    def of(self, name: str) -> Subject:
        """Return the tensor, rank and file that errors about this part name."""
        return Subject(name, self.rank, self.file)

    def as_recorded(self, known: TensorRecord, meshes: Sequence[DeviceMesh]) -> HeldTensor:
        """Return the part with the layout that its rank recorded."""
        return replace(
            self,
            layout=known.layout,
            mesh=None if known.mesh is None else meshes[known.mesh],
            view=None if known.view is None else meshes[known.view],
            pattern=known.name,
            global_shape=known.shape,
        )

    def on(self, holders: Iterable[tuple[int, str, int]]) -> Iterator[HeldTensor]:
        """Yield the parts of ranks that hold, and record, the same: each with its own rank, file and record."""
        _, _, _, *same = astuple(self)
        for rank, file, record in holders:
            yield HeldTensor(rank, file, record, *same)

    @property
    def again(self) -> str:
        """The next step for a fault in what the rank recorded."""
        return SAME_LAYOUTS if self.is_live else f"let rank {self.rank} write its state again"

    @property
    def again_all(self) -> str:
        """The next step for ranks that disagree."""
        return SAME_LAYOUTS if self.is_live else "all ranks must come from one run and step; write the states again"

    @property
    def is_live(self) -> bool:
        """Whether the part lies in the memory of a live rank, and not in a file."""
        return self.file == memory_of(self.rank)


@lru_cache(maxsize=4096)
def memory_of(rank: int) -> str:
    """Return the name that stands for a file where a live rank holds its tensors."""
    return f"the memory of rank {rank}"


def replicate(held: HeldTensor, mesh: DeviceMesh) -> HeldTensor:
    """Return the tensor with the layout that every rank of the mesh holds it whole."""
    return replace(held, layout=str(TensorLayout((None,) * len(held.shape))), mesh=mesh)


def whole(shape: tuple[int, ...]) -> tuple[Nest, ...]:
    """Return the nest of a whole tensor, of the same shape on both sides."""
    return row_slice(shape, 0, 0, shape[0]) if shape else (Nest(0, 0),)


def row_slice(shape: tuple[int, ...], dim: int, start: int, length: int) -> tuple[Nest, ...]:
    """Return the nest of rows [start, start + length) of one dim."""
    local = tuple(length if d == dim else n for d, n in enumerate(shape))
    if 0 in local:
        return ()
    strides = row_major(shape)
    loops = tuple(zip(local, row_major(local), strides, strict=True))
    return (canonical(Nest(0, start * strides[dim], loops)),)


def pieces_of(
    name: str, held: Sequence[HeldTensor], shape: tuple[int, ...], nests: Sequence[Sequence[Nest]]
) -> StoredShard:
    """Return the table of all pieces of a tensor with that global shape.

    `nests` map, for each part, its local row-major addresses to global ones; they become nests of the records'
    addresses.
    """
    rows = [
        (h, nest)
        for h, local_nests in zip(held, nests, strict=True)
        for local in local_nests
        for nest in _from_storage(name, h, local)
    ]
    ranks, table = _shared_table(tuple(h.rank for h, _ in rows), tuple(nest for _, nest in rows))
    return StoredShard(name, held[0].dtype, tuple(shape), ranks, int_array(h.record for h, _ in rows), table)


@lru_cache(maxsize=256)
def _shared_table(ranks: tuple[int, ...], nests: tuple[Nest, ...]) -> tuple[IntArray, NestTable]:
    """Return the same objects for tensors alike, which are then planned once."""
    return int_array(ranks), NestTable.from_nests(nests)


def _from_storage(name: str, held: HeldTensor, local: Nest) -> list[Nest]:
    """Turn local row-major addresses into addresses of the storage, of which the tensor is a view."""
    if held.strides == row_major(held.shape) or 0 in held.shape:
        return [Nest(local.x + held.storage_offset, local.y, local.loops)]
    if any(stride <= 0 for n, stride in zip(held.shape, held.strides, strict=True) if n > 1):
        raise held.of(name).make(
            CorruptError,
            f"rank {held.rank} stored an expanded view, which has elements that share bytes",
            f"strides {list(held.strides)}",
            "strides of at least 1",
            "write the tensor with .contiguous()",
        )
    # From the storage to the local row-major addresses, at which `local` begins: to intersect them is to compose them.
    loops = tuple(zip(held.shape, held.strides, row_major(held.shape), strict=True))
    return intersect(Nest(held.storage_offset, 0, loops), local)


class Claim(Struct, frozen=True):
    """The declared cut of the tensor that a rank's part belongs to, and its mesh."""

    layout: TensorLayout
    mesh: DeviceMesh
    pattern: TensorName | None = None
    """The tensor's name with dims, if it has any; the rank's own name for it then has other indices."""
    companion: Companion | None = None
    """How the tensor follows from another one; `layout` is then the other one's. None for a tensor cut by itself."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Sizes by name that shapes do not determine."""
    is_recorded: bool = False
    """True for the rank's own record; False for a rule of a layout file."""

    def __str__(self) -> str:
        return str(self.layout if self.companion is None else self.companion)


class Claims:
    """Finds the claim of each part. Use one object per source, because parts of one name share results."""

    def __init__(self, layouts: LayoutMap | None) -> None:
        self._layouts = layouts
        self._from_file: dict[str, Claim | None] = {}

    def find(self, name: str, held: HeldTensor) -> Claim | None:
        """Return the claim of a rank's part; None if it is unknown how its tensor is cut."""
        given = None if self._layouts is None else self.find_in_file(name)
        if held.layout is None:
            return given
        if held.mesh is None or held.rank not in held.mesh:
            raise held.of(name).contradiction(
                f"the mesh that rank {held.rank} recorded does not contain it",
                "no mesh" if held.mesh is None else f"a mesh of {ranks_text(held.mesh.ranks)}",
                f"a mesh with rank {held.rank}",
                held.again,
            )
        try:
            recorded = _read_record(held.layout, held.mesh, held.view, held.pattern)
        except LayoutError as error:
            raise prefix_error(error, name, held) from None
        if given is not None and _meaning(_as_seen_by(held.rank, given, recorded.mesh)) != _meaning(recorded):
            raise held.of(name).layout(
                "the layout that its ranks recorded differs from the layout file",
                f"{given} on {given.mesh.grid}",
                f"{recorded} on {recorded.mesh.grid}",
                "delete the tensor's rule from the layout file",
            )
        return recorded

    def find_in_file(self, name: str) -> Claim | None:
        """Return the layout file's claim for a rank's own name or a global one; None without a rule."""
        if self._layouts is None:
            return None
        if name not in self._from_file:
            self._from_file[name] = _find_in_file(name, self._layouts)
        return self._from_file[name]


def _as_seen_by(rank: int, given: Claim, mesh: DeviceMesh) -> Claim:
    """Return a file's claim, on the rank's own mesh if that is a part of the file's mesh.

    FSDP2 over tensor parallelism records norms on the mesh of their one axis; a file has one mesh for all tensors.
    """
    is_part = {*mesh.axis_names} < {*given.mesh.axis_names} and given.layout.view_mesh is None and rank in given.mesh
    if is_part and _part_with(given.mesh, rank, mesh.axis_names) == mesh:
        return replace(given, mesh=mesh)
    return given


@lru_cache(maxsize=4096)
def _part_with(mesh: DeviceMesh, rank: int, axes: tuple[str, ...]) -> DeviceMesh:
    """Return the part of a mesh in which only the coordinates along these axes vary, at this rank."""
    return mesh.submesh(**{name: place for name, place in mesh.coordinate(rank).items() if name not in axes})


def _meaning(claim: Claim) -> tuple[object, ...]:
    companion = None if claim.companion is None else inline_base(claim.companion, claim.layout.tree)
    return str(companion or claim.layout), claim.mesh, claim.layout.view_mesh, claim.pattern


def _find_in_file(name: str, layouts: LayoutMap) -> Claim | None:
    try:
        rule, companion_rule = layouts.rule_for(name), layouts.companion_rule_for(name)
    except LayoutError as error:
        error.about(next_step="change the layout file's patterns: only one may match each name")
        raise
    if rule is not None and companion_rule is not None:
        got = f"{rule!r} and {companion_rule!r}"
        raise Subject(name).layout("two rules of the layout file match", got, "one", "keep one of them")
    deciding = rule if rule is not None else companion_rule
    if deciding is None:
        target = layouts.aliases.get(name)  # never an alias itself
        return None if target is None else _find_in_file(target, layouts)
    companion = None if companion_rule is None else layouts.companions[companion_rule]
    found = layouts[name] if companion is None else base_layout(companion, layouts)
    assert found is not None
    layout = found.with_sizes(layouts.sizes)  # as in a state's record
    mesh = layout.device_mesh or layouts.device_mesh
    if mesh is None:
        step = 'add a table like [mesh] with grid = "dp=2 tp=2" to the layout file'
        raise Subject(name).layout("the layout file has a rule for it but no [mesh]", str(layout), None, step)
    pattern = layouts.name_of(deciding)
    if pattern is not None:
        pattern = pattern.with_sizes(layouts.sizes)
    return Claim(layout, mesh, pattern, companion, tuple(layouts.sizes.items()))


@lru_cache(maxsize=4096)
def _read_record(text: str, mesh: DeviceMesh, view: DeviceMesh | None, pattern: str | None) -> Claim:
    """Return the same object for equal records, because a model has a handful of layouts."""
    if is_companion(text):
        companion = parse_companion(text)
        if companion.base is None:
            problem = "the recorded layout refers to a rule, but states do not contain rules"
            raise LayoutError(problem, got=text, want="the base's own layout")
        layout = TensorLayout.from_tree(companion.base)
    else:
        companion, layout = None, TensorLayout.parse(text)
    if view is not None:
        layout = layout.with_mesh(mesh, {layout.tree.view or "": view})
    return Claim(layout, mesh, None if pattern is None else parse_name(pattern), companion, is_recorded=True)


def prefix_error(error: LayoutError, name: str, held: HeldTensor) -> LayoutError:
    """Return the error with the tensor's name and the part's rank and file, and with a next step."""
    mend = "correct the layout file" if held.layout is None else held.again
    error.about(name, tensor=name, rank=held.rank, file=held.file, next_step=mend)
    return error


def find_global_name(claim: Claim | None, name: str, held: HeldTensor) -> str | None:
    """Return the global name of a rank's part with a name of the rank's own; None for padding."""
    if claim is None or claim.pattern is None or held.rank not in claim.mesh:
        return name
    try:
        table = _table(claim.pattern, claim.layout, claim.mesh, held.rank, claim.sizes)
        if table is None:
            problem, got, want = _left_out(held, claim)
            raise LayoutError(problem, got=got, want=want)
        return table.global_name(name)
    except LayoutError as error:
        raise prefix_error(error, name, held) from None


def list_counted_names(claim: Claim) -> Iterator[str]:
    """Yield all names, over all ranks, that a claim's name with dims stands for; nothing for a name without dims."""
    if claim.pattern is None:
        return
    # Every table has the global sizes, so the first does; a rank without a part has none.
    for rank in claim.mesh.ranks:
        table = _table(claim.pattern, claim.layout, claim.mesh, rank, claim.sizes)
        if table is not None:
            yield from (claim.pattern.with_indices(*indices) for indices in product(*map(range, table.global_sizes)))
            return


def find_local_name(claim: Claim, name: str, rank: int) -> str | None:
    """Return a rank's own name of a tensor on the claim's mesh; None if the rank should hold no part of it."""
    if claim.pattern is None:
        return name if holds(claim.layout, claim.mesh, claim.mesh.coordinate(rank)) else None
    table = _table(claim.pattern, claim.layout, claim.mesh, rank, claim.sizes)
    return None if table is None else table.local_name(name)


# One per rank and pattern; each of the rank's tensors asks for it.
@lru_cache(maxsize=65536)
def _table(
    pattern: TensorName, layout: TensorLayout, mesh: DeviceMesh, rank: int, sizes: tuple[tuple[str, int], ...]
) -> NameTable | None:
    return name_table(pattern, layout, mesh, mesh.coordinate(rank), sizes=dict(sizes))


shared_mesh = lru_cache(maxsize=4096)(DeviceMesh)
"""Returns the same object for equal meshes, because all ranks of a run share a few."""
Claimed: TypeAlias = tuple[HeldTensor, Claim]
"""A rank's part, and how its tensor is cut."""

_CHECK = "check that the layout and mesh are those of the run that wrote the state"


def _left_out(held: HeldTensor, claim: Claim) -> tuple[str, str, str]:
    """Return the problem of a part on a rank that should hold none, with what was found and wanted."""
    problem = f"rank {held.rank} holds a part, but its layout leaves this rank out"
    return problem, f"a part of shape {list(held.shape)}", f"no part, by {claim} on {claim.mesh.grid}"


def check_part(name: str, held: HeldTensor, claim: Claim, part: LocalPart | None, shape: tuple[int, ...]) -> LocalPart:
    """Return the part that the layout gives a rank, after checking that the rank holds it."""
    if part is None:
        raise held.of(name).contradiction(*_left_out(held, claim), _CHECK)
    if part.sums:
        raise held.of(name).layout(
            f"its ranks hold partial sums over {', '.join(part.sums)}, not values",
            str(claim),
            "parts or replicas",
            "reduce the tensor before you save it",
        )
    if part.shape != held.shape:
        raise held.of(name).contradiction(
            f"rank {held.rank}'s part does not have the shape that its layout gives",
            str(list(held.shape)),
            f"{list(part.shape)}, by {claim} of {list(shape)} on {claim.mesh.grid}",
            _CHECK,
        )
    return part


def check_meshes(name: str, claimed: Sequence[Claimed]) -> None:
    """Check that meshes are equal or disjoint, that each mesh has one layout, and that all its ranks are present."""
    holders = {h.rank: h for h, _ in claimed}
    if len(holders) < len(claimed):
        twice = next(h for h, _ in claimed if holders[h.rank] is not h)
        problem = f"rank {twice.rank} holds it under two names"
        step = "check the layout's name with dims"
        raise twice.of(name).contradiction(problem, "two parts", "one part on each rank", step)
    seen: dict[int, Claimed] = {}
    for h, claim in claimed:
        # The first rank of a mesh claims all its ranks; later ranks of the mesh check only their own entry.
        for rank in claim.mesh.ranks if h.rank not in seen else (h.rank,):
            other, others = seen.setdefault(rank, (h, claim))
            if other is not h and (others.mesh, others.layout) != (claim.mesh, claim.layout):
                got, want = (f"{c} on {c.mesh.grid}, {_format_ranks(c.mesh.ranks)}" for c in (claim, others))
                raise h.of(name).disagreement(other.rank, "layout or mesh", got, want, h.again_all)
            if rank not in holders and find_local_name(claim, name, rank) is not None:
                raise Subject(name, rank).incomplete(
                    f"rank {rank} of its mesh holds no part of it",
                    f"parts on {ranks_text(holders)}",
                    f"parts on {ranks_text(claim.mesh.ranks)}",
                    SAME_LAYOUTS if h.is_live else f"let rank {rank} write its state again, then {AGAIN}",
                )


def _format_ranks(ranks: Sequence[int]) -> str:
    rising = all(a < b for a, b in pairwise(ranks))
    return ranks_text(ranks) if rising else f"ranks {', '.join(map(str, ranks))}"


_BLOCK_NBYTES = 4096
_CHUNK_NBYTES = 1 << 20
_MAX_ELEMENT_NBYTES = 8
_CAUSE = (
    "a crash can cause this if the data had not reached the disk. The format records no checksums, so these may also "
    "be tensors of zeros: compare the file with another copy, or the tensors with an earlier step"
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
        start, low = end, max(0, (end - 1) // _BLOCK_NBYTES * _BLOCK_NBYTES)
        with open_regular(path) as file:
            # Where the zeros begin: after the last other byte, or at the file's first byte.
            while start > low:
                content = file.read(low, start - low).rstrip(b"\0")
                start = low + len(content)
                low = start if content else max(0, low - _CHUNK_NBYTES)
        border = -(-start // _BLOCK_NBYTES) * _BLOCK_NBYTES
        # The last element before the border may end in zero bytes.
        if end - border >= _BLOCK_NBYTES and border - start < _MAX_ELEMENT_NBYTES:
            lost = f"{path} ends in {end - border:,} bytes of zeros, which begin at a block boundary"
            yield "zero-blocks", f"{lost}: {_CAUSE}"


def _add_lost(
    name: str, claimed: Sequence[Claimed], shape: tuple[int, ...], lost: Mapping[int, tuple[str, int]]
) -> Sequence[Claimed]:
    """Return the parts of a tensor of that global shape with those that lost ranks of its meshes held."""
    held, found = {h.rank for h, _ in claimed}, [*claimed]
    for h, claim in {claim.mesh: (h, claim) for h, claim in claimed}.values():
        for rank in (rank for rank in claim.mesh.ranks if rank in lost and rank not in held):
            if find_local_name(claim, name, rank) is None:
                continue
            file, record = lost[rank]
            part = local_part(claim.layout, claim.mesh, claim.mesh.coordinate(rank), shape, sizes=dict(claim.sizes))
            if part is not None:
                own = HeldTensor(rank, file, record, h.dtype, part.shape, row_major(part.shape), 0)
                found.append((own, claim))
    return sorted(found, key=_rank_of)


def place_claimed(
    name: str,
    claimed: Sequence[Claimed],
    shape: tuple[int, ...] | None,
    lost: Mapping[int, tuple[str, int]] = MappingProxyType({}),
) -> StoredShard:
    """Return a tensor's pieces. If it has several meshes, they hold replicas of each other.

    `lost` are ranks whose files are lost, as in `Faults.ranks`.
    """
    if lost:
        shape = _infer_shape(name, claimed) if shape is None else shape
        try:
            claimed = _add_lost(name, claimed, shape, lost)
        except LayoutError as error:
            raise prefix_error(error, name, claimed[0][0]) from None
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
            f"{companion} does not determine the shape of its base tensor",
            f"a part of shape {list(first.shape)}; shapes that would fit: {sorted(map(list, fitting))[:4]}",
            "one base tensor, or several with the same shape",
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
        problem = "the name of the flat buffer has dims, but each of its members has a single name"
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


class _PlacedError(Exception):
    """A tensor that was placed has one more part, under another name of its rank's own."""


_Held: TypeAlias = Iterable[tuple[str, Sequence[HeldTensor]]]
"""A name of the ranks' own and all parts of that name, for each name."""


def place_all(list_parts: Callable[[], _Held], hints: Hints, *, world_size: int) -> Placement:
    """Return where all parts lie in their whole tensors.

    Most tensors are placed as their name comes, so that a million parts are not in memory at once. If that was too
    early, the parts are listed again.
    """
    try:
        return _place_all(list_parts(), hints, world_size, waits=False)
    except _PlacedError:
        return _place_all(list_parts(), hints, world_size, waits=True)


def _place_all(held: _Held, hints: Hints, world_size: int, *, waits: bool) -> Placement:
    claims, layouts = Claims(hints.layouts), _StatedLayouts()
    # By global name, in order. Those of tensors that are placed are left out.
    parts: dict[str, _Parts] = {}
    placed: dict[str, list[StoredShard]] = {}
    num_pads, assumptions, left_out = 0, list[tuple[str, str]](), list[str]()
    failures, late_failures = list[LayoutError](), list[LayoutError]()

    def place(name: str, own: _Parts, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if hints.needs_layouts:
            layouts.add(name, own)
        try:
            placed[name], assumption = _place(name, sorted(own, key=_rank_of), hints, world_size, shapes)
        except (LayoutError, ContradictionError, IncompleteError, CorruptError) as error:
            if not hints.faults.raises:
                if not hints.faults.ranks or isinstance(error, ContradictionError):  # lost ranks have their faults
                    hints.faults.add(error)
                left_out.append(name)
                return
            if not isinstance(error, LayoutError):
                raise
            if hints.is_left_out is not None and hints.is_left_out(name):
                left_out.append(name)
            else:
                late_failures.append(error)
            return
        if assumption:
            assumptions.append((name, assumption))

    for local_name, tensors in held:
        own: _Parts = []
        is_alone = not waits and local_name not in parts
        try:
            for tensor in tensors:
                claim = claims.find(local_name, tensor)
                if claim is None or claim.pattern is None:
                    own.append((tensor, claim))
                    is_alone = is_alone and (claim is None or claim.companion is None)
                    continue
                is_alone = False
                global_name = find_global_name(claim, local_name, tensor)
                if global_name is None:
                    num_pads += 1
                elif global_name in placed:
                    raise _PlacedError
                else:
                    parts.setdefault(global_name, []).append((tensor, claim))
        except LayoutError as error:
            failures.append(error)
        if own:
            parts.setdefault(local_name, []).extend([] if is_alone else own)
            if is_alone:
                place(local_name, own, {})
    # Companions follow from another tensor's layout, so they come last, when that tensor's shape is known.
    companions = {
        name
        for name, own in parts.items()
        # Ranks share a few claims, so each is looked at once.
        if any(claim.companion is not None for claim in {id(c): c for _, c in own if c is not None}.values())
    }
    for name in sorted(filter(parts.__getitem__, parts), key=companions.__contains__):
        shapes = {}
        if name in companions:
            shapes = {shard.name: shard.shape for shards in placed.values() for shard in shards}
        place(name, parts[name], shapes)
    failures += late_failures
    if failures:
        # The first error names the tensors that the others concern.
        failures[0].about(got=likewise_text([error.tensor or "?" for error in failures[1:]]).removeprefix("; "))
        raise failures[0]
    shards = tuple(shard for name in parts for shard in placed.get(name, ()))
    seen = set()
    for shard in shards:
        if shard.name in seen:
            problem = "it is in a flat buffer, and also in another one or separate"
            raise Subject(shard.name).layout(problem, None, "each tensor in one place", "save only one of the two")
        seen.add(shard.name)
    # Each claim once: its ranks share it, and it counts the names of the whole model.
    counting = dict.fromkeys(claim for own in parts.values() for _, claim in own if claim and claim.pattern)
    absent = dict.fromkeys(name for claim in counting for name in list_counted_names(claim) if name not in parts)
    absent.update(dict.fromkeys(left_out))
    assumed = dict(assumptions)
    ordered = tuple((name, assumed[name]) for name in parts if name in assumed)
    return Placement(shards, ordered, num_pads, tuple(absent), layouts.in_order(parts))


def _rank_of(part: tuple[HeldTensor, object]) -> int:
    return part[0].rank


class _StatedLayouts:
    """The declared layouts of each tensor outside flat buffers, each layout once."""

    def __init__(self) -> None:
        # A million ranks share a few objects, so compare identities: comparing two meshes costs as much as they have
        # ranks.
        self._known: dict[tuple[int, int], StatedLayout] = {}
        self._found: dict[str, dict[StatedLayout, None]] = {}

    def add(self, name: str, parts: _Parts) -> None:
        seen: set[tuple[int, int]] = set()
        for _, claim in parts:
            if claim is None or flat_of(claim.layout) is not None:
                continue
            key = id(claim.layout), id(claim.mesh)
            if key in seen:
                continue
            seen.add(key)
            stated = self._known.get(key)
            if stated is None or (stated.pattern, stated.companion) != (claim.pattern, claim.companion):
                stated = self._known[key] = StatedLayout(claim.layout, claim.mesh, claim.pattern, claim.companion)
            self._found.setdefault(name, {})[stated] = None

    def in_order(self, names: Iterable[str]) -> dict[str, Sequence[StatedLayout]]:
        """Return the layouts by name, in the order of the names."""
        return {name: tuple(self._found[name]) for name in names if name in self._found}


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
                f"the layout file's mesh does not match the {world_size} ranks that wrote a state",
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
        return [place_claimed(name, claimed, known, hints.faults.ranks)], None
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
    dims = ", ".join(f"d{dim}" for dim in range(len(held[0].shape)))
    subject = held[0].of(name)
    raise subject.layout(
        f"no layout is recorded, so it is unknown how it is split over {ranks_text(h.rank for h in held)}",
        f"plain tensors of shape {_shapes_text(held)}",
        f"a recorded layout, a rule of {option('layouts')}, or the tensor's whole shape in a base model",
        either(
            "write DTensors, or plain tensors with layouts",
            f"give {option('layouts', metavar='FILE')} with lines such as [mesh], "
            f'grid = "tp={world_size}", [tensors], "{name}" = "[{dims}]" if each rank holds the whole tensor'
            + (f', or "[{dims.replace("d0", "d0/tp", 1)}]" if it holds a part of the rows' if dims else ""),
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
            how = f"split along dim {dim} over {ranks} in rank order; if two axes of the mesh split it, only a layout "
            return pieces_of(name, held, shape, nests), how + "file gives their order"
    subject = held[0].of(name)
    raise subject.layout(
        "no layout is recorded, and several splits, or none, fit the base model's shape",
        f"shapes {_shapes_text(held)} on {ranks}",
        f"parts of {list(shape)}, whole or split along one dim",
        f"give {option('layouts', metavar='FILE')} with this tensor's layout",
    )
