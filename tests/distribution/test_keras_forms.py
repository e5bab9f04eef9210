import copy
import pickle

import pytest

from xrank import layout as frozen
from xrank.distribution import DeviceMesh, LayoutMap, TensorLayout
from xrank.errors import LayoutError

MESH = DeviceMesh((4, 2), ["data", "model"], [f"cpu:{rank}" for rank in range(8)])


def test_a_mesh_is_equal_to_the_frozen_one():
    same = frozen.DeviceMesh((4, 2), ("data", "model"))
    assert same == MESH and same == MESH and hash(MESH) == hash(same)
    assert frozen.DeviceMesh((2, 4), ("data", "model")) != MESH
    assert pickle.loads(pickle.dumps(MESH)) == MESH and copy.deepcopy(MESH).axis_names == ["data", "model"]
    assert DeviceMesh((2,), ("data",)).axis_names == ("data",) and MESH.backend_mesh is None


def test_a_layout_gets_its_mesh_once():
    layout = TensorLayout(("data", None))
    with pytest.raises(LayoutError, match="Cannot create sharding when device mesh is not set"):
        layout.backend_layout  # noqa: B018
    layout.device_mesh = MESH
    assert layout.axes == ("data", None) and layout == frozen.TensorLayout(("data", None), MESH)
    assert hash(layout) == hash(frozen.TensorLayout(("data", None), MESH)) and layout.backend_layout is None
    with pytest.raises(LayoutError, match="Cannot override device mesh value"):
        layout.device_mesh = MESH
    with pytest.raises(AttributeError):
        layout.tree = None
    assert TensorLayout.parse("[f/model/~data, h]").axes == (("model", "data"), None)


def test_a_map_returns_the_layout_that_was_put_in():
    layout_map, layout = LayoutMap(MESH), TensorLayout((None, "model"))
    layout_map["kernel"] = layout
    layout_map["bias"] = "[f/model]"
    layout_map["frozen"] = frozen.TensorLayout(("model",))
    assert layout_map["kernel"] is layout and layout.device_mesh is MESH
    assert [layout_map[key].axes for key in ("bias", "frozen")] == [("model",), ("model",)]
    other = LayoutMap(DeviceMesh((2,), ("x",)))
    with pytest.raises(LayoutError):
        other["kernel"] = TensorLayout(("model",))
    assert len(other) == 0


def test_a_map_is_written_and_read(tmp_path):
    layout_map = LayoutMap(MESH)
    layout_map["up.*"] = ("model", None)
    layout_map.write(tmp_path / "layout.toml")
    read = LayoutMap.read(tmp_path / "layout.toml")
    assert read == layout_map and read["up.weight"].axes == ("model", None)
