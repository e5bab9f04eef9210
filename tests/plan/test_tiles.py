"""Tiles against the list of a nest's pairs."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.engine_cases import Integer, pairs_of, shuffled
from xrank.layout.nests import Nest, canonical
from xrank.plan.casts import Tile, cut_tiles


def drawn_nest(integer: Integer) -> Nest:
    """Return a one-to-one nest with gaps, its loops in any order on the target's side."""
    counts = [integer(1, 6) for _ in range(integer(0, 4))]
    strides = []
    for order in (range(len(counts)), shuffled(integer, range(len(counts)))):
        extent, side = 1, [0] * len(counts)
        for k in order:
            side[k] = extent + integer(0, 3) * integer(0, 1) * integer(1, 9)
            extent += (counts[k] - 1) * side[k]
        strides.append(side)
    loops = list(zip(counts, *strides, strict=True))
    return canonical(Nest(integer(0, 50), integer(0, 50), tuple(shuffled(integer, loops))))


def pairs_of_tile(tile: Tile) -> list[tuple[int, int]]:
    x, y = pairs_of(Nest(tile.start, tile.target, tile.loops))
    return list(zip(x.tolist(), y.tolist(), strict=True))


def check(nest: Nest, max_elements: int) -> None:
    made = list(cut_tiles(nest, max_elements))
    x, y = pairs_of(nest)
    pairs = [pair for tile in made for pair in pairs_of_tile(tile)]
    assert sorted(pairs) == sorted(zip(x.tolist(), y.tolist(), strict=True))
    for tile in made:
        own = pairs_of_tile(tile)
        xs = [x for x, _ in own]
        assert 1 <= tile.length <= max_elements
        assert (min(xs), max(xs)) == (tile.start, tile.start + tile.length - 1)
        assert tile.length <= 4 * len(own)
        assert tile.is_dense == (len(own) == tile.length)
        assert list(tile.loops) == sorted(tile.loops, key=lambda loop: -loop[1])


@given(st.data(), st.integers(1, 200))
@settings(deadline=None)
def test_tiles_are_the_nest(data, max_elements):
    check(drawn_nest(lambda low, high: data.draw(st.integers(low, high))), max_elements)


def test_thousands_of_nests():
    rng = random.Random(20261106)
    for _ in range(2_500):
        check(drawn_nest(rng.randint), rng.choice([1, 2, 7, 30, 1000]))


def test_a_run_is_cut_only_by_the_bound():
    assert list(cut_tiles(Nest(5, 7, ((10, 1, 1),)), 4)) == [
        Tile(5, 4, 7, ((4, 1, 1),)),
        Tile(9, 4, 11, ((4, 1, 1),)),
        Tile(13, 2, 15, ((2, 1, 1),)),
    ]
    assert list(cut_tiles(Nest(5, 7), 4)) == [Tile(5, 1, 7, ())]


@pytest.mark.parametrize(("row", "together"), [(406, True), (407, False)])
def test_columns_are_read_together_while_a_quarter_of_the_bytes_is_wanted(row, together):
    columns = Nest(0, 0, ((50, row, 100), (100, 1, 1)))
    made = list(cut_tiles(columns, 1 << 20))
    assert len(made) == (1 if together else 50)
    assert sum(tile.length for tile in made) == (49 * row + 100 if together else 5000)


def test_rows_that_do_not_fit_together_are_read_some_at_a_time():
    made = list(cut_tiles(Nest(0, 0, ((10, 20, 10), (10, 1, 1))), 75))
    assert [(tile.start, tile.length, tile.loops[0][0]) for tile in made] == [(0, 70, 4), (80, 70, 4), (160, 30, 2)]


def test_a_transposed_nest_is_read_whole_not_by_elements():
    rows, columns = 300, 200
    made = list(cut_tiles(Nest(0, 0, ((rows, 1, columns), (columns, rows, 1))), 30_000))
    assert [(tile.start, tile.length) for tile in made] == [(0, 30_000), (30_000, 30_000)]
    assert all(tile.is_dense for tile in made)


def test_the_number_of_tiles_of_a_large_nest_follows_from_its_bytes():
    nest = Nest(0, 0, ((1 << 10, 1 << 12, 1 << 11), (1 << 11, 1, 1)))
    assert sum(1 for _ in cut_tiles(nest, 1 << 20)) == math.ceil((1 << 22) / (1 << 20))
