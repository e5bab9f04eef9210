"""The drawing of one tensor: a box for each part, with its ranks, over up to three cut dims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product

from xrank.layout.nests import Nest
from xrank.pictures.page import page_text
from xrank.pictures.regions import Band, Region, cut_dims, find_bands, region_of
from xrank.pictures.stylesheet import colour
from xrank.pictures.text_picture import share_words
from xrank.plan.holdings import Holdings, Share
from xrank.words import ranks_text

_MAX_BOXES = 2048
"""A finely strided layout has more boxes than a page can show."""
_MAX_PANELS = 12
_LABEL_WIDTH, _LABEL_HEIGHT = 6.6, 13
"""Width of a character and height of a line of a label, both generous, in units of the drawing."""
_BAND_WIDTH = 64
_BAND_HEIGHT = 10.5

_Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Box:
    """A rectangle of a part, in the indices of the two drawn dims; both ends included."""

    down: _Run
    across: _Run
    number: int
    """Index of its share, which gives the colour."""
    share: Share


@dataclass(frozen=True, slots=True)
class _Plane:
    """The dims of a drawing; None for a direction without one. Without any dim, all elements are drawn in a row."""

    down: int | None
    across: int | None
    num_down: int
    num_across: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in units of the drawing."""
        if self.across is None:
            return 160, 160
        return (480, 32) if self.down is None else (480, 240)


def draw_tensor(one: Holdings) -> Iterator[str]:
    """Yield the drawings of a tensor's parts: of three cut dims, one drawing for each part of the first."""
    regions = [(number, share, region_of(nest, one.shape)) for number, share, nest in _walk_nests(one)]
    cut = cut_dims((region for *_, region in regions), one.shape)
    if cut is None:
        plane = _Plane(None, None, 1, math.prod(one.shape))
        boxes = [_Box((0, 0), (region.first, region.last), number, share) for number, share, region in regions]
        yield from _draw_panel(one, plane, boxes, "all elements, row by row")
        return
    plane, outer = _choose_plane(cut, one.shape)
    panels = list(islice(product(*(_stretches(regions, d) for d in outer)), _MAX_PANELS + 1))
    for panel in panels[:_MAX_PANELS]:
        inside = [each for each in regions if _meets(each[2], outer, panel)]
        boxes = list(islice(_boxes(plane, inside), _MAX_BOXES))
        words = "; ".join(f"dim {d}: {_run_text(run)}" for d, run in zip(outer, panel, strict=True))
        yield from _draw_panel(one, plane, boxes, "; ".join(filter(None, (words, _direction_words(plane)))))
    if len(panels) > _MAX_PANELS:
        yield f'<p class="note">only the first {_MAX_PANELS} of these drawings</p>'


def _walk_nests(one: Holdings) -> Iterator[tuple[int, Share, Nest]]:
    return islice(
        ((number, share, nest) for number, share in enumerate(one.shares) for nest in share.nests), _MAX_BOXES
    )


def _choose_plane(cut: Sequence[int], shape: Sequence[int]) -> tuple[_Plane, Sequence[int]]:
    """Return the plane of the last two cut dims, and the cut dims before them."""
    drawn = (list(cut) or list(range(len(shape)))[:2])[-2:]
    if len(drawn) == 2:
        return _Plane(drawn[0], drawn[1], shape[drawn[0]], shape[drawn[1]]), cut[:-2]
    if not drawn:
        return _Plane(None, None, 1, 1), ()
    # One cut dim runs downwards if it is the rows, else to the right.
    if drawn[0] == 0 and len(shape) > 1:
        return _Plane(0, None, shape[0], 1), ()
    return _Plane(None, drawn[0], 1, shape[drawn[0]]), ()


def _stretches(regions: Sequence[tuple[int, Share, Region]], dim: int) -> list[_Run]:
    """Return a dim in pieces that no region cuts further."""
    runs = [run for *_, region in regions if region.dims is not None for run in region.dims[dim]]
    bounds = sorted({first for first, _ in runs} | {last + 1 for _, last in runs})
    return [(first, end - 1) for first, end in pairwise(bounds)]


def _meets(region: Region, dims: Sequence[int], panel: Sequence[_Run]) -> bool:
    assert region.dims is not None
    return all(
        any(first <= low and last >= high for first, last in region.dims[d])
        for d, (low, high) in zip(dims, panel, strict=True)
    )


def _boxes(plane: _Plane, regions: Sequence[tuple[int, Share, Region]]) -> Iterator[_Box]:
    for number, share, region in regions:
        assert region.dims is not None
        downs = ((0, 0),) if plane.down is None else region.dims[plane.down]
        acrosses = ((0, 0),) if plane.across is None else region.dims[plane.across]
        for down, across in product(downs, acrosses):
            yield _Box(down, across, number, share)


def _draw_panel(one: Holdings, plane: _Plane, boxes: Sequence[_Box], caption: str) -> Iterator[str]:
    """Yield a figure: names of fused parts above and on the left, and the boxes of which each has its ranks."""
    left_bands = [] if plane.down is None else find_bands(one, plane.down)
    top_bands = [] if plane.across is None else find_bands(one, plane.across)
    left, top = _BAND_WIDTH if left_bands else 0, 16 if top_bands else 0
    width, height = plane.size
    if left_bands:
        # The thinnest part gets room for its name, in a drawing of at most 480.
        thinnest = min(band.last + 1 - band.first for band in left_bands)
        height = min(max(height, math.ceil(_BAND_HEIGHT * plane.num_down / thinnest)), 480)
    yield f"<figure><figcaption>{page_text(caption)}</figcaption>"
    yield f'<svg width="{width + left}" height="{height + top}" viewBox="0 0 {width + left} {height + top}" role="img">'
    yield from _draw_bands(left_bands, plane.num_down, height, top, is_down=True)
    yield from _draw_bands(top_bands, plane.num_across, width, left, is_down=False)
    yield f'<g transform="translate({left},{top})"><path class="ground" d="M0 0h{width}v{height}h-{width}z"/>'
    for box in boxes:
        yield _draw_box(one, box, width / plane.num_across, height / plane.num_down)
    yield "</g></svg></figure>"


def _draw_box(one: Holdings, box: _Box, per_column: float, per_row: float) -> str:
    x, y = box.across[0] * per_column, box.down[0] * per_row
    width = (box.across[1] + 1 - box.across[0]) * per_column
    height = (box.down[1] + 1 - box.down[0]) * per_row
    chosen = colour(box.number)
    ranks = ranks_text(box.share.ranks, compact=True)
    title = f"<title>{page_text(ranks)}: {page_text(share_words(one, box.share))}</title>"
    drawn = (
        f'<rect class="box" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        f'fill="{chosen.fill}">{title}</rect>'
    )
    label = next((text for text in _labels(ranks) if len(text) * _LABEL_WIDTH <= width), None)
    if label is None or height < _LABEL_HEIGHT:
        return drawn
    middle = f'x="{x + width / 2:.2f}" y="{y + height / 2:.2f}"'
    place = f'{middle} text-anchor="middle" dominant-baseline="central" pointer-events="none"'
    return f'{drawn}<text {place} fill="{chosen.ink}">{page_text(label)}</text>'


def _labels(ranks: str) -> Iterator[str]:
    """Yield ``ranks 0-3``, then shorter texts: ``0-3``, ``0-``."""
    yield ranks
    bare = ranks.partition(" ")[2].partition(" (")[0]
    yield bare
    if "," in bare:
        yield bare.partition(",")[0] + ",.."


def _draw_bands(bands: Sequence[Band], length: int, extent: int, offset: int, *, is_down: bool) -> Iterator[str]:
    """Yield a bracket and a name for each fused part, along the left edge or the top one."""
    for band in bands:
        start = offset + band.first * extent / length + 0.75
        end = offset + (band.last + 1) * extent / length - 0.75
        middle = (start + end) / 2
        if is_down:
            place = f'x="{_BAND_WIDTH - 10}" y="{middle:.2f}" text-anchor="end" dominant-baseline="central"'
            edge, fits = f"M{_BAND_WIDTH - 3} {start:.2f}h-4V{end:.2f}h4", end - start >= _BAND_HEIGHT - 2
        else:
            place = f'x="{middle:.2f}" y="9" text-anchor="middle"'
            edge, fits = f"M{start:.2f} 15v-3H{end:.2f}v3", end - start >= len(band.name) * _LABEL_WIDTH
        yield f'<path class="edge" d="{edge}"/>'
        if fits:
            yield f'<text class="label" {place}>{page_text(band.name[:8])}</text>'


def _direction_words(plane: _Plane) -> str:
    words = [] if plane.down is None else [f"dim {plane.down} downwards"]
    if plane.across is not None:
        words.append(f"dim {plane.across} to the right")
    return ", ".join(words)


def _run_text(run: _Run) -> str:
    return str(run[0]) if run[0] == run[1] else f"{run[0]}-{run[1]}"
