"""Global shapes that follow from a layout map alone, if all sizes in it are numbers or have one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.binding import collect_known_names, global_size
from xrank.layout.companion import Companion, companion_shape
from xrank.layout.companion_base import base_layout, base_shapes
from xrank.layout.notation import LayoutTree
from xrank.layout.tensor_layout import axis_lengths, flat_of
from xrank.layout.tensor_name import TensorName, name_table


def compute_shapes(layouts: LayoutMap, *, is_strict: bool = False) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return name -> global shape, and rule -> reason for the rules without known shapes.

    A pattern stands for a tensor of its own name; a name with dims for all its tensors, a flat buffer for its members.

    Args:
        layouts: the layouts.
        is_strict: whether a layout whose sizes are known, and which no shape fits, is an error; else it is a reason.

    Raises:
        LayoutError: such a layout, such as 80 layers that a mesh axis of 7 ranks cannot cut.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    unknown: dict[str, str] = {}
    for rule, layout in layouts.items():
        assert layout is not None
        try:
            shapes.update(_shapes_of(rule, layout, layouts))
        # `global_size` looks names up; the key is the missing size.
        except KeyError as error:
            unknown[rule] = f"the size {error.args[0]!r} is not known"
        except LayoutError as error:
            if is_strict:
                raise _name_rule(error, rule) from error
            unknown[rule] = error.message
    for rule, companion in layouts.companions.items():
        try:
            for name in _companion_names(rule, companion, layouts):
                shapes[name] = companion_shape(companion, _base_shape(name, companion, layouts, shapes))
        except KeyError as error:
            unknown[rule] = f"the size {error.args[0]!r} is not known"
        except LayoutError as error:
            if is_strict:
                raise _name_rule(error, rule) from error
            unknown[rule] = error.message
    return shapes, unknown


def _name_rule(error: LayoutError, rule: str) -> LayoutError:
    return LayoutError(
        f"the rule {rule!r} fits no tensor: {error.message}",
        tensor=rule,
        got=error.got,
        want=error.want,
        next_step=error.next_step or "correct the sizes or the cuts of the rule, or the mesh",
    )


def _shapes_of(rule: str, layout: TensorLayout, layouts: LayoutMap) -> Mapping[str, tuple[int, ...]]:
    mesh, flat, name = layout.device_mesh or layouts.device_mesh, flat_of(layout), layouts.name_of(rule)
    if flat is not None:
        return {
            member.name: _shape_of(LayoutTree(member.dims), layouts, mesh, layout.view_mesh) for member in flat.members
        }
    shape = _shape_of(layout.tree, layouts, mesh, layout.view_mesh)
    if name is None or mesh is None:
        return {rule: shape}
    return dict.fromkeys(_names(name, layout, mesh, layouts), shape)


def _companion_names(rule: str, companion: Companion, layouts: LayoutMap) -> list[str]:
    name, layout = layouts.name_of(rule), base_layout(companion, layouts)
    mesh = layout.device_mesh or layouts.device_mesh
    return [rule] if name is None or mesh is None else _names(name, layout, mesh, layouts)


def _base_shape(
    name: str, companion: Companion, layouts: LayoutMap, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    if companion.base is not None:
        return _shape_of(companion.base, layouts, layouts.device_mesh)
    found = base_shapes(companion, layouts, name, shapes)
    if len(found) != 1:
        raise KeyError(companion.of)
    return found.pop()


def _names(name: TensorName, layout: TensorLayout, mesh: DeviceMesh, layouts: LayoutMap) -> list[str]:
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
