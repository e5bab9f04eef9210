"""Low-rank updates: each element once, in one order of sums, wherever a stretch begins."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from xrank.engine.casts import _BLOCK, CastOverflowError, Factors, LowRank, _blocks, add_low_rank, read_factors

NAMES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def data(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def factors(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    *,
    turned: bool = False,
    kind: str = "F32",
    blocks: int = 1,
    start: int = 0,
) -> Factors:
    name = {value: key for key, value in NAMES.items()}[a.dtype]
    update = LowRank("a", "b", scale, turned, blocks, start)
    return read_factors(data(a), name, data(b), name, len(a), update, kind=kind)


def test_blocks_follow_one_another_and_cover_each_element_once() -> None:
    choose = random.Random(3)
    for _ in range(300):
        columns = choose.choice([1, 2, 7, 100, _BLOCK - 1, _BLOCK, _BLOCK + 1, 3 * _BLOCK])
        rows = choose.randint(1, max(1, 3 * _BLOCK // columns + 3))
        height = choose.randint(1, rows)
        low = choose.randrange(rows * columns)
        count = choose.randint(0, rows * columns - low)
        at = 0
        for start, row, num_rows, column, num_columns in _blocks(low, count, height, columns):
            assert start == at and 0 < num_rows * num_columns <= _BLOCK
            assert row * columns + column == low + start and column + num_columns <= columns
            assert num_rows == 1 or (column, num_columns) == (0, columns)
            assert row // height == (row + num_rows - 1) // height
            at += num_rows * num_columns
        assert at == count


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("stored", "target"), [("F32", "BF16"), ("BF16", "BF16"), ("F16", "F32"), ("F64", "F64")])
def test_any_stretch_has_the_same_bits_as_the_whole(stored: str, target: str, turned: bool) -> None:
    made = torch.Generator().manual_seed(7)
    rows, columns, rank = 90, 1000, 5
    weight = torch.randn(rows, columns, generator=made).to(NAMES[stored])
    a = torch.randn(rank, rows if turned else columns, generator=made)
    b = torch.randn(columns if turned else rows, rank, generator=made)
    wide = torch.float64 if stored == "F64" else torch.float32
    left, right = (a.T, b.T) if turned else (b, a)
    total = sum(left[:, k : k + 1].to(wide) * right[k].to(wide) for k in range(rank))
    expected = (weight.to(wide) + total * 0.3).to(NAMES[target])
    both = factors(a, b, 0.3, turned=turned, kind="F64" if stored == "F64" else "F32")
    for low, high in [(0, 90_000), (1, 89_999), (999, 1001), (5_500, 5_501), (33_333, 77_777)]:
        found = torch.empty(high - low, dtype=NAMES[target])
        add_low_rank(data(weight.reshape(-1)[low:high]), stored, both, low, data(found), target)
        assert torch.equal(found, expected.reshape(-1)[low:high]), (low, high)


@pytest.mark.parametrize("turned", [False, True])
def test_experts_and_parts_of_them(turned: bool) -> None:
    """As PEFT's ParamWrapper multiplies: A has the rows of one expert after the other, B a column of each expert."""
    made = torch.Generator().manual_seed(13)
    experts, rows, columns, rank = 3, 40, 900, 4
    a = torch.randint(-8, 9, (experts * rank, rows if turned else columns), generator=made) / 8
    b = torch.randint(-8, 9, (columns if turned else rows, rank * experts), generator=made) / 8
    weight = torch.randn(experts, rows, columns, generator=made)
    apart = b.reshape(len(b), rank, experts), a.reshape(experts, rank, a.shape[1])
    delta = torch.einsum("ore,eri->eio" if turned else "ore,eri->eoi", *apart)
    expected = (weight + 0.5 * delta).reshape(-1)
    for start, stop in [(0, weight.numel()), (rows * columns, 2 * rows * columns), (12_345, 80_001)]:
        both = factors(a, b, 0.5, turned=turned, blocks=experts, start=start)
        found = torch.empty(stop - start)
        add_low_rank(data(weight.reshape(-1)[start:stop]), "F32", both, 0, data(found), "F32")
        assert torch.equal(found, expected[start:stop]), (start, stop)


def test_sums_that_are_exact_are_those_of_a_matrix_product() -> None:
    made = torch.Generator().manual_seed(11)
    a, b = (torch.randint(-8, 9, shape, generator=made) / 8 for shape in ((16, 48), (64, 16)))
    weight = torch.randn(64, 48, generator=made).bfloat16()
    found = torch.empty(64, 48, dtype=torch.bfloat16)
    add_low_rank(data(weight), "BF16", factors(a, b, 2.0), 0, data(found), "BF16")
    assert torch.equal(found, (weight.float() + 2.0 * (b @ a)).bfloat16())


def test_a_sum_too_large_for_its_type_is_refused() -> None:
    weight, one = torch.full((2, 2), 60_000.0, dtype=torch.float16), torch.ones(1, 2)
    found = torch.empty(2, 2, dtype=torch.float16)
    with pytest.raises(CastOverflowError):
        add_low_rank(data(weight), "F16", factors(one, one.T, 9_000.0), 0, data(found), "F16")
    assert np.isfinite(weight.numpy()).all()
