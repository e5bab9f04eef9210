"""What each rank's part of a tensor is said to be: by the layout that the rank recorded, or by a layout file's rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.companion import Companion
from xrank.layout.local_part import holds
from xrank.layout.tensor_name import NameTable, TensorName, name_table, parse_name
from xrank.plan.planner import ranks_text
from xrank.readers.held_tensor import HeldTensor

__all__ = ["Claim", "Claims", "claimed_name", "counted_names", "named", "owns"]


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
        given = self._of_file(name)
        if held.layout is None:
            return given
        recorded = _recorded(held, name)
        if given is not None and _meaning(given) != _meaning(recorded):
            raise LayoutError(
                f"{name}: its ranks recorded a layout, and the layout file gives another one",
                tensor=name,
                rank=held.rank,
                got=f"{given} on {given.mesh.grid}",
                want=f"{recorded} on {recorded.mesh.grid}",
                next_step="take the tensor's rule out of the layout file",
            )
        return recorded

    def _of_file(self, name: str) -> Claim | None:
        if self._layouts is None:
            return None
        if name not in self._given:
            self._given[name] = _given(name, self._layouts)
        return self._given[name]


def _meaning(claim: Claim) -> tuple[object, ...]:
    return str(claim), claim.mesh, claim.layout.view_mesh, claim.pattern


def _given(name: str, layouts: LayoutMap) -> Claim | None:
    try:
        rule, companion_rule = layouts.rule_for(name), layouts.companion_rule_for(name)
    except LayoutError as error:
        error.next_step = error.next_step or "let the patterns of the layout file tell the names apart"
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
        return None
    if companion_rule is not None:
        companion = layouts.companions[companion_rule]
        layout = _base_layout(companion, layouts)
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


def _base_layout(companion: Companion, layouts: LayoutMap) -> TensorLayout:
    """Return the layout of the tensor that a companion follows from."""
    if companion.of is not None:
        layout = layouts[companion.of]
        assert layout is not None
        return layout
    assert companion.base is not None
    layout = TensorLayout.from_tree(companion.base)
    return layout if layouts.device_mesh is None else layout.with_mesh(layouts.device_mesh, layouts.views)


def _recorded(held: HeldTensor, name: str) -> Claim:
    assert held.layout is not None
    if held.mesh is None or held.rank not in held.mesh:
        raise held.contradiction(
            name,
            f"the mesh that rank {held.rank} recorded is not one of its own",
            got="no mesh" if held.mesh is None else f"a mesh of ranks {ranks_text(held.mesh.ranks)}",
            want=f"a mesh with rank {held.rank}",
            next_step="let the rank write its state again",
        )
    try:
        layout = _attached(held.layout, held.mesh, held.view) if held.view is not None else _parsed(held.layout)
        pattern = None if held.pattern is None else _parsed_name(held.pattern)
    except LayoutError as error:
        raise named(error, name, held) from None
    return Claim(layout, held.mesh, pattern, is_recorded=True)


@lru_cache(maxsize=4096)
def _parsed(layout: str) -> TensorLayout:
    """Return the same object for equal texts: a model has a handful of layouts."""
    return TensorLayout.parse(layout)


@lru_cache(maxsize=4096)
def _attached(layout: str, mesh: DeviceMesh, view: DeviceMesh) -> TensorLayout:
    parsed = TensorLayout.parse(layout)
    return parsed.with_mesh(mesh, {parsed.tree.view or "": view})


@lru_cache(maxsize=4096)
def _parsed_name(pattern: str) -> TensorName:
    return parse_name(pattern)


def named(error: LayoutError, name: str, held: HeldTensor) -> LayoutError:
    """Return the error as one about a rank's part of that tensor."""
    error.message = f"{name}: {error.message}"
    error.tensor, error.rank, error.file = name, held.rank, held.file
    mend = "correct the layout file" if held.layout is None else f"let rank {held.rank} write its state again"
    error.next_step = error.next_step or mend
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


def owns(claim: Claim, name: str, rank: int) -> bool:
    """Say whether a rank of the claim's mesh is to have a part of the tensor, by its global name."""
    if claim.pattern is None:
        return holds(claim.layout, claim.mesh, claim.mesh.coordinate(rank))
    table = _table(claim.pattern, claim.layout, claim.mesh, rank, claim.sizes)
    return table is not None and table.local_name(name) is not None


@lru_cache(maxsize=65536)
def _table(
    pattern: TensorName, layout: TensorLayout, mesh: DeviceMesh, rank: int, sizes: tuple[tuple[str, int], ...]
) -> NameTable | None:
    known: Mapping[str, int] = dict(sizes)
    return name_table(pattern, layout, mesh, mesh.coordinate(rank), sizes=known)
