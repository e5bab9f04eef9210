from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.layout_map import LayoutChange, LayoutDiff

MESH = DeviceMesh((2, 2), ("dp", "tp"))


def made(mesh, **rules: str) -> LayoutMap:
    layouts = LayoutMap(mesh)
    layouts.update(rules)
    return layouts


def test_equal_maps_differ_in_nothing():
    old = made(MESH, a="[f/tp]", b="[h]")
    assert not old.diff(made(MESH, b="[ h ]", a="[f / tp]")) and old.diff(old) == LayoutDiff()


def test_rules_are_added_removed_and_changed():
    diff = made(MESH, a="[f/tp]", b="[h]", c="[h]").diff(made(MESH, a="[f/~tp]", c="[h]", d="[] sum(tp)"))
    assert diff and diff.added == (LayoutChange("d", None, "[] sum(tp)"),)
    assert diff.removed == (LayoutChange("b", "[h]", None),)
    assert diff.changed == (LayoutChange("a", "[f/tp]", "[f/~tp]"),)
    assert not (diff.mesh or diff.sizes or diff.aliases)
    assert [str(change) for change in (*diff.removed, *diff.changed)] == ["b: [h] -> none", "a: [f/tp] -> [f/~tp]"]


def test_meshes_sizes_views_and_aliases_count():
    other = DeviceMesh((4, 1), ("dp", "tp"), [3, 2, 1, 0])
    old, new = made(MESH, a="[f/tp]"), made(other, a="[f/tp]")
    old.views["kv"] = MESH.view("dp=2 kvs=1 rep=2")
    old.sizes["d"], new.sizes["d"], new.sizes["g"] = 64, 128, 4
    old.aliases["head"] = "embed"
    diff = old.diff(new)
    assert diff.mesh == (
        LayoutChange("grid", "dp=2 tp=2", "dp=4 tp=1"),
        LayoutChange("ranks", "0 to 3", "[3, 2, 1, 0]"),
        LayoutChange("view kv", "dp=2 kvs=1 rep=2", None),
    )
    assert diff.sizes == (LayoutChange("d", "64", "128"), LayoutChange("g", None, "4"))
    assert diff.aliases == (LayoutChange("head", "embed", None),) and not diff.changed
    assert made(None, a="[f/tp]").diff(made(MESH, a="[f/tp]")).mesh == (
        LayoutChange("grid", None, "dp=2 tp=2"),
        LayoutChange("ranks", None, "0 to 3"),
    )
