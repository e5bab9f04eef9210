"""One file for a model of today: GQA, both orders of gate and up, a padded vocabulary, stages, experts."""

import os

import pytest

from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.layout_map import Companion

pytestmark = pytest.mark.quick

PAGE = """\
[mesh]
grid = "pp=2 dp=2 tp=2"
order = "tp-dp-pp"
view.expert = "pp=2 edp=1 ep=2 etp=2"
view.kv = "pp=2 dp=2 kvs=1 rep=2"

[sizes]
g = 2
r = 4
d = 128
e = 8

[tensors]
"embed" = "[pad(v, 128*tp)/tp, h] where pp=0"
"layers.{<a: 7/pp{3,4} | b: 5/pp{4,1}>}.qkv" = "[g/tp <q: r d | k: d | v: d>, h]"
"layers.{12/pp}.kv_replicated" = "[g d/kvs, h] in kv"
"layers.{12/pp}.up" = "[<gate: f/tp | up: f/tp>, h]"
"layers.{12/pp}.interleaved" = "[f/tp <gate: 1 | up: 1>, h]"
"layers.{12/pp}.experts.{e/ep}.w1" = '[f/etp, h] in expert'
".*norm" = "[h]"
"flat_param" = 'flat(q "[64, 64]", b [64], pad 4)/dp'
"layers.{12/pp}.scale" = 'scale("layers.{12/pp}.up", 128x128)'
"packed" = "packed([in/tp, out], dim=0, 8)"
"head" = "[pad(v, 128*tp)/tp, h] where pp=last"

[alias]
"lm_head" = "embed"
"""


def test_a_page_is_read_written_and_read_again(tmp_path):
    file = tmp_path / "layout.toml"
    file.write_text(PAGE)
    layouts = LayoutMap.read(file)
    assert layouts.device_mesh == DeviceMesh((2, 2, 2), ("pp", "dp", "tp"))
    assert layouts.views["kv"].axis_names == ("pp", "dp", "kvs", "rep")
    assert layouts.sizes == {"g": 2, "r": 4, "d": 128, "e": 8}
    assert layouts["layers.7.experts.3.w1"].view_mesh == layouts.views["expert"]
    assert layouts["layers.7.up"].view_mesh is None and layouts["final_norm"] is not None
    assert str(layouts["flat_param"]) == "flat(q [64, 64], b [64], pad 4)/dp"
    assert layouts.companion_rule_for("layers.3.scale") == "layers.{12/pp}.scale"
    assert layouts.companions["layers.{12/pp}.scale"] == Companion("layers.{12/pp}.up", None, (128, 128))
    assert layouts.find_unmatched(["layers.3.scale", "nothing", "packed"]) == ["nothing"]
    written = tmp_path / "again.toml"
    layouts.write(written)
    again = LayoutMap.read(written)
    assert again == layouts and not layouts.diff(again) and list(again) == list(layouts)
    again.write(file)
    assert file.read_bytes() == written.read_bytes()
    again.sizes["d"] = 64
    assert again != layouts and layouts.diff(again).sizes[0].new == "64"


def test_an_order_names_the_fastest_axis_first(tmp_path):
    file = tmp_path / "layout.toml"
    file.write_text('[mesh]\ngrid = "tp=2 dp=2 pp=2"\norder = "tp-dp-pp"\n')
    mesh = LayoutMap.read(file).device_mesh
    assert mesh.axis_names == ("pp", "dp", "tp") and mesh.groups("tp")[0] == (0, 1) and mesh.groups("pp")[0] == (0, 4)
    file.write_text('[mesh]\ngrid = "tp=2 dp=2"\norder = "dp-tp"\nranks = [3, 2, 1, 0]\n')
    layouts = LayoutMap.read(file)
    assert layouts.device_mesh == DeviceMesh((2, 2), ("tp", "dp"), [3, 2, 1, 0])
    layouts.write(file)
    assert LayoutMap.read(file) == layouts


def test_two_processes_that_have_one_number_write_at_once(tmp_path):
    """As ranks in containers of their own do, into one folder: neither takes what the other has begun."""
    file, other = tmp_path / "layout.toml", tmp_path / f"layout.toml.{os.getpid()}.part"
    other.write_bytes(b"another's")
    LayoutMap(DeviceMesh((2,), ("tp",))).write(file)
    assert LayoutMap.read(file).device_mesh == DeviceMesh((2,), ("tp",)) and other.read_bytes() == b"another's"
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name, other.name]
