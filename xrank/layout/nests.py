"""Nests: strided copies between two address spaces, and the two operations that carry the whole engine.

A nest pairs addresses: for every choice of indices ``i_k < count_k`` the element at ``x + sum(i_k * xstride_k)`` of one
space is the element at ``y + sum(i_k * ystride_k)`` of the other. Layouts, recipes, merges and re-shards are short
lists of nests; `restrict` cuts one to a range of x, `intersect` composes two that share a space.

Both operations expect *nested* x loops: sorted by falling x stride, each stride at least the span of all loops within
it. Every box, split, part, product and permutation, seen from its row-major side, is nested after `canonical`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

from xrank.errors import LayoutError

__all__ = [
    "MAX_UNROLLED",
    "Loop",
    "Nest",
    "addresses",
    "canonical",
    "intersect",
    "restrict",
    "row_major",
    "size",
    "span",
    "swap",
]

Loop: TypeAlias = tuple[int, int, int]
"""(count, x stride, y stride); strides in elements, count >= 1."""

MAX_UNROLLED = 4096
"""Iterations that `intersect` may take one by one for a pair of nests whose strides do not divide each other."""


class Nest(NamedTuple):
    """A strided copy: x and y are element addresses, loops as the module's docstring says."""

    x: int
    y: int
    loops: tuple[Loop, ...] = ()


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives a contiguous tensor, in elements; an empty dim counts as one."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= max(length, 1)
    return tuple(strides)


def size(nest: Nest) -> int:
    """Return the number of elements a nest pairs."""
    return prod(n for n, _, _ in nest.loops)


def span(loops: Iterable[Loop]) -> int:
    """Return the extent on the x side from the first element to one past the last."""
    return 1 + sum((n - 1) * xs for n, xs, _ in loops)


def swap(nest: Nest) -> Nest:
    """Return the same pairs seen from the other side, canonical there."""
    return canonical(Nest(nest.y, nest.x, tuple((n, ys, xs) for n, xs, ys in nest.loops)))


def canonical(nest: Nest) -> Nest:
    """Return the same pairs with loops by falling x stride, single iterations dropped, runs that continue merged."""
    merged: list[Loop] = []
    for n, xs, ys in sorted((loop for loop in nest.loops if loop[0] != 1), key=lambda loop: -loop[1]):
        if merged:
            outer_n, outer_xs, outer_ys = merged[-1]
            if outer_xs == n * xs and outer_ys == n * ys:
                merged[-1] = (outer_n * n, xs, ys)
                continue
        merged.append((n, xs, ys))
    return Nest(nest.x, nest.y, tuple(merged))


def addresses(nest: Nest) -> Iterator[tuple[int, int]]:
    """Yield every (x, y) pair, last loop fastest: the plain meaning that tests compare with."""
    if not nest.loops:
        yield nest.x, nest.y
        return
    (n, xs, ys), inner = nest.loops[0], nest.loops[1:]
    for i in range(n):
        yield from addresses(Nest(nest.x + i * xs, nest.y + i * ys, inner))


def restrict(nest: Nest, low: int, high: int) -> list[Nest]:
    """Return the part of a canonical nest whose x lies in [low, high), as canonical nests by rising x.

    At most 2k + 1 nests come of a nest of k loops: an edge on each side of each loop, and the middle.
    """
    x, y, loops = nest
    if x >= high or x + span(loops) <= low:
        return []
    if low <= x and x + span(loops) <= high:
        return [nest]
    # A nest of no loops is either outside or inside, so here there is an outer loop to split.
    (n, xs, ys), inner = loops[0], loops[1:]
    inner_span = span(inner)
    first = max(0, (low - x - inner_span) // xs + 1)  # first iteration that reaches past low
    last = min(n - 1, (high - 1 - x) // xs)  # last iteration that starts before high
    whole_first = max(first, -((x - low) // xs))  # first iteration that starts at or after low
    whole_last = min(last, (high - x - inner_span) // xs)  # last iteration that ends at or before high
    pieces: list[Nest] = []
    for i in range(first, min(whole_first, last + 1)):
        pieces += restrict(Nest(x + i * xs, y + i * ys, inner), low, high)
    if whole_last >= whole_first:
        middle = ((whole_last - whole_first + 1, xs, ys), *inner)
        pieces.append(canonical(Nest(x + whole_first * xs, y + whole_first * ys, middle)))
    for i in range(max(whole_last + 1, whole_first), last + 1):
        pieces += restrict(Nest(x + i * xs, y + i * ys, inner), low, high)
    return pieces


def intersect(a: Nest, b: Nest) -> list[Nest]:
    """Compose a: X -> M with b: M -> Y, where both name the same element of M; the result is X -> Y, canonical.

    a's *y* side and b's *x* side are the shared space; a must be nested as seen from its y side. Strides that do not
    divide each other are unrolled, at most `MAX_UNROLLED` iterations.

    Raises:
        LayoutError: the pair would have to be unrolled further.
    """
    budget = [MAX_UNROLLED]
    shared = canonical(Nest(a.y, a.x, tuple((n, ys, xs) for n, xs, ys in a.loops)))
    pairs = _meet(shared, canonical(b), budget)
    return [canonical(Nest(nest.x, nest.y, nest.loops)) for nest in pairs]


def _meet(a: Nest, b: Nest, budget: list[int]) -> list[Nest]:
    """Compose two canonical nests that share their x side; the result maps a's y to b's y, not yet canonical."""
    a_span, b_span = span(a.loops), span(b.loops)
    if a.x >= b.x + b_span or b.x >= a.x + a_span:
        return []
    if not a.loops and not b.loops:
        return [Nest(a.y, b.y)]  # overlapping spans of single elements: the same element
    if not a.loops or (b.loops and b.loops[0][1] > a.loops[0][1]):
        return [Nest(nest.y, nest.x, tuple((n, ys, xs) for n, xs, ys in nest.loops)) for nest in _meet(b, a, budget)]
    # From here a has the larger outer stride.
    (n, stride, y_stride), inner = a.loops[0], a.loops[1:]
    inner_span = span(inner)
    if b.loops and b.loops[0][1] == stride:
        return _meet_equal(a, b, budget)
    # b is dense against a's stride when few iterations of a touch it.
    first = max(0, (b.x - a.x - inner_span) // stride + 1)
    last = min(n - 1, (b.x + b_span - 1 - a.x) // stride)
    if last - first < 2 or not b.loops:
        pairs: list[Nest] = []
        for i in range(first, last + 1):
            pairs += _meet(Nest(a.x + i * stride, a.y + i * y_stride, inner), b, budget)
        return pairs
    b_count, b_stride, b_y_stride = b.loops[0]
    if stride % b_stride == 0 and _fits(b):
        return _meet_multiple(a, b, stride // b_stride, budget)
    pairs = []
    if last - first < b_count:
        _spend(last - first + 1, budget, a, b)
        for i in range(first, last + 1):
            pairs += _meet(Nest(a.x + i * stride, a.y + i * y_stride, inner), b, budget)
    else:
        _spend(b_count, budget, a, b)
        for j in range(b_count):
            pairs += _meet(a, Nest(b.x + j * b_stride, b.y + j * b_y_stride, b.loops[1:]), budget)
    return pairs


def _meet_equal(a: Nest, b: Nest, budget: list[int]) -> list[Nest]:
    """Compose nests whose outer x strides are equal: at most two shifts of one against the other can meet."""
    (a_count, stride, a_y), a_inner = a.loops[0], a.loops[1:]
    (b_count, _, b_y), b_inner = b.loops[0], b.loops[1:]
    a_inner_span, b_inner_span = span(a_inner), span(b_inner)
    pairs: list[Nest] = []
    # Iteration i of a meets iteration j of b only if their spans overlap, which depends on k = i - j alone.
    lowest = (b.x - a.x - a_inner_span) // stride + 1
    highest = (b.x + b_inner_span - 1 - a.x) // stride
    for shift in range(lowest, highest + 1):
        first, last = max(0, shift), min(a_count - 1, b_count - 1 + shift)
        if last < first:
            continue
        j = first - shift
        met = _meet(
            Nest(a.x + first * stride, a.y + first * a_y, a_inner),
            Nest(b.x + j * stride, b.y + j * b_y, b_inner),
            budget,
        )
        pairs += [Nest(nest.x, nest.y, ((last - first + 1, a_y, b_y), *nest.loops)) for nest in met]
    return pairs


def _meet_multiple(a: Nest, b: Nest, factor: int, budget: list[int]) -> list[Nest]:
    """Compose nests where a's outer x stride is `factor` times b's: cut b's loop at a's grid and compose the parts."""
    stride = a.loops[0][1]
    (count, b_stride, b_y), inner = b.loops[0], b.loops[1:]
    head = min(count, (-((b.x - a.x) // b_stride)) % factor)
    periods = (count - head) // factor
    pairs: list[Nest] = []
    if head:
        pairs += _meet(a, canonical(Nest(b.x, b.y, ((head, b_stride, b_y), *inner))), budget)
    done = head
    if periods:
        body = ((periods, stride, factor * b_y), (factor, b_stride, b_y), *inner)
        # Not canonical on purpose: its outer loop must keep a's stride, which merging would undo.
        start = Nest(b.x + head * b_stride, b.y + head * b_y, body)
        pairs += _meet_equal(a, start, budget)
        done += periods * factor
    if done < count:
        tail = ((count - done, b_stride, b_y), *inner)
        pairs += _meet(a, canonical(Nest(b.x + done * b_stride, b.y + done * b_y, tail)), budget)
    return pairs


def _fits(nest: Nest) -> bool:
    """Say whether each loop's stride covers the span of the loops within it."""
    return all(xs >= span(nest.loops[k + 1 :]) for k, (_, xs, _) in enumerate(nest.loops))


def _spend(iterations: int, budget: list[int], a: Nest, b: Nest) -> None:
    budget[0] -= iterations
    if budget[0] < 0:
        raise LayoutError(
            "two layouts cut one tensor with strides that do not divide each other",
            got=f"strides {[loop[1] for loop in a.loops]} against {[loop[1] for loop in b.loops]}",
            want=f"at most {MAX_UNROLLED} pieces for a pair of shards",
            next_step="choose a layout whose cuts are multiples of the other's",
        )
