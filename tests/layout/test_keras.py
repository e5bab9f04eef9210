"""Keras' axes and meshes by stand-ins with the same attributes, both ways."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings

from tests.layout.cut_layouts import cases, elements
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.terms.tensors import describe_keras_mesh, from_keras_axes, to_keras_axes

MESH = DeviceMesh((2, 4), ("batch", "model"))


@settings(deadline=None)
@given(cases(most_axes=1))
def test_there_and_back_every_rank_holds_the_same(case):
    layout, mesh, shape = case
    axes = to_keras_axes(layout)
    back = from_keras_axes(axes, mesh)
    assert back == TensorLayout(axes, mesh)
    assert elements(back, mesh, shape) == elements(layout, mesh, shape)
    assert to_keras_axes(back) == axes


def test_fewer_axes_than_dims_leave_the_rest_whole():
    assert str(from_keras_axes(("model",), MESH, 3)) == "[d0/model, d1, d2]"
    assert str(from_keras_axes([None, "model"], MESH)) == "[d0, d1/model]"
    assert str(from_keras_axes(SimpleNamespace(axes=(None, "batch"), device_mesh=None), MESH)) == "[d0, d1/batch]"


@pytest.mark.parametrize(
    ("axes", "ndim", "message"),
    [
        ((None, "model"), 1, "more than the tensor's dims"),
        (("modle",), None, "Invalid axis names"),
        ((("batch", "model"),), None, "Invalid axis names"),
        (("model", "model"), None, "cut twice"),
        ("model", None, "are one text"),
    ],
)
def test_axes_that_no_layout_has_are_refused(axes, ndim, message):
    with pytest.raises(LayoutError, match=message):
        from_keras_axes(axes, MESH, ndim)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[f/batch/model, h]", "they have one axis per dim"),
        ("[f, h/~model]", "can only split evenly"),
        ("[f, h/model{1,2,3,2}]", "have no such split"),
        ("[f, h] where batch=0", "cannot express 'where batch=0'"),
        ("[f, h] sum(model)", r"cannot express 'sum\(model\)'"),
    ],
)
def test_layouts_that_keras_cannot_say_are_refused(text, message):
    with pytest.raises(LayoutError, match=message) as info:
        to_keras_axes(TensorLayout.parse(text, MESH))
    assert text in info.value.message


def test_a_shape_shows_that_ceil_chunks_are_even():
    layout = TensorLayout.parse("[f, h/~model]")
    assert to_keras_axes(layout, MESH, (3, 8)) == (None, "model")
    with pytest.raises(LayoutError, match="can only split evenly"):
        to_keras_axes(layout, MESH, (3, 6))


@pytest.mark.parametrize("as_array", [False, True])
def test_meshes(as_array):
    devices = ["cpu:3", "cpu:1", "cpu:2", "cpu:0"]
    # Keras keeps the devices as a numpy array in the mesh's shape.
    kept = np.array(devices).reshape(2, 2) if as_array else devices
    mesh = describe_keras_mesh(SimpleNamespace(shape=[2, 2], axis_names=["a", "b"], devices=kept))
    assert mesh == DeviceMesh((2, 2), ("a", "b"), [3, 1, 2, 0])


@pytest.mark.parametrize("device", ["cpu:", "cpu:x", None])
def test_a_device_without_a_number_is_refused(device):
    with pytest.raises(LayoutError, match=r"is not (a rank|an integer)"):
        describe_keras_mesh(SimpleNamespace(shape=(1,), axis_names=("a",), devices=[device]))
