"""The proof against enumeration: every element of every nest counted one by one."""

import math
import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.engine_cases import Integer, box_nest, cut_boxes, pairs_of, shuffled
from tests.sampled import count_of
from xrank.errors import LayoutError
from xrank.layout import coverage
from xrank.layout.coverage import CoverageFault, contains, destination_keys, find_fault, range_text
from xrank.layout.nest_table import NestTable
from xrank.layout.nests import Nest, canonical, restrict, size

pytestmark = pytest.mark.quick


def counted(nests: list[Nest], num_elements: int) -> tuple[str, int] | None:
    """Return kind and address of the first element that is not there once, by counting all."""
    ys = np.concatenate([np.zeros(0, dtype=np.int64), *(pairs_of(nest)[1] for nest in nests)])
    if len(ys) and ys.min() < 0:
        return "outside", int(ys.min())
    if len(ys) and ys.max() >= num_elements:
        return "outside", int(ys.max())
    counts = np.bincount(ys, minlength=num_elements)
    wrong = np.flatnonzero(counts != 1)
    return ("overlap" if counts[wrong[0]] else "gap", int(wrong[0])) if len(wrong) else None


def found(nests: list[Nest], num_elements: int) -> tuple[str, int] | None:
    fault = find_fault(NestTable.from_nests(nests), num_elements)
    return None if fault is None else (fault.kind, fault.address)


def box_partition(integer: Integer) -> tuple[list[Nest], int]:
    """Return nests that cover a random shape exactly once: boxes, some of them cut again by flat ranges."""
    shape = [integer(1, 6) for _ in range(integer(0, 4))]
    nests = []
    for box in cut_boxes(integer, shape, integer(0, 7)):
        nest = box_nest(box, shape)
        if size(nest) > 1 and integer(0, 3) == 0:
            at = integer(1, size(nest) - 1)
            nests += restrict(nest, 0, at) + restrict(nest, at, size(nest))
        else:
            nests.append(nest)
    return nests, math.prod(shape)


def stride_partition(integer: Integer) -> tuple[list[Nest], int]:
    """Return nests that cover a row exactly once: cut in two, or dealt out by 2, 3 or 5, so that no chain exists."""
    num_elements = integer(1, 60)
    runs = [(0, num_elements, 1)]
    for _ in range(integer(0, 4)):
        start, count, stride = runs.pop(integer(0, len(runs) - 1))
        ways = (1, 2, 3, 5)[integer(0, 3)]
        if count < max(ways, 2):
            runs.append((start, count, stride))
        elif ways == 1:
            at = integer(1, count - 1)
            runs += [(start, at, stride), (start + at * stride, count - at, stride)]
        else:
            runs += [(start + i * stride, -(-(count - i) // ways), stride * ways) for i in range(ways)]
    return [canonical(Nest(0, start, ((count, 1, stride),))) for start, count, stride in runs], num_elements


def plant_fault(integer: Integer, nests: list[Nest]) -> list[Nest]:
    """Remove, double, shift, stretch or shorten one nest; the result may by chance still be right."""
    nests = list(nests)
    at = integer(0, len(nests) - 1)
    nest = nests.pop(at)
    match integer(0, 5):
        case 0:
            pass
        case 1:
            nests += [nest, nest]
        case 2 | 3:
            nests.append(nest._replace(y=nest.y + (-1, 1, 2, 7)[integer(0, 3)]))
        case _ if nest.loops:
            k = integer(0, len(nest.loops) - 1)
            n, xs, ys = nest.loops[k]
            loops = (*nest.loops[:k], (n + (1, -1)[integer(0, 1)], xs, ys), *nest.loops[k + 1 :])
            nests.append(nest._replace(loops=loops))
    return shuffled(integer, nests)


@pytest.mark.parametrize("partition", [box_partition, stride_partition])
def test_thousands_of_planted_faults_are_found_at_their_first_element(partition):
    rng = random.Random(20261102)
    planted = 0
    while planted < count_of(5_500):
        nests, num_elements = partition(rng.randint)
        broken = plant_fault(rng.randint, nests)
        expected = counted(broken, num_elements)
        assert found(broken, num_elements) == expected, (num_elements, broken)
        planted += expected is not None


@pytest.mark.parametrize("partition", [box_partition, stride_partition])
def test_what_covers_once_is_never_refused(partition):
    rng = random.Random(20261103)
    for _ in range(count_of(1_500)):
        nests, num_elements = partition(rng.randint)
        assert counted(nests, num_elements) is None
        assert find_fault(NestTable.from_nests(shuffled(rng.randint, nests)), num_elements) is None, (
            num_elements,
            nests,
        )


def test_arbitrary_nests_that_cover_nothing_in_particular():
    """Some of them meet themselves: their strides are less than the span within."""
    rng = random.Random(20261104)
    kinds = defaultdict(int)
    for _ in range(3_000):
        num_elements, nests = rng.choice([10, 40, 4000]), []
        for _ in range(rng.randint(1, 4)):
            loops, span = [], 1
            for _ in range(rng.randint(0, 3)):
                stride, n = rng.choice([span, span, span + 1, 2 * span, 3 * span, 2, 5]), rng.choice([2, 3, 4, 12])
                loops.insert(0, (n, stride, stride))
                span += (n - 1) * stride
            nests.append(Nest(0, rng.choice([0, 1, 2, 9]), tuple(shuffled(rng.randint, loops))))
        expected = counted(nests, num_elements)
        assert found(nests, num_elements) == expected, (num_elements, nests)
        kinds[expected and expected[0]] += 1
    assert min(kinds[kind] for kind in ("gap", "overlap", "outside")) > 200, kinds


@given(st.data())
@settings(max_examples=count_of(150), deadline=None)
def test_faults_that_hypothesis_makes(data):
    def integer(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    nests, num_elements = data.draw(st.sampled_from([box_partition, stride_partition]))(integer)
    assert found(nests, num_elements) is None
    broken = plant_fault(integer, nests)
    assert found(broken, num_elements) == counted(broken, num_elements)


def pinwheel(scale: int) -> list[tuple[tuple[int, int], ...]]:
    """Return five boxes of a square of 3 x scale that no cut through the whole separates."""
    a, b, c = scale, 2 * scale, 3 * scale
    return [((0, a), (0, b)), ((0, b), (b, c)), ((b, c), (a, c)), ((a, c), (0, a)), ((a, b), (a, b))]


@pytest.mark.parametrize("depth", [1, 4])
def test_pinwheels(depth):
    shape = (6, 6, depth)
    nests = [box_nest((*box, (0, depth)), shape) for box in pinwheel(2)]
    assert found(nests, 36 * depth) is None
    for i in range(5):
        without = nests[:i] + nests[i + 1 :]
        assert found(without, 36 * depth) == counted(without, 36 * depth)
        assert found([*nests, nests[i]], 36 * depth) == ("overlap", nests[i].y)


def test_the_first_fault_counts_whatever_follows():
    rows = [Nest(0, start, ((10, 1, 1),)) for start in (0, 10, 20, 20, 40)]
    assert find_fault(NestTable.from_nests(rows), 50) == CoverageFault("overlap", 20)
    assert find_fault(NestTable.from_nests(rows[:1] + rows[2:]), 50) == CoverageFault("gap", 10)
    assert find_fault(NestTable.from_nests([*rows, Nest(0, 49, ((3, 1, 1),))]), 50) == CoverageFault("outside", 51)
    assert find_fault(NestTable.from_nests([*rows, Nest(0, -3, ((2, 1, 1),))]), 50) == CoverageFault("outside", -3)


def test_a_gap_and_an_overlap_of_one_size_do_not_cancel():
    columns = [box_nest(((0, 4), (low, low + 2)), (4, 6)) for low in (0, 2, 2)]
    assert found(columns, 24) == ("overlap", 2)


def test_empty_tensors_and_scalars():
    nothing, one = NestTable.from_nests([]), NestTable.from_nests([Nest(0, 0)])
    assert find_fault(nothing, 0) is None
    assert find_fault(nothing, 1) == find_fault(nothing, 7) == CoverageFault("gap", 0)
    assert find_fault(one, 1) is None
    assert find_fault(one, 0) == CoverageFault("outside", 0)
    assert find_fault(NestTable.from_nests([Nest(0, 0), Nest(5, 0)]), 1) == CoverageFault("overlap", 0)


def test_real_sizes_are_proven_without_a_grid():
    columns = [box_nest(((0, 1 << 20), (i * 100, (i + 1) * 100)), (1 << 20, 1600)) for i in range(16)]
    flat = [piece for nest in columns for at in (0, 50_000_003) for piece in restrict(nest, at, at + 50_000_003)]
    flat += [piece for nest in columns for piece in restrict(nest, 100_000_006, size(nest))]
    assert found(flat, 1600 << 20) is None
    assert found(flat[1:], 1600 << 20) == ("gap", 0)
    assert found(flat[:-1], 1600 << 20) == ("gap", flat[-1].y)


def test_more_boxes_than_the_limit_are_refused_before_they_are_made():
    count = coverage.MAX_BOXES + 1
    by_three, by_two = Nest(0, 0, ((count, 1, 3),)), Nest(0, 1, ((count, 1, 2),))
    with pytest.raises(LayoutError, match="too many boxes") as caught:
        find_fault(NestTable.from_nests([by_three, by_two]), 3 * count)
    assert f"{coverage.MAX_BOXES:,}" in caught.value.want


def test_boxes_made_by_carrying_count_too(monkeypatch):
    monkeypatch.setattr(coverage, "MAX_BOXES", 7)
    runs = [Nest(0, 0, ((333, 1, 1),)), Nest(0, 333, ((334, 1, 1),)), Nest(0, 667, ((333, 1, 1),))]
    assert found(runs, 1000) is None
    columns = Nest(0, 5, ((9, 10, 10), (2, 1, 1)))  # brings the stride 10: the runs become 2, 3 and 2 boxes
    with pytest.raises(LayoutError, match="too many boxes") as caught:
        find_fault(NestTable.from_nests([*runs, columns]), 1000)
    assert caught.value.got == "8 boxes"


def test_a_tensor_whose_corners_have_no_numbers_is_refused():
    shape = (2,) * 41
    boxes, rest = [], ((0, 2),) * 41
    for dim in reversed(range(41)):  # innermost first, so that no box is a flat range
        boxes.append((*rest[:dim], (0, 1), *rest[dim + 1 :]))
        rest = (*rest[:dim], (1, 2), *rest[dim + 1 :])
    with pytest.raises(LayoutError, match="too large"):
        find_fault(NestTable.from_nests([box_nest(box, shape) for box in [*boxes, rest]]), 1 << 41)


def nested_destination(integer: Integer) -> Nest:
    """Return a nest with nested y loops in random order, whole runs split in two loops by chance, x of no meaning."""
    loops, span = [], 1
    for _ in range(integer(0, 3)):
        n, stride = integer(1, 4), span + integer(0, 1)
        span += (n - 1) * stride
        if n == 4 and integer(0, 1):
            loops += [(2, integer(1, 9), stride), (2, integer(1, 9), 2 * stride)]
        else:
            loops.append((n, integer(1, 9), stride))
    return Nest(integer(0, 9), integer(0, 1), tuple(shuffled(integer, loops)))


def test_destination_keys_are_equal_if_and_only_if_the_destinations_are():
    rng = random.Random(20261105)
    nests = [nested_destination(rng.randint) for _ in range(4_000)]
    by_destination, by_key = defaultdict(list), defaultdict(list)
    for i, (nest, key) in enumerate(zip(nests, destination_keys(NestTable.from_nests(nests)).tolist(), strict=True)):
        by_destination[tuple(sorted(pairs_of(nest)[1].tolist()))].append(i)
        by_key[tuple(key)].append(i)
    assert sorted(by_destination.values()) == sorted(by_key.values())
    assert 100 < len(by_key) < 2_000


def test_destination_keys_of_no_nests():
    assert len(destination_keys(NestTable.from_nests([]))) == 0


@given(st.data())
@settings(deadline=None)
def test_contains_is_membership(data):
    nest = nested_destination(lambda low, high: data.draw(st.integers(low, high)))
    nest = nest._replace(loops=tuple(loop for loop in nest.loops if loop[0] > 1))
    ys = set(pairs_of(nest)[1].tolist())
    assert {y for y in range(-2, max(ys) + 3) if contains(nest, y)} == ys


@pytest.mark.parametrize(
    ("shape", "first", "last", "text"),
    [
        ((), 0, 0, "the whole tensor"),
        ((0, 3), 0, 0, "the whole tensor"),
        ((4, 3), 0, 11, "the whole tensor"),
        ((4, 3), 3, 8, "rows 1-2"),
        ((4, 3), 9, 11, "rows 3-3"),
        ((7,), 2, 4, "elements 2-4"),
        ((4, 3), 4, 4, "element [1, 1]"),
        ((4, 3), 4, 7, "elements [1, 1] to [2, 1]"),
        ((2, 2, 5), 10, 19, "rows 1-1"),
    ],
)
def test_range_text(shape, first, last, text):
    assert range_text(shape, first, last) == text
