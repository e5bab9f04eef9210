"""Find the base tensor of a companion by a layout map, and its shape."""

from __future__ import annotations

from collections.abc import Mapping

from xrank.errors import LayoutError
from xrank.layout.companion import Companion, companion_shape
from xrank.layout.layout_map import LayoutMap
from xrank.layout.tensor_layout import TensorLayout

_Shape = tuple[int, ...]


def base_layout(companion: Companion, layouts: LayoutMap) -> TensorLayout:
    """Return the layout of a companion's base."""
    if companion.of is not None:
        layout = layouts[companion.of]
        assert layout is not None  # layout files without this rule are refused
        return layout
    assert companion.base is not None
    layout = TensorLayout.from_tree(companion.base)
    return layout if layouts.device_mesh is None else layout.with_mesh(layouts.device_mesh, layouts.views)


def base_shapes(companion: Companion, layouts: LayoutMap, name: str, shapes: Mapping[str, _Shape]) -> set[_Shape]:
    """Return the shapes that the base of a companion may have; empty if its text has the base's layout.

    Args:
        companion: a companion in the map.
        layouts: the map.
        name: the companion's global name.
        shapes: global shapes of tensors.
    """
    if companion.of is None:
        return set()
    rule = layouts.companion_rule_for(name)
    pattern, base = None if rule is None else layouts.name_of(rule), layouts.name_of(companion.of)
    indices = None if pattern is None else pattern.indices(name)
    if base is not None and indices is not None and len(base.dims) == len(indices):
        own = base.with_indices(*indices)  # both names have the same dims, so each companion has its own base
        if own in shapes:
            return {shapes[own]}
    return {shape for other, shape in shapes.items() if layouts.rule_for(other) == companion.of}


def base_of_shape(
    companion: Companion, layouts: LayoutMap, name: str, shape: _Shape, shapes: Mapping[str, _Shape]
) -> _Shape:
    """Return the shape of the base of a companion with that global shape.

    Args:
        companion: a companion in the map.
        layouts: the map.
        name: the companion's global name.
        shape: its global shape.
        shapes: global shapes of tensors, the base's among them.

    Raises:
        LayoutError: no shape or several shapes fit.
    """
    found = {base for base in base_shapes(companion, layouts, name, shapes) if _gives(companion, base, shape)}
    if companion.of is None:
        dims = range(len(shape))
        blocks = companion.blocks or tuple(companion.factor if i == companion.dim else 1 for i in dims)
        found = (
            {tuple(n * block for n, block in zip(shape, blocks, strict=True))} if len(blocks) == len(shape) else set()
        )
    if len(found) != 1:
        raise LayoutError(
            f"{name}: no single shape of its base follows from {companion}",
            tensor=name,
            got=f"{list(shape)}; bases {sorted(map(list, found))[:4]}",
            want="one tensor, or several of one shape, that it belongs to",
            next_step="give the base's rule for these tensors alone",
        )
    return found.pop()


def _gives(companion: Companion, base: _Shape, shape: _Shape) -> bool:
    try:
        return companion_shape(companion, base) == shape
    except LayoutError:
        return False
