"""Claims: the declared cut of each rank's part of a tensor, by the rank's recorded layout or a layout file's rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.companion import Companion, inline_base, is_companion, parse_companion
from xrank.layout.companion_parts import base_layout
from xrank.layout.local_part import holds
from xrank.layout.tensor_name import NameTable, TensorName, name_table, parse_name
from xrank.readers.held_tensor import HeldTensor
from xrank.words import ranks_text


@dataclass(frozen=True, slots=True)
class Claim:
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
    """Finds the claim of each part. Use one object per source, because parts of one name share results.

    Args:
        layouts: the layout file's content, if any.
    """

    def __init__(self, layouts: LayoutMap | None) -> None:
        self._layouts = layouts
        self._from_file: dict[str, Claim | None] = {}

    def find(self, name: str, held: HeldTensor) -> Claim | None:
        """Return the claim of a rank's part; None if it is unknown how its tensor is cut.

        Args:
            name: the rank's name of the tensor.
            held: the part.

        Raises:
            LayoutError: the file's rules contradict each other or the rank's record.
        """
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
        """Return the layout file's claim for a rank's own name or a global one; None without a rule.

        Raises:
            LayoutError: several rules match, or the mesh is missing.
        """
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
    """Return the global name of a rank's part with a name of the rank's own; None for padding.

    Raises:
        LayoutError: the name's index is beyond the rank's part, or the layout leaves the rank out.
    """
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
