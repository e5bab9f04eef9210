"""Layouts as text: regions, golden texts of small layouts, and what must not happen with large or hostile ones."""

from __future__ import annotations

import random
import time
from itertools import product

import numpy as np
import pytest

from xrank.engine.holdings import Holdings, Survey, apply_pieces, survey
from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.nests import Nest, addresses
from xrank.pictures.picture import layout_html
from xrank.pictures.text_picture import layout_text, region_of, survey_text

DIMS = ("{n}", "{n}/~dp", "{n}/=tp", "{n}/~tp/~dp", "(2 {n}/~dp)", "({n}/~tp 2)", "(2 {n}/=dp 2)", "pad({n}, 4)/tp")


def test_a_region_holds_what_its_nest_covers() -> None:
    random.seed(7)
    mesh = DeviceMesh.parse_grid("dp=2 tp=3")
    seen = 0
    for _ in range(120):
        layouts = LayoutMap(mesh)
        dims, shape, used = [], [], set()
        for _ in range(random.randint(1, 4)):
            n = random.randint(1, 7)
            dim = random.choice([d for d in DIMS if not used & {a for a in ("dp", "tp") if a in d}] or ["{n}"])
            used |= {axis for axis in ("dp", "tp") if axis in dim}
            dims.append(dim.format(n=n))
            shape.append(n * 2 ** dim.count("2"))
        try:
            layouts["w"] = "[" + ", ".join(dims) + "]"
        except ValueError:
            continue
        (one,) = survey(layouts, {"w": shape}).tensors
        for share in one.shares:
            for nest in share.nests:
                region = region_of(nest, one.shape)
                covered = {y for _, y in addresses(nest)}
                assert (region.first, region.last, region.num_elements) == (min(covered), max(covered), len(covered))
                if region.dims is None:
                    continue
                seen += 1
                indices = product(*([i for a, b in runs for i in range(a, b + 1)] for runs in region.dims))
                assert {int(np.ravel_multi_index(index, one.shape)) for index in indices} == covered, (dims, nest)
    assert seen > 200


def test_whole_fused_tensors_name_all_parts() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("dp=2"))
    layouts.sizes.update(g=2, d=1)
    layouts["w"] = "[g <q: (2 d) | k: d>, h]"
    text = layout_text(layouts, {"w": (6, 2)})
    assert "q: rows 0-1,3-4; k: rows 2,5" in text or "q, k: the whole tensor" in text, text


def test_a_page_draws_no_more_boxes_than_can_be_seen() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("dp=2 tp=2"))
    layouts.sizes.update(a=128, c=128)
    layouts["w"] = "[a b/dp, c d/tp]"
    page = layout_html(layouts, {"w": (512, 512)})
    assert page.count("<rect") == 2048


def picture(layout: str, grid: str, shape: tuple[int, ...], *, name: str = "w", view: str = "", **sizes: int) -> str:
    """Return the lines of one tensor, in elements."""
    layouts = LayoutMap(DeviceMesh.parse_grid(grid))
    layouts.sizes.update(sizes)
    if view:
        assert layouts.device_mesh is not None
        layouts.views["v"] = layouts.device_mesh.view(view)
    layouts[name] = layout
    return layout_text(layouts, {name: shape}).split("\n\n")[1]


@pytest.mark.parametrize(
    ("layout", "grid", "shape", "want"),
    [
        pytest.param(
            "[5/~dp]", "dp=4", (5,),
            """\
w [5]  [5/~dp]
  rank 0  ##...  elements 0-1  local [2], 2 elements
  rank 1  ..##.  elements 2-3  local [2], 2 elements
  rank 2  ....#  element 4     local [1], 1 element
  rank 3  .....  nothing       local [0], 0 elements""",
            id="one dim, uneven, an empty rank",
        ),
        pytest.param(
            "[f/tp, h]", "dp=2 tp=2", (4, 3),
            """\
w [4, 3]  [f/tp, h]
  ranks 0,2  ##..  rows 0-1  local [2, 3], 6 elements
  ranks 1,3  ..##  rows 2-3  local [2, 3], 6 elements""",
            id="rows and replicas",
        ),
        pytest.param(
            "[f/tp/~dp, h]", "dp=2 tp=2", (8, 1),
            """\
w [8, 1]  [f/tp/~dp, h]
  rank 0  ##......  rows 0-1  local [2, 1], 2 elements
  rank 1  ....##..  rows 4-5  local [2, 1], 2 elements
  rank 2  ..##....  rows 2-3  local [2, 1], 2 elements
  rank 3  ......##  rows 6-7  local [2, 1], 2 elements""",
            id="FSDP2 over tensor parallelism",
        ),
        pytest.param(
            "[o/dp, i/tp, 3, 3]", "dp=2 tp=2", (4, 2, 3, 3),
            """\
w [4, 2, 3, 3]  [o/dp, i/tp, 3, 3]
  rank 0  ##.. #.  [0-1, 0, :, :]  local [2, 1, 3, 3], 18 elements
  rank 1  ##.. .#  [0-1, 1, :, :]  local [2, 1, 3, 3], 18 elements
  rank 2  ..## #.  [2-3, 0, :, :]  local [2, 1, 3, 3], 18 elements
  rank 3  ..## .#  [2-3, 1, :, :]  local [2, 1, 3, 3], 18 elements""",
            id="four dims",
        ),
        pytest.param(
            "[pad(v, 128*tp)/tp, h]", "tp=4", (32003, 2),
            """\
w [32003, 2]  [pad(v, 128*tp)/tp, h]
  rank 0  #####...........  rows 0-8063       local [8064, 2], 16,128 elements
  rank 1  ....#####.......  rows 8064-16127   local [8064, 2], 16,128 elements
  rank 2  ........#####...  rows 16128-24191  local [8064, 2], 16,128 elements
  rank 3  ............####  rows 24192-32002  local [8064, 2], 16,128 elements, 506 of them padding""",
            id="a padded vocabulary",
        ),
        pytest.param(
            "[a b/tp, h]", "tp=2", (16, 2),
            """\
w [16, 2]  [a b/tp, h]
  rank 0  ##..##..##..##..  rows 0-1,4-5,8-9,12-13    local [8, 2], 16 elements
  rank 1  ..##..##..##..##  rows 2-3,6-7,10-11,14-15  local [8, 2], 16 elements""",
            id="a strided set",
        ),
        pytest.param(
            "[h] where dp=0", "dp=2 tp=2", (3,),
            """\
w [3]  [h] where dp=0
  ranks 0-1  the whole tensor  local [3], 3 elements
  ranks 2-3: without it""",
            id="ranks without it",
        ),
        pytest.param(
            "[h, r] sum(tp)", "tp=2", (4, 2),
            """\
w [4, 2]  [h, r] sum(tp)
  partial sums: the values are the sums over tp
  ranks 0-1  the whole tensor  local [4, 2], 8 elements""",
            id="addends",
        ),
    ],
)  # fmt: skip
def test_pictures(layout: str, grid: str, shape: tuple[int, ...], want: str) -> None:
    assert picture(layout, grid, shape, b=4).rstrip() == want


def test_fused_parts_are_named_also_where_one_of_them_has_replicas() -> None:
    text = picture(
        "[<q: (H d)/tp | k: (g d)/kvs | v: (g d)/kvs>] in v", "tp=4", (8,), view="kvs=2 rep=2", H=4, g=2, d=1
    )
    assert text.splitlines()[1:5] == [
        "  rank 0  #...#.#.  q: element 0; k: element 4; v: element 6  local [3], 3 elements",
        "  rank 1  .#..#.#.  q: element 1; k: element 4; v: element 6  local [3], 3 elements",
        "  rank 2  ..#..#.#  q: element 2; k: element 5; v: element 7  local [3], 3 elements",
        "  rank 3  ...#.#.#  q: element 3; k: element 5; v: element 7  local [3], 3 elements",
    ]


def test_a_piece_over_two_fused_parts_is_shown_part_by_part() -> None:
    lines = picture("[<gate: f | up: f>/tp, h]", "tp=3", (6, 2)).splitlines()
    assert "  gate: rows 0-1  " in lines[1]
    assert "  gate: row 2; up: row 3  " in lines[2]
    assert "  up: rows 4-5  " in lines[3]


def test_a_flat_buffer_is_shown_member_by_member_and_its_padding_with_the_last() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("dp=4"))
    layouts["flat_param"] = "flat(q [64, 64], b [64], n [7], pad 4)/dp"
    text = layout_text(layouts, {"q": (64, 64), "b": (64,), "n": (7,)}, dtypes=dict.fromkeys("qbn", "F32"))
    assert "  rank 3  ............####  elements [48, 54] to [63, 63]  3.9 KB\n" in text
    assert "  rank 1  ....#####.......  elements [16, 18] to [32, 35]  4.2 KB\n" in text
    assert "  rank 3  the whole tensor  32 B, 4 B of it padding\n  ranks 0-2: without it\n" in text
    assert "each rank holds\n  ranks 0-3  4.2 KB\n" in text


def test_holes_and_overlaps_are_named() -> None:
    hole = picture("[f/tp/u, h] in v", "tp=4", (16, 2), view="u=2 rep=2")
    assert "  ! HOLE: rows 2-3: on no rank" in hole.splitlines()
    overlap = picture("[<q: 4 | k: 4/u{4,0}>/~tp] in v", "tp=4", (8,), view="u=2 rep=2")
    assert "  ! OVERLAP: elements 2-2: on ranks 1-2, in different cuts" in overlap.splitlines()


def test_planted_holes_and_overlaps_in_any_pieces_are_named() -> None:
    # 4 x 6 in columns: (0-2) on rank 0, (3-5) on rank 1; then one is moved by a column.
    def columns(first: int, count: int) -> tuple[Nest, ...]:
        return (Nest(0, first, ((4, count, 6), (count, 1, 1))),)

    for moved, kind, where, ranks in ((2, "overlap", "elements [0, 2] to [0, 2]", (0, 1)), (4, "gap", "[0, 3]", ())):
        one = apply_pieces(Holdings("w", (4, 6), rule="w"), {0: columns(0, 3), 1: columns(moved, 6 - moved)})
        misfit = one.misfit
        assert misfit is not None
        assert (misfit.kind, misfit.ranks) == (kind, ranks)
        assert misfit.where in (where, "element [0, 2]", "element [0, 3]")
        text = survey_text(Survey({}, {}, (one,)))
        assert f"  ! {'OVERLAP' if kind == 'overlap' else 'HOLE'}: {misfit.where}: on " in text
    assert apply_pieces(Holdings("w", (4, 6)), {0: columns(0, 3), 1: columns(3, 3)}).misfit is None


def test_tensors_that_look_alike_are_drawn_once() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("pp=2 tp=2"))
    layouts["layers.{6/pp}.up"] = "[f/tp, h]"
    text = layout_text(layouts, {f"layers.{i}.up": (4, 2) for i in range(6)})
    assert text.count("local [2, 2]") == 4
    assert "layers.0.up [4, 2]  [f/tp, h]\n  and 2 more alike: layers.1.up, layers.2.up\n  rank 0 " in text
    assert "  ranks 2-3: without it\n" in text


def test_unmatched_and_unused_are_listed() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("tp=2"))
    layouts["up"] = "[f/tp, h]"
    layouts[r"layers\..*"] = "[h]"
    text = layout_text(layouts, {"up": (4, 2), "down": (2, 4)})
    assert "\ndown [2, 4]\n  ! no rule for it\n" in text
    assert "\nno rule for\n  down\n" in text
    assert text.endswith("\nrules that match no tensor\n  layers\\..*\n")


def test_a_misfit_is_shown_at_its_tensor() -> None:
    assert "\n  ! w: " in picture("[f/tp, h]", "tp=4", (6, 2))


def test_hostile_names_stay_names() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("tp=2"))
    name = "a\n\x1b[31m<script>\u202e"
    layouts[r"a.*(?s:.)*"] = "[f/tp]"
    text = layout_text(layouts, {name: (4,), "b\x07\n": (2,)})
    assert "a\\n\\x1b[31m<script>\\u202e [4]  [f/tp]\n" in text
    assert not [c for c in text if c != "\n" and not c.isprintable()]


def test_no_line_is_wider_than_asked() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("dp=3 tp=3"))
    layouts["x" * 300] = "[f/~tp/~dp, h]"
    text = layout_text(layouts, {"x" * 300: (2**20 + 7, 2)}, width=60)
    assert max(map(len, text.splitlines())) == 60
    assert "..." in text


def test_a_thousand_ranks_are_drawn_quickly_and_short() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("dp=8 tp=128"))
    layouts["rows"] = "[f/~tp/~dp, h]"
    layouts["replicas"] = "[f/tp, h]"
    started = time.process_time()
    text = layout_text(layouts, {"rows": (1_000_003, 8), "replicas": (1 << 20, 8)})
    assert time.process_time() - started < 5
    assert len(text.splitlines()) < 50
    assert ".. 1,009 more parts on " in text
    assert "  ranks 0,128,..,896 (8 ranks) " in text
