"""The ranks of each part of a tensor, and whether they hold all of it exactly once; nothing is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from xrank.engine.planner import Pieces, divide_pieces
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.coverage import contains, range_text
from xrank.layout.layout_map import Companion, base_layout, base_of_shape, base_shapes, companion_shape
from xrank.layout.local_part import check_shape, collect_known_names, global_size
from xrank.layout.mesh_parts import MeshParts, flat_mesh_parts, mesh_parts
from xrank.layout.nest_table import IntArray
from xrank.layout.nests import Nest, canonical, restrict, size, span
from xrank.layout.notation import LayoutTree, axes_of
from xrank.layout.tensor_layout import axis_lengths, flat_of
from xrank.layout.tensor_name import NameTable, name_table
from xrank.words import ranks_text


class Misfit(Struct, frozen=True):
    """The first elements, in row-major order, that are not held exactly once."""

    kind: str
    """``"gap"``, ``"overlap"`` or ``"outside"``."""
    where: str
    """The elements' range, in words."""
    ranks: tuple[int, ...] = ()
    """Ranks that hold them, by rising number; empty for a gap."""


def find_misfit(parts: MeshParts, shape: tuple[int, ...]) -> Misfit | None:
    """Return the first elements that are not held exactly once; nests with equal y sides are replicas, and count once.

    `parts` has y as the row-major address in the tensor of that global shape.
    """
    _, _, fault = divide_pieces(Pieces(parts.first_ranks[parts.owner], parts.nests), math.prod(shape))
    if fault is None:
        return None
    at = fault.address
    if fault.kind == "gap":
        later = (_rest_of(parts.nests[int(row)], at).x for row in np.flatnonzero(parts.nests.y_ends > at))
        return Misfit("gap", range_text(shape, at, min(later, default=math.prod(shape)) - 1))
    near = np.flatnonzero((parts.nests.y <= at) & (parts.nests.y_ends > at))
    holding = [int(row) for row in near if contains(parts.nests[int(row)], at)]
    ranks = tuple(parts.ranks[np.isin(parts.part, parts.owner[holding])].tolist())
    if fault.kind == "outside":
        return Misfit("outside", f"address {at:,} of {math.prod(shape):,}", ranks)
    runs = (_rest_of(parts.nests[row], at).loops for row in holding)
    length = min(loops[-1][0] if loops and loops[-1][1] == 1 else 1 for loops in runs)
    return Misfit("overlap", range_text(shape, at, at + length - 1), ranks)


def _destination(nest: Nest) -> Nest:
    """Return a nest's y side as both sides of a canonical one, which merges loops by it alone."""
    return canonical(Nest(nest.y, nest.y, tuple((n, stride, stride) for n, _, stride in nest.loops)))


def _rest_of(nest: Nest, address: int) -> Nest:
    """Return the first nest of a nest's destination from `address` on."""
    side = _destination(nest)
    return restrict(side, address, side.x + span(side.loops))[0]


class Share(Struct, frozen=True):
    """One part of a tensor, and all ranks that hold exactly this part."""

    ranks: tuple[int, ...]
    """By rising number; several ranks hold replicas."""
    nests: tuple[Nest, ...]
    """y is the row-major address in the tensor's global shape."""
    shape: tuple[int, ...] | None = None
    """Local shape, pads included; None if the part is in a flat buffer or in a file."""
    num_pads: int = 0
    """Number of local elements that are padding."""

    @property
    def num_elements(self) -> int:
        """Elements of the tensor in this part."""
        return sum(map(size, self.nests))


class Holdings(Struct, frozen=True):
    """The parts of one tensor and the ranks that hold them."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    dtype: str | None = None
    rule: str | None = None
    """Key of the layout map that decides for the tensor; None without one."""
    layout: TensorLayout | None = None
    mesh: DeviceMesh | None = None
    text: str | None = None
    """The layout or companion rule, in the notation of the layout file."""
    parts: MeshParts | None = None
    """The part of each rank; None if it is not known."""
    sums: tuple[str, ...] = ()
    """Axes along which the ranks hold addends."""
    misfit: Misfit | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes by name that do not follow from the shape."""
    problem: LayoutError | None = None
    """The error because of which nothing more is known."""
    lost: tuple[int, ...] = ()
    """Ranks whose part is lost, all of it or some."""

    @property
    def shares(self) -> tuple[Share, ...]:
        """Its parts one by one, by their lowest rank; computed on demand, as there may be a million."""
        return () if self.parts is None else _shares(self.parts)

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks of the mesh that have no part of the tensor, by rising number."""
        if self.parts is None or self.mesh is None:
            return ()
        return tuple(sorted(set(self.mesh.ranks).difference(self.parts.ranks.tolist())))


class Survey(Struct, frozen=True):
    """The holdings of every tensor."""

    meshes: Mapping[str, DeviceMesh]
    """``"mesh"`` and ``"view NAME"``."""
    rules: Mapping[str, str]
    tensors: tuple[Holdings, ...]
    unmatched: tuple[str, ...] = ()
    """Names of tensors without a rule."""
    unused: tuple[str, ...] = ()
    """Rules that match no tensor."""


@lru_cache(maxsize=256)
def _shares(parts: MeshParts) -> tuple[Share, ...]:
    """Return the parts as shares; equal parts of several ranks become one."""
    nests: list[list[Nest]] = [[] for _ in range(len(parts.local_sizes))]
    for row, part in enumerate(parts.owner.tolist()):
        nests[part].append(parts.nests[row])
    shapes = [None] * len(nests) if parts.shapes is None else [tuple(shape) for shape in parts.shapes.tolist()]
    kinds = list(zip(map(tuple, nests), shapes, parts.num_pads.tolist(), strict=True))
    found: dict[tuple[tuple[Nest, ...], tuple[int, ...] | None, int], list[int]] = {}
    for rank, part in zip(parts.ranks.tolist(), parts.part.tolist(), strict=True):
        found.setdefault(kinds[part], []).append(rank)
    return tuple(Share(tuple(ranks), *kind) for kind, ranks in found.items())


@lru_cache(maxsize=256)
def _compile_parts(
    layout: TensorLayout, mesh: DeviceMesh, shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]
) -> tuple[MeshParts, Misfit | None]:
    parts = mesh_parts(layout, mesh, shape, sizes=dict(sizes))
    return parts, find_misfit(parts, shape)


def apply_layout(start: Holdings, layout: TensorLayout, mesh: DeviceMesh) -> Holdings:
    """Return a tensor's holdings by a layout; LayoutError if that does not fit mesh and shape."""
    parts, misfit = _compile_parts(layout, mesh, start.shape, tuple(start.sizes.items()))
    return replace(start, layout=layout, mesh=mesh, text=str(layout), parts=parts, sums=layout.tree.sums, misfit=misfit)


def apply_parts(start: Holdings, parts: MeshParts, sums: tuple[str, ...] = ()) -> Holdings:
    """Return a tensor's holdings by the parts of its ranks."""
    return replace(start, parts=parts, sums=sums, misfit=find_misfit(parts, start.shape))


def apply_pieces(start: Holdings, held: Mapping[int, tuple[Nest, ...]]) -> Holdings:
    """Return a tensor's holdings by rank -> nests, of which only the y sides count."""
    placed: dict[int, tuple[tuple[Nest, ...], None, int]] = {}
    for rank, nests in held.items():
        sides = map(_destination, nests)  # however a file orders the elements
        own = tuple(Nest(0, side.y, tuple((n, 0, y) for n, _, y in side.loops)) for side in sides)
        placed[rank] = own, None, sum(map(size, own))
    return apply_parts(start, MeshParts.from_held(placed))


def sum_held_nbytes(tensors: Iterable[Holdings], width: Callable[[str | None], int]) -> dict[int, int]:
    """Return rank -> bytes of all its parts, pads included; `width` returns the bytes of an element of a type."""
    sums: dict[bytes, tuple[IntArray, np.ndarray[tuple[int], np.dtype[np.object_]]]] = {}
    meshes: dict[int, DeviceMesh] = {}
    for one in tensors:
        if one.parts is None:
            continue
        if one.mesh is not None:
            # By identity: hashing a mesh goes over all its ranks, for each tensor.
            meshes[id(one.mesh)] = one.mesh
        # As integers of any size: a model's bytes may be more than an array's numbers can count.
        held = one.parts.local_sizes.astype(object) * width(one.dtype)
        # Tensors on the same ranks are added as arrays; the loop over ranks below runs once for each set of ranks.
        key = one.parts.ranks.tobytes()
        before = sums.get(key)
        held = held[one.parts.part]
        sums[key] = one.parts.ranks, held if before is None else before[1] + held
    found = {rank: 0 for mesh in meshes.values() for rank in mesh.ranks}
    for ranks, held in sums.values():
        for rank, nbytes in zip(ranks.tolist(), held.tolist(), strict=True):
            found[rank] = found.get(rank, 0) + nbytes
    return dict(sorted(found.items()))


def find_problem(one: Holdings) -> LayoutError | None:
    """Return the first reason why a tensor is not held exactly once per replica, or None."""
    if one.problem is not None:
        one.problem.about(next_step="correct the layout file")
        return one.problem
    if one.rule is None and not one.shares:
        dims = ", ".join(f"d{i}" for i in range(len(one.shape)))
        return LayoutError(
            f"{one.name}: no rule gives its layout",
            tensor=one.name,
            got=f"shape {list(one.shape)}",
            want="a rule for every tensor",
            next_step=f'add a rule, such as "{one.name}" = "[{dims}]" for a tensor that every rank holds whole',
        )
    misfit = one.misfit
    if misfit is None:
        return None
    what = {
        "gap": "held by no rank",
        "overlap": f"held by {ranks_text(misfit.ranks)} in contradicting layouts",
        "outside": f"outside the tensor, on {ranks_text(misfit.ranks)}",
    }[misfit.kind]
    got = f"{one.text or 'what the ranks recorded'} of {list(one.shape)}"
    got += "" if one.mesh is None else f" on {one.mesh.grid}"
    want = "every element exactly once, or in equal parts as replicas"
    next_step = "correct the layout" if one.rule is None else f"correct the rule {one.rule!r}"
    rank, where = misfit.ranks[0] if misfit.ranks else None, misfit.where
    facts: dict[str, Any] = {"tensor": one.name, "rank": rank, "index_range": where}
    return LayoutError(f"{one.name}, {where}: {what}", got=got, want=want, next_step=next_step, **facts)


def survey(
    layouts: LayoutMap, shapes: Mapping[str, Sequence[int]], *, dtypes: Mapping[str, str] | None = None
) -> Survey:
    """Return the holdings of the tensors with these global shapes; errors are recorded in them, not raised."""
    compiler = _Compiler(layouts, {name: check_shape(shape) for name, shape in shapes.items()})
    found = []
    for name, shape in compiler.shapes.items():
        start = Holdings(name, shape, (dtypes or {}).get(name), sizes=layouts.sizes)
        try:
            found.append(compiler.holdings(start))
        except LayoutError as error:
            error.about(name, tensor=name)
            found.append(replace(start, rule=compiler.rules.get(name), problem=error))
    texts = {pattern: str(value) for pattern, value in (*layouts.items(), *layouts.companions.items())}
    meshes = {} if layouts.device_mesh is None else {"mesh": layouts.device_mesh}
    meshes.update((f"view {name}", view) for name, view in layouts.views.items())
    used = set(compiler.rules.values())
    unmatched = tuple(one.name for one in found if one.rule is None and one.problem is None)
    return Survey(meshes, texts, tuple(found), unmatched, tuple(rule for rule in texts if rule not in used))


class _Names(Struct, frozen=True):
    """The tensors of a name with dims, and the ranks that hold them."""

    groups: tuple[tuple[int, ...], ...]
    """Groups of ranks that hold the same names: equal on all axes of the name and of "where"."""
    held: Mapping[str, tuple[int, ...]]
    """Name -> the groups that hold it."""
    table: NameTable | None
    """The table of a rank that holds some of the names."""


class _Compiler:
    """Finds each tensor's rule, and compiles the part of every rank by it."""

    def __init__(self, layouts: LayoutMap, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.layouts, self.shapes = layouts, shapes
        self.rules: dict[str, str] = {}
        """Name -> the rule that decides for it."""
        self._names: dict[str, _Names] = {}
        self._alike: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Holdings] = {}
        self._fitting: dict[Companion, dict[tuple[int, ...], dict[str, tuple[int, ...]]]] = {}
        self._flats: dict[str, Mapping[str, MeshParts]] = {}
        self._members: dict[str, list[str]] = {}
        for rule, layout in layouts.items():
            flat = None if layout is None else flat_of(layout)
            for member in () if flat is None else flat.members:
                self._members.setdefault(member.name, []).append(rule)

    def holdings(self, start: Holdings) -> Holdings:
        """Return the holdings of one tensor; without a rule if none decides for it."""
        name = start.name
        rule, member_of = self.layouts.rule_for(name), self._members.get(name, [])
        companion = self.layouts.companion_rule_for(name)
        # A tied name without a rule of its own follows the tensor that it stands for.
        if rule is None and companion is None and not member_of and name in self.layouts.aliases:
            rule = self.layouts.rule_for(self.layouts.aliases[name])
            member_of = self._members.get(self.layouts.aliases[name], [])
        deciding = [each for each in (rule, companion, *member_of) if each is not None]
        if len(deciding) > 1:
            what = f"{name}: several rules match it"
            raise LayoutError(what, got=str(deciding), want="one", next_step="keep one of them")
        if not deciding:
            return start
        self.rules[name] = deciding[0]
        if companion is not None:
            return self._companion(replace(start, rule=companion))
        layout = self.layouts[deciding[0]]
        assert layout is not None
        start = replace(start, rule=deciding[0])
        if member_of:
            return self._flat(start, layout)
        found = apply_layout(start, layout, self._mesh(layout))
        if self.layouts.name_of(deciding[0]) is not None and name not in self.layouts.aliases:
            return self._apply_name(found, layout)
        return found

    def _mesh(self, layout: TensorLayout) -> DeviceMesh:
        mesh = layout.device_mesh or self.layouts.device_mesh
        if mesh is None:
            next_step = 'add a table like [mesh] with grid = "dp=2 tp=2" to the layout file'
            raise LayoutError("the mesh of its ranks is not given", got=str(layout), next_step=next_step)
        return mesh

    def _apply_name(self, whole: Holdings, layout: TensorLayout) -> Holdings:
        """Limit the holdings of a tensor with an index in its name to the ranks that hold this index."""
        rule = whole.rule or ""
        if rule not in self._names:
            self._names[rule] = self._compile_name(rule, layout)
        names = self._names[rule]
        groups = names.held.get(whole.name, ())
        if not groups and names.table is not None:
            names.table.local_name(whole.name)  # raises for an index that does not exist
        # Layers and experts are alike: one proof serves all of them on the same ranks.
        key = rule, groups, whole.shape
        if key not in self._alike:
            assert whole.parts is not None
            ranks = [rank for group in groups for rank in names.groups[group]]
            parts = whole.parts.select(np.isin(whole.parts.ranks, ranks))
            self._alike[key] = apply_parts(whole, parts, whole.sums)
        return replace(whole, parts=self._alike[key].parts, misfit=self._alike[key].misfit)

    def _compile_name(self, rule: str, layout: TensorLayout) -> _Names:
        mesh, name = self._mesh(layout), self.layouts.name_of(rule)
        assert name is not None
        axes = {axis for dim in name.dims for axis in axes_of(dim)} | {where.axis for where in layout.tree.where}
        alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in mesh.ranks:
            # Ranks at equal places have equal names: one table serves the group, as there may be thousands of ranks.
            at = {**mesh.coordinate(rank), **(layout.view_mesh.coordinate(rank) if layout.view_mesh else {})}
            alike.setdefault(tuple((axis, place) for axis, place in at.items() if axis in axes), []).append(rank)
        some, held = None, dict[str, tuple[int, ...]]()
        for group, ranks in enumerate(alike.values()):
            table = name_table(name, layout, mesh, mesh.coordinate(ranks[0]), sizes=self.layouts.sizes)
            for _, own in table or ():
                held[own] = (*held.get(own, ()), group)
            some = table or some
        return _Names(tuple(map(tuple, alike.values())), held, some)

    def _flat(self, start: Holdings, layout: TensorLayout) -> Holdings:
        rule, mesh = start.rule or "", self._mesh(layout)
        if rule not in self._flats:
            self._flats[rule] = flat_mesh_parts(layout, mesh, self.shapes, sizes=self.layouts.sizes)
        start = replace(start, layout=layout, mesh=mesh, text=str(layout))
        return apply_parts(start, self._flats[rule][self.layouts.aliases.get(start.name, start.name)], layout.tree.sums)

    def _companion(self, start: Holdings) -> Holdings:
        companion = self.layouts.companions[start.rule or ""]
        has_name = self.layouts.name_of(start.rule or "") is not None
        layout = base_layout(companion, self.layouts)
        bases: Mapping[str, tuple[int, ...]] = self.shapes  # with a name, the name decides
        if companion.of is None:
            bases = {}
        elif not has_name:
            # Once for each companion: looking through all tensors for each scale would be quadratic.
            if companion not in self._fitting:
                fitting = self._fitting.setdefault(companion, {})
                for name, shape in self.shapes.items():
                    with suppress(LayoutError):
                        fitting.setdefault(companion_shape(companion, shape), {})[name] = shape
            bases = self._fitting[companion].get(start.shape, {})
        base = base_of_shape(companion, self.layouts, start.name, start.shape, bases)
        mesh = self._mesh(layout)
        parts = mesh_parts(layout, mesh, base, sizes=self.layouts.sizes, companion=companion)
        found = apply_parts(replace(start, mesh=mesh, text=str(companion)), parts, layout.tree.sums)
        return self._apply_name(found, layout) if has_name else found


def compute_shapes(layouts: LayoutMap, *, is_strict: bool = False) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return name -> global shape, and rule -> reason for the rules without known shapes.

    A pattern stands for a tensor of its own name; a name with dims for all its tensors, a flat buffer for its members.

    If `is_strict`, a layout that fits no shape, such as 80 layers over 7 ranks, is a LayoutError and not a reason.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    unknown: dict[str, str] = {}
    for rule, stated in (*layouts.items(), *layouts.companions.items()):
        assert stated is not None
        try:
            if isinstance(stated, Companion):
                for name in _names(rule, base_layout(stated, layouts), layouts):
                    shapes[name] = companion_shape(stated, _base_shape(name, stated, layouts, shapes))
                continue
            mesh, flat = stated.device_mesh or layouts.device_mesh, flat_of(stated)
            trees = {rule: stated.tree} if flat is None else {m.name: LayoutTree(m.dims) for m in flat.members}
            found = {name: _shape_of(tree, layouts, mesh, stated.view_mesh) for name, tree in trees.items()}
            shapes |= found if flat is not None else dict.fromkeys(_names(rule, stated, layouts), found[rule])
        # `global_size` looks names up; the key is the missing size.
        except KeyError as error:
            unknown[rule] = f"the size {error.args[0]!r} is not known"
        except LayoutError as error:
            if is_strict:
                what = f"the rule {rule!r} fits no tensor: {error.message}"
                next_step = error.next_step or "correct the sizes or the cuts of the rule, or the mesh"
                raise LayoutError(what, tensor=rule, got=error.got, want=error.want, next_step=next_step) from error
            unknown[rule] = error.message
    return shapes, unknown


def _base_shape(
    name: str, companion: Companion, layouts: LayoutMap, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    if companion.base is not None:
        return _shape_of(companion.base, layouts, layouts.device_mesh)
    found = base_shapes(companion, layouts, name, shapes)
    if len(found) != 1:
        raise KeyError(companion.of)
    return found.pop()


def _names(rule: str, layout: TensorLayout, layouts: LayoutMap) -> list[str]:
    """Return the names of a rule's tensors; without a name with dims, or a mesh, the rule itself."""
    mesh, name = layout.device_mesh or layouts.device_mesh, layouts.name_of(rule)
    if name is None or mesh is None:
        return [rule]
    for rank in mesh.ranks:
        table = name_table(name, layout, mesh, mesh.coordinate(rank), sizes=layouts.sizes)
        # Every rank's table has the global sizes, so the first one suffices.
        if table is not None:
            return [name.with_indices(*indices) for indices in product(*map(range, table.global_sizes))]
    return []


def _shape_of(
    tree: LayoutTree, layouts: LayoutMap, mesh: DeviceMesh | None, view: DeviceMesh | None = None
) -> tuple[int, ...]:
    bound = collect_known_names(tree, {} if mesh is None else axis_lengths(mesh, view), layouts.sizes)
    return tuple(global_size(dim, bound) for dim in tree.dims)
