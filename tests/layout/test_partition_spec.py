"""PartitionSpecs: plain tuples and stand-ins of jax's class, both ways."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings

from tests.layout.cut_layouts import cases, elements
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.terms.tensors import from_partition_spec, to_partition_spec

MESH = DeviceMesh((2, 4), ("data", "model"))


@settings(deadline=None)
@given(cases())
def test_there_and_back_every_rank_holds_the_same(case):
    layout, mesh, shape = case
    spec = to_partition_spec(layout)
    back = from_partition_spec(spec, mesh)
    assert elements(back, mesh, shape) == elements(layout, mesh, shape)
    assert to_partition_spec(back) == spec


@settings(deadline=None)
@given(cases(kinds=("/~",)))
def test_ceil_chunks_are_said_where_they_are_even_and_only_there(case):
    layout, mesh, shape = case
    try:
        spec = to_partition_spec(layout, shape=shape)
    except LayoutError:
        sizes = {local for local, _ in elements(layout, mesh, shape).values()}
        assert len(sizes) > 1  # refused where ranks hold different sizes, and never elsewhere
    else:
        assert elements(from_partition_spec(spec, mesh), mesh, shape) == elements(layout, mesh, shape)


def test_a_tuple_is_major_first():
    """jax: P(("data", "model")) gives the device at (1, 0) of a 2 x 4 mesh block 4 of 8."""
    layout = from_partition_spec((("data", "model"), None), MESH)
    assert str(layout) == "[d0/data/model, d1]" and layout.device_mesh == MESH
    assert elements(layout, MESH, (8, 1))[4] == ((1, 1), [4])
    turned = from_partition_spec((("model", "data"), None), MESH)
    assert elements(turned, MESH, (8, 1))[4] == ((1, 1), [1])


@pytest.mark.parametrize(
    ("spec", "ndim", "text", "back"),
    [
        ((), 0, "[]", ()),
        ((), 2, "[d0, d1]", (None, None)),
        (("model",), 2, "[d0/model, d1]", ("model", None)),
        ((None, ("model",)), None, "[d0, d1/model]", (None, "model")),
        (((), "data"), None, "[d0, d1/data]", (None, "data")),
        ((["data", "model"],), None, "[d0/data/model]", (("data", "model"),)),
    ],
)
def test_short_and_loose_forms_have_one_meaning(spec, ndim, text, back):
    layout = from_partition_spec(spec, MESH, ndim)
    assert str(layout) == text
    assert to_partition_spec(layout) == back


class Spec:
    """As jax's class: a sequence by its methods, with the axes of addends besides."""

    def __init__(self, *entries, unreduced=frozenset(), reduced=frozenset()):
        self.entries, self.unreduced, self.reduced = entries, unreduced, reduced

    def __iter__(self):
        return iter(self.entries)


def test_a_stand_in_of_jaxs_class_will_do():
    assert str(from_partition_spec(Spec("data", None), MESH)) == "[d0/data, d1]"


@pytest.mark.parametrize(
    ("spec", "ndim", "message"),
    [
        (Spec("data", reduced=frozenset({"model"})), None, r"gradients unreduced along \['model'\]"),
        (Spec("data", unreduced=frozenset({"data"})), None, "'data' has two roles"),
        (Spec("data", unreduced=frozenset({"modle"})), None, "Invalid axis names"),
        ((SimpleNamespace(name="UNCONSTRAINED"),), None, "a layout cannot express"),
        ((("data", None),), None, "a layout cannot express"),
        ((3,), None, "a layout cannot express"),
        ((None, None, None), 2, "more entries than the tensor has dims"),
        ("model", 5, "is one text"),
        (("modle",), None, "Invalid axis names"),
        (("model", "model"), None, "cut twice by 'model'"),
        ((("model", "model"),), None, "cut twice by 'model'"),
    ],
)
def test_what_no_layout_says_is_refused(spec, ndim, message):
    with pytest.raises(LayoutError, match=message):
        from_partition_spec(spec, MESH, ndim)


def test_uneven_dims_are_refused():
    layout = TensorLayout.parse("[f/~model, h]", MESH)
    with pytest.raises(LayoutError, match="PartitionSpecs can only split evenly"):
        to_partition_spec(layout)
    with pytest.raises(LayoutError, match="PartitionSpecs can only split evenly"):
        to_partition_spec(layout, shape=(6, 1))
    assert to_partition_spec(layout, shape=(8, 1)) == ("model", None)


def test_addends():
    spec = Spec(None, unreduced=frozenset({"model", "data"}))
    layout = from_partition_spec(spec, MESH, 2)
    assert str(layout) == "[d0, d1] sum(data) sum(model)"
    layout = from_partition_spec(Spec("data", unreduced=frozenset({"model"})), MESH, 2)
    assert layout == TensorLayout.parse("[d0/data, d1] sum(model)", MESH)
    # Entries alone would call them replicas.
    with pytest.raises(LayoutError, match="cannot express the sums") as info:
        to_partition_spec(layout)
    assert info.value.got == "sum(model)"
    entries = to_partition_spec(TensorLayout.from_dims(layout.dims, MESH))
    assert from_partition_spec(Spec(*entries, unreduced=frozenset(layout.tree.sums)), MESH) == layout


@pytest.mark.parametrize("text", ["[f/data, h] where model=0", "[f/data{3,5}, h]", "[f/data%2, h]", "[2 f/data, h]"])
def test_what_entries_cannot_say_is_refused_by_name(text):
    with pytest.raises(LayoutError, match="PartitionSpecs cannot express") as info:
        to_partition_spec(TensorLayout.parse(text, MESH))
    assert text in info.value.message
