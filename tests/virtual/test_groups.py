import pickle
from itertools import product

import pytest

from xrank.errors import LayoutError, UsageError
from xrank.layout import DeviceMesh
from xrank.virtual import Mesh, MeshIndex
from xrank.virtual.sharding import as_device_mesh, group_of

MESH = DeviceMesh((2, 2, 2), ("pp", "dp", "tp"), [7, 6, 5, 4, 3, 2, 1, 0])


def test_members_are_those_that_differ_along_the_axes_alone():
    for device in MESH.ranks:
        own = MESH.coordinate(device)
        for axes in [("tp",), ("pp", "tp"), ("tp", "pp"), (), ("pp", "dp", "tp")]:
            wanted = tuple(
                other
                for other in MESH.ranks
                if all(MESH.coordinate(other)[axis] == own[axis] for axis in MESH.axis_names if axis not in axes)
            )
            assert group_of(MESH, device, axes) == wanted
    assert group_of(MESH, 6, "tp") == (7, 6)
    assert group_of(MESH, 6, "dp") == (6, 4)
    assert group_of(MESH, 6) == MESH.ranks


def test_an_explicit_group_keeps_its_order():
    assert group_of(MESH, 3, group=[5, 3, 0]) == (5, 3, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group": [5, 0]}, "lacks the device itself"),
        ({"group": [3, 5, 3]}, "3 twice"),
        ({"group": [3, 9]}, "no device 9"),
        ({"group": [3, "a"]}, "no device 'a'"),
        ({"group": []}, "lacks the device itself"),
        ({"group": [3, 5], "axes": "tp"}, "and over axes"),
    ],
)
def test_invalid_groups_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message) as raised:
        group_of(MESH, 3, **arguments)
    assert raised.value.rank == 3 and "device 3" in str(raised.value)


@pytest.mark.parametrize("axes", ["ep", ("tp", "ep"), ("tp", "tp")])
def test_axes_of_invalid_shardings(axes):
    with pytest.raises(LayoutError, match=r"no axis 'ep'|'tp' is named twice"):
        group_of(MESH, 3, axes)


def test_a_mesh_by_lengths():
    mesh = Mesh(2, 4)
    assert list(mesh) == [MeshIndex(x, y) for x, y in product(range(2), range(4))]
    assert len(mesh) == 8 and (mesh.x_dim, mesh.y_dim) == (2, 4)
    assert [mesh.flat(index) for index in mesh] == list(range(8))
    assert [mesh.index(device) for device in range(8)] == list(mesh)
    index = MeshIndex(1, 3)
    assert (index.x, index.y, index.z, tuple(index)) == (1, 3, 0, (1, 3)) and mesh.flat(index) == 7
    assert as_device_mesh(mesh) == as_device_mesh((2, 4)) == DeviceMesh((2, 4), ("x", "y"))
    assert as_device_mesh(5) == DeviceMesh((5,), ("x",))
    assert as_device_mesh([1, 2, 3, 4]).axis_names == ("x", "y", "z", "w")
    assert as_device_mesh(MESH) is MESH
    assert pickle.loads(pickle.dumps((mesh, index))) == (mesh, index)


@pytest.mark.parametrize("places", [(1, 1, 1, 1, 1), (1, 1, 1), (1, 1, 1, 2)])
def test_a_place_that_a_mesh_lacks(places):
    with pytest.raises(LayoutError, match=r"is not a place in|has no index 2 along 'w'"):
        Mesh(2, 2, 2, 2).flat(MeshIndex(*places))


@pytest.mark.parametrize("lengths", [(), (1, 1, 1, 1, 1), (2, 0), (2, 1.5), (True,)])
def test_invalid_meshes_are_refused(lengths):
    with pytest.raises((UsageError, LayoutError)):
        as_device_mesh(lengths)
