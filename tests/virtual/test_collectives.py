"""The steps of collectives: their neighbors on a ring, their traffic, and groups of thousands."""

from itertools import product
from time import process_time

import pytest

from tests.virtual.stepwise import step_nbytes
from xrank.errors import UsageError
from xrank.virtual.arrays import ArraySpec
from xrank.virtual.layers import MatMul, MatMulSharding
from xrank.virtual.programs import (
    ALGORITHMS,
    ALWAYS_PUSH,
    COLLECTIVES,
    ROOTED,
    SendSlot,
    Traffic,
    check_algorithm,
    count_traffic,
    course,
    plan,
)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_on_a_ring_each_member_sends_only_to_the_next(size):
    for collective in sorted(set(COLLECTIVES) - ALWAYS_PUSH):
        back = collective == "gather"  # against the ring, towards the root
        for member in range(size):
            after, before = (member + 1) % size, (member - 1) % size
            for step in course(collective, "ring", size, member).steps:
                assert step.member == (after if isinstance(step, SendSlot) != back else before)


@pytest.mark.parametrize(("collective", "algorithm"), list(product(COLLECTIVES, ALGORITHMS)))
def test_traffic_is_that_of_the_steps(collective, algorithm):
    """Of arrays as uneven as the collective allows, empty ones among them."""
    uneven = collective in ("all_scatter", "all_gather", "gather", "all_to_all")
    for size, dim in product([1, 2, 3, 4, 7], [0, 1]):
        lengths = [5 * (7 * member % 4) + member % 3 if uneven else 11 for member in range(size)]
        given = tuple(ArraySpec((3, length) if dim == 1 else (length, 3), "BF16") for length in lengths)
        for root in range(size) if collective in ROOTED else [0]:
            found = count_traffic(collective, algorithm, given, dim=dim, root=root)
            for member, traffic in enumerate(found):
                want = Traffic(1)
                for sends, _, n in step_nbytes(collective, algorithm, given, member, dim=dim, root=root):
                    want += Traffic(0, 1, 0, n, 0) if sends else Traffic(0, 0, 1, 0, n)
                assert traffic == want, (size, dim, root)


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


def test_invalid_names_are_refused():
    with pytest.raises(UsageError, match="'tree'"):
        check_algorithm("tree")
    for make in (lambda: course("all_sum", "push", 2, 0), lambda: count_traffic("all_sum", "push", [ArraySpec((1,))])):
        with pytest.raises(UsageError, match="'all_sum'"):
            make()
