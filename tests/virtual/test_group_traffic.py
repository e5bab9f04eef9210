"""Sums in closed form against the steps of the courses; and large groups, whose plans cost no more than their size."""

from itertools import product
from time import process_time

import pytest

from xrank.errors import UsageError
from xrank.virtual.arrays import ArraySpec
from xrank.virtual.collectives import ALGORITHMS, COLLECTIVES, ROOTED, SendSlot, Traffic, course, step_specs
from xrank.virtual.matmul import MatMul, MatMulSharding
from xrank.virtual.planning import group_traffic, plan

UNEVEN = {"all_scatter", "all_gather", "gather", "all_to_all"}


def specs_of(collective, size, dim):
    """Return what members bring: as uneven as the collective allows, empty ones among them."""
    lengths = [5 * (7 * member % 4) + member % 3 for member in range(size)] if collective in UNEVEN else [11] * size
    return tuple(ArraySpec((3, length) if dim == 1 else (length, 3), "BF16") for length in lengths)


def sum_steps(collective, algorithm, given, member, dim, root):
    total = Traffic(1)
    steps = course(collective, algorithm, len(given), member, root).steps
    for step, spec in zip(steps, step_specs(collective, algorithm, given, member, dim=dim, root=root), strict=True):
        sends = isinstance(step, SendSlot)
        total += Traffic(0, 1, 0, spec.nbytes, 0) if sends else Traffic(0, 0, 1, 0, spec.nbytes)
    return total


@pytest.mark.parametrize(("collective", "algorithm"), list(product(COLLECTIVES, ALGORITHMS)))
def test_sums_are_those_of_the_steps(collective, algorithm):
    for size, dim in product([1, 2, 3, 4, 7, 16], [0, 1]):
        given = specs_of(collective, size, dim)
        for root in range(size) if collective in ROOTED else [0]:
            found = group_traffic(collective, algorithm, given, dim=dim, root=root)
            want = tuple(sum_steps(collective, algorithm, given, member, dim, root) for member in range(size))
            assert found == want, (size, dim, root)


def test_an_unknown_collective_is_refused():
    with pytest.raises(UsageError, match="unknown collective 'all_sum'"):
        group_traffic("all_sum", "push", (ArraySpec((1,)),))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_plan_of_one_group_of_thousands_takes_seconds(algorithm):
    matmul = MatMul(MatMulSharding(("[m, k/x]", "[k/x, n]", "[m, n]")))
    size, whole = 4096, 64 * 32 * 4
    begin = process_time()
    found = plan(matmul, (size,), activations=((64, 2 * size),), parameters=((2 * size, 32),), algorithm=algorithm)
    assert process_time() - begin < 10
    # Push: the whole to all others; ring: every piece twice around.
    assert found.nbytes == (size * (size - 1) if algorithm == "push" else 2 * (size - 1)) * whole
    assert found.messages == size * (size - 1) * (1 if algorithm == "push" else 2)
