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
        ('[tensors]\n"a.{e/}" = "[h]"\n', "a tensor's name cannot be read: '}' stands at position 5"),
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
        ("[alias]\nhead = 3\n", "'head' names no other tensor"),
        ('[alias]\nhead = "head"\n', "'head' names no other tensor"),
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
    with pytest.raises(LayoutError, match="a mesh that is not the LayoutMap's"):
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
