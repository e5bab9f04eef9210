"""What each rank's part of a tensor is said to be: by the layout that the rank recorded, or by a layout file's rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.companion import Companion, inlined, is_companion, parse_companion
from xrank.layout.companion_base import base_layout
from xrank.layout.local_part import holds
from xrank.layout.tensor_name import NameTable, TensorName, name_table, parse_name
from xrank.readers.held_tensor import HeldTensor
from xrank.words import ranks_text

__all__ = ["Claim", "Claims", "claimed_name", "counted_names", "named", "own_name"]


@dataclass(frozen=True, slots=True)
class Claim:
    """How the tensor that a rank's part belongs to is cut, and over which ranks."""

    layout: TensorLayout
    mesh: DeviceMesh
    pattern: TensorName | None = None
    """The tensor's name, where it has dims in it: the rank's own name for it has other indices."""
    companion: Companion | None = None
    """How the tensor follows from another one, whose layout it is then; None for a tensor cut by itself."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Sizes by name that shapes do not tell."""
    is_recorded: bool = False
    """By the rank itself; False for a rule of a layout file."""

    def __str__(self) -> str:
        return str(self.layout if self.companion is None else self.companion)


class Claims:
    """Finds the claim of each part; one for all parts of a source, since parts of one name share what is found.

    Args:
        layouts: the layout file's content, if there is one.
    """

    def __init__(self, layouts: LayoutMap | None) -> None:
        self._layouts = layouts
        self._given: dict[str, Claim | None] = {}

    def of(self, name: str, held: HeldTensor) -> Claim | None:
        """Return the claim of a rank's part; None where nothing says how its tensor is cut.

        Args:
            name: the tensor's name, as the rank has it.
            held: the part.

        Raises:
            LayoutError: the file's rules contradict each other, or what the rank recorded.
        """
        given = self.given(name)
        if held.layout is None:
            return given
        recorded = _recorded(held, name)
        if given is not None and _meaning(_as_seen_by(held.rank, given, recorded.mesh)) != _meaning(recorded):
            raise LayoutError(
                f"{name}: its ranks recorded a layout, and the layout file gives another one",
                tensor=name,
                rank=held.rank,
                got=f"{given} on {given.mesh.grid}",
                want=f"{recorded} on {recorded.mesh.grid}",
                next_step="take the tensor's rule out of the layout file",
            )
        return recorded

    def given(self, name: str) -> Claim | None:
        """Return the claim that the layout file makes for a name, a rank's own or a global one; None without a rule.

        Raises:
            LayoutError: several rules decide, or nothing says the mesh.
        """
        if self._layouts is None:
            return None
        if name not in self._given:
            self._given[name] = _given(name, self._layouts)
        return self._given[name]


def _as_seen_by(rank: int, given: Claim, mesh: DeviceMesh) -> Claim:
    """Return a file's claim on a rank's own mesh where that is a part of the file's.

    FSDP2 over tensor parallelism records norms on the mesh of its one axis; a file has one mesh for all tensors.
    """
    is_part = {*mesh.axis_names} < {*given.mesh.axis_names} and given.layout.view_mesh is None and rank in given.mesh
    if is_part and _part_with(given.mesh, rank, mesh.axis_names) == mesh:
        return replace(given, mesh=mesh)
    return given


@lru_cache(maxsize=4096)
def _part_with(mesh: DeviceMesh, rank: int, axes: tuple[str, ...]) -> DeviceMesh:
    """Return the part of a mesh that differs from a rank along these axes alone."""
    return mesh.submesh(**{name: place for name, place in mesh.coordinate(rank).items() if name not in axes})


def _meaning(claim: Claim) -> tuple[object, ...]:
    companion = None if claim.companion is None else inlined(claim.companion, claim.layout.tree)
    return str(companion or claim.layout), claim.mesh, claim.layout.view_mesh, claim.pattern


def _given(name: str, layouts: LayoutMap) -> Claim | None:
    try:
        rule, companion_rule = layouts.rule_for(name), layouts.companion_rule_for(name)
    except LayoutError as error:
        error.about(next_step="let the patterns of the layout file tell the names apart")
        raise
    if rule is not None and companion_rule is not None:
        raise LayoutError(
            f"{name}: two rules of the layout file decide for it",
            tensor=name,
            got=f"{rule!r} and {companion_rule!r}",
            want="one",
            next_step="keep one of them",
        )
    deciding = rule if rule is not None else companion_rule
    if deciding is None:
        target = layouts.aliases.get(name)  # which is no alias itself
        return None if target is None else _given(target, layouts)
    if companion_rule is not None:
        companion = layouts.companions[companion_rule]
        layout = base_layout(companion, layouts).with_sizes(layouts.sizes)
    else:
        companion = None
        found = layouts[name]
        assert found is not None
        layout = found.with_sizes(layouts.sizes)  # as a state records it
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


def _recorded(held: HeldTensor, name: str) -> Claim:
    assert held.layout is not None
    if held.mesh is None or held.rank not in held.mesh:
        raise held.contradiction(
            name,
            f"the mesh that rank {held.rank} recorded is not one of its own",
            got="no mesh" if held.mesh is None else f"a mesh of {ranks_text(held.mesh.ranks)}",
            want=f"a mesh with rank {held.rank}",
            next_step="let the rank write its state again",
        )
    try:
        companion, layout = _parsed(held.layout)
        if held.view is not None:
            layout = _attached(layout, held.mesh, held.view)
        pattern = None if held.pattern is None else _parsed_name(held.pattern)
    except LayoutError as error:
        raise named(error, name, held) from None
    return Claim(layout, held.mesh, pattern, companion, is_recorded=True)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[Companion | None, TensorLayout]:
    """Return the same objects for equal texts: a model has a handful of layouts."""
    if not is_companion(text):
        return None, TensorLayout.parse(text)
    companion = parse_companion(text)
    if companion.base is None:
        raise LayoutError("the layout names a rule, and a state has none", got=text, want="the base's own layout")
    return companion, TensorLayout.from_tree(companion.base)


@lru_cache(maxsize=4096)
def _attached(layout: TensorLayout, mesh: DeviceMesh, view: DeviceMesh) -> TensorLayout:
    return layout.with_mesh(mesh, {layout.tree.view or "": view})


@lru_cache(maxsize=4096)
def _parsed_name(pattern: str) -> TensorName:
    return parse_name(pattern)


def named(error: LayoutError, name: str, held: HeldTensor) -> LayoutError:
    """Return the error as one about a rank's part of that tensor."""
    mend = "correct the layout file" if held.layout is None else f"let rank {held.rank} write its state again"
    error.about(name, tensor=name, rank=held.rank, file=held.file, next_step=mend)
    return error


def claimed_name(claim: Claim | None, name: str, held: HeldTensor) -> str | None:
    """Return the global name of what a rank holds under a name of its own; None for padding, no tensor's element.

    Raises:
        LayoutError: the name's index is beyond what the rank holds, or the layout leaves the rank out.
    """
    if claim is None or claim.pattern is None or held.rank not in claim.mesh:
        return name
    try:
        table = _table(claim.pattern, claim.layout, claim.mesh, held.rank, claim.sizes)
        if table is None:
            raise LayoutError(
                "its rank has a part, and the layout says that it has none",
                got=f"a part of shape {list(held.shape)}",
                want=f"none, by {claim} on {claim.mesh.grid}",
            )
        return table.global_name(name)
    except LayoutError as error:
        raise named(error, name, held) from None


def counted_names(claim: Claim) -> Iterator[str]:
    """Yield every name that a claim's name with dims stands for, over all ranks; none for a name without dims."""
    if claim.pattern is None:
        return
    for rank in claim.mesh.ranks:
        table = _table(claim.pattern, claim.layout, claim.mesh, rank, claim.sizes)
        if table is not None:
            yield from (claim.pattern.at(*indices) for indices in product(*map(range, table.global_sizes)))
            return


def own_name(claim: Claim, name: str, rank: int) -> str | None:
    """Return the name by which a rank of the claim's mesh knows a tensor; None if it is to have no part of it."""
    if claim.pattern is None:
        return name if holds(claim.layout, claim.mesh, claim.mesh.coordinate(rank)) else None
    table = _table(claim.pattern, claim.layout, claim.mesh, rank, claim.sizes)
    return None if table is None else table.local_name(name)


@lru_cache(maxsize=65536)
def _table(
    pattern: TensorName, layout: TensorLayout, mesh: DeviceMesh, rank: int, sizes: tuple[tuple[str, int], ...]
) -> NameTable | None:
    known: Mapping[str, int] = dict(sizes)
    return name_table(pattern, layout, mesh, mesh.coordinate(rank), sizes=known)
