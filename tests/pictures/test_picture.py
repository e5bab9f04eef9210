"""Pages, timelines and reports: what they draw, and what they refuse."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xrank.engine.holdings import survey
from xrank.engine.report import Report
from xrank.errors import CorruptError, UsageError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.pictures import show
from xrank.pictures.picture import SEARCH_SCRIPT, SEARCH_SCRIPT_HASH, color, layout_html, report_page
from xrank.pictures.text_picture import Band, find_bands
from xrank.virtual.pipeline import make_schedule

VOID = {"meta", "input"}
CLOSED_BY_OTHERS = {"td", "th", "tr", "li"}


class Page(HTMLParser):
    """Checks that every element is closed in its order; keeps what stands in the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        assert not self.opened

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID | CLOSED_BY_OTHERS:
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.opened and self.opened[-1] == "script":
            self.scripts.append(data)
        self.words += data


def make_page() -> tuple[LayoutMap, dict[str, tuple[int, ...]]]:
    layouts = LayoutMap(DeviceMesh.parse_grid("dp=2 tp=2"))
    layouts.sizes.update(g=2, r=2, d=2)
    layouts["up"] = "[f/tp/~dp, h]"
    layouts["qkv"] = "[g/tp <q: r d | k: d | v: d>, h/dp]"
    layouts["conv"] = "[o/dp, i/tp, 3, 3]"
    layouts["flat"] = "flat(bias [5], norm [4], pad 4)/dp"
    layouts["unused.*"] = "[h]"
    shapes = {"up": (8, 4), "qkv": (16, 4), "conv": (4, 4, 3, 3), "bias": (5,), "norm": (4,), "odd": (3,)}
    return layouts, shapes


def test_a_page_has_mesh_rules_parts_and_bytes() -> None:
    layouts, shapes = make_page()
    page = Page(layout_html(layouts, shapes, dtypes=dict.fromkeys(shapes, "BF16")))
    for text in ("dp=2 tp=2", "[f/tp/~dp, h]", "q: rows 0-3", "unused.*", "Tensors without a rule", "odd"):
        assert text in page.words, text
    assert re.search(r"Each rank holds\s*ranks? 0", page.words)
    assert "dim 0 by tp and dp" in page.words and "whole on each rank" not in page.words
    # up: 4 parts; qkv: 2 x 2 parts of 3 nests; conv: 4; bias: 1 + 2 ranges of elements or less; norm: 1.
    assert len([tag for tag, _ in page.tags if tag == "rect"]) >= 4 + 12 + 4 + 2


def test_boxes_stand_where_the_parts_are() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("dp=2 tp=2"))
    layouts["w"] = "[a/dp, b/tp]"
    page = Page(layout_html(layouts, {"w": (4, 6)}))
    places = [
        tuple(float(attrs[key] or "") for key in ("x", "y", "width", "height"))
        for tag, attrs in page.tags
        if tag == "rect"
    ]
    assert places == [(0, 0, 240, 120), (240, 0, 240, 120), (0, 120, 240, 120), (240, 120, 240, 120)]


def test_nothing_comes_from_elsewhere() -> None:
    layouts, shapes = make_page()
    page = layout_html(layouts, shapes)
    assert "://" not in page and "url(" not in page and "@import" not in page
    read = Page(page)
    assert read.scripts == [SEARCH_SCRIPT], "one script, the same in each page, which the policy names by its hash"
    policy = next(attrs["content"] for tag, attrs in read.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{SEARCH_SCRIPT_HASH}'"
    for tag, attrs in read.tags:
        assert (attrs.get("href") or "#").startswith("#")
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        assert not {"src", "srcset", "action", "data"} & attrs.keys()
        assert not [name for name in attrs if name.startswith("on")]


def test_hostile_names_are_text() -> None:
    hostile = '"><script>alert(1)</script><a href="x">\n\x1b[31m\ud800'
    layouts = LayoutMap(DeviceMesh.parse_grid("tp=2"))
    layouts["(?s:.*)"] = "[f/tp]"
    layouts["<img src=x>"] = "[f]"
    page = layout_html(layouts, {hostile: (4,), "<b>": (3,)}, dtypes={hostile: "<i>"})
    page.encode("utf-8")
    assert "\x1b" not in page
    read = Page(page)
    assert read.scripts == [SEARCH_SCRIPT]
    assert not {"a", "img", "i"} & {tag for tag, _ in read.tags}
    assert "<script>alert(1)</script>" in read.words
    assert "<img src=x>" in read.words


def test_a_thousand_ranks_make_a_small_page() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("dp=8 tp=128"))
    layouts["w"] = "[f/~tp/~dp, h]"
    layouts["cyclic"] = "[a b/tp, h]"
    layouts.sizes["b"] = 128
    started = time.process_time()
    page = layout_html(layouts, {"w": (1_000_003, 8), "cyclic": (1 << 20, 4)})
    assert time.process_time() - started < 5
    Page(page)
    assert len(page) < 2_000_000


class Shard:
    """Stands for torch's placement, which is recognized by its methods."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def is_shard(self) -> bool:
        return True


def make_dtensor(shape: tuple[int, ...], dim: int) -> Any:
    mesh = SimpleNamespace(mesh=SimpleNamespace(shape=(2,), tolist=lambda: [0, 1]), mesh_dim_names=("tp",))
    return SimpleNamespace(shape=shape, dtype="torch.bfloat16", device_mesh=mesh, placements=(Shard(dim),))


def test_show_draws_tensors_and_state_dicts(tmp_path: Path) -> None:
    one = show(make_dtensor((8, 4), 0))
    assert "rows 4-7  local [4, 4], 32 B" in repr(one)
    two = show({"up": make_dtensor((8, 4), 0), "down": make_dtensor((4, 8), 1), "step": 3})
    assert "down BF16 [4, 8]" in repr(two) and "up BF16 [8, 4]" in repr(two)
    cell = Page(two._repr_html_())
    assert "dim 1 by tp" in cell.words and not cell.scripts
    two.save(tmp_path / "page.html")
    assert Page((tmp_path / "page.html").read_text()).words.count("64 B") >= 2


@pytest.mark.parametrize(
    ("what", "shape", "says"),
    [
        (3, None, "no layout that can be drawn"),
        ({"a": 3}, None, "no layout that can be drawn"),
        (TensorLayout.parse("[f/tp]", DeviceMesh((2,), ("tp",))), None, "none are given"),
        (TensorLayout.parse("[f]"), (4,), "without a mesh"),
        (LayoutMap(DeviceMesh((2,), ("tp",))), (4,), "none are given"),
    ],
)
def test_show_refuses(what: object, shape: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        show(what, shape)


def test_boxes_have_ranks_and_parts_have_names() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("dp=2 tp=2"))
    layouts.sizes.update(g=2, r=2, d=2)
    layouts["qkv"] = "[g/tp <q: r d | k: d | v: d>, h/dp]"
    (one,) = survey(layouts, {"qkv": (16, 4)}).tensors
    names = [(band.name, band.first, band.last) for band in find_bands(one, 0)]
    assert names == [("q", 0, 3), ("k", 4, 5), ("v", 6, 7), ("q", 8, 11), ("k", 12, 13), ("v", 14, 15)]
    assert find_bands(one, 1) == []
    words = Page(show(layouts, {"qkv": (16, 4)}).to_html()).words
    assert all(f"rank {rank}" in words for rank in range(4))
    svg = layout_html(layouts, {"qkv": (16, 4)}).split("<svg")[1]
    assert [svg.count(f">{name}</text>") for name in "qkv"] == [2, 2, 2]


def test_interleaved_parts_are_bands_of_their_own() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("tp=2"))
    layouts["w"] = "[<gate: 4/tp | up: 4/tp> 2]"
    (one,) = survey(layouts, {"w": (16,)}).tensors
    assert find_bands(one, 0) == [Band("gate", 0, 7), Band("up", 8, 15)]


def test_three_cut_dims_are_a_drawing_for_each_part_of_the_first() -> None:
    layouts = LayoutMap(DeviceMesh.parse_grid("ep=2 tp=2 dp=2"))
    layouts["w"] = "[e/ep, f/tp, h/dp]"
    page = Page(layout_html(layouts, {"w": (4, 8, 6)}))
    captions = [f"dim 0: {run}; dim 1 downwards, dim 2 to the right" for run in ("0-1", "2-3")]
    assert all(caption in page.words for caption in captions)
    fills = [attrs["fill"] for tag, attrs in page.tags if tag == "rect"]
    swatches = [str(attrs["style"])[-7:] for _, attrs in page.tags if attrs.get("class") == "swatch"]
    ranks = [color(number).fill for number in range(8)]
    assert (fills, swatches) == (ranks, ranks * 2), "each box as its rank in the mesh and in the legend"


def test_a_timeline_has_each_work_in_its_cycle() -> None:
    made = make_schedule("interleaved", num_runs=4, num_stages=2, num_chunks=2)
    page = Page(made._repr_html_())
    titles = [f"{work.direction} of run {work.run}, chunk {work.chunk}, in cycle" for _, work in made.iterate_works()]
    assert all(page.words.count(title) == 2 for title in titles), "once on each stage"
    assert len([tag for tag, attrs in page.tags if tag == "rect" and attrs["class"] == "box"]) == 32


def test_a_report_has_its_rate_over_time_and_its_fault() -> None:
    samples = [(second / 10, second * 1_000_000) for second in range(11)]
    page = Page(report_page(Report("gather", path="model", seconds=1.0), samples))
    assert "1.0 s from left to right, at most 10.0 MB/s" in page.words
    assert len([tag for tag, _ in page.tags if tag == "rect"]) == 64
    fault = CorruptError("up: <b>bad</b>", got="1", want="2", next_step="look")
    page = Page(report_page(Report("gather", status="failed", exit_code=4, fault=fault)))
    assert "CorruptErrorup: <b>bad</b>" in page.words
