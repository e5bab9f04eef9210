"""Layouts as text: the regions of a tensor and the ranks that hold them, drawn with box characters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice

from msgspec import Struct

from xrank.dtypes import DTYPES
from xrank.engine.holdings import Holdings, Share, Survey, sum_held_nbytes, survey
from xrank.errors import LayoutError
from xrank.layout import LayoutMap
from xrank.layout.coverage import range_text
from xrank.layout.local_part import bind, global_size
from xrank.layout.nests import Nest, size
from xrank.layout.notation import Node, Pad, Parts, Product, Split, count_names_of, render_dim
from xrank.layout.tensor_layout import axis_lengths
from xrank.words import amount_text, clip, first_lines, one_line, ranks_text, runs_text

_MAX_RUNS = 4096
_MAX_BANDS = 48
_MAX_WORDS = 6


class Region(Struct, frozen=True):
    """The part of a tensor that a nest covers."""

    first: int
    """Lowest row-major address."""
    last: int
    num_elements: int
    dims: tuple[tuple[tuple[int, int], ...], ...] | None
    """For each dim the runs of indices, both ends included; the region is all their combinations. None if no such runs
    exist, as for a range of elements that begins or ends within a row."""


class Band(Struct, frozen=True):
    """The indices of a dim that a fused part covers, both ends included."""

    name: str
    first: int
    last: int


@lru_cache(maxsize=16_384)
def region_of(nest: Nest, shape: tuple[int, ...]) -> Region:
    """Return the region that the y side of a nest covers in a tensor of that global shape."""
    last = nest.y + sum((n - 1) * stride for n, _, stride in nest.loops)
    return Region(nest.y, last, size(nest), _dims_of(nest, shape))


def _dims_of(nest: Nest, shape: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    starts, remaining = [], nest.y
    for stride in strides:
        place, remaining = divmod(remaining, stride)
        starts.append(place)
    steps: list[list[tuple[int, int]]] = [[] for _ in shape]
    reach = list(starts)
    # From the innermost loop out, each loop is a number of steps along the dim whose stride divides its own.
    for n, _, y_stride in sorted(nest.loops, key=lambda loop: loop[2]):
        count, stride = n, y_stride
        while count > 1:
            d = next((d for d, each in enumerate(strides) if each <= stride and shape[d] > 1), None)
            if d is None or stride % strides[d]:
                return None
            step = stride // strides[d]
            if reach[d] + (count - 1) * step < shape[d]:
                steps[d].append((count, step))
                reach[d] += (count - 1) * step
                break
            # A loop that runs past a dim's end continues in the dim before, if it takes all of this dim each time.
            if shape[d] % step or reach[d] >= step or count % (shape[d] // step) or d == 0:
                return None
            steps[d].append((shape[d] // step, step))
            reach[d] += shape[d] - step
            count, stride = count // (shape[d] // step), strides[d] * shape[d]
    found = []
    for start, own in zip(starts, steps, strict=True):
        runs = _runs(start, own)
        if runs is None:
            return None
        found.append(runs)
    return tuple(found)


def _runs(start: int, steps: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...] | None:
    """Return the runs of start + all combinations of (count, step); None if they are too many."""
    runs = [(start, start)]
    for count, step in sorted(steps, key=lambda each: each[1]):
        # Steps as long as the run so far extend it without a gap.
        if len(runs) == 1 and step == runs[0][1] - runs[0][0] + 1:
            runs = [(runs[0][0], runs[0][1] + (count - 1) * step)]
            continue
        if len(runs) * count > _MAX_RUNS:
            return None
        runs = [(a + i * step, b + i * step) for i in range(count) for a, b in runs]
    joined: list[tuple[int, int]] = []
    for a, b in sorted(runs):
        if joined and a == joined[-1][1] + 1:
            joined[-1] = joined[-1][0], b
        else:
            joined.append((a, b))
    return tuple(joined)


def region_words(region: Region, shape: tuple[int, ...]) -> str:
    """Return a region in words, both ends included: ``rows 0-3``, ``columns 4-7``, ``[:, 0-1, :, 4-7]``."""
    if region.num_elements == math.prod(shape):
        return "the whole tensor"
    if region.dims is None:
        if region.last - region.first + 1 == region.num_elements:
            return range_text(shape, region.first, region.last)
        return f"{region.num_elements:,} of the {range_text(shape, region.first, region.last)}"
    cut = [d for d, runs in enumerate(region.dims) if runs != ((0, shape[d] - 1),)]
    if len(shape) > 2 and cut != [0]:
        words = (":" if d not in cut else runs_text(runs, compact=True) for d, runs in enumerate(region.dims))
        return "[" + ", ".join(words) + "]"
    names = ("element",) if len(shape) == 1 else ("row", "column")
    ends = {d: "" if len(runs) == 1 and runs[0][0] == runs[0][1] else "s" for d, runs in enumerate(region.dims)}
    return ", ".join(f"{names[d]}{ends[d]} {runs_text(region.dims[d], compact=True)}" for d in cut)


def cut_dims(regions: Iterable[Region], shape: tuple[int, ...]) -> list[int] | None:
    """Return the dims that some region covers in part; None if a region is not a combination of dims."""
    cut: dict[int, None] = {}
    for region in regions:
        if region.dims is None:
            return None
        for d, runs in enumerate(region.dims):
            if runs != ((0, shape[d] - 1),):
                cut[d] = None
    return sorted(cut)


def strip(runs: Sequence[tuple[int, int]], length: int, width: int) -> str:
    """Return a dim as a strip of at most `width` cells, ``##..``: a dark cell contains an index of a run."""
    width = min(width, length)
    cells = ["."] * width
    for a, b in runs:
        low, high = a * width // length, b * width // length
        cells[low : high + 1] = "#" * (high + 1 - low)
    return "".join(cells)


def part_names(holdings: Holdings, region: Region) -> str:
    """Return the fused parts that a region touches, ``q`` or ``gate, up``; empty if its dims have no parts."""
    dims, bound = _bind_dims(holdings)
    words = []
    for dim, runs in zip(dims, region.dims or (), strict=False):
        if "<" in render_dim(dim):
            names = dict.fromkeys(name for a, b in runs for name in _find_touched(dim, a, b, bound))
            words.append(", ".join(names))
    return "; ".join(word for word in words if word)


def _bind_dims(holdings: Holdings) -> tuple[Sequence[Node], Mapping[str, int]]:
    """Return the dims of a tensor's layout and the sizes in them; no dims if they are not known."""
    layout, mesh = holdings.layout, holdings.mesh
    if layout is None or mesh is None or len(layout.dims) != len(holdings.shape):
        return (), {}
    lengths = axis_lengths(mesh, layout.view_mesh)
    counted = {name: lengths[name] for dim in layout.dims for name in count_names_of(dim) if name in lengths}
    try:
        return layout.dims, bind(layout.tree, holdings.shape, counted, holdings.sizes)
    except LayoutError:
        return (), {}


def _find_touched(node: Node, first: int, last: int, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the names of the parts that contain any of the global indices first..last of a dim."""
    match node:
        case Split(of) | Pad(of):
            yield from _find_touched(of, first, last, sizes)
        case Parts(parts):
            start = 0
            for part in parts:
                end = start + global_size(part.of, sizes)
                if first < end and last >= start and end > start:
                    low, high = max(first, start) - start, min(last, end - 1) - start
                    within = list(_find_touched(part.of, low, high, sizes))
                    own = (part.name,) if part.name else ()
                    yield from (".".join((*own, name)) for name in within) if within else own
                start = end
        # Factors are digits of the index, the last one fastest: a range over a digit's end touches all of it.
        case Product(factors):
            inner = 1
            for factor in reversed(factors):
                length = global_size(factor, sizes)
                low, high = first // inner, last // inner
                if low // length != high // length:
                    low, high = 0, length - 1
                yield from _find_touched(factor, low % length, high % length, sizes)
                inner *= length


def find_bands(holdings: Holdings, dim: int) -> list[Band]:
    """Return the named parts of a dim by rising index; empty if it has none, or too many to be drawn."""
    dims, bound = _bind_dims(holdings)
    if not dims or "<" not in render_dim(dims[dim]):
        return []
    bands = list(islice(_walk_bands(dims[dim], bound), _MAX_BANDS + 1))
    return bands if len(bands) <= _MAX_BANDS else []


def _walk_bands(node: Node, sizes: Mapping[str, int]) -> Iterator[Band]:
    match node:
        case Split(of) | Pad(of):
            yield from _walk_bands(of, sizes)
        case Parts(parts):
            start = 0
            for part in parts:
                length = global_size(part.of, sizes)
                within = list(islice(_walk_bands(part.of, sizes), _MAX_BANDS + 1))
                if part.name and length and not within:
                    yield Band(part.name, start, start + length - 1)
                for band in within:
                    name = f"{part.name}.{band.name}" if part.name else band.name
                    yield Band(name, start + band.first, start + band.last)
                start += length
        # Factors are digits of the index, the last one fastest: parts of one digit repeat for each value of those
        # before it, and each of their indices is as many as the digits after it count.
        case Product(factors):
            lengths = [global_size(factor, sizes) for factor in factors]
            for i, factor in enumerate(factors):
                within = list(islice(_walk_bands(factor, sizes), _MAX_BANDS + 1))
                inner = math.prod(lengths[i + 1 :])
                for outer in range(math.prod(lengths[:i]) if within else 0):
                    for band in within:
                        start = (outer * lengths[i] + band.first) * inner
                        yield Band(band.name, start, (outer * lengths[i] + band.last + 1) * inner - 1)


_STRIP = 16
"""Maximum number of cells of a strip."""


def layout_text(
    layouts: LayoutMap,
    shapes: Mapping[str, Sequence[int]],
    *,
    dtypes: Mapping[str, str] | None = None,
    width: int = 100,
    max_parts: int = 16,
) -> str:
    """Return the part of each tensor on each rank, as text for a terminal; ranges include both ends.

    Args:
        layouts: cut of each tensor, with a mesh.
        shapes: global shape by name.
        dtypes: safetensors name of the element type by name; without it, sizes are in elements.
        width: maximum number of characters of a line.
        max_parts: maximum number of lines for one tensor's parts; of more parts, the first and the last are shown.

    Example:
        >>> from xrank.layout import DeviceMesh, LayoutMap
        >>> from xrank.pictures import layout_text
        >>> layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
        >>> layouts["w"] = "[d/tp, k]"
        >>> "rank 0" in layout_text(layouts, {"w": (4, 2)})
        True
    """
    return survey_text(survey(layouts, shapes, dtypes=dtypes), width=width, max_parts=max_parts)


def survey_text(found: Survey, *, width: int = 100, max_parts: int = 16) -> str:
    """Return the picture of a survey; see `layout_text`."""
    lines = [f"{name:<6} {mesh.grid}: {ranks_text(mesh.ranks, compact=True)}" for name, mesh in found.meshes.items()]
    for group in group_alike(found.tensors):
        lines += ["", *_tensor_lines(group, max_parts)]
    lines += _amount_lines(found)
    lists = (("no rule for", found.unmatched), ("rules that match no tensor", found.unused))
    for title, names in lists:
        if names:
            lines += ["", title, *(f"  {line}" for line in first_lines([*map(one_line, names)], max_parts))]
    return "\n".join(clip(line, width) for line in lines).lstrip("\n") + "\n"


def group_alike(tensors: Iterable[Holdings]) -> list[list[Holdings]]:
    """Return groups of tensors with equal pictures, such as the layers of a model, in the order of their first."""
    groups: dict[object, list[Holdings]] = {}
    for one in tensors:
        known = (one.shape, one.dtype, one.text, one.shares, one.absent, one.misfit, one.lost)
        # A tensor with a problem is its own group: the problem's text contains the name.
        key = one.name if one.problem is not None else known
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _tensor_lines(group: Sequence[Holdings], max_parts: int) -> list[str]:
    one = group[0]
    dtype = "" if one.dtype is None else f" {one.dtype}"
    lines = [one_line(f"{one.name} {dtype.strip()}".strip() + f" {list(one.shape)}  {one.text or ''}").rstrip()]
    if len(group) > 1:
        last = f"{', ' if len(group) == 3 else ' .. '}{one_line(group[-1].name)}" if len(group) > 2 else ""
        lines.append(f"  and {len(group) - 1:,} more alike: {one_line(group[1].name)}{last}")
    if one.problem is not None:
        return [*lines, f"  ! {one_line(one.problem.message)}"]
    if one.rule is None and not one.shares:
        return [*lines, "  ! no rule for it"]
    if one.sums:
        lines.append(f"  partial sums: the values are the sums over {', '.join(one.sums)}")
    rows = _rows(one, max_parts)
    widths = [max((len(row[i]) for row in rows if len(row) > 1), default=0) for i in range(3)]
    for row in rows:
        if len(row) == 1:
            lines.append(f"  {row[0]}")
            continue
        cells = [f"{cell:<{size}}" for cell, size in zip(row, widths, strict=False) if size]
        lines.append(("  " + "  ".join((*cells, row[3]))).rstrip())
    if one.absent:
        lines.append(f"  {ranks_text(one.absent, compact=True)}: without it")
    if one.misfit is not None:
        lines.append(f"  ! {misfit_words(one)}")
    return lines


def _rows(one: Holdings, most: int) -> list[tuple[str, ...]]:
    """Return the cells of each share's line; with many shares, the first, the last, and one cell for the rest."""
    if len(one.shares) <= most:
        return [_share_row(one, share) for share in one.shares]
    *between, last = one.shares[max(most - 2, 1) :]
    ranks = sorted(rank for share in between for rank in share.ranks)
    head = [_share_row(one, share) for share in one.shares[: max(most - 2, 1)]]
    return [*head, (f".. {len(between):,} more parts on {ranks_text(ranks, compact=True)}",), _share_row(one, last)]


def _share_row(one: Holdings, share: Share) -> tuple[str, ...]:
    shape = "" if share.shape is None else f"local {list(share.shape)}, "
    is_known = one.dtype in DTYPES
    nbytes = DTYPES[one.dtype].nbytes if one.dtype in DTYPES else 1
    amount = amount_text((share.num_elements + share.num_pads) * nbytes, is_known)
    pads = f", {share.num_pads:,} of them padding" if share.num_pads and not is_known else ""
    pads = f", {amount_text(share.num_pads * nbytes)} of it padding" if share.num_pads and is_known else pads
    return ranks_text(share.ranks, compact=True), _strips(one, share), share_words(one, share), f"{shape}{amount}{pads}"


def share_words(one: Holdings, share: Share) -> str:
    """Return the content of a share in words: by fused parts if the tensor has some."""
    if not share.nests:
        return "nothing"
    words: list[str] = []
    for nest in sorted(share.nests, key=lambda nest: nest.y):
        region = region_of(nest, one.shape)
        name = part_names(one, region)
        words.append(one_line(f"{name}: " if name else "") + region_words(region, one.shape))
    if len(words) > _MAX_WORDS:
        words = [*words[: _MAX_WORDS - 1], f".. {len(words) - _MAX_WORDS + 1} more"]
    return "; ".join(words)


def misfit_words(one: Holdings) -> str:
    """Return the misfit of a tensor's shares in words."""
    misfit = one.misfit
    assert misfit is not None
    name = "HOLE" if misfit.kind == "gap" else misfit.kind.upper()
    ending = ", in different cuts" if misfit.kind == "overlap" else ""
    return f"{name}: {misfit.where}: on {ranks_text(misfit.ranks, compact=True)}{ending}"


def _strips(one: Holdings, share: Share) -> str:
    """Return a strip for each cut dim, ``##.. .#``; one strip of all elements if rows are cut."""
    regions = [region_of(nest, one.shape) for nest in share.nests]
    # A dim counts as cut if any share cuts it; the first 64 shares are enough to show it.
    everything = [region_of(nest, one.shape) for other in one.shares[:64] for nest in other.nests]
    cut = cut_dims(everything, one.shape)
    if cut is None:
        return strip([(region.first, region.last) for region in regions], math.prod(one.shape), _STRIP)
    known = [region.dims for region in regions if region.dims]
    return " ".join(strip([run for dims in known for run in dims[d]], one.shape[d], _STRIP) for d in cut)


def _amount_lines(found: Survey) -> list[str]:
    if not any(one.shares for one in found.tensors):
        return []
    has_width = all(one.dtype in DTYPES for one in found.tensors if one.shares)
    held = sum_held_nbytes(found.tensors, lambda dtype: DTYPES[dtype].nbytes if has_width and dtype else 1)
    by_amount: dict[int, list[int]] = {}
    for rank, amount in held.items():
        by_amount.setdefault(amount, []).append(rank)
    rows = [(ranks_text(ranks, compact=True), amount_text(amount, has_width)) for amount, ranks in by_amount.items()]
    if len(rows) > 8:
        low, high = min(by_amount), max(by_amount)
        rows = [
            (f"least, {ranks_text(by_amount[low], compact=True)}", amount_text(low, has_width)),
            (f"most, {ranks_text(by_amount[high], compact=True)}", amount_text(high, has_width)),
        ]
    size = max(len(row[0]) for row in rows)
    return ["", "each rank holds", *(f"  {ranks:<{size}}  {amount}" for ranks, amount in rows)]
