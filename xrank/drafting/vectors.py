"""Explain kinds of tensors with one dim: norms, biases. A vector alone shows less than a matrix.

A vector may equal another one as it is, or the parts of a fused matrix with as many rows show where its own parts are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from math import prod

import numpy as np

from xrank.drafting.explanations import Alignment, Explanation, Found, Looker, Matrix, align, members, middle
from xrank.drafting.kinds import Kind
from xrank.drafting.line_maps import LineMap
from xrank.drafting.line_samples import WIDTH, Array

_LEAST_SIMILARITY = 0.9
_MOST_CHOICES = 64


def explain_vector(
    whole: Kind, parts: Sequence[Kind], own: Looker, others: Looker, models: Sequence[Explanation]
) -> Iterator[Explanation]:
    """Yield what a vector may be: one of the other vectors, or several in the places of a fused matrix's parts.

    Args:
        whole: a kind with one dim besides indices and stacked dims.
        parts: kinds of the other model.
        own: looks into the whole's model.
        others: looks into the parts' model.
        models: explanations of matrices in the same direction.
    """
    plain: list[Explanation] = []
    for part in parts:
        for alignment in align(whole, part):
            found = _compare(whole, part, alignment, None, own, others)
            if found is not None:
                plain.append(Explanation(whole, found.matrix, (found,)))
                break
    yield from plain
    seen: set[tuple[object, ...]] = set()
    for model in models:
        maps = tuple(part.map for part in model.parts)
        key = tuple((one.start, one.loops) for one in maps)
        is_plain = len(maps) == 1 and maps[0].start == 0 and maps[0].loops == ((maps[0].count, 1),)
        if is_plain or key in seen:
            continue
        seen.add(key)
        yield from _fill_as(whole, parts, own, others, maps)


def _fill_as(
    whole: Kind, parts: Sequence[Kind], own: Looker, others: Looker, maps: Sequence[LineMap]
) -> Iterator[Explanation]:
    choices: list[list[Found]] = []
    for place in maps:
        fitting = []
        for part in parts:
            for alignment in align(whole, part):
                found = _compare(whole, part, alignment, place, own, others)
                if found is not None:
                    fitting.append(found)
                    break
        choices.append(fitting)
    length = sum(place.count for place in maps)
    if prod(map(len, choices)) > _MOST_CHOICES:
        return
    for chosen in product(*choices):
        core = whole.shape[len(chosen[0].alignment.part_dims) :]
        is_alike = len({(one.alignment.indices, one.alignment.whole_dims) for one in chosen}) == 1
        if prod(core) == length and is_alike and len({one.kind for one in chosen}) == len(chosen):
            yield Explanation(whole, Matrix(core, (), by_column=False), chosen)


def _compare(
    whole: Kind, part: Kind, alignment: Alignment, place: LineMap | None, own: Looker, others: Looker
) -> Found | None:
    """Return a vector in its place of another one, if their values are equal or similar there."""
    a, b = whole.shape[len(alignment.part_dims) :], part.shape[len(alignment.whole_dims) :]
    if len(a) != 1 or len(b) != 1:
        return None
    if place is None:
        place = LineMap(0, ((b[0], 1),) if b[0] > 1 else (), is_exact=True)
        if a != b:
            return None
    if place.count != b[0] or place.start + sum((n - 1) * s for n, s in place.loops) >= a[0]:
        return None
    whole_name, whole_at, part_name, part_at = middle(whole, part, alignment)
    pairs = [(own.vector(whole_name, whole_at)[place.places()], others.vector(part_name, part_at))]
    if len(pairs[0][0]) < WIDTH:  # short vectors of several layers show more than those of one
        most = -(-WIDTH // len(pairs[0][0]))
        for whole_name, whole_at, part_name, part_at in islice(members(whole, part, alignment), most):
            pairs.append((own.vector(whole_name, whole_at)[place.places()], others.vector(part_name, part_at)))
    status = compare_vectors(*map(np.concatenate, zip(*pairs, strict=True)))
    if status is None:
        return None
    return Found(part, alignment, Matrix(b, (), by_column=False), LineMap(place.start, place.loops, status))


def compare_vectors(a: Array, b: Array) -> bool | None:
    """Return True for equal values, False for similar ones, None for others."""
    dtype = min(a.dtype, b.dtype, key=lambda one: one.itemsize)
    if np.ascontiguousarray(a.astype(dtype)).tobytes() == np.ascontiguousarray(b.astype(dtype)).tobytes():
        return True
    x, y = (np.nan_to_num(one.astype(np.float64)) for one in (a, b))
    x, y = x - x.mean(), y - y.mean()
    length = float(np.linalg.norm(x) * np.linalg.norm(y))
    return False if len(x) > 7 and length > 0 and float(x @ y) / length >= _LEAST_SIMILARITY else None
