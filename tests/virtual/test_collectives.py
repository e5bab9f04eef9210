"""The steps of collectives: their neighbors on a ring, their traffic, and groups of thousands."""

from collections import deque
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
                assert step.member == (after if (step.does == "send") != back else before)


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


CASES = [
    (collective, algorithm, size, root)
    for collective, algorithm, size in product(COLLECTIVES, ALGORITHMS, [1, 2, 3, 4, 7])
    for root in (range(size) if collective in ROOTED else [0])
]


def play(collective, algorithm, size, root):
    """Return what the slots of all members hold at the end; member 2's part 1 is "2.1", folds are written out."""
    courses = [course(collective, algorithm, size, member, root) for member in range(size)]
    slots = [
        {"whole": {m: str(m)}, "nothing": {}}.get(one.start, {part: f"{m}.{part}" for part in range(size)})
        for m, one in enumerate(courses)
    ]
    todo = [deque(one.steps) for one in courses]
    wires = {pair: deque() for pair in product(range(size), repeat=2)}
    while any(todo):
        moved = False
        for member, steps in enumerate(todo):
            while steps:
                step = steps[0]
                if step.does == "send":
                    wires[member, step.member].append(slots[member][step.slot])
                elif wires[step.member, member]:
                    got = wires[step.member, member].popleft()
                    slots[member][step.slot] = f"({got}+{slots[member][step.slot]})" if step.fold else got
                else:
                    break
                steps.popleft()
                moved = True
        assert moved, "all wait"
    assert not any(wires.values()), "a message was sent but never received"
    return courses, slots


def reduce_ring(part, size):
    """Return the sum of everyone's part as a ring makes it: from the member after the part's own on."""
    terms = [f"{(part + distance) % size}.{part}" for distance in range(1, size + 1)]
    total = terms[0]
    for term in terms[1:]:
        total = f"({total}+{term})"
    return total


@pytest.mark.parametrize(("collective", "algorithm", "size", "root"), CASES)
def test_every_member_gets_the_result_of_the_collective(collective, algorithm, size, root):
    courses, slots = play(collective, algorithm, size, root)
    ring = algorithm == "ring" and collective not in ALWAYS_PUSH
    for member in range(size):
        finish, found = courses[member].finish, slots[member]
        everyone = {m: str(m) for m in range(size)}
        parts = {m: f"{m}.{member}" for m in range(size)}
        wanted = {
            "all_scatter": ("all", everyone),
            "all_gather": ("all", everyone),
            "all_reduce": ("flat", {p: reduce_ring(p, size) for p in range(size)}) if ring else ("reduce", everyone),
            "reduce_scatter": ("one", {member: reduce_ring(member, size)}) if ring else ("reduce", parts),
            "all_to_all": ("all", parts),
            "broadcast": ("one", {root: str(root)}),
            "scatter": ("one", {member: f"{root}.{member}"}),
            "gather": ("all", everyone) if member == root else ("nothing", {}),
        }[collective]
        assert finish == wanted[0]
        assert {slot: found[slot] for slot in wanted[1]} == wanted[1]
        if finish == "one":
            assert courses[member].slot in wanted[1]


def closed_form(collective, algorithm, g, b):
    """Return the messages and bytes of a whole group whose members all bring b bytes, which g divides."""
    if algorithm == "push" or collective in ALWAYS_PUSH:
        each = {"reduce_scatter": b // g, "all_to_all": b // g, "scatter": b // g}.get(collective, b)
        messages = (g - 1) if collective in ROOTED else g * (g - 1)
        return messages, messages * each
    return {
        "all_gather": (g * (g - 1), g * (g - 1) * b),
        "all_reduce": (2 * g * (g - 1), 2 * (g - 1) * b),
        "reduce_scatter": (g * (g - 1), (g - 1) * b),
        "broadcast": (g - 1, (g - 1) * b),
        "gather": (g * (g - 1) // 2, g * (g - 1) // 2 * b),
        "scatter": (g * (g - 1) // 2, g * (g - 1) // 2 * (b // g)),
    }[collective]


@pytest.mark.parametrize(("collective", "algorithm", "size", "root"), CASES)
def test_messages_and_bytes_are_the_closed_forms(collective, algorithm, size, root):
    given = [ArraySpec((size * 3, 2), "F32")] * size
    found = count_traffic(collective, algorithm, given, dim=0, root=root)
    total = sum(found, Traffic())
    assert (total.sent_messages, total.sent_nbytes) == closed_form(collective, algorithm, size, given[0].nbytes)
    assert (total.sent_messages, total.sent_nbytes) == (total.received_messages, total.received_nbytes)
