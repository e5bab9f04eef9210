import pickle

import pytest

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.notation import Size, Split

pytestmark = pytest.mark.quick

MESH = DeviceMesh((2, 4), ("data", "model"))


def test_keras_axes_are_even_splits_of_named_sizes():
    layout = TensorLayout((None, "model"), MESH)
    assert str(layout) == "[d0, d1/model]"
    assert layout.axes == ((), ("model",))
    assert layout.dims == (Size("d0"), Split(Size("d1"), "model", "/"))
    assert layout == TensorLayout.parse("[d0, d1/model]", MESH) == TensorLayout([None, "model"], MESH)
    assert str(TensorLayout(())) == "[]"


def test_text_and_layout_round_trip():
    for text in ("[]", "[f/tp/~dp, h]", "[5/~dp, 3]"):
        assert str(TensorLayout.parse(text)) == text
    assert TensorLayout.parse("[f/tp/~dp, h]").axes == (("tp", "dp"), ())
    assert repr(TensorLayout.parse("[f/data]", MESH)) == "<TensorLayout [f/data], mesh 'data=2 model=4'>"
    assert repr(TensorLayout.parse("[f]")) == "<TensorLayout [f]>"


def test_is_a_value():
    layout = TensorLayout.parse("[f/data, h]", MESH)
    same = TensorLayout.parse(" [ f / data , h ] ", DeviceMesh((2, 4), ("data", "model")))
    assert layout == same and hash(layout) == hash(same)
    assert layout != TensorLayout.parse("[f/data, h]")
    assert layout != TensorLayout.parse("[f/~data, h]", MESH)
    assert pickle.loads(pickle.dumps(layout)) == layout
    with pytest.raises(AttributeError):
        layout.dims = ()


def test_a_mesh_is_attached_once():
    layout = TensorLayout(("model",))
    assert layout.with_mesh(MESH) == TensorLayout(("model",), MESH)
    assert layout.device_mesh is None
    assert layout.with_mesh(MESH).with_mesh(DeviceMesh((2, 4), ("data", "model"))).device_mesh == MESH
    with pytest.raises(LayoutError, match="Cannot override device mesh value"):
        layout.with_mesh(MESH).with_mesh(DeviceMesh((8,), ("model",)))
    with pytest.raises(LayoutError, match="Invalid axis names for Layout"):
        layout.with_mesh(DeviceMesh((8,), ("tp",)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[f/data/data]", "cut twice by 'data'"),
        ("[f/data, h/~data]", "cut twice by 'data'"),
        ("[data/data]", "both a size and an axis"),
        ("[f/data, data]", "both a size and an axis"),
    ],
)
def test_refuses_what_reads_in_two_ways(text, message):
    for mesh in (None, MESH):
        with pytest.raises(LayoutError, match=message):
            TensorLayout.parse(text, mesh)


def test_refuses_what_the_mesh_has_not():
    with pytest.raises(ValueError, match="Invalid axis names for Layout") as caught:
        TensorLayout(("tp", "data"), MESH)
    assert "tp" in caught.value.got
    TensorLayout.parse("[model, h/data]")
    with pytest.raises(LayoutError, match="'model' is both a size and an axis"):
        TensorLayout.parse("[model, h/data]", MESH)


@pytest.mark.parametrize("axes", [(("data", "model"),), (["data"],), (3,), ("[f/data]",), ("",)])
def test_keras_axes_are_single_names(axes):
    for mesh in (None, MESH):
        with pytest.raises(LayoutError, match="Invalid axis names"):
            TensorLayout(axes, mesh)


def test_one_text_is_not_axes():
    with pytest.raises(LayoutError) as caught:
        TensorLayout("[f/data, h]", MESH)
    assert "TensorLayout.parse" in caught.value.next_step


def test_made_sizes_avoid_the_axes():
    layout = TensorLayout((None, "d0"))
    assert str(layout) == "[dd0, dd1/d0]"
    assert str(TensorLayout((None, None), DeviceMesh((2,), ("d1",)))) == "[dd0, dd1]"


def test_trees_made_by_hand_must_have_a_text():
    assert TensorLayout.from_dims([Split(Size("f"), "model", "/~")], MESH).axes == (("model",),)
    for size in ("2f", "", "a b", -1):
        with pytest.raises(LayoutError):
            TensorLayout.from_dims([Size(size)])
