import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrank.errors import LayoutError
from xrank.gradients.roles import MeshPlace, as_mesh_views, check_shard_order, ranks_along
from xrank.layout import DeviceMesh, MeshViews
from xrank.layout.mesh import megatron_views


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(), st.data())
def test_ranks_along_is_the_group_of_the_mesh(shape, rng, data):
    names = [f"x{i}" for i in range(len(shape))]
    mesh = DeviceMesh(shape, names)
    ranks = [3 * rank for rank in mesh.ranks]
    rng.shuffle(ranks)
    mesh = DeviceMesh(shape, names, ranks)
    axes = data.draw(st.sets(st.sampled_from(names)))
    for group in mesh.groups(*axes):
        for rank in group:
            assert ranks_along(mesh, rank, [*axes, "unknown"]) == group


def test_both_factorings_of_a_megatron_world():
    place = MeshPlace(megatron_views(32, tp=2, cp=2, ep=4, pp=2, etp=1), 21)
    assert place.data_axes(False) == ("dp", "cp") and place.data_axes(True) == ("edp",)
    assert place.ranks(("dp", "cp")) == (17, 19, 21, 23, 25, 27, 29, 31)
    assert place.ranks(("edp",), is_expert=True) == (17, 21, 25, 29)
    assert place.tensor_axis(False) == "tp" and place.tensor_axis(True) == "etp"
    assert place.stage() == 1


def test_one_mesh_for_dense_weights_and_experts():
    for names in (("dp", "ep"), ("edp", "ep")):
        place = MeshPlace(MeshViews(DeviceMesh((2, 4), names)), 5)
        assert place.ranks(place.data_axes(False)) == tuple(range(8))
        assert place.ranks(place.data_axes(True), is_expert=True) == (1, 5)


def test_axes_of_one_place_are_none():
    place = MeshPlace(MeshViews(DeviceMesh((1, 2), ("dp", "tp"))), 1)
    assert place.data_axes(False) == () and place.expert is None and place.stage() == 0
    assert place.ranks(("dp", "pp")) == (1,)


def test_ranks_ascend_as_in_a_process_group():
    place = MeshPlace(MeshViews(DeviceMesh((4,), ("dp",), (7, 3, 5, 1))), 5)
    assert place.ranks(("dp",)) == (1, 3, 5, 7)
    with pytest.raises(LayoutError, match="descend along dp") as caught:
        check_shard_order(place.views)
    assert caught.value.got == "ranks [7, 3, 5, 1]"


def test_ranks_may_descend_along_other_axes():
    check_shard_order(MeshViews(DeviceMesh((2, 2), ("tp", "dp"), (2, 3, 0, 1))))
    with pytest.raises(LayoutError, match="descend along dp"):
        check_shard_order(MeshViews(DeviceMesh((2, 2), ("dp", "tp"), (2, 3, 0, 1))))


def test_meshes_of_torch_are_described():
    class Ranks(list):
        shape = (2, 2)

        def tolist(self):
            return [[0, 1], [2, 3]]

    class TorchLike:
        mesh_dim_names = ("dp", "tp")
        mesh = Ranks()

    assert as_mesh_views(TorchLike()).main == DeviceMesh((2, 2), ("dp", "tp"))
    assert as_mesh_views(DeviceMesh((2,), ("dp",))) == MeshViews(DeviceMesh((2,), ("dp",)))
