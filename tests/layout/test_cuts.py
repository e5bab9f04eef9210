"""What no dialect says is refused by its own text, also what the notation may learn to say later."""

from dataclasses import dataclass

import pytest

from xrank.errors import LayoutError
from xrank.layout import TensorLayout
from xrank.layout.notation import LayoutTree, Size, Split
from xrank.layout.terms import tensors
from xrank.layout.terms.tensors import cuts_of


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


def test_an_unknown_node_is_refused_with_its_text(monkeypatch):
    text = "turned(f, tp)"
    monkeypatch.setattr(tensors, "render_dim", lambda node: text)
    with pytest.raises(
        LayoutError, match=r"Keras cannot express dim 0 of the layout \[turned.*: turned.* is not one size"
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


@pytest.mark.parametrize("text", ["[f/tp, h] turned(dp)", 'flat(w "[f, h]")/dp'])
def test_what_is_more_than_dims_is_refused(text):
    """Also a clause of a later notation, which this module does not know."""
    dims = TensorLayout.parse("[f/tp, h]").dims
    with pytest.raises(LayoutError, match="more than its dims") as info:
        cuts_of(StandIn(dims, text), "placements")
    assert info.value.got == text
