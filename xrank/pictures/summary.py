"""The summary at the top of a page of layouts: amounts, kinds of cuts, tensors that are alike, bytes of each rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from xrank.dtypes import DTYPES
from xrank.pictures.page import draw_facts, page_text
from xrank.pictures.regions import cut_dims, region_of
from xrank.plan.holdings import Holdings, Survey, sum_held_nbytes
from xrank.words import amount_text, join_words, ranks_text, size_text

_MAX_ROWS = 64
"""Number of bars of bytes."""
_NUMBER = re.compile(r"\d+")


def draw_summary(found: Survey, groups: Sequence[Sequence[Holdings]]) -> Iterator[str]:
    """Yield the facts of a survey, and a table of each kind of cut."""
    is_known = has_widths(found)
    held = sum_held_nbytes(found.tensors, lambda dtype: DTYPES[dtype].nbytes if is_known and dtype else 1)
    facts = [(f"{len(found.tensors):,}", "tensor" if len(found.tensors) == 1 else "tensors")]
    facts += [(f"{len(groups):,}", "different shapes and cuts")] if len(groups) < len(found.tensors) else []
    facts += [(f"{sum_elements(found.tensors):,}", "elements")]
    if is_known:
        total = sum(math.prod(one.shape) * DTYPES[one.dtype].nbytes for one in found.tensors if one.dtype in DTYPES)
        facts.append((size_text(total), "of tensors"))
    if held:
        low, high = (amount_text(limit(held.values()), is_known) for limit in (min, max))
        facts += [(f"{len(held):,}", "rank" if len(held) == 1 else "ranks")]
        facts += [(low if low == high else f"{low} to {high}", "on each rank")]
    yield from draw_facts(facts)
    yield '<div class="side"><div class="wide">'
    yield from _draw_kinds(found.tensors, is_known)
    yield '</div><div class="wide">'
    if held:
        yield from _draw_amounts(held, is_known)
    yield "</div></div>"


def has_widths(found: Survey) -> bool:
    """Return whether each tensor's element type, and so its bytes, is known."""
    return all(one.dtype in DTYPES for one in found.tensors)


def sum_elements(tensors: Iterable[Holdings]) -> int:
    """Return the number of elements of all tensors, each counted once."""
    return sum(math.prod(one.shape) for one in tensors)


def cut_words(one: Holdings) -> str:
    """Return how a tensor is cut: ``dim 0 by tp``, ``whole on each rank``."""
    if one.problem is not None:
        return "unknown"
    if one.rule is None and not one.shares:
        return "no rule"
    some = " of some" if one.absent else ""
    if one.layout is not None and len(one.layout.dims) == len(one.shape):
        cuts = [(d, axes) for d, axes in enumerate(one.layout.axes) if axes]
        words = [f"dim {d} by {join_words(axes)}" for d, axes in cuts]
        sums = f"addends by {join_words(one.sums)}" if one.sums else ""
        return ", ".join(filter(None, (*words, sums))) or f"whole on each rank{some}"
    if len(one.shares) == 1:
        return f"whole on each rank{some}" if len(one.shares[0].ranks) > 1 else "whole on one rank"
    regions = (region_of(nest, one.shape) for share in one.shares[:64] for nest in share.nests)
    dims = cut_dims(regions, one.shape)
    return "rows cut within" if dims is None else f"{join_words(f'dim {d}' for d in dims)} in pieces"


def pattern_of(group: Sequence[Holdings]) -> str:
    """Return the names of a group as one: ``layers.*.up.weight`` if they differ only in numbers, else the first."""
    first = group[0].name
    numbers = [_NUMBER.findall(one.name) for one in group]
    if len({_NUMBER.sub("*", one.name) for one in group}) > 1 or len(group) == 1:
        return first
    is_fixed = iter([len(set(column)) == 1 for column in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda match: match.group() if next(is_fixed) else "*", first)


def _draw_kinds(tensors: Iterable[Holdings], is_known: bool) -> Iterator[str]:
    kinds: dict[str, list[Holdings]] = {}
    for one in tensors:
        kinds.setdefault(cut_words(one), []).append(one)
    yield '<h2>Kinds of cuts</h2><table><tr><th>cut<th class="number">tensors<th class="number">size'
    for words, members in kinds.items():
        size = sum(
            math.prod(one.shape) * (DTYPES[one.dtype].nbytes if is_known and one.dtype else 1) for one in members
        )
        yield f'<tr><td>{page_text(words)}<td class="number">{len(members):,}'
        yield f'<td class="number">{amount_text(size, is_known)}'
    yield "</table>"


def _draw_amounts(held: dict[int, int], is_known: bool) -> Iterator[str]:
    """Yield a bar for each run of ranks whose amounts read alike."""
    runs: list[tuple[list[int], int]] = []
    for rank, amount in held.items():
        if runs and amount_text(runs[-1][1], is_known) == amount_text(amount, is_known):
            runs[-1][0].append(rank)
        else:
            runs.append(([rank], amount))
    most = max(held.values()) or 1
    yield "<h2>Each rank holds</h2><table>"
    for ranks, amount in runs[:_MAX_ROWS]:
        yield f'<tr><th>{page_text(ranks_text(ranks))}<td class="number">{amount_text(amount, is_known)}'
        yield f'<td><div class="bar" style="width:{amount * 16 / most:.2f}em"></div>'
    yield "</table>"
    if len(runs) > _MAX_ROWS:
        ranks = [rank for run, _ in runs[_MAX_ROWS:] for rank in run]
        amounts = [amount for _, amount in runs[_MAX_ROWS:]]
        limits = f"{amount_text(min(amounts), is_known)} to {amount_text(max(amounts), is_known)}"
        yield f'<p class="note">{page_text(ranks_text(ranks, compact=True))}: {limits}</p>'
