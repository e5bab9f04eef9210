"""Meshes, places in them, and their views."""

from __future__ import annotations

import pickle
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, MeshIndex, MeshViews
from xrank.layout.mesh import megatron_views, mesh_from_order

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
        with pytest.raises(LayoutError, match="has no index"):
            mesh.rank_at({"a": 0, "b": place})


@pytest.mark.parametrize("text", ["a", "a=", "=2", "a=b", "a=2,b=2", "a = 2", "a=-2", "a=9999999999999", "a=٢"])
def test_parse_grid_refuses(text):
    with pytest.raises(LayoutError, match="cannot be read"):
        DeviceMesh.parse_grid(text)


def test_parse_grid_of_nothing_is_empty():
    with pytest.raises(LayoutError, match="cannot be empty"):
        DeviceMesh.parse_grid("  ")


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


def test_neighbors_are_each_there_once():
    index = MeshIndex.from_rank(MESH, 4)
    assert [near.rank for near in index.neighbors("tp")] == [5, 3]
    assert [near.rank for near in index.neighbors()] == [1, 5, 3]  # two places along dp: before and after are one
    assert MeshIndex.from_rank(DeviceMesh((1,), ("x",)), 0).neighbors() == ()


def test_refuses_places_and_axes_that_are_not_there():
    index = MeshIndex.from_rank(MESH, 4)
    for act in (
        lambda: MeshIndex(MESH, (0, 3)),
        lambda: MeshIndex(MESH, (0,)),
        lambda: MeshIndex.from_rank(MESH, 6),
        lambda: index["pp"],
        lambda: index.shift("pp"),
        lambda: index.with_places(tp=3),
        lambda: index.neighbors("tp", "tp"),
    ):
        with pytest.raises(LayoutError):
            act()


def test_groups_along_any_axes():
    mesh = DeviceMesh((2, 2, 2), ("pp", "dp", "tp"))
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("tp", "dp") == mesh.groups("dp", "tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("pp", "tp") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.groups() == tuple((rank,) for rank in range(8))
    assert mesh.groups("pp", "dp", "tp") == (tuple(range(8)),)
    for axes in (("x",), ("tp", "tp")):
        with pytest.raises(LayoutError):
            mesh.groups(*axes)


def test_groups_of_permuted_ranks_keep_the_order_of_the_mesh():
    assert DeviceMesh((2, 2), ("a", "b"), [3, 1, 2, 0]).groups("b") == ((3, 1), (2, 0))


def test_submeshes_keep_the_ranks():
    mesh = DeviceMesh((2, 2, 2), ("pp", "dp", "tp"), [f"cuda:{rank}" for rank in range(8)])
    assert mesh.submesh(dp=1) == DeviceMesh((2, 2), ("pp", "tp"), [2, 3, 6, 7])
    assert mesh.submesh(dp=1, tp=0).ranks == (2, 6)
    assert mesh.submesh(dp=1).device_kind == "cuda"
    for places in ({"x": 0}, {"tp": 2}, {"pp": 0, "dp": 0, "tp": 0}):
        with pytest.raises(LayoutError):
            mesh.submesh(**places)


def test_a_transposed_mesh_leaves_every_rank_at_its_coordinate():
    mesh = DeviceMesh((2, 3, 4), ("a", "b", "c"))
    other = mesh.transpose("c", "a", "b")
    assert other.shape == (4, 2, 3) and other.axis_names == ("c", "a", "b")
    assert all(other.coordinate(rank) == mesh.coordinate(rank) for rank in mesh.ranks)
    assert other.transpose("a", "b", "c") == mesh
    with pytest.raises(LayoutError, match="all of its axes"):
        mesh.transpose("a", "b")


def test_a_view_factors_the_same_ranks():
    mesh = DeviceMesh((2, 4), ("dp", "tp"), [7, 6, 5, 4, 3, 2, 1, 0])
    view = mesh.view("dp=2 kvs=2 rep=2")
    assert view.ranks == mesh.ranks and view.coordinate(4) == {"dp": 0, "kvs": 1, "rep": 1}
    with pytest.raises(LayoutError, match="does not match the number of devices"):
        mesh.view("dp=2 tp=2")


def test_the_view_of_a_layout_is_found_by_its_axes():
    mesh = DeviceMesh((2, 4), ("dp", "tp"))
    kv, ep = mesh.view("dp=2 kvs=2 rep=2"), mesh.view("edp=2 ep=4")
    views = MeshViews(mesh, (("kv", kv), ("expert", ep)))
    assert views.having("tp") == views.having("dp") == views.having() == mesh
    assert views.having("kvs", "dp") == kv and views.having("ep") == ep and views.view("kv") == kv
    with pytest.raises(LayoutError, match="no view has"):
        views.having("ep", "tp")
    with pytest.raises(LayoutError, match="several views have"):
        MeshViews(mesh, (("a", ep), ("b", ep))).having("ep")
    with pytest.raises(LayoutError, match="no view 'x'"):
        views.view("x")
    with pytest.raises(LayoutError, match="'a' occurs twice"):
        MeshViews(mesh, (("a", ep), ("a", kv)))
    with pytest.raises(LayoutError, match="not have the same ranks"):
        MeshViews(mesh, (("a", DeviceMesh((4,), ("ep",))),))


# Megatron's strings.


def test_the_first_name_of_an_order_is_the_fastest():
    mesh = mesh_from_order("tp-dp-pp", {"tp": 2, "dp": 2, "pp": 2})
    assert (mesh.groups("tp")[0], mesh.groups("dp")[0], mesh.groups("pp")[0]) == ((0, 1), (0, 2), (0, 4))
    other = mesh_from_order("tp-pp-dp", {"tp": 2, "dp": 2, "pp": 2})
    assert (other.groups("tp")[0], other.groups("dp")[0], other.groups("pp")[0]) == ((0, 1), (0, 4), (0, 2))
    assert mesh_from_order("TP-DP", {"tp": 2, "dp": 2, "pp": 1}).grid == "pp=1 dp=2 tp=2"


def test_an_order_names_each_axis_once():
    for order in ("tp-tp", "tp-x", "tp", "", "tp--dp"):
        with pytest.raises(LayoutError, match="the order"):
            mesh_from_order(order, {"tp": 2, "dp": 2})


def generated_groups(sizes: dict[str, int], order: str, along: str) -> set[tuple[int, ...]]:
    """Return groups as Megatron counts them: a rank is the sum of place times stride, the first name fastest."""
    names = order.split("-")
    strides, stride = {}, 1
    for name in names:
        strides[name] = stride
        stride *= sizes[name]
    kept, rest = [n for n in names if n in along.split("-")], [n for n in names if n not in along.split("-")]

    def ranks(of):
        return [
            sum(place * strides[name] for place, name in zip(places, of, strict=True))
            for places in product(*(range(sizes[name]) for name in of))
        ]

    return {tuple(sorted(base + offset for offset in ranks(kept))) for base in ranks(rest)}


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "tp-ep-dp-cp-pp", "cp-tp-dp-ep-pp"])
@pytest.mark.parametrize(
    ("world", "tp", "cp", "ep", "pp", "etp"),
    [(8, 2, 1, 2, 2, None), (8, 2, 2, 2, 1, 1), (16, 2, 2, 4, 2, 1), (16, 1, 1, 8, 2, 1), (32, 4, 2, 4, 2, 2)],
)
def test_both_generators_of_megatron(order, world, tp, cp, ep, pp, etp):
    etp_or_tp = etp or tp
    dp, edp = world // (tp * cp * pp), world // (etp_or_tp * ep * pp)
    dense = {"tp": tp, "cp": cp, "ep": 1, "dp": dp, "pp": pp}
    expert = {"tp": etp_or_tp, "cp": 1, "ep": ep, "dp": edp, "pp": pp}
    if generated_groups(dense, order, "pp") != generated_groups(expert, order, "pp"):
        with pytest.raises(LayoutError, match="different pipeline stages"):
            megatron_views(world, tp=tp, cp=cp, ep=ep, pp=pp, etp=etp, order=order)
        return
    views = megatron_views(world, tp=tp, cp=cp, ep=ep, pp=pp, etp=etp, order=order)
    main, other = views.main, views.view("expert")
    for along in ("tp", "cp", "dp", "pp", "tp-dp", "tp-cp-pp"):
        assert {tuple(sorted(g)) for g in main.groups(*along.split("-"))} == generated_groups(dense, order, along)
    for along, names in (("tp", ["etp"]), ("ep", ["ep"]), ("dp", ["edp"]), ("tp-ep", ["etp", "ep"])):
        assert {tuple(sorted(group)) for group in other.groups(*names)} == generated_groups(expert, order, along)
    assert views.having("ep") == other and views.having("pp") == main


def test_megatron_example_of_two_two_two():
    views = megatron_views(8, tp=2, pp=2)
    assert views.main.groups("tp")[0] == (0, 1) and views.main.groups("dp")[0] == (0, 2)
    assert views.main.groups("pp")[0] == (0, 4)
    assert views.view("expert").axis_names == ("pp", "edp", "ep", "etp")
    assert megatron_views(8, tp=2, ranks=[7, 6, 5, 4, 3, 2, 1, 0]).main.groups("tp")[0] == (7, 6)


def test_megatron_lengths_must_divide():
    for lengths in ({"tp": 3}, {"ep": 3}, {"tp": 0}, {"ep": 2, "order": "tp-dp-pp"}):
        with pytest.raises(LayoutError):
            megatron_views(8, **lengths)
