"""Surveys: the holdings of every tensor, by a layout map and the tensors' shapes; nothing is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.binding import check_shape
from xrank.layout.companion import Companion, companion_shape
from xrank.layout.companion_base import base_layout, base_of_shape
from xrank.layout.companion_parts import companion_mesh_parts
from xrank.layout.flat import flat_mesh_parts
from xrank.layout.mesh_parts import MeshParts
from xrank.layout.notation import axes_of
from xrank.layout.tensor_layout import flat_of
from xrank.layout.tensor_name import NameTable, name_table
from xrank.plan.holdings import Holdings, Survey, apply_layout, apply_parts


def survey(
    layouts: LayoutMap, shapes: Mapping[str, Sequence[int]], *, dtypes: Mapping[str, str] | None = None
) -> Survey:
    """Return the holdings of the tensors with these global shapes; errors are recorded in them, not raised.

    Args:
        layouts: layouts of the tensors, with a mesh.
        shapes: global shape by name. A flat buffer's members are tensors like others.
        dtypes: safetensors name of the element type, by name.
    """
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
    return Survey(
        meshes,
        texts,
        tuple(found),
        tuple(one.name for one in found if one.rule is None and one.problem is None),
        tuple(rule for rule in texts if rule not in used),
    )


@dataclass(frozen=True, slots=True)
class _Names:
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
        deciding = [each for each in (rule, companion, *member_of) if each is not None]
        if len(deciding) > 1:
            raise LayoutError(
                f"{name}: several rules decide for it", got=str(deciding), want="one", next_step="keep one of them"
            )
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
            raise LayoutError(
                "the mesh of its ranks is not given",
                got=str(layout),
                next_step='add a table like [mesh] with grid = "dp=2 tp=2" to the layout file',
            )
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
        return apply_parts(start, self._flats[rule][start.name], layout.tree.sums)

    def _companion(self, start: Holdings) -> Holdings:
        companion = self.layouts.companions[start.rule or ""]
        layout = base_layout(companion, self.layouts)
        bases = self._bases(start, companion)
        base = base_of_shape(companion, self.layouts, start.name, start.shape, bases)
        mesh = self._mesh(layout)
        parts = companion_mesh_parts(companion, layout, mesh, base, sizes=self.layouts.sizes)
        found = apply_parts(replace(start, mesh=mesh, text=str(companion)), parts, layout.tree.sums)
        return found if self.layouts.name_of(start.rule or "") is None else self._apply_name(found, layout)

    def _bases(self, of: Holdings, companion: Companion) -> Mapping[str, tuple[int, ...]]:
        """Return the tensors that a companion may follow from: those of a fitting shape."""
        if companion.of is None:
            return {}
        if self.layouts.name_of(of.rule or "") is not None:
            return self.shapes  # the name decides
        # Once for each companion: looking through all tensors for each scale would be quadratic.
        if companion not in self._fitting:
            fitting = self._fitting.setdefault(companion, {})
            for name, shape in self.shapes.items():
                with suppress(LayoutError):
                    fitting.setdefault(companion_shape(companion, shape), {})[name] = shape
        return self._fitting[companion].get(of.shape, {})
