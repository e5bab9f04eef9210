"""Gaps and overlaps planted in layouts of the whole notation: each is found, at its first element."""

import math
import random
from itertools import product

import numpy as np
import pytest

from tests.layout.plain_meaning import Made, places, whole
from tests.sampled import count_of
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.coverage import find_fault
from xrank.layout.local_part import local_part
from xrank.layout.nest_table import NestTable
from xrank.layout.nests import Nest, canonical, restrict, size

pytestmark = pytest.mark.quick


def first_wrong(nests: list[Nest], num_elements: int) -> tuple[str, int] | None:
    """Return kind and address of the first element that is not held once, by counting all."""
    counts = np.zeros(num_elements, dtype=int)
    for nest in nests:
        for index in product(*(range(count) for count, _, _ in nest.loops)):
            counts[nest.y + sum(i * ys for i, (_, _, ys) in zip(index, nest.loops, strict=True))] += 1
    wrong = np.flatnonzero(counts != 1)
    return ("overlap" if counts[wrong[0]] else "gap", int(wrong[0])) if len(wrong) else None


def held_nests(rng: random.Random) -> tuple[str, list[Nest], int]:
    """Return a random layout, the distinct nests of all its ranks, and its tensor's number of elements."""
    lengths = {f"a{i}": rng.randint(1, 4) for i in range(rng.randint(1, 2))}
    made = Made(rng.randint, lengths, elements=120)
    dims = (made.flat(),) if rng.randint(0, 3) == 0 else made.dims(rng.randint(1, 3))
    mesh = DeviceMesh(tuple(lengths.values()), tuple(lengths))
    layout = TensorLayout.from_dims(dims, mesh)
    shape = tuple(whole(dim, {**made.names, **lengths}) for dim in dims)
    parts = [local_part(layout, mesh, at, shape, sizes=made.names) for at in places(lengths)]
    distinct = {Nest(0, nest.y, tuple((n, 0, ys) for n, _, ys in nest.loops)): nest for p in parts for nest in p.nests}
    return str(layout), list(distinct.values()), math.prod(shape)


def planted(rng: random.Random, nests: list[Nest]) -> list[Nest]:
    """Return the nests with one missing, twice, cut short, moved by one, or partly there again."""
    nests = list(nests)
    nest = nests.pop(rng.randrange(len(nests)))
    count = size(nest)
    match rng.randint(0, 4):
        case 0:
            return nests
        case 1:
            return [*nests, nest, nest]
        case 2 if nest.loops:
            span = sum((n - 1) * xs for n, xs, _ in nest.loops) + nest.x
            return [*nests, *restrict(nest, nest.x, rng.randint(nest.x, span))]
        case 3 if nest.y:
            return [*nests, nest._replace(y=nest.y - 1)]
        case _:
            part = restrict(nest, nest.x, nest.x + max(count // 2, 1))
            return [*nests, nest, *part]


def test_ten_thousand_planted_faults_are_found():
    rng = random.Random(20261112)
    found = wrong_already = 0
    while found < count_of(10_000):
        text, nests, num_elements = held_nests(rng)
        if not nests:
            continue
        already = first_wrong(nests, num_elements)
        fault = find_fault(NestTable.from_nests(nests), num_elements)
        assert (fault and (fault.kind, fault.address)) == already, text
        wrong_already += already is not None  # ranks whose parts overlap partly, which a layout can say
        for _ in range(10):
            broken = [canonical(nest) for nest in planted(rng, nests)]
            expected = first_wrong(broken, num_elements)
            fault = find_fault(NestTable.from_nests(broken), num_elements)
            assert (fault and (fault.kind, fault.address)) == expected, (text, broken)
            found += expected is not None
    assert wrong_already < found / 100
