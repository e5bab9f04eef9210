from itertools import product

import pytest

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, MeshViews
from xrank.layout.mesh import megatron_views, mesh_from_order


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
