import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout.plain_meaning import NOTHING, Made, places, positions, whole
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.notation import render_dim
from xrank.layout.tensor_name import has_groups, name_table, parse_name

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "text",
    ["w", "", "layers.{V P/pp n}.mlp.experts.{e/ep}.w1", "{L}.w", "a.{<a: 7/pp{3,4} | b: 5/pp{4,1}>}", "x-{n}y{m}"],
)
def test_names_are_read_as_they_print(text):
    name = parse_name(text)
    assert str(name) == text and parse_name(str(name)) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.{", "the text ends"),
        ("a.{e", "the text ends"),
        ("a.{}", "'}' is at"),
        ("a.}", "'}' is at"),
        ("a.{e} b", "'b' is at"),
        ("a b", "'b' is at"),
        ("a.{e}{f}", "some text between"),
        ("a.{e, f}", "',' is at"),
        ("a.{e{f}}", "'{' is at"),
        ("a.{" + "(" * 50, "at most 31 groups"),
        ("{" * 9000, "'{' is at"),
        ("x" * 20_000, "too long"),
    ],
)
def test_hostile_names_are_refused(text, message):
    with pytest.raises(LayoutError, match=message):
        parse_name(text)


@given(st.text(alphabet="ab.{}/~ [<|:>(),é", max_size=30))
@settings(deadline=None)
def test_any_text_is_a_name_or_refused(text):
    has_groups(text)
    try:
        assert parse_name(str(parse_name(text))) == parse_name(text)
    except LayoutError as error:
        assert error.want


def test_what_is_a_group_and_what_a_quantifier():
    assert has_groups("a.{e}.b") and has_groups("a.{6/pp}") and has_groups(r"\d{2}.{e}") and has_groups(r"\\{e}")
    assert not any(map(has_groups, ["a", r"a\{e\}", r"\d{2}", "x{1,3}", "x{,3}", "x{2,}"]))


def test_indices_are_counted_and_the_rest_is_literal():
    name = parse_name("layers.{L}.w.{e}")
    assert name.with_indices(3, 12) == "layers.3.w.12" and name.indices("layers.3.w.12") == (3, 12)
    assert name.indices("layers.03.w.1") is None and name.indices("layersX3.w.1") is None
    assert name.indices("layers.3.w.1x") is None and name.indices("layers.-3.w.1") is None
    assert name.indices("layers." + "9" * 5000 + ".w.1") is None


def test_a_rank_knows_tensors_by_their_local_index():
    mesh = DeviceMesh((2,), ("pp",))
    name, layout = parse_name("layers.{<a: 6/pp | b: 4/pp>}.w"), TensorLayout.parse("[h]", mesh)
    table = name_table(name, layout, mesh, {"pp": 1})
    assert table.global_name("layers.3.w") == "layers.8.w" and table.local_name("layers.8.w") == "layers.3.w"
    assert table.local_name("layers.0.w") is None and table.global_name("head") is None
    assert list(table)[:2] == [("layers.0.w", "layers.3.w"), ("layers.1.w", "layers.4.w")]
    with pytest.raises(LayoutError, match=r"index 5 is beyond .*, of which there are 5 on this rank"):
        table.global_name("layers.5.w")
    with pytest.raises(LayoutError, match=r"index 10 is beyond .*, of which there are 10 in all"):
        table.local_name("layers.10.w")
    both = DeviceMesh((2, 2), ("pp", "tp"))
    first = TensorLayout.parse("[h] where tp=0", both)
    assert name_table(name, first, both, {"pp": 1, "tp": 1}) is None
    assert name_table(name, first, both, {"pp": 1, "tp": 0}) == table


def test_names_refuse_what_layouts_refuse():
    mesh = DeviceMesh((2, 2), ("pp", "ep"))
    layout = TensorLayout.parse("[h/ep]", mesh)
    for text, message in (
        ("w.{e/ep}", "cut twice by 'ep'"),
        ("w.{L/pp}", "size 'L' of the name"),
        ("w.{5/pp}", "5 is not divisible by 2"),
        ("w.{9999999}", "too many tensors"),
        ("w.{4/tp}", "Invalid axis names"),
    ):
        with pytest.raises(LayoutError, match=message):
            name_table(parse_name(text), layout, mesh, {"pp": 0, "ep": 0})
    with pytest.raises(LayoutError, match="two roles"):
        name_table(parse_name("w.{4/pp}"), TensorLayout.parse("[h] where pp=0", mesh), mesh, {"pp": 0, "ep": 0})


def test_random_names_follow_the_plain_meaning():
    rng = random.Random(20261110)
    for _ in range(300):
        made = Made(rng.randint, {f"a{i}": rng.randint(1, 3) for i in range(rng.randint(1, 2))})
        dims = made.dims(rng.randint(1, 2))
        name = parse_name("t." + ".m.".join("{" + render_dim(dim) + "}" for dim in dims))
        assert name.dims == dims
        mesh = DeviceMesh(tuple(made.lengths.values()), tuple(made.lengths))
        names = {**made.names, **made.lengths}
        seen = set()
        for at in places(made.lengths):
            table = name_table(name, TensorLayout(()), mesh, at, sizes=made.names)
            held = [positions(dim, names, made.lengths, at) for dim in dims]
            expected = {
                (name.with_indices(*index), name.with_indices(*where))
                for index, where in indexed(held)
                if NOTHING not in where
            }
            assert set(table) == expected and len(list(table)) == len(expected)
            for local, new in expected:
                assert table.global_name(local) == new and table.local_name(new) == local
            seen |= {new for _, new in expected}
        sizes = [whole(dim, names) for dim in dims]
        assert len(seen) == sizes[0] * (sizes[1] if len(sizes) > 1 else 1)


def indexed(held):
    pairs = [((), ())]
    for positions_ in held:
        pairs = [((*i, x), (*y, p)) for i, y in pairs for x, p in enumerate(positions_)]
    return pairs


def test_a_layout_map_looks_names_up():
    layouts = LayoutMap(DeviceMesh((2, 2), ("pp", "ep")))
    layouts["layers.{6/pp}.experts.{e/ep}.w1"] = "[f, h]"
    layouts["head"] = "[v, h] where pp=last"
    rule = layouts.rule_for("layers.2.experts.0.w1")
    assert rule == "layers.{6/pp}.experts.{e/ep}.w1" and str(layouts.name_of(rule)) == rule
    assert layouts.name_of("head") is None and layouts["layers.x.experts.0.w1"] is None
    layouts["layers.0.experts.0.w1"] = "[f]"  # an exact name comes first, as before patterns
    assert str(layouts["layers.0.experts.0.w1"]) == "[f]"
    layouts["layers.*w1"] = "[f, h]"
    with pytest.raises(LayoutError, match="matches multiple layout specification keys"):
        layouts["layers.2.experts.0.w1"]
    with pytest.raises(LayoutError, match="cut twice by 'pp'"):
        layouts["x.{6/pp}"] = "[h/pp]"
