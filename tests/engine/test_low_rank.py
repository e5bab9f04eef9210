"""Low-rank updates: each element once, in one order of sums, wherever a stretch begins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from xrank.engine.casts import CastOverflowError, Factors, LowRank, add_low_rank, read_factors

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


def test_a_sum_too_large_for_its_type_is_refused() -> None:
    weight, one = torch.full((2, 2), 60_000.0, dtype=torch.float16), torch.ones(1, 2)
    found = torch.empty(2, 2, dtype=torch.float16)
    with pytest.raises(CastOverflowError):
        add_low_rank(data(weight), "F16", factors(one, one.T, 9_000.0), 0, data(found), "F16")
    assert np.isfinite(weight.numpy()).all()
