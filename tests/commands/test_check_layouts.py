"""The proof of layouts by itself: what covers, what does not and where, what matches nothing."""

from __future__ import annotations

from typing import Any

import pytest

from xrank.commands import check_layouts
from xrank.engine.report import Report
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.layout_map import parse_companion


def check(rules: dict[str, str], shapes: dict[str, tuple[int, ...]], grid: str, view: str = "", **sizes: int) -> Report:
    layouts = LayoutMap(DeviceMesh.parse_grid(grid))
    layouts.sizes.update(sizes)
    if view:
        assert layouts.device_mesh is not None
        layouts.views["v"] = layouts.device_mesh.view(view)
    for rule, layout in rules.items():
        layouts[rule] = layout
    return check_layouts(layouts, shapes, dtypes=dict.fromkeys(shapes, "BF16"))


def held(report: Report) -> list[int]:
    return [row["nbytes"] for row in report.details["ranks"]]


@pytest.mark.parametrize(
    ("layout", "grid", "shape", "want", "more"),
    [
        pytest.param("[5/~dp]", "dp=4", (5,), [4, 4, 2, 0], {}, id="uneven"),
        pytest.param("[f/=tp%128, h]", "tp=8", (1536, 2), [1024] * 4 + [512] * 4, {}, id="at multiples"),
        pytest.param("[g/tp <q: r d | k: d | v: d>, h]", "dp=2 tp=2", (8, 3), [24] * 4, {"r": 2, "d": 1}, id="fused"),
        pytest.param("[<q: (g r)/tp | k: g/kvs>] in v", "tp=4", (6,), [4] * 4,
                     {"g": 2, "r": 2, "view": "kvs=2 rep=2"}, id="fused, replicas of a part"),
        pytest.param("[pad(v, 128*tp)/tp, h]", "tp=4", (32003, 1), [16128] * 4, {}, id="padded"),
        pytest.param("[h] where dp=last", "dp=2 tp=2", (3,), [0, 0, 6, 6], {}, id="on some ranks"),
        pytest.param("[]", "dp=2", (), [2, 2], {}, id="no dims"),
        pytest.param("[f/~tp]", "tp=2", (0,), [0, 0], {}, id="no elements"),
    ],
)  # fmt: skip
def test_what_covers(layout: str, grid: str, shape: tuple[int, ...], want: list[int], more: dict[str, Any]) -> None:
    report = check({"w": layout}, {"w": shape}, grid, **more)
    assert report.ok, report.error
    assert (report.error, report.proof["coverage"], report.num_tensors) == (None, "proven", 1)
    assert held(report) == want


def test_flat_buffers_are_proven_member_by_member() -> None:
    rules = {"flat_param": "flat(w [6, 8/tp], b [8/tp], pad 3)/dp"}
    report = check(rules, {"w": (6, 8), "b": (8,)}, "dp=3 tp=2")
    assert report.ok, report.error
    # 6 x 4 + 4 elements, padded to 30, a third each.
    assert held(report) == [20] * 6
    assert report.details["unused_rules"] == []
    # Without one of the members nobody knows where the other lies.
    report = check(rules, {"w": (6, 8)}, "dp=3 tp=2")
    assert not report.ok
    assert "the shape of b is not given" in report.error["message"]


def test_a_gap_is_named() -> None:
    report = check({"w": "[f/tp/u, h] in v"}, {"w": (16, 2)}, "tp=4", "u=2 rep=2")
    assert (report.ok, report.exit_code, report.status, report.proof["coverage"]) == (False, 2, "failed", "refused")
    error = report.error
    assert (error["type"], error["tensor"], error["index_range"]) == ("LayoutError", "w", "rows 2-3")
    assert error["message"] == "w, rows 2-3: held by no rank"
    assert "[f/tp/u, h] in v of [16, 2] on tp=4" in error["got"]
    assert "'w'" in error["try"]


def test_an_overlap_is_named_with_its_ranks() -> None:
    report = check({"w": "[<q: 4 | k: 4/u{4,0}>/~tp] in v"}, {"w": (8,)}, "tp=4", "u=2 rep=2")
    assert (report.exit_code, report.error["index_range"], report.error["rank"]) == (2, "elements 2-2", 1)
    assert report.error["message"] == "w, elements 2-2: held by ranks 1-2 in contradicting layouts"


def test_stages_that_leave_a_layer_to_nobody_are_named() -> None:
    layouts = {"layers.{4/pp/u}.up": "[f/tp, h] in v"}
    shapes = {f"layers.{i}.up": (4, 2) for i in range(4)}
    assert check({"layers.{4/pp}.up": "[f/tp, h]"}, shapes, "pp=2 tp=2").ok
    report = check(layouts, shapes, "pp=2 tp=2", "u=2 tp=2")
    # Stage 0 keeps the first half of its layers, stage 1 the second half of its own.
    assert [problem["tensor"] for problem in report.details["problems"]] == ["layers.1.up", "layers.2.up"]
    assert report.error["message"] == "layers.1.up, the whole tensor: held by no rank"


def test_what_no_rule_matches_is_a_problem_and_a_rule_that_matches_nothing_is_said() -> None:
    report = check({"up": "[f/tp, h]", "ghost.*": "[h]"}, {"up": (4, 2), "down": (2, 4)}, "tp=2")
    assert report.details["unmatched"] == ["down"]
    assert report.details["unused_rules"] == ["ghost.*"]
    assert (report.exit_code, report.error["tensor"]) == (2, "down")
    assert '"down" = "[d0, d1]"' in report.error["try"]
    assert ("unused-rule", "the rule 'ghost.*' matches no tensor") in report.notes
    assert check({"up": "[f/tp, h]", "ghost.*": "[h]"}, {"up": (4, 2)}, "tp=2").ok


@pytest.mark.parametrize(
    ("rules", "shape", "says"),
    [
        ({"w": "[f/tp, h]"}, (5, 2), "5"),
        ({"w": "[f/tp]"}, (4, 2), "1 dims for 2"),
        ({"w.*": "[f/tp, h]", ".*": "[f, h]"}, (4, 2), "matches multiple"),
        ({"w": "[f/tp, h]", "flat": "flat(w [f/tp, h])"}, (4, 2), "several rules"),
        ({"w": "[(x y)/tp, h]"}, (4, 2), "not known"),
    ],
)
def test_a_layout_that_does_not_fit_is_a_problem_of_its_tensor(
    rules: dict[str, str], shape: tuple[int, ...], says: str
) -> None:
    report = check(rules, {"w": shape}, "tp=2")
    assert (report.exit_code, report.error["tensor"], report.error["type"]) == (2, "w", "LayoutError")
    assert says in report.error["message"]
    assert report.error["try"]


def test_all_problems_are_told_and_the_first_is_the_error() -> None:
    report = check({"a": "[f/tp]", "b": "[f/tp]", "c": "[f/tp]"}, {"a": (4,), "b": (5,), "c": (7,)}, "tp=2")
    assert [problem["tensor"] for problem in report.details["problems"]] == ["b", "c"]
    assert report.error == report.details["problems"][0]


def test_companions_and_aliases() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("tp=2"))
    layouts["w"] = "[f/tp, h]"
    layouts.companions["w_scale"] = parse_companion('scale("w", 128x128)')
    layouts.aliases["head"] = "w"
    shapes = {"w": (512, 256), "w_scale": (4, 2), "head": (512, 256)}
    report = check_layouts(layouts, shapes)
    assert report.ok, report.error
    assert report.details["unused_rules"] == []
    shapes["w"] = shapes["head"] = (384, 256)
    shapes["w_scale"] = (3, 2)
    report = check_layouts(layouts, shapes)
    assert [problem["tensor"] for problem in report.details["problems"]] == ["w_scale"]


def test_addends_are_said() -> None:
    report = check({"w": "[h, r] sum(tp)"}, {"w": (4, 2)}, "tp=2")
    assert report.ok
    assert ("addends", "w: the ranks hold partial sums over tp") in report.notes


def test_a_map_without_a_mesh_and_a_shape_that_is_none() -> None:
    layouts = LayoutMap()
    layouts["w"] = "[f/tp]"
    assert "mesh" in check_layouts(layouts, {"w": (4,)}).error["message"]
    with pytest.raises(LayoutError):
        check_layouts(layouts, {"w": ("x",)})  # type: ignore[dict-item]
