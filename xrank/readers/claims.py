"""Claims: the declared cut of each rank's part of a tensor, by the rank's recorded layout or a layout file's rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from xrank.errors import AGAIN, ContradictionError, IncompleteError, LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.companion import Companion, inline_base, is_companion, parse_companion
from xrank.layout.layout_map import base_layout
from xrank.layout.local_part import LocalPart, holds
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest, canonical, intersect, row_major
from xrank.layout.stored_model import StoredShard
from xrank.layout.tensor_name import NameTable, TensorName, name_table, parse_name
from xrank.storage.regular_file import Origin
from xrank.words import ranks_text

if TYPE_CHECKING:
    from xrank.formats.torch_archive import ArchivedTensor


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

    @property
    def origin(self) -> Origin:
        """The rank and file, which errors name."""
        return Origin(self.file, self.rank)

    def contradiction(self, name: str, problem: str, got: str, want: str, next_step: str) -> ContradictionError:
        """Return the error that this part contradicts other parts or its rank's own record."""
        return ContradictionError(
            f"{name}: {problem}", tensor=name, rank=self.rank, file=self.file, got=got, want=want, next_step=next_step
        )


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
    loops = tuple((n, xs, ys) for n, xs, ys in zip(local, row_major(local), strides, strict=True))
    return (canonical(Nest(0, start * strides[dim], loops)),)


def pieces_of(
    name: str, held: Sequence[HeldTensor], shape: tuple[int, ...], nests: Sequence[Sequence[Nest]]
) -> StoredShard:
    """Return the table of all pieces. Nests of local addresses become nests of the records' addresses.

    Args:
        name: the tensor's name.
        held: the ranks' parts.
        shape: global shape.
        nests: for each part, the map from its local row-major addresses to global ones.
    """
    rows = [
        (h, nest)
        for h, local_nests in zip(held, nests, strict=True)
        for local in local_nests
        for nest in _from_storage(name, h, local)
    ]
    return StoredShard(
        name,
        held[0].dtype,
        tuple(shape),
        int_array(h.rank for h, _ in rows),
        int_array(h.record for h, _ in rows),
        NestTable.from_nests([nest for _, nest in rows]),
    )


def _from_storage(name: str, held: HeldTensor, local: Nest) -> list[Nest]:
    """Turn local row-major addresses into addresses of the storage, of which the tensor is a view."""
    if held.strides == row_major(held.shape) or 0 in held.shape:
        return [Nest(local.x + held.storage_offset, local.y, local.loops)]
    if any(stride <= 0 for n, stride in zip(held.shape, held.strides, strict=True) if n > 1):
        raise held.origin.corrupt(
            f"{name}: rank {held.rank} stored an expanded view, whose elements share bytes",
            tensor=name,
            got=f"strides {list(held.strides)}",
            want="strides of at least 1",
            next_step="write the tensor with .contiguous()",
        )
    # From the storage to the local row-major addresses, at which `local` begins: to intersect them is to compose them.
    storage = Nest(
        held.storage_offset,
        0,
        tuple((n, stride, row) for n, stride, row in zip(held.shape, held.strides, row_major(held.shape), strict=True)),
    )
    return intersect(storage, local)


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
        given = self.find_in_file(name)
        if held.layout is None:
            return given
        recorded = _read_record(held, name)
        if given is not None and _meaning(_as_seen_by(held.rank, given, recorded.mesh)) != _meaning(recorded):
            raise LayoutError(
                f"{name}: its ranks recorded one layout, and the layout file gives another",
                tensor=name,
                rank=held.rank,
                got=f"{given} on {given.mesh.grid}",
                want=f"{recorded} on {recorded.mesh.grid}",
                next_step="take the tensor's rule out of the layout file",
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
        error.about(next_step="write patterns into the layout file of which only one matches each name")
        raise
    if rule is not None and companion_rule is not None:
        raise LayoutError(
            f"{name}: two rules of the layout file match",
            tensor=name,
            got=f"{rule!r} and {companion_rule!r}",
            want="one",
            next_step="keep one of them",
        )
    deciding = rule if rule is not None else companion_rule
    if deciding is None:
        target = layouts.aliases.get(name)  # never an alias itself
        return None if target is None else _find_in_file(target, layouts)
    if companion_rule is not None:
        companion = layouts.companions[companion_rule]
        layout = base_layout(companion, layouts).with_sizes(layouts.sizes)
    else:
        companion = None
        found = layouts[name]
        assert found is not None
        layout = found.with_sizes(layouts.sizes)  # as in a state's record
    mesh = layout.device_mesh or layouts.device_mesh
    if mesh is None:
        raise LayoutError(
            f"{name}: the layout file has a rule for it but no [mesh]",
            tensor=name,
            got=str(layout),
            next_step='add a table like [mesh] with grid = "dp=2 tp=2" to the layout file',
        )
    pattern = layouts.name_of(deciding)
    if pattern is not None:
        pattern = pattern.with_sizes(layouts.sizes)
    return Claim(layout, mesh, pattern, companion, tuple(layouts.sizes.items()))


def _read_record(held: HeldTensor, name: str) -> Claim:
    assert held.layout is not None
    if held.mesh is None or held.rank not in held.mesh:
        raise held.contradiction(
            name,
            f"the mesh that rank {held.rank} recorded does not contain it",
            got="no mesh" if held.mesh is None else f"a mesh of {ranks_text(held.mesh.ranks)}",
            want=f"a mesh with rank {held.rank}",
            next_step="let the rank write its state again",
        )
    try:
        return _make_claim(held.layout, held.mesh, held.view, held.pattern)
    except LayoutError as error:
        raise prefix_error(error, name, held) from None


@lru_cache(maxsize=4096)
def _make_claim(text: str, mesh: DeviceMesh, view: DeviceMesh | None, pattern: str | None) -> Claim:
    companion, layout = _parse_layout(text)
    if view is not None:
        layout = _attach_meshes(layout, mesh, view)
    return Claim(layout, mesh, None if pattern is None else _parse_cached_name(pattern), companion, is_recorded=True)


@lru_cache(maxsize=4096)
def _parse_layout(text: str) -> tuple[Companion | None, TensorLayout]:
    """Return the same objects for equal texts, because a model has a handful of layouts."""
    if not is_companion(text):
        return None, TensorLayout.parse(text)
    companion = parse_companion(text)
    if companion.base is None:
        raise LayoutError(
            "the recorded layout refers to a rule, but states do not contain rules",
            got=text,
            want="the base's own layout",
            next_step="let the rank write its state again",
        )
    return companion, TensorLayout.from_tree(companion.base)


@lru_cache(maxsize=4096)
def _attach_meshes(layout: TensorLayout, mesh: DeviceMesh, view: DeviceMesh) -> TensorLayout:
    return layout.with_mesh(mesh, {layout.tree.view or "": view})


@lru_cache(maxsize=4096)
def _parse_cached_name(pattern: str) -> TensorName:
    return parse_name(pattern)


def prefix_error(error: LayoutError, name: str, held: HeldTensor) -> LayoutError:
    """Return the error with the tensor's name and the part's rank and file, and with a next step."""
    mend = "correct the layout file" if held.layout is None else f"let rank {held.rank} write its state again"
    error.about(name, tensor=name, rank=held.rank, file=held.file, next_step=mend)
    return error


def find_global_name(claim: Claim | None, name: str, held: HeldTensor) -> str | None:
    """Return the global name of a rank's part with a name of the rank's own; None for padding."""
    if claim is None or claim.pattern is None or held.rank not in claim.mesh:
        return name
    try:
        table = _table(claim.pattern, claim.layout, claim.mesh, held.rank, claim.sizes)
        if table is None:
            raise LayoutError(
                "the rank holds a part, but its layout leaves this rank out",
                got=f"a part of shape {list(held.shape)}",
                want=f"no part, by {claim} on {claim.mesh.grid}",
            )
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


# One per layout; many tensors have the same.
@lru_cache(maxsize=4096)
def find_holders(layout: TensorLayout, mesh: DeviceMesh) -> frozenset[int]:
    """Return the ranks of a mesh that hold a part under a layout."""
    return frozenset(rank for rank in mesh.ranks if holds(layout, mesh, mesh.coordinate(rank)))


# One per rank and pattern; each of the rank's tensors asks for it.
@lru_cache(maxsize=65536)
def _table(
    pattern: TensorName, layout: TensorLayout, mesh: DeviceMesh, rank: int, sizes: tuple[tuple[str, int], ...]
) -> NameTable | None:
    known: Mapping[str, int] = dict(sizes)
    return name_table(pattern, layout, mesh, mesh.coordinate(rank), sizes=known)


Claimed: TypeAlias = tuple[HeldTensor, Claim]
"""A rank's part, and how its tensor is cut."""


def check_part(name: str, held: HeldTensor, claim: Claim, part: LocalPart | None, shape: tuple[int, ...]) -> LocalPart:
    """Return the part that the layout gives a rank, after checking that the rank holds it."""
    check = "check that the layout and mesh are those of the run that wrote the state"
    if part is None:
        raise held.contradiction(
            name,
            f"rank {held.rank} holds a part, but its layout leaves this rank out",
            got=f"a part of shape {list(held.shape)}",
            want=f"no part, by {claim} on {claim.mesh.grid}",
            next_step=check,
        )
    if part.sums:
        raise held.origin.layout(
            f"{name}: its ranks hold addends of a sum over {', '.join(part.sums)}, not values",
            tensor=name,
            got=str(claim),
            want="parts or replicas",
            next_step="reduce the tensor before it is saved",
        )
    if part.shape != held.shape:
        raise held.contradiction(
            name,
            f"rank {held.rank}'s part has another shape than its layout gives it",
            got=str(list(held.shape)),
            want=f"{list(part.shape)}, by {claim} of {list(shape)} on {claim.mesh.grid}",
            next_step=check,
        )
    return part


def check_meshes(name: str, claimed: Sequence[Claimed]) -> None:
    """Check that meshes are equal or disjoint, that each mesh has one layout, and that all its ranks are present."""
    holders = {h.rank: h for h, _ in claimed}
    if len(holders) < len(claimed):
        twice = next(h for h, _ in claimed if holders[h.rank] is not h)
        raise twice.contradiction(
            name,
            f"rank {twice.rank} holds it under two names",
            got="two parts",
            want="one part on each rank",
            next_step="check the layout's name with dims",
        )
    seen: dict[int, Claimed] = {}
    for h, claim in claimed:
        # The first rank of a mesh claims all its ranks; later ranks of the mesh check only their own entry.
        for rank in claim.mesh.ranks if h.rank not in seen else (h.rank,):
            other, others = seen.setdefault(rank, (h, claim))
            if other is not h and (others.mesh, others.layout) != (claim.mesh, claim.layout):
                raise h.contradiction(
                    name,
                    f"ranks {other.rank} and {h.rank} disagree about its layout or mesh",
                    got=f"{claim} on {claim.mesh.grid}, {_format_ranks(claim.mesh.ranks)}",
                    want=f"{others} on {others.mesh.grid}, {_format_ranks(others.mesh.ranks)}",
                    next_step="all ranks must come from one run; write the states again",
                )
            if rank not in holders and find_local_name(claim, name, rank) is not None:
                raise IncompleteError(
                    f"{name}: rank {rank} of its mesh holds no part of it",
                    tensor=name,
                    rank=rank,
                    got=f"parts on {ranks_text(holders)}",
                    want=f"parts on {ranks_text(claim.mesh.ranks)}",
                    next_step=f"let rank {rank} write its state again, then {AGAIN}",
                )


def _format_ranks(ranks: Sequence[int]) -> str:
    rising = all(a < b for a, b in pairwise(ranks))
    return ranks_text(ranks) if rising else f"ranks {', '.join(map(str, ranks))}"
