"""The picture of layouts for a terminal: the part of each tensor on each rank, line by line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from xrank.dtypes import DTYPES
from xrank.layout import LayoutMap
from xrank.pictures.regions import cut_dims, part_names, region_of, region_words, strip
from xrank.plan.holdings import Holdings, Share, Survey, sum_held_nbytes
from xrank.plan.survey import survey
from xrank.words import amount_text, clip, first_lines, one_line, ranks_text

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
    for title, names in (
        ("no rule decides for", found.unmatched),
        ("rules that decide for no tensor", found.unused),
    ):
        if names:
            lines += ["", title, *(f"  {line}" for line in first_lines([*map(one_line, names)], max_parts))]
    return "\n".join(clip(line, width) for line in lines).lstrip("\n") + "\n"


def group_alike(tensors: Iterable[Holdings]) -> list[list[Holdings]]:
    """Return groups of tensors with equal pictures, such as the layers of a model, in the order of their first."""
    groups: dict[object, list[Holdings]] = {}
    for one in tensors:
        known = (one.shape, one.dtype, one.text, one.shares, one.absent, one.misfit)
        # A tensor with a problem is its own group: the problem's text contains the name.
        key = one.name if one.problem is not None else known
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _tensor_lines(group: Sequence[Holdings], max_parts: int) -> list[str]:
    one = group[0]
    dtype = "" if one.dtype is None else f" {one.dtype}"
    lines = [one_line(f"{one.name} {dtype.strip()}".strip() + f" {list(one.shape)}  {one.text or ''}").rstrip()]
    if len(group) > 1:
        lines.append(f"  and {len(group) - 1:,} more alike: {one_line(group[1].name)}" + _last_of(group))
    if one.problem is not None:
        return [*lines, f"  ! {one_line(one.problem.message)}"]
    if one.rule is None and not one.shares:
        return [*lines, "  ! no rule decides for it"]
    if one.sums:
        lines.append(f"  addends: the values are sums over {', '.join(one.sums)}")
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


def _last_of(group: Sequence[Holdings]) -> str:
    if len(group) < 3:
        return ""
    return f"{', ' if len(group) == 3 else ' .. '}{one_line(group[-1].name)}"


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


def share_words(one: Holdings, share: Share, most: int = 6) -> str:
    """Return the content of a share in words: by fused parts if the tensor has some."""
    if not share.nests:
        return "nothing"
    words: list[str] = []
    for nest in sorted(share.nests, key=lambda nest: nest.y):
        region = region_of(nest, one.shape)
        name = part_names(one, region)
        words.append(one_line(f"{name}: " if name else "") + region_words(region, one.shape))
    if len(words) > most:
        words = [*words[: most - 1], f".. {len(words) - most + 1} more"]
    return "; ".join(words)


def misfit_words(one: Holdings) -> str:
    """Return the misfit of a tensor's shares in words."""
    misfit = one.misfit
    assert misfit is not None
    if misfit.kind == "gap":
        return f"HOLE: {misfit.where}: on no rank"
    if misfit.kind == "overlap":
        return f"OVERLAP: {misfit.where}: on {ranks_text(misfit.ranks, compact=True)}, in different cuts"
    return f"OUTSIDE: {misfit.where}: on {ranks_text(misfit.ranks, compact=True)}"


def _strips(one: Holdings, share: Share) -> str:
    """Return a strip for each cut dim, ``##.. .#``; one strip of all elements if rows are cut."""
    regions = [region_of(nest, one.shape) for nest in share.nests]
    # A dim counts as cut if any share cuts it; the first 64 shares are enough to show it.
    everything = [region_of(nest, one.shape) for other in one.shares[:64] for nest in other.nests]
    cut = cut_dims(everything, one.shape)
    if cut is None:
        return strip([(region.first, region.last) for region in regions], math.prod(one.shape), _STRIP)
    return " ".join(
        strip([run for region in regions if region.dims for run in region.dims[d]], one.shape[d], _STRIP) for d in cut
    )


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
