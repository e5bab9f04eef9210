"""Random meshes and layouts that are chains of cuts, and the elements that ranks hold of them by the layout alone."""

from math import prod

from hypothesis import strategies as st

from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.local_part import local_part
from xrank.layout.nests import addresses
from xrank.layout.notation import Part, Parts, Product, Size, Split


def elements(layout, mesh, shape):
    """Return what every rank holds: its local shape and its elements' global addresses, in local order."""
    held = {}
    for rank in mesh.ranks:
        part = local_part(layout, mesh, mesh.coordinate(rank), shape)
        pairs = sorted(pair for nest in part.nests for pair in addresses(nest))
        assert [x for x, _ in pairs] == list(range(prod(part.shape)))
        held[rank] = (part.shape, [y for _, y in pairs])
    return held


@st.composite
def meshes(draw):
    """A mesh of one to three axes, at most 27 ranks, in an order of any kind."""
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    names = draw(st.permutations(["dp", "tp", "pp"]))[: len(lengths)]
    first = draw(st.sampled_from([0, 5]))  # a mesh need not begin with rank 0
    return DeviceMesh(lengths, names, range(first, first + prod(lengths)))


@st.composite
def cases(draw, kinds=("/",), most_axes=3, in_mesh_order=False, pieces=(1,)):
    """(layout, mesh, shape) that fit each other: every axis cuts at most one dim, in any order."""
    mesh = draw(meshes())
    ndim = draw(st.integers(0, 3))
    orders = [[] for _ in range(ndim)]
    for axis in mesh.axis_names if in_mesh_order else draw(st.permutations(mesh.axis_names)):
        dim = draw(st.integers(0, ndim))
        if dim < ndim and len(orders[dim]) < most_axes:
            orders[dim].append(axis)
    dims, shape = [], []
    for i, order in enumerate(orders):
        kind = draw(st.sampled_from(kinds))
        node = Size(f"d{i}")
        for axis in order:
            node = Split(node, axis, kind)
        parts = prod(mesh.axis_length(axis) for axis in order)
        size = draw(st.integers(0, 9)) if kind == "/~" else parts * draw(st.integers(0, 3))
        packed = draw(st.sampled_from(pieces))
        if packed > 1:
            in_parts = Parts(tuple(Part(f"p{j}", node) for j in range(packed)))
            node = draw(st.sampled_from([Product((Size(packed), node)), in_parts]))
        dims.append(node)
        shape.append(size * packed)
    return TensorLayout.from_dims(dims, mesh), mesh, tuple(shape)
