"""restrict and intersect against the plain meaning of a nest: its list of address pairs."""

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sampled import count_of
from xrank.errors import LayoutError
from xrank.layout.nests import MAX_UNROLLED, Loop, Nest, addresses, canonical, intersect, restrict, size, span, swap

pytestmark = pytest.mark.quick


def drawn_nest(draw, max_loops: int = 3, max_count: int = 4) -> Nest:
    """Return a nest whose x loops are nested and whose pairs are one to one on both sides, with gaps and offsets."""
    counts = [draw(1, max_count) for _ in range(draw(0, max_loops))]

    def strides(order: list[int]) -> list[int]:
        extent, result = 1, [0] * len(counts)
        for k in order:
            result[k] = extent + draw(0, 2) * draw(0, 1)
            extent += (counts[k] - 1) * result[k]
        return result

    inner_first = list(reversed(range(len(counts))))
    x_strides = strides(inner_first)
    # Any order of the loops on the y side: permutations are what recipes are made of.
    y_order = list(inner_first)
    for i in range(len(y_order)):
        j = draw(i, len(y_order) - 1)
        y_order[i], y_order[j] = y_order[j], y_order[i]
    y_strides = strides(y_order)
    loops: list[Loop] = list(zip(counts, x_strides, y_strides, strict=True))
    return canonical(Nest(draw(0, 12), draw(0, 12), tuple(loops)))


@st.composite
def nests(draw) -> Nest:
    return drawn_nest(lambda low, high: draw(st.integers(low, high)))


def pairs(nests: list[Nest]) -> list[tuple[int, int]]:
    return sorted(pair for nest in nests for pair in addresses(nest))


def check_restrict(nest: Nest, low: int, high: int) -> None:
    pieces = restrict(nest, low, high)
    assert pairs(pieces) == sorted((x, y) for x, y in addresses(nest) if low <= x < high)
    assert len(pieces) <= 2 * len(nest.loops) + 1
    assert all(canonical(piece) == piece for piece in pieces)
    assert [piece.x for piece in pieces] == sorted(piece.x for piece in pieces)


def check_intersect(a: Nest, b: Nest) -> None:
    ends = defaultdict(list)
    for m, y in addresses(b):
        ends[m].append(y)
    expected = sorted((x, y) for x, m in addresses(a) for y in ends[m])
    pieces = intersect(a, b)
    assert pairs(pieces) == expected
    assert all(canonical(piece) == piece for piece in pieces)


@given(nests(), st.integers(-2, 40), st.integers(-2, 40))
def test_restrict_is_a_filter_on_x(nest, low, high):
    check_restrict(nest, low, high)


@given(nests(), nests())
def test_intersect_is_the_join_on_the_shared_side(a, b):
    check_intersect(swap(a), b)


def test_fifty_thousand_random_pairs():
    rng = random.Random(20261101)
    met = 0
    for _ in range(count_of(50_000)):
        a, b = drawn_nest(rng.randint, 3, 3), drawn_nest(rng.randint, 3, 3)
        ends = dict(addresses(b))
        expected = sorted((y, ends[x]) for x, y in addresses(a) if x in ends)
        assert pairs(intersect(Nest(a.y, a.x, tuple((n, ys, xs) for n, xs, ys in a.loops)), b)) == expected, (a, b)
        met += bool(expected)
    assert met > count_of(15_000)


def test_fifty_thousand_random_ranges():
    rng = random.Random(20261122)
    cut = 0
    for _ in range(count_of(50_000)):
        nest = drawn_nest(rng.randint, 3, 3)
        low = nest.x + rng.randint(-2, span(nest.loops))
        high = low + rng.randint(-1, span(nest.loops))
        expected = sorted((x, y) for x, y in addresses(nest) if low <= x < high)
        assert pairs(restrict(nest, low, high)) == expected, (nest, low, high)
        cut += 0 < len(expected) < size(nest)
    assert cut > count_of(15_000)


@given(nests())
def test_canonical_and_swap_keep_the_pairs(nest):
    assert pairs([canonical(Nest(nest.x, nest.y, ((1, 9, 9), *nest.loops)))]) == pairs([nest])
    assert pairs([swap(nest)]) == sorted((y, x) for x, y in addresses(nest))
    assert size(nest) == len(list(addresses(nest)))
    assert span(nest.loops) == max(x for x, _ in addresses(nest)) - nest.x + 1


def test_canonical_merges_loops_that_continue():
    assert canonical(Nest(0, 0, ((4, 1, 1), (3, 4, 4), (1, 7, 7)))) == Nest(0, 0, ((12, 1, 1),))
    assert canonical(Nest(5, 6, ((3, 4, 8), (4, 1, 1)))).loops == ((3, 4, 8), (4, 1, 1))


def test_a_range_costs_edges_and_a_middle():
    rows = Nest(0, 0, ((10, 8, 100), (8, 1, 1)))
    assert restrict(rows, 3, 75) == [
        Nest(3, 3, ((5, 1, 1),)),
        Nest(8, 100, ((8, 8, 100), (8, 1, 1))),
        Nest(72, 900, ((3, 1, 1),)),
    ]
    assert restrict(rows, 80, 90) == []
    assert restrict(rows, 0, 80) == [rows]


def test_large_strides_compose_without_enumeration():
    columns = Nest(0, 0, ((10**6, 500, 10**3), (500, 1, 1)))  # half of each row of 10^6 x 1000
    flat = Nest(10**8, 0, ((10**8, 1, 1),))
    assert sum(size(nest) for nest in intersect(columns, flat)) == 5 * 10**7


def test_strides_that_do_not_divide_are_unrolled_up_to_a_budget():
    by_three, by_two = Nest(0, 0, ((3 * MAX_UNROLLED, 1, 3),)), Nest(0, 0, ((3 * MAX_UNROLLED, 2, 1),))
    with pytest.raises(LayoutError, match="not multiples of each other") as caught:
        intersect(by_three, by_two)
    assert str(MAX_UNROLLED) in caught.value.want
    short_three, short_two = Nest(0, 0, ((200, 1, 3),)), Nest(0, 0, ((200, 2, 1),))
    assert sum(size(nest) for nest in intersect(short_three, short_two)) == 67
