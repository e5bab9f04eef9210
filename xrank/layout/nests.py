"""Nests: strided copies between two address spaces, and the two operations that the engine is built on.

A nest pairs addresses: for every choice of indices ``i_k < count_k`` the element at ``x + sum(i_k * xstride_k)`` of one
space is the element at ``y + sum(i_k * ystride_k)`` of the other. Layouts, recipes, merges and re-shards are short
lists of nests; `restrict` cuts one to a range of x, `intersect` composes two that share a space.

Both operations expect *nested* x loops: sorted by falling x stride, each stride at least the span of all later loops.
Every box, split, part, product and permutation is nested after `canonical`, as seen from its row-major side.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

from xrank.errors import LayoutError

Loop: TypeAlias = tuple[int, int, int]
"""(count, x stride, y stride); strides in elements, count >= 1."""

MAX_UNROLLED = 4096
"""Largest number of iterations that `intersect` unrolls for two nests whose strides do not divide each other."""


class Nest(NamedTuple):
    """A strided copy: x and y are element addresses; the module's docstring defines the loops."""

    x: int
    y: int
    loops: tuple[Loop, ...] = ()


@lru_cache(maxsize=1024)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return torch's strides of a contiguous tensor, in elements; an empty dim counts as 1."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= max(length, 1)
    return tuple(strides)


def size(nest: Nest) -> int:
    """Return the number of elements that a nest pairs."""
    return prod(n for n, _, _ in nest.loops)


def span(loops: Iterable[Loop]) -> int:
    """Return the number of x addresses from the first element to the last, both included."""
    return 1 + sum((n - 1) * xs for n, xs, _ in loops)


def swap(nest: Nest) -> Nest:
    """Exchange x and y; the result is canonical."""
    return canonical(Nest(nest.y, nest.x, tuple((n, ys, xs) for n, xs, ys in nest.loops)))


def canonical(nest: Nest) -> Nest:
    """Return the same pairs with loops sorted by falling x stride, single iterations dropped, adjacent runs merged."""
    merged: list[Loop] = []
    # The stride of a single iteration is meaningless, and its place among the loops would keep two runs apart.
    for n, xs, ys in sorted((loop for loop in nest.loops if loop[0] != 1), key=lambda loop: -loop[1]):
        if merged:
            outer_n, outer_xs, outer_ys = merged[-1]
            # The outer loop continues where this one ends, in both spaces.
            if outer_xs == n * xs and outer_ys == n * ys:
                merged[-1] = (outer_n * n, xs, ys)
                continue
        merged.append((n, xs, ys))
    return Nest(nest.x, nest.y, tuple(merged))


def addresses(nest: Nest) -> list[tuple[int, int]]:
    """Return all (x, y) pairs, last loop fastest: the definition that tests compare with."""
    pairs = [(nest.x, nest.y)]
    for n, xs, ys in nest.loops:
        pairs = [(x + i * xs, y + i * ys) for x, y in pairs for i in range(n)]
    return pairs


def restrict(nest: Nest, low: int, high: int) -> list[Nest]:
    """Return the part of a canonical nest with x in [low, high), as canonical nests by rising x.

    A nest of k loops becomes at most 2k + 1 nests: an edge on each side of each loop, and the middle.

    Example:
        >>> restrict(Nest(0, 100, ((3, 4, 8), (4, 1, 1))), 2, 8)  # 3 rows of 4 elements
        [Nest(x=2, y=102, loops=((2, 1, 1),)), Nest(x=4, y=108, loops=((4, 1, 1),))]
    """
    x, y, loops = nest
    if x >= high or x + span(loops) <= low:
        return []
    if low <= x and x + span(loops) <= high:
        return [nest]
    # A nest without loops is outside or inside, so here there is an outer loop to split.
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
    """Compose a: X -> M with b: M -> Y to canonical nests X -> Y.

    The shared space M is a's *y* side and b's *x* side; a must be nested as seen from its y side. If strides do not
    divide each other, up to `MAX_UNROLLED` iterations are unrolled, and more are a LayoutError.

    Example:
        >>> intersect(Nest(0, 4, ((4, 1, 1),)), Nest(6, 0, ((6, 1, 1),)))
        [Nest(x=2, y=0, loops=((2, 1, 1),))]
    """
    # One budget for all levels: unrolling within unrolling multiplies, so a limit per level would bound nothing.
    return list(map(canonical, _meet(swap(a), canonical(b), [MAX_UNROLLED])))


def _meet(a: Nest, b: Nest, budget: list[int]) -> list[Nest]:
    """Compose two canonical nests that share their x side; the result maps a's y to b's y and is not canonical."""
    a_span, b_span = span(a.loops), span(b.loops)
    if a.x >= b.x + b_span or b.x >= a.x + a_span:
        return []
    if not a.loops and not b.loops:
        return [Nest(a.y, b.y)]  # two overlapping single elements are the same element
    # Composing is symmetric: exchange the roles, and then the sides of the pairs.
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
    pairs: list[Nest] = []
    # At most two iterations are the edges of a cut, which the budget for odd strides does not count.
    if last - first >= 2 and b.loops:
        (b_count, b_stride, b_y_stride), b_inner = b.loops[0], b.loops[1:]
        # Each stride of b must cover the span of all later loops.
        is_nested = all(xs >= span(b.loops[k + 1 :]) for k, (_, xs, _) in enumerate(b.loops))
        if stride % b_stride == 0 and is_nested:
            return _meet_multiple(a, b, stride // b_stride, budget)
        # Unroll the nest with fewer iterations: each becomes a piece of the result.
        _spend(min(b_count, last - first + 1), budget, a, b)
        if last - first >= b_count:
            for j in range(b_count):
                pairs += _meet(a, Nest(b.x + j * b_stride, b.y + j * b_y_stride, b_inner), budget)
            return pairs
    for i in range(first, last + 1):
        pairs += _meet(Nest(a.x + i * stride, a.y + i * y_stride, inner), b, budget)
    return pairs


def _meet_equal(a: Nest, b: Nest, budget: list[int]) -> list[Nest]:
    """Compose nests with equal outer x strides: at most two shifts of one against the other overlap."""
    (a_count, stride, a_y), a_inner = a.loops[0], a.loops[1:]
    (b_count, _, b_y), b_inner = b.loops[0], b.loops[1:]
    a_inner_span, b_inner_span = span(a_inner), span(b_inner)
    pairs: list[Nest] = []
    # Whether iteration i of a overlaps iteration j of b depends only on the shift i - j.
    lowest = (b.x - a.x - a_inner_span) // stride + 1
    highest = (b.x + b_inner_span - 1 - a.x) // stride
    for shift in range(lowest, highest + 1):
        first, last = max(0, shift), min(a_count - 1, b_count - 1 + shift)
        if last < first:
            continue
        j = first - shift
        one = Nest(a.x + first * stride, a.y + first * a_y, a_inner)
        met = _meet(one, Nest(b.x + j * stride, b.y + j * b_y, b_inner), budget)
        pairs += [Nest(nest.x, nest.y, ((last - first + 1, a_y, b_y), *nest.loops)) for nest in met]
    return pairs


def _meet_multiple(a: Nest, b: Nest, factor: int, budget: list[int]) -> list[Nest]:
    """Compose nests where a's outer x stride is `factor` times b's: cut b's loop at a's grid, and compose."""
    stride = a.loops[0][1]
    (count, b_stride, b_y), inner = b.loops[0], b.loops[1:]
    # Head and tail are shorter than a's stride, so each meets at most two iterations of a; the body repeats with a.
    head = min(count, (-((b.x - a.x) // b_stride)) % factor)
    periods = (count - head) // factor
    pairs: list[Nest] = []
    if head:
        pairs += _meet(a, canonical(Nest(b.x, b.y, ((head, b_stride, b_y), *inner))), budget)
    done = head
    if periods:
        body = ((periods, stride, factor * b_y), (factor, b_stride, b_y), *inner)
        # Not canonical: merging would undo the outer loop, which must have a's stride.
        start = Nest(b.x + head * b_stride, b.y + head * b_y, body)
        pairs += _meet_equal(a, start, budget)
        done += periods * factor
    if done < count:
        tail = ((count - done, b_stride, b_y), *inner)
        pairs += _meet(a, canonical(Nest(b.x + done * b_stride, b.y + done * b_y, tail)), budget)
    return pairs


def _spend(iterations: int, budget: list[int], a: Nest, b: Nest) -> None:
    budget[0] -= iterations
    if budget[0] < 0:
        what = "two layouts split a tensor at strides that are not multiples of each other"
        got = f"strides {[loop[1] for loop in a.loops]} against {[loop[1] for loop in b.loops]}"
        want = f"at most {MAX_UNROLLED} pieces for a pair of shards"
        next_step = "choose a layout whose cuts are multiples of the other layout's cuts"
        raise LayoutError(what, got=got, want=want, next_step=next_step)
