import pickle
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh

pytestmark = pytest.mark.quick


def test_ranks_lie_row_major_last_axis_fastest():
    mesh = DeviceMesh((2, 2, 2), ("pp", "dp", "tp"))
    assert mesh.ranks == tuple(range(8)) and mesh.size == 8
    assert mesh.coordinate(5) == {"pp": 1, "dp": 0, "tp": 1}
    assert list(mesh.coordinate(5)) == ["pp", "dp", "tp"]
    assert mesh.rank_at({"tp": 1, "pp": 1, "dp": 0}) == 5
    assert mesh.axis_length("dp") == 2


@pytest.mark.parametrize(
    "devices", [[3, 2, 1, 0], [[3, 2], [1, 0]], np.array([[3, 2], [1, 0]]), torch.tensor([3, 2, 1, 0]), (3, (2, 1), 0)]
)
def test_devices_of_any_shape_are_read_row_major(devices):
    mesh = DeviceMesh([2, 2], ["a", "b"], devices)
    assert mesh.ranks == (3, 2, 1, 0)
    assert mesh.coordinate(1) == {"a": 1, "b": 0}
    assert mesh == DeviceMesh((2, 2), "ab", [3, 2, 1, 0])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms())
def test_coordinate_and_rank_at_are_inverse(shape, rng):
    names = [f"x{i}" for i in range(len(shape))]
    ranks = list(range(0, 3 * int(np.prod(shape)), 3))
    rng.shuffle(ranks)
    mesh = DeviceMesh(shape, names, ranks)
    for place, rank in zip(product(*map(range, shape)), ranks, strict=True):
        assert mesh.coordinate(rank) == dict(zip(names, place, strict=True))
        assert mesh.rank_at(mesh.coordinate(rank)) == rank
    assert DeviceMesh.parse_grid(mesh.grid, mesh.ranks) == mesh


def test_is_a_value():
    mesh, same = DeviceMesh((2, 3), ("a", "b")), DeviceMesh.parse_grid("a=2 b=3")
    assert mesh == same and hash(mesh) == hash(same)
    assert mesh != DeviceMesh((2, 3), ("a", "b"), [1, 0, 2, 3, 4, 5])
    assert mesh != DeviceMesh((2, 3), ("b", "a"))
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert pickle.loads(pickle.dumps(mesh)).coordinate(4) == {"a": 1, "b": 1}
    with pytest.raises(AttributeError):
        mesh.shape = (6,)
    assert repr(mesh) == "<DeviceMesh shape=(2, 3), axis_names=('a', 'b')>"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (((), ()), "cannot be empty"),
        (((2,), ()), "cannot be empty"),
        (((2, 3), ("a",)), "should have same size"),
        (((2, 3), ("a", "b"), [0, 1]), "does not match the number of devices"),
        (((2, 2), ("a", "a")), "'a' twice"),
        (((2,), ("a",), [1, 1]), "rank 1 twice"),
        (((0,), ("a",), []), "no place"),
        (((-1, -1), ("a", "b")), "no place"),
        (((2,), ("data parallel",)), "axis name"),
        (((2,), ("2a",)), "axis name"),
        (((2,), (7,)), "axis name"),
        (((2.0,), ("a",)), "not an integer"),
        (((True,), ("a",)), "not an integer"),
        (((1,), ("a",), ["cpu:x"]), "not a rank"),
        (((2,), ("a",), ["cpu:0", 1]), "several kinds"),
        (((2,), ("a",), ["cpu:0", "cuda:1"]), "several kinds"),
        (((1,), ("a",), [-1]), "not a rank"),
        ((4, ("a",)), "not sequences"),
        (((1 << 40,), ("a",)), "too large"),
    ],
)
def test_refuses(args, message):
    with pytest.raises(LayoutError, match=message) as caught:
        DeviceMesh(*args)
    assert isinstance(caught.value, ValueError)


def test_the_first_of_keras_checks_wins():
    with pytest.raises(ValueError, match="cannot be empty"):
        DeviceMesh((), ("a",), [0, 1])
    with pytest.raises(ValueError, match="should have same size"):
        DeviceMesh((2,), ("a", "b"), [0])


def test_looks_up_only_what_is_there():
    mesh = DeviceMesh((2, 2), ("a", "b"), [4, 5, 6, 7])
    with pytest.raises(LayoutError, match="rank 0 is not in the mesh") as caught:
        mesh.coordinate(0)
    assert caught.value.rank == 0
    with pytest.raises(LayoutError, match="no axis 'c'"):
        mesh.axis_length("c")
    for coordinate in ({"a": 0}, {"a": 0, "b": 0, "c": 0}):
        with pytest.raises(LayoutError, match="does not name the axes"):
            mesh.rank_at(coordinate)
    for place in (-1, 2):
        with pytest.raises(LayoutError, match="no place"):
            mesh.rank_at({"a": 0, "b": place})


@pytest.mark.parametrize("text", ["a", "a=", "=2", "a=b", "a=2,b=2", "a = 2", "a=-2", "a=9999999999999", "a=٢"])
def test_parse_grid_refuses(text):
    with pytest.raises(LayoutError, match="cannot be read"):
        DeviceMesh.parse_grid(text)


def test_parse_grid_of_nothing_is_empty():
    with pytest.raises(LayoutError, match="cannot be empty"):
        DeviceMesh.parse_grid("  ")
