"""Whole tables of nests against the functions that take one."""

from __future__ import annotations

import random

import numpy as np

from xrank.layout.nest_table import NestTable, canonical_rows, int_array, join_rows, restrict_rows, rows_of
from xrank.layout.nests import Nest, canonical, restrict, span


def nested(rng: random.Random) -> Nest:
    """Return a canonical, nested nest of up to three loops."""
    loops: list[tuple[int, int, int]] = []
    reach = 1
    for _ in range(rng.randint(0, 3)):
        stride = reach + rng.choice((0, 0, 1, 3))
        loops.insert(0, (rng.randint(1, 4), stride, rng.randint(1, 50)))
        reach = span(loops)
    return canonical(Nest(rng.randint(0, 9), rng.randint(0, 99), tuple(loops)))


def test_tables_are_restricted_as_nests_are() -> None:
    rng = random.Random(1)
    for _ in range(200):
        nests = [nested(rng) for _ in range(rng.randint(0, 12))]
        bounds = [sorted((rng.randint(0, 60), rng.randint(0, 60))) for _ in nests]
        low, high = (int_array(pair[i] for pair in bounds) for i in (0, 1))
        rows, found = restrict_rows(NestTable.from_nests(nests), low, high)
        wanted = [(i, piece) for i, nest in enumerate(nests) for piece in restrict(nest, int(low[i]), int(high[i]))]
        assert list(zip(rows.tolist(), [found[i] for i in range(len(found))], strict=True)) == wanted


def test_tables_are_made_canonical_as_nests_are() -> None:
    rng = random.Random(2)
    for _ in range(200):
        nests = []
        for _ in range(rng.randint(0, 12)):
            loops: list[tuple[int, int, int]] = []
            for _ in range(rng.randint(0, 4)):
                n, xs, ys = loops[0] if loops else (1, 1, 1)
                continues = rng.random() < 0.5
                strides = (n * xs, n * ys) if continues else (n * xs + rng.randint(0, 2), n * ys + rng.randint(0, 2))
                loops.insert(0, (rng.choice((1, 2, 3)), *strides))
            nests.append(Nest(rng.randint(0, 9), rng.randint(0, 9), tuple(loops)))
        depth = max((len(nest.loops) for nest in nests), default=0)
        table = NestTable(
            int_array(nest.x for nest in nests),
            int_array(nest.y for nest in nests),
            np.array([nest.loops + ((1, 0, 0),) * (depth - len(nest.loops)) for nest in nests], np.int64).reshape(
                len(nests), depth, 3
            ),
        )
        found, wanted = canonical_rows(table), NestTable.from_nests([canonical(nest) for nest in nests])
        assert found.loops.tolist() == wanted.loops.tolist()
        assert (found.x.tolist(), found.y.tolist()) == (wanted.x.tolist(), wanted.y.tolist())


def test_joined_tables_have_the_depth_that_their_rows_need() -> None:
    deep, flat = Nest(0, 0, ((2, 9, 9), (3, 1, 2))), Nest(4, 4)
    found = join_rows([NestTable.from_nests([flat]), NestTable.from_nests([deep, flat])])
    assert [found[i] for i in range(3)] == [flat, deep, flat]
    assert join_rows([found.take(int_array([0])), found.take(int_array([2]))]).loops.shape == (2, 0, 3)


def test_rows_of_owners() -> None:
    owner = int_array([0, 0, 2, 3, 3, 3])
    rows, at = rows_of(owner, int_array([3, 1, 0, 3]), 4)
    assert rows.tolist() == [3, 4, 5, 0, 1, 3, 4, 5]
    assert at.tolist() == [0, 0, 0, 2, 2, 3, 3, 3]
