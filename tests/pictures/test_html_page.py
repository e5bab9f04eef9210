"""Pictures as pages: well-formed, nothing from elsewhere, hostile names harmless, large layouts small."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser

from xrank.layout import DeviceMesh, LayoutMap
from xrank.pictures import layout_html
from xrank.pictures.page import SEARCH_SCRIPT, SEARCH_SCRIPT_HASH

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
    for text in ("dp=2 tp=2", "[f/tp/~dp, h]", "q: rows 0-3", "unused.*", "Tensors that no rule decides for", "odd"):
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
