"""Dialects refuse a part of a layout that they cannot express, and show its text; so, too, parts of later notations."""

from dataclasses import dataclass

import pytest

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.notation import LayoutTree, Size, Split
from xrank.layout.terms import tensors
from xrank.layout.terms.tensors import Cuts, cuts_of, even_axes_of

MESH = DeviceMesh((2, 3), ("dp", "tp"))


@dataclass(frozen=True)
class Later:
    """A node of a later notation."""


@dataclass(frozen=True)
class StandIn:
    """A layout as `cuts_of` sees it: its dims and its text."""

    dims: tuple
    text: str
    tree = LayoutTree(())

    def __str__(self):
        return self.text


def test_a_chain_is_said_in_the_order_of_cutting():
    layout = TensorLayout.parse("[f/~tp/dp, 5, h]")
    assert cuts_of(layout, "nobody") == (Cuts("f", (("tp", "/~"), ("dp", "/"))), Cuts(5, ()), Cuts("h", ()))


def test_equal_pieces_are_told_where_they_can_be_said():
    in_two = [Cuts("f", (("tp", "/"),), pieces=2)]
    for text in ("[2 f/tp]", "[<gate: f/tp | up: f/tp>]"):
        layout = TensorLayout.parse(text)
        assert list(cuts_of(layout, "placements", packed=True)) == in_two
        with pytest.raises(LayoutError, match="is not a single size"):
            cuts_of(layout, "PartitionSpecs")
    for text in ("[g f/tp]", "[<gate: f/tp | up: g/tp>]", "[2 f/tp g]", "[(2 f)/tp]", "[0 f/tp]"):
        with pytest.raises(LayoutError, match="is not a single size"):
            cuts_of(TensorLayout.parse(text), "placements", packed=True)


def test_an_unknown_node_is_refused_with_its_text(monkeypatch):
    text = "turned(f, tp)"
    monkeypatch.setattr(tensors, "render_dim", lambda node: text)
    with pytest.raises(
        LayoutError, match=r"Keras cannot express dim 0 of the layout \[turned.*: turned.* is not a single size"
    ) as info:
        cuts_of(StandIn((Later(),), f"[{text}]"), "Keras")
    assert info.value.got == f"Later {text}"


def test_an_unknown_split_is_refused_with_its_text():
    split = Split(Size("f"), "tp", "/=")
    with pytest.raises(LayoutError, match="have no such split") as info:
        cuts_of(StandIn((split,), "[f/=tp]"), "placements")
    assert info.value.got == "/=tp"


def test_what_a_split_says_besides_is_not_lost(monkeypatch):
    """A split of a later notation may also say multiples or a list of sizes; its kind alone would pass."""
    rendered = {Size("f"): "f", Split(Size("f"), "tp", "/"): "f/tp{3,0,5}"}
    monkeypatch.setattr(tensors, "render_dim", rendered.get)
    with pytest.raises(LayoutError, match="have no such split") as info:
        cuts_of(StandIn((Split(Size("f"), "tp", "/"),), "[f/tp{3,0,5}]"), "placements")
    assert info.value.got == "/tp{3,0,5}"


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("[f/tp, h] where dp=0", "where dp=0"),
        ("[f/tp, h] sum(dp)", "sum(dp)"),
        ("[f, h] in wide where dp=last sum(tp)", "in wide where dp=last sum(tp)"),
    ],
)
def test_clauses_are_refused_by_name(text, clause):
    layout = TensorLayout.parse(text)
    with pytest.raises(LayoutError, match="placements cannot express") as info:
        cuts_of(layout, "placements")
    assert info.value.got == clause and f"{clause!r} of the layout {text}" in info.value.message


def test_a_clause_that_the_caller_says_passes_and_no_other():
    both = TensorLayout.parse("[f/tp, h] where pp=0 sum(dp)")
    with pytest.raises(LayoutError, match=r"cannot express 'where pp=0' of the layout"):
        cuts_of(both, "placements", sums=True)
    with pytest.raises(LayoutError, match=r"cannot express 'sum\(dp\)' of the layout"):
        cuts_of(both, "ShardedTensors", where=True)
    dims = (Cuts("f", (("tp", "/"),)), Cuts("h", ()))
    assert cuts_of(both, "nobody", where=True, sums=True) == dims


@pytest.mark.parametrize("text", ["[f/tp, h] turned(dp)", 'flat(w "[f, h]")/dp'])
def test_what_is_more_than_dims_is_refused(text):
    """Also a clause of a later notation, which this module does not know."""
    dims = TensorLayout.parse("[f/tp, h]").dims
    with pytest.raises(LayoutError, match="clauses besides its dims") as info:
        cuts_of(StandIn(dims, text), "placements")
    assert info.value.got == text


def test_ceil_chunks_are_even_where_the_shape_divides():
    layout = TensorLayout.parse("[f/~tp/~dp, h]", MESH)
    with pytest.raises(LayoutError, match=r"dim 0 .* can only split evenly") as info:
        even_axes_of(layout, "PartitionSpecs", None, None)
    assert "shape" in info.value.next_step
    assert even_axes_of(layout, "PartitionSpecs", None, (12, 5)) == (("tp", "dp"), ())
    with pytest.raises(LayoutError, match="can only split evenly"):
        even_axes_of(layout, "PartitionSpecs", None, (10, 5))
    with pytest.raises(LayoutError, match="does not fit the shape"):
        even_axes_of(layout, "PartitionSpecs", None, (12,))


def test_a_mesh_is_needed_with_a_shape_and_is_the_layouts_own():
    layout = TensorLayout.parse("[f/~tp]")
    with pytest.raises(LayoutError, match="has no mesh"):
        even_axes_of(layout, "Keras", None, (6,))
    assert even_axes_of(layout, "Keras", MESH, (6,)) == (("tp",),)
    with pytest.raises(LayoutError, match="Cannot override device mesh"):
        even_axes_of(layout.with_mesh(MESH), "Keras", DeviceMesh((3,), ("tp",)), (6,))
