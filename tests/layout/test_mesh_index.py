import pickle

import pytest

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, MeshIndex

MESH = DeviceMesh((2, 3), ("dp", "tp"), [5, 4, 3, 2, 1, 0])


def test_a_place_is_a_value():
    index = MeshIndex.from_rank(MESH, 3)
    assert index == MeshIndex(MESH, (0, 2)) and hash(index) == hash(MeshIndex(MESH, (0, 2)))
    assert (index["dp"], index["tp"], index.rank) == (0, 2, 3)
    assert index.coordinate == {"dp": 0, "tp": 2}
    assert pickle.loads(pickle.dumps(index)) == index
    with pytest.raises(AttributeError):
        index.places = (0, 0)


def test_all_places_come_in_the_mesh_order_and_go_back_to_their_ranks():
    assert [index.rank for index in MeshIndex.list_all(MESH)] == [5, 4, 3, 2, 1, 0]
    assert all(MeshIndex.from_rank(MESH, index.rank) == index for index in MeshIndex.list_all(MESH))


def test_a_shift_wraps():
    index = MeshIndex.from_rank(MESH, 3)
    assert index.shift("tp").rank == 5 and index.shift("tp", -1).rank == 4 and index.shift("tp", 7).rank == 5
    assert index.shift("dp").shift("dp") == index
    assert index.with_places(tp=0, dp=1).rank == 2


def test_neighbours_are_each_there_once():
    index = MeshIndex.from_rank(MESH, 4)
    assert [near.rank for near in index.neighbours("tp")] == [5, 3]
    assert [near.rank for near in index.neighbours()] == [1, 5, 3]  # two places along dp: before and after are one
    assert MeshIndex.from_rank(DeviceMesh((1,), ("x",)), 0).neighbours() == ()


def test_refuses_places_and_axes_that_are_not_there():
    index = MeshIndex.from_rank(MESH, 4)
    for act in (
        lambda: MeshIndex(MESH, (0, 3)),
        lambda: MeshIndex(MESH, (0,)),
        lambda: MeshIndex.from_rank(MESH, 6),
        lambda: index["pp"],
        lambda: index.shift("pp"),
        lambda: index.with_places(tp=3),
        lambda: index.neighbours("tp", "tp"),
    ):
        with pytest.raises(LayoutError):
            act()
