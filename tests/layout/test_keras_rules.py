"""Keras' contract of meshes, layouts and maps, a test a row, as read and run against keras 3.15.1.

Where xrank departs, it refuses earlier what Keras lets pass and fails on later, or takes values for objects:

- meshes and layouts are values: equal when they say the same, never changed. A map stores a layout that has its mesh;
  the one given keeps none. `shape` and `axis_names` are tuples.
- without `devices`, the ranks are 0 to n-1 of the shape; their number is checked when a mesh meets a process group.
- repeated axes and devices, lengths below 1, compound and list entries, and an axis cutting twice are refused at once.
- a bad pattern is met at look-up, as in Keras, as a LayoutError whose cause is the `re.error`.
- a map takes a layout's text besides.
"""

import re
from collections.abc import MutableMapping

import numpy as np
import pytest

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.local_part import local_part

pytestmark = pytest.mark.quick

MESH = DeviceMesh((2, 4), ("data", "model"))


def made(**rules) -> LayoutMap:
    layout_map = LayoutMap(MESH)
    layout_map.update(rules)
    return layout_map


# DeviceMesh(shape, axis_names, devices=None)


def test_mesh_checks_come_in_this_order():
    for arguments, message in (
        (((), ("a",), [0]), "Shape and axis_names cannot be empty. Received: shape="),
        (((2,), (), [0]), "Shape and axis_names cannot be empty. Received: shape="),
        (((2, 3), ("a",), [0]), "Shape and axis_names should have same size. Received: shape="),
        (((2, 3), ("a", "b"), [0]), "Shape does not match the number of devices. Received: shape="),
    ):
        with pytest.raises(ValueError, match=message):
            DeviceMesh(*arguments)


def test_devices_are_flattened_row_major_first_axis_outermost():
    for devices in ([[0, 1], [2, 3], [4, 5]], np.arange(6).reshape(1, 6), [f"cpu:{i}" for i in range(6)]):
        mesh = DeviceMesh([2, 3], ["a", "b"], devices)
        assert [mesh.rank_at({"a": a, "b": b}) for a in range(2) for b in range(3)] == list(range(6))
        assert mesh.devices.shape == (2, 3) and mesh.devices.ravel().tolist() == list(np.ravel(devices))


def test_the_shape_of_devices_is_in_the_message():
    with pytest.raises(ValueError, match=re.escape("shape=(2, 2); devices.shape=(3, 2)")):
        DeviceMesh((2, 2), ("a", "b"), np.zeros((3, 2), int))
    with pytest.raises(LayoutError, match=re.escape("devices.shape=(1,)")) as caught:
        DeviceMesh((2, 2), ("a", "b"), ["cpu:0"])  # list_devices() of a program that no launcher started
    assert caught.value.got == "1 device" and "start 4 processes" in str(caught.value.next_step)


def test_a_string_names_axes_by_letters():
    assert DeviceMesh((1, 1), "ab").axis_names == ("a", "b")


def test_mesh_repr():
    assert repr(MESH) == str(MESH) == "<DeviceMesh shape=(2, 4), axis_names=('data', 'model')>"


def test_repeated_axes_devices_and_lengths_below_one_are_refused_at_once():
    for arguments in (((2, 2), ("a", "a")), ((2,), ("a",), ["cpu:0", "cpu:0"]), ((-1, -1), ("a", "b")), ((0,), ("a",))):
        with pytest.raises(ValueError, match=r"twice|no place"):
            DeviceMesh(*arguments)


# TensorLayout(axes, device_mesh=None)


def test_axes_of_a_list_or_a_string():
    assert TensorLayout([None, "model"], MESH) == TensorLayout((None, "model"), MESH)
    assert TensorLayout("ab").axes == (("a",), ("b",))


def test_an_entry_is_an_axis_of_the_mesh_or_none():
    for axes in (("x",), ("data", "x"), "model", ("Model",), ("",)):
        with pytest.raises(ValueError, match="Invalid axis names for Layout"):
            TensorLayout(axes, MESH)


def test_a_mesh_comes_once_and_is_checked_then():
    layout = TensorLayout(("x",))
    with pytest.raises(ValueError, match="Invalid axis names for Layout"):
        layout.with_mesh(MESH)
    assert layout.device_mesh is None
    with pytest.raises(ValueError, match="Cannot override device mesh value"):
        TensorLayout(("model",), MESH).with_mesh(DeviceMesh((4,), ("model",)))


def test_compound_entries_are_refused():
    for entry in (("data", "model"), ["data"]):
        for mesh in (MESH, None):
            with pytest.raises(ValueError, match="Invalid axis names for Layout"):
                TensorLayout((entry,), mesh)


def test_an_axis_cuts_once():
    with pytest.raises(ValueError, match="twice"):
        TensorLayout(("model", "model"), MESH)


def test_a_cut_dim_divides_and_size_zero_does():
    layout = TensorLayout(("model",), MESH)
    with pytest.raises(ValueError, match="is not divisible by 4"):
        local_part(layout, MESH, MESH.coordinate(0), (6,))
    assert local_part(layout, MESH, MESH.coordinate(0), (0,)).shape == (0,)
    assert local_part(layout, MESH, MESH.coordinate(7), (8,)).shape == (2,)


# LayoutMap(device_mesh)


def test_map_is_an_ordered_mutable_mapping():
    layout_map = made(b=("model",), a=(None,))
    assert isinstance(layout_map, MutableMapping) and list(layout_map) == ["b", "a"] and len(layout_map) == 2


def test_insert_of_a_key_that_is_there():
    with pytest.raises(ValueError, match=r"a already exist in the LayoutMap with value .* Please make sure"):
        made(a=("model",))["a"] = ("data",)


def test_insert_takes_layouts_and_tuples():
    layout_map = made(a=("model",), b=TensorLayout(("data",)))
    assert layout_map["a"] == TensorLayout(("model",), MESH) and layout_map["b"] == TensorLayout(("data",), MESH)
    for value in (["model"], "model", None, {"model": 0}):
        with pytest.raises(ValueError, match="should be a TensorLayout type, got"):
            layout_map["c"] = value
    assert len(layout_map) == 2


def test_insert_keeps_another_mesh():
    other = DeviceMesh((4,), ("model",))
    assert made(a=TensorLayout(("model",), other))["a"].device_mesh == other


def test_one_layout_under_two_keys():
    shared = TensorLayout(("model",))
    layout_map = made(a=shared, b=shared)
    assert layout_map["a"] == layout_map["b"] == TensorLayout(("model",), MESH)


def test_insert_of_a_bad_axis_stores_nothing():
    layout_map = LayoutMap(MESH)
    with pytest.raises(ValueError, match="Invalid axis names for Layout"):
        layout_map["a"] = ("x",)
    assert list(layout_map) == []


def test_insert_does_not_compile():
    layout_map = LayoutMap(MESH)
    layout_map["a["] = ("model",)
    assert layout_map["a["] == TensorLayout(("model",), MESH)


def test_look_up_exact_key_first():
    layout_map = made(**{"^emb$": ("model",), "emb.*": (None,), ".*": ("data",)})
    assert layout_map["^emb$"] == TensorLayout(("model",), MESH)


def test_look_up_one_match():
    assert made(**{"dense.*kernel": ("model",)})["dense_1/kernel"] == TensorLayout(("model",), MESH)


def test_look_up_several_matches():
    layout_map = made(**{"a.*": ("model",), ".*b": ("model",)})
    with pytest.raises(
        ValueError,
        match=r"Path 'ab' matches multiple layout specification keys: \['a\.\*', '\.\*b'\]. Please make sure",
    ):
        layout_map["ab"]


def test_look_up_without_a_match_is_none():
    assert made(a=("model",))["b"] is None


def test_look_up_matches_whole_paths_with_case_and_within_lines():
    layout_map = made(**{"dense.*kernel": ("model",)})
    for path in ("m/dense/kernel", "dense/kernel/1", "Dense/kernel", "dense\nkernel"):
        assert layout_map[path] is None


def test_get_never_returns_its_default():
    layout_map = made(**{"a.*": ("model",), ".*b": ("model",)})
    assert layout_map.get("x", 7) is None
    with pytest.raises(ValueError, match="multiple"):
        layout_map.get("ab", 7)


def test_every_key_is_in():
    layout_map = made(**{"a.*": ("model",), ".*b": ("model",)})
    assert "x" in layout_map
    with pytest.raises(ValueError, match="multiple"):
        "ab" in layout_map  # noqa: B015


def test_del_and_pop_take_exact_keys():
    layout_map = made(**{"a.*": ("model",)})
    for key in ("ab", "x"):
        with pytest.raises(KeyError):
            del layout_map[key]
        for default in ((), (7,)):
            with pytest.raises(KeyError):
                layout_map.pop(key, *default)
    assert layout_map.pop("a.*") == TensorLayout(("model",), MESH) and len(layout_map) == 0


def test_setdefault_never_inserts():
    layout_map = made()
    assert layout_map.setdefault("a", ("model",)) is None and len(layout_map) == 0


def test_the_rest_is_a_mapping():
    layout_map = made(a=("model",), b=(None,))
    with pytest.raises(ValueError, match="already exist"):
        layout_map.update({"a": ("model",)})
    assert layout_map == made(a=("model",), b=(None,)) and layout_map != made(a=("model",))
    assert dict(layout_map.items()) == {"a": TensorLayout(("model",), MESH), "b": TensorLayout((None,), MESH)}
    assert layout_map.popitem()[0] == "a"
    layout_map.clear()
    assert list(layout_map) == []


def test_a_bad_pattern_stops_every_other_look_up_until_it_is_deleted():
    layout_map = made(**{"a[": ("model",), "b": (None,)})
    with pytest.raises(ValueError, match="not a regular expression") as caught:
        layout_map["c"]
    assert isinstance(caught.value.__cause__, re.error)
    assert layout_map["b"] is not None
    del layout_map["a["]
    assert layout_map["c"] is None


def test_a_map_without_a_mesh_checks_no_axes():
    layout_map = LayoutMap(None)
    layout_map["a"] = ("anything",)
    assert layout_map.device_mesh is None and layout_map["a"].device_mesh is None
