"""Claims: the declared cut of each rank's part of a tensor, by the rank's recorded layout or a layout file's rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from xrank.errors import AGAIN, CorruptError, LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.layout_map import Companion, base_layout, inline_base, is_companion, parse_companion
from xrank.layout.local_part import LocalPart, holds
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest, canonical, intersect, row_major
from xrank.layout.stored_model import StoredShard
from xrank.layout.tensor_name import NameTable, TensorName, name_table, parse_name
from xrank.readers.records import Subject
from xrank.storage.regular_file import Origin
from xrank.words import ranks_text

if TYPE_CHECKING:
    from xrank.formats.rank_state import TensorRecord
    from xrank.formats.torch_archive import ArchivedTensor


SAME_LAYOUTS = "give all ranks one model, of one run and step, with the same layouts"
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

    @property
    def origin(self) -> Origin:
        """The rank and file, which errors name."""
        return Origin(self.file, self.rank)

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
    ranks, records = int_array(h.rank for h, _ in rows), int_array(h.record for h, _ in rows)
    table = NestTable.from_nests([nest for _, nest in rows])
    return StoredShard(name, held[0].dtype, tuple(shape), ranks, records, table)


def _from_storage(name: str, held: HeldTensor, local: Nest) -> list[Nest]:
    """Turn local row-major addresses into addresses of the storage, of which the tensor is a view."""
    if held.strides == row_major(held.shape) or 0 in held.shape:
        return [Nest(local.x + held.storage_offset, local.y, local.loops)]
    if any(stride <= 0 for n, stride in zip(held.shape, held.strides, strict=True) if n > 1):
        raise held.of(name).make(
            CorruptError,
            f"rank {held.rank} stored an expanded view, whose elements share bytes",
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
                "its ranks recorded one layout, and the layout file gives another",
                f"{given} on {given.mesh.grid}",
                f"{recorded} on {recorded.mesh.grid}",
                "take the tensor's rule out of the layout file",
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
            f"its ranks hold addends of a sum over {', '.join(part.sums)}, not values",
            str(claim),
            "parts or replicas",
            "reduce the tensor before it is saved",
        )
    if part.shape != held.shape:
        raise held.of(name).contradiction(
            f"rank {held.rank}'s part has another shape than its layout gives it",
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
