import os
import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrank.errors import LayoutError, UsageError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.layout_map import _from_file, parse_tables, to_text

pytestmark = pytest.mark.quick

MESH = DeviceMesh((2, 4), ("batch", "model"))


def made(rules: dict, mesh=MESH) -> LayoutMap:
    layout_map = LayoutMap(mesh)
    layout_map.update(rules)
    return layout_map


# Keras' contract (KERAS.md section 5).


def test_keras_documented_example():
    layout_map = LayoutMap(MESH)
    layout_map["dense.*kernel"] = (None, "model")
    layout_map["dense.*bias"] = ("model",)
    layout_map["conv2d.*kernel"] = (None, None, None, "model")
    layout_map["conv2d.*bias"] = ("model",)
    assert layout_map["dense_1/kernel"] == TensorLayout((None, "model"), MESH)
    assert layout_map["conv2d/bias"].device_mesh is MESH
    assert layout_map["norm/scale"] is None
    assert layout_map["m/dense/kernel"] is None  # the whole name, since keras 3.14
    assert list(layout_map) == ["dense.*kernel", "dense.*bias", "conv2d.*kernel", "conv2d.*bias"]


def test_the_exact_key_wins():
    layout_map = made({"^emb$": ("model",), "e.*": (None,), "emb": (None, None)})
    assert str(layout_map["^emb$"]) == "[d0/model]"
    assert str(layout_map["emb"]) == "[d0, d1]"
    assert layout_map.rule_for("ebb") == "e.*"


def test_several_matches_are_refused_even_if_equal():
    layout_map = made({"e.*": ("model",), ".*b": ("model",)})
    for look in (lambda: layout_map["emb"], lambda: layout_map.get("emb"), lambda: "emb" in layout_map):
        with pytest.raises(ValueError, match="matches multiple layout specification keys") as caught:
            look()
    assert caught.value.tensor == "emb"
    with pytest.raises(LayoutError):
        layout_map.find_unused(["emb"])


def test_a_match_is_of_the_whole_name_and_one_line():
    layout_map = made({"a.*b": (None,)})
    assert layout_map["a\nb"] is None and layout_map["A.b"] is None and layout_map["ab"] is not None


def test_a_stored_key_is_not_set_again():
    layout_map = made({"a": ("model",)})
    with pytest.raises(ValueError, match="already exist"):
        layout_map["a"] = (None,)
    with pytest.raises(ValueError, match="already exist"):
        layout_map.update({"a": (None,)})
    del layout_map["a"]
    layout_map["a"] = (None,)


@pytest.mark.parametrize("value", [["model"], "model", "", None, 3, " [f]"])
def test_other_values_are_refused(value):
    layout_map = LayoutMap(MESH)
    with pytest.raises(ValueError, match="should be a TensorLayout type"):
        layout_map["a"] = value
    assert len(layout_map) == 0


def test_a_wrong_axis_is_refused_and_nothing_stored():
    layout_map = LayoutMap(MESH)
    with pytest.raises(ValueError, match="Invalid axis names for Layout"):
        layout_map["a"] = ("tp",)
    assert len(layout_map) == 0
    LayoutMap(None)["a"] = ("tp",)


def test_meshes_are_filled_in_but_not_replaced():
    other = DeviceMesh((2,), ("model",))
    shared, own = TensorLayout(("model",)), TensorLayout(("model",), other)
    layout_map = made({"a": shared, "b": shared, "c": own})
    assert layout_map["a"].device_mesh == MESH and layout_map["c"].device_mesh == other
    assert shared.device_mesh is None  # a value: Keras would have changed it in place
    assert made({"a": shared}, None)["a"].device_mesh is None


def test_the_dict_side_is_keras():
    layout_map = made({"a.*": ("model",)})
    assert "nothing" in layout_map and layout_map.get("nothing", 7) is None
    assert layout_map.setdefault("nothing", ("model",)) is None and len(layout_map) == 1
    for act in (lambda: layout_map.pop("ab"), lambda: layout_map.pop("b", 7), lambda: layout_map.__delitem__("ab")):
        with pytest.raises(KeyError):
            act()
    assert layout_map.pop("a.*") == TensorLayout(("model",), MESH)
    layout_map["x"] = (None,)
    layout_map.clear()
    assert list(layout_map.items()) == []


def test_a_bad_expression_is_met_at_look_up():
    layout_map = made({"a[": ("model",)})
    assert layout_map["a["] is not None
    with pytest.raises(LayoutError, match=r"'a\[' is not a regular expression"):
        layout_map["b"]
    del layout_map["a["]
    assert layout_map["b"] is None


def test_text_of_the_notation_is_a_value():
    layout_map = made({"w.*": "[f/model/~batch, h]"})
    assert layout_map["w1"] == TensorLayout.parse("[f/model/~batch, h]", MESH)
    with pytest.raises(LayoutError, match="position 3"):
        layout_map["v"] = "[f/"
    with pytest.raises(LayoutError, match="not text"):
        layout_map[3] = "[f]"


def test_unused_and_unmatched_are_told_by_name():
    layout_map = made({"w.*": "[f/model]", "wx": "[f]", "q.*": "[f]", "z": "[f]"})
    names = ["wx", "other", "q1", "q2", "more"]
    assert layout_map.find_unused(iter(names)) == ["w.*", "z"]
    assert layout_map.find_unmatched(iter(names)) == ["other", "more"]


# The file.


def test_reads_a_file(tmp_path):
    file = tmp_path / "layout.toml"
    file.write_text(
        '[mesh]\ngrid = "dp=2 tp=2"\nranks = [3, 2, 1, 0]\n\n[tensors]\n"w.*" = "[f/tp/~dp, h]"\nb = "[h]"\n'
        '[alias]\nhead = "embed"\n'
    )
    layout_map = LayoutMap.read(file)
    mesh = DeviceMesh((2, 2), ("dp", "tp"), [3, 2, 1, 0])
    assert layout_map.device_mesh == mesh
    assert dict(layout_map) == {
        "w.*": TensorLayout.parse("[f/tp/~dp, h]", mesh),
        "b": TensorLayout.parse("[h]", mesh),
    }
    assert layout_map.aliases == {"head": "embed"}


def test_writes_the_same_file_each_time(tmp_path):
    layout_map = made({"w.*": "[f/model, h]", "b": "[h]"})
    layout_map.aliases["head"] = "embed"
    file = tmp_path / "layout.toml"
    layout_map.write(file)
    assert file.read_text() == (
        '[mesh]\ngrid = "batch=2 model=4"\n\n[tensors]\n"w.*" = "[f/model, h]"\n"b" = "[h]"\n\n'
        '[alias]\n"head" = "embed"\n'
    )
    LayoutMap.read(file).write(str(file))
    assert LayoutMap.read(file) == layout_map and os.listdir(tmp_path) == ["layout.toml"]
    LayoutMap().write(file)
    assert file.read_text() == "[tensors]\n" and LayoutMap.read(file) == LayoutMap()


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
        | st.text("\"\\\x00\n\t\r\x7f\u2028é😀=[]#'", max_size=8),
        st.sampled_from(["[f/dp, h]", "[]", "[3/~tp/dp]"]),
        max_size=4,
    ),
    st.permutations(range(4)),
    st.dictionaries(st.sampled_from('ab"\\\x01'), st.sampled_from('xy"\\\x02').map(lambda c: c + c), max_size=3),
)
def test_what_is_written_is_read_again(rules, ranks, aliases):
    layout_map = made(
        {re.escape(pattern): text for pattern, text in rules.items()}, DeviceMesh((2, 2), ("dp", "tp"), ranks)
    )
    layout_map.aliases.update(aliases)
    text = to_text(layout_map._content())
    again = _from_file(parse_tables(tomllib.loads(text), "file"), "file")
    assert again == layout_map and list(again) == list(layout_map)
    assert to_text(again._content()) == text


def test_equality_sees_mesh_and_aliases():
    one, two = made({"a": "[h]"}), made({"a": "[h]"})
    assert one == two
    two.aliases["x"] = "y"
    assert one != two
    assert LayoutMap() != LayoutMap(MESH)
    assert one == {"a": TensorLayout.parse("[h]", MESH)}  # Mapping's, as in Keras


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[mesh", "is not TOML"),
        ("x = " + "[" * 5000, "is not TOML"),
        ("x = " + "9" * 5000, "is not TOML"),
        (b"\xff\xfe[", "is not text"),
        ("[extra]\n", "'extra' is not a table"),
        ("tensors = 3\n", "'tensors' is not a table"),
        ("[[tensors]]\n", "'tensors' is not a table"),
        ("[mesh]\n", "has no grid"),
        ("[mesh]\ngrid = 3\n", "has no grid"),
        ('[mesh]\ngrid = "dp=2"\norder = "tp-dp"\n', "'tp' , which has no length"),
        ('[mesh]\ngrid = "dp=2"\norder = 3\n', "is not a text"),
        ('[mesh]\ngrid = "dp=2"\nshape = 3\n', "'shape' is not a key"),
        ('[mesh]\ngrid = "dp=2"\nview = 3\n', "not a grid with a name"),
        ('[mesh]\ngrid = "dp=2"\nview.a = 3\n', "not a grid with a name"),
        ('[mesh]\ngrid = "dp=2"\nview.a = "ep=3"\n', r"\[mesh\]: Shape does not match"),
        ("[sizes]\nd = -1\n", r"\[sizes\]: the size 'd' is not a"),
        ("[sizes]\nd = true\n", r"\[sizes\]: the size 'd' is not a"),
        ('[sizes]\n"d e" = 1\n', "'d e' is not a name"),
        ('[mesh]\ngrid = "dp=2"\nview.a = "ep=2"\n[sizes]\nep = 1\n', "'ep' is both a size and an axis"),
        ('[mesh]\ngrid = "dp=2"\n[tensors]\n"a" = "[h] in kv"\n', "rule 'a': the mesh has no view 'kv'"),
        ('[mesh]\ngrid = "dp=2"\n[tensors]\n"a.{e/tp}" = "[h]"\n', "Invalid axis names"),
        ('[mesh]\ngrid = "dp=2"\n[tensors]\n"a.{e/dp}" = "[h/dp]"\n', "cut twice by 'dp'"),
        ('[tensors]\n"a.{e/}" = "[h]"\n', "a tensor's name cannot be read: '}' is at position 5"),
        ('[tensors]\n"a.{e}{f}" = "[h]"\n', "some text between two groups"),
        ('[tensors]\n"a.{e" = "[h]"\n', "a tensor's name cannot be read: the text ends"),
        ('[tensors]\n"a" = "scale(b, 3)"\n', "a companion cannot be read"),
        ('[tensors]\n"a" = \'scale("b", 3)\'\n', "there is no rule 'b'"),
        ('[mesh]\ngrid = "dp"\n', r"\[mesh\]: the grid 'dp' cannot be read"),
        ('[mesh]\ngrid = "dp=2"\nranks = [0]\n', "does not match the number of devices"),
        ('[mesh]\ngrid = "dp=2"\nranks = [0, 1.0]\n', "not a list of integers"),
        ('[mesh]\ngrid = "dp=2"\nranks = [0, true]\n', "not a list of integers"),
        ('[tensors]\n"a" = 3\n', "'a' has no layout's text"),
        ('[tensors]\na.b = "[h]"\n', "'a' has no layout's text"),
        ('[tensors]\n"a" = "model"\n', "'a' has no layout's text"),
        ('[tensors]\n"a" = "[f/"\n', "rule 'a': a layout cannot be read: the text ends at position 3"),
        ('[mesh]\ngrid = "dp=2"\n[tensors]\n"a" = "[f/tp]"\n', "rule 'a': Invalid axis names"),
        ('[tensors]\n"a[" = "[h]"\n', r"rule 'a\[': the pattern 'a\[' is not a regular expression"),
        ('[tensors]\n"a{99999999999}" = "[h]"\n', "is not a regular expression"),
        ('[tensors]\n"a" = "[h]"\n"a" = "[h]"\n', "is not TOML"),
        ("[alias]\nhead = 3\n", "'head' does not name a different tensor"),
        ('[alias]\nhead = "head"\n', "'head' does not name a different tensor"),
        ('[alias]\na = "b"\nb = "a"\n', "an alias itself"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, content, message):
    file = tmp_path / "layout.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(LayoutError, match=message) as caught:
        LayoutMap.read(file)
    assert caught.value.file == str(file) and str(file) in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path, "a\x00b"):
        with pytest.raises(UsageError, match="cannot be read") as caught:
            LayoutMap.read(path)
        assert caught.value.file == str(path)


def test_a_file_that_cannot_be_written_leaves_what_was(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        made({}).write(tmp_path / "none" / "layout.toml")
    file = tmp_path / "layout.toml"
    made({"a": "[h]"}).write(file)
    with pytest.raises(LayoutError, match="UTF-8"):
        made({"\ud800": "[h]"}).write(file)
    with pytest.raises(LayoutError, match="a different mesh than the LayoutMap"):
        made({"a": TensorLayout(("x",), DeviceMesh((2,), ("x",)))}).write(file)
    assert list(LayoutMap.read(file)) == ["a"] and os.listdir(tmp_path) == ["layout.toml"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        made({}).write(tmp_path / "folder")
    assert sorted(os.listdir(tmp_path)) == ["folder", "layout.toml"]


def test_thousands_of_names_are_looked_up_by_their_own_key():
    layout_map = made({f"layers.{i}.w": "[f/model, h]" for i in range(3000)})
    assert layout_map.find_unused(f"layers.{i}.w" for i in range(3000)) == []
    assert not layout_map._expressions
