"""Regions against enumeration: words and boxes show the elements that the nest covers."""

from __future__ import annotations

import random
from itertools import product

import numpy as np

from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.nests import addresses
from xrank.pictures import layout_html, layout_text
from xrank.pictures.text_picture import region_of
from xrank.plan.holdings import survey

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
