"""Who makes which window of a model in ranks' memories: who holds it, and all as many."""

import random

import numpy as np
import pytest

from tests.engine.engine_cases import MadeModel, box_nest, lay_out, outputs_of
from xrank.engine import windows
from xrank.engine.planner import make_plan
from xrank.engine.rounds import assign_makers

WINDOW = 512


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(windows, "WINDOW_NBYTES", WINDOW)


def makers_of(tensors, num_ranks):
    """Return who makes each window of one file, and how many bytes each rank holds of each window.

    `tensors` are (shape, boxes); a box is (rank, its range in each dim). Elements are bytes.
    """
    made, holder = MadeModel(), []
    for number, (shape, boxes) in enumerate(tensors):
        whole = np.frombuffer(random.Random(number).randbytes(int(np.prod(shape))), np.uint8)
        made.add(f"t{number}", "U8", shape, whole, [(rank, [box_nest(box, shape)]) for rank, box in boxes])
        holder += [rank for rank, _ in boxes]
    plan = make_plan(made.in_memory(), lay_out(outputs_of(made), 1, 0))
    file = plan.files[0]
    count = -(-file.output.nbytes // WINDOW)
    held = np.zeros((count, num_ranks), np.int64)
    for tensor in file.tensors:
        for copies in (tensor.copies, tensor.replicas):
            for row in range(len(copies)):
                elements = np.zeros(count * WINDOW, np.int64)
                nest = copies.nests[row]
                y = np.array(nest.y)
                for n, _, ys in nest.loops:
                    y = y[..., None] + np.arange(n) * ys
                elements[tensor.output.offset + y.ravel()] = 1
                held[:, holder[copies.record[row]]] += elements.reshape(count, WINDOW).sum(axis=1)
    return assign_makers([file], [0, count], np.array(holder, np.int64), num_ranks), held


def rows(shape, num_ranks, ranks=None):
    step = shape[0] // num_ranks
    return [((ranks or range(num_ranks))[i], ((i * step, (i + 1) * step), (0, shape[1]))) for i in range(num_ranks)]


def columns(shape, num_ranks):
    step = shape[1] // num_ranks
    return [(i, ((0, shape[0]), (i * step, (i + 1) * step))) for i in range(num_ranks)]


def runs(makers):
    return 1 + int(np.count_nonzero(np.diff(makers)))


def test_a_rank_makes_the_rows_that_it_holds():
    makers, held = makers_of([((64, 256), rows((64, 256), 4)), ((128, 128), rows((128, 128), 4))], 4)
    assert makers.tolist() == held.argmax(axis=1).tolist()
    assert np.bincount(makers).tolist() == [16] * 4 and runs(makers) == 8


def test_windows_that_all_hold_alike_are_shared_out_in_stretches():
    makers, _ = makers_of([((64, 512), columns((64, 512), 4))], 4)
    assert max(np.bincount(makers)) <= 17 and runs(makers) <= 6


def test_every_replica_is_near():
    shape, whole = (64, 256), ((0, 64), (0, 256))
    makers, held = makers_of([(shape, [(0, whole), (1, whole), (3, whole)])], 4)
    counts = np.bincount(makers, minlength=4)
    assert counts.max() <= 9 and counts.min() >= 5 and held[:, 2].sum() == 0
    twice = [*rows(shape, 2, (0, 1)), *rows(shape, 2, (2, 3))]
    makers, held = makers_of([(shape, twice)], 4)
    assert np.bincount(makers).tolist() == [8] * 4
    assert (held[np.arange(len(makers)), makers] == WINDOW).all()


def test_who_holds_too_much_gives_to_who_holds_little():
    shape = (64, 256)
    makers, held = makers_of([(shape, [(0, ((0, 48), (0, 256))), (1, ((48, 64), (0, 256)))])], 4)
    counts = np.bincount(makers, minlength=4)
    assert counts.max() <= 9 and counts.min() >= 7
    # What they make themselves they hold, and what the others make is in one stretch each.
    near = held[np.arange(len(makers)), makers] > 0
    assert near[makers < 2].all() and runs(makers) <= 6


def test_thin_slices_are_near_to_nobody(monkeypatch):
    monkeypatch.setattr("xrank.engine.rounds._MOST_PLACES", 10)
    makers, _ = makers_of([((64, 512), columns((64, 512), 4))], 4)
    assert np.bincount(makers).tolist() == [16] * 4


def test_random_cuts_are_evenly_shared():
    rng = random.Random(20261124)
    for _ in range(100):
        num_ranks = rng.randint(1, 6)
        tensors = []
        for _ in range(rng.randint(1, 5)):
            shape = (rng.randint(1, 60), rng.randint(1, 300))
            at = rng.randint(0, shape[0])
            both = ((0, at), (0, shape[1])), ((at, shape[0]), (0, shape[1]))
            tensors.append((shape, [(rng.randrange(num_ranks), box) for box in both if box[0][0] < box[0][1]]))
        makers, _ = makers_of(tensors, num_ranks)
        assert makers.min() >= 0 and np.bincount(makers).max() <= -(-105 * len(makers) // (100 * num_ranks))


def test_no_file_has_no_maker():
    assert len(assign_makers([], [0], np.empty(0, np.int64), 3)) == 0
