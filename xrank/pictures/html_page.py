"""The picture of layouts as one HTML page without scripts, fonts or addresses of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from xrank.dtypes import DTYPES
from xrank.layout import DeviceMesh, LayoutMap
from xrank.pictures.page import colour, page, page_text
from xrank.pictures.regions import cut_dims, region_of
from xrank.pictures.text_picture import group_alike, misfit_words, share_words
from xrank.plan.holdings import Holdings, Share, Survey, sum_held_nbytes
from xrank.plan.survey import survey
from xrank.words import amount_text, ranks_text

__all__ = ["layout_html", "survey_html"]

_MAX_RANKS = 4096
"""Ranks drawn of a mesh, and bars of bytes."""


def layout_html(
    layouts: LayoutMap,
    shapes: Mapping[str, Sequence[int]],
    *,
    dtypes: Mapping[str, str] | None = None,
    max_parts: int = 64,
) -> str:
    """Return a page with the mesh, the rules, a picture of each tensor and the bytes per rank.

    Args:
        layouts: cut of each tensor, with a mesh.
        shapes: global shape by name.
        dtypes: safetensors name of the element type by name; without it, sizes are in elements.
        max_parts: number of parts of one tensor that are drawn and listed.
    """
    return survey_html(survey(layouts, shapes, dtypes=dtypes), max_parts=max_parts)


def survey_html(found: Survey, *, max_parts: int = 64) -> str:
    """Return the page of a survey; see `layout_html`."""
    body = ["<h1>Layouts</h1>"]
    for name, mesh in found.meshes.items():
        body += [f"<h2>{page_text(name)} <code>{page_text(mesh.grid)}</code></h2>", *_mesh_table(mesh)]
    if found.rules:
        rows = (f'<tr><td class="code">{page_text(k)}<td class="code">{page_text(v)}' for k, v in found.rules.items())
        body += ["<h2>Rules</h2><table><tr><th>tensor or pattern<th>layout", *rows, "</table>"]
    for title, names in (
        ("Tensors that no rule decides for", found.unmatched),
        ("Rules that decide for no tensor", found.unused),
    ):
        if names:
            body += [f'<h2 class="bad">{title}</h2><ul>', *(f"<li><code>{page_text(n)}</code>" for n in names), "</ul>"]
    for group in group_alike(found.tensors):
        body += _tensor(group, max_parts)
    body += _bars(found)
    return page("Layouts", body)


def _mesh_table(mesh: DeviceMesh) -> Iterator[str]:
    """Yield a row for each place along all axes but the last, and a column for each place along the last."""
    *outer, across = mesh.axis_names
    length = mesh.shape[-1]
    if mesh.size > _MAX_RANKS or length > 64:
        yield f"<p>{page_text(ranks_text(mesh.ranks, compact=True))}</p>"
        return
    heads = "".join(f"<th>{page_text(across)}={i}" for i in range(length))
    yield f'<table class="mesh"><tr><th>{heads}'
    for row in range(mesh.size // length):
        ranks = mesh.ranks[row * length : (row + 1) * length]
        place = mesh.coordinate(ranks[0])
        name = " ".join(f"{axis}={place[axis]}" for axis in outer)
        yield f"<tr><th>{page_text(name)}" + "".join(f"<td>{rank}" for rank in ranks)
    yield "</table>"


def _tensor(group: Sequence[Holdings], max_parts: int) -> Iterator[str]:
    one = group[0]
    yield f"<h2><code>{page_text(one.name)}</code></h2>"
    yield f"<p>{page_text(one.dtype or '')} {list(one.shape)} <code>{page_text(one.text or '')}</code>"
    if one.rule is not None and one.rule != one.name:
        yield f'<span class="note">by the rule <code>{page_text(one.rule)}</code></span>'
    yield "</p>"
    if len(group) > 1:
        names = "".join(f"<li><code>{page_text(other.name)}</code>" for other in group[1:])
        yield f"<details><summary>{len(group) - 1:,} more alike</summary><ul>{names}</ul></details>"
    if one.problem is not None:
        yield f'<p class="bad">{page_text(one.problem.message)}</p>'
    if one.misfit is not None:
        yield f'<p class="bad">{page_text(misfit_words(one))}</p>'
    if one.sums:
        yield f"<p>addends: the values are sums over {page_text(', '.join(one.sums))}</p>"
    if not one.shares:
        return
    shown = one.shares[:max_parts]
    yield from _drawing(one, shown)
    yield "<table><tr><th><th>ranks<th>part<th>local shape<th>size"
    width, is_known = (DTYPES[one.dtype].nbytes, True) if one.dtype in DTYPES else (1, False)
    for number, share in enumerate(shown):
        amount = amount_text((share.num_elements + share.num_pads) * width, is_known)
        pads = f", of it padding {amount_text(share.num_pads * width, is_known)}" if share.num_pads else ""
        yield (
            f'<tr><td style="background:{colour(number)}"><td>{page_text(ranks_text(share.ranks, compact=True))}'
            f"<td>{page_text(share_words(one, share))}<td>{'' if share.shape is None else list(share.shape)}"
            f"<td>{amount}{pads}"
        )
    yield "</table>"
    if len(one.shares) > max_parts:
        yield f'<p class="note">{len(one.shares) - max_parts:,} more parts are not shown</p>'
    if one.absent:
        yield f"<p>{page_text(ranks_text(one.absent, compact=True))}: without it</p>"


def _drawing(one: Holdings, shares: Sequence[Share], max_boxes: int = 2048) -> Iterator[str]:
    """Draw the parts over at most two of the cut dims, or over all elements in a row if rows are cut."""
    cut = cut_dims((region_of(nest, one.shape) for share in shares for nest in share.nests), one.shape)
    drawn = None if cut is None else (cut or list(range(len(one.shape))))[:2]
    lengths = [math.prod(one.shape)] if not drawn else [one.shape[d] for d in drawn]
    # One cut dim runs downwards if it is the rows, else to the right.
    down_only = drawn is not None and len(lengths) == 1 and drawn[0] == 0 and len(one.shape) > 1
    width, height = (160, 160) if down_only else (480, 32) if len(lengths) == 1 else (480, 240)
    boxes: list[str] = []
    for number, share in enumerate(shares):
        title = (
            f"<title>{page_text(ranks_text(share.ranks, compact=True))}: {page_text(share_words(one, share))}</title>"
        )
        for nest in share.nests:
            region = region_of(nest, one.shape)
            runs = (
                [((region.first, region.last),)]
                if not drawn or region.dims is None
                else [region.dims[d] for d in drawn]
            )
            downs, acrosses = (runs[0], ((0, 0),)) if down_only else (((0, 0),), runs[0])
            if len(runs) == 2:
                downs, acrosses = runs[0], runs[1]
            tall = lengths[0] if down_only or len(lengths) == 2 else 1
            wide = lengths[-1] if not down_only else 1
            for top, bottom in downs:
                for left, right in acrosses:
                    # A finely strided layout has more boxes than a page can show.
                    if len(boxes) >= max_boxes:
                        break
                    boxes.append(
                        f'<rect x="{left * width / wide:.2f}" y="{top * height / tall:.2f}" '
                        f'width="{(right + 1 - left) * width / wide:.2f}" '
                        f'height="{(bottom + 1 - top) * height / tall:.2f}" '
                        f'fill="{colour(number)}" fill-opacity="0.8" stroke="#fff" stroke-width="0.5">{title}</rect>'
                    )
    yield f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">'
    yield from boxes
    yield "</svg>"
    if not drawn:
        yield '<p class="note">drawn: all elements, row by row</p>'
    elif len(one.shape) > 1:
        axes = [f"dim {d}" for d in drawn]
        words = " downwards, ".join(axes) + (" downwards" if down_only else " to the right")
        hidden = f"; also cut: dims {', '.join(map(str, cut[2:]))}" if cut and len(cut) > 2 else ""
        yield f'<p class="note">drawn: {words}{hidden}</p>'


def _bars(found: Survey) -> Iterator[str]:
    has_width = all(one.dtype in DTYPES for one in found.tensors if one.shares)
    held = sum_held_nbytes(found.tensors, lambda dtype: DTYPES[dtype].nbytes if has_width and dtype else 1)
    if not held:
        return
    most = max(held.values()) or 1
    yield "<h2>Each rank holds</h2><table>"
    for rank, amount in list(held.items())[:_MAX_RANKS]:
        bar = f'<div class="bar" style="width:{amount * 240 / most:.0f}px"></div>'
        yield f"<tr><td>{rank}<td>{amount_text(amount, has_width)}<td>{bar}"
    yield "</table>"
