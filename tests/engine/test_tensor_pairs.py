"""Pairs of tensors: equal stretches of both plans, all of a tensor in order, whatever its size."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from xrank.engine.executor import Budget, CancelledError
from xrank.engine.planner import make_plan
from xrank.engine.sources import open_source
from xrank.engine.tensor_pairs import TensorSide, read_pairs
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.recipes.sources import read_source

MIB = 1 << 20
SIZES = (0, 1, 7, 4096, MIB, MIB + 1, 3 * MIB, 0, 5, 4 * MIB + 3, 9 * MIB, 2)
BUDGET = Budget.from_memory(16_000_000, 3)


@pytest.fixture
def sides(tmp_path: Path):
    """Two files, of which one has the complement of the other's bytes."""
    values = [np.random.default_rng(n).integers(0, 256, size, np.uint8) for n, size in enumerate(SIZES)]
    with ExitStack() as stack:
        made = []
        for flip in (0, 255):
            path = tmp_path / str(flip) / "model.safetensors"
            path.parent.mkdir()
            save_file({f"t{n}": value ^ np.uint8(flip) for n, value in enumerate(values)}, path)
            model = read_source(str(path.parent)).model
            outputs = [OutputTensor(f"t{n}", "U8", (size,)) for n, size in enumerate(SIZES)]
            source = stack.enter_context(closing(open_source(model)))
            made.append(TensorSide(make_plan(model, [OutputFile.bare(one) for one in outputs]), source))
        yield values, (made[0], made[1])


def test_all_bytes_of_both_in_order(sides):
    values, pair = sides
    found = {n: [bytearray(), bytearray()] for n in range(len(SIZES))}
    progress: list[int] = []

    def take(number, low, mine, other):
        assert low == len(found[number][0])
        found[number][0] += mine.tobytes()
        found[number][1] += other.tobytes()

    numbers = [n for n in range(len(SIZES)) if n != 6]
    read_pairs(pair, numbers, BUDGET, take, progress=progress.append)
    for n in numbers:
        assert found[n] == [values[n].tobytes(), (~values[n]).tobytes()], SIZES[n]
    assert not found[6][0]
    assert sum(progress) == sum(SIZES) - SIZES[6]


def test_a_tensor_without_bytes_comes_once(sides):
    taken = []
    read_pairs(sides[1], [0, 7], BUDGET, lambda number, low, mine, other: taken.append((number, low, len(mine))))
    assert sorted(taken) == [(0, 0, 0), (7, 0, 0)]


def test_the_first_failure_is_raised_and_all_threads_end(sides):
    def take(number, low, mine, other):
        raise RuntimeError(f"tensor {number}")

    with pytest.raises(RuntimeError, match="tensor"):
        read_pairs(sides[1], range(len(SIZES)), BUDGET, take)


def test_cancelled(sides):
    with pytest.raises(CancelledError):
        read_pairs(sides[1], [10], BUDGET, lambda *_: None, cancelled=lambda: True)
