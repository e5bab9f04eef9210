"""The picture of layouts as one HTML page: a summary, then each tensor's parts as a drawing beside a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from xrank.dtypes import DTYPES
from xrank.layout import DeviceMesh, LayoutMap
from xrank.pictures.drawing import draw_tensor
from xrank.pictures.page import page, page_text
from xrank.pictures.stylesheet import swatch
from xrank.pictures.summary import cut_words, draw_summary, pattern_of
from xrank.pictures.text_picture import group_alike, misfit_words, share_words
from xrank.plan.holdings import Holdings, Survey
from xrank.plan.survey import survey
from xrank.words import amount_text, plural, ranks_text

_MAX_RANKS = 4096
"""Ranks drawn of a mesh."""
_MAX_LISTED = 12
"""Tensors up to which a page has no list of them."""


def layout_html(
    layouts: LayoutMap,
    shapes: Mapping[str, Sequence[int]],
    *,
    dtypes: Mapping[str, str] | None = None,
    max_parts: int = 64,
) -> str:
    """Return a page with a summary, the mesh, the rules, and a picture of each tensor.

    Args:
        layouts: cut of each tensor, with a mesh.
        shapes: global shape by name.
        dtypes: safetensors name of the element type by name; without it, sizes are in elements.
        max_parts: number of parts of one tensor that are listed.
    """
    return survey_html(survey(layouts, shapes, dtypes=dtypes), max_parts=max_parts)


def survey_html(found: Survey, *, max_parts: int = 64) -> str:
    """Return the page of a survey; see `layout_html`."""
    body = ["<h1>Layouts</h1>", *draw_survey(found, max_parts=max_parts, is_searchable=True)]
    return page("Layouts", body, is_searchable=True)


def draw_survey(found: Survey, *, max_parts: int = 64, is_searchable: bool = False) -> Iterator[str]:
    """Yield the HTML of a survey."""
    groups = group_alike(found.tensors)
    is_model = len(found.tensors) > 1
    if is_model:
        yield from draw_summary(found, groups)
    for name, mesh in found.meshes.items():
        yield f"<h2>{page_text(name.capitalize())} <code>{page_text(mesh.grid)}</code></h2>"
        yield from _draw_mesh(mesh)
    if found.rules and is_model:
        rows = (f'<tr><td class="code">{page_text(k)}<td class="code">{page_text(v)}' for k, v in found.rules.items())
        yield f"<details{'' if len(found.rules) > _MAX_LISTED else ' open'}><summary>{plural(len(found.rules), 'rule')}"
        yield '</summary><div class="wide"><table><tr><th>tensor or pattern<th>layout'
        yield from rows
        yield "</table></div></details>"
    for title, names in (
        ("Tensors that no rule decides for", found.unmatched),
        ("Rules that decide for no tensor", found.unused),
    ):
        if names:
            yield f'<h2 class="bad">{title}</h2><ul>'
            yield from (f"<li><code>{page_text(n)}</code>" for n in names)
            yield "</ul>"
    if is_model:
        yield "<h2>Tensors</h2>"
    if is_searchable:
        yield '<p class="search" hidden><input id="search" type="search" placeholder="part of a name, a cut, bf16 ..."'
        yield ' aria-label="Search tensors"> <span id="found" class="note"></span></p>'
    if len(groups) > _MAX_LISTED:
        yield from _draw_list(groups)
    for number, group in enumerate(groups):
        yield from _draw_group(number, group, max_parts)


def _draw_mesh(mesh: DeviceMesh) -> Iterator[str]:
    """Yield a row for each place along all axes but the last, and a column for each place along the last."""
    *outer, across = mesh.axis_names
    length = mesh.shape[-1]
    if mesh.size > _MAX_RANKS or length > 64:
        yield f"<p>{page_text(ranks_text(mesh.ranks, compact=True))}</p>"
        return
    heads = "".join(f"<th>{page_text(across)}={i}" for i in range(length))
    yield f'<div class="wide"><table class="mesh"><tr><th>{heads}'
    for row in range(mesh.size // length):
        ranks = mesh.ranks[row * length : (row + 1) * length]
        place = mesh.coordinate(ranks[0])
        name = " ".join(f"{axis}={place[axis]}" for axis in outer)
        yield f"<tr><th>{page_text(name) or 'rank'}" + "".join(f"<td>{rank}" for rank in ranks)
    yield "</table></div>"


def _draw_list(groups: Sequence[Sequence[Holdings]]) -> Iterator[str]:
    yield '<div class="wide"><table><tr><th>tensors<th class="number">number<th>type<th>shape<th>cut'
    for number, group in enumerate(groups):
        one = group[0]
        yield (
            f'<tr {_search_marks(number, group)}><td class="code"><a href="#t{number}">{page_text(pattern_of(group))}'
            f'</a><td class="number">{len(group):,}<td>{page_text(one.dtype or "")}<td>{list(one.shape)}'
            f"<td>{page_text(cut_words(one))}"
        )
    yield "</table></div>"


def _search_marks(number: int, group: Sequence[Holdings]) -> str:
    one = group[0]
    words = (*(each.name for each in group), one.dtype or "", one.text or "", cut_words(one))
    return f'data-group="{number}" data-names="{page_text(" ".join(words))}"'


def _draw_group(number: int, group: Sequence[Holdings], max_parts: int) -> Iterator[str]:
    one = group[0]
    yield f'<section class="tensor" id="t{number}" {_search_marks(number, group)}>'
    yield f"<h3><code>{page_text(pattern_of(group))}</code></h3>"
    facts = (page_text(one.dtype or ""), str(list(one.shape)), f"<code>{page_text(one.text or '')}</code>")
    yield f"<div>{' '.join(filter(None, facts))}"
    rule = f", by the rule <code>{page_text(one.rule)}</code>" if one.rule not in {None, one.name} else ""
    yield f' <span class="note">{page_text(cut_words(one))}{rule}</span></div>'
    if len(group) > 1:
        names = "".join(f"<li><code>{page_text(other.name)}</code>" for other in group)
        yield f'<details><summary>{len(group):,} tensors alike</summary><ul class="names">{names}</ul></details>'
    if one.problem is not None:
        yield f'<p class="bad">{page_text(one.problem.message)}</p>'
    if one.misfit is not None:
        yield f'<p class="bad">{page_text(misfit_words(one))}</p>'
    if one.sums:
        yield f"<p>addends: the values are sums over {page_text(', '.join(one.sums))}</p>"
    if one.shares:
        yield '<div class="side"><div class="pictures">'
        yield from draw_tensor(one)
        yield '</div><div class="fill wide">'
        yield from _draw_parts(one, max_parts)
        yield "</div></div>"
    yield "</section>"


def _draw_parts(one: Holdings, max_parts: int) -> Iterator[str]:
    shown = one.shares[:max_parts]
    width, is_known = (DTYPES[one.dtype].nbytes, True) if one.dtype in DTYPES else (1, False)
    has_shapes = any(share.shape is not None for share in shown)
    yield f"<table><tr><th>ranks<th>part{'<th>local shape' if has_shapes else ''}<th>size"
    for number, share in enumerate(shown):
        amount = amount_text((share.num_elements + share.num_pads) * width, is_known)
        pads = f", of it padding {amount_text(share.num_pads * width, is_known)}" if share.num_pads else ""
        shape = f'<td class="key">{list(share.shape or ())}' if has_shapes else ""
        yield (
            f"<tr><td>{swatch(number, page_text(ranks_text(share.ranks, compact=True)))}"
            f"<td>{page_text(share_words(one, share))}{shape}"
            f'<td class="key">{amount}{pads}'
        )
    yield "</table>"
    if len(one.shares) > max_parts:
        yield f'<p class="note">{len(one.shares) - max_parts:,} more parts are not listed</p>'
    if one.absent:
        yield f'<p class="note">{page_text(ranks_text(one.absent, compact=True))}: without it</p>'
